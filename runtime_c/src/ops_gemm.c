/* ops_gemm.c: GEMMs as parallel jobs. An item is a range of W's panels times a range of x's
 * rows; kernels.h promises that no result depends on how the ranges are chosen, so they may
 * depend on the number of workers. */
#include "ops.h"

/* Weight bytes of one item: long enough to stream at full bandwidth, short enough to balance. With
 * more than one row an item also fetches those rows, the dearer if they are many and must be
 * gathered: then it takes more panels. */
enum {
  ITEM_BYTES = 256 * 1024,
  ITEM_BYTES_ROWS = 1024 * 1024,
  ITEM_BYTES_GATHER = 8 * 1024 * 1024,
  MANY_ROWS = 32,
  ITEMS_PER_WORKER = 4,
  FINE_PER_WORKER = 2,
  MIN_ITEM_ROWS = 32
};

typedef void (*gemm_fn)(const pds_gemm *);

/* The kernel for the weight's format; all but fp32 read and write bf16 act. */
static gemm_fn kernel_of(const pds_kernels *k, const pds_tensor *w, int swiglu) {
  switch (w->dtype) {
  case PDS_I8: return swiglu ? k->i8.swiglu : k->i8.gemm;
  case PDS_I4: return swiglu ? k->i4.swiglu : k->i4.gemm;
  case PDS_BF16: return swiglu ? k->bf16.swiglu : k->bf16.gemm;
  default: return swiglu ? k->f32.swiglu : k->f32.gemm;
  }
}

static pds_gemm_job make(pds_step_ctx *ctx, const pds_tensor *w, const void *data, const void *x,
                         size_t x_stride, void *y, size_t y_stride, uint32_t rows) {
  return (pds_gemm_job){
      .gemm = {.x = x,
               .x_stride = x_stride,
               .x_div = 1,
               .w = data,
               .panel_stride = pds_panel_bytes(w),
               .y = y,
               .y_stride = y_stride,
               .rows = rows,
               .k = pds_k_pad(w),
               .l2_bytes = ctx->l2_bytes},
      .w = w,
      .count = 1,
      .x_rows = rows,
  };
}

pds_gemm_job pds_gemm_at(pds_step_ctx *ctx, const pds_tensor *w, const void *data, const void *x,
                         size_t x_stride, void *y, size_t y_stride, uint32_t rows,
                         pds_gemm_out out) {
  pds_gemm_job job = make(ctx, w, data, x, x_stride, y, y_stride, rows);
  job.gemm.cols = w->n;
  job.gemm.out = (uint32_t)out;
  job.fn = kernel_of(ctx->kernels, w, 0);
  job.y_bytes = out == PDS_OUT_ACT && w->dtype != PDS_F32 ? 2 : 4;
  return job;
}

pds_gemm_job pds_gemm_of(pds_step_ctx *ctx, const pds_tensor *w, const void *x, size_t x_stride,
                         void *y, size_t y_stride, uint32_t rows, pds_gemm_out out) {
  return pds_gemm_at(ctx, w, pds_weight(ctx, w, 0), x, x_stride, y, y_stride, rows, out);
}

pds_gemm_job pds_swiglu_of(pds_step_ctx *ctx, const pds_mlp *mlp, const void *x, size_t x_stride,
                           void *y, size_t y_stride, uint32_t rows) {
  const pds_tensor *w = &mlp->gate_up;
  pds_gemm_job job = make(ctx, w, pds_weight(ctx, w, 0), x, x_stride, y, y_stride, rows);
  job.gemm.cols = mlp->inter;
  job.gemm.pad = pds_ceil(mlp->inter, 32);
  job.gemm.out = PDS_OUT_ACT;
  job.swiglu = 1;
  job.fn = kernel_of(ctx->kernels, w, 1);
  job.y_bytes = w->dtype != PDS_F32 ? 2 : 4;
  return job;
}

/* Which matrix and which of its blocks of columns an item is. */
typedef struct piece {
  uint32_t matrix, first, blocks;
} piece;

static piece piece_of(const pds_gemm_job *job, uint32_t item) {
  uint32_t size = job->part_blocks, from = 0, parts = job->parts, matrix = 0;
  if (item >= job->coarse) {
    item -= job->coarse;
    size = job->fine_blocks;
    from = job->count == 1 ? job->coarse * job->part_blocks : 0;
    parts = job->fine_parts;
    matrix = job->count == 1 ? 0 : job->coarse / job->parts;
  }
  piece p = {.matrix = matrix + item / parts, .first = from + item % parts * size, .blocks = size};
  if (job->blocks - p.first < size) p.blocks = job->blocks - p.first;
  return p;
}

uint32_t pds_gemm_item_matrix(const pds_gemm_job *job, uint32_t item) {
  return piece_of(job, item / job->row_parts).matrix;
}

void pds_run_gemm_item(const pds_gemm_job *job, uint32_t item) {
  const uint32_t row_part = item % job->row_parts;
  const piece p = piece_of(job, item / job->row_parts);
  pds_gemm g = job->gemm;
  if (job->select) job->select(job, p.matrix, &g);

  const uint32_t col = p.first * PDS_LANES;
  g.w = (const unsigned char *)g.w + (size_t)p.first * (job->swiglu ? 2 : 1) * g.panel_stride;
  g.y = (unsigned char *)g.y + (size_t)col * job->y_bytes;
  if (g.bias) g.bias += col;
  if (p.first + p.blocks < job->blocks) {
    g.cols = p.blocks * PDS_LANES;
    g.pad = 0;
  } else {
    g.cols -= col;
    g.pad = g.pad > col ? g.pad - col : 0;
  }
  if (job->row_parts > 1) { /* only without indices: see pds_cut_gemms */
    const uint32_t row = row_part * job->part_rows;
    const size_t x_bytes = pds_group(job->w->dtype) ? 1 : job->w->dtype == PDS_BF16 ? 2 : 4;
    g.x = (const unsigned char *)g.x + (size_t)row * g.x_stride * x_bytes;
    g.y = (unsigned char *)g.y + (size_t)row * g.y_stride * job->y_bytes;
    g.rows = row_part + 1 < job->row_parts ? job->part_rows : g.rows - row;
  }
  job->fn(&g);
}

static void run_item(void *arg, uint32_t item, uint32_t worker) {
  (void)worker;
  pds_run_gemm_item(arg, item);
}

/* Blocks of columns of an item, a multiple of `step`, whose rows are about `rows`. */
static uint32_t blocks_of(const pds_gemm_job *job, uint32_t rows, uint32_t step) {
  size_t bytes = ITEM_BYTES, panel_bytes = job->gemm.panel_stride;
  if (rows >= MANY_ROWS) {
    bytes = job->gathers ? ITEM_BYTES_GATHER : ITEM_BYTES_ROWS;
    if (pds_group(job->w->dtype)) /* whose products take longer than their size says */
      panel_bytes = (size_t)job->gemm.k * 2 * PDS_LANES; /* as of bf16 */
  } else if (rows > 1 && !pds_group(job->w->dtype)) {
    bytes = ITEM_BYTES_ROWS;
  }
  const uint32_t n = (uint32_t)(bytes / (panel_bytes * (job->swiglu ? 2 : 1))) / step * step;
  return n < step ? step : n;
}

/* Makes the last items small ones, with which the workers finish together: the last quarter of one
 * matrix, or the last of several, for about `wanted` items. Returns the number of all. */
static uint32_t cut_fine(pds_gemm_job *job, uint32_t step, uint32_t wanted) {
  job->fine_blocks = pds_ceil((job->part_blocks + 3) / 4, step);
  uint32_t left = job->blocks, matrices = 1, fewer = job->parts / 4;
  if (job->count == 1) {
    left -= (job->parts - fewer) * job->part_blocks;
  } else {
    const uint32_t parts = (left + job->fine_blocks - 1) / job->fine_blocks;
    matrices = (wanted + parts - 1) / parts;
    if (matrices > job->count / 2) matrices = job->count / 2;
    fewer = matrices * job->parts;
  }
  if (!fewer) return job->coarse;
  job->coarse -= fewer;
  job->fine_parts = (left + job->fine_blocks - 1) / job->fine_blocks;
  return job->coarse + matrices * job->fine_parts;
}

uint32_t pds_cut_gemms(const pds_step_ctx *ctx, pds_gemm_job *job, int last) {
  const uint32_t threads = pds_pool_threads(ctx->pool), wanted = ITEMS_PER_WORKER * threads;
  const uint32_t each = job->rows_each ? job->rows_each : job->gemm.rows;
  /* blocks that one pass of a kernel takes together, if there are enough */
  uint32_t step = job->swiglu ? 2 : 4;
  job->blocks = pds_ceil(job->gemm.cols, PDS_LANES) / PDS_LANES;
  while (step > 1 && job->count * job->blocks < threads * step) step /= 2;
  job->part_blocks = blocks_of(job, each, step);
  while (job->part_blocks > step && job->count * (job->blocks / job->part_blocks) < wanted) {
    job->part_blocks = pds_ceil(job->part_blocks / 2, step);
  }
  job->parts = (job->blocks + job->part_blocks - 1) / job->part_blocks;
  job->part_blocks = pds_ceil((job->blocks + job->parts - 1) / job->parts, step);
  job->parts = (job->blocks + job->part_blocks - 1) / job->part_blocks;
  job->coarse = job->count * job->parts;

  job->row_parts = 1;
  const uint32_t rows = job->gemm.rows;
  if (!job->gemm.x_index && !job->gemm.y_index && job->coarse < wanted &&
      rows >= 2 * MIN_ITEM_ROWS) {
    const uint32_t most = rows / MIN_ITEM_ROWS, need = (wanted + job->coarse - 1) / job->coarse;
    job->part_rows = pds_ceil(rows / (need < most ? need : most), 8);
    job->row_parts = (rows + job->part_rows - 1) / job->part_rows;
  } else if (last && threads > 1 && job->part_blocks > 1) {
    return cut_fine(job, step > 1 ? step / 2 : 1, FINE_PER_WORKER * threads);
  }
  return job->coarse * job->row_parts;
}

void pds_run_gemms(pds_step_ctx *ctx, pds_gemm_job *job) {
  pds_gemm_job *const one[] = {job};
  pds_quantise_x(ctx, one, 1);
  pds_pool_run(ctx->pool, run_item, job, pds_cut_gemms(ctx, job, 1));
}

typedef struct joint_job {
  pds_gemm_job *first, *second;
  uint32_t items; /* of first */
} joint_job;

static void run_joint_item(void *arg, uint32_t item, uint32_t worker) {
  (void)worker;
  const joint_job *job = arg;
  if (item < job->items) {
    pds_run_gemm_item(job->first, item);
  } else {
    pds_run_gemm_item(job->second, item - job->items);
  }
}

void pds_run_gemms_together(pds_step_ctx *ctx, pds_gemm_job *a, pds_gemm_job *b) {
  pds_gemm_job *const both[] = {a, b};
  pds_quantise_x(ctx, both, 2);
  joint_job job = {.first = a, .second = b, .items = pds_cut_gemms(ctx, a, 0)};
  pds_run_rows(ctx, run_joint_item, &job, job.items + pds_cut_gemms(ctx, b, 1), 1);
}

void pds_run_rows(pds_step_ctx *ctx, pds_job_fn fn, void *arg, uint32_t items, uint32_t few) {
  if (items > few) {
    pds_pool_run(ctx->pool, fn, arg, items);
    return;
  }
  for (uint32_t i = 0; i < items; i++) fn(arg, i, 0);
}
