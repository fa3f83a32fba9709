/* driver.h: the CUDA driver as a table of functions, resolved at run time: nothing of CUDA is needed
 * to build a plan, and a machine without a GPU runs the CPU plan. The declarations are our own, of
 * what is used here alone, named and valued as CUDA's driver API documents them (tests compare them
 * with cuda.h where one is installed). The mock driver (mock/) exports the same symbols. */
#ifndef PDS_CUDA_DRIVER_H
#define PDS_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

/* --- types and constants --- */

typedef int CUresult;
typedef int CUdevice;
typedef int CUdevice_attribute;
typedef int CUfunction_attribute;
typedef int CUstreamCaptureMode;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;

/* X(value, name, text): the results that are told apart or shown by name. */
#define PDS_CUDA_RESULTS(X)                                                                        \
  X(0, CUDA_SUCCESS, "no error")                                                                   \
  X(1, CUDA_ERROR_INVALID_VALUE, "invalid argument")                                               \
  X(2, CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                                  \
  X(3, CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                         \
  X(34, CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library")                                  \
  X(46, CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable")        \
  X(100, CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                               \
  X(101, CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                      \
  X(200, CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                               \
  X(201, CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                     \
  X(209, CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution on the device") \
  X(214, CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered")                      \
  X(222, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,                                                       \
    "the provided PTX was compiled with an unsupported toolchain.")                                \
  X(304, CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS")      \
  X(400, CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                     \
  X(500, CUDA_ERROR_NOT_FOUND, "named symbol not found")                                           \
  X(600, CUDA_ERROR_NOT_READY, "device not ready")                                                 \
  X(700, CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")                   \
  X(701, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "too many resources requested for launch")            \
  X(712, CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,                                                \
    "part or all of the requested memory range is already mapped")                                 \
  X(713, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,                                                    \
    "pointer does not correspond to a registered memory region")                                   \
  X(719, CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                                   \
  X(801, CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                      \
  X(803, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,                                                        \
    "system has unsupported display driver / cuda driver combination")                             \
  X(999, CUDA_ERROR_UNKNOWN, "unknown error")

enum {
#define PDS_CUDA_RESULT(value, name, text) name = value,
  PDS_CUDA_RESULTS(PDS_CUDA_RESULT)
#undef PDS_CUDA_RESULT
};

enum {
  CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
  CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
};
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2 };
typedef struct CUDA_MEMCPY2D {
  size_t srcXInBytes, srcY;
  unsigned srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray;
  size_t srcPitch;
  size_t dstXInBytes, dstY;
  unsigned dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray;
  size_t dstPitch, WidthInBytes, Height;
} CUDA_MEMCPY2D;
enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_DEFAULT = 0, CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };
enum {
  CU_MEMHOSTALLOC_PORTABLE = 1,
  CU_MEMHOSTALLOC_DEVICEMAP = 2,
  CU_MEMHOSTALLOC_WRITECOMBINED = 4
};
enum {
  CU_MEMHOSTREGISTER_PORTABLE = 1,
  CU_MEMHOSTREGISTER_DEVICEMAP = 2,
  CU_MEMHOSTREGISTER_READ_ONLY = 8
};

/* --- functions --- */

/* X(name, symbol, parameters): every function; the symbol carries the version of its interface. */
#define PDS_CUDA_FUNCTIONS(X)                                                                      \
  X(cuInit, cuInit, (unsigned flags))                                                              \
  X(cuDriverGetVersion, cuDriverGetVersion, (int *out_version))                                    \
  X(cuDeviceGetCount, cuDeviceGetCount, (int *out_count))                                          \
  X(cuDeviceGet, cuDeviceGet, (CUdevice * out_device, int ordinal))                                \
  X(cuDeviceGetName, cuDeviceGetName, (char *out_name, int bytes, CUdevice device))                \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute,                                                    \
    (int *out_value, CUdevice_attribute attribute, CUdevice device))                               \
  X(cuDeviceTotalMem, cuDeviceTotalMem_v2, (size_t *out_bytes, CUdevice device))                   \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain,                                            \
    (CUcontext * out_context, CUdevice device))                                                    \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                    \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                    \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * out_context))                                \
  X(cuCtxSetCurrent, cuCtxSetCurrent, (CUcontext context))                                         \
  X(cuMemGetInfo, cuMemGetInfo_v2, (size_t *out_free, size_t *out_total))                          \
  X(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * out_address, size_t bytes))                          \
  X(cuMemFree, cuMemFree_v2, (CUdeviceptr address))                                                \
  X(cuMemHostAlloc, cuMemHostAlloc, (void **out_address, size_t bytes, unsigned flags))            \
  X(cuMemFreeHost, cuMemFreeHost, (void *address))                                                 \
  X(cuMemHostRegister, cuMemHostRegister_v2, (void *address, size_t bytes, unsigned flags))        \
  X(cuMemHostUnregister, cuMemHostUnregister, (void *address))                                     \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                       \
    (CUdeviceptr to, const void *from, size_t bytes, CUstream stream))                             \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                       \
    (void *to, CUdeviceptr from, size_t bytes, CUstream stream))                                   \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                       \
    (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                             \
  X(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream))             \
  X(cuMemsetD8Async, cuMemsetD8Async,                                                              \
    (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                          \
  X(cuStreamCreateWithPriority, cuStreamCreateWithPriority,                                        \
    (CUstream * out_stream, unsigned flags, int priority))                                         \
  X(cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                        \
  X(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                                   \
  X(cuStreamQuery, cuStreamQuery, (CUstream stream))                                               \
  X(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))        \
  X(cuEventCreate, cuEventCreate, (CUevent * out_event, unsigned flags))                           \
  X(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                            \
  X(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                                \
  X(cuEventQuery, cuEventQuery, (CUevent event))                                                   \
  X(cuEventSynchronize, cuEventSynchronize, (CUevent event))                                       \
  X(cuEventElapsedTime, cuEventElapsedTime, (float *out_ms, CUevent start, CUevent end))           \
  X(cuModuleLoadData, cuModuleLoadData, (CUmodule * out_module, const void *image))                \
  X(cuModuleUnload, cuModuleUnload, (CUmodule module))                                             \
  X(cuModuleGetFunction, cuModuleGetFunction,                                                      \
    (CUfunction * out_function, CUmodule module, const char *name))                                \
  X(cuFuncSetAttribute, cuFuncSetAttribute,                                                        \
    (CUfunction function, CUfunction_attribute attribute, int value))                              \
  X(cuStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode))    \
  X(cuStreamEndCapture, cuStreamEndCapture, (CUstream stream, CUgraph * out_graph))                \
  X(cuGraphInstantiate, cuGraphInstantiateWithFlags,                                               \
    (CUgraphExec * out_exec, CUgraph graph, unsigned long long flags))                             \
  X(cuGraphLaunch, cuGraphLaunch, (CUgraphExec exec, CUstream stream))                             \
  X(cuGraphExecDestroy, cuGraphExecDestroy, (CUgraphExec exec))                                    \
  X(cuGraphDestroy, cuGraphDestroy, (CUgraph graph))                                               \
  X(cuLaunchKernel, cuLaunchKernel,                                                                \
    (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,    \
     void **extra))                                                                                \
  X(cuGetErrorName, cuGetErrorName, (CUresult result, const char **out_name))                      \
  X(cuGetErrorString, cuGetErrorString, (CUresult result, const char **out_text))

/* X(result type, name, parameters): what only the mock driver has; NULL with any other.
 *   configure   settings, "key=value; key=value" (docs/mock-driver.md); 0, or -1 and pds_mock_last
 *   now         the mock's clock, ns
 *   host_begin  virtual clock: the host is busy from now for what `name` costs with these token counts;
 *               until when. It is for the caller to let that time pass
 *   next        virtual clock: when the next piece of work on any stream ends, or -1
 *   advance     virtual clock: lets time pass until then; a time that has passed changes nothing
 *   counter     a counter by name; -1: there is none of that name
 *   event_time  when the event's last record was reached, ns; -1: not yet, or never recorded
 *   last        what the mock says of the calling thread's last failed call; "" if nothing */
#define PDS_MOCK_FUNCTIONS(X)                                                                      \
  X(int, pds_mock_configure, (const char *settings))                                               \
  X(int64_t, pds_mock_now, (void))                                                                 \
  X(int64_t, pds_mock_host_begin, (const char *name, uint32_t n, const uint32_t *tokens))          \
  X(int64_t, pds_mock_next, (void))                                                                \
  X(void, pds_mock_advance, (int64_t to_ns))                                                       \
  X(int64_t, pds_mock_counter, (const char *name))                                                 \
  X(int64_t, pds_mock_event_time, (CUevent event))                                                 \
  X(const char *, pds_mock_last, (void))

typedef struct pds_cuda {
  void *library; /* NULL: closed */
  int version;   /* of the driver: 12040 is CUDA 12.4 */
#define PDS_CUDA_FIELD(name, symbol, params) CUresult(*name) params;
  PDS_CUDA_FUNCTIONS(PDS_CUDA_FIELD)
#undef PDS_CUDA_FIELD
#define PDS_CUDA_FIELD(type, name, params) type(*name) params;
  PDS_MOCK_FUNCTIONS(PDS_CUDA_FIELD)
#undef PDS_CUDA_FIELD
} pds_cuda;

/* How every kernel's parameter struct begins. The GPU's kernels skip it; from it the mock knows how
 * much to copy and how long the kernel takes. */
typedef struct pds_twin_work {
  uint32_t bytes;         /* of the whole parameter struct, this header included */
  uint32_t n;             /* pieces of work ... */
  const uint32_t *tokens; /* [n] ... with so many tokens each; need not outlive the launch */
  uint64_t extra;         /* further work, in a unit that the kernel's costs know */
} pds_twin_work;

/* A module for the mock: kernels that are C functions of this process. Of one of two kinds, the other
 * is NULL: `fn` does a launch's work whatever its grid; `run` works for each block and thread, and
 * returns 0 or -1, with a text from `error`, which speaks of the calling thread's last failure. */
#define PDS_TWIN_MAGIC "PDSTWIN"
typedef struct pds_twin_entry {
  const char *name;
  void (*fn)(void *params);
  int (*run)(const void *params, const unsigned grid[3], unsigned threads, unsigned shared_bytes);
  const char *(*error)(void);
} pds_twin_entry;
typedef struct pds_twin_module {
  char magic[8]; /* PDS_TWIN_MAGIC and its zero */
  uint32_t n;
  pds_twin_entry entries[];
} pds_twin_module;
/* The mock also takes this text with a path and a newline behind it: a shared library whose symbol
 * PDS_TWIN_SYMBOL is such a module. */
#define PDS_TWIN_LIBRARY "PDSTWIN-LIBRARY "
#define PDS_TWIN_SYMBOL "pds_simt_image"

/* The oldest driver that does: CUDA 12.0, which Linux driver 525 brought. */
#define PDS_CUDA_MIN_VERSION 12000

/* Loads the driver, resolves every function and initialises it. `path`: the driver's library; NULL
 * or "": libcuda.so.1, where the system's loader finds it. PDS_ERR_DRIVER if it is missing, too old,
 * not whole, or finds no GPU; then *out_cuda is left closed. */
pds_status pds_cuda_open(const char *path, pds_cuda *out_cuda);

/* Also for one that was never opened, if it is zero. */
void pds_cuda_close(pds_cuda *cuda);

/* PDS_OK for CUDA_SUCCESS; else PDS_ERR_MEMORY for want of memory, or PDS_ERR_GPU, with a text made
 * of `what` was being done and the driver's name and words for the result. */
pds_status pds_cuda_check(const pds_cuda *cuda, CUresult result, const char *what);

#endif
