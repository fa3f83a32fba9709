/* scalar_int.h: the scalar kernels on int8 and int4 weights; scalar.c includes it once. */

enum { MAX_GROUP = PDS_I8_GROUP };

static uint32_t int_group(int bits) {
  return bits == 8 ? PDS_I8_GROUP : PDS_I4_GROUP;
}

/* The weight of column j at k, times its group's scale. */
static int32_t int_weight(const unsigned char *panel, uint32_t k, uint32_t j, int bits) {
  if (bits == 8) return ((const int8_t *)panel)[k / 4 * 64 + j * 4 + k % 4];
  const unsigned char pair = panel[k / 8 * 64 + j * 4 + k % 4];
  return (k % 8 < 4 ? pair & 15 : pair >> 4) - 8;
}

/* sum[rows][16] = x W^T for one panel; x[i]: a row of quantise. */
static void int_panel(const unsigned char *const *x, uint32_t rows, uint32_t k_end,
                      const unsigned char *panel, float sum[ROWS][PDS_LANES], int bits) {
  const uint32_t group = int_group(bits);
  const uint16_t *scale = (const uint16_t *)(panel + (size_t)k_end * (uint32_t)bits * 2);
  memset(sum, 0, ROWS * sizeof *sum);
  for (uint32_t g = 0; g < k_end / group; g++, scale += PDS_LANES) {
    int32_t w[PDS_LANES][MAX_GROUP];
    for (uint32_t j = 0; j < PDS_LANES; j++) {
      for (uint32_t k = 0; k < group; k++) w[j][k] = int_weight(panel, g * group + k, j, bits);
    }
    for (uint32_t i = 0; i < rows; i++) {
      const int8_t *q = (const int8_t *)x[i] + g * group;
      const float x_scale = ((const float *)(x[i] + k_end))[g];
      for (uint32_t j = 0; j < PDS_LANES; j++) {
        int32_t dot = 0;
        for (uint32_t k = 0; k < group; k++) dot += w[j][k] * q[k];
        sum[i][j] = fmaf((float)dot, widen(scale[j]) * x_scale, sum[i][j]);
      }
    }
  }
}

static uint32_t int_rows(const pds_gemm *g, uint32_t first, const unsigned char **x) {
  const uint32_t rows = g->rows - first < ROWS ? g->rows - first : ROWS;
  for (uint32_t i = 0; i < rows; i++) {
    const size_t row = g->x_index ? (uint32_t)g->x_index[first + i] / g->x_div : first + i;
    x[i] = (const unsigned char *)g->x + row * g->x_stride;
  }
  return rows;
}

static void int_gemm(const pds_gemm *g, int bits) {
  const unsigned char *x[ROWS] = {0};
  float sum[ROWS][PDS_LANES];
  for (uint32_t col = 0; col < g->cols; col += PDS_LANES) {
    const unsigned char *panel = (const unsigned char *)g->w + (col / PDS_LANES) * g->panel_stride;
    const uint32_t n = g->cols - col < PDS_LANES ? g->cols - col : PDS_LANES;
    for (uint32_t first = 0; first < g->rows; first += ROWS) {
      const uint32_t rows = int_rows(g, first, x);
      int_panel(x, rows, g->k, panel, sum, bits);
      for (uint32_t i = 0; i < rows; i++) {
        for (uint32_t j = 0; j < n; j++) {
          const size_t at = bf16_y_row(g, first + i) + col + j;
          const float v = g->bias ? sum[i][j] + g->bias[col + j] : sum[i][j];
          if (g->out == PDS_OUT_ACT) {
            ((uint16_t *)g->y)[at] = narrow(v);
          } else if (g->out == PDS_OUT_ADD) {
            ((float *)g->y)[at] += v;
          } else {
            ((float *)g->y)[at] = v;
          }
        }
      }
    }
  }
  if (g->out == PDS_OUT_ACT) bf16_zero_pad(g);
}

static void int_swiglu(const pds_gemm *g, int bits) {
  const unsigned char *x[ROWS] = {0};
  float gate[ROWS][PDS_LANES], up[ROWS][PDS_LANES];
  for (uint32_t col = 0; col < g->cols; col += PDS_LANES) {
    const unsigned char *panel =
        (const unsigned char *)g->w + (col / PDS_LANES) * 2 * g->panel_stride;
    const uint32_t n = g->cols - col < PDS_LANES ? g->cols - col : PDS_LANES;
    for (uint32_t first = 0; first < g->rows; first += ROWS) {
      const uint32_t rows = int_rows(g, first, x);
      int_panel(x, rows, g->k, panel, gate, bits);
      int_panel(x, rows, g->k, panel + g->panel_stride, up, bits);
      for (uint32_t i = 0; i < rows; i++) {
        uint16_t *y = (uint16_t *)g->y + bf16_y_row(g, first + i) + col;
        for (uint32_t j = 0; j < n; j++) y[j] = narrow(silu(gate[i][j]) * up[i][j]);
      }
    }
  }
  bf16_zero_pad(g);
}

static void int_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y, int bits) {
  const uint32_t group = int_group(bits), groups = k / group;
  int8_t *q = y;
  float *scale = (float *)(q + k);
  int32_t *base = (int32_t *)(scale + groups);
  for (uint32_t g = 0; g < groups; g++) {
    float most = 0, odd = 0;
    int32_t total = 0;
    for (uint32_t i = g * group; i < (g + 1) * group && i < n; i++) {
      const float v = widen(x[i]);
      most = fabsf(v) > most ? fabsf(v) : most;
      odd += v * 0; /* NaN if v is NaN or Inf */
    }
    const float inverse = most >= PDS_QUANT_TINY ? 127.0f / most : 0;
    scale[g] = (most >= PDS_QUANT_TINY ? most * (1.0f / 127.0f) : 0) + odd;
    for (uint32_t i = g * group; i < (g + 1) * group; i++) {
      const float v = i < n && odd == 0 ? widen(x[i]) : 0;
      q[i] = (int8_t)rintf(v * inverse);
      total += q[i];
    }
    base[g] = -total * (bits == 8 ? 128 : 8);
  }
}

static void i8_gemm(const pds_gemm *g) {
  int_gemm(g, 8);
}
static void i8_swiglu(const pds_gemm *g) {
  int_swiglu(g, 8);
}
static void i8_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y) {
  int_quantise(x, n, k, y, 8);
}
static void i4_gemm(const pds_gemm *g) {
  int_gemm(g, 4);
}
static void i4_swiglu(const pds_gemm *g) {
  int_swiglu(g, 4);
}
static void i4_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y) {
  int_quantise(x, n, k, y, 4);
}
