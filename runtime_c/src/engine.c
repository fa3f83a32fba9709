/* engine.c: an engine's life: programs verified, workers started and placed, weights loaded; all
 * of it undone. */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cpu.h"
#include "exec.h"
#include "map.h"

pds_status pds_engine_check_fork(const pds_engine *engine) {
  if (engine->pid == getpid()) return PDS_OK;
  return pds_fail(PDS_ERR_FORKED,
                  "the engine was created in process %d, before fork; load the plan "
                  "again in this process",
                  (int)engine->pid);
}

/* --- checks of the generated constants against each other, before anything relies on them --- */

static pds_status check_tensor(const pds_plan *plan, const pds_tensor *t, uint32_t layer,
                               const char *name) {
  if (t->dtype == PDS_NONE) return PDS_OK;
  uint64_t bytes = pds_tensor_bytes(t), count = t->count ? t->count : 1;
  bool good = t->file < plan->n_files && bytes > 0 && t->offset % 64 == 0 && t->stride % 64 == 0 &&
              (count == 1 || t->stride >= bytes);
  if (good) {
    uint64_t size = plan->files[t->file].bytes;
    good = bytes <= size && t->offset <= size - bytes &&
           (count == 1 || t->stride <= (size - bytes - t->offset) / (count - 1));
  }
  if (good) return PDS_OK;
  return pds_fail(PDS_ERR_PLAN_FORMAT,
                  "layer %d: tensor %s lies outside its weight file; compile the "
                  "plan again",
                  (int)layer, name);
}

static pds_status check_predictor(const pds_plan *plan, uint32_t index) {
  const pds_predictor *p = &plan->layers[index].predictor;
  if (p->kind == PDS_PREDICT_NONE) return PDS_OK;
  bool good = p->kind == PDS_PREDICT_CROSS_GATE && p->target > index && p->target < plan->n_layers;
  for (uint32_t i = index + 1; good && i <= p->target; i++)
    good = (plan->layers[i].moe != 0) == (i == p->target);
  if (good) return PDS_OK;
  return pds_fail(
      PDS_ERR_PLAN_FORMAT,
      "layer %u: predictor of kind %u for layer %u: expected kind 1, and the next layer "
      "with experts; compile the plan again",
      index, p->kind, p->target);
}

static pds_status check_layer(const pds_plan *plan, uint32_t index) {
  const pds_layer *l = &plan->layers[index];
  const struct {
    const pds_tensor *tensor;
    const char *name;
  } tensors[] = {
      {&l->attn_norm, "attn_norm"},
      {&l->mlp_norm, "mlp_norm"},
      {&l->attn.in_proj, "in_proj"},
      {&l->attn.in_bias, "in_bias"},
      {&l->attn.q_norm, "q_norm"},
      {&l->attn.k_norm, "k_norm"},
      {&l->attn.q_b, "q_b"},
      {&l->attn.uk, "uk"},
      {&l->attn.uv, "uv"},
      {&l->attn.o_proj, "o_proj"},
      {&l->attn.o_bias, "o_bias"},
      {&l->gate.weight, "gate weight"},
      {&l->gate.bias, "gate bias"},
      {&l->experts.gate_up, "experts gate_up"},
      {&l->experts.down, "experts down"},
      {&l->shared.gate_up, "shared gate_up"},
      {&l->shared.down, "shared down"},
      {&l->dense.gate_up, "dense gate_up"},
      {&l->dense.down, "dense down"},
  };
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
    PDS_RETURN_IF_ERROR(check_tensor(plan, tensors[i].tensor, index, tensors[i].name));
  return check_predictor(plan, index);
}

static pds_status check_plan(const pds_plan *plan) {
  if (plan->kv_block == 0 || plan->max_context == 0 || plan->max_rows == 0 || plan->vocab == 0)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "plan constants: a size is 0");
  if (plan->thread_scratch_bytes % 64 != 0 || plan->kv_block_bytes % 64 != 0)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "plan constants: a size is no multiple of 64");
  for (int i = 0; i < PDS_BUF_COUNT; i++) {
    uint64_t at = plan->buffer_offset[i], bytes = plan->buffer_bytes[i];
    if (at % 64 != 0 || at > plan->scratch_bytes || bytes > plan->scratch_bytes - at)
      return pds_fail(PDS_ERR_PLAN_FORMAT, "plan constants: buffer %d lies outside the scratch", i);
  }
  PDS_RETURN_IF_ERROR(check_tensor(plan, &plan->embed, 0, "embed"));
  PDS_RETURN_IF_ERROR(check_tensor(plan, &plan->final_norm, 0, "final_norm"));
  PDS_RETURN_IF_ERROR(check_tensor(plan, &plan->lm_head, 0, "lm_head"));
  for (uint32_t i = 0; i < plan->n_layers; i++) PDS_RETURN_IF_ERROR(check_layer(plan, i));
  return pds_ops_check(plan);
}

static pds_status check_cpu(const pds_plan *plan) {
  size_t length;
  const char *missing = pds_cpu_missing(plan->required_features, &length);
  if (!missing) return PDS_OK;
  return pds_fail(PDS_ERR_CPU,
                  "the plan needs the CPU feature %.*s, which this CPU or its operating "
                  "system lacks; compile with another --target",
                  (int)length, missing);
}

/* --- life --- */

static pds_status load_programs(pds_engine *engine, int dir_fd, unsigned char *program,
                                bool with_gpu) {
  const pds_plan *plan = engine->plan;
  const char *name = with_gpu ? "program.gpu.bin" : "program.bin";
  uint64_t bytes = plan->program_bytes;
  if (with_gpu) {
    void *memory;
    PDS_RETURN_IF_ERROR(pds_file_bytes(dir_fd, name, &bytes));
    engine->gpu_program_bytes = pds_round_up(bytes ? bytes : 1, PDS_GRAIN);
    PDS_RETURN_IF_ERROR(pds_map_anon(engine->gpu_program_bytes, "programs", &memory));
    engine->gpu_programs = program = memory;
  }
  PDS_RETURN_IF_ERROR(pds_read_file(dir_fd, name, program, bytes));
  pds_status status = pds_programs_open(program, bytes, &engine->programs);
  if (status == PDS_OK) status = pds_programs_verify(&engine->programs, plan, with_gpu);
  if (status == PDS_OK || !with_gpu) return status;
  /* Which of the plan's two files it is. */
  char why[PDS_ERROR_BYTES];
  snprintf(why, sizeof why, "%s", pds_last_error());
  const char *known = "program.bin: ";
  const size_t n = strncmp(why, known, strlen(known)) ? 0 : strlen(known);
  return pds_fail(status, "%s: %.400s", name, why + n);
}

static pds_status open_gpu(pds_engine *engine, const pds_engine_options *options) {
  const pds_gpu_options gpu = {.driver = options->gpu_driver,
                               .device = options->gpu - 1,
                               .cap = options->gpu_mem,
                               .kernels = options->gpu_kernels,
                               .patience_ms = options->gpu_patience_ms};
  return pds_gpu_open(&gpu, engine->plan, &engine->programs, engine->files, engine->weights.copy,
                      engine->weights.copy_bytes, &engine->gpu);
}

/* Why an engine that may choose leaves its workers to the scheduler; NULL: it pins them. Pinning
 * pays where siblings or nodes can be confused, and harms where somebody else shares out the cores:
 * another process, a container's quota, the embedding program. */
static const char *why_free(const pds_host *host, uint32_t threads) {
  if (threads == 1) return "one thread";
  if (!host->whole) return "auto: the affinity mask leaves cores out, somebody shares them out";
  if (host->quota) return "auto: a cgroup's CPU quota";
  if (threads != host->cores) return "auto: threads are not as many as physical cores";
  if (host->cpus == host->cores && host->nodes == 1) return "auto: neither siblings nor nodes";
  return NULL;
}

static void say_cpus(pds_engine *engine, const pds_host *host) {
  size_t at = 0;
  for (uint32_t i = 0; i < engine->threads; i++)
    at += (size_t)snprintf(engine->cpus + at, sizeof engine->cpus - at, "%s%u", i ? "," : "",
                           host->first[i % host->cores]);
}

static void place_workers(pds_engine *engine, const pds_host *host, int32_t pin) {
  const char *why = pin == PDS_PIN_OFF ? "asked for" : NULL;
  if (pin == PDS_PIN_AUTO) why = why_free(host, engine->threads);
  if (!why && !pds_pool_pin(engine->pool, host)) why = "the operating system does not let us";
  if (!why) say_cpus(engine, host);
  if (!why) why = pin == PDS_PIN_ON ? "asked for" : "auto: all physical cores are ours";
  snprintf(engine->cpus_why, sizeof engine->cpus_why, "%s", why);
}

static pds_status start(pds_engine *engine, const pds_engine_layout *at, const pds_host *host,
                        const pds_engine_options *options) {
  unsigned char *arena = (unsigned char *)engine;
  int dir_fd = open(options->plan_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir_fd < 0)
    return pds_fail(PDS_ERR_PLAN_FILE, "%.300s: %s; expected a plan directory", options->plan_dir,
                    strerror(errno));
  pds_status status = load_programs(engine, dir_fd, arena + at->program, options->gpu != 0);
  if (status == PDS_OK)
    status =
        pds_pool_create(arena + at->pool, arena + at->workers, arena + at->stacks, engine->threads);
  if (status == PDS_OK) {
    engine->pool = (pds_pool *)(arena + at->pool);
    place_workers(engine, host, options->pin);
    status = pds_weights_load(engine->plan, dir_fd, options->weights, host, engine->pool,
                              engine->files, &engine->weights);
  }
  if (status == PDS_OK && options->gpu) status = open_gpu(engine, options);
  close(dir_fd);
  return status;
}

static pds_status check_options(const pds_engine_options *options) {
  if (options->threads < 0 || options->threads > (int32_t)PDS_MAX_THREADS)
    return pds_fail(PDS_ERR_ARGUMENT, "threads %d: expected 0 to %u", options->threads,
                    PDS_MAX_THREADS);
  if (options->pin < PDS_PIN_AUTO || options->pin > PDS_PIN_OFF)
    return pds_fail(PDS_ERR_ARGUMENT, "pin %d: expected 0 (auto), 1 (on) or 2 (off)", options->pin);
  if (options->weights < PDS_WEIGHTS_AUTO || options->weights > PDS_WEIGHTS_DUMMY)
    return pds_fail(PDS_ERR_ARGUMENT,
                    "weights %d: expected 0 (auto), 1 (mmap), 2 (copy) or 3 (dummy)",
                    options->weights);
  if (options->cache_prefetch < PDS_CACHE_PREFETCH_AUTO ||
      options->cache_prefetch > PDS_CACHE_PREFETCH_OFF)
    return pds_fail(PDS_ERR_ARGUMENT, "cache_prefetch %d: expected 0 (auto), 1 (on) or 2 (off)",
                    options->cache_prefetch);
  if (options->gpu < 0)
    return pds_fail(PDS_ERR_ARGUMENT, "gpu %d: expected 0 (none) or 1 + the GPU's number",
                    options->gpu);
  return PDS_OK;
}

pds_status pds_engine_create(const pds_engine_options *options, pds_engine **out_engine) {
  if (!options || !options->plan_dir || !out_engine)
    return pds_fail(PDS_ERR_ARGUMENT, "engine: a null pointer");
  PDS_RETURN_IF_ERROR(check_options(options));
  const pds_plan *plan = &pds_the_plan;
  const pds_isa_path *path;
  PDS_RETURN_IF_ERROR(check_cpu(plan));
  PDS_RETURN_IF_ERROR(pds_isa_choose(options->isa, &path));
  PDS_RETURN_IF_ERROR(check_plan(plan));
  pds_host host;
  pds_host_read("", NULL, &host);
  uint32_t threads = options->threads ? (uint32_t)options->threads : pds_host_threads(&host);
  if (threads > PDS_MAX_THREADS) threads = PDS_MAX_THREADS;
  pds_engine_layout at = pds_layout_engine(plan, threads);
  void *base;
  PDS_RETURN_IF_ERROR(pds_map_anon(at.total, "engine", &base));
  pds_engine *engine = base;
  engine->plan = plan;
  engine->path = path;
  engine->files = (const unsigned char **)((unsigned char *)base + at.files);
  engine->thread_scratch = (unsigned char *)base + at.scratch;
  engine->bytes = at.total;
  engine->threads = threads;
  engine->cores = host.cores;
  engine->nodes = host.nodes;
  engine->l2_bytes = pds_cpu_l2_bytes();
  pds_llc_init(&engine->llc, options->cache_prefetch, plan, threads, pds_cpu_l3_bytes());
  engine->pid = getpid();
  engine->refs = 1;
  pds_status status = start(engine, &at, &host, options);
  if (status != PDS_OK) {
    pds_engine_release(engine);
    return status;
  }
  *out_engine = engine;
  return PDS_OK;
}

void pds_engine_retain(pds_engine *engine) {
  atomic_fetch_add_explicit(&engine->refs, 1, memory_order_relaxed);
}

void pds_engine_release(pds_engine *engine) {
  if (atomic_fetch_sub_explicit(&engine->refs, 1, memory_order_acq_rel) != 1) return;
  /* After fork the workers exist in the parent alone: there is nothing to join here. */
  if (engine->pool && engine->pid == getpid()) pds_pool_destroy(engine->pool);
  pds_nets_free(engine);
  pds_learn_free(engine);
  const bool stopped = engine->gpu && engine->gpu->stopped;
  if (engine->pid == getpid()) pds_gpu_close(engine->gpu);
  if (stopped) return; /* the device may still use what lies here */
  pds_unmap(engine->gpu_programs, engine->gpu_program_bytes);
  pds_weights_unload(engine->plan, engine->files, &engine->weights);
  pds_unmap(engine, engine->bytes);
}

void pds_engine_destroy(pds_engine *engine) {
  if (engine) pds_engine_release(engine);
}

pds_status pds_engine_get_info(const pds_engine *engine, pds_engine_info *out_info) {
  if (!engine || !out_info) return pds_fail(PDS_ERR_ARGUMENT, "info: a null pointer");
  const pds_plan *plan = engine->plan;
  *out_info = (pds_engine_info){.abi_version = PDS_ABI_VERSION,
                                .vocab = plan->vocab,
                                .max_context = plan->max_context,
                                .max_rows = plan->max_rows,
                                .max_logits = plan->max_logits,
                                .layers = plan->n_layers,
                                .threads = engine->threads,
                                .kv_block = plan->kv_block,
                                .kv_block_bytes = plan->kv_block_bytes,
                                .weight_bytes = engine->weights.bytes,
                                .engine_bytes = engine->bytes,
                                .net_bytes = engine->net_bytes,
                                .learner_bytes = engine->learner_bytes,
                                .cores = engine->cores,
                                .numa_nodes = engine->nodes,
                                .weights = engine->weights.mode,
                                .weights_nodes = engine->weights.nodes,
                                .weights_copy_bytes = engine->weights.copy_bytes,
                                .weights_huge_bytes = engine->weights.huge_bytes,
                                .weights_why = engine->weights.why,
                                .cpus = engine->cpus,
                                .cpus_why = engine->cpus_why,
                                .isa = engine->path->name,
                                .plan_hash = plan->plan_hash};
  return PDS_OK;
}

pds_status pds_engine_get_cache_prefetch(const pds_engine *engine,
                                         pds_cache_prefetch_info *out_info) {
  if (!engine || !out_info) return pds_fail(PDS_ERR_ARGUMENT, "cache prefetch: a null pointer");
  *out_info = (pds_cache_prefetch_info){.asked = engine->llc.asked,
                                        .why = engine->llc.why,
                                        .experts_predicted = engine->llc.counts.predicted,
                                        .experts_hit = engine->llc.counts.hits,
                                        .prefetch_bytes = engine->llc.counts.bytes,
                                        .prefetch_useful_bytes = engine->llc.counts.useful_bytes};
  for (int i = 0; i < 2; i++) {
    const pds_llc_trial *t = &engine->llc.trial[i];
    out_info->state[i] = atomic_load_explicit(&t->state, memory_order_relaxed);
    out_info->trials[i] = atomic_load_explicit(&t->trials, memory_order_relaxed);
    out_info->gain[i] = (float)atomic_load_explicit(&t->gain, memory_order_relaxed) / 100;
  }
  return PDS_OK;
}
