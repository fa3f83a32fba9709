/* launch_gemm.c: which of gemm.cu's kernels multiplies, and with what grid. */
#include "kernels/gemm_shape.h"
#include "launch.h"

/* Rows of a block of the tile kernels, and about how long a block takes: weights cost the same for
 * fewer rows. Each format's kernels are in this order in list.h. */
enum { TILES = 3 };
static const uint32_t tile_rows[TILES] = {128, 64, 32};
static const uint32_t tile_time[TILES] = {8, 5, 4};
enum { GROUP_TIME = 4 }; /* of Hopper's kernels, which have the first one's tiles */

static uint32_t parts_of(uint32_t n, uint32_t size) {
  return (n + size - 1) / size;
}

static uint32_t matrices(const pds_cu_gemm *g) {
  return g->n_holes ? g->n_holes : g->count;
}

static uint32_t rows_of(const pds_cu_gemm *g, uint32_t i) {
  return g->n_holes ? g->holes[i].rows : g->rows;
}

static uint32_t most_rows(const pds_cu_gemm *g) {
  uint32_t most = 1;
  for (uint32_t i = 0; i < matrices(g); i++) most = rows_of(g, i) > most ? rows_of(g, i) : most;
  return most;
}

static uint32_t panels_of(const pds_cu_gemm *g) {
  return parts_of(g->cols, 16) * (g->swiglu ? 2 : 1);
}

static uint32_t bits_of(const pds_cu_gemm *g) {
  return g->w_dtype == PDS_CU_BF16 ? 16 : g->w_dtype == PDS_CU_I8 ? 8 : 4;
}

/* Whether the tensor cores can: bf16 x in 16-byte pieces, times weights that bf16 can hold. */
static int tensor(const pds_cu_gemm *g) {
  return g->act_dtype == PDS_CU_BF16 && g->w_dtype != PDS_CU_F32 && g->x_stride % 8 == 0 &&
         g->x_step % 8 == 0 && (uintptr_t)g->x % 16 == 0;
}

/* Few columns, as a gate's, leave most of a device idle but for many rows. */
static pds_cu_launch scalar(const pds_cu_device *device, const pds_cu_gemm *g, uint32_t most) {
  const uint32_t blocks =
      parts_of(most, GEMM_SCALAR_ROWS) * parts_of(panels_of(g), GEMM_SCALAR_PANELS) * matrices(g);
  if (most <= GEMM_FEW || blocks < device->sms / 8) {
    return (pds_cu_launch){
        .kernel = PDS_CU_gemm_few,
        .grid = {parts_of(g->cols, GEMM_FEW_COLS), matrices(g), parts_of(most, GEMM_FEW_ROWS)},
        .threads = GEMM_FEW_WARPS * 32,
        .shared_bytes = GEMM_FEW_SHARED};
  }
  return (pds_cu_launch){.kernel = PDS_CU_gemm_scalar,
                         .grid = {parts_of(most, GEMM_SCALAR_ROWS),
                                  parts_of(panels_of(g), GEMM_SCALAR_PANELS), matrices(g)},
                         .threads = GEMM_SCALAR_THREADS,
                         .shared_bytes = GEMM_SCALAR_SHARED};
}

/* Blocks that run together, of `bytes` of shared memory each: 1 KiB more is CUDA's. */
static uint32_t together(const pds_cu_device *device, uint32_t bytes) {
  return device->sms * ((device->shared_most + 1024) / (bytes + 1024));
}

/* Pairs of panels that a block takes one after the other, at least `least`, so that all are done
 * first, `blocks` blocks at a time; a block costs about a pair more. */
static uint32_t turns_of(uint32_t pairs, uint32_t count, uint32_t blocks, uint32_t least) {
  enum { MOST = 256 };
  uint32_t best = least;
  uint64_t time = UINT64_MAX;
  for (uint32_t n = least; n <= pairs && n <= MOST; n++) {
    const uint64_t waves = ((uint64_t)parts_of(pairs, n) * count + blocks - 1) / blocks;
    if (waves * (n + 1) < time) {
      time = waves * (n + 1);
      best = n;
    }
  }
  return best;
}

static pds_cu_launch stream(const pds_cu_device *device, pds_cu_gemm *g, uint32_t most) {
  const uint32_t pairs = parts_of(panels_of(g), 2), count = matrices(g);
  const uint32_t bits = bits_of(g), steps = g->k_pad / GEMM_STREAM_STEP(bits);
  uint32_t warps = g->n_holes                     ? GEMM_EXPERT_WARPS
                   : pairs * count <= device->sms ? GEMM_STREAM_WARPS
                                                  : GEMM_DENSE_WARPS;
  /* whatever the rows, since sums are those of warps */
  while (warps > 1 &&
         warps * GEMM_STREAM_BYTES(bits, GEMM_FEW, GEMM_STREAM_AHEAD) > device->shared_most)
    warps /= 2;
  /* x comes with the weights; or it stays for more than one pair, where that leaves room for enough
   * warps to keep memory busy */
  const uint32_t bytes[2] = {warps * GEMM_STREAM_BYTES(bits, most, GEMM_STREAM_AHEAD),
                             warps * GEMM_STREAM_BYTES(bits, most, parts_of(steps, warps))};
  const uint32_t kept = together(device, bytes[1]);
  uint32_t turns = turns_of(pairs, count, together(device, bytes[0]), 1);
  const int keep = turns > 1 && kept * warps >= device->sms * 8;
  if (keep) turns = turns_of(pairs, count, kept, 2);
  g->free |= turns << GEMM_TURNS_SHIFT | (keep ? GEMM_KEEP_X : 0);
  return (pds_cu_launch){.kernel = bits == 16  ? PDS_CU_gemm_stream_bf16
                                   : bits == 8 ? PDS_CU_gemm_stream_i8
                                               : PDS_CU_gemm_stream_i4,
                         .grid = {parts_of(pairs, turns), count, 1},
                         .threads = warps * 32,
                         .shared_bytes = bytes[keep]};
}

static uint32_t tiles_of(const pds_cu_gemm *g, uint32_t i, uint32_t rows) {
  return parts_of(rows_of(g, i), rows) * parts_of(panels_of(g), GEMM_TILE_PANELS);
}

static int has_groups(const pds_cu_device *device, const pds_cu_gemm *g) {
  return device->compute == 90 && GEMM_GROUP_SHARED(bits_of(g)) <= device->shared_most;
}

/* The tile that is done first. */
static uint32_t best_tile(const pds_cu_device *device, const pds_cu_gemm *g) {
  uint32_t best = 0;
  uint64_t least = UINT64_MAX;
  for (uint32_t t = 0; t < TILES; t++) {
    uint64_t tiles = 0;
    for (uint32_t i = 0; i < matrices(g); i++) tiles += tiles_of(g, i, tile_rows[t]);
    /* up to 32 rows, reading weights is all: two smaller blocks together do that better */
    const int group = t == 0 && has_groups(device, g) && most_rows(g) > tile_rows[TILES - 1];
    const uint32_t one = group ? GROUP_TIME : tile_time[t];
    const uint64_t time = (tiles + device->sms - 1) / device->sms * one;
    if (time < least) {
      least = time;
      best = t;
    }
  }
  return best;
}

/* Stages under way, of `bytes` each: as many as fit, but rather three of two blocks that share a
 * multiprocessor than four of one. */
static uint32_t stages_of(const pds_cu_device *device, uint32_t bytes, uint32_t tile) {
  const uint32_t all = device->shared_most / bytes;
  const uint32_t half = (device->shared_most / 2 - 512) / bytes; /* 1 KiB of each block is CUDA's */
  const uint32_t n = tile > 0 && half >= 3 ? half : all;
  return n > GEMM_TILE_STAGES ? GEMM_TILE_STAGES : n < 2 ? 2 : n;
}

static pds_cu_launch tiled(const pds_cu_device *device, pds_cu_gemm *g) {
  const uint32_t tile = best_tile(device, g), rows = tile_rows[tile];
  const uint32_t bits = bits_of(g);
  const pds_cu_kernel first = bits == 16  ? PDS_CU_gemm_bf16_128
                              : bits == 8 ? PDS_CU_gemm_i8_128
                                          : PDS_CU_gemm_i4_128;
  const uint32_t bytes = GEMM_TILE_STAGE(rows, bits), stages = stages_of(device, bytes, tile);
  const uint32_t end = GEMM_TILE_END(rows);
  g->free |= stages;
  uint32_t tiles = 0;
  for (uint32_t i = 0; i < g->n_holes; i++) {
    g->holes[i].tile = tiles;
    tiles += tiles_of(g, i, rows);
  }
  if (!g->n_holes) tiles = tiles_of(g, 0, rows);
  if (tile == 0 && has_groups(device, g)) {
    g->free |= tiles << GEMM_TURNS_SHIFT;
    return (pds_cu_launch){
        .kernel = bits == 16  ? PDS_CU_gemm_group_bf16_128
                  : bits == 8 ? PDS_CU_gemm_group_i8_128
                              : PDS_CU_gemm_group_i4_128,
        .grid = {tiles < device->sms ? tiles : device->sms, g->n_holes ? 1 : g->count, 1},
        .threads = GEMM_TILE_THREADS,
        .shared_bytes = GEMM_GROUP_SHARED(bits)};
  }
  return (pds_cu_launch){.kernel = (pds_cu_kernel)(first + tile),
                         .grid = {tiles, g->n_holes ? 1 : g->count, 1},
                         .threads = GEMM_TILE_THREADS,
                         .shared_bytes = stages * bytes > end ? stages * bytes : end};
}

pds_cu_launch pds_cu_shape_gemm(const pds_cu_device *device, pds_cu_gemm *g) {
  const uint32_t most = most_rows(g);
  const int aligned = g->y_stride % 4 == 0 && g->y_step % 4 == 0 && (uintptr_t)g->y % 16 == 0;
  g->free = aligned ? GEMM_Y_ALIGNED : 0;
  for (uint32_t i = 0; i < g->n_holes; i++) g->holes[i].tile = 0;
  if (!tensor(g)) return scalar(device, g, most);
  return most <= GEMM_FEW ? stream(device, g, most) : tiled(device, g);
}
