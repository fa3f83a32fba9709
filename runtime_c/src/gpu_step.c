/* gpu_step.c: the instructions of a GPU plan: launches, copies around them, and what the host computes
 * in between. */
#include <string.h>

#include "gpu.h"
#include "gpu_kernels.h"
#include "net.h"
#include "trace.h"

/* --- launching --- */

static pds_status launch(pds_gpu_step *step, pds_kernel kernel, uint32_t layer, uint32_t arg,
                         const pds_gpu_hole *holes, uint32_t n) {
  pds_gpu *gpu = step->gpu;
  if (!gpu->twins) return pds_gpu_run(step, kernel, layer, arg, holes, n);
  uint32_t tokens[PDS_MAX_EXPERTS] = {step->host->rows};
  pds_kernel_args args = {
      .ctx = step->device, .layer = layer, .arg = arg, .holes = holes, .n_holes = n};
  for (uint32_t i = 0; i < n; i++) tokens[i] = holes[i].rows;
  args.work = (pds_twin_work){.bytes = sizeof args, .n = holes ? n : 1, .tokens = tokens};
  if (kernel == PDS_KERNEL_LM_HEAD) tokens[0] = step->host->n_logits;
  if (kernel == PDS_KERNEL_ATTENTION) args.work.extra = (uint64_t)step->context / 1024;
  void *params[] = {&args};
  PDS_CUDA_CALL(gpu, pds_kernel_names[kernel], cuLaunchKernel, gpu->kernels[kernel], 1, 1, 1, 1, 1,
                1, 0, gpu->compute, params, NULL);
  return PDS_OK;
}

pds_status pds_gpu_launch(pds_gpu_step *step, pds_kernel kernel, uint32_t layer,
                          const pds_gpu_hole *holes, uint32_t n) {
  return launch(step, kernel, layer, 0, holes, n);
}

/* A slot's next copy waits for this. */
static pds_status mark_freed(pds_gpu *gpu, const pds_gpu_hole *hole) {
  if (hole->slot < (int32_t)gpu->residency.hot) return PDS_OK;
  PDS_CUDA_CALL(gpu, "experts", cuEventRecord,
                gpu->link.freed[(uint32_t)hole->slot - gpu->residency.hot], gpu->compute);
  return PDS_OK;
}

static pds_status launch_experts(pds_gpu_step *step, const pds_gpu_hole *holes, uint32_t n) {
  if (!n) return PDS_OK;
  PDS_RETURN_IF_ERROR(launch(step, PDS_KERNEL_EXPERTS, step->layer, 0, holes, n));
  for (uint32_t i = 0; i < n; i++) PDS_RETURN_IF_ERROR(mark_freed(step->gpu, &holes[i]));
  return PDS_OK;
}

/* Behind the copy to its slot. */
static pds_status launch_late(pds_gpu_step *step, const pds_gpu_hole *hole) {
  pds_gpu *gpu = step->gpu;
  PDS_CUDA_CALL(gpu, "experts", cuStreamWaitEvent, gpu->compute,
                gpu->link.ready[(uint32_t)hole->slot - gpu->residency.hot], 0);
  return launch_experts(step, hole, 1);
}

pds_status pds_gpu_sent(pds_gpu *gpu, const pds_gpu_hole *hole) {
  pds_gpu_step *step = gpu->step;
  if (step->launches) return launch_late(step, hole);
  step->n_sent++; /* what is there already goes first */
  return PDS_OK;
}

/* --- copies around kernels --- */

static CUdeviceptr device_buf(const pds_gpu_step *step, pds_buffer b) {
  return step->session->scratch + step->gpu->plan->buffer_offset[b];
}

static pds_status to_host(pds_gpu_step *step, pds_buffer b, uint64_t bytes) {
  PDS_CUDA_CALL(step->gpu, "copying to the host", cuMemcpyDtoHAsync, pds_buf(step->host, b),
                device_buf(step, b), bytes, step->gpu->compute);
  return PDS_OK;
}

static pds_status to_device(pds_gpu_step *step, pds_buffer b, uint64_t bytes) {
  PDS_CUDA_CALL(step->gpu, "copying to the GPU", cuMemcpyHtoDAsync, device_buf(step, b),
                pds_buf(step->host, b), bytes, step->gpu->compute);
  return PDS_OK;
}

static uint64_t hidden_bytes(const pds_plan *plan) {
  return ((uint64_t)plan->hidden + 31) / 32 * 32;
}

/* The normed rows that are to predict, in their places, or all of them. */
static pds_status fetch_normed(pds_gpu_step *step) {
  pds_gpu *gpu = step->gpu;
  const uint64_t row = 4 * hidden_bytes(gpu->plan);
  const uint32_t each = step->host->predict_step;
  if (each == 1 || step->host->learn || !gpu->real)
    return to_host(step, PDS_BUF_XN, row * step->host->rows);
  const CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = device_buf(step, PDS_BUF_XN),
                              .srcPitch = row * each,
                              .dstMemoryType = CU_MEMORYTYPE_HOST,
                              .dstHost = pds_buf(step->host, PDS_BUF_XN),
                              .dstPitch = row * each,
                              .WidthInBytes = row,
                              .Height = pds_predicting(step->host)};
  PDS_CUDA_CALL(gpu, "copying to the host", cuMemcpy2DAsync, &copy, gpu->compute);
  return PDS_OK;
}

/* What recompile, predict and the CPU's experts read. Routes that are given (dummy routing) are
 * known here. */
static pds_status fetch_routes(pds_gpu_step *step) {
  const pds_plan *plan = step->gpu->plan;
  const uint64_t rows = step->host->rows, top_k = plan->layers[step->layer].gate.top_k;
  const uint64_t act = plan->act_dtype == PDS_BF16 ? 2 : 4;
  if (pds_gpu_tells_host(step)) return PDS_OK; /* the kernels have */
  if (!step->host->n_routes) {
    PDS_RETURN_IF_ERROR(to_host(step, PDS_BUF_ROUTE_ID, 4 * rows * top_k));
    PDS_RETURN_IF_ERROR(to_host(step, PDS_BUF_ROUTE_W, 4 * rows * top_k));
  }
  PDS_RETURN_IF_ERROR(to_host(step, PDS_BUF_XACT, act * rows * hidden_bytes(plan)));
  if (step->host->predicts || step->host->learn) PDS_RETURN_IF_ERROR(fetch_normed(step));
  return PDS_OK;
}

/* The GPU is told of routes that are given, once nothing reads those of the layer before. */
static pds_status send_routes(pds_gpu_step *step) {
  const uint64_t n = (uint64_t)step->host->rows * step->gpu->plan->layers[step->layer].gate.top_k;
  if (!step->host->n_routes) return PDS_OK;
  pds_op_take_routes(step->host, step->layer);
  PDS_RETURN_IF_ERROR(to_device(step, PDS_BUF_ROUTE_ID, 4 * n));
  return to_device(step, PDS_BUF_ROUTE_W, 4 * n);
}

/* What `routed` stands behind is launched. */
static pds_status mark_routed(pds_gpu_step *step) {
  PDS_CUDA_CALL(step->gpu, "the gate", cuEventRecord, step->session->routed, step->gpu->compute);
  step->wants_routes = true;
  return PDS_OK;
}

static pds_status gate(pds_gpu_step *step) {
  if (step->graph != PDS_GRAPH_REPLAYED) {
    PDS_RETURN_IF_ERROR(launch(step, PDS_KERNEL_GATE, step->layer, 0, NULL, 0));
    PDS_RETURN_IF_ERROR(fetch_routes(step));
    PDS_RETURN_IF_ERROR(pds_gpu_graph_end(step));
  }
  step->graph = PDS_GRAPH_NONE;
  return mark_routed(step);
}

static pds_status wait_for_routes(pds_gpu_step *step) {
  if (!step->wants_routes) return PDS_OK;
  step->wants_routes = false;
  PDS_RETURN_IF_ERROR(pds_gpu_wait(step->gpu, step->session->routed));
  return send_routes(step);
}

pds_status pds_gpu_fetch(pds_gpu_step *step, pds_buffer buffer, uint64_t bytes) {
  if (step->host->n_routes) PDS_RETURN_IF_ERROR(wait_for_routes(step));
  PDS_RETURN_IF_ERROR(to_host(step, buffer, bytes));
  return pds_gpu_drain(step->gpu);
}

/* --- a step --- */

/* Block tables of the sequences that have rows: each has its rows together or the copy is made
 * again, which is right too. */
static pds_status send_tables(pds_gpu_step *step) {
  const pds_step_ctx *host = step->host;
  const uint64_t row = 4 * (uint64_t)host->table_stride;
  for (uint32_t i = 0; i < host->rows; i++) {
    if (i && host->seq[i] == host->seq[i - 1]) continue;
    const uint64_t at = row * (uint64_t)host->seq[i];
    PDS_CUDA_CALL(step->gpu, "copying a block table", cuMemcpyHtoDAsync, step->session->table + at,
                  (const unsigned char *)host->table + at, row, step->gpu->compute);
  }
  return PDS_OK;
}

static pds_status send_rows(pds_gpu_step *step) {
  const pds_step_ctx *host = step->host;
  const uint32_t most = step->gpu->plan->max_rows;
  int32_t *stage = step->session->row_stage;
  memcpy(stage, host->token, 4 * (size_t)host->rows);
  memcpy(stage + most, host->position, 4 * (size_t)host->rows);
  memcpy(stage + 2 * (size_t)most, host->seq, 4 * (size_t)host->rows);
  memcpy(stage + 3 * (size_t)most, host->logit_row, 4 * (size_t)host->n_logits);
  PDS_CUDA_CALL(step->gpu, "copying a step's rows", cuMemcpyHtoDAsync, step->session->rows, stage,
                4 * 4 * (uint64_t)most, step->gpu->compute);
  return PDS_OK;
}

static const void *at_device(CUdeviceptr address) {
  return (const void *)(uintptr_t)address;
}

static pds_step_ctx device_context(const pds_gpu *gpu, const pds_gpu_session *s,
                                   const pds_step_ctx *host) {
  const uint64_t array = 4 * (uint64_t)gpu->plan->max_rows;
  pds_step_ctx ctx = {.plan = gpu->plan,
                      .kernels = host->kernels,
                      .l2_bytes = host->l2_bytes,
                      .pool = gpu->twin_pool,
                      .files = gpu->files,
                      .scratch = (unsigned char *)(uintptr_t)s->scratch,
                      .thread_scratch = gpu->twin_scratch,
                      .rows = host->rows,
                      .token = at_device(s->rows),
                      .position = at_device(s->rows + array),
                      .seq = at_device(s->rows + 2 * array),
                      .logit_row = at_device(s->rows + 3 * array),
                      .n_logits = host->n_logits,
                      .kv = (unsigned char *)(uintptr_t)s->kv,
                      .table = at_device(s->table),
                      .table_stride = host->table_stride,
                      .predict_step = 1,
                      .cpu_out = pds_buf(host, PDS_BUF_EXPERT_OUT),
                      .on_gpu = s->on_gpu};
  return ctx;
}

static const pds_gpu_hole *holes_of(const pds_gpu_step *step) {
  return step->session->holes + (size_t)step->layer * step->gpu->residency.experts;
}

/* The experts that are there, in one submission. */
static pds_status ready_experts(pds_gpu_step *step) {
  return launch_experts(step, holes_of(step), step->n_ready);
}

/* Those on their way: each behind its copy, now or when that is sent. */
static pds_status late_experts(pds_gpu_step *step) {
  const pds_gpu_hole *late = holes_of(step) + step->n_ready;
  for (uint32_t i = 0; i < step->n_sent; i++) PDS_RETURN_IF_ERROR(launch_late(step, &late[i]));
  step->launches = true;
  return PDS_OK;
}

/* All that a layer has between recompile and combine. */
static pds_status launch_deferred(pds_gpu_step *step) {
  if (!step->defers) return PDS_OK;
  step->defers = false;
  if (step->has_shared)
    PDS_RETURN_IF_ERROR(launch(step, PDS_KERNEL_SHARED, step->layer, 0, NULL, 0));
  PDS_RETURN_IF_ERROR(ready_experts(step));
  return late_experts(step);
}

/* While the CPU computes, the link goes on. */
static void pump(void *arg) {
  pds_gpu_step *step = arg;
  if (step->pumped == PDS_OK) step->pumped = pds_link_pump(step->gpu);
  if (step->pumped == PDS_OK) step->pumped = launch_deferred(step);
}

void pds_gpu_open_step(pds_gpu *gpu, pds_gpu_session *session, pds_step_ctx *host,
                       pds_gpu_step *out) {
  *out = (pds_gpu_step){.gpu = gpu, .session = session, .host = host};
  out->device = device_context(gpu, session, host);
  gpu->step = out;
  host->rounds_out = !gpu->twins && gpu->plan->act_dtype == PDS_BF16;
  if (!gpu->is_virtual) pds_pool_watch(host->pool, pump, out);
}

pds_status pds_gpu_send_batch(pds_gpu_step *step) {
  step->context = 0;
  for (uint32_t i = 0; i < step->host->rows; i++) step->context += step->host->position[i];
  PDS_RETURN_IF_ERROR(send_rows(step));
  PDS_RETURN_IF_ERROR(send_tables(step));
  return launch(step, PDS_KERNEL_ROPE, 0, 0, NULL, 0);
}

pds_status pds_gpu_begin(pds_gpu *gpu, pds_gpu_session *session, pds_step_ctx *host,
                         pds_gpu_step *out) {
  *out = (pds_gpu_step){.gpu = gpu, .session = session, .host = host};
  if (!gpu->policy.set)
    return pds_fail(
        PDS_ERR_ARGUMENT,
        "a GPU plan's step needs costs and a policy: call pds_engine_set_schedule first");
  pds_gpu_open_step(gpu, session, host, out);
  gpu->policy.now++;
  gpu->policy.free_at = gpu->policy.elapsed = 0;
  gpu->policy.ahead = 0;
  memset(gpu->policy.is_ahead, 0, sizeof gpu->policy.is_ahead);
  gpu->policy.predicted = false;
  memset(gpu->policy.draft, 0, sizeof gpu->policy.draft);
  return pds_gpu_send_batch(out);
}

/* Prefetches that nobody asked for any more, and slots that a step that failed had in use. */
static void settle(pds_gpu *gpu, bool failed) {
  pds_residency *r = &gpu->residency;
  pds_transfers *spec = &gpu->link.spec;
  for (; spec->count; spec->first = (spec->first + 1) % spec->room, spec->count--)
    pds_slot_drop(r, spec->at[spec->first].slot);
  gpu->link.demand.count = 0;
  for (uint32_t l = 0; l < r->layers && r->ring; l++) pds_slots_release(r, l, 0, failed);
}

pds_status pds_gpu_end(pds_gpu_step *step, pds_status status) {
  pds_gpu *gpu = step->gpu;
  char why[PDS_ERROR_BYTES];
  pds_pool_watch(step->host->pool, NULL, NULL);
  pds_gpu_graph_abandon(step);
  if (status != PDS_OK) memcpy(why, pds_last_error(), sizeof why);
  settle(gpu, status != PDS_OK);
  const pds_status end = gpu->stopped ? gpu->failed : pds_gpu_drain(gpu);
  gpu->link.in_flight = 0;
  gpu->step = NULL;
  return status != PDS_OK ? pds_fail(status, "%s", why) : end;
}

/* --- instructions --- */

static pds_status cpu_experts(pds_gpu_step *step, const pds_instr *in, uint32_t *out_experts) {
  pds_step_ctx *host = step->host;
  pds_hole *holes = host->cpu_holes;
  uint32_t n = host->n_cpu_holes, tokens[PDS_MAX_EXPERTS];
  if (in->index != PDS_INDEX_ALL) {
    holes += in->index;
    n = in->index < n ? 1 : 0;
  }
  *out_experts = n;
  if (!n) return PDS_OK;
  pds_op_expert(host, step->layer, holes, n);
  PDS_RETURN_IF_ERROR(launch_deferred(step)); /* if nobody has looked meanwhile */
  for (uint32_t i = 0; i < n; i++) tokens[i] = holes[i].rows;
  return pds_gpu_host_work(step->gpu, "cpu.experts", n, tokens);
}

/* Where it does not pay nobody reads it but a tap: what is recorded under one policy is replayed under
 * others, which pause elsewhere. */
static pds_status predict(pds_gpu_step *step, const pds_program *program) {
  const bool pays = pds_gpu_prediction_pays(step, step->layer, program->phase);
  if (!pays && !(step->tapped && step->host->predicts)) return PDS_OK;
  PDS_RETURN_IF_ERROR(wait_for_routes(step));
  pds_op_predict(step->host, step->layer);
  return pays ? pds_gpu_host_work(step->gpu, "cpu.predict", 1, &step->host->rows) : PDS_OK;
}

static pds_status on_cpu(pds_gpu_step *step, const pds_program *program, const pds_instr *in,
                         uint32_t *out_experts) {
  pds_step_ctx *host = step->host;
  switch (in->opcode) {
  case PDS_OP_EMBED:
    pds_op_embed(host);
    PDS_RETURN_IF_ERROR(pds_gpu_host_work(step->gpu, "cpu.embed", 1, &host->rows));
    return to_device(step, PDS_BUF_HID, 4 * host->rows * hidden_bytes(step->gpu->plan));
  case PDS_OP_PREDICT: return predict(step, program);
  default: return cpu_experts(step, in, out_experts);
  }
}

static pds_status on_gpu(pds_gpu_step *step, const pds_program *program, const pds_instr *in,
                         uint32_t *out_experts) {
  const uint32_t layer = step->layer;
  switch (in->opcode) {
  case PDS_OP_NORM:
    if (in->arg == PDS_NORM_ATTN && program->kind == PDS_KIND_MOE)
      PDS_RETURN_IF_ERROR(pds_gpu_graph_begin(step));
    if (step->graph == PDS_GRAPH_REPLAYED) return PDS_OK;
    return launch(step, PDS_KERNEL_NORM, layer, in->arg, NULL, 0);
  case PDS_OP_ATTENTION:
    if (step->graph == PDS_GRAPH_REPLAYED) return PDS_OK;
    return launch(step, PDS_KERNEL_ATTENTION, layer, 0, NULL, 0);
  case PDS_OP_MLP: return launch(step, PDS_KERNEL_MLP, layer, 0, NULL, 0);
  case PDS_OP_GATE: return gate(step);
  case PDS_OP_SHARED_EXPERT:
    if (step->defers) return PDS_OK;
    return launch(step, PDS_KERNEL_SHARED, layer, 0, NULL, 0);
  case PDS_OP_EXPERT:
    *out_experts = in->hole == PDS_HOLE_R ? step->n_ready : step->n_holes - step->n_ready;
    if (step->defers) return PDS_OK;
    return in->hole == PDS_HOLE_R ? ready_experts(step) : late_experts(step);
  case PDS_OP_COMBINE:
    PDS_RETURN_IF_ERROR(pds_link_flush(step->gpu));
    return launch(step, PDS_KERNEL_COMBINE, layer, program->shared, NULL, 0);
  default: /* lm_head */
    PDS_RETURN_IF_ERROR(launch(step, PDS_KERNEL_LM_HEAD, layer, 0, NULL, 0));
    return to_host(step, PDS_BUF_LOGITS,
                   4 * (uint64_t)step->host->n_logits * step->gpu->plan->vocab);
  }
}

static pds_status recompile(pds_gpu_step *step, const pds_program *program, const pds_instr *in) {
  pds_gpu_policy *policy = &step->gpu->policy;
  pds_pool *pool = step->host->pool;
  pds_pool_watch(pool, NULL, NULL); /* the link can wait for so long, and gets more to do */
  const uint64_t begin = pds_now_ns();
  step->driver_ns = 0;
  PDS_RETURN_IF_ERROR(pds_gpu_recompile(step, program, in));
  pds_spans_add(&policy->recompile[program->phase], pds_now_ns() - begin);
  pds_spans_add(&policy->recompile_driver[program->phase], step->driver_ns);
  if (!step->gpu->is_virtual) pds_pool_watch(pool, pump, step);
  step->defers = step->gpu->real && step->host->n_cpu_holes > 0;
  step->has_shared = program->shared != 0;
  return PDS_OK;
}

pds_status pds_gpu_instr(pds_gpu_step *step, const pds_program *program, const pds_instr *in,
                         uint32_t *out_experts) {
  step->layer = program->layer < 0 ? 0 : (uint32_t)program->layer;
  switch (in->opcode) {
  case PDS_OP_RECOMPILE:
    PDS_RETURN_IF_ERROR(wait_for_routes(step));
    PDS_RETURN_IF_ERROR(recompile(step, program, in));
    break;
  case PDS_OP_LOAD:
  case PDS_OP_PREFETCH: break; /* recompile has queued them: the pump below sends them out */
  case PDS_OP_UNLOAD: *out_experts = pds_gpu_unload(step); break;
  case PDS_OP_SYNC: break;
  default:
    if (in->queue == PDS_QUEUE_CPU)
      PDS_RETURN_IF_ERROR(on_cpu(step, program, in, out_experts));
    else
      PDS_RETURN_IF_ERROR(on_gpu(step, program, in, out_experts));
  }
  if (step->pumped != PDS_OK || step->defers) return step->pumped;
  return pds_link_pump(step->gpu);
}
