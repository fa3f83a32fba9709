/* gemm.h: the GEMM driver around tile.h, instantiated by template.h. No include guard: TILE_ACT
 * is f32 or bf16 and T(name) has been defined there. Weights are stationary: each group of
 * panels passes over a chunk of rows of x that stays in the second-level cache. */

#ifndef TILE_NO_GEMM
typedef void (*T(tile_fn))(const unsigned char *const *x, const unsigned char *w,
                           size_t panel_stride, uint32_t words, size_t jump, size_t next,
                           float *acc, size_t acc_stride);

#define TILE(rows, panels)                                                                         \
  static void T(tile_##rows##x##panels)(const unsigned char *const *x, const unsigned char *w,     \
                                        size_t panel_stride, uint32_t words, size_t jump,          \
                                        size_t next, float *acc, size_t acc_stride) {              \
    T(tile)(x, w, panel_stride, words, jump, next, acc, acc_stride, rows, panels);                 \
  }
TILE(1, 1)
TILE(1, 2)
TILE(1, 4)
TILE(2, 1)
TILE(2, 2)
TILE(3, 1)
TILE(4, 1)
#if TILE_MANY /* 32 registers */
TILE(2, 4)
TILE(3, 2)
TILE(4, 2)
TILE(5, 1)
TILE(5, 2)
TILE(6, 1)
TILE(6, 2)
TILE(7, 1)
TILE(7, 2)
TILE(8, 1)
TILE(8, 2)
#endif
#undef TILE

/* [rows - 1][log2(panels)] */
static const T(tile_fn) T(tiles)[TILE_ROWS][3] = {
    {T(tile_1x1), T(tile_1x2), T(tile_1x4)},
#if TILE_MANY
    {T(tile_2x1), T(tile_2x2), T(tile_2x4)}, {T(tile_3x1), T(tile_3x2), 0},
    {T(tile_4x1), T(tile_4x2), 0},           {T(tile_5x1), T(tile_5x2), 0},
    {T(tile_6x1), T(tile_6x2), 0},           {T(tile_7x1), T(tile_7x2), 0},
    {T(tile_8x1), T(tile_8x2), 0},
#else
    {T(tile_2x1), T(tile_2x2), 0},
    {T(tile_3x1), 0, 0},
    {T(tile_4x1), 0, 0},
#endif
};
#endif

/* Columns [col, col + cols) of one output row from their sums. */
PDS_INLINE void T(finish)(const pds_gemm *g, const float *sum, size_t y_row, uint32_t col,
                          uint32_t cols) {
  for (uint32_t c = 0; c < cols; c += PDS_LANES) {
    uint32_t n = cols - c < PDS_LANES ? cols - c : PDS_LANES;
    size_t at = y_row * g->y_stride + col + c;
    v16 v = v16_load(sum + c);
    if (g->bias) v = v16_add(v, v16_load_n(g->bias + col + c, n));
    if (g->out == PDS_OUT_ACT) {
      T(store_n)((T(elt) *)g->y + at, v, n);
    } else {
      float *y = (float *)g->y + at;
      if (g->out == PDS_OUT_ADD) v = v16_add(v, v16_load_n(y, n));
      if (g->stream_y && n == PDS_LANES && (uintptr_t)y % 64 == 0) {
        v16_stream(y, v);
      } else {
        v16_store_n(y, v, n);
      }
    }
  }
}

PDS_INLINE void T(finish_swiglu)(const pds_gemm *g, const float *sum, size_t y_row, uint32_t col,
                                 uint32_t cols) {
  for (uint32_t c = 0; c < cols; c += PDS_LANES) {
    uint32_t n = cols - c < PDS_LANES ? cols - c : PDS_LANES;
    v16 gate = v16_load(sum + 2 * c), up = v16_load(sum + 2 * c + PDS_LANES);
    T(store_n)((T(elt) *)g->y + y_row * g->y_stride + col + c, v16_mul(v16_silu(gate), up), n);
  }
}

#ifndef TILE_NO_GEMM
PDS_INLINE void T(gemm_any)(const pds_gemm *g, const int swiglu) {
  enum { GROUP = 4 };
  const uint32_t per_panel =
      swiglu ? PDS_LANES / 2 : PDS_LANES; /* columns of y in one panel of W */
  const uint32_t panels = (swiglu ? 2 : 1) * ((g->cols + PDS_LANES - 1) / PDS_LANES);
  const uint32_t words = (uint32_t)((g->k * sizeof(T(elt)) + 3) / 4);
  const unsigned char *x[TILE_ROWS];
  float sum[TILE_ROWS][GROUP * PDS_LANES] __attribute__((aligned(64)));
  const uint32_t x_bytes = (g->l2_bytes ? g->l2_bytes : 512 * 1024) / 2; /* the rest: panels, y */
  uint32_t chunk = x_bytes / (words * 4 + 1) / TILE_ROWS * TILE_ROWS;
  if (chunk < 4 * TILE_ROWS) chunk = 4 * TILE_ROWS;

  for (uint32_t first = 0; first < g->rows; first += chunk) {
    const uint32_t last = g->rows - first < chunk ? g->rows : first + chunk;
    uint32_t width = GROUP;
    for (uint32_t p0 = 0; p0 < panels; p0 += width) {
      width = last - first <= 2 ? 4 : 2;
      if (width > panels - p0) width = panels - p0;
      const unsigned char *w = (const unsigned char *)g->w + (size_t)p0 * g->panel_stride;
      for (uint32_t i0 = first; i0 < last; i0 += TILE_ROWS) {
        const uint32_t rows = last - i0 < TILE_ROWS ? last - i0 : TILE_ROWS;
        for (uint32_t i = 0; i < rows; i++) {
          size_t row = g->x_index ? (uint32_t)g->x_index[i0 + i] / g->x_div : i0 + i;
          x[i] = (const unsigned char *)g->x + row * g->x_stride * sizeof(T(elt));
        }
        for (uint32_t p = 0; p < width;) {
          uint32_t step = TILE_PANELS(rows), log2 = step == 4 ? 2 : step == 2 ? 1 : 0;
          while (step > width - p) step >>= 1, log2--;
          const size_t jump = p0 + p + step < panels ? (step - 1) * g->panel_stride : 0;
          const int leaves = i0 + TILE_ROWS >= last && p0 + width + p + step <= panels;
          const size_t next = leaves ? width * g->panel_stride : 0;
          T(tiles)
          [rows - 1][log2](x, w + p *g->panel_stride, g->panel_stride, words, jump, next,
                           sum[0] + p *PDS_LANES, GROUP *PDS_LANES);
          p += step;
        }
        const uint32_t col = p0 * per_panel;
        const uint32_t cols = g->cols - col < width * per_panel ? g->cols - col : width * per_panel;
        for (uint32_t i = 0; i < rows; i++) {
          const size_t y_row = g->y_index ? (size_t)g->y_index[i0 + i] : i0 + i;
          if (swiglu) {
            T(finish_swiglu)(g, sum[i], y_row, col, cols);
          } else {
            T(finish)(g, sum[i], y_row, col, cols);
          }
          if (p0 + width == panels && g->pad > g->cols && (swiglu || g->out == PDS_OUT_ACT)) {
            memset((T(elt) *)g->y + y_row * g->y_stride + g->cols, 0,
                   (g->pad - g->cols) * sizeof(T(elt)));
          }
        }
      }
    }
  }
}

static void T(gemm)(const pds_gemm *g) {
  T(gemm_any)(g, 0);
  if (g->stream_y) v16_stream_end();
}
static void T(swiglu)(const pds_gemm *g) {
  T(gemm_any)(g, 1);
}
#endif

static void T(convert)(const float *x, void *y, uint32_t n) {
  T(elt) *out = y;
  uint32_t i = 0;
  for (; i + PDS_LANES <= n; i += PDS_LANES) T(store_n)(out + i, v16_load(x + i), PDS_LANES);
  if (i < n) T(store_n)(out + i, v16_load_n(x + i, n - i), n - i);
}

static float T(softmax_block)(const float *s, uint32_t lo, uint32_t hi, float scale, float *m,
                              float *l, void *p) {
  const float ninf = -__builtin_inff();
  v16 v[PDS_KEYS / PDS_LANES], top = v16_set1(ninf);
  const int whole = lo == 0 && hi == PDS_KEYS;
  PDS_UNROLL
  for (uint32_t i = 0; i < PDS_KEYS / PDS_LANES; i++) {
    const uint32_t at = i * PDS_LANES;
    v[i] = v16_mul(v16_load(s + at), v16_set1(scale));
    if (!whole) {
      v[i] = v16_range(v[i], lo > at ? lanes_at(at, lo) : 0, hi > at ? lanes_at(at, hi) : 0, ninf);
    }
    top = v16_max(top, v[i]);
  }
  const float block = v16_reduce_max(top);
  const float m_new = block > *m ? block : *m;
  const float base =
      m_new == ninf ? 0
                    : m_new; /* all scores -Inf: exp(-Inf - 0) = 0, where -Inf + Inf would be NaN */
  T(elt) *out = p;
  v16 sum = v16_set1(0);
  PDS_UNROLL
  for (uint32_t i = 0; i < PDS_KEYS / PDS_LANES; i++) v[i] = v16_exp(v16_sub(v[i], v16_set1(base)));
  PDS_UNROLL
  for (uint32_t i = 0; i < PDS_KEYS / PDS_LANES; i++) {
    sum = v16_add(sum, v[i]);
    T(store_n)(out + i * PDS_LANES, v[i], PDS_LANES);
  }
  float factor = 1;
  if (*m != base) {
    float e[PDS_LANES];
    v16_store(e, v16_exp(v16_set1(*m - base)));
    factor = e[0];
  }
  *l = *l * factor + v16_reduce_add(sum);
  *m = m_new;
  return factor;
}
