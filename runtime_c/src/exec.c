/* exec.c: the executor of binary programs. The order is the program's own; waits were proved
 * satisfiable by the verifier, and are checked again here against the events that have really been
 * signalled. */
#include "exec.h"

#include <stdbool.h>

#include "gpu.h"
#include "learn.h"
#include "panels.h"

typedef struct exec {
  pds_session *session;
  pds_step_ctx *ctx;
  const pds_program *program;
  pds_gpu_step *gpu;                    /* NULL: the plan runs on the CPU */
  uint64_t events[PDS_MAX_INSTRS / 64]; /* bit i: instruction i of the program is done */
} exec;

uint64_t pds_tensor_bytes(const pds_tensor *t) {
  if (t->dtype == PDS_VEC_F32) return (uint64_t)t->n * 4;
  return ((uint64_t)t->n + 15) / 16 * pds_panel_bytes(t);
}

static uint64_t all_bytes(const pds_tensor *t) {
  return pds_tensor_bytes(t) * (t->count > 1 ? t->count : 1);
}

static uint64_t mlp_bytes(const pds_mlp *mlp) {
  return pds_tensor_bytes(&mlp->gate_up) + pds_tensor_bytes(&mlp->down);
}

static uint64_t attention_bytes(const pds_attention *a) {
  return all_bytes(&a->in_proj) + all_bytes(&a->in_bias) + all_bytes(&a->q_norm) +
         all_bytes(&a->k_norm) + all_bytes(&a->q_b) + all_bytes(&a->uk) + all_bytes(&a->uv) +
         all_bytes(&a->o_proj) + all_bytes(&a->o_bias);
}

static uint64_t gate_bytes(const pds_gate *gate) {
  return all_bytes(&gate->weight) + all_bytes(&gate->bias);
}

static uint64_t predict_bytes(const exec *e, const pds_layer *layer, bool fused) {
  const pds_step_ctx *ctx = e->ctx;
  if (!ctx->predicts) return 0;
  const pds_gate *target = &ctx->plan->layers[layer->predictor.target].gate;
  const pds_net *net = fused ? pds_net_of(ctx, (uint32_t)e->program->layer) : NULL;
  return net ? net->matrix : gate_bytes(target);
}

/* Weight bytes that the instruction reads, given the holes bound so far. */
static uint64_t weight_bytes(const exec *e, const pds_instr *in, uint32_t experts) {
  const pds_plan *plan = e->ctx->plan;
  const pds_layer *layer = e->program->layer >= 0 ? &plan->layers[e->program->layer] : NULL;
  switch (in->opcode) {
  case PDS_OP_EMBED:
    return pds_tensor_bytes(&plan->embed) / (plan->vocab ? plan->vocab : 1) * e->ctx->rows;
  case PDS_OP_NORM: return (uint64_t)plan->hidden * 4;
  case PDS_OP_ATTENTION: return attention_bytes(&layer->attn);
  case PDS_OP_GATE:
    return gate_bytes(&layer->gate) +
           (in->flags & PDS_INSTR_PREDICT ? predict_bytes(e, layer, true) : 0);
  case PDS_OP_PREDICT: return predict_bytes(e, layer, false);
  case PDS_OP_EXPERT: return experts * mlp_bytes(&layer->experts);
  case PDS_OP_SHARED_EXPERT: return mlp_bytes(&layer->shared);
  case PDS_OP_MLP: return mlp_bytes(&layer->dense);
  case PDS_OP_LM_HEAD: return all_bytes(&plan->lm_head);
  default: return 0;
  }
}

/* The entries of ?c that an expert instruction names. */
static uint32_t holes_of(const exec *e, const pds_instr *in, pds_hole **out_holes) {
  const pds_step_ctx *ctx = e->ctx;
  *out_holes = ctx->cpu_holes;
  if (in->index == PDS_INDEX_ALL) return ctx->n_cpu_holes;
  *out_holes += in->index;
  return in->index < ctx->n_cpu_holes ? 1 : 0; /* an unbound hole retires at once */
}

static void count_experts(exec *e, const pds_hole *holes, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) e->session->expert_rows += holes[i].rows;
  e->session->experts_activated += n;
}

static pds_status compute_with_gpu(exec *e, const pds_instr *in, uint32_t *out_experts) {
  pds_step_ctx *ctx = e->ctx;
  PDS_RETURN_IF_ERROR(pds_gpu_instr(e->gpu, e->program, in, out_experts));
  if (in->opcode != PDS_OP_RECOMPILE) return PDS_OK;
  const uint32_t layer = (uint32_t)e->program->layer;
  e->session->expert_rows += (uint64_t)ctx->rows * e->program->top_k;
  e->session->experts_activated += ctx->n_cpu_holes + e->gpu->n_holes;
  pds_learn_routed(ctx, layer);
  pds_op_remember(ctx, layer);
  return PDS_OK;
}

static pds_status compute(exec *e, const pds_instr *in, uint32_t *out_experts) {
  if (e->gpu) return compute_with_gpu(e, in, out_experts);
  pds_step_ctx *ctx = e->ctx;
  uint32_t layer = (uint32_t)e->program->layer;
  pds_hole *holes;
  switch (in->opcode) {
  case PDS_OP_EMBED: pds_op_embed(ctx); return PDS_OK;
  case PDS_OP_NORM: pds_op_norm(ctx, layer, (pds_norm_site)in->arg); return PDS_OK;
  case PDS_OP_ATTENTION: pds_op_attention(ctx, layer); return PDS_OK;
  case PDS_OP_MLP: pds_op_mlp(ctx, layer); return PDS_OK;
  case PDS_OP_GATE:
    if (ctx->predicts && in->flags & PDS_INSTR_PREDICT)
      pds_op_gate_and_predict(ctx, layer);
    else
      pds_op_gate(ctx, layer);
    return PDS_OK;
  case PDS_OP_PREDICT:
    if (ctx->predicts) pds_op_predict(ctx, layer);
    return PDS_OK;
  case PDS_OP_RECOMPILE:
    pds_op_recompile(ctx, layer);
    pds_learn_routed(ctx, layer);
    pds_op_remember(ctx, layer);
    pds_llc_settle(&e->session->engine->llc, &e->session->llc, &e->session->llc_counts, ctx, layer);
    if (ctx->predicts && in->hole_cap[PDS_HOLE_P])
      pds_op_bind_llc(ctx, layer, in->hole_cap[PDS_HOLE_P]);
    return PDS_OK;
  case PDS_OP_PREFETCH:
    *out_experts = pds_llc_prefetch(&e->session->engine->llc, &e->session->llc, ctx, layer);
    return PDS_OK;
  case PDS_OP_SHARED_EXPERT: pds_op_shared_expert(ctx, layer); return PDS_OK;
  case PDS_OP_EXPERT:
    *out_experts = holes_of(e, in, &holes);
    count_experts(e, holes, *out_experts);
    if (*out_experts) pds_op_expert(ctx, layer, holes, *out_experts);
    return PDS_OK;
  case PDS_OP_COMBINE: pds_op_combine(ctx, layer, e->program->shared); return PDS_OK;
  case PDS_OP_LM_HEAD: pds_op_lm_head(ctx); return PDS_OK;
  case PDS_OP_SYNC: return PDS_OK; /* its waits are all there is to it */
  default:
    return pds_fail(PDS_ERR_VERIFY, "opcode %s on queue %s: not for a CPU",
                    pds_opcode_name(in->opcode), pds_queue_name(in->queue));
  }
}

/* What an instruction left on the GPU, brought here for the tap to see. */
static pds_status fetch(const exec *e, pds_buffer buffer, uint64_t bytes) {
  return e->gpu ? pds_gpu_fetch(e->gpu, buffer, bytes) : PDS_OK;
}

static pds_status tap(const exec *e, const pds_instr *in, uint32_t index) {
  const pds_step_ctx *ctx = e->ctx;
  uint32_t pitch = (ctx->plan->hidden + 31) / 32 * 32;
  const pds_predictor *predictor;
  pds_tap_event event = {.layer = e->program->layer,
                         .instr = (uint16_t)index,
                         .opcode = in->opcode,
                         .arg = in->arg,
                         .rows = ctx->rows,
                         .n_logits = ctx->n_logits};
  if (in->opcode == PDS_OP_EMBED) {
    event.position = ctx->position;
    event.seq = ctx->seq;
  }
  switch (in->opcode) {
  case PDS_OP_EMBED:
  case PDS_OP_ATTENTION:
  case PDS_OP_MLP:
  case PDS_OP_COMBINE:
    event.data = pds_buf(ctx, PDS_BUF_HID);
    event.cols = pitch;
    PDS_RETURN_IF_ERROR(fetch(e, PDS_BUF_HID, 4 * (uint64_t)pitch * event.rows));
    break;
  case PDS_OP_NORM:
    event.data = pds_buf(ctx, PDS_BUF_XN);
    event.cols = pitch;
    if (in->arg == PDS_NORM_FINAL) event.rows = ctx->n_logits;
    PDS_RETURN_IF_ERROR(fetch(e, PDS_BUF_XN, 4 * (uint64_t)pitch * event.rows));
    break;
  case PDS_OP_GATE:
    PDS_RETURN_IF_ERROR(fetch(e, PDS_BUF_ROUTE_ID, 4 * (uint64_t)e->program->top_k * event.rows));
    PDS_RETURN_IF_ERROR(fetch(e, PDS_BUF_ROUTE_W, 4 * (uint64_t)e->program->top_k * event.rows));
    event.data = pds_buf(ctx, PDS_BUF_ROUTE_W);
    event.ids = pds_buf(ctx, PDS_BUF_ROUTE_ID);
    event.cols = e->program->top_k;
    if (ctx->predicts && in->flags & PDS_INSTR_PREDICT) {
      predictor = &ctx->plan->layers[e->program->layer].predictor;
      event.predicted = pds_buf(ctx, PDS_BUF_PREDICT_ID);
      event.predicted_cols = ctx->plan->layers[predictor->target].gate.top_k;
    }
    break;
  case PDS_OP_PREDICT:
    if (!ctx->predicts) break;
    event.data = pds_buf(ctx, PDS_BUF_PREDICT_W);
    event.ids = pds_buf(ctx, PDS_BUF_PREDICT_ID);
    predictor = &ctx->plan->layers[e->program->layer].predictor;
    event.cols = ctx->plan->layers[predictor->target].gate.top_k;
    event.rows = pds_predicting(ctx);
    break;
  case PDS_OP_LM_HEAD:
    event.data = pds_buf(ctx, PDS_BUF_LOGITS);
    event.cols = ctx->plan->vocab;
    event.rows = ctx->n_logits;
    PDS_RETURN_IF_ERROR(fetch(e, PDS_BUF_LOGITS, 4 * (uint64_t)event.cols * event.rows));
    break;
  default: break;
  }
  e->session->tap(e->session->tap_user, &event);
  return PDS_OK;
}

static pds_status check_waits(const exec *e, const pds_instr *in, uint32_t index) {
  for (uint32_t w = 0; w < in->n_waits; w++) {
    uint32_t event = in->waits[w];
    if (event & PDS_WAIT_IMPORT) continue; /* the program before this one has ended */
    if (event >= index || !(e->events[event / 64] >> event % 64 & 1)) {
      char name[32];
      pds_program_name(e->program, name);
      return pds_fail(PDS_ERR_VERIFY, "%s:@%u: waits for @%u, which has not run", name, index,
                      event);
    }
  }
  return PDS_OK;
}

/* Before an instruction: PDS_ERR_CANCELLED, or an event that it waits for is missing. */
static pds_status check_instr(const exec *e, const pds_instr *in, uint32_t index) {
  pds_session *s = e->session;
  if (atomic_exchange_explicit(&s->cancel, false, memory_order_relaxed))
    return pds_fail(PDS_ERR_CANCELLED, "the step was cancelled");
  return check_waits(e, in, index);
}

/* After it: its event, statistics and record. `end` is 0 without a trace. */
static pds_status retire(exec *e, const pds_instr *in, uint32_t index, uint32_t experts,
                         uint64_t begin, uint64_t end) {
  pds_session *s = e->session;
  e->events[index / 64] |= (uint64_t)1 << index % 64;
  uint64_t bytes = weight_bytes(e, in, experts);
  s->weight_bytes += bytes;
  if (s->trace.records) {
    pds_trace_record record = {.begin_ns = begin,
                               .end_ns = end,
                               .bytes = bytes,
                               .layer = e->program->layer,
                               .instr = (uint16_t)index,
                               .opcode = in->opcode,
                               .queue = in->queue,
                               .rows = e->ctx->rows,
                               .experts = experts};
    pds_trace_add(&s->trace, &record);
  }
  return s->tap ? tap(e, in, index) : PDS_OK;
}

static uint64_t trace_now(const exec *e) {
  if (!e->session->trace.records) return 0;
  return e->gpu ? pds_gpu_now(e->gpu->gpu) : pds_now_ns();
}

static pds_status run_instr(exec *e, const pds_instr *in, uint32_t index) {
  PDS_RETURN_IF_ERROR(check_instr(e, in, index));
  const uint64_t begin = trace_now(e);
  uint32_t experts = 0;
  PDS_RETURN_IF_ERROR(compute(e, in, &experts));
  return retire(e, in, index, experts, begin, trace_now(e));
}

/* A shared expert and then all routed experts, which does not wait for it: one parallel job. */
static bool is_pair(const pds_instr *in, uint32_t index) {
  const pds_instr *next = in + 1;
  if (in->opcode != PDS_OP_SHARED_EXPERT || next->opcode != PDS_OP_EXPERT ||
      next->index != PDS_INDEX_ALL || in->queue != next->queue)
    return false;
  for (uint32_t w = 0; w < next->n_waits; w++)
    if (next->waits[w] == index) return false;
  return true;
}

static pds_status run_pair(exec *e, const pds_instr *in, uint32_t index) {
  PDS_RETURN_IF_ERROR(check_instr(e, in, index));
  PDS_RETURN_IF_ERROR(check_instr(e, in + 1, index + 1));
  const uint64_t begin = trace_now(e);
  pds_hole *holes;
  const uint32_t experts = holes_of(e, in + 1, &holes);
  count_experts(e, holes, experts);
  pds_op_shared_and_expert(e->ctx, (uint32_t)e->program->layer, holes, experts);
  const uint64_t end = trace_now(e);
  PDS_RETURN_IF_ERROR(retire(e, in, index, 0, begin, end));
  return retire(e, in + 1, index + 1, experts, begin, end);
}

static pds_status run_program(pds_session *session, pds_step_ctx *ctx, pds_gpu_step *gpu,
                              const pds_program *program) {
  exec e = {.session = session, .ctx = ctx, .program = program, .gpu = gpu};
  const pds_instr *instrs = pds_program_instrs(&session->engine->programs, program);
  ctx->n_cpu_holes = ctx->n_llc_holes = 0;
  for (uint32_t i = 0; i < program->n_instrs; i++) {
    if (!gpu && i + 1 < program->n_instrs && is_pair(&instrs[i], i)) {
      PDS_RETURN_IF_ERROR(run_pair(&e, &instrs[i], i));
      i++;
    } else {
      PDS_RETURN_IF_ERROR(run_instr(&e, &instrs[i], i));
    }
  }
  return PDS_OK;
}

static pds_status run_programs(pds_session *session, pds_step_ctx *ctx, pds_gpu_step *gpu,
                               uint32_t phase) {
  const pds_programs *programs = &session->engine->programs;
  PDS_RETURN_IF_ERROR(run_program(session, ctx, gpu, pds_programs_prologue(programs, phase)));
  for (uint32_t layer = 0; layer < ctx->plan->n_layers; layer++)
    PDS_RETURN_IF_ERROR(run_program(session, ctx, gpu, pds_programs_layer(programs, phase, layer)));
  if (ctx->n_logits == 0) return PDS_OK;
  return run_program(session, ctx, gpu, pds_programs_epilogue(programs, phase));
}

pds_status pds_exec_step(pds_session *session, pds_step_ctx *ctx) {
  const int32_t phase = pds_programs_phase(&session->engine->programs, ctx->rows);
  pds_gpu *gpu = session->engine->gpu;
  if (phase < 0)
    return pds_fail(PDS_ERR_BATCH, "the plan has no programs for a step of %u rows", ctx->rows);
  session->llc.predicted = 0; /* a step that failed may have left a list */
  if (!gpu) {
    pds_op_rope_table(ctx);
    return run_programs(session, ctx, NULL, (uint32_t)phase);
  }
  pds_gpu_step step;
  PDS_RETURN_IF_ERROR(pds_gpu_enter(gpu));
  pds_status status = pds_gpu_begin(gpu, &session->gpu, ctx, &step);
  step.tapped = session->tap != NULL;
  if (status == PDS_OK) status = run_programs(session, ctx, &step, (uint32_t)phase);
  status = pds_gpu_end(&step, status);
  pds_gpu_leave(gpu);
  return status;
}
