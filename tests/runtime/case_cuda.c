/* case_cuda.c: the driver's table of functions, and the mock driver under threads and faults. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "cuda/driver.h"
#include "test.h"

static char mock_path[4096];

/* --- opening --- */

static void opening(void) {
  pds_cuda cuda = {0};
  CHECK_STATUS(pds_cuda_open("/nowhere/libcuda.so.1", &cuda), PDS_ERR_DRIVER,
               "/nowhere/libcuda.so.1: the CUDA driver cannot be loaded");
  CHECK(strstr(pds_last_error(), "PDSCOPE_CUDA_DRIVER, or compile the plan for the CPU") != NULL);
  CHECK_STATUS(pds_cuda_open("libm.so.6", &cuda), PDS_ERR_DRIVER,
               "libm.so.6: has no function cuIn");
  CHECK(strstr(pds_last_error(), "CUDA 12.0; update NVIDIA's driver") != NULL);
  CHECK(cuda.library == NULL && cuda.cuInit == NULL);
  CHECK_OK(pds_cuda_open(mock_path, &cuda));
  CHECK_EQ(cuda.version, 12040);
  CHECK_OK(pds_cuda_check(&cuda, CUDA_SUCCESS, "nothing"));
  CUdeviceptr address;
  CUresult result = cuda.cuMemAlloc(&address, 8);
  CHECK_STATUS(pds_cuda_check(&cuda, result, "KV cache"), PDS_ERR_GPU,
               "KV cache: CUDA_ERROR_INVALID_CONTEXT (201): invalid device context: cuMemAlloc: no "
               "context is current");
  CHECK_STATUS(pds_cuda_check(&cuda, CUDA_ERROR_OUT_OF_MEMORY, "KV cache"), PDS_ERR_MEMORY,
               "out of memory");
  CHECK_STATUS(pds_cuda_check(&cuda, 12345, "KV cache"), PDS_ERR_GPU, "CUDA error (12345)");
  CHECK_EQ(cuda.pds_mock_configure("reset; driver=11080"), 0);
  pds_cuda other;
  CHECK_STATUS(pds_cuda_open(mock_path, &other), PDS_ERR_DRIVER, "is for CUDA 11.8, expected 12.0");
  CHECK(other.library == NULL);
  CHECK_EQ(cuda.pds_mock_configure("reset; devices=0"), 0);
  CHECK_STATUS(pds_cuda_open(mock_path, &other), PDS_ERR_DRIVER,
               "cannot be initialised: CUDA_ERROR_NO_DEVICE (100)");
  CHECK_EQ(cuda.pds_mock_configure("reset"), 0);
  pds_cuda_close(&cuda);
  pds_cuda_close(&cuda);
  CHECK(cuda.library == NULL);
}

/* --- a pipeline: copies in, kernels, copies out, over three streams --- */

typedef struct params {
  pds_twin_work work;
  uint32_t *to;
  uint32_t value, count;
} params;

static void mix(void *argument) {
  const params *p = argument;
  for (uint32_t i = 0; i < p->count; i++) p->to[i] = p->to[i] * 3 + p->value;
}

static const struct {
  char magic[8];
  uint32_t n;
  pds_twin_entry entries[1];
} module = {PDS_TWIN_MAGIC, 1, {{.name = "mix", .fn = mix}}};

enum { WORDS = 300, ROUNDS = 12 };

#define TRY(call)                                                                                  \
  do {                                                                                             \
    CUresult try_ = (call);                                                                        \
    if (try_ != CUDA_SUCCESS) return try_;                                                         \
  } while (0)

typedef struct pipeline {
  const pds_cuda *cuda;
  CUcontext context;
  CUmodule module;
  uint32_t seed;
  CUresult result;
} pipeline;

/* What the words must be after each round. */
static uint32_t expected(uint32_t seed, uint32_t rounds) {
  uint32_t value = seed;
  for (uint32_t i = 0; i < rounds; i++) value = value * 3 + i;
  return value;
}

static CUresult run_pipeline(const pipeline *p) {
  const pds_cuda *cuda = p->cuda;
  CUstream in, work, out;
  CUevent copied, mixed, back;
  CUdeviceptr device;
  void *host_memory;
  CUfunction function;
  TRY(cuda->cuStreamCreateWithPriority(&in, CU_STREAM_NON_BLOCKING, 0));
  TRY(cuda->cuStreamCreateWithPriority(&work, CU_STREAM_NON_BLOCKING, -1));
  TRY(cuda->cuStreamCreateWithPriority(&out, CU_STREAM_NON_BLOCKING, 0));
  TRY(cuda->cuEventCreate(&copied, CU_EVENT_DISABLE_TIMING));
  TRY(cuda->cuEventCreate(&mixed, CU_EVENT_DISABLE_TIMING));
  TRY(cuda->cuEventCreate(&back, CU_EVENT_DISABLE_TIMING));
  TRY(cuda->cuMemAlloc(&device, WORDS * 4));
  TRY(cuda->cuMemHostAlloc(&host_memory, WORDS * 4, 0));
  TRY(cuda->cuModuleGetFunction(&function, p->module, "mix"));
  uint32_t *host = host_memory;
  for (uint32_t i = 0; i < WORDS; i++) host[i] = p->seed;
  for (uint32_t round = 0; round < ROUNDS; round++) {
    TRY(cuda->cuStreamWaitEvent(in, back, 0));
    TRY(cuda->cuMemcpyHtoDAsync(device, host, WORDS * 4, in));
    TRY(cuda->cuEventRecord(copied, in));
    TRY(cuda->cuStreamWaitEvent(work, copied, 0));
    uint32_t tokens[2] = {round, 2};
    params values = {
        {sizeof values, 2, tokens, round}, (uint32_t *)(uintptr_t)device, round, WORDS};
    void *pointers[] = {&values};
    TRY(cuda->cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, work, pointers, NULL));
    TRY(cuda->cuEventRecord(mixed, work));
    TRY(cuda->cuStreamWaitEvent(out, mixed, 0));
    TRY(cuda->cuMemcpyDtoHAsync(host, device, WORDS * 4, out));
    TRY(cuda->cuEventRecord(back, out));
    CUresult query = cuda->cuEventQuery(back);
    if (query != CUDA_ERROR_NOT_READY) TRY(query);
    if (round % 4 == 3) {
      TRY(cuda->cuEventSynchronize(back));
      for (uint32_t i = 0; i < WORDS; i++)
        if (host[i] != expected(p->seed, round + 1)) {
          CHECK_EQ(host[i], expected(p->seed, round + 1));
          break;
        }
    }
    if (round == 5) TRY(cuda->cuStreamDestroy(work)); /* with work in it */
    if (round == 5) TRY(cuda->cuStreamCreateWithPriority(&work, CU_STREAM_DEFAULT, 0));
  }
  TRY(cuda->cuMemFree(device));
  TRY(cuda->cuMemFreeHost(host));
  TRY(cuda->cuEventDestroy(copied));
  TRY(cuda->cuEventDestroy(mixed));
  TRY(cuda->cuEventDestroy(back));
  TRY(cuda->cuStreamDestroy(in));
  TRY(cuda->cuStreamDestroy(work));
  return cuda->cuStreamDestroy(out);
}

static void *pipeline_thread(void *argument) {
  pipeline *p = argument;
  p->result = p->cuda->cuCtxPushCurrent(p->context);
  if (p->result == CUDA_SUCCESS) p->result = run_pipeline(p);
  CUcontext popped;
  p->cuda->cuCtxPopCurrent(&popped);
  return NULL;
}

enum { THREADS = 3 };

/* Runs THREADS pipelines at once; the first error of any, or success. Nothing must be left. */
static CUresult run_pipelines(const pds_cuda *cuda, const char *settings, uint32_t threads) {
  CUcontext context;
  CUmodule loaded;
  CHECK_EQ(cuda->pds_mock_configure(settings), 0);
  CHECK_EQ(cuda->cuInit(0), CUDA_SUCCESS);
  CHECK_EQ(cuda->cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  CHECK_EQ(cuda->cuCtxSetCurrent(context), CUDA_SUCCESS);
  pipeline p[THREADS];
  pthread_t ids[THREADS];
  CUresult result = cuda->cuModuleLoadData(&loaded, &module);
  for (uint32_t i = 0; i < threads && result == CUDA_SUCCESS; i++)
    p[i] = (pipeline){cuda, context, loaded, 100 + i, CUDA_SUCCESS};
  if (result == CUDA_SUCCESS) {
    for (uint32_t i = 0; i < threads; i++)
      CHECK_EQ(pthread_create(&ids[i], NULL, pipeline_thread, &p[i]), 0);
    for (uint32_t i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    for (uint32_t i = 0; i < threads && result == CUDA_SUCCESS; i++) result = p[i].result;
  }
  CHECK_EQ(cuda->cuCtxSetCurrent(NULL), CUDA_SUCCESS);
  CHECK_EQ(cuda->cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
  static const char *const gone[] = {"device_live", "pinned_live", "streams", "events", "modules"};
  for (size_t i = 0; i < sizeof gone / sizeof *gone; i++)
    CHECK_EQ(cuda->pds_mock_counter(gone[i]), 0);
  return result;
}

static void pipelines(const pds_cuda *cuda) {
  CHECK_EQ(run_pipelines(cuda, "reset; clock=virtual; kernel.mix.curve=1:50,4:90", 1),
           CUDA_SUCCESS);
  CHECK_EQ(run_pipelines(cuda, "reset; clock=virtual; enqueue=7", THREADS), CUDA_SUCCESS);
  CHECK_EQ(run_pipelines(cuda, "reset; clock=wall", THREADS), CUDA_SUCCESS);
  CHECK_EQ(run_pipelines(cuda, "reset; clock=wall; h2d_latency=100us; late_events=10us", THREADS),
           CUDA_SUCCESS);
}

/* Each fault at every place of one pipeline, with both clocks: an error that names it, or, past its
 * last place, success; never a hang, never a wrong word, and nothing is left behind. */
static void faults(const pds_cuda *cuda) {
  static const struct {
    const char *name;
    CUresult result;
    int step;
  } kinds[] = {
      {"fail_copy", CUDA_ERROR_ECC_UNCORRECTABLE, 1},
      {"refuse_copy", CUDA_ERROR_OPERATING_SYSTEM, 1},
      {"fail_launch", CUDA_ERROR_LAUNCH_FAILED, 1},
      {"refuse_launch", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 1},
      {"fail_alloc", CUDA_ERROR_OUT_OF_MEMORY, 1},
      {"fail_pin", CUDA_ERROR_OUT_OF_MEMORY, 1},
      {"lose_context", CUDA_ERROR_UNKNOWN, 7},
  };
  for (int wall = 0; wall < 2; wall++)
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
      CUresult result = kinds[i].result;
      int k = 1;
      for (; k < 1000 && result == kinds[i].result; k += kinds[i].step) {
        char settings[128];
        snprintf(settings, sizeof settings, "reset; clock=%s; h2d_start=0; d2h_start=0; %s=%d",
                 wall ? "wall" : "virtual", kinds[i].name, k);
        result = run_pipelines(cuda, settings, 1);
      }
      CHECK_EQ(result, CUDA_SUCCESS);
      CHECK(k > kinds[i].step + 1);
    }
}

void case_cuda(void) {
  snprintf(mock_path, sizeof mock_path, "%s/libcuda-mock.so", test_data_dir);
  opening();
  pds_cuda cuda;
  if (!CHECK_OK(pds_cuda_open(mock_path, &cuda))) return;
  pipelines(&cuda);
  faults(&cuda);
  CHECK_EQ(cuda.pds_mock_configure("reset"), 0);
  pds_cuda_close(&cuda);
}
