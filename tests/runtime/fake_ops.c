/* fake_ops.c: operators with results that a test can foretell. Attention writes each token into its
 * KV cell and sums over all cells of the sequence up to its own, so that a wrong block, length or
 * position shows in the logits:
 *   logits[0] = token,
 *   logits[1 + layer] = sum over p <= position of (p + 1) * (token[p] + 1 + 1000 * layer),
 *   logits[3] = the shared and the routed experts' part; logits[4] = layers with an MLP. */
#include <string.h>

#include "fake_plan.h"
#include "step.h"

pds_status pds_ops_check(const pds_plan *plan) {
  (void)plan;
  return PDS_OK;
}

static float *hid(const pds_step_ctx *ctx, uint32_t row) {
  return (float *)pds_buf(ctx, PDS_BUF_HID) + (size_t)row * FAKE_HIDDEN;
}

static float *cell(const pds_step_ctx *ctx, uint32_t layer, int32_t seq, uint32_t position) {
  uint32_t block = ctx->table[(size_t)seq * ctx->table_stride + position / FAKE_KV_BLOCK];
  float *base = (float *)(ctx->kv + block * ctx->plan->kv_block_bytes);
  return base + layer * FAKE_KV_BLOCK + position % FAKE_KV_BLOCK;
}

void pds_op_rope_table(pds_step_ctx *ctx) {
  (void)ctx;
}

void pds_op_embed(pds_step_ctx *ctx) {
  memset(pds_buf(ctx, PDS_BUF_HID), 0, (size_t)ctx->rows * FAKE_HIDDEN * 4);
  for (uint32_t r = 0; r < ctx->rows; r++) hid(ctx, r)[0] = (float)ctx->token[r];
}

void pds_op_norm(pds_step_ctx *ctx, uint32_t layer, pds_norm_site site) {
  (void)layer;
  float *xn = pds_buf(ctx, PDS_BUF_XN);
  uint32_t rows = site == PDS_NORM_FINAL ? ctx->n_logits : ctx->rows;
  for (uint32_t i = 0; i < rows; i++) {
    uint32_t row = site == PDS_NORM_FINAL ? ctx->logit_row[i] : i;
    memcpy(xn + (size_t)i * FAKE_HIDDEN, hid(ctx, row), FAKE_HIDDEN * 4);
  }
}

typedef struct attention_job {
  pds_step_ctx *ctx;
  uint32_t layer;
} attention_job;

static void append_row(void *arg, uint32_t row, uint32_t worker) {
  attention_job *job = arg;
  pds_step_ctx *ctx = job->ctx;
  float *scratch = (float *)(ctx->thread_scratch + worker * ctx->plan->thread_scratch_bytes);
  scratch[0] = (float)(ctx->token[row] + 1) + 1000 * (float)job->layer;
  *cell(ctx, job->layer, ctx->seq[row], (uint32_t)ctx->position[row]) = scratch[0];
}

static void attend_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  attention_job *job = arg;
  float sum = 0;
  for (int32_t p = 0; p <= job->ctx->position[row]; p++)
    sum += (float)(p + 1) * *cell(job->ctx, job->layer, job->ctx->seq[row], (uint32_t)p);
  hid(job->ctx, row)[1 + job->layer] = sum;
}

void pds_op_attention(pds_step_ctx *ctx, uint32_t layer) {
  attention_job job = {ctx, layer};
  pds_pool_run(ctx->pool, append_row, &job, ctx->rows);
  pds_pool_run(ctx->pool, attend_row, &job, ctx->rows);
}

void pds_op_mlp(pds_step_ctx *ctx, uint32_t layer) {
  (void)layer;
  for (uint32_t r = 0; r < ctx->rows; r++) hid(ctx, r)[4] += 1;
}

void pds_op_take_routes(pds_step_ctx *ctx, uint32_t layer) {
  int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  float *w = pds_buf(ctx, PDS_BUF_ROUTE_W);
  for (uint32_t i = 0; i < ctx->rows * FAKE_TOP_K; i++) {
    const size_t at = (uint32_t)ctx->position[i / FAKE_TOP_K] % ctx->n_routes;
    id[i] = ctx->routes[(at * FAKE_LAYERS + layer) * ctx->routes_k + i % FAKE_TOP_K];
    w[i] = 1.0f / FAKE_TOP_K;
  }
}

void pds_op_gate(pds_step_ctx *ctx, uint32_t layer) {
  if (ctx->n_routes) {
    pds_op_take_routes(ctx, layer);
    return;
  }
  int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  float *w = pds_buf(ctx, PDS_BUF_ROUTE_W);
  for (uint32_t i = 0; i < ctx->rows * FAKE_TOP_K; i++) {
    id[i] = (ctx->token[i / FAKE_TOP_K] + (int32_t)(i % FAKE_TOP_K)) % FAKE_EXPERTS;
    w[i] = 1;
  }
}

void pds_op_gate_and_predict(pds_step_ctx *ctx, uint32_t layer) {
  pds_op_gate(ctx, layer);
}

void pds_op_predict(pds_step_ctx *ctx, uint32_t layer) {
  (void)ctx;
  (void)layer;
}

void pds_op_predict_logits(pds_step_ctx *ctx, uint32_t layer) {
  pds_op_predict(ctx, layer);
}

void pds_op_remember(pds_step_ctx *ctx, uint32_t layer) {
  (void)ctx;
  (void)layer;
}

void pds_op_bind_llc(pds_step_ctx *ctx, uint32_t layer, uint32_t capacity) {
  (void)ctx;
  (void)layer;
  (void)capacity;
}

void pds_op_recompile(pds_step_ctx *ctx, uint32_t layer) {
  (void)layer;
  const int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  int32_t *rows = pds_buf(ctx, PDS_BUF_EXPERT_ROWS);
  uint32_t n = 0;
  ctx->n_cpu_holes = 0;
  for (uint32_t e = 0; e < FAKE_EXPERTS; e++) {
    uint32_t first = n;
    for (uint32_t i = 0; i < ctx->rows * FAKE_TOP_K; i++)
      if (id[i] == (int32_t)e) rows[n++] = (int32_t)i;
    if (n > first) ctx->cpu_holes[ctx->n_cpu_holes++] = (pds_hole){e, first, n - first, 0};
  }
}

void pds_op_shared_expert(pds_step_ctx *ctx, uint32_t layer) {
  (void)layer;
  float *out = pds_buf(ctx, PDS_BUF_SHARED_OUT);
  for (uint32_t r = 0; r < ctx->rows; r++) out[(size_t)r * FAKE_HIDDEN] = 100;
}

void pds_op_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes, uint32_t n_holes) {
  const int32_t *rows = pds_buf(ctx, PDS_BUF_EXPERT_ROWS);
  float *out = pds_buf(ctx, PDS_BUF_EXPERT_OUT);
  const pds_tensor *weights = &ctx->plan->layers[layer].experts.gate_up;
  for (uint32_t h = 0; h < n_holes; h++) {
    /* The file's bytes are zeros, so an expert's last word is 0, if it is there. */
    const unsigned char *blob = ctx->blobs ? ctx->blobs[h]
                                           : ctx->files[weights->file] + weights->offset +
                                                 holes[h].expert * weights->stride;
    float last;
    memcpy(&last, blob + weights->stride - sizeof last, sizeof last);
    for (uint32_t i = 0; i < holes[h].rows; i++)
      out[(size_t)rows[holes[h].first + i] * FAKE_HIDDEN] = (float)(holes[h].expert + 1) + last;
  }
}

void pds_op_shared_and_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes,
                              uint32_t n_holes) {
  pds_op_shared_expert(ctx, layer);
  pds_op_expert(ctx, layer, holes, n_holes);
}

void pds_op_combine(pds_step_ctx *ctx, uint32_t layer, int shared) {
  (void)layer;
  const float *out = pds_buf(ctx, PDS_BUF_EXPERT_OUT);
  const int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  const float *always = pds_buf(ctx, PDS_BUF_SHARED_OUT);
  for (uint32_t r = 0; r < ctx->rows; r++) {
    float sum = shared ? always[(size_t)r * FAKE_HIDDEN] : 0;
    for (uint32_t k = 0; k < FAKE_TOP_K; k++) {
      const uint32_t i = r * FAKE_TOP_K + k;
      const float *from = ctx->on_gpu && !ctx->on_gpu[id[i]] ? ctx->cpu_out : out;
      sum += from[(size_t)i * FAKE_HIDDEN];
    }
    hid(ctx, r)[3] = sum;
  }
}

void pds_op_lm_head(pds_step_ctx *ctx) {
  const float *xn = pds_buf(ctx, PDS_BUF_XN);
  float *logits = pds_buf(ctx, PDS_BUF_LOGITS);
  memset(logits, 0, (size_t)ctx->n_logits * FAKE_VOCAB * 4);
  for (uint32_t i = 0; i < ctx->n_logits; i++)
    memcpy(logits + (size_t)i * FAKE_VOCAB, xn + (size_t)i * FAKE_HIDDEN, 5 * 4);
}
