/* ops_mlp.c: both stages of MLPs as one parallel job: no worker waits until all of the first stage
 * is done, a matrix of the second needs the same one of the first alone. Items are claimed in
 * order and those of the first stage wait for nothing, so a wait always ends. */
#include <stdatomic.h>

#include "ops.h"

enum { STAGES = 4 };

typedef struct stage {
  pds_mlp_job *mlp;
  const pds_quantise *q; /* of the first stage: how the rows that it writes become int8 */
  uint32_t end;          /* item behind its last */
  int down;
} stage;

typedef struct chain {
  stage stages[STAGES];
} chain;

static _Atomic uint32_t *left_of(const pds_mlp_job *mlp, uint32_t matrix) {
  return (_Atomic uint32_t *)((unsigned char *)mlp->left + matrix * mlp->left_step);
}

/* The rows of matrix i that `down` reads. */
static void quantise_rows(const pds_mlp_job *mlp, const pds_quantise *q, uint32_t matrix) {
  pds_gemm g = mlp->down.gemm;
  if (mlp->down.select) mlp->down.select(&mlp->down, matrix, &g);
  const size_t first = (size_t)((const unsigned char *)g.x - q->y) / q->y_stride;
  for (uint32_t row = 0; row < g.rows; row++) pds_quantise_row(q, (uint32_t)first + row);
}

/* The stage of an item, which becomes that within the stage. */
static const stage *stage_of(const chain *c, uint32_t *item) {
  const stage *s = c->stages;
  uint32_t begin = 0;
  while (*item >= s->end) begin = s++->end;
  *item -= begin;
  return s;
}

static void run_chain_item(void *arg, uint32_t item, uint32_t worker) {
  (void)worker;
  const stage *s = stage_of(arg, &item);
  const pds_mlp_job *mlp = s->mlp;
  if (s->down) {
    pds_pool_wait(left_of(mlp, pds_gemm_item_matrix(&mlp->down, item)));
    pds_run_gemm_item(&mlp->down, item);
    return;
  }
  pds_run_gemm_item(&mlp->up, item);
  const uint32_t matrix = pds_gemm_item_matrix(&mlp->up, item);
  _Atomic uint32_t *left = left_of(mlp, matrix);
  if (atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) > 2) return;
  if (s->q->kernels) quantise_rows(mlp, s->q, matrix);
  atomic_store_explicit(left, 0, memory_order_release);
}

void pds_run_mlps(pds_step_ctx *ctx, pds_mlp_job *mlps, uint32_t n) {
  pds_gemm_job *ups[2] = {&mlps[0].up, n == 2 ? &mlps[1].up : NULL};
  unsigned char *to = (unsigned char *)pds_buf(ctx, PDS_BUF_XQ) + pds_quantise_x(ctx, ups, n);
  pds_quantise q[2];
  chain c;
  uint32_t items = 0;
  for (uint32_t i = 0; i < n; i++) {
    pds_mlp_job *m = &mlps[i];
    q[i] = pds_quantise_of(ctx, &m->down, to);
    if (q[i].kernels) to += q[i].rows * q[i].y_stride;
    const uint32_t each = pds_cut_gemms(ctx, &m->up, 0) / m->up.count;
    for (uint32_t matrix = 0; matrix < m->up.count; matrix++)
      atomic_store_explicit(left_of(m, matrix), each + 1, memory_order_relaxed);
    c.stages[i] = (stage){.mlp = m, .q = &q[i], .end = items += each * m->up.count};
  }
  for (uint32_t i = 0; i < n; i++) {
    items += pds_cut_gemms(ctx, &mlps[i].down, i + 1 == n);
    c.stages[n + i] = (stage){.mlp = &mlps[i], .end = items, .down = 1};
  }
  pds_pool_run(ctx->pool, run_chain_item, &c, items);
}
