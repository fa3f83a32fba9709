/* measure.c: how long parts of a step take, for the compiler's cost table. Rows are made up; weights,
 * kernels and workers are those of a step. */
#include <string.h>

#include "cpu.h"
#include "measure.h"
#include "ops.h"

enum { WAKE_NS = 50000 }; /* longer than a sleeping worker takes to come */

typedef struct part {
  pds_step_ctx *ctx;
  uint32_t layer;
  uint32_t n_holes;
} part;

/* --- what a step would have there --- */

/* Numbers between -0.5 and 0.5; none is so small that arithmetic on it is slow. */
static void fill(float *x, size_t n) {
  for (size_t i = 0; i < n; i++)
    x[i] = (float)((uint32_t)(i * 2654435761u) >> 8 & 0xffff) / 65536.0f - 0.5f;
}

void pds_measure_fill(pds_step_ctx *ctx, pds_buffer buffer) {
  const uint32_t hidden = ctx->plan->hidden, stride = pds_ceil(hidden, 32);
  float *x = pds_buf(ctx, buffer);
  fill(x, (size_t)ctx->rows * stride);
  for (uint32_t i = 0; i < ctx->rows; i++)
    memset(x + (size_t)i * stride + hidden, 0, (stride - hidden) * sizeof *x);
}

void pds_measure_fill_normed(pds_step_ctx *ctx) {
  pds_measure_fill(ctx, PDS_BUF_XN);
  pds_act(ctx)->convert(pds_buf(ctx, PDS_BUF_XN), pds_buf(ctx, PDS_BUF_XACT),
                        ctx->rows * pds_ceil(ctx->plan->hidden, 32));
}

static void wake_item(void *arg, uint32_t item, uint32_t worker) {
  (void)item;
  (void)worker;
  const uint64_t *begin = arg;
  while (pds_now_ns() - *begin < WAKE_NS) continue;
}

/* Workers that slept would make the first job longer than a step's are. */
void pds_measure_wake(pds_step_ctx *ctx) {
  uint64_t begin = pds_now_ns();
  pds_pool_run(ctx->pool, wake_item, &begin, pds_pool_threads(ctx->pool));
}

static void timed(const part *p, void (*run)(const part *), int64_t *out_ns) {
  const uint32_t fp = pds_fp_default();
  pds_measure_wake(p->ctx);
  const uint64_t begin = pds_now_ns();
  run(p);
  *out_ns = (int64_t)(pds_now_ns() - begin);
  pds_fp_restore(fp);
}

/* --- experts --- */

static pds_status check_experts(const pds_plan *plan, const pds_measurement *asked) {
  const pds_gate *gate = &plan->layers[asked->layer].gate;
  if (!asked->expert || !asked->tokens)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: expert or tokens is a null pointer");
  if (!asked->n || asked->n > gate->experts)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: %u experts, expected 1 to %u", asked->n,
                    gate->experts);
  const uint64_t most = (uint64_t)plan->max_rows * gate->top_k;
  uint64_t all = 0;
  for (uint32_t i = 0; i < asked->n; i++) {
    if (asked->expert[i] >= gate->experts)
      return pds_fail(PDS_ERR_ARGUMENT, "measurement: expert %u, expected 0 to %u",
                      asked->expert[i], gate->experts - 1);
    for (uint32_t j = 0; j < i; j++)
      if (asked->expert[i] == asked->expert[j])
        return pds_fail(PDS_ERR_ARGUMENT, "measurement: expert %u twice", asked->expert[i]);
    all += asked->tokens[i];
    if (!asked->tokens[i] || all > most)
      return pds_fail(PDS_ERR_BATCH,
                      "measurement: %u tokens for expert %u, expected 1 at least, and %llu in all "
                      "at most",
                      asked->tokens[i], asked->expert[i], (unsigned long long)most);
  }
  return PDS_OK;
}

/* Gives each expert its tokens: rows of the step in turn, so that none reads a row twice unless it
 * has more tokens than the step has rows. */
uint32_t pds_measure_bind(pds_step_ctx *ctx, const pds_measurement *asked) {
  const uint32_t top_k = ctx->plan->layers[asked->layer].gate.top_k;
  int32_t *sorted = pds_buf(ctx, PDS_BUF_EXPERT_ROWS);
  uint32_t all = 0, most = 0;
  for (uint32_t i = 0; i < asked->n; i++) {
    ctx->cpu_holes[i] =
        (pds_hole){.expert = asked->expert[i], .first = all, .rows = asked->tokens[i]};
    all += asked->tokens[i];
    if (asked->tokens[i] > most) most = asked->tokens[i];
  }
  ctx->rows = (all + top_k - 1) / top_k;
  if (ctx->rows < most) ctx->rows = most;
  if (ctx->rows > ctx->plan->max_rows) ctx->rows = ctx->plan->max_rows;
  for (uint32_t i = 0; i < all; i++) sorted[i] = (int32_t)(i % ctx->rows * top_k + i / ctx->rows);
  return asked->n;
}

static void run_experts(const part *p) {
  pds_op_expert(p->ctx, p->layer, p->ctx->cpu_holes, p->n_holes);
}

static void run_shared(const part *p) {
  pds_op_shared_expert(p->ctx, p->layer);
}

/* --- attention --- */

static void run_attention(const part *p) {
  pds_op_norm(p->ctx, p->layer, PDS_NORM_ATTN);
  pds_op_attention(p->ctx, p->layer);
  pds_op_norm(p->ctx, p->layer, PDS_NORM_MLP);
  if (p->ctx->plan->layers[p->layer].moe) pds_op_gate(p->ctx, p->layer);
}

pds_status pds_measure_begin_rows(pds_session *session, pds_step_ctx *ctx,
                                  const pds_measurement *asked) {
  if (!asked->position || !asked->seq)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: position or seq is a null pointer");
  PDS_RETURN_IF_ERROR(pds_kv_begin(&session->kv, asked->rows, asked->seq, asked->position));
  ctx->position = asked->position;
  ctx->seq = asked->seq;
  ctx->length = session->kv.length;
  return PDS_OK;
}

static pds_status measure_attention(pds_session *session, const part *p,
                                    const pds_measurement *asked, int64_t *out_ns) {
  PDS_RETURN_IF_ERROR(pds_measure_begin_rows(session, p->ctx, asked));
  pds_measure_fill(p->ctx, PDS_BUF_HID);
  pds_op_rope_table(p->ctx);
  timed(p, run_attention, out_ns);
  pds_kv_rollback(&session->kv, asked->rows, asked->seq);
  return PDS_OK;
}

static pds_status write_block(pds_session *session, unsigned char *at) {
  const uint64_t bytes = session->engine->plan->kv_block_bytes;
  pds_gpu *gpu = session->engine->gpu;
  if (gpu)
    PDS_CUDA_CALL(gpu, "writing a KV block", cuMemsetD8Async, (CUdeviceptr)(uintptr_t)at, 0x3c,
                  bytes, gpu->compute);
  else
    memset(at, 0x3c, bytes);
  return PDS_OK;
}

/* Memory that nobody has written is one page of zeros, which a cache holds: so the blocks that the
 * rows lie in are written, with small numbers of either act dtype. */
pds_status pds_measure_extend(pds_session *session, pds_step_ctx *ctx,
                              const pds_measurement *asked) {
  PDS_RETURN_IF_ERROR(pds_measure_begin_rows(session, ctx, asked));
  const pds_plan *plan = ctx->plan;
  pds_status status = PDS_OK;
  for (uint32_t i = 0; i < asked->rows && status == PDS_OK; i++) {
    const uint32_t position = (uint32_t)asked->position[i], seq = (uint32_t)asked->seq[i];
    if (i && position % plan->kv_block) continue;
    const uint32_t block = ctx->table[(size_t)seq * ctx->table_stride + position / plan->kv_block];
    status = write_block(session, ctx->kv + block * plan->kv_block_bytes);
  }
  if (status == PDS_OK)
    pds_kv_commit(&session->kv, asked->rows, asked->seq);
  else
    pds_kv_rollback(&session->kv, asked->rows, asked->seq);
  return status;
}

/* --- the predictor --- */

static void run_predict(const part *p) {
  pds_op_predict_logits(p->ctx, p->layer);
}

static void nothing_known(pds_step_ctx *ctx, pds_buffer buffer, uint32_t top_k) {
  int32_t *id = pds_buf(ctx, buffer);
  for (uint32_t i = 0; i < ctx->rows * top_k; i++) id[i] = -1;
}

static void before_predict(pds_session *session, const part *p) {
  pds_step_ctx *ctx = p->ctx;
  const pds_layer *l = &ctx->plan->layers[p->layer];
  ctx->net_phase = ctx->rows == 1 ? PDS_NET_DECODE : PDS_NET_PREFILL;
  ctx->nets = atomic_load_explicit(&session->engine->nets, memory_order_acquire);
  pds_op_gate(ctx, p->layer);
  nothing_known(ctx, PDS_BUF_NET_PREV, l->gate.top_k);
  nothing_known(ctx, PDS_BUF_NET_NEXT, ctx->plan->layers[l->predictor.target].gate.top_k);
}

/* --- the one way in --- */

static pds_status check_loads(const pds_plan *plan, const pds_measurement *asked) {
  const uint32_t experts = plan->layers[asked->layer].gate.experts;
  if (!asked->load) return pds_fail(PDS_ERR_ARGUMENT, "measurement: load is a null pointer");
  if (!asked->n_loads || asked->n_loads > experts)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: %u loads, expected 1 to %u", asked->n_loads,
                    experts);
  for (uint32_t i = 0; i < asked->n_loads; i++)
    if (asked->load[i] >= experts)
      return pds_fail(PDS_ERR_ARGUMENT, "measurement: load of expert %u, expected 0 to %u",
                      asked->load[i], experts - 1);
  return PDS_OK;
}

static pds_status check_rows(const pds_plan *plan, const pds_measurement *asked) {
  const uint32_t most = asked->what == PDS_MEASURE_PREDICT && plan->max_rows > PDS_PREDICT_ROWS
                            ? PDS_PREDICT_ROWS
                            : plan->max_rows;
  if (asked->rows && asked->rows <= most) return PDS_OK;
  return pds_fail(PDS_ERR_BATCH, "measurement: %u rows, expected 1 to %u", asked->rows, most);
}

static pds_status check_device(uint32_t what, const pds_gpu *gpu) {
  if (what == PDS_MEASURE_CONTEXT || (what >= PDS_MEASURE_GPU_EXPERTS) == (gpu != NULL))
    return PDS_OK;
  return pds_fail(PDS_ERR_ARGUMENT,
                  gpu ? "measurement: it times the CPU's kernels: create the engine without a GPU"
                      : "measurement: it times a GPU: create the engine with one");
}

pds_status pds_measure_check(const pds_engine *engine, const pds_measurement *asked) {
  const pds_plan *plan = engine->plan;
  const uint32_t what = asked->what;
  if (what > PDS_MEASURE_EXPERTS_BUSY)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: what is %u, expected 0 to 11", what);
  PDS_RETURN_IF_ERROR(check_device(what, engine->gpu));
  if (asked->layer >= plan->n_layers)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: layer %u, expected 0 to %u", asked->layer,
                    plan->n_layers - 1);
  const pds_layer *l = &plan->layers[asked->layer];
  const bool anything = what == PDS_MEASURE_ATTENTION || what == PDS_MEASURE_CONTEXT;
  const bool shared = what == PDS_MEASURE_SHARED || what == PDS_MEASURE_GPU_SHARED;
  const char *missing = NULL;
  if (what == PDS_MEASURE_PREDICT)
    missing = l->predictor.kind == PDS_PREDICT_NONE ? "predictor" : NULL;
  else if (shared)
    missing = l->shared.inter ? NULL : "shared expert";
  else if (!anything)
    missing = l->moe ? NULL : "experts";
  if (missing)
    return pds_fail(PDS_ERR_ARGUMENT, "measurement: layer %u has no %s", asked->layer, missing);
  const bool beside = what == PDS_MEASURE_EXPERTS_BUSY && asked->n_loads;
  if (what == PDS_MEASURE_LINK || what == PDS_MEASURE_LINK_BUSY || beside)
    PDS_RETURN_IF_ERROR(check_loads(plan, asked));
  switch (what) {
  case PDS_MEASURE_EXPERTS:
  case PDS_MEASURE_GPU_EXPERTS:
  case PDS_MEASURE_EXPERTS_BUSY:
  case PDS_MEASURE_LINK_BUSY: return check_experts(plan, asked);
  case PDS_MEASURE_LINK:
  case PDS_MEASURE_LINK_START: return PDS_OK;
  default: return check_rows(plan, asked);
  }
}

pds_status pds_measure_part(pds_session *session, pds_step_ctx *ctx, const pds_measurement *asked,
                            int64_t *out_ns) {
  PDS_RETURN_IF_ERROR(pds_measure_check(session->engine, asked));
  if (session->engine->gpu) return pds_measure_gpu(session, ctx, asked, out_ns);
  if (asked->what == PDS_MEASURE_CONTEXT) {
    PDS_RETURN_IF_ERROR(pds_measure_extend(session, ctx, asked));
    *out_ns = 0;
    return PDS_OK;
  }
  part p = {.ctx = ctx, .layer = asked->layer};
  pds_status status = PDS_OK;
  ctx->rows = asked->rows;
  pds_pool_open(ctx->pool);
  if (asked->what == PDS_MEASURE_EXPERTS) p.n_holes = pds_measure_bind(ctx, asked);
  if (asked->what != PDS_MEASURE_ATTENTION) pds_measure_fill_normed(ctx);
  switch (asked->what) {
  case PDS_MEASURE_EXPERTS: timed(&p, run_experts, out_ns); break;
  case PDS_MEASURE_SHARED: timed(&p, run_shared, out_ns); break;
  case PDS_MEASURE_ATTENTION: status = measure_attention(session, &p, asked, out_ns); break;
  default:
    before_predict(session, &p);
    timed(&p, run_predict, out_ns);
    break;
  }
  pds_pool_close(ctx->pool);
  return status;
}
