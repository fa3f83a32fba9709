/* scalar_act.h: the scalar kernels that depend on the act dtype. No include guard: scalar.c
 * includes it with ACT f32 and with ACT bf16. */

/* Rows first.. of x that one pass takes: their pointers and their number. */
static uint32_t T(rows)(const pds_gemm *g, uint32_t first, const T(elt) * *x) {
  const uint32_t rows = g->rows - first < ROWS ? g->rows - first : ROWS;
  for (uint32_t i = 0; i < rows; i++) {
    const size_t row = g->x_index ? (uint32_t)g->x_index[first + i] / g->x_div : first + i;
    x[i] = (const T(elt) *)g->x + row * g->x_stride;
  }
  return rows;
}

static size_t T(y_row)(const pds_gemm *g, uint32_t i) {
  return (g->y_index ? (size_t)g->y_index[i] : i) * g->y_stride;
}

static void T(zero_pad)(const pds_gemm *g) {
  for (uint32_t i = 0; i < g->rows; i++) {
    for (uint32_t j = g->cols; j < g->pad; j++) ((T(elt) *)g->y)[T(y_row)(g, i) + j] = 0;
  }
}

static void T(gemm)(const pds_gemm *g) {
  const T(elt) * x[ROWS] = {0};
  float sum[ROWS][PDS_LANES];
  for (uint32_t col = 0; col < g->cols; col += PDS_LANES) {
    const unsigned char *panel = (const unsigned char *)g->w + (col / PDS_LANES) * g->panel_stride;
    const uint32_t n = g->cols - col < PDS_LANES ? g->cols - col : PDS_LANES;
    for (uint32_t first = 0; first < g->rows; first += ROWS) {
      const uint32_t rows = T(rows)(g, first, x);
      T(panel)(x, rows, g->k, panel, sum);
      for (uint32_t i = 0; i < rows; i++) {
        for (uint32_t j = 0; j < n; j++) {
          const size_t at = T(y_row)(g, first + i) + col + j;
          const float v = g->bias ? sum[i][j] + g->bias[col + j] : sum[i][j];
          if (g->out == PDS_OUT_ACT) {
            ((T(elt) *)g->y)[at] = T(round)(v);
          } else if (g->out == PDS_OUT_ADD) {
            ((float *)g->y)[at] += v;
          } else {
            ((float *)g->y)[at] = v;
          }
        }
      }
    }
  }
  if (g->out == PDS_OUT_ACT) T(zero_pad)(g);
}

static void T(swiglu)(const pds_gemm *g) {
  const T(elt) * x[ROWS] = {0};
  float gate[ROWS][PDS_LANES], up[ROWS][PDS_LANES];
  for (uint32_t col = 0; col < g->cols; col += PDS_LANES) {
    const unsigned char *panel =
        (const unsigned char *)g->w + (col / PDS_LANES) * 2 * g->panel_stride;
    const uint32_t n = g->cols - col < PDS_LANES ? g->cols - col : PDS_LANES;
    for (uint32_t first = 0; first < g->rows; first += ROWS) {
      const uint32_t rows = T(rows)(g, first, x);
      T(panel)(x, rows, g->k, panel, gate);
      T(panel)(x, rows, g->k, panel + g->panel_stride, up);
      for (uint32_t i = 0; i < rows; i++) {
        T(elt) *y = (T(elt) *)g->y + T(y_row)(g, first + i) + col;
        for (uint32_t j = 0; j < n; j++) y[j] = T(round)(silu(gate[i][j]) * up[i][j]);
      }
    }
  }
  T(zero_pad)(g);
}

static void T(convert)(const float *x, void *y, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) ((T(elt) *)y)[i] = T(round)(x[i]);
}

static float T(softmax_block)(const float *s, uint32_t lo, uint32_t hi, float scale, float *m,
                              float *l, void *p) {
  float top = *m, sum = 0;
  for (uint32_t i = lo; i < hi; i++) top = s[i] * scale > top ? s[i] * scale : top;
  const float base =
      top == -INFINITY ? 0 : top; /* all scores -Inf: exp(-Inf - 0) = 0, where -Inf + Inf is NaN */
  const float factor = expf(*m - base);
  for (uint32_t i = 0; i < PDS_KEYS; i++) {
    const float e = i >= lo && i < hi ? expf(s[i] * scale - base) : 0;
    sum += e;
    ((T(elt) *)p)[i] = T(round)(e);
  }
  *l = *l * factor + sum;
  *m = top;
  return factor;
}
