/* ops_quantise.c: rows of activations as int8 in groups, for int8 and int4 weights, in PDS_BUF_XQ:
 * once, rather than in each item that reads them. */
#include "ops.h"

pds_quantise pds_quantise_of(const pds_step_ctx *ctx, pds_gemm_job *job, unsigned char *to) {
  const pds_tensor *w = job->w;
  pds_gemm *g = &job->gemm;
  pds_quantise q = {.rows = job->x_rows};
  if (!pds_group(w->dtype)) return q;
  q.kernels = w->dtype == PDS_I8 ? &ctx->kernels->i8 : &ctx->kernels->i4;
  q.x = g->x;
  q.y = to;
  q.x_stride = g->x_stride;
  q.y_stride = pds_quant_bytes(w);
  q.n = pds_ceil(w->k, 32);
  q.k = g->k;
  g->x = to;
  g->x_stride = job->x_step = q.y_stride;
  return q;
}

void pds_quantise_row(const pds_quantise *q, uint32_t row) {
  q->kernels->quantise(q->x + row * q->x_stride, q->n, q->k, q->y + row * q->y_stride);
}

/* arg: two, whose rows follow each other. */
static void quantise_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const pds_quantise *q = arg;
  if (row >= q->rows) row -= q++->rows;
  pds_quantise_row(q, row);
}

/* Quantised for one, a row is quantised for the other. */
static int quantise_alike(const pds_tensor *a, const pds_tensor *b) {
  return a->dtype == b->dtype && a->k == b->k;
}

size_t pds_quantise_x(pds_step_ctx *ctx, pds_gemm_job *const *jobs, uint32_t n) {
  enum { ALONE = 16 * 1024 }; /* elements: less time than workers take to wake */
  const void *first_x = jobs[0]->gemm.x;
  unsigned char *to = pds_buf(ctx, PDS_BUF_XQ);
  pds_quantise q[2];
  uint32_t parts = 0, rows = 0;
  size_t elements = 0, bytes = 0;
  for (uint32_t i = 0; i < n; i++) {
    const int again = i && jobs[i]->gemm.x == first_x && quantise_alike(jobs[0]->w, jobs[i]->w);
    const pds_quantise made =
        pds_quantise_of(ctx, jobs[i], again ? (unsigned char *)q[0].y : to + bytes);
    if (again || !made.kernels) continue;
    q[parts++] = made;
    rows += made.rows;
    elements += (size_t)made.rows * made.k;
    bytes += made.rows * made.y_stride;
  }
  if (parts) pds_run_rows(ctx, quantise_row, q, rows, elements > ALONE ? 0 : rows);
  return bytes;
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
        quant_rows(&l->dense.gate_up, rows) + quant_rows(&l->dense.down, rows),
        /* shared and routed experts run together */
        quant_rows(&l->shared.gate_up, rows) + (alike ? 0 : quant_rows(&l->experts.gate_up, rows)) +
            quant_rows(&l->shared.down, rows) + quant_rows(&l->experts.down, rows * l->gate.top_k),
    };
    for (size_t j = 0; j < sizeof each / sizeof *each; j++) most = each[j] > most ? each[j] : most;
  }
  return most;
}
