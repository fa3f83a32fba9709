/* ops_attention.c: attention over the block cache, for grouped-query attention (GQA) and
 * multi-head latent attention (MLA, absorbed: queries go into the latent space, so that the
 * cached latent is key and value at once).
 *
 * Stages, each a parallel job: projections; rows (norms, rope, cache append); attention; merge
 * of the context's parts; output projection. Attention walks the cache block by block with the
 * streaming softmax, so no score matrix is ever whole. A step of few rows cuts the context into
 * parts of pds_plan.kv_split tokens, by position alone.
 *
 * NaN and Inf: as in eager attention, a masked key weighs zero, and zero times a NaN value is NaN,
 * so a value that is not finite may reach earlier rows of the same step. */
#include <math.h>
#include <string.h>

#include "ops.h"
#include "ops_rope.h"
#include "status.h"

enum { FEW_ROWS = 1, SPLIT_ROWS = 16, PARTIAL_HEAD = 16 };

typedef struct attn_job {
  pds_step_ctx *ctx;
  const pds_attention *a;
  const pds_act_kernels *act;
  uint32_t elt;             /* bytes of act */
  uint32_t kv_heads, group; /* group: query heads of one KV head */
  uint32_t key_dims, value_dims;
  uint32_t q_stride; /* elements of one head's query */
  size_t key_panel, value_panel, key_bytes, head_bytes, layer_offset;
  uint32_t head_tile, head_tiles, row_tile, row_tiles;
  uint32_t split_tokens, splits; /* splits 1 and split_tokens UINT32_MAX: the context is not cut */
} attn_job;

/* The sizes that plan_memory.py computed are those of kv_layout.h, and the gate's tables fit. */
pds_status pds_ops_check(const pds_plan *plan) {
  const size_t block = pds_kv_layer_offset(plan, plan->n_layers);
  if (plan->kv_block != PDS_KEYS || plan->kv_split == 0 || plan->kv_split % PDS_KEYS != 0)
    return pds_fail(PDS_ERR_PLAN_FORMAT,
                    "plan constants: KV blocks of %u tokens, splits of %u: "
                    "expected %u and a multiple of it",
                    plan->kv_block, plan->kv_split, PDS_KEYS);
  if (plan->kv_block_bytes != block)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "plan constants: a KV block of %llu bytes, expected %llu",
                    (unsigned long long)plan->kv_block_bytes, (unsigned long long)block);
  if (plan->buffer_bytes[PDS_BUF_XQ] < pds_quant_need(plan))
    return pds_fail(PDS_ERR_PLAN_FORMAT,
                    "plan constants: %llu bytes for quantised rows, the operators need %llu",
                    (unsigned long long)plan->buffer_bytes[PDS_BUF_XQ],
                    (unsigned long long)pds_quant_need(plan));
  PDS_RETURN_IF_ERROR(pds_net_check(plan));
  for (uint32_t i = 0; i < plan->n_layers; i++) {
    const pds_layer *layer = &plan->layers[i];
    const size_t need = pds_attention_scratch_bytes(plan, &layer->attn);
    if (plan->thread_scratch_bytes < need)
      return pds_fail(PDS_ERR_PLAN_FORMAT,
                      "plan constants: %llu bytes of worker scratch, layer %u "
                      "needs %llu",
                      (unsigned long long)plan->thread_scratch_bytes, i, (unsigned long long)need);
    if (layer->moe && layer->gate.experts > PDS_TILE * PDS_KEYS)
      return pds_fail(PDS_ERR_PLAN_FORMAT, "layer %u has %u experts, expected at most %u", i,
                      layer->gate.experts, PDS_TILE * PDS_KEYS);
  }
  return PDS_OK;
}

/* ---- rope table ---- */

typedef struct rope_job {
  pds_step_ctx *ctx;
  const pds_rope *rope;
} rope_job;

/* As transformers: the angle is rounded to fp32 before cos and sin. */
static void rope_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const rope_job *job = arg;
  const pds_rope *rope = job->rope;
  float *table = (float *)pds_rope_row(job->ctx, rope, row);
  const float position = (float)job->ctx->position[row];
  for (uint32_t i = 0; i < rope->dim / 2; i++) {
    const float angle = position * rope->inv_freq[i];
    table[i] = cosf(angle) * rope->scale;
    table[rope->dim / 2 + i] = sinf(angle) * rope->scale;
  }
}

void pds_op_rope_table(pds_step_ctx *ctx) {
  const pds_layer *layers = ctx->plan->layers;
  for (uint32_t l = 0; l < ctx->plan->n_layers; l++) {
    const pds_rope *rope = &layers[l].attn.rope;
    uint32_t earlier = l;
    while (earlier > 0 && layers[earlier - 1].attn.rope.table_offset != rope->table_offset)
      earlier--;
    if (earlier > 0 || rope->dim == 0) continue;
    rope_job job = {.ctx = ctx, .rope = rope};
    pds_run_rows(ctx, rope_row, &job, ctx->rows, 4);
  }
}

/* ---- the cache ---- */

/* The keys of KV head h in the block that holds token t of the sequence; its values follow
 * key_bytes on. */
static unsigned char *block_of(const attn_job *job, int32_t seq, uint32_t t, uint32_t h) {
  const pds_step_ctx *ctx = job->ctx;
  const size_t block = ctx->table[(size_t)seq * ctx->table_stride + t / PDS_KEYS];
  return ctx->kv + block * ctx->plan->kv_block_bytes + job->layer_offset + h * job->head_bytes;
}

/* Stores the key of token t (key_dims floats): one 32-bit word of each row of its panel. */
static void append_key(const attn_job *job, unsigned char *block, uint32_t t, const float *key,
                       void *temp) {
  const uint32_t lane = t % PDS_KEYS;
  uint32_t *word = (uint32_t *)(block + lane / PDS_LANES * job->key_panel) + lane % PDS_LANES;
  const uint32_t bytes = job->key_dims * job->elt, words = (bytes + 3) / 4;
  uint32_t *packed = temp;
  packed[words - 1] = 0;
  job->act->convert(key, packed, job->key_dims);
  for (uint32_t i = 0; i < words; i++) word[(size_t)i * PDS_LANES] = packed[i];
}

/* Stores the value of token t (value_dims floats). bf16: two tokens share a word, and its other
 * half is made zero if no row of this step will write it. */
static void append_value(const attn_job *job, unsigned char *values, uint32_t t, const float *value,
                         int last, void *temp) {
  const uint32_t k = t % PDS_KEYS, n = job->value_dims;
  job->act->convert(value, temp, n);
  if (job->elt == 4) {
    const float *v = temp;
    for (uint32_t d = 0; d < n; d++) {
      ((float *)(values + d / PDS_LANES * job->value_panel))[k * PDS_LANES + d % PDS_LANES] = v[d];
    }
    return;
  }
  const uint16_t *v = temp;
  for (uint32_t d = 0; d < n; d++) {
    uint16_t *at = (uint16_t *)(values + d / PDS_LANES * job->value_panel) +
                   ((size_t)(k / 2) * PDS_LANES + d % PDS_LANES) * 2 + k % 2;
    *at = v[d];
    if (last && k % 2 == 0) at[1] = 0;
  }
}

/* No later row of this step belongs to the same sequence. */
static int is_last_of_sequence(const pds_step_ctx *ctx, uint32_t row) {
  for (uint32_t r = row + 1; r < ctx->rows; r++) {
    if (ctx->seq[r] == ctx->seq[row]) return 0;
  }
  return 1;
}

/* ---- rows: from projections to queries and cache ---- */

static void clamp(float *x, uint32_t n, float limit) {
  for (uint32_t i = 0; i < n; i++) {
    if (x[i] > limit) x[i] = limit;
    if (x[i] < -limit) x[i] = -limit;
  }
}

/* q or k of all heads: norms, clamp, rope. */
static void finish_heads(const attn_job *job, uint32_t row, float *x, uint32_t heads,
                         const pds_tensor *norm) {
  const pds_attention *a = job->a;
  const uint32_t dim = a->qk_dim;
  if (a->qk_norm == PDS_QK_FULL) {
    job->ctx->kernels->rms_norm(x, pds_weight(job->ctx, norm, 0), heads * dim, a->norm_eps, x);
  }
  const float *table = pds_rope_row(job->ctx, &a->rope, row);
  for (uint32_t h = 0; h < heads; h++, x += dim) {
    if (a->qk_norm == PDS_QK_HEAD) {
      job->ctx->kernels->rms_norm(x, pds_weight(job->ctx, norm, 0), dim, a->norm_eps, x);
    }
    if (a->clip > 0) clamp(x, dim, a->clip);
    pds_rope_apply(&a->rope, table, x);
  }
}

/* y[0..n) = act(x), zero up to `pad`. */
static void convert_padded(const attn_job *job, const float *x, void *y, uint32_t n, uint32_t pad) {
  job->act->convert(x, y, n);
  memset((unsigned char *)y + (size_t)n * job->elt, 0, (size_t)(pad - n) * job->elt);
}

static void gqa_row(void *arg, uint32_t row, uint32_t worker) {
  const attn_job *job = arg;
  const pds_attention *a = job->a;
  pds_step_ctx *ctx = job->ctx;
  float *q = (float *)pds_buf(ctx, PDS_BUF_QKV) + (size_t)row * pds_ceil(a->in_proj.n, PDS_LANES);
  float *k = q + a->heads * a->qk_dim, *v = k + a->kv_heads * a->qk_dim;
  void *temp = pds_worker_scratch(ctx, worker);

  finish_heads(job, row, q, a->heads, &a->q_norm);
  finish_heads(job, row, k, a->kv_heads, &a->k_norm);
  if (a->clip > 0) clamp(v, a->kv_heads * a->v_dim, a->clip);

  unsigned char *out =
      (unsigned char *)pds_buf(ctx, PDS_BUF_Q) + (size_t)row * a->heads * job->q_stride * job->elt;
  for (uint32_t h = 0; h < a->heads; h++) {
    convert_padded(job, q + h * a->qk_dim, out + (size_t)h * job->q_stride * job->elt, a->qk_dim,
                   job->q_stride);
  }
  const uint32_t t = (uint32_t)ctx->position[row];
  const int last = is_last_of_sequence(ctx, row);
  for (uint32_t h = 0; h < a->kv_heads; h++) {
    unsigned char *block = block_of(job, ctx->seq[row], t, h);
    append_key(job, block, t, k + h * a->qk_dim, temp);
    append_value(job, block + job->key_bytes, t, v + h * a->v_dim, last, temp);
  }
}

/* MLA: the normed q_a of a row, input of q_b. */
static void mla_q_a_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const attn_job *job = arg;
  const pds_attention *a = job->a;
  pds_step_ctx *ctx = job->ctx;
  const uint32_t stride = pds_ceil(a->q_lora, 32);
  float *q_a = (float *)pds_buf(ctx, PDS_BUF_QKV) + (size_t)row * pds_ceil(a->in_proj.n, PDS_LANES);
  ctx->kernels->rms_norm(q_a, pds_weight(ctx, &a->q_norm, 0), a->q_lora, a->norm_eps, q_a);
  convert_padded(job, q_a,
                 (unsigned char *)pds_buf(ctx, PDS_BUF_QACT) + (size_t)row * stride * job->elt,
                 a->q_lora, stride);
}

static void mla_row(void *arg, uint32_t row, uint32_t worker) {
  const attn_job *job = arg;
  const pds_attention *a = job->a;
  pds_step_ctx *ctx = job->ctx;
  const uint32_t rope_dim = a->rope.dim, nope_stride = pds_ceil(a->nope_dim, 32),
                 q_dim = a->heads * a->qk_dim;
  float *in = (float *)pds_buf(ctx, PDS_BUF_QKV) + (size_t)row * pds_ceil(a->in_proj.n, PDS_LANES);
  float *latent = in + (a->q_lora ? a->q_lora : q_dim); /* its rotated part follows */
  float *q =
      a->q_lora ? (float *)pds_buf(ctx, PDS_BUF_QB) + (size_t)row * pds_ceil(q_dim, PDS_LANES) : in;
  const float *table = pds_rope_row(ctx, &a->rope, row);
  void *temp = pds_worker_scratch(ctx, worker);

  for (uint32_t h = 0; h < a->heads; h++, q += a->qk_dim) {
    const size_t head = (size_t)row * a->heads + h;
    convert_padded(job, q,
                   (unsigned char *)pds_buf(ctx, PDS_BUF_QHEAD) + head * nope_stride * job->elt,
                   a->nope_dim, nope_stride);
    pds_rope_apply(&a->rope, table, q + a->nope_dim);
    unsigned char *out =
        (unsigned char *)pds_buf(ctx, PDS_BUF_Q) + (head * job->q_stride + a->kv_lora) * job->elt;
    convert_padded(job, q + a->nope_dim, out, rope_dim, job->q_stride - a->kv_lora);
  }
  ctx->kernels->rms_norm(latent, pds_weight(ctx, &a->k_norm, 0), a->kv_lora, a->norm_eps, latent);
  pds_rope_apply(&a->rope, table, latent + a->kv_lora);
  const uint32_t t = (uint32_t)ctx->position[row];
  append_key(job, block_of(job, ctx->seq[row], t, 0), t, latent, temp);
}

/* ---- attention ---- */

/* First key that the query at position p sees. */
static uint32_t first_key(const pds_attention *a, uint32_t p) {
  return a->window && p + 1 > a->window ? p + 1 - a->window : 0;
}

/* One query tile: rows that continue each other in one sequence, times neighbouring heads of one
 * KV head. */
typedef struct query_tile {
  uint32_t row, rows, head, heads, kv_head;
} query_tile;

typedef struct tile_state {
  pds_attention_scratch *s;
  float *out; /* [PDS_TILE, ceil16(value dims)] */
  void *values;
  int32_t q_index[PDS_TILE];
} tile_state;

static tile_state tile_begin(const attn_job *job, const query_tile *tile, uint32_t worker) {
  const uint32_t dims = pds_ceil(job->value_dims, PDS_LANES), pairs = tile->rows * tile->heads;
  tile_state st = {.s = pds_worker_scratch(job->ctx, worker)};
  st.out = (float *)(st.s + 1);
  st.values = st.out + (size_t)dims * PDS_TILE;
  for (uint32_t i = 0; i < pairs; i++) {
    st.s->max[i] = -INFINITY;
    st.s->sum[i] = 0;
    st.q_index[i] =
        (int32_t)((tile->row + i / tile->heads) * job->a->heads + tile->head + i % tile->heads);
  }
  memset(st.out, 0, (size_t)pairs * dims * sizeof(float));
  return st;
}

/* Adds the keys and values of the block that starts at token `begin`; `tokens` of them exist. */
static void tile_block(const attn_job *job, const query_tile *tile, tile_state *st, uint32_t begin,
                       uint32_t tokens) {
  const pds_step_ctx *ctx = job->ctx;
  const uint32_t dims = pds_ceil(job->value_dims, PDS_LANES), pairs = tile->rows * tile->heads;
  const unsigned char *keys = block_of(job, ctx->seq[tile->row], begin, tile->kv_head);
  const uint32_t even = job->elt == 2 ? 2 : 1;
  pds_gemm g = {.x = pds_buf(ctx, PDS_BUF_Q),
                .x_stride = job->q_stride,
                .x_index = st->q_index,
                .x_div = 1,
                .w = keys,
                .panel_stride = job->key_panel,
                .y = st->s->scores,
                .y_stride = PDS_KEYS,
                .rows = pairs,
                .k = pds_ceil(job->key_dims, even),
                .cols = tokens,
                .out = PDS_OUT_F32};
  job->act->gemm(&g);

  unsigned char *probs = (unsigned char *)st->s->probs;
  for (uint32_t i = 0; i < pairs; i++) {
    const uint32_t p = (uint32_t)ctx->position[tile->row + i / tile->heads],
                   seen = first_key(job->a, p);
    uint32_t lo = seen > begin ? seen - begin : 0, hi = p + 1 > begin ? p + 1 - begin : 0;
    if (hi > tokens) hi = tokens;
    if (lo > hi) lo = hi;
    const float factor =
        job->act->softmax_block(st->s->scores[i], lo, hi, job->a->scale, &st->s->max[i],
                                &st->s->sum[i], probs + (size_t)i * PDS_KEYS * job->elt);
    if (factor != 1) ctx->kernels->scale(factor, st->out + (size_t)i * dims, dims);
  }

  const void *values = keys + job->key_bytes;
  if (job->a->kind == PDS_MLA) {
    job->act->key_to_value(keys, job->key_panel, job->value_dims, tokens, st->values);
    values = st->values;
  }
  pds_gemm o = {.x = probs,
                .x_stride = PDS_KEYS,
                .x_div = 1,
                .w = values,
                .panel_stride = job->value_panel,
                .y = st->out,
                .y_stride = dims,
                .rows = pairs,
                .k = pds_ceil(tokens, even),
                .cols = dims,
                .out = PDS_OUT_ADD};
  job->act->gemm(&o);
}

/* Writes a finished output (value_dims floats, already divided by the sum) to where o_proj or uv
 * reads it. */
static void store_head(const attn_job *job, uint32_t row, uint32_t head, const float *out) {
  const pds_attention *a = job->a;
  pds_step_ctx *ctx = job->ctx;
  if (a->kind == PDS_MLA) {
    const uint32_t stride = pds_ceil(a->kv_lora, 32);
    const size_t at = ((size_t)row * a->heads + head) * stride;
    convert_padded(job, out, (unsigned char *)pds_buf(ctx, PDS_BUF_CTXACT) + at * job->elt,
                   a->kv_lora, stride);
    return;
  }
  const uint32_t used = a->heads * a->v_dim, stride = pds_ceil(used, 32);
  const size_t at = (size_t)row * stride + head * a->v_dim;
  const uint32_t pad = head + 1 == a->heads ? stride - used : 0;
  convert_padded(job, out, (unsigned char *)pds_buf(ctx, PDS_BUF_OACT) + at * job->elt, a->v_dim,
                 a->v_dim + pad);
}

/* Where part `split` of a (row, head) keeps its maximum, sum and output. */
static float *partial_of(const attn_job *job, uint32_t row, uint32_t head, uint32_t split) {
  const pds_plan *plan = job->ctx->plan;
  const uint32_t all = (plan->max_context + plan->kv_split - 1) / plan->kv_split;
  const size_t floats = pds_ceil(job->value_dims, PDS_LANES) + PARTIAL_HEAD;
  return (float *)pds_buf(job->ctx, PDS_BUF_PARTIAL) +
         (((size_t)row * job->a->heads + head) * all + split) * floats;
}

static void tile_end(const attn_job *job, const query_tile *tile, tile_state *st, uint32_t split) {
  const uint32_t dims = pds_ceil(job->value_dims, PDS_LANES), pairs = tile->rows * tile->heads;
  for (uint32_t i = 0; i < pairs; i++) {
    const uint32_t row = tile->row + i / tile->heads, head = tile->head + i % tile->heads;
    float *out = st->out + (size_t)i * dims;
    if (job->split_tokens == UINT32_MAX) {
      job->ctx->kernels->scale(1 / st->s->sum[i], out, job->value_dims);
      store_head(job, row, head, out);
    } else {
      float *part = partial_of(job, row, head, split);
      part[0] = st->s->max[i];
      part[1] = st->s->sum[i];
      memcpy(part + PARTIAL_HEAD, out, job->value_dims * sizeof *out);
    }
  }
}

static void run_tile(const attn_job *job, const query_tile *tile, uint32_t split, uint32_t worker) {
  const int32_t *position = job->ctx->position + tile->row;
  uint32_t begin = first_key(job->a, (uint32_t)position[0]),
           end = (uint32_t)position[tile->rows - 1] + 1;
  if (job->split_tokens != UINT32_MAX) {
    const uint64_t from = (uint64_t)split * job->split_tokens, to = from + job->split_tokens;
    if (from >= end || to <= begin) return;
    if (begin < from) begin = (uint32_t)from;
    if (end > to) end = (uint32_t)to;
  }
  tile_state st = tile_begin(job, tile, worker);
  for (uint32_t t = begin / PDS_KEYS * PDS_KEYS; t < end; t += PDS_KEYS) {
    tile_block(job, tile, &st, t, end - t < PDS_KEYS ? end - t : PDS_KEYS);
  }
  tile_end(job, tile, &st, split);
}

/* Item: (row tile, KV head, head tile, split). Within a row tile, each run of rows of one
 * sequence is a query tile. */
static void attend_item(void *arg, uint32_t item, uint32_t worker) {
  const attn_job *job = arg;
  const pds_step_ctx *ctx = job->ctx;
  const uint32_t split = item % job->splits;
  item /= job->splits;
  const uint32_t head_tile = item % job->head_tiles;
  item /= job->head_tiles;
  const uint32_t kv_head = item % job->kv_heads, first = item / job->kv_heads * job->row_tile;
  const uint32_t last = ctx->rows - first < job->row_tile ? ctx->rows : first + job->row_tile;
  const uint32_t head = head_tile * job->head_tile;
  query_tile tile = {.head = kv_head * job->group + head,
                     .heads =
                         job->group - head < job->head_tile ? job->group - head : job->head_tile,
                     .kv_head = kv_head};
  for (uint32_t row = first; row < last; row += tile.rows) {
    tile.row = row;
    tile.rows = 1;
    while (row + tile.rows < last && ctx->seq[row + tile.rows] == ctx->seq[row]) tile.rows++;
    run_tile(job, &tile, split, worker);
  }
}

/* Joins the parts of one (row, head) in order of position. */
static void merge_item(void *arg, uint32_t item, uint32_t worker) {
  const attn_job *job = arg;
  const uint32_t row = item / job->a->heads, head = item % job->a->heads;
  const uint32_t p = (uint32_t)job->ctx->position[row];
  const uint32_t first = first_key(job->a, p) / job->split_tokens, last = p / job->split_tokens;
  pds_attention_scratch *s = pds_worker_scratch(job->ctx, worker);
  float *out = (float *)(s + 1), top = -INFINITY, sum = 0;
  for (uint32_t i = first; i <= last; i++) {
    const float m = partial_of(job, row, head, i)[0];
    if (m > top) top = m;
  }
  memset(out, 0, job->value_dims * sizeof *out);
  for (uint32_t i = first; i <= last; i++) {
    const float *part = partial_of(job, row, head, i);
    const float factor = part[0] == top ? 1 : expf(part[0] - top);
    sum += part[1] * factor;
    job->ctx->kernels->axpy(factor, part + PARTIAL_HEAD, out, job->value_dims);
  }
  job->ctx->kernels->scale(1 / sum, out, job->value_dims);
  store_head(job, row, head, out);
}

/* MLA, head i: nope query to latent, and latent output to value. */
static void select_head(const pds_gemm_job *job, uint32_t i, pds_gemm *g) {
  g->w = (const unsigned char *)g->w + i * job->w->stride;
  g->x = (const unsigned char *)g->x + i * job->x_step;
  g->y = (unsigned char *)g->y + i * job->y_step;
}

static void run_heads(const attn_job *job, const pds_tensor *w, const void *x, uint32_t x_head,
                      void *y, size_t y_stride, uint32_t y_head) {
  const uint32_t heads = job->a->heads;
  pds_gemm_job gemm =
      pds_gemm_of(job->ctx, w, x, (size_t)heads * x_head, y, y_stride, job->ctx->rows, PDS_OUT_ACT);
  gemm.count = heads;
  gemm.select = select_head;
  gemm.x_step = (size_t)x_head * job->elt;
  gemm.y_step = (size_t)y_head * job->elt;
  pds_run_gemms(job->ctx, &gemm);
}

static void zero_columns(const attn_job *job, unsigned char *y, uint32_t from, uint32_t stride) {
  for (uint32_t r = 0; r < job->ctx->rows && from < stride; r++) {
    memset(y + ((size_t)r * stride + from) * job->elt, 0, (size_t)(stride - from) * job->elt);
  }
}

static void mla_queries(attn_job *job) {
  pds_step_ctx *ctx = job->ctx;
  const pds_attention *a = job->a;
  if (a->q_lora) {
    pds_run_rows(ctx, mla_q_a_row, job, ctx->rows, FEW_ROWS);
    pds_gemm_job q_b = pds_gemm_of(
        ctx, &a->q_b, pds_buf(ctx, PDS_BUF_QACT), pds_ceil(a->q_lora, 32), pds_buf(ctx, PDS_BUF_QB),
        pds_ceil(a->heads * a->qk_dim, PDS_LANES), ctx->rows, PDS_OUT_F32);
    pds_run_gemms(ctx, &q_b);
  }
  pds_run_rows(ctx, mla_row, job, ctx->rows, FEW_ROWS);
  run_heads(job, &a->uk, pds_buf(ctx, PDS_BUF_QHEAD), pds_ceil(a->nope_dim, 32),
            pds_buf(ctx, PDS_BUF_Q), (size_t)a->heads * job->q_stride, job->q_stride);
}

static attn_job job_of(pds_step_ctx *ctx, uint32_t layer) {
  const pds_plan *plan = ctx->plan;
  const pds_attention *a = &plan->layers[layer].attn;
  attn_job job = {.ctx = ctx,
                  .a = a,
                  .act = pds_act(ctx),
                  .elt = pds_act_bytes(plan),
                  .kv_heads = pds_kv_heads(a),
                  .group = a->heads / pds_kv_heads(a),
                  .key_dims = pds_key_dims(a),
                  .value_dims = pds_value_dims(a),
                  .q_stride = pds_ceil(pds_key_dims(a), 32),
                  .key_panel = pds_key_panel_bytes(plan, a),
                  .value_panel = pds_value_panel_bytes(plan),
                  .key_bytes = pds_kv_key_bytes(plan, a),
                  .head_bytes = pds_kv_head_bytes(plan, a),
                  .layer_offset = pds_kv_layer_offset(plan, layer),
                  .split_tokens = UINT32_MAX,
                  .splits = 1};
  job.head_tile = job.group < PDS_TILE ? job.group : PDS_TILE;
  job.head_tiles = (job.group + job.head_tile - 1) / job.head_tile;
  job.row_tile = PDS_TILE / job.head_tile;
  job.row_tiles = (ctx->rows + job.row_tile - 1) / job.row_tile;
  if (ctx->rows <= SPLIT_ROWS) {
    int32_t far = 0;
    for (uint32_t r = 0; r < ctx->rows; r++) far = ctx->position[r] > far ? ctx->position[r] : far;
    job.split_tokens = plan->kv_split;
    job.splits = (uint32_t)far / plan->kv_split + 1;
  }
  return job;
}

void pds_op_attention(pds_step_ctx *ctx, uint32_t layer) {
  attn_job job = job_of(ctx, layer);
  const pds_attention *a = job.a;
  const uint32_t hidden = pds_ceil(ctx->plan->hidden, 32), o_used = a->heads * a->v_dim,
                 o_stride = pds_ceil(o_used, 32);
  unsigned char *o_act = pds_buf(ctx, PDS_BUF_OACT);

  pds_gemm_job in =
      pds_gemm_of(ctx, &a->in_proj, pds_buf(ctx, PDS_BUF_XACT), hidden, pds_buf(ctx, PDS_BUF_QKV),
                  pds_ceil(a->in_proj.n, PDS_LANES), ctx->rows, PDS_OUT_F32);
  if (a->in_bias.dtype != PDS_NONE) in.gemm.bias = pds_weight(ctx, &a->in_bias, 0);
  pds_run_gemms(ctx, &in);
  if (a->kind == PDS_MLA) {
    mla_queries(&job);
  } else {
    pds_run_rows(ctx, gqa_row, &job, ctx->rows, FEW_ROWS);
  }

  pds_run_rows(ctx, attend_item, &job, job.row_tiles * job.kv_heads * job.head_tiles * job.splits,
               1);
  if (job.split_tokens != UINT32_MAX) pds_run_rows(ctx, merge_item, &job, ctx->rows * a->heads, 64);
  if (a->kind == PDS_MLA) {
    run_heads(&job, &a->uv, pds_buf(ctx, PDS_BUF_CTXACT), pds_ceil(a->kv_lora, 32), o_act, o_stride,
              a->v_dim);
    zero_columns(&job, o_act, o_used, o_stride);
  }

  pds_gemm_job o = pds_gemm_of(ctx, &a->o_proj, o_act, o_stride, pds_buf(ctx, PDS_BUF_HID), hidden,
                               ctx->rows, PDS_OUT_ADD);
  if (a->o_bias.dtype != PDS_NONE) o.gemm.bias = pds_weight(ctx, &a->o_bias, 0);
  pds_run_gemms(ctx, &o);
}
