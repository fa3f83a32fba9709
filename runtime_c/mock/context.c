/* context.c: initialisation, the one device and its primary context, and how every call begins and
 * ends. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock.h"

mock_state mock = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

struct CUctx_st {
  char unused;
};
static struct CUctx_st the_context;

/* What each thread has of its own. A pthread key, since the thread sanitizer takes the loader's
 * release of a loaded library's _Thread_local variables for a race. */
enum { STACK = 16 };
typedef struct thread_state {
  uint64_t generation;
  uint32_t n;
  CUcontext contexts[STACK];
  const char *call;
  char last_text[LOST_BYTES + 64];
} thread_state;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;

static void make_key(void) {
  if (pthread_key_create(&key, free) != 0) abort();
}

static thread_state *here(void) {
  pthread_once(&once, make_key);
  thread_state *state = pthread_getspecific(key);
  if (!state) {
    state = mock_alloc(sizeof *state);
    pthread_setspecific(key, state);
  }
  return state;
}

/* --- calls --- */

/* The settings of the environment count from the first call on. */
static void first_call(void) {
  bool reset;
  mock.epoch = 0;
  mock.epoch = mock_wall_now();
  mock.generation = 1;
  mock_default_settings(&mock.set);
  const char *text = getenv("PDS_MOCK_CUDA");
  mock.settings_bad = text && !mock_parse(&mock.set, text, &reset);
}

void mock_enter_any(const char *call) {
  thread_state *thread = here();
  pthread_mutex_lock(&mock.lock);
  thread->call = call;
  thread->last_text[0] = 0;
  if (mock.generation == 0) first_call();
  if (thread->generation != mock.generation) {
    thread->generation = mock.generation;
    thread->n = 0;
  }
}

CUresult mock_enter_driver(const char *call) {
  mock_enter_any(call);
  return mock.initialised ? CUDA_SUCCESS : mock_error(CUDA_ERROR_NOT_INITIALIZED, "before cuInit");
}

CUresult mock_enter(const char *call) {
  CUresult result = mock_enter_driver(call);
  if (result != CUDA_SUCCESS) return result;
  if (here()->n == 0)
    return mock_error(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
  if (mock.retained == 0) return mock_error(CUDA_ERROR_INVALID_CONTEXT, "the context was released");
  mock.count.calls++;
  if (mock_strikes(&mock.set.lose_context)) mock_lose(CUDA_ERROR_UNKNOWN, "fault lose_context");
  return mock_if_lost();
}

/* Nothing runs on a device whose context is lost: who is told so may free what its work used. */
CUresult mock_if_lost(void) {
  if (mock.lost == CUDA_SUCCESS) return CUDA_SUCCESS;
  while (mock.at_work > 0) pthread_cond_wait(&mock.changed, &mock.lock);
  return mock_error(mock.lost, "the context is lost: %s", mock.lost_why);
}

CUresult mock_leave(CUresult result) {
  pthread_mutex_unlock(&mock.lock);
  return result;
}

CUresult mock_error(CUresult result, const char *fmt, ...) {
  thread_state *thread = here();
  int n = snprintf(thread->last_text, sizeof thread->last_text, "%s: ", thread->call);
  va_list args;
  va_start(args, fmt);
  vsnprintf(thread->last_text + n, sizeof thread->last_text - (size_t)n, fmt, args);
  va_end(args);
  return result;
}

const char *pds_mock_last(void) {
  return here()->last_text;
}

void mock_lose(CUresult result, const char *why) {
  if (mock.lost != CUDA_SUCCESS) return;
  mock.lost = result;
  snprintf(mock.lost_why, sizeof mock.lost_why, "%s", why);
  if (mock.set.wall) { /* the streams' threads drop what they have */
    pthread_cond_broadcast(&mock.changed);
    return;
  }
  for (CUstream s = mock.streams, next; s; s = next) {
    next = s->next;
    while (s->head)
      if (mock_pop(s)) break;
  }
  for (int d = 0; d < DIRECTIONS; d++) mock.engines[d].current = NULL;
}

/* --- the driver and its device --- */

CUresult cuInit(unsigned flags) {
  mock_enter_any("cuInit");
  if (flags != 0) return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "flags must be 0"));
  if (mock.settings_bad) {
    bool reset;
    settings scratch;
    mock_default_settings(&scratch);
    mock_parse(&scratch, getenv("PDS_MOCK_CUDA"), &reset); /* for its text */
    mock_free_settings(&scratch);
    return mock_leave(CUDA_ERROR_INVALID_VALUE);
  }
  if (mock.set.devices == 0)
    return mock_leave(mock_error(CUDA_ERROR_NO_DEVICE, "the mock is set to devices=0"));
  mock.initialised = true;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *out_version) {
  mock_enter_any("cuDriverGetVersion");
  if (!out_version) return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "no place for it"));
  *out_version = (int)mock.set.driver;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *out_count) {
  CUresult result = mock_enter_driver("cuDeviceGetCount");
  if (result == CUDA_SUCCESS && !out_count)
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "no place for it");
  if (result == CUDA_SUCCESS) *out_count = 1;
  return mock_leave(result);
}

CUresult cuDeviceGet(CUdevice *out_device, int ordinal) {
  CUresult result = mock_enter_driver("cuDeviceGet");
  if (result == CUDA_SUCCESS && !out_device)
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "no place for it");
  if (result == CUDA_SUCCESS && ordinal != 0)
    result = mock_error(CUDA_ERROR_INVALID_DEVICE, "device %d of 1", ordinal);
  if (result == CUDA_SUCCESS) *out_device = 0;
  return mock_leave(result);
}

static CUresult enter_device(const char *call, const void *out, CUdevice device) {
  CUresult result = mock_enter_driver(call);
  if (result == CUDA_SUCCESS && device != 0)
    result = mock_error(CUDA_ERROR_INVALID_DEVICE, "device %d of 1", device);
  if (result == CUDA_SUCCESS && !out)
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "no place for it");
  return result;
}

CUresult cuDeviceGetName(char *out_name, int bytes, CUdevice device) {
  CUresult result = enter_device("cuDeviceGetName", out_name, device);
  if (result == CUDA_SUCCESS && bytes <= 0)
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "no bytes for it");
  if (result == CUDA_SUCCESS) snprintf(out_name, (size_t)bytes, "PDScope mock GPU");
  return mock_leave(result);
}

CUresult cuDeviceGetAttribute(int *out_value, CUdevice_attribute attribute, CUdevice device) {
  CUresult result = enter_device("cuDeviceGetAttribute", out_value, device);
  if (result != CUDA_SUCCESS) return mock_leave(result);
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *out_value = 1024; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: *out_value = SHARED_MOST; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *out_value = SHARED_OPTIN; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *out_value = (int)mock.set.sms; break;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *out_value = 40 << 20; break;
  case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: *out_value = DIRECTIONS; break;
  case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
  case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: *out_value = 1; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *out_value = (int)mock.set.compute / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *out_value = (int)mock.set.compute % 10; break;
  default: result = mock_error(CUDA_ERROR_INVALID_VALUE, "unknown attribute %d", attribute);
  }
  return mock_leave(result);
}

CUresult cuDeviceTotalMem_v2(size_t *out_bytes, CUdevice device) {
  CUresult result = enter_device("cuDeviceTotalMem", out_bytes, device);
  if (result == CUDA_SUCCESS) *out_bytes = (size_t)mock.set.memory;
  return mock_leave(result);
}

/* --- the primary context --- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *out_context, CUdevice device) {
  CUresult result = enter_device("cuDevicePrimaryCtxRetain", out_context, device);
  while (mock.destroying) pthread_cond_wait(&mock.changed, &mock.lock);
  if (result == CUDA_SUCCESS && mock.retained == 0) {
    if (mock.set.context > mock.set.memory)
      result = mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the context alone exceeds the memory");
    else if (!(mock.null_stream = mock_new_stream(true)))
      result = mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the system has no memory or thread left");
  }
  if (result == CUDA_SUCCESS) {
    mock.retained++;
    *out_context = &the_context;
  }
  return mock_leave(result);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  CUresult result = enter_device("cuDevicePrimaryCtxRelease", "", device);
  if (result == CUDA_SUCCESS && mock.retained == 0)
    result = mock_error(CUDA_ERROR_INVALID_CONTEXT, "the primary context is not retained");
  if (result == CUDA_SUCCESS && --mock.retained == 0) mock_destroy_context();
  return mock_leave(result);
}

void mock_destroy_context(void) {
  mock.destroying = true;
  if (mock.stopped) mock_lose(CUDA_ERROR_UNKNOWN, "fault stop_record");
  mock_wait_all();
  if (mock.set.wall) {
    for (CUstream s = mock.streams; s; s = s->next) s->live = false;
    pthread_cond_broadcast(&mock.changed);
    while (mock.threads > 0) pthread_cond_wait(&mock.changed, &mock.lock);
  }
  while (mock.streams) mock_free_stream(mock.streams);
  mock.null_stream = NULL;
  for (uint32_t i = 0; i < 1u << EVENT_BITS; i++) {
    for (CUevent e = mock.events[i], next; e; e = next) {
      next = e->next;
      if (e->record) mock_drop(e->record);
      free(e);
    }
    mock.events[i] = NULL;
  }
  while (mock.modules) mock_free_module(mock.modules);
  mock_free_blocks();
  memset(mock.engines, 0, sizeof mock.engines);
  mock.count.streams = mock.count.events = mock.count.modules = 0;
  mock.lost = CUDA_SUCCESS;
  mock.stopped = mock.destroying = false;
  pthread_cond_broadcast(&mock.changed);
}

static bool good_context(CUcontext context) {
  return context == &the_context && mock.retained > 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  CUresult result = mock_enter_driver("cuCtxPushCurrent");
  if (result == CUDA_SUCCESS && !good_context(context))
    result = mock_error(CUDA_ERROR_INVALID_CONTEXT, "no such context");
  thread_state *thread = here();
  if (result == CUDA_SUCCESS && thread->n == STACK)
    result = mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the mock's stack holds %d contexts", STACK);
  if (result == CUDA_SUCCESS) thread->contexts[thread->n++] = context;
  return mock_leave(result);
}

CUresult cuCtxPopCurrent_v2(CUcontext *out_context) {
  CUresult result = mock_enter_driver("cuCtxPopCurrent");
  thread_state *thread = here();
  if (result == CUDA_SUCCESS && thread->n == 0)
    result = mock_error(CUDA_ERROR_INVALID_CONTEXT, "no context is current in this thread");
  if (result == CUDA_SUCCESS) {
    CUcontext top = thread->contexts[--thread->n];
    if (out_context) *out_context = top;
  }
  return mock_leave(result);
}

CUresult cuCtxSetCurrent(CUcontext context) {
  CUresult result = mock_enter_driver("cuCtxSetCurrent");
  if (result == CUDA_SUCCESS && context && !good_context(context))
    result = mock_error(CUDA_ERROR_INVALID_CONTEXT, "no such context");
  if (result == CUDA_SUCCESS) {
    thread_state *thread = here();
    if (thread->n > 0) thread->n--;
    if (context) thread->contexts[thread->n++] = context;
  }
  return mock_leave(result);
}

/* --- names of results --- */

static CUresult describe(CUresult result, bool as_text, const char **out) {
  if (!out) return CUDA_ERROR_INVALID_VALUE;
  *out = NULL;
  switch (result) {
#define NAME(value, name, text)                                                                    \
  case value: *out = as_text ? text : #name; return CUDA_SUCCESS;
    PDS_CUDA_RESULTS(NAME)
#undef NAME
  default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult cuGetErrorName(CUresult result, const char **out_name) {
  return describe(result, false, out_name);
}

CUresult cuGetErrorString(CUresult result, const char **out_text) {
  return describe(result, true, out_text);
}
