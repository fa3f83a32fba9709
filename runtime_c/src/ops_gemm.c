/* ops_gemm.c: GEMMs as parallel jobs. An item is a range of W's panels times a range of x's
 * rows; kernels.h promises that no result depends on how the ranges are chosen, so they may
 * depend on the number of workers. */
#include "ops.h"

/* Weight bytes of one item: long enough to stream at full bandwidth, short enough to balance. With
 * many rows an item also fetches those rows, the dearer if they must be gathered: then it takes
 * more panels. */
enum {
  ITEM_BYTES = 256 * 1024,
  ITEM_BYTES_ROWS = 1024 * 1024,
  ITEM_BYTES_GATHER = 4 * 1024 * 1024,
  MANY_ROWS = 32,
  ITEMS_PER_WORKER = 4,
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

static pds_gemm_job make(pds_step_ctx *ctx, const pds_tensor *w, const void *x, size_t x_stride,
                         void *y, size_t y_stride, uint32_t rows) {
  return (pds_gemm_job){
      .gemm = {.x = x,
               .x_stride = x_stride,
               .x_div = 1,
               .w = pds_weight(ctx, w, 0),
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

pds_gemm_job pds_gemm_of(pds_step_ctx *ctx, const pds_tensor *w, const void *x, size_t x_stride,
                         void *y, size_t y_stride, uint32_t rows, pds_gemm_out out) {
  pds_gemm_job job = make(ctx, w, x, x_stride, y, y_stride, rows);
  job.gemm.cols = w->n;
  job.gemm.out = (uint32_t)out;
  job.fn = kernel_of(ctx->kernels, w, 0);
  job.y_bytes = out == PDS_OUT_ACT && w->dtype != PDS_F32 ? 2 : 4;
  return job;
}

pds_gemm_job pds_swiglu_of(pds_step_ctx *ctx, const pds_mlp *mlp, const void *x, size_t x_stride,
                           void *y, size_t y_stride, uint32_t rows) {
  const pds_tensor *w = &mlp->gate_up;
  pds_gemm_job job = make(ctx, w, x, x_stride, y, y_stride, rows);
  job.gemm.cols = mlp->inter;
  job.gemm.pad = pds_ceil(mlp->inter, 32);
  job.gemm.out = PDS_OUT_ACT;
  job.swiglu = 1;
  job.fn = kernel_of(ctx->kernels, w, 1);
  job.y_bytes = w->dtype != PDS_F32 ? 2 : 4;
  return job;
}

static void run_item(void *arg, uint32_t item, uint32_t worker) {
  (void)worker;
  const pds_gemm_job *job = arg;
  const uint32_t row_part = item % job->row_parts, rest = item / job->row_parts;
  const uint32_t part = rest % job->parts, i = rest / job->parts;
  pds_gemm g = job->gemm;
  if (job->select) job->select(job, i, &g);

  const uint32_t first = part * job->part_blocks, col = first * PDS_LANES;
  g.w = (const unsigned char *)g.w + (size_t)first * (job->swiglu ? 2 : 1) * g.panel_stride;
  g.y = (unsigned char *)g.y + (size_t)col * job->y_bytes;
  if (g.bias) g.bias += col;
  if (part + 1 < job->parts) {
    g.cols = job->part_blocks * PDS_LANES;
    g.pad = 0;
  } else {
    g.cols -= col;
    g.pad = g.pad > col ? g.pad - col : 0;
  }
  if (job->row_parts > 1) { /* only without indices: see pds_run_gemms */
    const uint32_t row = row_part * job->part_rows;
    const size_t x_bytes = pds_group(job->w->dtype) ? 1 : job->w->dtype == PDS_BF16 ? 2 : 4;
    g.x = (const unsigned char *)g.x + (size_t)row * g.x_stride * x_bytes;
    g.y = (unsigned char *)g.y + (size_t)row * g.y_stride * job->y_bytes;
    g.rows = row_part + 1 < job->row_parts ? job->part_rows : g.rows - row;
  }
  job->fn(&g);
}

typedef struct quantise_job {
  const pds_int_kernels *kernels;
  const uint16_t *x;
  unsigned char *y;
  size_t x_stride, y_stride;
  uint32_t n, k, rows;
} quantise_job;

/* arg: one job, or two whose rows follow each other. */
static void quantise_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const quantise_job *job = arg;
  if (row >= job->rows) row -= job++->rows;
  job->kernels->quantise(job->x + row * job->x_stride, job->n, job->k,
                         job->y + row * job->y_stride);
}

/* Quantised for one, a row is quantised for the other. */
static int quantise_alike(const pds_tensor *a, const pds_tensor *b) {
  return a->dtype == b->dtype && a->k == b->k;
}

/* The x of the jobs, 1 or 2, becomes rows of int8 where their weights ask for it: once, rather than
 * in each item that reads them or in each of two jobs that read the same rows. */
static void quantise_x(pds_step_ctx *ctx, pds_gemm_job *const *jobs, uint32_t n) {
  enum { ALONE = 16 * 1024 }; /* elements: less time than workers take to wake */
  const void *first_x = jobs[0]->gemm.x;
  unsigned char *to = pds_buf(ctx, PDS_BUF_XQ);
  quantise_job q[2];
  uint32_t parts = 0, rows = 0;
  size_t elements = 0;
  for (uint32_t i = 0; i < n; i++) {
    const pds_tensor *w = jobs[i]->w;
    pds_gemm *g = &jobs[i]->gemm;
    if (!pds_group(w->dtype)) continue;
    if (i == 0 || g->x != first_x || !quantise_alike(jobs[0]->w, w)) {
      q[parts++] = (quantise_job){
          .kernels = w->dtype == PDS_I8 ? &ctx->kernels->i8 : &ctx->kernels->i4,
          .x = g->x,
          .y = to,
          .x_stride = g->x_stride,
          .y_stride = pds_quant_bytes(w),
          .n = pds_ceil(w->k, 32),
          .k = g->k,
          .rows = jobs[i]->x_rows,
      };
      to += jobs[i]->x_rows * pds_quant_bytes(w);
      rows += jobs[i]->x_rows;
      elements += (size_t)jobs[i]->x_rows * g->k;
    }
    g->x = q[parts - 1].y;
    g->x_stride = jobs[i]->x_step = q[parts - 1].y_stride;
  }
  pds_run_rows(ctx, quantise_row, q, rows, elements > ALONE ? 0 : rows);
}

static size_t quant_rows(const pds_tensor *w, size_t rows) {
  return pds_group(w->dtype) ? rows * pds_quant_bytes(w) : 0;
}

size_t pds_quant_need(const pds_plan *plan) {
  const size_t rows = plan->max_rows;
  size_t most = quant_rows(&plan->lm_head, rows);
  for (uint32_t i = 0; i < plan->n_layers; i++) {
    const pds_layer *l = &plan->layers[i];
    const int alike = quantise_alike(&l->shared.gate_up, &l->experts.gate_up);
    const size_t each[] = {
        quant_rows(&l->attn.in_proj, rows),
        quant_rows(&l->attn.q_b, rows),
        quant_rows(&l->attn.o_proj, rows),
        quant_rows(&l->dense.gate_up, rows),
        quant_rows(&l->dense.down, rows),
        /* shared and routed experts run together */
        quant_rows(&l->shared.gate_up, rows) + (alike ? 0 : quant_rows(&l->experts.gate_up, rows)),
        quant_rows(&l->shared.down, rows) + quant_rows(&l->experts.down, rows * l->gate.top_k),
    };
    for (size_t j = 0; j < sizeof each / sizeof *each; j++) most = each[j] > most ? each[j] : most;
  }
  return most;
}

/* Cuts the job into items; returns their number. */
static uint32_t cut(pds_step_ctx *ctx, pds_gemm_job *job) {
  const uint32_t wanted = ITEMS_PER_WORKER * pds_pool_threads(ctx->pool);
  const uint32_t step = job->swiglu ? 2 : 4; /* blocks that one pass of a kernel takes together */
  job->blocks = pds_ceil(job->gemm.cols, PDS_LANES) / PDS_LANES;
  const uint32_t each = job->rows_each ? job->rows_each : job->gemm.rows;
  size_t panel_bytes = job->gemm.panel_stride;
  if (each >= MANY_ROWS && pds_group(job->w->dtype)) /* whose products take longer than they are */
    panel_bytes = (size_t)job->gemm.k * 2 * PDS_LANES; /* as of bf16 */
  const size_t block_bytes = panel_bytes * (job->swiglu ? 2 : 1);
  const size_t bytes = each < MANY_ROWS ? ITEM_BYTES
                       : job->gathers   ? ITEM_BYTES_GATHER
                                        : ITEM_BYTES_ROWS;
  job->part_blocks = (uint32_t)(bytes / block_bytes) / step * step;
  if (job->part_blocks < step) job->part_blocks = step;
  while (job->part_blocks > step && job->count * (job->blocks / job->part_blocks) < wanted) {
    job->part_blocks = pds_ceil(job->part_blocks / 2, step);
  }
  job->parts = (job->blocks + job->part_blocks - 1) / job->part_blocks;
  job->part_blocks = pds_ceil((job->blocks + job->parts - 1) / job->parts, step);
  job->parts = (job->blocks + job->part_blocks - 1) / job->part_blocks;

  job->row_parts = 1;
  const uint32_t rows = job->gemm.rows, items = job->count * job->parts;
  if (!job->gemm.x_index && !job->gemm.y_index && items < wanted && rows >= 2 * MIN_ITEM_ROWS) {
    const uint32_t most = rows / MIN_ITEM_ROWS, need = (wanted + items - 1) / items;
    job->part_rows = pds_ceil(rows / (need < most ? need : most), 8);
    job->row_parts = (rows + job->part_rows - 1) / job->part_rows;
  }
  return items * job->row_parts;
}

void pds_run_gemms(pds_step_ctx *ctx, pds_gemm_job *job) {
  quantise_x(ctx, &job, 1);
  pds_run_rows(ctx, run_item, job, cut(ctx, job), 1);
}

typedef struct joint_job {
  pds_gemm_job *first, *second;
  uint32_t items; /* of first */
} joint_job;

static void run_joint_item(void *arg, uint32_t item, uint32_t worker) {
  const joint_job *job = arg;
  if (item < job->items) {
    run_item(job->first, item, worker);
  } else {
    run_item(job->second, item - job->items, worker);
  }
}

void pds_run_gemms_together(pds_step_ctx *ctx, pds_gemm_job *a, pds_gemm_job *b) {
  pds_gemm_job *const both[] = {a, b};
  quantise_x(ctx, both, 2);
  joint_job job = {.first = a, .second = b, .items = cut(ctx, a)};
  pds_run_rows(ctx, run_joint_item, &job, job.items + cut(ctx, b), 1);
}

void pds_run_rows(pds_step_ctx *ctx, pds_job_fn fn, void *arg, uint32_t items, uint32_t few) {
  if (items > few) {
    pds_pool_run(ctx->pool, fn, arg, items);
    return;
  }
  for (uint32_t i = 0; i < items; i++) fn(arg, i, 0);
}
