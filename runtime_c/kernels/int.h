/* int.h: the GEMMs on int8 and int4 weights, written once over the names of int_*.h; template.h
 * includes it behind gemm.h. No include guard. The numbers are those of kernels.h: exact integer
 * sums within a group, then one fused multiply-add a group, so every path gives the same bits. */

enum { INT_GROUP_PANELS = 4 }; /* panels that one pass takes over the rows */

PDS_INLINE uint32_t int_group(const int bits) {
  return bits == 8 ? PDS_I8_GROUP : PDS_I4_GROUP;
}

/* acc[rows][acc_stride] = x W^T for `rows` rows of quantise() and `panels` neighbouring panels,
 * all three constants after inlining. Weights are prefetched within their panel, and from there
 * on `jump` further: in the next pass's panels. */
PDS_INLINE void int_tile(const unsigned char *const *x, const unsigned char *w, size_t panel_stride,
                         uint32_t k, size_t jump, float *acc, const int bits, const int rows,
                         const int panels) {
  enum { AHEAD = 2048, SCALE_AHEAD = 256 };
  const uint32_t group = int_group(bits), groups = k / group;
  const uint32_t w_rows = group * (uint32_t)bits / 32; /* 64-byte rows of a group */
  const size_t w_bytes = (size_t)k * (uint32_t)bits * 2;
  const int nibbles = bits == 4;
  v16 sum[INT_ROWS][INT_GROUP_PANELS];
  PDS_UNROLL
  for (int i = 0; i < rows; i++) {
    PDS_UNROLL
    for (int p = 0; p < panels; p++) sum[i][p] = v16_set1(0);
  }
  for (uint32_t g = 0; g < groups; g++) {
    const size_t at = (size_t)g * w_rows * 64;
    const unsigned char *row = w + at;
    const size_t ahead = at + AHEAD < w_bytes ? AHEAD : AHEAD + jump;
    v16i dot[INT_ROWS][INT_GROUP_PANELS];
    PDS_UNROLL
    for (int i = 0; i < rows; i++) {
      const v16i base = v16i_set1(pds_load_word(x[i] + k + (size_t)(groups + g) * 4));
      PDS_UNROLL
      for (int p = 0; p < panels; p++) dot[i][p] = base;
    }
    const size_t x_at = (size_t)g * group;
    PDS_UNROLL_4
    for (uint32_t r = 0; r < w_rows; r++, row += 64) {
      if (nibbles) {
        v16i low[INT_GROUP_PANELS], high[INT_GROUP_PANELS];
        PDS_UNROLL
        for (int p = 0; p < panels; p++) {
          const v16i word = v16i_load(row + (size_t)p * panel_stride);
          if (rows <= 2) __builtin_prefetch(row + (size_t)p * panel_stride + ahead, 0, 3);
          low[p] = v16i_low(word);
          high[p] = v16i_high(word);
        }
        PDS_UNROLL
        for (int i = 0; i < rows; i++) {
          const x_int x0 = x_int_load(x[i] + x_at + r * 8, 1);
          const x_int x1 = x_int_load(x[i] + x_at + r * 8 + 4, 1);
          PDS_UNROLL
          for (int p = 0; p < panels; p++) {
            dot[i][p] = v16i_dot(v16i_dot(dot[i][p], low[p], x0, 1), high[p], x1, 1);
          }
        }
      } else {
        v16i word[INT_GROUP_PANELS];
        PDS_UNROLL
        for (int p = 0; p < panels; p++) {
          word[p] = v16i_flip(v16i_load(row + (size_t)p * panel_stride));
          if (rows <= 2) __builtin_prefetch(row + (size_t)p * panel_stride + ahead, 0, 3);
        }
        PDS_UNROLL
        for (int i = 0; i < rows; i++) {
          const x_int x0 = x_int_load(x[i] + x_at + r * 4, 0);
          PDS_UNROLL
          for (int p = 0; p < panels; p++) dot[i][p] = v16i_dot(dot[i][p], word[p], x0, 0);
        }
      }
    }
    PDS_UNROLL
    for (int p = 0; p < panels; p++) {
      const unsigned char *scales = w + (size_t)p * panel_stride + w_bytes + (size_t)g * 32;
      if (rows <= 2) __builtin_prefetch(scales + SCALE_AHEAD, 0, 3);
      const v16 w_scale = v16_load_bf16(scales);
      PDS_UNROLL
      for (int i = 0; i < rows; i++) {
        const float x_scale = ((const float *)(x[i] + k))[g];
        sum[i][p] = v16_fma(v16i_float(dot[i][p]), v16_mul(w_scale, v16_set1(x_scale)), sum[i][p]);
      }
    }
  }
  PDS_UNROLL
  for (int i = 0; i < rows; i++) {
    PDS_UNROLL
    for (int p = 0; p < panels; p++)
      v16_store(acc + (i * INT_GROUP_PANELS + p) * PDS_LANES, sum[i][p]);
  }
}

typedef void (*int_tile_fn)(const unsigned char *const *x, const unsigned char *w,
                            size_t panel_stride, uint32_t k, size_t jump, float *acc);

#define TILE(bits, rows, panels)                                                                   \
  static void i##bits##_tile_##rows##x##panels(const unsigned char *const *x,                      \
                                               const unsigned char *w, size_t panel_stride,        \
                                               uint32_t k, size_t jump, float *acc) {              \
    int_tile(x, w, panel_stride, k, jump, acc, bits, rows, panels);                                \
  }
#define TILES(rows, panels)                                                                        \
  TILE(8, rows, panels)                                                                            \
  TILE(4, rows, panels)
TILES(1, 1)
TILES(1, 2)
TILES(2, 1)
TILES(2, 2)
TILES(3, 1)
TILES(4, 1)
#if TILE_MANY
TILES(1, 4)
TILES(2, 4)
TILES(3, 2)
TILES(4, 2)
TILES(5, 1)
TILES(5, 2)
TILES(6, 1)
TILES(6, 2)
TILES(7, 1)
TILES(7, 2)
TILES(8, 1)
TILES(8, 2)
#endif
#undef TILES
#undef TILE

/* [bits == 4][rows - 1][log2(panels)] */
#if TILE_MANY
#define TILES(i)                                                                                   \
  {                                                                                                \
      {i##_tile_1x1, i##_tile_1x2, i##_tile_1x4},                                                  \
      {i##_tile_2x1, i##_tile_2x2, i##_tile_2x4},                                                  \
      {i##_tile_3x1, i##_tile_3x2, 0},                                                             \
      {i##_tile_4x1, i##_tile_4x2, 0},                                                             \
      {i##_tile_5x1, i##_tile_5x2, 0},                                                             \
      {i##_tile_6x1, i##_tile_6x2, 0},                                                             \
      {i##_tile_7x1, i##_tile_7x2, 0},                                                             \
      {i##_tile_8x1, i##_tile_8x2, 0},                                                             \
  }
#else
#define TILES(i)                                                                                   \
  {                                                                                                \
      {i##_tile_1x1, i##_tile_1x2, 0},                                                             \
      {i##_tile_2x1, i##_tile_2x2, 0},                                                             \
      {i##_tile_3x1, 0, 0},                                                                        \
      {i##_tile_4x1, 0, 0},                                                                        \
  }
#endif
static const int_tile_fn int_tiles[2][INT_ROWS][3] = {TILES(i8), TILES(i4)};
#undef TILES

/* All panels for rows [first, last) of the call: panels outside, so that each passes over rows of
 * x that stay in the second-level cache. */
PDS_INLINE void int_rows(const pds_gemm *g, uint32_t first, uint32_t last, const int bits,
                         const int swiglu) {
  const uint32_t per_panel = swiglu ? PDS_LANES / 2 : PDS_LANES; /* columns of y a panel */
  const uint32_t panels = (swiglu ? 2 : 1) * ((g->cols + PDS_LANES - 1) / PDS_LANES);
  const uint32_t most = last - first <= 2 ? INT_PANELS(1) : 2;
  const unsigned char *x[INT_ROWS];
  float sum[INT_ROWS][INT_GROUP_PANELS * PDS_LANES] __attribute__((aligned(64)));
  uint32_t width = most;
  for (uint32_t p0 = 0; p0 < panels; p0 += width) {
    width = most < panels - p0 ? most : panels - p0;
    const unsigned char *w = (const unsigned char *)g->w + (size_t)p0 * g->panel_stride;
    const uint32_t col = p0 * per_panel;
    const uint32_t cols = g->cols - col < width * per_panel ? g->cols - col : width * per_panel;
    for (uint32_t i0 = first; i0 < last; i0 += INT_ROWS) {
      const uint32_t rows = last - i0 < INT_ROWS ? last - i0 : INT_ROWS;
      for (uint32_t i = 0; i < rows; i++) {
        const size_t row = g->x_index ? (uint32_t)g->x_index[i0 + i] / g->x_div : i0 + i;
        x[i] = (const unsigned char *)g->x + row * g->x_stride;
      }
      for (uint32_t p = 0, step; p < width; p += step) {
        step = INT_PANELS(rows);
        while (step > width - p) step >>= 1;
        const size_t jump = p0 + p + step < panels ? (step - 1) * g->panel_stride : 0;
        int_tiles[bits == 4][rows - 1][step / 2](x, w + p * g->panel_stride, g->panel_stride, g->k,
                                                 jump, sum[0] + p * PDS_LANES);
      }
      for (uint32_t i = 0; i < rows; i++) {
        const size_t y_row = g->y_index ? (size_t)g->y_index[i0 + i] : i0 + i;
        if (swiglu) {
          bf16_finish_swiglu(g, sum[i], y_row, col, cols);
        } else {
          bf16_finish(g, sum[i], y_row, col, cols);
        }
        if (p0 + width == panels && g->pad > g->cols && (swiglu || g->out == PDS_OUT_ACT)) {
          memset((uint16_t *)g->y + y_row * g->y_stride + g->cols, 0,
                 (g->pad - g->cols) * sizeof(uint16_t));
        }
      }
    }
  }
}

#ifdef __AMX_INT8__
#include "int_amx.h"
#endif

PDS_INLINE void int_any(const pds_gemm *g, const int bits, const int swiglu) {
  enum { X_BYTES = 512 * 1024 };
#ifdef __AMX_INT8__
  if (int_amx(g, bits, swiglu)) return;
#endif
  uint32_t chunk = (uint32_t)(X_BYTES / (g->k + 1)) / INT_ROWS * INT_ROWS;
  if (chunk < 4 * INT_ROWS) chunk = 4 * INT_ROWS;
  for (uint32_t first = 0; first < g->rows; first += chunk) {
    int_rows(g, first, g->rows - first < chunk ? g->rows : first + chunk, bits, swiglu);
  }
}

static void i8_gemm(const pds_gemm *g) {
  int_any(g, 8, 0);
  if (g->stream_y) v16_stream_end();
}
static void i8_swiglu(const pds_gemm *g) {
  int_any(g, 8, 1);
}
static void i4_gemm(const pds_gemm *g) {
  int_any(g, 4, 0);
  if (g->stream_y) v16_stream_end();
}
static void i4_swiglu(const pds_gemm *g) {
  int_any(g, 4, 1);
}

PDS_INLINE void int_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y, const int bits) {
  enum { STEP = 32 };
  const uint32_t group = int_group(bits), groups = k / group;
  int8_t *q = y;
  float *scale = (float *)(q + k);
  int32_t *base = (int32_t *)(scale + groups);
  for (uint32_t g = 0, at = 0; g < groups; g++) {
    const uint32_t end = at + group;
    uint32_t top = 0;
    for (uint32_t i = at; i < end && i < n; i += STEP) {
      const uint32_t bits_of = bf16_top(x + i);
      top = bits_of > top ? bits_of : top;
    }
    float most, factor = 0;
    top <<= 16;
    memcpy(&most, &top, sizeof most);
    if (most >= PDS_QUANT_TINY) {
      factor = 127.0f / most;
      scale[g] = most * (1.0f / 127.0f) + 0 * most; /* Inf * 0: NaN */
    } else {
      scale[g] = 0 * most;
    }
    int32_t total = 0;
    for (; at < end; at += STEP) {
      if (at < n) {
        total += bf16_to_int8(x + at, factor, q + at);
      } else {
        memset(q + at, 0, STEP);
      }
    }
    base[g] = -total * (bits == 8 ? 128 : 8);
  }
}

static void i8_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y) {
  int_quantise(x, n, k, y, 8);
}
static void i4_quantise(const uint16_t *x, uint32_t n, uint32_t k, void *y) {
  int_quantise(x, n, k, y, 4);
}
