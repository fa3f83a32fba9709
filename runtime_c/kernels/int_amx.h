/* int_amx.h: GEMMs of many rows on int8 and int4 weights through AMX tiles; part of int.h where the
 * path has AMX-INT8. A group's sum is exact, so the bits are those of the vector kernels, and a
 * call may take either.
 *
 * One tile of A is 16 rows of quantise, a group wide; one of B the group's rows of a panel: of int8
 * where they lie, of int4 unpacked first. Tiles of sums go through memory to become floats. What
 * costs is the turn from storing tiles to loading vectors, so several tiles are stored before they
 * are loaded; and a tile that was just multiplied, which is stored only when the next has been.
 *
 * A pass keeps its rows of x in the second-level cache, where each pair of panels arrives from
 * memory, from several pages at a time as in amx_gemm.h, while the pair before it is multiplied;
 * parts of k keep the pair's tiles in the first. */

enum {
  INT_AMX_ROWS = 16,            /* of a tile; fewer rows are for the vector kernels */
  INT_AMX_BLOCKS = 24,          /* of 16 rows, in a pass */
  INT_AMX_FEW_BLOCKS = 8,       /* of a pass if k is so long that no more fit the cache */
  INT_AMX_X_BYTES = 768 * 1024, /* of gathered rows, copied as tiles, and of scales */
  INT_AMX_K = 512,              /* of a pair of panels that goes by the rows at a time */
  INT_AMX_SIDE = 2,             /* blocks that a pair of tiles of B goes by */
  INT_AMX_DOTS = 8,             /* pairs of tiles of sums that become floats together */
  INT_AMX_HALF = INT_AMX_ROWS / 2,
  INT_AMX_SUM_ROW = 2 * PDS_LANES, /* floats of one row's sums */
  INT_AMX_SUMS = INT_AMX_ROWS * INT_AMX_SUM_ROW
};

/* Layout: Intel SDM, LDTILECFG, palette 1. Tiles 0-3: sums; 4: A; 5, 6: B. With all eight in use
 * nothing is renamed where another thread shares the core. */
PDS_INLINE void int_amx_configure(uint32_t group) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 7; i++) {
    config.row_bytes[i] = i == 4 ? (uint16_t)group : 64;
    config.rows[i] = i < 5 ? INT_AMX_ROWS : (uint8_t)(group / 4);
  }
  __asm__ volatile("" ::"m"(config)); /* gcc takes the next to read 8 bytes of it */
  _tile_loadconfig(&config);
}

/* 16 rows of x from `row` of the call on, and their scales, [group][16]. The last block may reach
 * back to rows that another one has: its own begin at `own`. */
typedef struct int_amx_block {
  const unsigned char *q; /* the first A tile */
  size_t stride, step;    /* bytes from row to row, and from tile to tile */
  const float *scales;
  uint32_t row, own;
} int_amx_block;

/* The sums of one group of one block, by panel. */
typedef int32_t int_amx_dots[2][INT_AMX_ROWS][PDS_LANES];

/* Two panels, k in parts: B tiles of this part, b_bytes each, and its scales, [group][2][16]. */
typedef struct int_amx_pair {
  const unsigned char *b[2];
  const float *scales;
  uint32_t b_bytes, first, groups;
  const unsigned char *next, *end; /* to prefetch: a line at a time of each of `lines` streams */
  size_t run;                      /* bytes from stream to stream */
  uint32_t lines;
} int_amx_pair;

/* dots[g][n] = groups [first, first + groups) of n blocks times both panels. A pair of tiles is
 * stored while the next multiplies. */
PDS_INLINE void int_amx_multiply(const int_amx_block *x, uint32_t n, const int_amx_pair *w,
                                 uint32_t first, uint32_t groups, int_amx_dots *dots) {
  uint32_t pairs = 0;
  for (uint32_t g = first; g < first + groups; g++) {
    for (uint32_t i = 0; i < n; i++, pairs++) {
      const unsigned char *a = x[i].q + (size_t)(w->first + g) * x[i].step;
      const unsigned char *b0 = w->b[0] + (size_t)g * w->b_bytes;
      const unsigned char *b1 = w->b[1] + (size_t)g * w->b_bytes;
      if (pairs % 2) {
        _tile_stored(0, dots[pairs - 1][0], 64);
        _tile_zero(2);
        _tile_loadd(4, a, x[i].stride);
        if (i == 0) _tile_loadd(5, b0, 64);
        _tile_dpbssd(2, 4, 5);
        _tile_stored(1, dots[pairs - 1][1], 64);
        _tile_zero(3);
        if (i == 0) _tile_loadd(6, b1, 64);
        _tile_dpbssd(3, 4, 6);
      } else {
        if (pairs) _tile_stored(2, dots[pairs - 1][0], 64);
        _tile_zero(0);
        _tile_loadd(4, a, x[i].stride);
        if (i == 0) _tile_loadd(5, b0, 64);
        _tile_dpbssd(0, 4, 5);
        if (pairs) _tile_stored(3, dots[pairs - 1][1], 64);
        _tile_zero(1);
        if (i == 0) _tile_loadd(6, b1, 64);
        _tile_dpbssd(1, 4, 6);
      }
    }
  }
  if (pairs % 2) {
    _tile_stored(0, dots[pairs - 1][0], 64);
    _tile_stored(1, dots[pairs - 1][1], 64);
  } else {
    _tile_stored(2, dots[pairs - 1][0], 64);
    _tile_stored(3, dots[pairs - 1][1], 64);
  }
}

/* sum += `groups` groups of half the rows of a block, both panels; dots: of the first group, and n
 * further on of the next. Each also prefetches a few lines: many at a time would hold up loads. */
PDS_INLINE void int_amx_add(const int_amx_dots *dots, uint32_t n, const int_amx_block *x,
                            int_amx_pair *w, uint32_t first, uint32_t groups, uint32_t row,
                            float *sum) {
  const float *x_scales = x->scales + (size_t)(w->first + first) * INT_AMX_ROWS + row;
  const float *w_scales = w->scales + (size_t)first * 2 * PDS_LANES;
  v16 s[INT_AMX_HALF][2];
  sum += (size_t)row * INT_AMX_SUM_ROW;
  PDS_UNROLL
  for (int r = 0; r < INT_AMX_HALF; r++) {
    s[r][0] = v16_load(sum + r * INT_AMX_SUM_ROW);
    s[r][1] = v16_load(sum + r * INT_AMX_SUM_ROW + PDS_LANES);
  }
  for (uint32_t g = 0; g < groups; g++) {
    const int32_t (*dot)[PDS_LANES] = &(*dots)[0][row];
    const v16 w0 = v16_load(w_scales), w1 = v16_load(w_scales + PDS_LANES);
    for (uint32_t l = 0; l < w->lines; l++) __builtin_prefetch(w->next + l * w->run, 0, 2);
    w->next += 64;
    PDS_UNROLL
    for (int r = 0; r < INT_AMX_HALF; r++) {
      const v16 scale = v16_set1(x_scales[r]);
      const v16 a = v16i_float(v16i_load(dot[r])), b = v16i_float(v16i_load(dot[r + INT_AMX_ROWS]));
      s[r][0] = v16_fma(a, v16_mul(w0, scale), s[r][0]);
      s[r][1] = v16_fma(b, v16_mul(w1, scale), s[r][1]);
    }
    dots += n;
    x_scales += INT_AMX_ROWS;
    w_scales += 2 * PDS_LANES;
  }
  PDS_UNROLL
  for (int r = 0; r < INT_AMX_HALF; r++) {
    v16_store(sum + r * INT_AMX_SUM_ROW, s[r][0]);
    v16_store(sum + r * INT_AMX_SUM_ROW + PDS_LANES, s[r][1]);
  }
}

/* sum[n][16][32] += n blocks times a pair of panels. */
static void int_amx_sums(const int_amx_block *x, uint32_t n, int_amx_pair *w, float *sum) {
  int_amx_dots dots[INT_AMX_DOTS] __attribute__((aligned(64)));
  for (uint32_t g = 0, chunk; g < w->groups; g += chunk) {
    chunk = w->groups - g < INT_AMX_DOTS / n ? w->groups - g : INT_AMX_DOTS / n;
    int_amx_multiply(x, n, w, g, chunk, dots);
    for (uint32_t i = 0; i < 2 * n; i++) {
      const uint32_t block = i / 2, row = i % 2 * INT_AMX_HALF;
      if (w->next >= w->end) w->lines = 0;
      int_amx_add(dots + block, n, x + block, w, g, chunk, row, sum + block * INT_AMX_SUMS);
    }
  }
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

/* Where row i of the call is. */
PDS_INLINE const unsigned char *int_amx_row(const pds_gemm *g, uint32_t i) {
  const size_t row = g->x_index ? (uint32_t)g->x_index[i] / g->x_div : i;
  return (const unsigned char *)g->x + row * g->x_stride;
}

/* `memory`: of what int_amx_bytes says. */
PDS_INLINE int_amx_block int_amx_rows(const pds_gemm *g, uint32_t own, const uint32_t group,
                                      unsigned char *memory) {
  const uint32_t groups = g->k / group;
  const uint32_t row = g->rows - own < INT_AMX_ROWS ? g->rows - INT_AMX_ROWS : own;
  const int more = row + 2 * INT_AMX_ROWS <= g->rows;
  float *scales = (float *)memory;
  unsigned char *copy = memory + (size_t)groups * INT_AMX_ROWS * sizeof *scales;
  int_amx_block block = {.q = copy,
                         .stride = group,
                         .step = (size_t)INT_AMX_ROWS * group,
                         .scales = scales,
                         .row = row,
                         .own = own};
  for (uint32_t i = 0; i < INT_AMX_ROWS; i++) {
    const unsigned char *from = int_amx_row(g, row + i);
    const float *scale = (const float *)(from + g->k);
    for (uint32_t j = 0; j < groups; j++) scales[j * INT_AMX_ROWS + i] = scale[j];
    if (g->x_index) { /* rows lie anywhere, so that nothing else prefetches the next block's */
      const unsigned char *ahead = int_amx_row(g, more ? row + INT_AMX_ROWS + i : row + i);
      for (uint32_t j = 0; j < g->x_stride; j += 64) __builtin_prefetch(ahead + j, 0, 2);
      for (uint32_t j = 0; j < groups; j++)
        memcpy(copy + (j * INT_AMX_ROWS + i) * (size_t)group, from + (size_t)j * group, group);
    } else if (i == 0) {
      block.q = from;
      block.stride = g->x_stride;
      block.step = group;
    }
  }
  return block;
}

static uint32_t int_amx_bytes(const pds_gemm *g, uint32_t groups) {
  return groups * INT_AMX_ROWS * (uint32_t)sizeof(float) + (g->x_index ? INT_AMX_ROWS * g->k : 0);
}

/* The outputs of a block's own rows, columns [col, col + cols) of y. */
PDS_INLINE void int_amx_finish(const pds_gemm *g, const int_amx_block *block, const float *sum,
                               uint32_t col, uint32_t cols, int last, const int swiglu) {
  for (uint32_t r = block->own; r < block->row + INT_AMX_ROWS; r++) {
    const float *both = sum + (size_t)(r - block->row) * INT_AMX_SUM_ROW;
    const size_t y_row = g->y_index ? (size_t)g->y_index[r] : r;
    if (swiglu) {
      bf16_finish_swiglu(g, both, y_row, col, cols);
    } else {
      bf16_finish(g, both, y_row, col, cols);
    }
    if (last && g->pad > g->cols && (swiglu || g->out == PDS_OUT_ACT)) {
      memset((uint16_t *)g->y + y_row * g->y_stride + g->cols, 0,
             (g->pad - g->cols) * sizeof(uint16_t));
    }
  }
}

PDS_INLINE void int_amx_panels(const pds_gemm *g, const int_amx_block *blocks, uint32_t n,
                               const int bits, const int swiglu) {
  const uint32_t group = int_group(bits), groups = g->k / group, part = INT_AMX_K / group;
  const uint32_t panels = (swiglu ? 2 : 1) * ((g->cols + PDS_LANES - 1) / PDS_LANES);
  const size_t w_bytes = (size_t)g->k * (uint32_t)bits * 2;
  float sum[INT_AMX_BLOCKS][INT_AMX_SUMS] __attribute__((aligned(64)));
  float scales[INT_AMX_K / PDS_I4_GROUP][2][PDS_LANES] __attribute__((aligned(64)));
  unsigned char unpacked[2][INT_AMX_K * PDS_LANES] __attribute__((aligned(64)));
  const uint32_t turns = 2 * n * groups, all = (uint32_t)(2 * g->panel_stride / 64);
  const uint32_t lines = (all + turns - 1) / turns;
  const size_t run = (size_t)((all + lines - 1) / lines) * 64;
  for (uint32_t p = 0; p < panels; p += 2) {
    const unsigned char *w = (const unsigned char *)g->w + (size_t)p * g->panel_stride;
    const size_t other = p + 1 < panels ? g->panel_stride : 0;
    const unsigned char *next = w + 2 * g->panel_stride;
    const unsigned char *end = p + 2 < panels ? next + run : next;
    memset(sum, 0, n * sizeof *sum);
    for (uint32_t from = 0; from < groups; from += part) {
      const size_t at = (size_t)from * group * (uint32_t)bits * 2;
      int_amx_pair pair = {.b = {w + at, w + other + at},
                           .scales = scales[0][0],
                           .b_bytes = group * 16,
                           .first = from,
                           .groups = groups - from < part ? groups - from : part,
                           .next = next,
                           .end = end,
                           .run = run,
                           .lines = lines};
      for (int i = 0; i < 2; i++) {
        const unsigned char *bf16 = w + i * other + w_bytes + (size_t)from * 32;
        for (uint32_t j = 0; j < pair.groups; j++)
          v16_store(scales[j][i], v16_load_bf16(bf16 + j * 32));
        if (bits == 4) {
          int_amx_unpack(pair.b[i], pair.groups * group / 8, unpacked[i]);
          pair.b[i] = unpacked[i];
        }
      }
      for (uint32_t i = 0; i < n; i += INT_AMX_SIDE)
        int_amx_sums(blocks + i, n - i < INT_AMX_SIDE ? n - i : INT_AMX_SIDE, &pair, sum[i]);
      next = pair.next;
    }
    const uint32_t width = panels - p < 2 ? 1 : 2, wide = swiglu ? PDS_LANES : width * PDS_LANES;
    const uint32_t col = p * (swiglu ? PDS_LANES / 2 : PDS_LANES);
    const uint32_t cols = g->cols - col < wide ? g->cols - col : wide;
    for (uint32_t i = 0; i < n; i++)
      int_amx_finish(g, &blocks[i], sum[i], col, cols, p + width == panels, swiglu);
  }
}

/* Blocks of 16 rows in a pass; 0: not one fits. */
static uint32_t int_amx_pass(const pds_gemm *g, uint32_t groups) {
  const uint32_t scales = groups * INT_AMX_ROWS * (uint32_t)sizeof(float);
  const uint32_t cache = (g->l2_bytes ? g->l2_bytes : 1024 * 1024) / 8 * 3;
  const uint32_t fits = INT_AMX_X_BYTES / int_amx_bytes(g, groups);
  uint32_t most = cache / (INT_AMX_ROWS * g->k + scales);
  if (most < INT_AMX_FEW_BLOCKS) most = INT_AMX_FEW_BLOCKS;
  if (most > INT_AMX_BLOCKS) most = INT_AMX_BLOCKS;
  if (most > fits) most = fits;
  if (most == 0) return 0;
  const uint32_t blocks = (g->rows + INT_AMX_ROWS - 1) / INT_AMX_ROWS;
  const uint32_t passes = (blocks + most - 1) / most; /* that are alike */
  return (blocks + passes - 1) / passes;
}

/* False where the vector kernels have to do it. */
PDS_INLINE int int_amx(const pds_gemm *g, const int bits, const int swiglu) {
  if (g->rows < INT_AMX_ROWS || g->cols == 0) return 0;
  const uint32_t group = int_group(bits), groups = g->k / group;
  const uint32_t bytes = int_amx_bytes(g, groups), each = int_amx_pass(g, groups);
  if (each == 0) return 0;
  unsigned char memory[INT_AMX_X_BYTES] __attribute__((aligned(64)));
  int_amx_block blocks[INT_AMX_BLOCKS];
  int_amx_configure(group);
  for (uint32_t row = 0; row < g->rows;) {
    uint32_t n = 0;
    for (; n < each && row < g->rows; n++, row += INT_AMX_ROWS) {
      blocks[n] = int_amx_rows(g, row, group, memory + (size_t)n * bytes);
    }
    int_amx_panels(g, blocks, n, bits, swiglu);
  }
  _tile_release();
  return 1;
}
