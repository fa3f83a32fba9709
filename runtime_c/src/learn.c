/* learn.c: the last tokens of each layer with a predictor. */
#include "learn.h"

#include <string.h>

#include "memory.h"
#include "net.h"
#include "status.h"

static const uint32_t CAPACITY[2] = {PDS_LEARN_PREFILL, PDS_LEARN_DECODE};

/* Parts of a row, as byte offsets. */
typedef struct row_layout {
  uint32_t w, scores, e, prev, next, target, total;
} row_layout;

static row_layout lay_out(uint32_t hidden, uint32_t k, uint32_t next_k, uint32_t experts) {
  row_layout at;
  at.w = (uint32_t)pds_round_up(2 * (uint64_t)hidden, 4);
  at.scores = at.w + 4 * k;
  at.e = at.scores + 4 * experts;
  at.prev = at.e + 2 * k;
  at.next = at.prev + 2 * k;
  at.target = at.next + 2 * next_k;
  at.total = (uint32_t)pds_round_up(at.target + 2 * next_k, 64);
  return at;
}

static const pds_gate *target_of(const pds_plan *plan, uint32_t layer) {
  return &plan->layers[plan->layers[layer].predictor.target].gate;
}

static uint64_t row_bytes(const pds_plan *plan, uint32_t layer) {
  const pds_gate *target = target_of(plan, layer);
  return lay_out(plan->hidden, plan->layers[layer].gate.top_k, target->top_k, target->experts)
      .total;
}

static uint64_t header_bytes(const pds_plan *plan) {
  return pds_round_up(sizeof(pds_learn), 64) +
         pds_round_up(2 * (uint64_t)plan->n_layers * sizeof(pds_ring), 64);
}

static uint64_t staged_bytes(const pds_plan *plan, const uint8_t *wanted) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (wanted[i] && row_bytes(plan, i) > most) most = row_bytes(plan, i);
  return most * PDS_LEARN_PREFILL;
}

uint64_t pds_learn_bytes(const pds_plan *plan, const uint8_t *wanted) {
  uint64_t bytes = header_bytes(plan) + staged_bytes(plan, wanted);
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (wanted[i]) bytes += row_bytes(plan, i) * (PDS_LEARN_PREFILL + PDS_LEARN_DECODE);
  return bytes;
}

pds_learn *pds_learn_place(void *memory, const pds_plan *plan, const uint8_t *wanted) {
  unsigned char *end = memory;
  pds_learn *learn = memory;
  learn->rings = (pds_ring *)(end + pds_round_up(sizeof(pds_learn), 64));
  learn->staged_rows = end += header_bytes(plan);
  end += staged_bytes(plan, wanted);
  for (uint32_t i = 0; i < plan->n_layers; i++) {
    for (uint32_t phase = 0; phase < 2 && wanted[i]; phase++) {
      pds_ring *ring = &learn->rings[2 * i + phase];
      ring->capacity = CAPACITY[phase];
      ring->k = plan->layers[i].gate.top_k;
      ring->next_k = target_of(plan, i)->top_k;
      ring->experts = target_of(plan, i)->experts;
      ring->row_bytes = (uint32_t)row_bytes(plan, i);
      ring->rows = end;
      end += (uint64_t)ring->row_bytes * ring->capacity;
    }
  }
  return learn;
}

/* --- the step's side --- */

void pds_learn_begin(pds_step_ctx *ctx) {
  if (ctx->learn) ctx->learn->staged = 0; /* a step that failed may have left some */
}

static void put_ids(unsigned char *to, const int32_t *from, uint32_t k) {
  uint16_t *id = (uint16_t *)to;
  for (uint32_t r = 0; r < k; r++) id[r] = (uint16_t)from[r];
}

/* What the sequence's last token chose before this step, if that is known. */
static void put_last(const pds_step_ctx *ctx, unsigned char *to, uint32_t row, uint32_t layer,
                     uint32_t k) {
  const int32_t seq = ctx->seq[row];
  const uint32_t length = ctx->length[seq];
  if (ctx->last && length && *pds_last_length(ctx->last, ctx->plan, seq) == length)
    memcpy(to, pds_last_ids(ctx, seq, layer), 2 * (size_t)k);
  else
    memset(to, 0xff, 2 * (size_t)k);
}

/* The row before in the step of the same sequence, or -1. */
static int32_t row_before(const pds_step_ctx *ctx, uint32_t row) {
  for (uint32_t i = row; i-- > 0;)
    if (ctx->seq[i] == ctx->seq[row]) return (int32_t)i;
  return -1;
}

static void stage(pds_step_ctx *ctx, pds_learn *learn, uint32_t layer, const pds_ring *ring) {
  const pds_plan *plan = ctx->plan;
  const uint32_t hidden = plan->hidden, stride = (hidden + 31) / 32 * 32, k = ring->k;
  const row_layout at = lay_out(hidden, k, ring->next_k, ring->experts);
  const uint32_t first = ctx->rows > ring->capacity ? ctx->rows - ring->capacity : 0;
  const float *xn = pds_buf(ctx, PDS_BUF_XN), *w = pds_buf(ctx, PDS_BUF_ROUTE_W);
  const int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  unsigned char *to = learn->staged_rows;
  for (uint32_t row = first; row < ctx->rows; row++, to += ring->row_bytes) {
    const int32_t before = learn->before[row - first] = row_before(ctx, row);
    ctx->kernels->bf16.convert(xn + (size_t)row * stride, to, hidden);
    memcpy(to + at.w, w + (size_t)row * k, 4 * (size_t)k);
    put_ids(to + at.e, id + (size_t)row * k, k);
    if (before >= 0) {
      put_ids(to + at.prev, id + (size_t)before * k, k);
      continue; /* what the next layer chose for it comes with the targets */
    }
    put_last(ctx, to + at.prev, row, layer, k);
    put_last(ctx, to + at.next, row, plan->layers[layer].predictor.target, ring->next_k);
  }
  learn->staged = ctx->rows - first;
  learn->layer = layer;
}

static void put_scores(float *to, const float *score, const float *bias, uint32_t n) {
  for (uint32_t e = 0; e < n; e++) to[e] = bias ? score[e] + bias[e] : score[e];
}

/* ROUTE_ID and GATE have become those of the layer that the staged rows' one predicts. */
static void add_targets(pds_step_ctx *ctx, pds_learn *learn, const pds_ring *ring) {
  const uint32_t k = ring->next_k, first = ctx->rows - learn->staged;
  const row_layout at = lay_out(ctx->plan->hidden, ring->k, k, ring->experts);
  const pds_tensor *b = &target_of(ctx->plan, learn->layer)->bias;
  const float *bias = b->dtype == PDS_NONE ? NULL : pds_weight(ctx, b, 0);
  const size_t stride = (ring->experts + PDS_LANES - 1) / PDS_LANES * PDS_LANES;
  const float *score = (const float *)pds_buf(ctx, PDS_BUF_GATE) + first * stride;
  const int32_t *id = pds_buf(ctx, PDS_BUF_ROUTE_ID);
  unsigned char *to = learn->staged_rows;
  for (uint32_t i = 0; i < learn->staged; i++, to += ring->row_bytes) {
    put_ids(to + at.target, id + (size_t)(first + i) * k, k);
    put_scores((float *)(to + at.scores), score + i * stride, bias, ring->experts);
    if (learn->before[i] >= 0) put_ids(to + at.next, id + (size_t)learn->before[i] * k, k);
  }
}

static void keep(pds_learn *learn, pds_ring *ring) {
  if (atomic_exchange_explicit(&ring->busy, true, memory_order_acquire)) {
    atomic_fetch_add_explicit(&learn->dropped, learn->staged, memory_order_relaxed);
    return;
  }
  uint64_t total = atomic_load_explicit(&ring->total, memory_order_relaxed);
  const unsigned char *from = learn->staged_rows;
  for (uint32_t i = 0; i < learn->staged; i++, from += ring->row_bytes, total++)
    memcpy(ring->rows + total % ring->capacity * ring->row_bytes, from, ring->row_bytes);
  atomic_store_explicit(&ring->total, total, memory_order_relaxed);
  atomic_store_explicit(&ring->busy, false, memory_order_release);
}

void pds_learn_routed(pds_step_ctx *ctx, uint32_t layer) {
  pds_learn *learn = ctx->learn;
  if (!learn) return;
  if (learn->staged && ctx->plan->layers[learn->layer].predictor.target == layer) {
    pds_ring *ring = &learn->rings[2 * learn->layer + ctx->net_phase];
    add_targets(ctx, learn, ring);
    keep(learn, ring);
  }
  learn->staged = 0;
  const pds_ring *ring = &learn->rings[2 * layer + ctx->net_phase];
  if (ring->rows) stage(ctx, learn, layer, ring);
}

/* --- the reader's side --- */

static void get_ids(int32_t *to, const unsigned char *from, uint32_t k) {
  const uint16_t *id = (const uint16_t *)from;
  for (uint32_t r = 0; r < k; r++) to[r] = id[r] == PDS_LEARN_NONE ? -1 : id[r];
}

pds_status pds_learn_copy(pds_learn *learn, const pds_plan *plan, pds_learned *out) {
  if (out->layer >= plan->n_layers || out->phase > PDS_NET_DECODE ||
      !learn->rings[2 * out->layer + out->phase].rows)
    return pds_fail(PDS_ERR_ARGUMENT, "learned tokens: layer %u, phase %u: nothing is kept there",
                    out->layer, out->phase);
  pds_ring *ring = &learn->rings[2 * out->layer + out->phase];
  out->n = 0;
  out->total = atomic_load_explicit(&ring->total, memory_order_relaxed);
  if (!out->a) return PDS_OK;
  if (!out->w || !out->e || !out->prev || !out->prev_next || !out->target || !out->scores)
    return pds_fail(PDS_ERR_ARGUMENT, "learned tokens: a null pointer");
  if (atomic_exchange_explicit(&ring->busy, true, memory_order_acquire))
    return pds_fail(PDS_ERR_BUSY, "a step is writing these tokens; read them again");
  const uint64_t total = atomic_load_explicit(&ring->total, memory_order_relaxed);
  const uint32_t n = total < ring->capacity ? (uint32_t)total : ring->capacity;
  const uint32_t hidden = plan->hidden, k = ring->k, next_k = ring->next_k;
  const row_layout at = lay_out(hidden, k, next_k, ring->experts);
  for (uint32_t i = 0; i < n; i++) {
    const unsigned char *row = ring->rows + (total - n + i) % ring->capacity * ring->row_bytes;
    memcpy(out->a + (size_t)i * hidden, row, 2 * (size_t)hidden);
    memcpy(out->w + (size_t)i * k, row + at.w, 4 * (size_t)k);
    memcpy(out->scores + (size_t)i * ring->experts, row + at.scores, 4 * (size_t)ring->experts);
    get_ids(out->e + (size_t)i * k, row + at.e, k);
    get_ids(out->prev + (size_t)i * k, row + at.prev, k);
    get_ids(out->prev_next + (size_t)i * next_k, row + at.next, next_k);
    get_ids(out->target + (size_t)i * next_k, row + at.target, next_k);
  }
  atomic_store_explicit(&ring->busy, false, memory_order_release);
  out->n = n;
  out->total = total;
  return PDS_OK;
}
