/* amx_gemm.h: bf16 GEMMs on AMX tiles, for amx.c. A packed panel is a row of B tiles already (16
 * word rows of 64 bytes); rows of x become A tiles, 16 rows of 32 k, copied together where they lie
 * too far apart or anywhere (x_index). A block is 16 rows by two panels: four tile registers. More
 * would need fewer loads, but where another thread shares the core, those in use leave fewer to
 * rename: with all eight (2 x 2 blocks) each load and product waited for the one before it, some
 * 13 ns each, and ran at half the rate of these.
 *
 * A pass keeps its rows of x in the second-level cache; tiles of A come from there, past the first.
 * Two panels go by parts of K that stay in the first-level cache for all rows, while the next part
 * arrives in the second from memory: from several pages at a time, so that the hardware's prefetcher
 * is ahead in each and our own prefetches, which take the buffers that tiles are loaded through, soon
 * end. Sums wait there from part to part, and become outputs while the tiles of the next two panels
 * multiply. Few rows stream one panel after the other.
 *
 * Every output is one chain over k in tiles of 32, whatever the rows and columns of the call: so
 * a GEMM cut differently gives the same bits. The last group of rows reaches back to have 16
 * rows, and only those that are its own are stored; a call of fewer than 16 rows has smaller
 * tiles. */

enum {
  AMX_ROWS = 16, /* of an A tile */
  AMX_FEW = 4,   /* rows that only stream panels */
  AMX_AHEAD = 8, /* tiles to prefetch ahead there */
  AMX_TILE_BYTES = 1024,
  AMX_TILE_LINES = 16,
  AMX_STREAMS = 8,            /* pages that are prefetched from at a time */
  AMX_PART = 8,               /* tiles of a panel's part: two take 16 of the first level's 48 KB */
  AMX_X_BYTES = 768 * 1024,   /* copied rows of x: 12 groups of k = 2048 */
  AMX_SUM_BYTES = 128 * 1024, /* Both are on the worker's stack (PDS_STACK_BYTES). */
  AMX_GROUPS = 8,             /* of a pass if k is so long that no more fit */
  AMX_MOST_GROUPS = 32,
  AMX_SUM_ROW = 2 * PDS_LANES /* floats of one row's sums */
};

/* The operands of one block: 16 rows, `tiles` tiles of 32 k, a pair of panels. */
typedef struct amx_block {
  const unsigned char *a; /* first A tile */
  size_t a_row, a_step;   /* bytes from row to row, and from tile to tile */
  const unsigned char *b; /* first B tile of the first panel */
  size_t b_panel;         /* bytes from panel to panel */
  uint32_t tiles;
  const unsigned char *next; /* to prefetch, `lines` lines a tile, from streams `run` bytes apart */
  size_t run;
  uint32_t lines;
  float *sum; /* [16][AMX_SUM_ROW] */
  int first;  /* sums start at zero */
} amx_block;

/* Layout: Intel's SDM, LDTILECFG, palette 1. */
typedef struct amx_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} amx_config;

/* Sums in tiles 0 and 1, A in 2, B in 3. `rows`: of A and the sums. */
PDS_INLINE void amx_configure(uint32_t rows) {
  amx_config config = {.palette = 1};
  for (int i = 0; i < 4; i++) {
    config.row_bytes[i] = 64;
    config.rows[i] = i < 3 ? (uint8_t)rows : 16;
  }
  __asm__ volatile("" ::"m"(config)); /* gcc takes the next to read 8 bytes of it */
  _tile_loadconfig(&config);
}

/* The first row of group i's tile: the last group reaches back to have 16 rows. */
PDS_INLINE uint32_t amx_first_row(const pds_gemm *g, uint32_t group) {
  const uint32_t own = group * AMX_ROWS;
  if (g->rows < AMX_ROWS) return 0;
  return own + AMX_ROWS <= g->rows ? own : g->rows - AMX_ROWS;
}

/* Columns [col, col + cols) of rows [row, end), whose sums wait to become outputs: `sum` is that of
 * row `row`, and of a last group that reaches back, AMX_ROWS rows on, its first `skip` rows are
 * another's. */
typedef struct amx_finish {
  const pds_gemm *g;
  const float *sum;
  uint32_t row, end, next_group, skip, col, cols;
  int last; /* of the output columns: pad those that follow */
} amx_finish;

PDS_INLINE void amx_finish_row(amx_finish *f, const int swiglu) {
  const pds_gemm *g = f->g;
  if (f->row == f->next_group) f->sum += (size_t)f->skip * AMX_SUM_ROW;
  const size_t y_row = g->y_index ? (size_t)g->y_index[f->row] : f->row;
  if (swiglu) {
    bf16_finish_swiglu(g, f->sum, y_row, f->col, f->cols);
  } else {
    bf16_finish(g, f->sum, y_row, f->col, f->cols);
  }
  if (f->last && g->pad > g->cols && (swiglu || g->out == PDS_OUT_ACT)) {
    memset((uint16_t *)g->y + y_row * g->y_stride + g->cols, 0, (g->pad - g->cols) * 2);
  }
  f->sum += AMX_SUM_ROW;
  f->row++;
}

PDS_INLINE void amx_load_sums(const amx_block *k) {
  if (k->first) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_loadd(0, k->sum, AMX_SUM_ROW * sizeof(float));
    _tile_loadd(1, k->sum + PDS_LANES, AMX_SUM_ROW * sizeof(float));
  }
}

PDS_INLINE void amx_store_sums(const amx_block *k) {
  _tile_stored(0, k->sum, AMX_SUM_ROW * sizeof(float));
  _tile_stored(1, k->sum + PDS_LANES, AMX_SUM_ROW * sizeof(float));
}

/* A tile's share of half the streams, those of one panel. To the second level only: the first is too
 * small for what is to come. */
PDS_INLINE void amx_prefetch_lines(const amx_block *k, const unsigned char *from,
                                   const uint32_t lines) {
  const uint32_t streams = (lines < AMX_STREAMS ? lines : AMX_STREAMS) / 2;
  PDS_UNROLL
  for (uint32_t i = 0; i < lines / 2; i++)
    __builtin_prefetch(from + i % streams * k->run + i / streams * 64, 0, 2);
}

/* `wait`: the sums of an earlier pair of panels. */
PDS_INLINE void amx_1x2_of(const amx_block *k, amx_finish *wait, const int swiglu,
                           const uint32_t lines) {
  const unsigned char *a = k->a, *b0 = k->b, *b1 = b0 + k->b_panel, *next = k->next;
  amx_load_sums(k);
  for (uint32_t t = 0; t < k->tiles; t++) {
    _tile_stream_loadd(2, a, k->a_row);
    _tile_loadd(3, b0, 64);
    _tile_dpbf16ps(0, 2, 3);
    amx_prefetch_lines(k, next, lines);
    _tile_loadd(3, b1, 64);
    _tile_dpbf16ps(1, 2, 3);
    amx_prefetch_lines(k, next + k->b_panel, lines);
    if (wait->row < wait->end) amx_finish_row(wait, swiglu);
    a += k->a_step;
    b0 += AMX_TILE_BYTES;
    b1 += AMX_TILE_BYTES;
    next += lines < AMX_STREAMS ? 64 : lines / AMX_STREAMS * 64;
  }
  amx_store_sums(k);
}

PDS_INLINE void amx_1x2(const amx_block *k, amx_finish *wait, const int swiglu) {
  switch (k->lines) {
  case 0: amx_1x2_of(k, wait, swiglu, 0); break;
  case 4: amx_1x2_of(k, wait, swiglu, 4); break;
  case 8: amx_1x2_of(k, wait, swiglu, 8); break;
  case 16: amx_1x2_of(k, wait, swiglu, 16); break;
  default: amx_1x2_of(k, wait, swiglu, 32);
  }
}

PDS_INLINE void amx_prefetch_tile(const unsigned char *tile) {
  PDS_UNROLL
  for (int i = 0; i < AMX_TILE_LINES; i++) __builtin_prefetch(tile + 64 * i, 0, 3);
}

/* Panel `n` of the pair, on accumulator n; then comes panel n + 1 or, for the last, `next`. */
#define AMX_STREAM(n)                                                                              \
  do {                                                                                             \
    const unsigned char *a = k->a, *b = k->b + (n) * k->b_panel;                                   \
    const unsigned char *then = (n) == 0 ? b + k->b_panel : k->next;                               \
    for (uint32_t t = 0; t < k->tiles; t++) {                                                      \
      _tile_loadd(2, a, k->a_row);                                                                 \
      _tile_loadd(3, b, 64);                                                                       \
      _tile_dpbf16ps(n, 2, 3);                                                                     \
      if (t < turn) {                                                                              \
        amx_prefetch_tile(b + AMX_AHEAD * AMX_TILE_BYTES);                                         \
      } else if (then) {                                                                           \
        amx_prefetch_tile(then + (size_t)(t - turn) * AMX_TILE_BYTES);                             \
      }                                                                                            \
      a += k->a_step;                                                                              \
      b += AMX_TILE_BYTES;                                                                         \
    }                                                                                              \
  } while (0)

/* Few rows only stream panels: one after the other, as they lie, which memory serves faster than
 * several at a time. */
PDS_INLINE void amx_stream(const amx_block *k) {
  const uint32_t turn = k->tiles > AMX_AHEAD ? k->tiles - AMX_AHEAD : 0;
  amx_load_sums(k);
  AMX_STREAM(0);
  AMX_STREAM(1);
  amx_store_sums(k);
}

/* Where row i of the call is. */
PDS_INLINE const unsigned char *amx_row(const pds_gemm *g, uint32_t i) {
  const size_t row = g->x_index ? (uint32_t)g->x_index[i] / g->x_div : i;
  return (const unsigned char *)g->x + row * g->x_stride * 2;
}

/* Rows of x at [first, first + rows), k in [k0, k0 + 32 tiles), as A tiles; zero from g->k on.
 * Meanwhile lines [line, end) of as many tiles of B are prefetched. */
static void amx_copy_rows(const pds_gemm *g, uint32_t first, uint32_t rows, uint32_t k0,
                          uint32_t tiles, unsigned char *to, const unsigned char *b, uint32_t line,
                          uint32_t end) {
  const uint32_t whole = (g->k - k0) / 32 < tiles ? (g->k - k0) / 32 : tiles;
  const __mmask32 left = (__mmask32)((1u << (g->k - k0) % 32) - 1);
  const unsigned char *from[AMX_ROWS];
  for (uint32_t i = 0; i < rows; i++) from[i] = amx_row(g, first + i) + (size_t)k0 * 2;
  for (uint32_t t = 0; t < whole; t++, to += AMX_TILE_BYTES, b += AMX_TILE_BYTES) {
    for (uint32_t i = line; i < end; i++)
      __builtin_prefetch(b + i / AMX_TILE_LINES * g->panel_stride + i % AMX_TILE_LINES * 64, 0, 2);
    for (uint32_t i = 0; i < rows; i++)
      _mm512_store_si512(to + 64 * i, _mm512_loadu_si512(from[i] + 64 * t));
  }
  if (whole == tiles) return;
  for (uint32_t i = 0; i < rows; i++)
    _mm512_store_si512(to + 64 * i, _mm512_maskz_loadu_epi16(left, from[i] + 64 * whole));
}

/* Tiles may load rows where they lie if those are neighbours and whole cache lines. */
static int amx_rows_lie_well(const pds_gemm *g) {
  if (g->k % 32 != 0) return 0;
  if (g->rows == 1) return 1;
  return !g->x_index && (uintptr_t)g->x % 64 == 0 && g->x_stride * 2 % 64 == 0;
}

PDS_INLINE void amx_multiply(const amx_block *k, const int streams, amx_finish *wait,
                             const int swiglu) {
  if (streams) {
    amx_stream(k);
  } else {
    amx_1x2(k, wait, swiglu);
  }
}

/* One block, its K remainder too, `k0` being the first k: B's last tile is copied, because what
 * follows it in memory may be anything. */
PDS_INLINE void amx_run(const pds_gemm *g, amx_block k, const int streams, uint32_t k0,
                        amx_finish *wait, const int swiglu) {
  const uint32_t whole = (g->k - k0) / 32;
  const int remainder = whole < k.tiles;
  if (remainder) k.tiles = whole;
  amx_multiply(&k, streams, wait, swiglu);
  if (!remainder) return;
  unsigned char last[2 * AMX_TILE_BYTES] __attribute__((aligned(64)));
  const size_t bytes = (size_t)(g->k - k0) % 32 / 2 * 64;
  memset(last, 0, sizeof last);
  for (uint32_t p = 0; p < 2; p++) {
    memcpy(last + p * AMX_TILE_BYTES, k.b + p * k.b_panel + (size_t)whole * AMX_TILE_BYTES, bytes);
  }
  k.b = last;
  k.b_panel = AMX_TILE_BYTES;
  k.a += whole * k.a_step;
  k.tiles = 1;
  k.lines = 0;
  k.next = NULL;
  k.first = 0;
  amx_multiply(&k, streams, wait, swiglu);
}

typedef struct amx_pass {
  const pds_gemm *g;
  uint32_t panels, first_group, groups, last_group; /* of this pass over W; of the call */
  int in_place;                                     /* rows of x are loaded where they lie */
  uint32_t k0, tiles;                               /* this part of K */
  uint32_t x_k0, x_tiles;                           /* the part that x holds */
  unsigned char *x;                                 /* copied rows: [group][tile] */
  float *sums;                                      /* [pair of panels][group][16][32] */
  amx_finish wait;
} amx_pass;

PDS_INLINE void amx_flush(amx_pass *p, const int swiglu) {
  while (p->wait.row < p->wait.end) amx_finish_row(&p->wait, swiglu);
}

/* The first A tile of group `at` of the pass, at tile t of this part of K. */
PDS_INLINE const unsigned char *amx_a(const amx_pass *p, uint32_t at, uint32_t t) {
  const uint32_t k = p->k0 + t * 32;
  if (p->in_place) return amx_row(p->g, amx_first_row(p->g, p->first_group + at)) + (size_t)k * 2;
  return p->x + ((size_t)at * p->x_tiles + (k - p->x_k0) / 32) * AMX_TILE_BYTES;
}

/* Outputs of panels `panel` and the next, from the sums of all groups of the pass. */
PDS_INLINE amx_finish amx_finish_of(const amx_pass *p, const int swiglu, uint32_t panel,
                                    const float *sum) {
  const pds_gemm *g = p->g;
  const uint32_t width = swiglu ? PDS_LANES : 2 * PDS_LANES;
  const uint32_t last = (p->first_group + p->groups - 1) * AMX_ROWS; /* where its last begins */
  amx_finish f = {.g = g, .sum = sum, .row = p->first_group * AMX_ROWS, .next_group = last};
  f.end = last + AMX_ROWS < g->rows ? last + AMX_ROWS : g->rows;
  f.skip = last - amx_first_row(g, p->first_group + p->groups - 1);
  f.col = panel / 2 * width;
  f.cols = g->cols - f.col < width ? g->cols - f.col : width;
  f.last = panel + 2 >= p->panels;
  return f;
}

/* All groups of the pass times a pair of panels. `next`: the first tiles of the pass to come, or
 * NULL. K goes by parts whose B tiles stay in the first-level cache for all groups, which share the
 * prefetching of the next part's; one group has no use for parts. */
PDS_INLINE void amx_panels(amx_pass *p, const int swiglu, uint32_t panel, float *sums,
                           const unsigned char *next) {
  const pds_gemm *g = p->g;
  const int few = g->rows <= AMX_FEW;
  const uint32_t parts = p->groups == 1 ? 1 : (p->tiles + AMX_PART - 1) / AMX_PART;
  const uint32_t each = (p->tiles + parts - 1) / parts;
  const uint32_t all = 2 * AMX_TILE_LINES; /* of a tile of each panel */
  uint32_t lines = 4;
  while (lines * p->groups < all) lines *= 2;
  const uint32_t streams = lines < AMX_STREAMS ? lines : AMX_STREAMS;
  amx_block k = {.a_row = p->in_place ? g->x_stride * 2 : 64,
                 .a_step = p->in_place ? 64 : AMX_TILE_BYTES,
                 .b = (const unsigned char *)g->w + panel * g->panel_stride + (size_t)p->k0 * 32,
                 .b_panel = panel + 1 < p->panels ? g->panel_stride : 0};
  for (uint32_t t = 0; t < p->tiles; t += each, k.b += (size_t)each * AMX_TILE_BYTES) {
    const unsigned char *ahead = t + each < p->tiles ? k.b + (size_t)each * AMX_TILE_BYTES : next;
    k.tiles = p->tiles - t < each ? p->tiles - t : each;
    k.first = p->k0 == 0 && t == 0;
    k.run = (size_t)k.tiles * AMX_TILE_BYTES * 2 / streams;
    for (uint32_t i = 0; i < p->groups; i++) {
      k.a = amx_a(p, i, t);
      k.sum = sums + (size_t)i * AMX_ROWS * AMX_SUM_ROW;
      k.lines = 0;
      k.next = few ? next : NULL;
      if (!few && ahead && i * lines < all) {
        k.lines = lines;
        k.next = ahead + (size_t)i * k.tiles * (lines / streams) * 64;
      }
      amx_run(g, k, few, p->k0 + t * 32, &p->wait, swiglu);
    }
  }
  if (p->k0 + p->tiles * 32 < g->k) return;
  amx_flush(p, swiglu);
  p->wait = amx_finish_of(p, swiglu, panel, sums);
}

/* Makes x hold this part of K, while that of panels `panel` and the next arrives. */
static void amx_copy(amx_pass *p, uint32_t panel) {
  const pds_gemm *g = p->g;
  const uint32_t end = p->k0 + p->tiles * 32, rows = g->rows < AMX_ROWS ? g->rows : AMX_ROWS;
  if (p->x_tiles && p->k0 >= p->x_k0 && end <= p->x_k0 + p->x_tiles * 32) return;
  const uint32_t fits = AMX_X_BYTES / AMX_TILE_BYTES / p->groups, left = (g->k - p->k0 + 31) / 32;
  p->x_k0 = p->k0;
  p->x_tiles = left < fits ? left : fits;
  const unsigned char *b =
      (const unsigned char *)g->w + panel * g->panel_stride + (size_t)p->k0 * 32;
  const uint32_t lines = 2 * AMX_TILE_LINES;
  for (uint32_t i = 0; i < p->groups; i++) {
    amx_copy_rows(g, amx_first_row(g, p->first_group + i), rows, p->k0, p->x_tiles,
                  p->x + (size_t)i * p->x_tiles * AMX_TILE_BYTES, b, i * lines / p->groups,
                  (i + 1) * lines / p->groups);
  }
}

/* A pass in parts: K parts of `part` tiles within blocks of `block` panels. */
typedef struct amx_parts {
  uint32_t part, block, k_tiles;
} amx_parts;

/* The tiles of panel `panel`, K part at tile t, block from p0; if the block has no such panel,
 * those as much further on in the pass. NULL: beyond its end. */
static const unsigned char *amx_tiles_at(const amx_pass *p, const amx_parts *parts, uint32_t p0,
                                         uint32_t t, uint32_t panel) {
  const pds_gemm *g = p->g;
  for (;;) {
    const uint32_t p1 = p->panels - p0 < parts->block ? p->panels : p0 + parts->block;
    if (panel < p1) break;
    if (t + parts->part < parts->k_tiles) {
      t += parts->part;
      panel -= p1 - p0;
    } else if (p1 < p->panels) {
      t = 0;
      p0 = p1;
    } else {
      return NULL;
    }
  }
  return (const unsigned char *)g->w + panel * g->panel_stride + (size_t)t * AMX_TILE_BYTES;
}

/* One pass: a block of rows times all panels, K in parts if the rows are too long for x. */
PDS_INLINE void amx_rows(amx_pass *p, const int swiglu, uint32_t part) {
  const pds_gemm *g = p->g;
  const size_t pair_floats = (size_t)p->groups * AMX_ROWS * 2 * PDS_LANES;
  const uint32_t k_tiles = (g->k + 31) / 32;
  amx_parts parts = {.part = part, .k_tiles = k_tiles, .block = p->panels};
  if (part < k_tiles) parts.block = (uint32_t)(AMX_SUM_BYTES / (pair_floats * sizeof(float))) * 2;
  for (uint32_t p0 = 0; p0 < p->panels; p0 += parts.block) {
    const uint32_t p1 = p->panels - p0 < parts.block ? p->panels : p0 + parts.block;
    amx_flush(p, swiglu); /* this block's sums lie where those of the last one are */
    for (uint32_t t = 0; t < k_tiles; t += part) {
      p->k0 = t * 32;
      p->tiles = k_tiles - t < part ? k_tiles - t : part;
      if (!p->in_place) amx_copy(p, p0);
      for (uint32_t panel = p0; panel < p1; panel += 2) {
        const unsigned char *next = amx_tiles_at(p, &parts, p0, t, panel + 2);
        /* those that become outputs with the next pair leave its place alone */
        const uint32_t place = part >= k_tiles ? panel / 2 % 2 : (panel - p0) / 2;
        amx_panels(p, swiglu, panel, p->sums + place * pair_floats, next);
      }
    }
  }
  amx_flush(p, swiglu);
}

/* Groups of rows a pass: as many as keep all of k in three eighths of the second-level cache, and
 * passes that are alike. */
PDS_INLINE uint32_t amx_pass_groups(const pds_gemm *g, uint32_t groups, uint32_t k_tiles) {
  uint32_t bytes = (g->l2_bytes ? g->l2_bytes : 1024 * 1024) / 8 * 3;
  if (bytes > AMX_X_BYTES) bytes = AMX_X_BYTES;
  uint32_t most = bytes / AMX_TILE_BYTES / k_tiles / 2 * 2;
  if (most < AMX_GROUPS) most = AMX_GROUPS;
  if (most > AMX_MOST_GROUPS) most = AMX_MOST_GROUPS;
  const uint32_t passes = (groups + most - 1) / most;
  const uint32_t each = ((groups + passes - 1) / passes + 1) / 2 * 2;
  return each < groups ? each : groups;
}

PDS_INLINE void amx_any(const pds_gemm *g, const int swiglu) {
  if (g->rows == 0 || g->cols == 0) return;
  unsigned char x[AMX_X_BYTES] __attribute__((aligned(64)));
  float sums[AMX_SUM_BYTES / sizeof(float)] __attribute__((aligned(64)));
  const uint32_t k_tiles = (g->k + 31) / 32;
  amx_pass pass = {.g = g,
                   .panels = (swiglu ? 2 : 1) * ((g->cols + PDS_LANES - 1) / PDS_LANES),
                   .last_group = (g->rows + AMX_ROWS - 1) / AMX_ROWS,
                   .in_place = amx_rows_lie_well(g),
                   .x = x,
                   .sums = sums};
  amx_configure(g->rows < AMX_ROWS ? g->rows : AMX_ROWS);
  const uint32_t each = amx_pass_groups(g, pass.last_group, k_tiles);
  for (uint32_t first = 0; first < pass.last_group; first += each) {
    pass.first_group = first;
    pass.groups = pass.last_group - first < each ? pass.last_group - first : each;
    pass.x_tiles = 0;
    const uint32_t fits = AMX_X_BYTES / AMX_TILE_BYTES / pass.groups;
    uint32_t part = k_tiles;
    if (part > fits && (pass.groups > 2 || !pass.in_place)) {
      const uint32_t parts = (k_tiles + fits - 1) / fits;
      part = (k_tiles + parts - 1) / parts;
    }
    amx_rows(&pass, swiglu, part);
  }
  _tile_release();
}

static void bf16_gemm(const pds_gemm *g) {
  amx_any(g, 0);
  if (g->stream_y) v16_stream_end();
}
static void bf16_swiglu(const pds_gemm *g) {
  amx_any(g, 1);
}
