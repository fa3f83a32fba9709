/* ops_net.c: the forward of a net. Hidden units are fp32; matrices take them as two bf16 rows that
 * add up to them within 2^-17, for the price in time of one: it is the weights that take time. */
#include <string.h>

#include "ops.h"

typedef struct net_job {
  pds_step_ctx *ctx;
  const pds_net *net;
  const pds_gate *gate, *target; /* of the layer, and of the one that is predicted */
} net_job;

static float widen(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static float *row_u(const net_job *job, uint32_t row) {
  return (float *)pds_buf(job->ctx, PDS_BUF_NET_U) +
         (size_t)row * pds_ceil(pds_net_columns(job->net), PDS_LANES);
}

static uint32_t stride_v(const pds_net *net) {
  return pds_ceil(net->width > net->experts ? net->width : net->experts, PDS_LANES);
}

/* What a matrix made of the two rows of `row`. */
static float *row_v(const net_job *job, uint32_t row) {
  return (float *)pds_buf(job->ctx, PDS_BUF_NET_V) + (size_t)row * 2 * stride_v(job->net);
}

/* u += rows `id` of the features' part `part`, times w (NULL: 1). */
static void add_features(const pds_net *net, uint32_t part, const int32_t *id, const float *w,
                         uint32_t k, float *u) {
  const uint32_t n = net->width + net->experts;
  for (uint32_t r = 0; r < k; r++) {
    if (id[r] < 0) continue;
    const uint16_t *x = net->features + ((size_t)part * net->experts + (uint32_t)id[r]) * n;
    const float a = w ? w[r] : 1;
    for (uint32_t i = 0; i < n; i++) u[i] += a * widen(x[i]);
  }
}

/* The hidden units as two rows for a matrix to read. */
static void split(const net_job *job, uint32_t row) {
  const pds_step_ctx *ctx = job->ctx;
  const uint32_t n = job->net->width, stride = pds_ceil(n, 32);
  float *h = row_u(job, row), *rest = row_v(job, row);
  uint16_t *high = (uint16_t *)pds_buf(ctx, PDS_BUF_NET_H) + (size_t)row * 2 * stride;
  uint16_t *low = high + stride;
  ctx->kernels->bf16.convert(h, high, n);
  for (uint32_t i = 0; i < n; i++) rest[i] = h[i] - widen(high[i]);
  ctx->kernels->bf16.convert(rest, low, n);
  memset(high + n, 0, (stride - n) * sizeof *high);
  memset(low + n, 0, (stride - n) * sizeof *low);
}

static void first_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const net_job *job = arg;
  const pds_step_ctx *ctx = job->ctx;
  const pds_net *net = job->net;
  const uint32_t k = job->gate->top_k, next = job->target->top_k;
  float *u = row_u(job, row);
  if (net->in.dtype == PDS_NONE) memcpy(u, net->bias, pds_net_columns(net) * sizeof *u);
  const struct {
    uint32_t block;
    pds_buffer ids;
    uint32_t k;
  } parts[] = {{PDS_NET_ROUTED, PDS_BUF_ROUTE_ID, k},
               {PDS_NET_PREVIOUS, PDS_BUF_NET_PREV, k},
               {PDS_NET_PREVIOUS_NEXT, PDS_BUF_NET_NEXT, next}};
  for (uint32_t i = 0, part = 0; i < 3; i++) {
    if (!(net->blocks & parts[i].block)) continue;
    /* the layer's own routing is that of all rows */
    const size_t at = (size_t)row * (i == 0 ? ctx->predict_step : 1) * parts[i].k;
    const float *w = i == 0 ? (const float *)pds_buf(ctx, PDS_BUF_ROUTE_W) + at : NULL;
    add_features(net, part++, (const int32_t *)pds_buf(ctx, parts[i].ids) + at, w, parts[i].k, u);
  }
  if (!net->width) return;
  float *s = row_v(job, row);
  memcpy(s, u, net->width * sizeof *s);
  ctx->kernels->sigmoid(s, net->width);
  for (uint32_t i = 0; i < net->width; i++) u[i] *= s[i];
  split(job, row);
}

static void block_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const net_job *job = arg;
  const pds_net *net = job->net;
  const uint32_t n = net->width;
  float *h = row_u(job, row), *gate = h + n + net->experts;
  float *x = row_v(job, row), *s = x + stride_v(net);
  for (uint32_t i = 0; i < n; i++) s[i] = x[i] += s[i] + net->block_bias[i];
  job->ctx->kernels->sigmoid(s, n);
  job->ctx->kernels->sigmoid(gate, n);
  for (uint32_t i = 0; i < n; i++) h[i] += gate[i] * (x[i] * s[i]);
  split(job, row);
}

static void last_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const net_job *job = arg;
  const pds_net *net = job->net;
  const float *u = row_u(job, row) + net->width;
  const float *high = row_v(job, row), *low = high + stride_v(net);
  float *logits =
      (float *)pds_buf(job->ctx, PDS_BUF_PREDICT) + (size_t)row * pds_ceil(net->experts, PDS_LANES);
  for (uint32_t e = 0; e < net->experts; e++)
    logits[e] = net->width ? u[e] + (high[e] + low[e]) : u[e];
}

int pds_net_first(pds_step_ctx *ctx, const pds_net *net, pds_gemm_job *out_job) {
  if (net->in.dtype == PDS_NONE) return 0;
  const uint32_t stride = pds_ceil(ctx->plan->hidden, 32), rows = pds_predicting(ctx);
  const void *x = pds_buf(ctx, PDS_BUF_XACT);
  size_t x_stride = (size_t)stride * ctx->predict_step;
  if (ctx->plan->act_dtype != PDS_BF16) {
    const float *from = pds_buf(ctx, PDS_BUF_XN);
    uint16_t *to = pds_buf(ctx, PDS_BUF_NET_X);
    for (uint32_t row = 0; row < rows; row++)
      ctx->kernels->bf16.convert(from + row * x_stride, to + (size_t)row * stride, stride);
    x = to;
    x_stride = stride;
  }
  *out_job = pds_gemm_at(ctx, &net->in, pds_net_data(net, &net->in), x, x_stride,
                         pds_buf(ctx, PDS_BUF_NET_U), pds_ceil(pds_net_columns(net), PDS_LANES),
                         rows, PDS_OUT_F32);
  out_job->gemm.bias = net->bias;
  return 1;
}

static void run_matrix(pds_step_ctx *ctx, const pds_net *net, const pds_tensor *w) {
  pds_gemm_job gemm = pds_gemm_at(ctx, w, pds_net_data(net, w), pds_buf(ctx, PDS_BUF_NET_H),
                                  pds_ceil(net->width, 32), pds_buf(ctx, PDS_BUF_NET_V),
                                  stride_v(net), 2 * pds_predicting(ctx), PDS_OUT_F32);
  pds_run_gemms(ctx, &gemm);
}

void pds_net_rest(pds_step_ctx *ctx, uint32_t layer, const pds_net *net) {
  const pds_layer *l = &ctx->plan->layers[layer];
  net_job job = {.ctx = ctx,
                 .net = net,
                 .gate = &l->gate,
                 .target = &ctx->plan->layers[l->predictor.target].gate};
  pds_run_rows(ctx, first_row, &job, pds_predicting(ctx), PDS_FEW_ROWS);
  if (net->deep) {
    run_matrix(ctx, net, &net->block);
    pds_run_rows(ctx, block_row, &job, pds_predicting(ctx), PDS_FEW_ROWS);
  }
  if (net->width) run_matrix(ctx, net, &net->out);
  pds_run_rows(ctx, last_row, &job, pds_predicting(ctx), PDS_FEW_ROWS);
}

/* The row before `row` of its sequence; `row` itself: it is in no row of this step. */
static uint32_t row_before(const pds_step_ctx *ctx, uint32_t row) {
  for (uint32_t i = row; i-- > 0;)
    if (ctx->seq[i] == ctx->seq[row]) return i;
  return row;
}

void pds_net_previous(pds_step_ctx *ctx, uint32_t layer) {
  if (!ctx->last) return;
  const uint32_t target = ctx->plan->layers[layer].predictor.target;
  const uint32_t k = ctx->plan->layers[layer].gate.top_k;
  const uint32_t next_k = ctx->plan->layers[target].gate.top_k;
  const int32_t *routed = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  int32_t *prev = pds_buf(ctx, PDS_BUF_NET_PREV), *next = pds_buf(ctx, PDS_BUF_NET_NEXT);
  for (uint32_t row = 0; row < ctx->rows; row += ctx->predict_step, prev += k, next += next_k) {
    const int32_t seq = ctx->seq[row];
    const uint32_t before = row_before(ctx, row), length = ctx->length[seq];
    const int known = length && *pds_last_length(ctx->last, ctx->plan, seq) == length;
    const uint16_t *own = pds_last_ids(ctx, seq, layer), *then = pds_last_ids(ctx, seq, target);
    for (uint32_t r = 0; r < k; r++)
      prev[r] = before != row ? routed[(size_t)before * k + r] : known ? own[r] : -1;
    for (uint32_t r = 0; r < next_k; r++) next[r] = before == row && known ? then[r] : -1;
  }
}

void pds_op_remember(pds_step_ctx *ctx, uint32_t layer) {
  if (!ctx->last) return;
  const uint32_t k = ctx->plan->layers[layer].gate.top_k;
  const int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  for (uint32_t row = 0; row < ctx->rows; row++, id += k) {
    uint16_t *last = pds_last_ids(ctx, ctx->seq[row], layer);
    for (uint32_t r = 0; r < k; r++) last[r] = (uint16_t)id[r];
  }
}

pds_status pds_net_check(const pds_plan *plan) {
  uint32_t experts = 0, top_k = 0, predicts = 0;
  for (uint32_t i = 0; i < plan->n_layers; i++) {
    const pds_layer *l = &plan->layers[i];
    predicts |= l->predictor.kind != PDS_PREDICT_NONE;
    if (!l->moe) continue;
    if (l->gate.experts > experts) experts = l->gate.experts;
    if (l->gate.top_k > top_k) top_k = l->gate.top_k;
  }
  if (!predicts) return PDS_OK;
  const uint64_t rows = plan->max_rows < plan->predict_rows ? plan->max_rows : plan->predict_rows;
  const uint64_t lanes = pds_ceil(experts, PDS_LANES), w = PDS_NET_WIDTH;
  const struct {
    pds_buffer buffer;
    uint64_t bytes;
  } need[] = {
      {PDS_BUF_NET_X, plan->act_dtype == PDS_BF16 ? 0 : 2 * rows * pds_ceil(plan->hidden, 32)},
      {PDS_BUF_NET_U, 4 * rows * pds_ceil(2 * PDS_NET_WIDTH + experts, PDS_LANES)},
      {PDS_BUF_NET_H, 2 * 2 * rows * w},
      {PDS_BUF_NET_V, 4 * 2 * rows * (w > lanes ? w : lanes)},
      {PDS_BUF_NET_PREV, 4 * rows * top_k},
      {PDS_BUF_NET_NEXT, 4 * rows * top_k},
  };
  for (size_t i = 0; i < sizeof need / sizeof *need; i++)
    if (plan->buffer_bytes[need[i].buffer] < need[i].bytes)
      return pds_fail(PDS_ERR_PLAN_FORMAT,
                      "plan constants: buffer %d of %llu bytes, predictors need %llu",
                      (int)need[i].buffer, (unsigned long long)plan->buffer_bytes[need[i].buffer],
                      (unsigned long long)need[i].bytes);
  if (plan->last_top_k && plan->last_top_k < top_k)
    return pds_fail(PDS_ERR_PLAN_FORMAT,
                    "plan constants: %u experts a layer are remembered, expected %u",
                    plan->last_top_k, top_k);
  return PDS_OK;
}
