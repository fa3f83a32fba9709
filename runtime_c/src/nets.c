/* nets.c: the nets of an engine: how they get there and are replaced while steps run; the tokens
 * kept to train them on; predictions outside of a step. */
#include <string.h>

#include "cpu.h"
#include "engine.h"
#include "map.h"
#include "net.h"

static pds_status check_layer(const pds_plan *plan, uint32_t layer, uint32_t phase) {
  if (layer >= plan->n_layers || plan->layers[layer].predictor.kind == PDS_PREDICT_NONE)
    return pds_fail(PDS_ERR_ARGUMENT,
                    "layer %u: the plan predicts nothing there; compile it with cache prefetch, "
                    "and name a layer with experts that has another one behind it",
                    layer);
  if (phase > PDS_NET_DECODE)
    return pds_fail(PDS_ERR_ARGUMENT, "phase %u: expected 0 (prefill) or 1 (decode)", phase);
  return PDS_OK;
}

static pds_status check_desc(const pds_plan *plan, uint32_t layer, const pds_net_desc *d) {
  const pds_layer *l = &plan->layers[layer];
  const uint32_t experts = plan->layers[l->predictor.target].gate.experts;
  if (d->hidden != plan->hidden || d->experts != experts || experts != l->gate.experts)
    return pds_fail(PDS_ERR_PLAN_FORMAT,
                    "the predictor of layer %u is for %u inputs and %u experts, expected %u and "
                    "%u; compile the plan again",
                    layer, d->hidden, d->experts, plan->hidden, experts);
  if (d->width > PDS_NET_WIDTH || (d->deep && !d->width) || d->blocks > 7)
    return pds_fail(PDS_ERR_PLAN_FORMAT,
                    "the predictor of layer %u has %u hidden units, expected at most %u%s; train "
                    "a narrower one",
                    layer, d->width, PDS_NET_WIDTH, d->deep ? ", and one at least" : "");
  if (!d->bias || (d->blocks && !d->features) || (d->width && !d->out) ||
      (d->deep && (!d->block || !d->block_bias)))
    return pds_fail(PDS_ERR_ARGUMENT, "the predictor of layer %u: a null pointer", layer);
  return PDS_OK;
}

static void drop(pds_engine *engine, pds_net *net) {
  if (!net) return;
  atomic_fetch_sub_explicit(&engine->net_bytes, net->bytes, memory_order_relaxed);
  pds_unmap(net, net->bytes);
}

static pds_status make_room(pds_engine *engine, pds_net_slot *slot, uint64_t need) {
  if (slot->spare && slot->spare->bytes >= need) return PDS_OK;
  void *memory;
  const uint64_t bytes = pds_round_up(need, PDS_GRAIN);
  PDS_RETURN_IF_ERROR(pds_map_anon(bytes, "predictor", &memory));
  drop(engine, slot->spare);
  slot->spare = memory;
  slot->spare->bytes = bytes;
  atomic_fetch_add_explicit(&engine->net_bytes, bytes, memory_order_relaxed);
  return PDS_OK;
}

static void activate(pds_engine *engine, pds_net_slot *slot, pds_net *next) {
  slot->spare = atomic_exchange_explicit(&slot->active, next, memory_order_acq_rel);
  slot->mark = pds_pool_mark(engine->pool);
}

static uint64_t table_bytes(const pds_plan *plan) {
  return pds_round_up(2 * (uint64_t)plan->n_layers * sizeof(pds_net_slot), PDS_GRAIN);
}

static pds_status set_net(pds_engine *engine, uint32_t index, const pds_net_desc *desc) {
  pds_net_slot *slots = atomic_load_explicit(&engine->nets, memory_order_relaxed);
  if (!slots) {
    void *memory;
    const uint64_t bytes = table_bytes(engine->plan);
    PDS_RETURN_IF_ERROR(pds_map_anon(bytes, "predictors", &memory));
    slots = memory;
    atomic_store_explicit(&engine->nets, slots, memory_order_release);
    atomic_fetch_add_explicit(&engine->net_bytes, bytes, memory_order_relaxed);
  }
  pds_net_slot *slot = &slots[index];
  /* A step that began before the last replacement may still read what is spare since: two
   * replacements within one step, which alone wait. */
  if (!pds_pool_past(engine->pool, slot->mark)) {
    pds_pool_open(engine->pool);
    pds_pool_close(engine->pool);
  }
  if (desc) {
    PDS_RETURN_IF_ERROR(make_room(engine, slot, pds_net_bytes(desc)));
    activate(engine, slot, pds_net_place(slot->spare, desc));
  } else if (atomic_load_explicit(&slot->active, memory_order_relaxed)) {
    drop(engine, slot->spare);
    activate(engine, slot, NULL);
  }
  return PDS_OK;
}

pds_status pds_engine_set_net(pds_engine *engine, uint32_t layer, uint32_t phase,
                              const pds_net_desc *desc) {
  if (!engine) return pds_fail(PDS_ERR_ARGUMENT, "predictor: the engine is a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(engine));
  PDS_RETURN_IF_ERROR(check_layer(engine->plan, layer, phase));
  if (desc) PDS_RETURN_IF_ERROR(check_desc(engine->plan, layer, desc));
  if (atomic_exchange_explicit(&engine->net_busy, true, memory_order_acquire))
    return pds_fail(PDS_ERR_BUSY, "another thread is setting a predictor; let one thread do it");
  const pds_status status = set_net(engine, 2 * layer + phase, desc);
  atomic_store_explicit(&engine->net_busy, false, memory_order_release);
  return status;
}

void pds_nets_free(pds_engine *engine) {
  pds_net_slot *slots = atomic_load_explicit(&engine->nets, memory_order_relaxed);
  if (!slots) return;
  for (uint32_t i = 0; i < 2 * engine->plan->n_layers; i++) {
    drop(engine, atomic_load_explicit(&slots[i].active, memory_order_relaxed));
    drop(engine, slots[i].spare);
  }
  pds_unmap(slots, table_bytes(engine->plan));
}

/* --- tokens for the learner --- */

static void drop_learn(pds_engine *engine, pds_learn *learn) {
  if (!learn) return;
  atomic_store_explicit(&engine->learner_bytes, 0, memory_order_relaxed);
  pds_unmap(learn, learn->bytes);
}

static pds_status set_learner(pds_engine *engine, const uint8_t *wanted) {
  pds_learn *old = atomic_exchange_explicit(&engine->learn, NULL, memory_order_acq_rel);
  if (old) { /* a step may still write there */
    pds_pool_open(engine->pool);
    pds_pool_close(engine->pool);
    drop_learn(engine, old);
  }
  if (!wanted) return PDS_OK;
  const uint64_t bytes = pds_round_up(pds_learn_bytes(engine->plan, wanted), PDS_GRAIN);
  void *memory;
  PDS_RETURN_IF_ERROR(pds_map_anon(bytes, "learner", &memory));
  pds_learn *learn = pds_learn_place(memory, engine->plan, wanted);
  learn->bytes = bytes;
  atomic_store_explicit(&engine->learner_bytes, bytes, memory_order_relaxed);
  atomic_store_explicit(&engine->learn, learn, memory_order_release);
  return PDS_OK;
}

static pds_status enter_learn(pds_engine *engine) {
  if (!engine) return pds_fail(PDS_ERR_ARGUMENT, "learner: the engine is a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(engine));
  if (atomic_exchange_explicit(&engine->learn_busy, true, memory_order_acquire))
    return pds_fail(PDS_ERR_BUSY,
                    "another thread is at the learner's tokens; let one thread do it");
  return PDS_OK;
}

pds_status pds_engine_set_learner(pds_engine *engine, const uint8_t *wanted) {
  PDS_RETURN_IF_ERROR(enter_learn(engine));
  pds_status status = PDS_OK;
  for (uint32_t i = 0; wanted && status == PDS_OK && i < engine->plan->n_layers; i++)
    if (wanted[i]) status = check_layer(engine->plan, i, 0);
  if (status == PDS_OK) status = set_learner(engine, wanted);
  atomic_store_explicit(&engine->learn_busy, false, memory_order_release);
  return status;
}

pds_status pds_engine_read_learned(pds_engine *engine, pds_learned *learned) {
  if (!learned) return pds_fail(PDS_ERR_ARGUMENT, "learned tokens: a null pointer");
  PDS_RETURN_IF_ERROR(enter_learn(engine));
  pds_learn *learn = atomic_load_explicit(&engine->learn, memory_order_relaxed);
  pds_status status =
      learn ? pds_learn_copy(learn, engine->plan, learned)
            : pds_fail(PDS_ERR_ARGUMENT, "learned tokens: the learner is off; switch it on first");
  atomic_store_explicit(&engine->learn_busy, false, memory_order_release);
  return status;
}

void pds_learn_free(pds_engine *engine) {
  drop_learn(engine, atomic_load_explicit(&engine->learn, memory_order_relaxed));
}

/* --- outside of a step --- */

static pds_status check_ids(const char *name, const int32_t *id, int32_t least, uint64_t n,
                            uint32_t experts) {
  if (!id) return PDS_OK;
  for (uint64_t i = 0; i < n; i++)
    if (id[i] < least || id[i] >= (int32_t)experts)
      return pds_fail(PDS_ERR_ARGUMENT, "%s: expert %d, expected %d to %u", name, id[i], least,
                      experts - 1);
  return PDS_OK;
}

/* ids [n], or none of them */
static void put_ids(int32_t *to, const int32_t *from, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) to[i] = from ? from[i] : -1;
}

static void put_rows(pds_step_ctx *ctx, const pds_prediction *p, uint32_t first) {
  const pds_plan *plan = ctx->plan;
  const pds_layer *l = &plan->layers[p->layer];
  const uint32_t hidden = plan->hidden, stride = (hidden + 31) / 32 * 32, k = l->gate.top_k;
  const uint32_t next = plan->layers[l->predictor.target].gate.top_k;
  const pds_act_kernels *act =
      plan->act_dtype == PDS_BF16 ? &ctx->kernels->bf16 : &ctx->kernels->f32;
  float *xn = pds_buf(ctx, PDS_BUF_XN);
  for (uint32_t i = 0; i < ctx->rows; i++, xn += stride) {
    memcpy(xn, p->a + (size_t)(first + i) * hidden, hidden * sizeof *xn);
    memset(xn + hidden, 0, (stride - hidden) * sizeof *xn);
  }
  act->convert(pds_buf(ctx, PDS_BUF_XN), pds_buf(ctx, PDS_BUF_XACT), ctx->rows * stride);
  const size_t at = (size_t)first * k, n = (size_t)ctx->rows * k;
  memcpy(pds_buf(ctx, PDS_BUF_ROUTE_W), p->w + at, n * sizeof *p->w);
  memcpy(pds_buf(ctx, PDS_BUF_ROUTE_ID), p->e + at, n * sizeof *p->e);
  put_ids(pds_buf(ctx, PDS_BUF_NET_PREV), p->prev ? p->prev + at : NULL, n);
  put_ids(pds_buf(ctx, PDS_BUF_NET_NEXT), p->prev_next ? p->prev_next + (size_t)first * next : NULL,
          (size_t)ctx->rows * next);
}

pds_status pds_predict_rows(pds_session *session, pds_step_ctx *ctx, const pds_prediction *p,
                            float *out) {
  const pds_plan *plan = ctx->plan;
  PDS_RETURN_IF_ERROR(check_layer(plan, p->layer, p->phase));
  const pds_layer *l = &plan->layers[p->layer];
  const pds_gate *target = &plan->layers[l->predictor.target].gate;
  if (!p->a || !p->w || !p->e)
    return pds_fail(PDS_ERR_ARGUMENT, "prediction: a, w or e is a null pointer");
  const uint64_t chosen = (uint64_t)p->n * l->gate.top_k;
  PDS_RETURN_IF_ERROR(check_ids("e", p->e, 0, chosen, l->gate.experts));
  PDS_RETURN_IF_ERROR(check_ids("prev", p->prev, -1, chosen, l->gate.experts));
  PDS_RETURN_IF_ERROR(
      check_ids("prev_next", p->prev_next, -1, (uint64_t)p->n * target->top_k, target->experts));
  const uint32_t most = plan->max_rows < PDS_PREDICT_ROWS ? plan->max_rows : PDS_PREDICT_ROWS;
  const uint32_t lanes = (target->experts + PDS_LANES - 1) / PDS_LANES * PDS_LANES;
  ctx->net_phase = p->phase;
  pds_pool_open(ctx->pool);
  const uint32_t fp = pds_fp_default();
  ctx->nets = atomic_load_explicit(&session->engine->nets, memory_order_acquire);
  for (uint32_t first = 0; first < p->n; first += ctx->rows) {
    ctx->rows = p->n - first < most ? p->n - first : most;
    put_rows(ctx, p, first);
    pds_op_predict_logits(ctx, p->layer);
    const float *logits = pds_buf(ctx, PDS_BUF_PREDICT);
    for (uint32_t i = 0; i < ctx->rows; i++, out += target->experts)
      memcpy(out, logits + (size_t)i * lanes, target->experts * sizeof *out);
  }
  pds_fp_restore(fp);
  pds_pool_close(ctx->pool);
  return PDS_OK;
}
