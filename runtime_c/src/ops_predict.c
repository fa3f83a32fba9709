/* ops_predict.c: which experts the next layer with experts will choose, before it has run. Nothing
 * here touches what a result is made of. */
#include <math.h>
#include <string.h>

#include "ops.h"

typedef struct predict_job {
  pds_step_ctx *ctx;
  const pds_gate *gate; /* of the layer; NULL: routed already */
  uint32_t layer;
  const pds_gate *target; /* of the layer that is predicted */
} predict_job;

/* Items 0 .. rows - 1 predict; the others route row `item - rows` of the layer itself. */
static void predict_item(void *arg, uint32_t item, uint32_t worker) {
  const predict_job *job = arg;
  pds_step_ctx *ctx = job->ctx;
  if (job->gate && item >= ctx->rows) {
    pds_route_row(ctx, job->layer, worker, item - ctx->rows);
    return;
  }
  const uint32_t k = job->target->top_k;
  pds_route(ctx, job->target, worker,
            (float *)pds_buf(ctx, PDS_BUF_PREDICT) +
                (size_t)item * pds_ceil(job->target->experts, PDS_LANES),
            (int32_t *)pds_buf(ctx, PDS_BUF_PREDICT_ID) + (size_t)item * k,
            (float *)pds_buf(ctx, PDS_BUF_PREDICT_W) + (size_t)item * k);
}

static void route_item(void *arg, uint32_t row, uint32_t worker) {
  const predict_job *job = arg;
  pds_route_row(job->ctx, job->layer, worker, row);
}

/* A net's logits: the best top_k, and how sure it is of each. */
static void choose_item(void *arg, uint32_t row, uint32_t worker) {
  const predict_job *job = arg;
  pds_step_ctx *ctx = job->ctx;
  const uint32_t n = job->target->experts, k = job->target->top_k;
  const float *logits =
      (const float *)pds_buf(ctx, PDS_BUF_PREDICT) + (size_t)row * pds_ceil(n, PDS_LANES);
  int32_t *id = (int32_t *)pds_buf(ctx, PDS_BUF_PREDICT_ID) + (size_t)row * k;
  float *weight = (float *)pds_buf(ctx, PDS_BUF_PREDICT_W) + (size_t)row * k;
  uint8_t *used = pds_worker_scratch(ctx, worker);
  memset(used, 0, n);
  for (uint32_t r = 0; r < k; r++) {
    const uint32_t e = pds_best_unused(logits, used, n);
    used[e] = 1;
    id[r] = (int32_t)e;
    weight[r] = logits[e];
  }
  ctx->kernels->sigmoid(weight, k);
}

static const pds_gate *target_of(const pds_step_ctx *ctx, uint32_t layer) {
  return &ctx->plan->layers[ctx->plan->layers[layer].predictor.target].gate;
}

/* What the caller has set, in place of what was predicted. */
static void replace_predictions(pds_step_ctx *ctx, uint32_t layer) {
  const uint32_t k = target_of(ctx, layer)->top_k, stride = ctx->plan->last_top_k;
  int32_t *id = pds_buf(ctx, PDS_BUF_PREDICT_ID);
  float *weight = pds_buf(ctx, PDS_BUF_PREDICT_W);
  for (uint32_t row = 0; row < ctx->rows; row += ctx->predict_step, id += k, weight += k) {
    const uint32_t at = (uint32_t)ctx->position[row];
    if (at >= ctx->n_predictions) continue;
    const uint16_t *said = ctx->predictions + ((size_t)at * ctx->plan->n_layers + layer) * stride;
    for (uint32_t r = 0; r < k; r++) {
      id[r] = said[r];
      weight[r] = 1;
    }
  }
}

/* The target's gate on the rows that predict. */
static pds_gemm_job cross_gate(pds_step_ctx *ctx, const pds_gate *target) {
  pds_gemm_job job = pds_gate_of(ctx, target, pds_buf(ctx, PDS_BUF_PREDICT));
  job.gemm.x_stride *= ctx->predict_step;
  job.gemm.rows = pds_predicting(ctx);
  return job;
}

void pds_op_predict(pds_step_ctx *ctx, uint32_t layer) {
  predict_job job = {.ctx = ctx, .target = target_of(ctx, layer)};
  const pds_net *net = pds_net_of(ctx, layer);
  if (net) pds_net_previous(ctx, layer);
  pds_op_predict_logits(ctx, layer);
  pds_run_rows(ctx, net ? choose_item : predict_item, &job, pds_predicting(ctx), PDS_FEW_ROWS);
  if (ctx->n_predictions) replace_predictions(ctx, layer);
}

static void gate_and_predict(pds_step_ctx *ctx, uint32_t layer) {
  predict_job job = {.ctx = ctx,
                     .gate = &ctx->plan->layers[layer].gate,
                     .layer = layer,
                     .target = target_of(ctx, layer)};
  const pds_net *net = pds_net_of(ctx, layer);
  pds_gemm_job own = pds_gate_of(ctx, job.gate, pds_buf(ctx, PDS_BUF_GATE)), other;
  if (!net) {
    other = pds_gate_of(ctx, job.target, pds_buf(ctx, PDS_BUF_PREDICT));
    pds_run_gemms_together(ctx, &own, &other);
    pds_run_rows(ctx, predict_item, &job, 2 * ctx->rows, PDS_FEW_ROWS);
    return;
  }
  if (pds_net_first(ctx, net, &other))
    pds_run_gemms_together(ctx, &own, &other);
  else
    pds_run_gemms(ctx, &own);
  pds_run_rows(ctx, route_item, &job, ctx->rows, PDS_FEW_ROWS);
  pds_net_previous(ctx, layer);
  pds_net_rest(ctx, layer, net);
  pds_run_rows(ctx, choose_item, &job, ctx->rows, PDS_FEW_ROWS);
}

void pds_op_gate_and_predict(pds_step_ctx *ctx, uint32_t layer) {
  gate_and_predict(ctx, layer);
  if (ctx->n_predictions) replace_predictions(ctx, layer);
}

void pds_op_predict_logits(pds_step_ctx *ctx, uint32_t layer) {
  const pds_net *net = pds_net_of(ctx, layer);
  pds_gemm_job gemm;
  if (!net) {
    gemm = cross_gate(ctx, target_of(ctx, layer));
    pds_run_gemms(ctx, &gemm);
    return;
  }
  if (pds_net_first(ctx, net, &gemm)) pds_run_gemms(ctx, &gemm);
  pds_net_rest(ctx, layer, net);
}

void pds_op_bind_llc(pds_step_ctx *ctx, uint32_t layer, uint32_t capacity) {
  const pds_gate *target = target_of(ctx, layer);
  const uint32_t n = pds_predicting(ctx) * target->top_k;
  const int32_t *id = pds_buf(ctx, PDS_BUF_PREDICT_ID);
  const float *weight = pds_buf(ctx, PDS_BUF_PREDICT_W);
  float *sum = pds_buf(ctx, PDS_BUF_PREDICT); /* scores have served */
  int32_t *hole = pds_buf(ctx, PDS_BUF_LLC_HOLES);
  for (uint32_t e = 0; e < target->experts; e++) sum[e] = -INFINITY; /* not predicted */
  for (uint32_t i = 0; i < n; i++)
    sum[id[i]] = (sum[id[i]] == -INFINITY ? 0 : sum[id[i]]) + weight[i];
  uint32_t bound = 0;
  for (uint32_t e = 0; e < target->experts; e++) {
    if (sum[e] == -INFINITY) continue;
    if (bound == capacity && !pds_above(sum[e], sum[hole[bound - 1]])) continue;
    uint32_t at = bound < capacity ? bound++ : bound - 1;
    for (; at && pds_above(sum[e], sum[hole[at - 1]]); at--) hole[at] = hole[at - 1];
    hole[at] = (int32_t)e;
  }
  ctx->n_llc_holes = bound;
}
