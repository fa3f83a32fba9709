/* case_gpu.c: the table of what is on the GPU, the link to it, and an engine with a GPU, on the mock
 * driver with both clocks. DIRECTORY has program.gpu.bin of the fake plan: expert 1 stays on the GPU, and
 * two slots are for the others. */
#define _GNU_SOURCE
#include "gpu.h"

#include <pthread.h>
#include <stdlib.h>

#include "fake_plan.h"
#include "pdscope.h"
#include "test.h"

static char mock_path[4096];

static void mock_set(const char *settings) {
  pds_cuda cuda;
  if (!CHECK_OK(pds_cuda_open(mock_path, &cuda))) exit(1);
  CHECK_EQ(cuda.pds_mock_configure(settings), 0);
  pds_cuda_close(&cuda);
}

static long long mock_count(const char *name) {
  pds_cuda cuda;
  if (!CHECK_OK(pds_cuda_open(mock_path, &cuda))) exit(1);
  const long long n = cuda.pds_mock_counter(name);
  pds_cuda_close(&cuda);
  return n;
}

/* --- residency --- */

static void *read_programs(pds_programs *out) {
  char path[4200];
  snprintf(path, sizeof path, "%s/program.gpu.bin", test_data_dir);
  FILE *file = fopen(path, "rb");
  if (!file) exit(1);
  static uint64_t bytes[8192];
  const size_t n = fread(bytes, 1, sizeof bytes, file);
  fclose(file);
  CHECK_OK(pds_programs_open(bytes, n, out));
  return bytes;
}

static void residency(void) {
  pds_programs programs;
  read_programs(&programs);
  pds_residency r = {.layers = 2, .experts = FAKE_EXPERTS};
  CHECK_OK(pds_residency_count(&programs, &r.hot, &r.ring));
  CHECK_EQ(r.hot, 1);
  CHECK_EQ(r.ring, 2);
  void *memory = calloc(1, pds_residency_bytes(&r));
  pds_residency_init(&r, memory, &programs);
  CHECK_EQ(pds_slot_of(&r, 1, 1), 0); /* the resident one, where programs say */
  CHECK_EQ(pds_slot_of(&r, 1, 0), PDS_NO_SLOT);
  CHECK(pds_cached_of(&r, 0) == NULL);
  CHECK_EQ(pds_slots_free(&r, 1), 2);

  /* Empty slots first, then the least recently used; never one that is kept. */
  pds_asked asked = {.policy = PDS_POLICY_LRU, .layer = 1, .n_layers = 2, .now = 1};
  CHECK_EQ(pds_slot_take(&r, &asked, 0, 0, PDS_KEPT_IN_USE), 1);
  asked.now = 2;
  CHECK_EQ(pds_slot_take(&r, &asked, 2, 0, PDS_KEPT_AHEAD), 2);
  CHECK_EQ(pds_slots_free(&r, 0), 0);
  CHECK_EQ(pds_slots_free(&r, 1), 0);
  CHECK_EQ(pds_slot_take(&r, &asked, 3, 0, PDS_KEPT_IN_USE), PDS_NO_SLOT);
  CHECK_EQ(pds_slot_of(&r, 1, 3), PDS_NO_SLOT);
  for (int i = 0; i < 2; i++) pds_slot_keep(&r, &r.cached[i], 0);
  r.cached[0].used = 9;
  asked.now = 10;
  CHECK_EQ(pds_slot_take(&r, &asked, 3, 0, PDS_KEPT_IN_USE), 2);
  CHECK_EQ(pds_slot_of(&r, 1, 2), PDS_NO_SLOT); /* who had it is gone */
  CHECK_EQ(pds_slot_of(&r, 1, 3), 2);

  /* The same slot again, for another one of the same layer; and emptied. */
  pds_slot_assign(&r, 2, 1, 2, 7, 10);
  CHECK_EQ(pds_slot_of(&r, 1, 3), PDS_NO_SLOT);
  CHECK_EQ(pds_slot_of(&r, 1, 2), 2);
  CHECK_EQ(r.cached[1].kept, PDS_KEPT_IN_USE);
  pds_slot_drop(&r, 2);
  pds_slot_drop(&r, 2);
  CHECK_EQ(pds_slot_of(&r, 1, 2), PDS_NO_SLOT);
  CHECK_EQ(pds_slots_free(&r, 1), 1 + (r.cached[0].kept == 0));
  pds_slot_drop(&r, 0); /* resident ones stay */
  CHECK_EQ(pds_slot_of(&r, 1, 1), 0);
  free(memory);
}

static uint32_t drawn(uint32_t *state, uint32_t below) {
  *state = *state * 1664525 + 1013904223;
  return (uint32_t)((uint64_t)*state * below >> 32);
}

/* A large ring remembers each layer's coldest slot: it takes what pds_victim says, whatever happens. */
static void large_ring(uint32_t policy) {
  enum { LAYERS = 7, OF_LAYER = 40, SLOTS = 150 };
  const pds_programs none = {.phase_count = {0}};
  pds_residency r = {.layers = LAYERS, .experts = OF_LAYER, .ring = SLOTS};
  void *memory = calloc(1, pds_residency_bytes(&r));
  pds_residency_init(&r, memory, &none);
  uint32_t state = policy + 1;
  for (uint32_t now = 1; now < 40; now++) {
    const uint32_t phase = drawn(&state, 3);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      for (uint32_t n = drawn(&state, 9); n; n--) {
        const uint32_t e = drawn(&state, OF_LAYER), at = layer + drawn(&state, 2);
        const pds_asked asked = {policy, phase, at < LAYERS ? at : layer, LAYERS, now};
        const int32_t slot = pds_slot_of(&r, asked.layer, e);
        if (slot != PDS_NO_SLOT) {
          pds_cached *c = pds_cached_of(&r, slot);
          pds_slot_keep(&r, c, drawn(&state, 3));
          if (!c->kept && !drawn(&state, 4)) pds_slot_drop(&r, slot);
          continue;
        }
        const int32_t expected = pds_victim(&asked, r.cached, SLOTS);
        CHECK_EQ(pds_slot_take(&r, &asked, e, drawn(&state, 999), PDS_KEPT_AHEAD), expected);
        if (expected >= 0) r.cached[expected].score = drawn(&state, 9999);
      }
      uint32_t kept = 0;
      for (uint32_t i = 0; i < SLOTS; i++) {
        const int32_t of = r.cached[i].layer;
        if (of == (int32_t)layer && drawn(&state, 8)) pds_slot_keep(&r, &r.cached[i], 0);
        kept += r.cached[i].kept && (of == (int32_t)layer || of == (int32_t)layer + 1);
      }
      CHECK_EQ(pds_slots_free(&r, layer), SLOTS - kept);
    }
    for (uint32_t l = 0; l < LAYERS; l++) { /* as the end of a step does */
      uint32_t kept[2] = {0};
      for (uint32_t i = 0; i < SLOTS; i++)
        if (r.cached[i].layer == (int32_t)l && r.cached[i].kept) kept[r.cached[i].kept - 1]++;
      const bool empties = !drawn(&state, 4);
      CHECK_EQ(pds_slots_release(&r, l, PDS_KEPT_AHEAD, empties), kept[1]);
      CHECK_EQ(pds_slots_release(&r, l, 0, empties), kept[0]);
      CHECK_EQ(pds_slots_free(&r, l), SLOTS - (l + 1 < LAYERS ? r.n_kept[l + 1] : 0));
    }
  }
  free(memory);
}

/* --- the link --- */

enum { CHUNK = PDS_LINK_CHUNK, EXPERT = 2 * CHUNK + 4096, RING = 3, EXPERTS = 4 };

typedef struct bench {
  pds_gpu gpu;
  pds_gpu_step step;
  pds_plan plan;
  pds_layer layer;
  unsigned char *host;
  const unsigned char *files[1];
  pds_transfer demand[8], spec[8];
  CUevent ready[RING], freed[RING];
} bench;

static void open_bench(bench *b, const char *settings) {
  *b = (bench){0};
  mock_set(settings);
  pds_gpu *gpu = &b->gpu;
  CHECK_OK(pds_cuda_open(mock_path, &gpu->cuda));
  CHECK_EQ(gpu->cuda.cuDevicePrimaryCtxRetain(&gpu->context, 0), CUDA_SUCCESS);
  CHECK_EQ(gpu->cuda.cuCtxPushCurrent(gpu->context), CUDA_SUCCESS);
  gpu->is_virtual = gpu->cuda.pds_mock_counter("virtual") == 1;
  gpu->patience_ns = 10000000000ull;
  b->layer = (pds_layer){.moe = 1, .experts.gate_up = {.stride = EXPERT}};
  b->plan = (pds_plan){.layers = &b->layer, .n_layers = 1};
  void *host;
  CHECK_EQ(gpu->cuda.cuMemHostAlloc(&host, (size_t)EXPERTS * EXPERT, 0), CUDA_SUCCESS);
  b->host = host;
  for (uint32_t e = 0; e < EXPERTS; e++) memset(b->host + (size_t)e * EXPERT, (int)e + 1, EXPERT);
  b->files[0] = b->host;
  gpu->plan = &b->plan;
  gpu->host_files = b->files;
  gpu->pinned = b->host;
  gpu->expert_bytes = EXPERT;
  gpu->residency.ring = RING;
  gpu->link.depth = PDS_LINK_IN_FLIGHT;
  gpu->step = &b->step;
  CHECK_EQ(gpu->cuda.cuMemAlloc(&gpu->slots, (size_t)RING * EXPERT), CUDA_SUCCESS);
  CHECK_EQ(gpu->cuda.cuStreamCreateWithPriority(&gpu->compute, 1, 0), CUDA_SUCCESS);
  CHECK_EQ(gpu->cuda.cuStreamCreateWithPriority(&gpu->copies, 1, 0), CUDA_SUCCESS);
  gpu->link.ready = b->ready;
  gpu->link.freed = b->freed;
  for (int i = 0; i < RING; i++) {
    gpu->cuda.cuEventCreate(&b->ready[i], 0);
    gpu->cuda.cuEventCreate(&b->freed[i], 0);
  }
  for (int i = 0; i < PDS_LINK_DEPTH; i++) gpu->cuda.cuEventCreate(&gpu->link.chunk[i], 0);
  gpu->link.demand = (pds_transfers){.at = b->demand, .room = 8};
  gpu->link.spec = (pds_transfers){.at = b->spec, .room = 8};
}

static void close_bench(bench *b) {
  CHECK_OK(pds_gpu_drain(&b->gpu));
  CUcontext ignored;
  b->gpu.cuda.cuCtxPopCurrent(&ignored);
  CHECK_EQ(b->gpu.cuda.cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  pds_cuda_close(&b->gpu.cuda);
}

static pds_transfer of(uint32_t expert, int32_t slot) {
  return (pds_transfer){.expert = expert, .slot = slot};
}

/* Every byte of a slot. */
static bool slot_is(bench *b, int32_t slot, uint32_t expert) {
  const unsigned char *at = (const unsigned char *)(uintptr_t)b->gpu.slots + (size_t)slot * EXPERT;
  CHECK_OK(pds_gpu_drain(&b->gpu));
  for (size_t i = 0; i < EXPERT; i++)
    if (at[i] != expert + 1) return false;
  return true;
}

/* One chunk's time passes, and the next one goes out. */
static void one_chunk(bench *b) {
  CHECK_OK(pds_gpu_wait(&b->gpu, b->gpu.link.chunk[b->gpu.link.oldest]));
  CHECK_OK(pds_link_pump(&b->gpu));
}

static void link_order(const char *settings) {
  bench b;
  open_bench(&b, settings);
  pds_gpu *gpu = &b.gpu;
  pds_link *link = &gpu->link;
  bool arrived;
  CHECK_OK(pds_link_arrived(gpu, 0, &arrived));
  CHECK(arrived); /* nothing was sent: nothing to wait for */

  /* Two chunks are out at most, and what is on demand goes before the rest of a prefetch. */
  pds_transfer t = of(0, 0);
  pds_link_prefetch(gpu, &t);
  CHECK_OK(pds_link_pump(gpu));
  CHECK_EQ(link->in_flight, 2);
  CHECK_EQ(link->spec.at[link->spec.first].issued, 2 * CHUNK);
  t = of(1, 1);
  pds_link_load(gpu, &t);
  if (gpu->is_virtual) {
    one_chunk(&b);
    CHECK_EQ(link->in_flight, 2);
    CHECK_EQ(link->demand.at[link->demand.first].issued, CHUNK);
    CHECK_EQ(link->spec.at[link->spec.first].issued, 2 * CHUNK);
  }
  CHECK_OK(pds_link_flush(gpu));
  CHECK_EQ(link->demand.count, 0);
  CHECK(slot_is(&b, 1, 1));

  /* A prefetch taken back goes on where it was, as a load. */
  pds_transfer back[RING];
  CHECK_OK(pds_link_pump(gpu));
  t = of(2, 2);
  pds_link_prefetch(gpu, &t);
  const uint32_t n = pds_link_recall(gpu, back);
  CHECK_EQ(link->spec.count, 0);
  for (uint32_t i = 0; i < n; i++) pds_link_load(gpu, &back[i]);
  CHECK_OK(pds_link_flush(gpu));
  CHECK(slot_is(&b, 0, 0));
  CHECK(slot_is(&b, 2, 2));

  /* One that is cancelled in the middle leaves the slot to the next one, whole. */
  t = of(3, 0);
  pds_link_prefetch(gpu, &t);
  CHECK_OK(pds_link_pump(gpu));
  CHECK_EQ(pds_link_recall(gpu, back), 1);
  CHECK_EQ(back[0].issued, 2 * CHUNK);
  t = of(1, 0);
  pds_link_load(gpu, &t);
  CHECK_OK(pds_link_flush(gpu));
  CHECK(slot_is(&b, 0, 1));

  /* A slot's second copy waits until what was in it may be launched; prefetches behind it too. */
  t = of(2, 1);
  pds_link_load(gpu, &t);
  t = of(3, 1);
  t.again = true;
  pds_link_load(gpu, &t);
  for (int i = 0; i < 8; i++) {
    CHECK_OK(pds_link_pump(gpu));
    CHECK_OK(pds_gpu_drain(gpu));
  }
  CHECK_EQ(link->demand.count, 1);
  CHECK_EQ(link->demand.at[link->demand.first].issued, 0);
  CHECK(slot_is(&b, 1, 2));
  b.step.launches = true;
  CHECK_OK(pds_link_flush(gpu));
  CHECK(slot_is(&b, 1, 3));

  /* From memory that is not pinned nothing is sent behind other work. */
  gpu->pinned = NULL;
  gpu->cuda.cuEventRecord(link->freed[2], gpu->compute);
  t = of(0, 2);
  pds_link_load(gpu, &t);
  CHECK_OK(pds_link_flush(gpu));
  CHECK(slot_is(&b, 2, 0));
  close_bench(&b);
}

/* --- an engine --- */

typedef struct run {
  pds_engine *engine;
  int32_t first;
  bool ok;
} run;

/* Logits of a step of the fake model: see fake_ops.c. */
static bool right(const float *logits, const int32_t *tokens, int32_t position) {
  float sum[2] = {0};
  for (int32_t p = 0; p <= position; p++)
    for (int layer = 0; layer < 2; layer++)
      sum[layer] += (float)((p + 1) * (tokens[p] + 1 + 1000 * layer));
  const float experts = (float)(tokens[position] % FAKE_EXPERTS + 1) +
                        (float)((tokens[position] + 1) % FAKE_EXPERTS + 1) + 100;
  return logits[0] == (float)tokens[position] && logits[1] == sum[0] && logits[2] == sum[1] &&
         logits[3] == experts;
}

static void *steps(void *argument) {
  run *r = argument;
  pds_session *session;
  const pds_session_options options = {.max_seqs = 1};
  r->ok = pds_session_create(r->engine, &options, &session) == PDS_OK;
  if (!r->ok) return NULL;
  int32_t tokens[FAKE_CONTEXT], position[FAKE_ROWS], seq[FAKE_ROWS] = {0};
  for (int i = 0; i < FAKE_CONTEXT; i++) tokens[i] = (r->first + 7 * i) % FAKE_VOCAB;
  const uint32_t sizes[] = {20, 1, 1, 3, 1, 17, 1, 1, 1, 16};
  uint32_t done = 0;
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes && r->ok; i++) {
    for (uint32_t k = 0; k < sizes[i]; k++) position[k] = (int32_t)(done + k);
    const pds_batch batch = {sizes[i], tokens + done, position, seq, NULL};
    pds_logits logits;
    r->ok = pds_step(session, &batch, &logits) == PDS_OK;
    done += sizes[i];
    r->ok = r->ok && right(logits.data, tokens, (int32_t)done - 1);
  }
  pds_session_destroy(session);
  return NULL;
}

/* Routes that the caller gives reach recompile, the CPU's experts and the GPU's combine. */
static void routed(pds_engine *engine) {
  pds_session *session;
  const pds_session_options options = {.max_seqs = 1};
  if (!CHECK_OK(pds_session_create(engine, &options, &session))) return;
  const uint16_t ids[3][FAKE_LAYERS][FAKE_TOP_K] = {
      {{0, 0}, {1, 3}}, {{0, 0}, {0, 2}}, {{0, 0}, {3, 2}}};
  CHECK_OK(pds_session_set_routes(session, &ids[0][0][0], 3));
  const int32_t seq[FAKE_ROWS] = {0};
  int32_t tokens[FAKE_ROWS] = {0}, position[FAKE_ROWS];
  const uint32_t sizes[] = {20, 1, 1, 3, 1, 17};
  uint32_t done = 0;
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    for (uint32_t k = 0; k < sizes[i]; k++) position[k] = (int32_t)(done + k);
    const pds_batch batch = {sizes[i], tokens, position, seq, NULL};
    pds_logits logits;
    if (!CHECK_OK(pds_step(session, &batch, &logits))) break;
    done += sizes[i];
    const uint16_t *last = ids[(done - 1) % 3][1];
    CHECK_EQ(logits.data[3], 100 + last[0] + 1 + last[1] + 1);
  }
  pds_session_destroy(session);
}

enum { THREADS = 3 };

static void engine(const char *settings, int32_t weights) {
  mock_set(settings);
  const pds_engine_options options = {.plan_dir = test_data_dir,
                                      .isa = "scalar",
                                      .threads = 2,
                                      .weights = weights,
                                      .gpu = 1,
                                      .gpu_driver = mock_path};
  run runs[THREADS] = {{0}};
  pds_engine *engine;
  if (!CHECK_OK(pds_engine_create(&options, &engine))) return;
  runs[0].engine = engine;
  steps(&runs[0]);
  CHECK(!runs[0].ok);
  CHECK(strstr(pds_last_error(), "call pds_engine_set_schedule first") != NULL);

  pds_costs costs = {.io_expert = 10, .cpu_start = 5};
  costs.cpu_expert = (pds_cost_curve){.n = 1, .tokens = {1}, .ns = {100}};
  pds_schedule schedule = {.costs = &costs};
  pds_ledger ledger[FAKE_LAYERS];
  static const char *const policies[] = {"ondemand", "adaptsched", "lru", "static"};
  for (size_t p = 0; p < sizeof policies / sizeof *policies; p++) {
    schedule.policy = policies[p];
    CHECK_OK(pds_engine_set_schedule(engine, &schedule));
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
      runs[i] = (run){.engine = engine, .first = 5 * i};
      if (pthread_create(&threads[i], NULL, steps, &runs[i])) exit(1);
    }
    for (int i = 0; i < THREADS; i++) {
      pthread_join(threads[i], NULL);
      CHECK(runs[i].ok);
    }
    CHECK_OK(pds_engine_get_ledger(engine, ledger));
    CHECK((ledger[1].loads > 0) == (strcmp(policies[p], "static") != 0));
    routed(engine);
  }
  schedule.policy = "fastest";
  CHECK_STATUS(pds_engine_set_schedule(engine, &schedule), PDS_ERR_ARGUMENT,
               "policy 'fastest': expected one of adaptsched,");
  schedule.policy = NULL;
  costs.io_expert = -1;
  CHECK_STATUS(pds_engine_set_schedule(engine, &schedule), PDS_ERR_ARGUMENT, "a time of -1 ns");
  costs.io_expert = 0;
  costs.cpu_expert.n = 2;
  CHECK_STATUS(pds_engine_set_schedule(engine, &schedule), PDS_ERR_ARGUMENT,
               "costs: cpu_expert: knot 1: expected ascending tokens");
  pds_engine_destroy(engine);
  CHECK_EQ(mock_count("device_live"), 0);
  CHECK_EQ(mock_count("pinned_live"), 0);
  CHECK_EQ(mock_count("streams") + mock_count("events") + mock_count("modules"), 0);
}

/* --- measuring --- */

enum { STRIDE = 24576, ROW = 4 * FAKE_HIDDEN, FEW = 3 };

static int64_t ns_of(pds_session *session, pds_measurement asked) {
  static const int32_t position[FAKE_ROWS] = {0, 1, 2}, seq[FAKE_ROWS] = {0};
  int64_t ns = -1;
  asked.layer = 1;
  asked.position = position;
  asked.seq = seq;
  CHECK_OK(pds_measure(session, &asked, &ns));
  return ns;
}

/* What is measured is what the mock was told, to the tick. */
static void measuring(void) {
  mock_set("reset; clock=virtual; kernel.experts.base=1000; kernel.experts.curve=1:500,8:1200; "
           "kernel.shared.base=300; kernel.shared.curve=1:10,40:400; kernel.norm.base=7; "
           "kernel.attention.base=900; kernel.gate.base=50; h2d=1GB/s; h2d_busy=500MB/s; "
           "h2d_start=2000ns; d2h=1GB/s; d2h_start=100ns; host.cpu.experts.base=10ms");
  pds_engine_options options = {.plan_dir = test_data_dir,
                                .isa = "scalar",
                                .threads = 2,
                                .weights = PDS_WEIGHTS_COPY,
                                .gpu = 1,
                                .gpu_driver = mock_path};
  const pds_session_options one = {.max_seqs = 1};
  const uint32_t expert[] = {0, 2}, tokens[] = {1, 8}, load[] = {3, 0, 2}, odd[] = {4};
  pds_engine *engine;
  pds_session *session;
  if (!CHECK_OK(pds_engine_create(&options, &engine))) return;
  if (!CHECK_OK(pds_session_create(engine, &one, &session))) return;
  pds_measurement asked = {.n = 2, .expert = expert, .tokens = tokens, .load = load};
  for (int again = 0; again < 2; again++) {
    asked.what = PDS_MEASURE_GPU_EXPERTS;
    CHECK_EQ(ns_of(session, asked), 1000 + 500 + 1200);
    asked.what = PDS_MEASURE_GPU_SHARED;
    asked.rows = 40;
    CHECK_EQ(ns_of(session, asked), 700);
    asked.what = PDS_MEASURE_GPU_ATTENTION;
    asked.rows = FEW; /* routes, and rows for the CPU's experts and for the prediction */
    CHECK_EQ(ns_of(session, asked), 7 + 900 + 7 + 50 + 100 + FEW * (2 * 4 * FAKE_TOP_K + 2 * ROW));
    for (asked.n_loads = 1; asked.n_loads <= 3; asked.n_loads++) {
      asked.what = PDS_MEASURE_LINK;
      CHECK_EQ(ns_of(session, asked), 2000 + asked.n_loads * STRIDE);
      asked.what = PDS_MEASURE_LINK_BUSY;
      CHECK_EQ(ns_of(session, asked), 2000 + asked.n_loads * 2 * STRIDE);
    }
    asked.what = PDS_MEASURE_LINK_START;
    CHECK_EQ(ns_of(session, asked), 2000 + 4096);
    asked.what = PDS_MEASURE_EXPERTS_BUSY; /* the mock's host takes as long beside its link */
    for (asked.n_loads = 0; asked.n_loads <= 3; asked.n_loads += 3)
      CHECK_EQ(ns_of(session, asked), 10000000);
    asked.n_loads = 3;
    asked.what = PDS_MEASURE_CONTEXT;
    asked.rows = FEW;
    if (again) CHECK_EQ(ns_of(session, asked), 0);
  }
  int64_t ns = 7;
  asked.what = PDS_MEASURE_LINK;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "layer 0 has no experts");
  asked.layer = 1;
  asked.n_loads = 0;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "0 loads, expected 1 to 4");
  asked.n_loads = 1;
  asked.load = odd;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "load of expert 4, expected 0");
  asked.what = PDS_MEASURE_EXPERTS;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "create the engine without");
  asked.what = PDS_MEASURE_EXPERTS_BUSY;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "load of expert 4, expected 0");
  asked.what = 12;
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "what is 12, expected 0 to 11");
  CHECK_EQ(ns, 7);
  pds_session_destroy(session);

  /* Steps behind it are what they were: slots that were written are empty. */
  pds_costs costs = {.io_expert = 10, .cpu_start = 5};
  costs.cpu_expert = (pds_cost_curve){.n = 1, .tokens = {1}, .ns = {100}};
  const pds_schedule schedule = {.costs = &costs};
  CHECK_OK(pds_engine_set_schedule(engine, &schedule));
  run r = {.engine = engine};
  steps(&r);
  CHECK(r.ok);

  /* A device that fails while it is measured is a fault of the engine's. */
  CHECK_OK(pds_session_create(engine, &one, &session));
  mock_set("fail_copy=1");
  asked = (pds_measurement){.what = PDS_MEASURE_LINK, .layer = 1, .n_loads = 3, .load = load};
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_GPU, "ECC");
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_GPU, "the GPU failed before");
  pds_session_destroy(session);
  pds_engine_destroy(engine);
  CHECK_EQ(mock_count("streams") + mock_count("events") + mock_count("modules"), 0);

  options.gpu = 0;
  if (!CHECK_OK(pds_engine_create(&options, &engine))) return;
  CHECK_OK(pds_session_create(engine, NULL, &session));
  CHECK_STATUS(pds_measure(session, &asked, &ns), PDS_ERR_ARGUMENT, "create the engine with one");
  pds_session_destroy(session);
  pds_engine_destroy(engine);
}

/* While workers compute and the pool's watch sends; from memory that is not pinned, too. */
static void measuring_on_a_wall_clock(int32_t weights) {
  mock_set("reset; clock=wall; h2d=100MB/s");
  const pds_engine_options options = {.plan_dir = test_data_dir,
                                      .isa = "scalar",
                                      .threads = 2,
                                      .weights = weights,
                                      .gpu = 1,
                                      .gpu_driver = mock_path};
  const uint32_t expert[] = {1, 3}, tokens[] = {1, 1}, load[] = {3, 0, 2};
  pds_engine *engine;
  pds_session *session;
  if (!CHECK_OK(pds_engine_create(&options, &engine))) return;
  CHECK_OK(pds_session_create(engine, NULL, &session));
  pds_measurement asked = {
      .n = 2, .expert = expert, .tokens = tokens, .n_loads = 3, .load = load, .rows = FEW};
  for (asked.what = PDS_MEASURE_GPU_EXPERTS; asked.what <= PDS_MEASURE_EXPERTS_BUSY; asked.what++) {
    const bool loads = asked.what == PDS_MEASURE_LINK || asked.what == PDS_MEASURE_LINK_BUSY;
    CHECK(ns_of(session, asked) > (loads ? 3 * 10 * STRIDE : 0));
  }
  pds_session_destroy(session);
  pds_engine_destroy(engine);
}

void case_gpu(void) {
  snprintf(mock_path, sizeof mock_path, "%s/libcuda-mock.so", test_data_dir);
  residency();
  for (uint32_t policy = 0; policy < PDS_POLICIES; policy++) large_ring(policy);
  link_order("reset; clock=virtual; h2d=1GB/s");
  link_order("reset; clock=virtual; h2d=1GB/s; late_events=3ms");
  link_order("reset; clock=wall; h2d=1GB/s");
  engine("reset; clock=virtual; kernel.*.base=2us; h2d=1GB/s", PDS_WEIGHTS_COPY);
  engine("reset; clock=virtual; kernel.*.base=2us; h2d=1GB/s; kernels=start", PDS_WEIGHTS_MMAP);
  engine("reset; clock=wall; kernel.*.base=2us; h2d=1GB/s", PDS_WEIGHTS_COPY);
  engine("reset; clock=wall; h2d=20GB/s", PDS_WEIGHTS_MMAP);
  measuring();
  measuring_on_a_wall_clock(PDS_WEIGHTS_COPY);
  measuring_on_a_wall_clock(PDS_WEIGHTS_MMAP);
  mock_set("reset");
}
