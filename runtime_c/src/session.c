/* session.c: sessions: their life, pds_step, and the calls on sequences. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "cpu.h"
#include "engine.h"
#include "exec.h"
#include "map.h"

/* --- the part on a GPU: who talks to the driver holds the pool --- */

static pds_status begin_gpu(pds_engine *engine) {
  pds_pool_open(engine->pool);
  const pds_status status = pds_gpu_enter(engine->gpu);
  if (status != PDS_OK) pds_pool_close(engine->pool);
  return status;
}

static void end_gpu(pds_engine *engine) {
  pds_gpu_leave(engine->gpu);
  pds_pool_close(engine->pool);
}

static pds_status copy_kv(void *user, void *to, const void *from, uint64_t bytes, pds_kv_way way) {
  return pds_gpu_copy(user, to, from, bytes, way);
}

static pds_status open_on_gpu(pds_session *session, uint32_t max_seqs) {
  pds_engine *engine = session->engine;
  pds_kv *kv = &session->kv;
  PDS_RETURN_IF_ERROR(begin_gpu(engine));
  const pds_status status = pds_gpu_session_open(
      engine->gpu, kv->blocks * engine->plan->kv_block_bytes,
      4 * (uint64_t)max_seqs * kv->seq_blocks, session, session->bytes, &session->gpu);
  end_gpu(engine);
  kv->data = (unsigned char *)(uintptr_t)session->gpu.kv;
  kv->copy = copy_kv;
  kv->user = engine->gpu;
  return status;
}

static void close_on_gpu(pds_session *session) {
  pds_engine *engine = session->engine;
  if (!engine->gpu || engine->pid != getpid()) return;
  pds_pool_open(engine->pool);
  engine->gpu->cuda.cuCtxPushCurrent(engine->gpu->context); /* of a GPU that failed, too */
  pds_gpu_session_close(engine->gpu, &session->gpu, session);
  end_gpu(engine);
}

/* Around a call on the KV, which may lie there. */
static pds_status begin_kv(const pds_session *session) {
  return session->engine->gpu ? begin_gpu(session->engine) : PDS_OK;
}

static void end_kv(const pds_session *session) {
  if (session->engine->gpu) end_gpu(session->engine);
}

pds_status pds_session_create(pds_engine *engine, const pds_session_options *options,
                              pds_session **out_session) {
  if (!engine || !out_session) return pds_fail(PDS_ERR_ARGUMENT, "session: a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(engine));
  const pds_plan *plan = engine->plan;
  uint32_t max_seqs = options && options->max_seqs ? options->max_seqs : 1;
  uint32_t kv_tokens = options && options->kv_tokens ? options->kv_tokens : plan->max_context;
  if (max_seqs > PDS_MAX_SEQS)
    return pds_fail(PDS_ERR_ARGUMENT, "max_seqs %u: expected at most %u", max_seqs, PDS_MAX_SEQS);
  pds_session_layout at = pds_layout_session(plan, max_seqs, kv_tokens, !engine->gpu);
  if (plan->kv_block_bytes && at.kv_blocks > (UINT64_MAX / 4) / plan->kv_block_bytes)
    return pds_fail(PDS_ERR_MEMORY, "kv_tokens %u: the KV cache exceeds the address space",
                    kv_tokens);
  void *base;
  PDS_RETURN_IF_ERROR(pds_map_anon(at.total, "session", &base));
  pds_advise_huge(base, at.total); /* attention streams the KV */
  unsigned char *arena = base;
  pds_session *session = base;
  session->engine = engine;
  session->bytes = at.total;
  session->scratch = arena + at.scratch;
  session->logit_rows = (uint32_t *)(arena + at.logit_rows);
  session->last = pds_last_bytes(plan) ? arena + at.last : NULL;
  pds_kv_init(&session->kv, plan, max_seqs, arena, &at);
  if (engine->gpu) {
    const pds_status status = open_on_gpu(session, max_seqs);
    if (status != PDS_OK) {
      pds_unmap(session, session->bytes);
      return status;
    }
  }
  pds_engine_retain(engine);
  *out_session = session;
  return PDS_OK;
}

void pds_session_destroy(pds_session *session) {
  if (!session) return;
  pds_engine *engine = session->engine;
  close_on_gpu(session);
  if (!(engine->gpu && engine->gpu->stopped)) pds_unmap(session, session->bytes);
  pds_engine_release(engine);
}

/* Every call that uses or changes a session's state takes it for itself, or fails: nobody waits. */
static pds_status enter(const pds_session *session) {
  if (!session) return pds_fail(PDS_ERR_ARGUMENT, "the session is a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(session->engine));
  pds_session *s = (pds_session *)(uintptr_t)session;
  if (atomic_exchange_explicit(&s->busy, true, memory_order_acquire))
    return pds_fail(PDS_ERR_BUSY, "another thread is using this session; give each thread its own");
  return PDS_OK;
}

static pds_status leave(const pds_session *session, pds_status status) {
  pds_session *s = (pds_session *)(uintptr_t)session;
  atomic_store_explicit(&s->blocks_used, s->kv.blocks - s->kv.n_free, memory_order_relaxed);
  atomic_store_explicit(&s->busy, false, memory_order_release);
  return status;
}

/* --- the step --- */

static pds_status check_batch(const pds_session *session, const pds_batch *batch) {
  const pds_plan *plan = session->engine->plan;
  if (!batch->token || !batch->position || !batch->seq)
    return pds_fail(PDS_ERR_ARGUMENT, "batch: token, position or seq is a null pointer");
  if (batch->n == 0) return pds_fail(PDS_ERR_BATCH, "batch: no rows");
  if (batch->n > plan->max_rows)
    return pds_fail(PDS_ERR_BATCH, "batch: %u rows, but the plan takes at most %u a step", batch->n,
                    plan->max_rows);
  for (uint32_t i = 0; i < batch->n; i++)
    if (batch->token[i] < 0 || (uint32_t)batch->token[i] >= plan->vocab)
      return pds_fail(PDS_ERR_TOKEN, "row %u: token %d, expected 0 to %u", i, batch->token[i],
                      plan->vocab - 1);
  return PDS_OK;
}

/* Lists the rows that want logits. */
static pds_status list_logit_rows(const pds_session *session, const pds_batch *batch,
                                  uint32_t *out_n) {
  const pds_plan *plan = session->engine->plan;
  uint32_t n = 0;
  for (uint32_t i = 0; i < batch->n; i++) {
    bool wanted = batch->want_logits ? batch->want_logits[i] != 0 : i == batch->n - 1;
    if (!wanted) continue;
    if (n == plan->max_logits)
      return pds_fail(PDS_ERR_BATCH, "batch: more than %u rows want logits, the plan's limit",
                      plan->max_logits);
    session->logit_rows[n++] = i;
  }
  *out_n = n;
  return PDS_OK;
}

/* Experts that a layer's gate chooses, at most. */
static uint32_t most_chosen(const pds_plan *plan) {
  uint32_t most = 0;
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].moe && plan->layers[i].gate.top_k > most) most = plan->layers[i].gate.top_k;
  return most;
}

static pds_step_ctx context_of(const pds_session *session) {
  pds_engine *engine = session->engine;
  const pds_kv *kv = &session->kv;
  pds_step_ctx ctx = {.plan = engine->plan,
                      .kernels = engine->path->kernels(),
                      .l2_bytes = engine->l2_bytes,
                      .pool = engine->pool,
                      .files = engine->files,
                      .scratch = session->scratch,
                      .thread_scratch = engine->thread_scratch,
                      .kv = kv->data,
                      .table = kv->table,
                      .table_stride = kv->seq_blocks,
                      .predict_step = 1};
  ctx.cpu_holes = pds_buf(&ctx, PDS_BUF_HOLES);
  return ctx;
}

/* --- what a sequence's last token chose: known while it is as long as it was then --- */

static void forget(pds_session *session, int32_t seq) {
  if (session->last) *pds_last_length(session->last, session->engine->plan, seq) = 0;
}

static void remember(pds_session *session, const pds_batch *batch) {
  if (!session->last) return;
  for (uint32_t i = 0; i < batch->n; i++) {
    const int32_t seq = batch->seq[i];
    *pds_last_length(session->last, session->engine->plan, seq) = session->kv.length[seq];
  }
}

static void copy_last(pds_session *session, int32_t from, int32_t to) {
  const size_t bytes = pds_last_bytes(session->engine->plan);
  if (session->last)
    memcpy(session->last + (size_t)to * bytes, session->last + (size_t)from * bytes, bytes);
}

/* Which of a layer's two nets predicts in a step: decode's where every row continues another
 * sequence by one token. */
static uint32_t net_phase_of(const pds_batch *batch) {
  for (uint32_t i = 1; i < batch->n; i++)
    for (uint32_t j = 0; j < i; j++)
      if (batch->seq[i] == batch->seq[j]) return PDS_NET_PREFILL;
  return PDS_NET_DECODE;
}

/* Blocks for a step's rows; a shared one may be copied. */
static pds_status begin_rows(pds_session *session, const pds_batch *batch) {
  pds_engine *engine = session->engine;
  if (engine->gpu) PDS_RETURN_IF_ERROR(pds_gpu_enter(engine->gpu));
  const pds_status status = pds_kv_begin(&session->kv, batch->n, batch->seq, batch->position);
  if (engine->gpu) pds_gpu_leave(engine->gpu);
  return status;
}

static pds_status run_step(pds_session *session, const pds_batch *batch, pds_logits *out_logits) {
  uint64_t begin = pds_now_ns();
  pds_engine *engine = session->engine;
  const pds_plan *plan = engine->plan;
  pds_kv *kv = &session->kv;
  uint32_t n_logits = 0;
  PDS_RETURN_IF_ERROR(check_batch(session, batch));
  PDS_RETURN_IF_ERROR(list_logit_rows(session, batch, &n_logits));
  pds_pool_open(engine->pool);
  const pds_status begun = begin_rows(session, batch);
  if (begun != PDS_OK) {
    pds_pool_close(engine->pool);
    return begun;
  }
  pds_step_ctx ctx = context_of(session);
  ctx.rows = batch->n;
  ctx.token = batch->token;
  ctx.position = batch->position;
  ctx.seq = batch->seq;
  ctx.logit_row = session->logit_rows;
  ctx.n_logits = n_logits;
  ctx.last = session->last;
  ctx.length = kv->length;
  ctx.predicts =
      engine->gpu ? pds_gpu_predicts(engine->gpu) : pds_llc_begin(&engine->llc, batch->n);
  if (engine->gpu) ctx.predict_step = (batch->n + plan->predict_rows - 1) / plan->predict_rows;
  if (ctx.predicts && (!engine->gpu || pds_policy_has_nets(engine->gpu->policy.policy)))
    ctx.nets = atomic_load_explicit(&engine->nets, memory_order_acquire);
  ctx.predictions = session->predictions;
  ctx.n_predictions = session->n_predictions;
  ctx.routes = session->routes;
  ctx.n_routes = session->n_routes;
  ctx.routes_k = most_chosen(plan);
  ctx.learn = atomic_load_explicit(&engine->learn, memory_order_acquire);
  if (ctx.predicts || ctx.learn) ctx.net_phase = net_phase_of(batch);
  pds_learn_begin(&ctx);
  uint32_t fp = pds_fp_default();
  const uint64_t ran = pds_now_ns(); /* behind the steps of others */
  pds_status status = pds_exec_step(session, &ctx);
  pds_fp_restore(fp);
  if (status == PDS_OK && !engine->gpu)
    pds_llc_end(&engine->llc, batch->n, n_logits, pds_now_ns() - ran);
  pds_pool_close(engine->pool);
  if (status != PDS_OK) {
    pds_kv_rollback(kv, batch->n, batch->seq);
    for (uint32_t i = 0; i < batch->n; i++) forget(session, batch->seq[i]);
    return status;
  }
  pds_kv_commit(kv, batch->n, batch->seq);
  remember(session, batch);
  out_logits->data = pds_buf(&ctx, PDS_BUF_LOGITS);
  out_logits->rows = n_logits;
  out_logits->vocab = engine->plan->vocab;
  session->steps++;
  session->rows += batch->n;
  session->step_ns += pds_now_ns() - begin;
  return PDS_OK;
}

pds_status pds_step(pds_session *session, const pds_batch *batch, pds_logits *out_logits) {
  if (!batch || !out_logits) return pds_fail(PDS_ERR_ARGUMENT, "step: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  return leave(session, run_step(session, batch, out_logits));
}

pds_status pds_predict(pds_session *session, const pds_prediction *asked, float *out_logits) {
  if (!asked || !out_logits) return pds_fail(PDS_ERR_ARGUMENT, "prediction: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  pds_step_ctx ctx = context_of(session);
  return leave(session, pds_predict_rows(session, &ctx, asked, out_logits));
}

pds_status pds_measure(pds_session *session, const pds_measurement *asked, int64_t *out_ns) {
  if (!asked || !out_ns) return pds_fail(PDS_ERR_ARGUMENT, "measurement: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  pds_step_ctx ctx = context_of(session);
  return leave(session, pds_measure_part(session, &ctx, asked, out_ns));
}

void pds_cancel(pds_session *session) {
  if (session) atomic_store_explicit(&session->cancel, true, memory_order_relaxed);
}

/* --- looking on --- */

pds_status pds_session_get_stats(const pds_session *session, pds_session_stats *out_stats) {
  if (!session || !out_stats) return pds_fail(PDS_ERR_ARGUMENT, "stats: a null pointer");
  *out_stats = (pds_session_stats){.steps = session->steps,
                                   .rows = session->rows,
                                   .step_ns = session->step_ns,
                                   .expert_rows = session->expert_rows,
                                   .experts_activated = session->experts_activated,
                                   .weight_bytes = session->weight_bytes,
                                   .kv_blocks = session->kv.blocks,
                                   .kv_blocks_used = session->blocks_used,
                                   .session_bytes = session->bytes,
                                   .experts_predicted = session->llc_counts.predicted,
                                   .experts_hit = session->llc_counts.hits,
                                   .prefetch_bytes = session->llc_counts.bytes,
                                   .prefetch_useful_bytes = session->llc_counts.useful_bytes};
  return PDS_OK;
}

pds_status pds_session_set_tap(pds_session *session, pds_tap_fn fn, void *user) {
  PDS_RETURN_IF_ERROR(enter(session));
  session->tap = fn;
  session->tap_user = user;
  return leave(session, PDS_OK);
}

static pds_status check_predictions(const pds_plan *plan, const uint16_t *ids, uint32_t tokens) {
  if (!plan->last_top_k)
    return pds_fail(PDS_ERR_ARGUMENT,
                    "predictions: the plan predicts nothing; compile it with cache prefetch");
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t layer = 0; layer < plan->n_layers; layer++, ids += plan->last_top_k) {
      const pds_predictor *p = &plan->layers[layer].predictor;
      if (p->kind == PDS_PREDICT_NONE) continue;
      const pds_gate *target = &plan->layers[p->target].gate;
      for (uint32_t r = 0; r < target->top_k; r++)
        if (ids[r] >= target->experts)
          return pds_fail(PDS_ERR_ARGUMENT,
                          "predictions: position %u, layer %u: expert %u, expected 0 to %u", t,
                          layer, ids[r], target->experts - 1);
    }
  return PDS_OK;
}

pds_status pds_session_set_predictions(pds_session *session, const uint16_t *ids, uint32_t tokens) {
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = ids ? check_predictions(session->engine->plan, ids, tokens) : PDS_OK;
  if (status == PDS_OK) {
    session->predictions = ids;
    session->n_predictions = ids ? tokens : 0;
  }
  return leave(session, status);
}

static pds_status check_routes(const pds_plan *plan, const uint16_t *ids, uint32_t tokens) {
  const uint32_t most = most_chosen(plan);
  if (!tokens || !most)
    return pds_fail(PDS_ERR_ARGUMENT, "routes: %s",
                    tokens ? "the plan has no layer with experts" : "of no token; expected 1");
  for (uint32_t t = 0; t < tokens; t++)
    for (uint32_t layer = 0; layer < plan->n_layers; layer++, ids += most) {
      if (!plan->layers[layer].moe) continue;
      const pds_gate *gate = &plan->layers[layer].gate;
      for (uint32_t r = 0; r < gate->top_k; r++) {
        bool twice = false;
        for (uint32_t i = 0; i < r; i++) twice |= ids[i] == ids[r];
        if (twice || ids[r] >= gate->experts)
          return pds_fail(
              PDS_ERR_ARGUMENT,
              "routes: token %u, layer %u: expert %u%s, expected %u different ones of 0 "
              "to %u",
              t, layer, ids[r], twice ? " twice" : "", gate->top_k, gate->experts - 1);
      }
    }
  return PDS_OK;
}

pds_status pds_session_set_routes(pds_session *session, const uint16_t *ids, uint32_t tokens) {
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = ids ? check_routes(session->engine->plan, ids, tokens) : PDS_OK;
  if (status == PDS_OK) {
    session->routes = ids;
    session->n_routes = ids ? tokens : 0;
  }
  return leave(session, status);
}

pds_status pds_session_trace_start(pds_session *session, pds_trace_record *buffer,
                                   uint64_t capacity) {
  if (!buffer) return pds_fail(PDS_ERR_ARGUMENT, "trace: the buffer is a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  session->trace = (pds_trace){.records = buffer, .capacity = capacity};
  return leave(session, PDS_OK);
}

pds_status pds_session_trace_stop(pds_session *session, uint64_t *out_records,
                                  uint64_t *out_dropped) {
  if (!out_records || !out_dropped) return pds_fail(PDS_ERR_ARGUMENT, "trace: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  *out_records = session->trace.count;
  *out_dropped = session->trace.dropped;
  session->trace = (pds_trace){0};
  return leave(session, PDS_OK);
}

/* --- sequences --- */

pds_status pds_seq_length(const pds_session *session, int32_t seq, uint32_t *out_tokens) {
  if (!out_tokens) return pds_fail(PDS_ERR_ARGUMENT, "length: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = pds_kv_check_seq(&session->kv, seq);
  if (status == PDS_OK) *out_tokens = session->kv.length[seq];
  return leave(session, status);
}

pds_status pds_seq_truncate(pds_session *session, int32_t seq, uint32_t tokens) {
  PDS_RETURN_IF_ERROR(enter(session));
  return leave(session, pds_kv_truncate(&session->kv, seq, tokens));
}

pds_status pds_seq_fork(pds_session *session, int32_t src, int32_t dst) {
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = begin_kv(session);
  if (status != PDS_OK) return leave(session, status);
  status = pds_kv_fork(&session->kv, src, dst);
  end_kv(session);
  if (status == PDS_OK) copy_last(session, src, dst);
  return leave(session, status);
}

pds_status pds_seq_save_size(const pds_session *session, int32_t seq, uint64_t *out_bytes) {
  if (!out_bytes) return pds_fail(PDS_ERR_ARGUMENT, "save: a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  return leave(session, pds_kv_save_size(&session->kv, seq, out_bytes));
}

pds_status pds_seq_save(const pds_session *session, int32_t seq, void *buffer, uint64_t bytes) {
  if (!buffer) return pds_fail(PDS_ERR_ARGUMENT, "save: the buffer is a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = begin_kv(session);
  if (status != PDS_OK) return leave(session, status);
  status = pds_kv_save(&session->kv, seq, buffer, bytes);
  end_kv(session);
  return leave(session, status);
}

pds_status pds_seq_restore(pds_session *session, int32_t seq, const void *buffer, uint64_t bytes) {
  if (!buffer) return pds_fail(PDS_ERR_ARGUMENT, "restore: the buffer is a null pointer");
  PDS_RETURN_IF_ERROR(enter(session));
  pds_status status = begin_kv(session);
  if (status != PDS_OK) return leave(session, status);
  status = pds_kv_restore(&session->kv, seq, buffer, bytes);
  end_kv(session);
  if (status == PDS_OK) forget(session, seq); /* not part of what was saved */
  return leave(session, status);
}
