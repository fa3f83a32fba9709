/* int_amx.h: GEMMs of many rows on int8 and int4 weights through AMX tiles; part of int.h where the
 * path has AMX-INT8. A group's sum is exact, so the bits are those of the vector kernels, and a
 * call may take either.
 *
 * One tile of A is 16 rows of quantise, a group wide; one of B the group's rows of a panel: of int8
 * where they lie, of int4 unpacked first. Sums of 16 rows times 16 columns stay in registers while
 * the groups go by. */

enum {
  INT_AMX_ROWS = 16,               /* of a tile; fewer rows are for the vector kernels */
  INT_AMX_BLOCKS = 8,              /* of 16 rows, that go by a panel */
  INT_AMX_COPY_BYTES = 160 * 1024, /* of gathered rows, copied side by side, and of scales */
  INT_AMX_K = 4096                 /* of a panel of int4 that is unpacked at a time */
};

/* Layout: Intel SDM, LDTILECFG, palette 1. Tiles 0, 1: sums; 2, 3: A; 4, 5: B. */
PDS_INLINE void int_amx_configure(uint32_t group) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 6; i++) {
    config.row_bytes[i] = i == 2 || i == 3 ? (uint16_t)group : 64;
    config.rows[i] = i < 4 ? INT_AMX_ROWS : (uint8_t)(group / 4);
  }
  _tile_loadconfig(&config);
}

/* 16 rows of x from `row` of the call on, and their scales, [group][16]. The last block may reach
 * back to rows that another one has: its own begin at `own`. */
typedef struct int_amx_block {
  const unsigned char *q;
  size_t stride;
  const float *scales;
  uint32_t row, own;
} int_amx_block;

/* sum[16][16] += groups [first, end) of x times a panel's; b: the B tile of group `first`, b_bytes
 * each. */
PDS_INLINE void int_amx_tile(const int_amx_block *x, const unsigned char *b, uint32_t b_bytes,
                             const unsigned char *w_scales, uint32_t group, uint32_t first,
                             uint32_t end, float *sum) {
  int32_t dots[2][INT_AMX_ROWS][PDS_LANES] __attribute__((aligned(64)));
  v16 s[INT_AMX_ROWS];
  PDS_UNROLL
  for (int i = 0; i < INT_AMX_ROWS; i++) s[i] = v16_load(sum + i * PDS_LANES);
  for (uint32_t g = first; g <= end; g++) {
    if (g < end) { /* the next group's sums, while this one's become floats */
      const unsigned char *a = x->q + (size_t)g * group;
      if (g & 1) {
        _tile_zero(1);
        _tile_loadd(3, a, x->stride);
        _tile_loadd(5, b, 64);
        _tile_dpbssd(1, 3, 5);
        _tile_stored(1, dots[1], 64);
      } else {
        _tile_zero(0);
        _tile_loadd(2, a, x->stride);
        _tile_loadd(4, b, 64);
        _tile_dpbssd(0, 2, 4);
        _tile_stored(0, dots[0], 64);
      }
      b += b_bytes;
    }
    if (g == first) continue;
    const v16 w = v16_load_bf16(w_scales + (size_t)(g - 1) * 32);
    const float *x_scales = x->scales + (size_t)(g - 1) * INT_AMX_ROWS;
    PDS_UNROLL
    for (int i = 0; i < INT_AMX_ROWS; i++) {
      const v16 dot = v16i_float(v16i_load(dots[(g - 1) & 1][i]));
      s[i] = v16_fma(dot, v16_mul(w, v16_set1(x_scales[i])), s[i]);
    }
  }
  PDS_UNROLL
  for (int i = 0; i < INT_AMX_ROWS; i++) v16_store(sum + i * PDS_LANES, s[i]);
}

/* `rows` 64-byte rows of int4 as twice as many of int8. */
static void int_amx_unpack(const unsigned char *w, uint32_t rows, unsigned char *to) {
  const __m512i eight = _mm512_set1_epi8(8);
  for (uint32_t r = 0; r < rows; r++, w += 64, to += 128) {
    const v16i word = v16i_load(w);
    _mm512_store_si512(to, _mm512_sub_epi8(v16i_low(word), eight));
    _mm512_store_si512(to + 64, _mm512_sub_epi8(v16i_high(word), eight));
  }
}

/* `memory`: of what int_amx_bytes says. */
static int_amx_block int_amx_rows(const pds_gemm *g, uint32_t own, uint32_t groups,
                                  unsigned char *memory) {
  const uint32_t row = g->rows - own < INT_AMX_ROWS ? g->rows - INT_AMX_ROWS : own;
  float *scales = (float *)memory;
  unsigned char *copy = memory + (size_t)groups * INT_AMX_ROWS * sizeof *scales;
  int_amx_block block = {.q = copy, .stride = g->k, .scales = scales, .row = row, .own = own};
  for (uint32_t i = 0; i < INT_AMX_ROWS; i++) {
    const size_t at = g->x_index ? (uint32_t)g->x_index[row + i] / g->x_div : row + i;
    const unsigned char *from = (const unsigned char *)g->x + at * g->x_stride;
    const float *scale = (const float *)(from + g->k);
    for (uint32_t j = 0; j < groups; j++) scales[j * INT_AMX_ROWS + i] = scale[j];
    if (g->x_index) {
      memcpy(copy + (size_t)i * g->k, from, g->k);
    } else if (i == 0) {
      block.q = from;
      block.stride = g->x_stride;
    }
  }
  return block;
}

static uint32_t int_amx_bytes(const pds_gemm *g, uint32_t groups) {
  return groups * INT_AMX_ROWS * (uint32_t)sizeof(float) + (g->x_index ? INT_AMX_ROWS * g->k : 0);
}

PDS_INLINE void int_amx_panels(const pds_gemm *g, const int_amx_block *blocks, uint32_t n,
                               const int bits, const int swiglu) {
  const uint32_t group = int_group(bits), groups = g->k / group, b_bytes = group * 16;
  const uint32_t part = bits == 8 ? groups : INT_AMX_K / group;
  const uint32_t panels = (swiglu ? 2 : 1) * ((g->cols + PDS_LANES - 1) / PDS_LANES);
  const size_t w_bytes = (size_t)g->k * (uint32_t)bits * 2;
  float sum[INT_AMX_BLOCKS][2][INT_AMX_ROWS * PDS_LANES] __attribute__((aligned(64)));
  unsigned char unpacked[INT_AMX_K * PDS_LANES] __attribute__((aligned(64)));
  for (uint32_t p0 = 0; p0 < panels; p0 += 2) {
    const uint32_t width = panels - p0 < 2 ? 1 : 2;
    memset(sum, 0, n * sizeof *sum);
    for (uint32_t p = 0; p < width; p++) {
      const unsigned char *w = (const unsigned char *)g->w + (size_t)(p0 + p) * g->panel_stride;
      for (uint32_t from = 0; from < groups; from += part) {
        const uint32_t end = groups - from < part ? groups : from + part;
        const unsigned char *b = w + (size_t)from * group * (uint32_t)bits * 2;
        if (bits == 4) {
          int_amx_unpack(b, (end - from) * group / 8, unpacked);
          b = unpacked;
        }
        for (uint32_t i = 0; i < n; i++) {
          int_amx_tile(&blocks[i], b, b_bytes, w + w_bytes, group, from, end, sum[i][p]);
        }
      }
    }
    const uint32_t col = p0 * (swiglu ? PDS_LANES / 2 : PDS_LANES);
    const uint32_t wide = swiglu ? PDS_LANES : width * PDS_LANES;
    const uint32_t cols = g->cols - col < wide ? g->cols - col : wide;
    for (uint32_t i = 0; i < n; i++) {
      for (uint32_t r = blocks[i].own; r < blocks[i].row + INT_AMX_ROWS; r++) {
        float both[2 * PDS_LANES];
        const size_t at = (size_t)(r - blocks[i].row) * PDS_LANES;
        memcpy(both, sum[i][0] + at, sizeof both / 2);
        memcpy(both + PDS_LANES, sum[i][1] + at, sizeof both / 2);
        const size_t y_row = g->y_index ? (size_t)g->y_index[r] : r;
        if (swiglu) {
          bf16_finish_swiglu(g, both, y_row, col, cols);
        } else {
          bf16_finish(g, both, y_row, col, cols);
        }
        if (p0 + width == panels && g->pad > g->cols && (swiglu || g->out == PDS_OUT_ACT)) {
          memset((uint16_t *)g->y + y_row * g->y_stride + g->cols, 0,
                 (g->pad - g->cols) * sizeof(uint16_t));
        }
      }
    }
  }
}

/* False where the vector kernels have to do it. */
PDS_INLINE int int_amx(const pds_gemm *g, const int bits, const int swiglu) {
  if (g->rows < INT_AMX_ROWS || g->cols == 0) return 0;
  const uint32_t group = int_group(bits), groups = g->k / group;
  const uint32_t bytes = int_amx_bytes(g, groups), fits = INT_AMX_COPY_BYTES / bytes;
  const uint32_t most = fits < INT_AMX_BLOCKS ? fits : INT_AMX_BLOCKS;
  if (most == 0) return 0;
  unsigned char memory[INT_AMX_COPY_BYTES] __attribute__((aligned(64)));
  int_amx_block blocks[INT_AMX_BLOCKS];
  int_amx_configure(group);
  for (uint32_t row = 0; row < g->rows;) {
    uint32_t n = 0;
    for (; n < most && row < g->rows; n++, row += INT_AMX_ROWS) {
      blocks[n] = int_amx_rows(g, row, groups, memory + (size_t)n * bytes);
    }
    int_amx_panels(g, blocks, n, bits, swiglu);
  }
  _tile_release();
  return 1;
}
