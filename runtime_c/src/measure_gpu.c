/* measure_gpu.c: how long parts of a step take on a GPU and on the link to it, for the compiler's cost
 * table. Streams are idle before each; launches and copies are a step's own. */
#include <string.h>

#include "cpu.h"
#include "measure.h"

enum { COPY_BYTES = 4096, LONGEST_NS = 1000000000 };

typedef struct part {
  pds_session *session;
  pds_gpu *gpu;
  pds_step_ctx *ctx;
  pds_gpu_step *step;
  const pds_measurement *asked;
  uint32_t layer, n_holes;
  CUevent begin, end; /* their times are kept */
} part;

/* --- time on the driver's clock --- */

static pds_status record(const part *p, CUevent event, CUstream stream) {
  PDS_CUDA_CALL(p->gpu, "measuring", cuEventRecord, event, stream);
  return PDS_OK;
}

/* From one event to the other, both reached. */
static pds_status elapsed(const part *p, int64_t *out_ns) {
  const pds_cuda *cuda = &p->gpu->cuda;
  float ms = 0;
  if (cuda->pds_mock_event_time) {
    *out_ns = cuda->pds_mock_event_time(p->end) - cuda->pds_mock_event_time(p->begin);
    return PDS_OK;
  }
  PDS_CUDA_CALL(p->gpu, "measuring", cuEventElapsedTime, &ms, p->begin, p->end);
  *out_ns = (int64_t)((double)ms * 1e6);
  return PDS_OK;
}

/* --- what a step would have there --- */

/* What the host's scratch has in a buffer, for the step's rows. */
static pds_status send(const part *p, pds_buffer buffer, uint64_t bytes) {
  PDS_CUDA_CALL(p->gpu, "copying to the GPU", cuMemcpyHtoDAsync,
                p->session->gpu.scratch + p->gpu->plan->buffer_offset[buffer],
                pds_buf(p->ctx, buffer), bytes, p->gpu->compute);
  return PDS_OK;
}

static uint64_t hidden_values(const part *p) {
  return (uint64_t)p->ctx->rows * ((p->gpu->plan->hidden + 31) / 32 * 32);
}

static pds_status send_normed(const part *p) {
  pds_measure_fill_normed(p->ctx);
  return send(p, PDS_BUF_XACT, hidden_values(p) * (p->gpu->plan->act_dtype == PDS_BF16 ? 2 : 4));
}

static uint32_t all_slots(const pds_gpu *gpu) {
  return gpu->residency.hot + gpu->residency.ring;
}

static void forget(pds_gpu *gpu, uint32_t ring_slot) {
  pds_slot_drop(&gpu->residency, (int32_t)(gpu->residency.hot + ring_slot));
}

/* Between two runs of a layer the others' weights go through a GPU's cache: here the ring does,
 * filled with small numbers. */
static pds_status empty_cache(const part *p) {
  enum { MOST = 256 << 20 }; /* more than a GPU's cache holds */
  pds_gpu *gpu = p->gpu;
  uint32_t n = gpu->residency.ring;
  if (!gpu->real || !n) return PDS_OK;
  const uint32_t enough = (uint32_t)(MOST / gpu->expert_bytes) + 1;
  if (n > enough) n = enough;
  for (uint32_t i = 0; i < n; i++) forget(gpu, i);
  PDS_CUDA_CALL(gpu, "measuring", cuMemsetD8Async,
                gpu->slots + gpu->residency.hot * gpu->expert_bytes, 0x3c, n * gpu->expert_bytes,
                gpu->compute);
  return PDS_OK;
}

/* --- kernels --- */

static pds_status time_kernel(const part *p, pds_kernel kernel, const pds_gpu_hole *holes,
                              int64_t *out_ns) {
  PDS_RETURN_IF_ERROR(pds_gpu_drain(p->gpu));
  PDS_RETURN_IF_ERROR(record(p, p->begin, p->gpu->compute));
  PDS_RETURN_IF_ERROR(pds_gpu_launch(p->step, kernel, p->layer, holes, p->n_holes));
  PDS_RETURN_IF_ERROR(record(p, p->end, p->gpu->compute));
  PDS_RETURN_IF_ERROR(pds_gpu_wait(p->gpu, p->end));
  return elapsed(p, out_ns);
}

static pds_status experts(const part *p, int64_t *out_ns) {
  pds_gpu *gpu = p->gpu;
  const pds_step_ctx *ctx = p->ctx;
  pds_gpu_hole *holes = p->session->gpu.holes + (size_t)p->layer * gpu->residency.experts;
  if (!all_slots(gpu))
    return pds_fail(PDS_ERR_ARGUMENT,
                    "measurement: the plan has no slot for an expert on its GPU; raise --gpu-mem");
  uint32_t rows = 0;
  for (uint32_t i = 0; i < p->n_holes; i++) {
    const pds_hole *hole = &ctx->cpu_holes[i];
    const uint32_t slot = hole->expert % all_slots(gpu);
    holes[i] = (pds_gpu_hole){.expert = hole->expert,
                              .first = hole->first,
                              .rows = hole->rows,
                              .slot = (int32_t)slot,
                              .at = gpu->slots + slot * gpu->expert_bytes};
    rows += hole->rows;
  }
  PDS_RETURN_IF_ERROR(send(p, PDS_BUF_EXPERT_ROWS, 4 * (uint64_t)rows));
  PDS_RETURN_IF_ERROR(send_normed(p));
  return time_kernel(p, PDS_KERNEL_EXPERTS, holes, out_ns);
}

static pds_status shared(const part *p, int64_t *out_ns) {
  PDS_RETURN_IF_ERROR(send_normed(p));
  PDS_RETURN_IF_ERROR(empty_cache(p));
  return time_kernel(p, PDS_KERNEL_SHARED, NULL, out_ns);
}

/* --- attention --- */

/* The instructions of the layer's program up to its gate. */
static pds_status to_the_gate(const part *p) {
  const pds_programs *programs = &p->session->engine->programs;
  const int32_t phase = pds_programs_phase(programs, p->ctx->rows);
  const pds_program *program = pds_programs_layer(programs, (uint32_t)phase, p->layer);
  const pds_instr *in = pds_program_instrs(programs, program);
  uint32_t ignored = 0;
  for (uint32_t i = 0; i < program->n_instrs; i++) {
    PDS_RETURN_IF_ERROR(pds_gpu_instr(p->step, program, &in[i], &ignored));
    if (in[i].opcode == PDS_OP_GATE) break;
  }
  return pds_gpu_wait(p->gpu, p->session->gpu.routed);
}

/* The second of two runs: the first may record the layer's launches as a graph. */
static pds_status attention(const part *p, int64_t *out_ns) {
  pds_measure_fill(p->ctx, PDS_BUF_HID);
  PDS_RETURN_IF_ERROR(pds_gpu_send_batch(p->step));
  PDS_RETURN_IF_ERROR(send(p, PDS_BUF_HID, 4 * hidden_values(p)));
  PDS_RETURN_IF_ERROR(to_the_gate(p));
  PDS_RETURN_IF_ERROR(empty_cache(p));
  PDS_RETURN_IF_ERROR(pds_gpu_drain(p->gpu));
  const uint64_t begin = pds_gpu_now(p->gpu);
  PDS_RETURN_IF_ERROR(to_the_gate(p));
  *out_ns = (int64_t)(pds_gpu_now(p->gpu) - begin);
  return PDS_OK;
}

/* Whose rows are those of sequences. */
static pds_status begin_rows(part *p) {
  pds_step_ctx *ctx = p->ctx;
  PDS_RETURN_IF_ERROR(pds_measure_begin_rows(p->session, ctx, p->asked));
  ctx->token = ctx->position; /* any number: nothing is embedded */
  ctx->logit_row = p->session->logit_rows;
  ctx->predicts = pds_gpu_predicts(p->gpu);
  ctx->predict_step = (ctx->rows + ctx->plan->predict_rows - 1) / ctx->plan->predict_rows;
  return PDS_OK;
}

/* --- the link --- */

static bool arrived(const part *p) {
  return !p->gpu->link.demand.count && p->gpu->cuda.cuEventQuery(p->end) == CUDA_SUCCESS;
}

/* The CPU's experts again and again, until all has arrived, if any time passes. */
static pds_status compute_meanwhile(const part *p) {
  pds_gpu *gpu = p->gpu;
  const pds_measurement *asked = p->asked;
  const uint64_t begin = pds_gpu_now(gpu);
  for (uint64_t before, now = begin; !arrived(p) && now - begin < LONGEST_NS;) {
    before = now;
    pds_op_expert(p->ctx, p->layer, p->ctx->cpu_holes, p->n_holes);
    PDS_RETURN_IF_ERROR(pds_gpu_host_work(gpu, "cpu.experts", asked->n, asked->tokens));
    PDS_RETURN_IF_ERROR(p->step->pumped);
    PDS_RETURN_IF_ERROR(pds_link_pump(gpu));
    now = pds_gpu_now(gpu);
    if (now == before) break;
  }
  return PDS_OK;
}

static void load(const part *p, uint32_t expert) {
  pds_gpu *gpu = p->gpu;
  const uint32_t ring = expert % gpu->residency.ring;
  const pds_transfer t = {
      .layer = p->layer, .expert = expert, .slot = (int32_t)(gpu->residency.hot + ring)};
  forget(gpu, ring);
  pds_link_load(gpu, &t);
}

/* `end` stands in for the event behind the last load. */
static pds_status send_experts(const part *p) {
  pds_gpu *gpu = p->gpu;
  const pds_measurement *asked = p->asked;
  for (uint32_t i = 0; i < asked->n_loads; i++) load(p, asked->load[i]);
  PDS_RETURN_IF_ERROR(pds_link_pump(gpu));
  if (asked->what == PDS_MEASURE_LINK_BUSY) PDS_RETURN_IF_ERROR(compute_meanwhile(p));
  return pds_link_flush(gpu);
}

static pds_status send_little(const part *p) {
  const pds_gpu *gpu = p->gpu;
  const uint64_t bytes = gpu->plan->layers[p->layer].experts.gate_up.stride;
  forget(p->gpu, 0);
  PDS_CUDA_CALL(p->gpu, "copying an expert", cuMemcpyHtoDAsync,
                gpu->slots + gpu->residency.hot * gpu->expert_bytes,
                pds_expert_host(gpu->plan, gpu->host_files, p->layer, 0),
                bytes < COPY_BYTES ? bytes : COPY_BYTES, gpu->copies);
  return record(p, p->end, gpu->copies);
}

/* On a virtual clock no time has passed since the last copy, and the link would not be idle. */
static void let_it_rest(const pds_gpu *gpu) {
  if (gpu->is_virtual) gpu->cuda.pds_mock_advance(gpu->cuda.pds_mock_now() + 1);
}

static pds_status link(const part *p, int64_t *out_ns) {
  pds_gpu *gpu = p->gpu;
  const pds_measurement *asked = p->asked;
  if (!gpu->residency.ring)
    return pds_fail(PDS_ERR_ARGUMENT,
                    "measurement: the plan has no slot that experts come to; raise --gpu-mem");
  PDS_RETURN_IF_ERROR(pds_gpu_drain(gpu));
  let_it_rest(gpu);
  if (asked->what == PDS_MEASURE_LINK_BUSY) pds_measure_wake(p->ctx);
  PDS_RETURN_IF_ERROR(record(p, p->begin, gpu->copies));
  if (asked->what == PDS_MEASURE_LINK_START) {
    PDS_RETURN_IF_ERROR(send_little(p));
  } else {
    CUevent *ready = &gpu->link.ready[asked->load[asked->n_loads - 1] % gpu->residency.ring];
    const CUevent kept = *ready;
    *ready = p->end;
    const pds_status status = send_experts(p);
    *ready = kept;
    PDS_RETURN_IF_ERROR(status);
  }
  PDS_RETURN_IF_ERROR(pds_gpu_wait(gpu, p->end));
  return elapsed(p, out_ns);
}

/* --- the CPU beside the link --- */

typedef struct traffic {
  const part *part;
  uint32_t next; /* of the loads, in turn */
  pds_status status;
} traffic;

/* What the workers look at between two items: the link always has its next experts. */
static void keep_moving(void *arg) {
  enum { AHEAD = 2 };
  traffic *t = arg;
  const part *p = t->part;
  const pds_measurement *asked = p->asked;
  while (asked->n_loads && p->gpu->link.demand.count < AHEAD)
    load(p, asked->load[t->next++ % asked->n_loads]);
  if (t->status == PDS_OK) t->status = pds_link_pump(p->gpu);
}

/* Loads that are not out yet when the job ends are forgotten. */
static pds_status experts_busy(const part *p, int64_t *out_ns) {
  pds_gpu *gpu = p->gpu;
  pds_step_ctx *ctx = p->ctx;
  const pds_measurement *asked = p->asked;
  traffic t = {.part = p, .status = PDS_OK};
  if (asked->n_loads && !gpu->residency.ring)
    return pds_fail(PDS_ERR_ARGUMENT,
                    "measurement: the plan has no slot that experts come to; raise --gpu-mem");
  PDS_RETURN_IF_ERROR(pds_gpu_drain(gpu));
  if (!gpu->is_virtual) pds_pool_watch(ctx->pool, keep_moving, &t);
  keep_moving(&t);
  pds_measure_wake(ctx);
  const uint64_t begin = pds_gpu_now(gpu);
  pds_op_expert(ctx, p->layer, ctx->cpu_holes, p->n_holes);
  const pds_status status = pds_gpu_host_work(gpu, "cpu.experts", asked->n, asked->tokens);
  *out_ns = (int64_t)(pds_gpu_now(gpu) - begin);
  pds_pool_watch(ctx->pool, NULL, NULL);
  gpu->link.demand.count = 0;
  return status != PDS_OK ? status : t.status;
}

/* --- the one way in --- */

static pds_status run(const part *p, int64_t *out_ns) {
  switch (p->asked->what) {
  case PDS_MEASURE_GPU_EXPERTS: return experts(p, out_ns);
  case PDS_MEASURE_GPU_SHARED: return shared(p, out_ns);
  case PDS_MEASURE_GPU_ATTENTION: return attention(p, out_ns);
  case PDS_MEASURE_EXPERTS_BUSY: return experts_busy(p, out_ns);
  default: return link(p, out_ns);
  }
}

/* Between events of its own. */
static pds_status timed(part *p, int64_t *out_ns) {
  pds_gpu *gpu = p->gpu;
  pds_gpu_step step;
  int64_t ns = 0;
  p->step = &step;
  pds_gpu_open_step(gpu, &p->session->gpu, p->ctx, &step);
  pds_status status =
      pds_gpu_check(gpu, gpu->cuda.cuEventCreate(&p->begin, CU_EVENT_DEFAULT), "an event");
  if (status == PDS_OK)
    status = pds_gpu_check(gpu, gpu->cuda.cuEventCreate(&p->end, CU_EVENT_DEFAULT), "an event");
  if (status == PDS_OK) status = run(p, &ns);
  status = pds_gpu_end(&step, status);
  if (!gpu->stopped && p->begin) gpu->cuda.cuEventDestroy(p->begin);
  if (!gpu->stopped && p->end) gpu->cuda.cuEventDestroy(p->end);
  if (status == PDS_OK) *out_ns = ns;
  return status;
}

static pds_status measure(part *p, int64_t *out_ns) {
  pds_step_ctx *ctx = p->ctx;
  const pds_measurement *asked = p->asked;
  const bool attends = asked->what == PDS_MEASURE_GPU_ATTENTION;
  if (asked->what == PDS_MEASURE_CONTEXT) {
    PDS_RETURN_IF_ERROR(pds_measure_extend(p->session, ctx, asked));
    *out_ns = 0;
    return pds_gpu_drain(p->gpu);
  }
  const bool computes =
      asked->what == PDS_MEASURE_LINK_BUSY || asked->what == PDS_MEASURE_EXPERTS_BUSY;
  ctx->rows = asked->rows;
  if (asked->what == PDS_MEASURE_GPU_EXPERTS || computes) p->n_holes = pds_measure_bind(ctx, asked);
  if (computes) pds_measure_fill_normed(ctx);
  if (attends) PDS_RETURN_IF_ERROR(begin_rows(p));
  const pds_status status = timed(p, out_ns);
  if (attends) pds_kv_rollback(&p->session->kv, asked->rows, asked->seq);
  return status;
}

pds_status pds_measure_gpu(pds_session *session, pds_step_ctx *ctx, const pds_measurement *asked,
                           int64_t *out_ns) {
  pds_engine *engine = session->engine;
  part p = {
      .session = session, .gpu = engine->gpu, .ctx = ctx, .asked = asked, .layer = asked->layer};
  pds_pool_open(engine->pool);
  const uint32_t fp = pds_fp_default();
  pds_status status = pds_gpu_enter(p.gpu);
  if (status == PDS_OK) {
    status = measure(&p, out_ns);
    pds_gpu_leave(p.gpu);
  }
  pds_fp_restore(fp);
  pds_pool_close(engine->pool);
  return status;
}
