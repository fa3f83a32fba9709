/* gpu.c: a GPU's life: opened, filled with what stays on it, closed; its part of a session. */
#include "gpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "cpu.h"
#include "gpu_kernels.h"
#include "map.h"
#include "memory.h"
#include "trace.h"

/* --- errors and waiting --- */

#define REMEDY "load the plan again, or run it on the CPU (device cpu)"

pds_status pds_gpu_check(pds_gpu *gpu, CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return PDS_OK;
  const pds_status status = pds_cuda_check(&gpu->cuda, result, what);
  char why[PDS_ERROR_BYTES];
  snprintf(why, sizeof why, "%s", pds_last_error());
  if (status == PDS_ERR_MEMORY)
    return pds_fail(status, "%.380s; free memory, or run the plan on the CPU (device cpu)", why);
  if (gpu->failed == PDS_OK) {
    gpu->failed = status;
    snprintf(gpu->why, sizeof gpu->why, "%s", why);
  }
  return pds_fail(status, "%.380s; " REMEDY, why);
}

uint64_t pds_gpu_now(const pds_gpu *gpu) {
  return gpu->is_virtual ? (uint64_t)gpu->cuda.pds_mock_now() : pds_now_ns();
}

/* Lets a virtual clock run to whatever ends next, `until` at the latest; false if nothing will. */
static bool let_time_pass(pds_gpu *gpu, int64_t until) {
  int64_t next = gpu->cuda.pds_mock_next();
  if (next < 0 || (until >= 0 && next > until)) next = until;
  if (next < 0) return false;
  gpu->cuda.pds_mock_advance(next);
  return true;
}

/* A device that stops is a fault, not a hang. */
enum { PATIENCE_S = 120, SPINS = 64 };

static pds_status has_stopped(pds_gpu *gpu) {
  gpu->stopped = true;
  gpu->failed = PDS_ERR_GPU;
  snprintf(gpu->why, sizeof gpu->why, "the GPU has stopped: what it was given does not end");
  return pds_fail(PDS_ERR_GPU, "%s; " REMEDY, gpu->why);
}

/* Lets time pass for one who waits, since `begin`; false: no longer. */
static bool have_patience(pds_gpu *gpu, uint64_t begin, uint32_t turn) {
  if (gpu->is_virtual) return let_time_pass(gpu, -1);
  if (turn % SPINS)
    pds_cpu_relax();
  else
    sched_yield();
  return pds_now_ns() - begin < gpu->patience_ns;
}

pds_status pds_gpu_wait(pds_gpu *gpu, CUevent event) {
  const uint64_t begin = pds_now_ns();
  for (uint32_t turn = 0;; turn++) {
    const CUresult result = gpu->cuda.cuEventQuery(event);
    if (result == CUDA_SUCCESS) return PDS_OK;
    if (result != CUDA_ERROR_NOT_READY) return pds_gpu_check(gpu, result, "waiting for the GPU");
    PDS_RETURN_IF_ERROR(pds_link_pump(gpu));
    if (!have_patience(gpu, begin, turn)) return has_stopped(gpu);
  }
}

pds_status pds_gpu_wait_stream(pds_gpu *gpu, CUstream stream) {
  const uint64_t begin = pds_now_ns();
  for (uint32_t turn = 0;; turn++) {
    const CUresult result = gpu->cuda.cuStreamQuery(stream);
    if (result == CUDA_SUCCESS) return PDS_OK;
    if (result != CUDA_ERROR_NOT_READY) return pds_gpu_check(gpu, result, "waiting for the GPU");
    if (!have_patience(gpu, begin, turn)) return has_stopped(gpu);
  }
}

pds_status pds_gpu_drain(pds_gpu *gpu) {
  PDS_RETURN_IF_ERROR(pds_gpu_wait_stream(gpu, gpu->copies));
  return pds_gpu_wait_stream(gpu, gpu->compute);
}

pds_status pds_gpu_copy(pds_gpu *gpu, void *to, const void *from, uint64_t bytes, pds_kv_way way) {
  const CUdeviceptr a = (CUdeviceptr)(uintptr_t)to, b = (CUdeviceptr)(uintptr_t)from;
  const pds_cuda *cuda = &gpu->cuda;
  /* A copy of pageable memory waits in the driver: nothing that may not end goes before it. */
  PDS_RETURN_IF_ERROR(pds_gpu_drain(gpu));
  CUresult result = way == PDS_KV_WITHIN ? cuda->cuMemcpyDtoDAsync(a, b, bytes, gpu->compute)
                    : way == PDS_KV_OUT  ? cuda->cuMemcpyDtoHAsync(to, b, bytes, gpu->compute)
                                         : cuda->cuMemcpyHtoDAsync(a, from, bytes, gpu->compute);
  PDS_RETURN_IF_ERROR(pds_gpu_check(gpu, result, "copying the KV cache"));
  return pds_gpu_drain(gpu);
}

bool pds_gpu_predicts(const pds_gpu *gpu) {
  return pds_policy_predicts(gpu->policy.policy) && gpu->residency.ring;
}

pds_status pds_gpu_host_work(pds_gpu *gpu, const char *name, uint32_t n, const uint32_t *tokens) {
  if (!gpu->is_virtual) return PDS_OK;
  const int64_t end = gpu->cuda.pds_mock_host_begin(name, n, tokens);
  while (gpu->cuda.pds_mock_now() < end) {
    let_time_pass(gpu, end);
    PDS_RETURN_IF_ERROR(pds_link_pump(gpu)); /* as workers do between two items */
  }
  return PDS_OK;
}

pds_status pds_gpu_enter(pds_gpu *gpu) {
  if (gpu->failed != PDS_OK)
    return pds_fail(gpu->failed, "the GPU failed before: %.300s; " REMEDY, gpu->why);
  return pds_gpu_check(gpu, gpu->cuda.cuCtxPushCurrent(gpu->context), "entering the context");
}

void pds_gpu_leave(pds_gpu *gpu) {
  CUcontext ignored;
  gpu->cuda.cuCtxPopCurrent(&ignored);
}

/* --- memory --- */

/* Takes device memory within the cap. */
static pds_status take(pds_gpu *gpu, uint64_t bytes, const char *what, const char *remedy,
                       CUdeviceptr *out) {
  const double mib = 1 << 20;
  if (bytes > gpu->cap - gpu->used)
    return pds_fail(PDS_ERR_MEMORY,
                    "GPU memory: %s takes %.1f MiB, but of the %.1f MiB allowed %.1f are taken; %s",
                    what, (double)bytes / mib, (double)gpu->cap / mib, (double)gpu->used / mib,
                    remedy);
  CUresult result = gpu->cuda.cuMemAlloc(out, bytes ? bytes : 1);
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    return pds_fail(PDS_ERR_MEMORY,
                    "GPU memory: the device has no %.1f MiB left for %s; other processes may use "
                    "it; %s",
                    (double)bytes / mib, what, remedy);
  PDS_RETURN_IF_ERROR(pds_gpu_check(gpu, result, what));
  gpu->used += bytes;
  return PDS_OK;
}

static void give(pds_gpu *gpu, CUdeviceptr *address, uint64_t bytes) {
  if (!*address) return;
  gpu->cuda.cuMemFree(*address);
  gpu->used -= bytes;
  *address = 0;
}

static const pds_mlp *experts_in(const pds_plan *plan, uint32_t f) {
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].moe && plan->layers[i].experts.gate_up.file == f)
      return &plan->layers[i].experts;
  return NULL;
}

uint64_t pds_device_file_bytes(const pds_plan *plan, uint32_t f) {
  if (f == plan->embed.file && f != plan->lm_head.file) return 0; /* the CPU embeds */
  const pds_mlp *experts = experts_in(plan, f);
  return experts ? experts->gate_up.offset : plan->files[f].bytes;
}

uint64_t pds_expert_bytes(const pds_plan *plan) {
  uint64_t most = 0;
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].moe && plan->layers[i].experts.gate_up.stride > most)
      most = plan->layers[i].experts.gate_up.stride;
  return most;
}

const unsigned char *pds_expert_host(const pds_plan *plan, const unsigned char *const *files,
                                     uint32_t layer, uint32_t expert) {
  const pds_tensor *t = &plan->layers[layer].experts.gate_up;
  return files[t->file] + t->offset + (uint64_t)expert * t->stride;
}

/* --- opening --- */

enum { LEAST_COMPUTE = 80 }; /* bf16 matrix units, asynchronous copies to shared memory */

const char *const pds_kernel_names[PDS_KERNELS] = {
    [PDS_KERNEL_ROPE] = "rope",           [PDS_KERNEL_NORM] = "norm",
    [PDS_KERNEL_ATTENTION] = "attention", [PDS_KERNEL_MLP] = "mlp",
    [PDS_KERNEL_GATE] = "gate",           [PDS_KERNEL_EXPERTS] = "experts",
    [PDS_KERNEL_SHARED] = "shared",       [PDS_KERNEL_COMBINE] = "combine",
    [PDS_KERNEL_LM_HEAD] = "lm_head",
};

static pds_status attribute(pds_gpu *gpu, CUdevice_attribute which, uint32_t *out) {
  int value = 0;
  PDS_CUDA_CALL(gpu, "asking for the GPU's properties", cuDeviceGetAttribute, &value, which,
                gpu->device);
  *out = (uint32_t)value;
  return PDS_OK;
}

/* What launches depend on, and what the runtime takes for granted. */
static pds_status ask_device(pds_gpu *gpu) {
  uint32_t major, minor, one_address;
  pds_cu_device *d = &gpu->cu_device;
  PDS_RETURN_IF_ERROR(attribute(gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major));
  PDS_RETURN_IF_ERROR(attribute(gpu, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor));
  PDS_RETURN_IF_ERROR(attribute(gpu, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &d->sms));
  PDS_RETURN_IF_ERROR(
      attribute(gpu, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &d->shared_most));
  PDS_RETURN_IF_ERROR(
      attribute(gpu, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, &one_address));
  d->compute = 10 * major + minor;
  if (d->compute < LEAST_COMPUTE)
    return pds_fail(PDS_ERR_DRIVER,
                    "%s: compute capability %u.%u, expected %u.%u or later; run on the CPU (device "
                    "cpu)",
                    gpu->name, major, minor, LEAST_COMPUTE / 10, LEAST_COMPUTE % 10);
  if (!one_address)
    return pds_fail(PDS_ERR_DRIVER,
                    "%s: it cannot read pinned host memory at the host's addresses; run on the CPU "
                    "(device cpu)",
                    gpu->name);
  return PDS_OK;
}

static pds_status open_device(pds_gpu *gpu, const pds_gpu_options *options) {
  PDS_RETURN_IF_ERROR(pds_cuda_open(options->driver, &gpu->cuda));
  int count = 0;
  PDS_CUDA_CALL(gpu, "counting GPUs", cuDeviceGetCount, &count);
  if (options->device < 0 || options->device >= count)
    return pds_fail(PDS_ERR_DRIVER, "GPU %d: expected 0 to %d, as the driver has %d",
                    options->device, count - 1, count);
  PDS_CUDA_CALL(gpu, "opening the GPU", cuDeviceGet, &gpu->device, options->device);
  PDS_CUDA_CALL(gpu, "naming the GPU", cuDeviceGetName, gpu->name, sizeof gpu->name, gpu->device);
  PDS_RETURN_IF_ERROR(ask_device(gpu));
  gpu->is_virtual = gpu->cuda.pds_mock_now && gpu->cuda.pds_mock_counter("virtual") == 1;
  gpu->real = !gpu->cuda.pds_mock_now;
  gpu->link.depth = gpu->is_virtual ? PDS_LINK_IN_FLIGHT : PDS_LINK_DEPTH;
  size_t total = 0;
  PDS_CUDA_CALL(gpu, "asking for the GPU's memory", cuDeviceTotalMem, &total, gpu->device);
  gpu->cap = options->cap && options->cap < total ? options->cap : total;
  PDS_CUDA_CALL(gpu, "opening the GPU's context", cuDevicePrimaryCtxRetain, &gpu->context,
                gpu->device);
  return PDS_OK;
}

/* Those of the files, or twins, if it is the mock and they are all for GPUs. */
static pds_status load_kernels(pds_gpu *gpu, const char *files) {
  PDS_RETURN_IF_ERROR(pds_gpu_load_images(gpu, files ? files : ""));
  gpu->twins = !gpu->module;
  if (!gpu->twins) return pds_gpu_check_plan(gpu->plan);
  PDS_CUDA_CALL(gpu, "loading kernels", cuModuleLoadData, &gpu->module, pds_twin_image());
  for (int k = 0; k < PDS_KERNELS; k++)
    PDS_CUDA_CALL(gpu, pds_kernel_names[k], cuModuleGetFunction, &gpu->kernels[k], gpu->module,
                  pds_kernel_names[k]);
  return PDS_OK;
}

static pds_status open_streams(pds_gpu *gpu) {
  const unsigned events = CU_EVENT_DISABLE_TIMING;
  PDS_CUDA_CALL(gpu, "a stream", cuStreamCreateWithPriority, &gpu->compute, CU_STREAM_NON_BLOCKING,
                0);
  PDS_CUDA_CALL(gpu, "a stream", cuStreamCreateWithPriority, &gpu->copies, CU_STREAM_NON_BLOCKING,
                0);
  for (int i = 0; i < PDS_LINK_DEPTH; i++)
    PDS_CUDA_CALL(gpu, "an event", cuEventCreate, &gpu->link.chunk[i], events);
  for (uint32_t i = 0; i < gpu->residency.ring; i++) {
    PDS_CUDA_CALL(gpu, "an event", cuEventCreate, &gpu->link.ready[i], events);
    PDS_CUDA_CALL(gpu, "an event", cuEventCreate, &gpu->link.freed[i], events);
  }
  return PDS_OK;
}

/* The beginnings of weight files, then the slots. */
static pds_status take_weights(pds_gpu *gpu) {
  const pds_plan *plan = gpu->plan;
  gpu->weight_bytes = 0;
  for (uint32_t f = 0; f < plan->n_files; f++)
    gpu->weight_bytes += pds_device_round(pds_device_file_bytes(plan, f));
  const char *remedy = "raise --gpu-mem, or compile for this device";
  PDS_RETURN_IF_ERROR(take(gpu, gpu->weight_bytes, "what is no expert", remedy, &gpu->weights));
  const uint64_t slots = gpu->residency.hot + gpu->residency.ring;
  if (!slots) return PDS_OK;
  return take(gpu, slots * gpu->expert_bytes, "the experts' slots", remedy, &gpu->slots);
}

static pds_status fill(pds_gpu *gpu) {
  const pds_plan *plan = gpu->plan;
  CUdeviceptr at = gpu->weights;
  for (uint32_t f = 0; f < plan->n_files; f++) {
    const uint64_t bytes = pds_device_file_bytes(plan, f);
    if (!bytes) continue;
    PDS_CUDA_CALL(gpu, "copying weights", cuMemcpyHtoDAsync, at, gpu->host_files[f], bytes,
                  gpu->compute);
    gpu->files[f] = (const unsigned char *)(uintptr_t)at;
    at += pds_device_round(bytes);
  }
  const pds_residency *r = &gpu->residency;
  for (uint32_t l = 0; l < r->layers; l++)
    for (uint32_t e = 0; e < r->experts; e++) {
      const int32_t slot = pds_slot_of(r, l, e);
      if (slot == PDS_NO_SLOT) continue;
      PDS_CUDA_CALL(gpu, "copying hot experts", cuMemcpyHtoDAsync,
                    gpu->slots + (uint64_t)slot * gpu->expert_bytes,
                    pds_expert_host(plan, gpu->host_files, l, e),
                    plan->layers[l].experts.gate_up.stride, gpu->compute);
    }
  return pds_gpu_drain(gpu);
}

/* Everything of the host's that a GPU needs lies in one mapping. */
typedef struct gpu_layout {
  uint64_t files, residency, ready, freed, demand, spec, popularity, score, seen, hits, sure,
      ledger, gain, paused, dues, loads, ahead, pool, scratch, total;
} gpu_layout;

static uint64_t place(uint64_t *end, uint64_t bytes) {
  const uint64_t at = *end;
  *end += pds_round_up(bytes, 64);
  return at;
}

static gpu_layout layout_of(const pds_plan *plan, const pds_residency *r) {
  const uint64_t experts = (uint64_t)r->layers * r->experts;
  uint64_t end = pds_round_up(sizeof(pds_gpu), 64);
  gpu_layout at;
  at.files = place(&end, 8 * (uint64_t)plan->n_files);
  at.residency = place(&end, pds_residency_bytes(r));
  at.ready = place(&end, 8 * (uint64_t)r->ring);
  at.freed = place(&end, 8 * (uint64_t)r->ring);
  at.demand = place(&end, (PDS_MAX_EXPERTS + r->ring) * sizeof(pds_transfer));
  at.spec = place(&end, r->ring * sizeof(pds_transfer));
  at.popularity = place(&end, 4 * experts);
  at.score = place(&end, 4 * experts);
  at.seen = place(&end, 4 * experts);
  at.hits = place(&end, 4 * 3 * (uint64_t)r->layers);
  at.sure = place(&end, 4 * 3 * (uint64_t)r->layers);
  at.ledger = place(&end, r->layers * sizeof(pds_ledger));
  at.gain = place(&end, 8 * 3 * (uint64_t)r->layers);
  at.paused = place(&end, 4 * 3 * (uint64_t)r->layers);
  at.dues = place(&end, 3 * PDS_MAX_EXPERTS * sizeof(pds_due));
  at.loads = place(&end, 2 * PDS_MAX_EXPERTS * sizeof(pds_load));
  at.ahead = place(&end, 2 * (uint64_t)r->ring);
  at.pool = place(&end, PDS_POOL_BYTES + PDS_WORKER_BYTES);
  at.scratch = place(&end, plan->thread_scratch_bytes);
  at.total = pds_round_up(end, PDS_GRAIN);
  return at;
}

static pds_status host_part(const pds_plan *plan, const pds_programs *programs, pds_gpu **out) {
  pds_residency r = {.layers = plan->n_layers, .experts = 1};
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].gate.experts > r.experts) r.experts = plan->layers[i].gate.experts;
  PDS_RETURN_IF_ERROR(pds_residency_count(programs, &r.hot, &r.ring));
  const gpu_layout at = layout_of(plan, &r);
  void *memory;
  PDS_RETURN_IF_ERROR(pds_map_anon(at.total, "GPU", &memory));
  unsigned char *base = memory;
  pds_gpu *gpu = memory;
  gpu->bytes = at.total;
  gpu->plan = plan;
  gpu->expert_bytes = pds_expert_bytes(plan);
  gpu->files = (const unsigned char **)(base + at.files);
  gpu->residency = r;
  pds_residency_init(&gpu->residency, base + at.residency, programs);
  gpu->link.ready = (CUevent *)(base + at.ready);
  gpu->link.freed = (CUevent *)(base + at.freed);
  gpu->link.demand =
      (pds_transfers){.at = (pds_transfer *)(base + at.demand), .room = PDS_MAX_EXPERTS + r.ring};
  gpu->link.spec = (pds_transfers){.at = (pds_transfer *)(base + at.spec), .room = r.ring};
  pds_gpu_policy *p = &gpu->policy;
  p->popularity = (uint32_t *)(base + at.popularity);
  p->score = (uint32_t *)(base + at.score);
  p->seen = (uint32_t *)(base + at.seen);
  p->hit_q16 = (uint32_t *)(base + at.hits);
  p->sure_q16 = (uint32_t *)(base + at.sure);
  p->ledger = (pds_ledger *)(base + at.ledger);
  p->gain = (int64_t *)(base + at.gain);
  p->paused = (uint32_t *)(base + at.paused);
  p->cur = (pds_due *)(base + at.dues);
  p->res = p->cur + PDS_MAX_EXPERTS;
  p->next = p->res + PDS_MAX_EXPERTS;
  p->on = (pds_load *)(base + at.loads);
  p->pre = p->on + PDS_MAX_EXPERTS;
  p->ahead_expert = (uint16_t *)(base + at.ahead);
  gpu->twin_scratch = base + at.scratch;
  const pds_status status =
      pds_pool_create(base + at.pool, base + at.pool + PDS_POOL_BYTES, NULL, 1);
  if (status != PDS_OK) {
    pds_unmap(gpu, gpu->bytes);
    return status;
  }
  gpu->twin_pool = (pds_pool *)(base + at.pool);
  *out = gpu;
  return PDS_OK;
}

/* The driver pins no memory that is read-only. */
static pds_status pin(pds_gpu *gpu, void *weights, uint64_t bytes) {
  pds_let_write(weights, bytes, true);
  PDS_RETURN_IF_ERROR(
      pds_gpu_check(gpu, gpu->cuda.cuMemHostRegister(weights, bytes, CU_MEMHOSTREGISTER_PORTABLE),
                    "pinning the weights (the limit on locked memory, ulimit -l, may be too low)"));
  gpu->pinned = weights;
  pds_let_write(weights, bytes, false);
  return PDS_OK;
}

static pds_status start(pds_gpu *gpu, const char *kernels, void *pinned, uint64_t pinned_bytes) {
  PDS_RETURN_IF_ERROR(pds_gpu_enter(gpu));
  pds_status status = load_kernels(gpu, kernels);
  if (status == PDS_OK) status = open_streams(gpu);
  if (status == PDS_OK) status = take_weights(gpu);
  if (status == PDS_OK && pinned) status = pin(gpu, pinned, pinned_bytes);
  if (status == PDS_OK) status = fill(gpu);
  pds_gpu_leave(gpu);
  return status;
}

pds_status pds_gpu_open(const pds_gpu_options *options, const pds_plan *plan,
                        const pds_programs *programs, const unsigned char *const *host_files,
                        void *pinned, uint64_t pinned_bytes, pds_gpu **out_gpu) {
  pds_gpu *gpu;
  PDS_RETURN_IF_ERROR(host_part(plan, programs, &gpu));
  gpu->host_files = host_files;
  gpu->patience_ns =
      options->patience_ms ? options->patience_ms * 1000000ull : PATIENCE_S * 1000000000ull;
  pds_status status = open_device(gpu, options);
  if (status == PDS_OK) status = start(gpu, options->kernels, pinned, pinned_bytes);
  if (status != PDS_OK) {
    /* Closing calls the driver, which may write a text of its own. */
    char why[PDS_ERROR_BYTES];
    snprintf(why, sizeof why, "%s", pds_last_error());
    pds_gpu_close(gpu);
    return pds_fail(status, "%s", why);
  }
  *out_gpu = gpu;
  return PDS_OK;
}

static void close_events(pds_gpu *gpu, CUevent *events, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (events[i]) gpu->cuda.cuEventDestroy(events[i]);
}

void pds_gpu_close(pds_gpu *gpu) {
  if (!gpu) return;
  if (gpu->stopped) { /* all other calls may wait for it; and it may use what is mapped here */
    gpu->cuda.cuDevicePrimaryCtxRelease(gpu->device);
    return;
  }
  if (gpu->context) {
    /* A device that failed takes no calls: its memory goes with the context. */
    gpu->cuda.cuCtxPushCurrent(gpu->context);
    if (gpu->compute && gpu->copies) pds_gpu_drain(gpu);
    close_events(gpu, gpu->link.chunk, PDS_LINK_DEPTH);
    close_events(gpu, gpu->link.ready, gpu->residency.ring);
    close_events(gpu, gpu->link.freed, gpu->residency.ring);
    if (gpu->compute) gpu->cuda.cuStreamDestroy(gpu->compute);
    if (gpu->copies) gpu->cuda.cuStreamDestroy(gpu->copies);
    give(gpu, &gpu->slots,
         (uint64_t)(gpu->residency.hot + gpu->residency.ring) * gpu->expert_bytes);
    give(gpu, &gpu->weights, gpu->weight_bytes);
    if (gpu->pinned) gpu->cuda.cuMemHostUnregister(gpu->pinned);
    if (gpu->module) gpu->cuda.cuModuleUnload(gpu->module);
    pds_gpu_leave(gpu);
    gpu->cuda.cuDevicePrimaryCtxRelease(gpu->device);
  }
  if (gpu->twin_pool) pds_pool_destroy(gpu->twin_pool);
  pds_cuda_close(&gpu->cuda);
  pds_unmap(gpu, gpu->bytes);
}

/* --- sessions --- */

static pds_status open_pinned(pds_gpu *gpu, pds_gpu_session *s) {
  const pds_plan *plan = gpu->plan;
  const uint64_t rows = pds_round_up(4 * 4 * (uint64_t)plan->max_rows, 64);
  const uint64_t holes = pds_round_up(
      (uint64_t)gpu->residency.layers * gpu->residency.experts * sizeof(pds_gpu_hole), 64);
  const uint64_t flags = pds_round_up(gpu->residency.experts, 64);
  s->pinned_bytes = rows + holes + flags + gpu->residency.layers * sizeof(pds_graph);
  PDS_CUDA_CALL(gpu, "pinned memory for a session", cuMemHostAlloc, &s->pinned, s->pinned_bytes,
                CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
  unsigned char *base = s->pinned;
  s->row_stage = (int32_t *)base;
  s->holes = (pds_gpu_hole *)(base + rows);
  s->on_gpu = base + rows + holes;
  s->graphs = (pds_graph *)(base + rows + holes + flags);
  memset(s->graphs, 0, gpu->residency.layers * sizeof(pds_graph));
  return PDS_OK;
}

static pds_status open_arena(pds_gpu *gpu, uint64_t kv_bytes, uint64_t table_bytes,
                             pds_gpu_session *s) {
  const pds_plan *plan = gpu->plan;
  uint64_t end = pds_device_round(plan->scratch_bytes);
  const uint64_t kv = end, rows = kv + pds_device_round(kv_bytes);
  const uint64_t table = rows + pds_device_round(4 * 4 * (uint64_t)plan->max_rows);
  end = table + pds_device_round(table_bytes);
  PDS_RETURN_IF_ERROR(take(gpu, end, "a session (KV cache and buffers)",
                           "lower --max-context or the sessions' kv_tokens, or raise --gpu-mem",
                           &s->arena));
  s->arena_bytes = end;
  s->scratch = s->arena;
  s->kv = s->arena + kv;
  s->rows = s->arena + rows;
  s->table = s->arena + table;
  PDS_CUDA_CALL(gpu, "clearing a session's memory", cuMemsetD8Async, s->arena, 0, end,
                gpu->compute);
  return pds_gpu_drain(gpu);
}

pds_status pds_gpu_session_open(pds_gpu *gpu, uint64_t kv_bytes, uint64_t table_bytes,
                                void *scratch, uint64_t scratch_bytes, pds_gpu_session *out) {
  *out = (pds_gpu_session){0};
  pds_status status = open_arena(gpu, kv_bytes, table_bytes, out);
  if (status == PDS_OK) status = open_pinned(gpu, out);
  if (status == PDS_OK)
    status = pds_gpu_check(
        gpu,
        gpu->cuda.cuMemHostRegister(scratch, scratch_bytes,
                                    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "pinning a session's buffers (the limit on locked memory, ulimit -l, may be too low)");
  if (status == PDS_OK) {
    out->registered = true;
    status = pds_gpu_check(gpu, gpu->cuda.cuEventCreate(&out->routed, CU_EVENT_DISABLE_TIMING),
                           "an event");
  }
  if (status != PDS_OK) {
    char why[PDS_ERROR_BYTES];
    snprintf(why, sizeof why, "%s", pds_last_error());
    pds_gpu_session_close(gpu, out, scratch);
    return pds_fail(status, "%s", why);
  }
  return PDS_OK;
}

void pds_gpu_session_close(pds_gpu *gpu, pds_gpu_session *session, void *scratch) {
  if (!gpu->stopped) pds_gpu_drain(gpu);
  if (gpu->stopped) return; /* it may still use all this */
  pds_gpu_drop_graphs(gpu, session);
  if (session->routed) gpu->cuda.cuEventDestroy(session->routed);
  if (session->registered) gpu->cuda.cuMemHostUnregister(scratch);
  if (session->pinned) gpu->cuda.cuMemFreeHost(session->pinned);
  give(gpu, &session->arena, session->arena_bytes);
  *session = (pds_gpu_session){0};
}
