/* driver.c: finds the CUDA driver's library and resolves its functions. */
#define _GNU_SOURCE
#include "cuda/driver.h"

#include <dlfcn.h>
#include <string.h>

#define REMEDY                                                                                     \
  "install NVIDIA's driver, name its library in PDSCOPE_CUDA_DRIVER, or compile the plan for the " \
  "CPU alone"

/* A data pointer from dlsym as a function pointer: POSIX promises that the bits are the same. */
static void set_function(void *field, void *symbol) {
  memcpy(field, &symbol, sizeof symbol);
}

static pds_status resolve(const char *path, pds_cuda *cuda) {
#define RESOLVE(name, symbol, params)                                                              \
  set_function(&cuda->name, dlsym(cuda->library, #symbol));                                        \
  if (!cuda->name)                                                                                 \
    return pds_fail(PDS_ERR_DRIVER,                                                                \
                    "%s: has no function %s: it is no CUDA driver, or one older than CUDA %d.%d; " \
                    "update NVIDIA's driver (525 or newer)",                                       \
                    path, #symbol, PDS_CUDA_MIN_VERSION / 1000, PDS_CUDA_MIN_VERSION % 1000 / 10);
  PDS_CUDA_FUNCTIONS(RESOLVE)
#undef RESOLVE
#define RESOLVE(type, name, params) set_function(&cuda->name, dlsym(cuda->library, #name));
  PDS_MOCK_FUNCTIONS(RESOLVE)
#undef RESOLVE
  return PDS_OK;
}

static pds_status start(const char *path, pds_cuda *cuda) {
  CUresult result = cuda->cuDriverGetVersion(&cuda->version);
  if (result == CUDA_SUCCESS && cuda->version < PDS_CUDA_MIN_VERSION)
    return pds_fail(PDS_ERR_DRIVER,
                    "%s: the driver is for CUDA %d.%d, expected %d.%d or newer; update NVIDIA's "
                    "driver (525 or newer)",
                    path, cuda->version / 1000, cuda->version % 1000 / 10,
                    PDS_CUDA_MIN_VERSION / 1000, PDS_CUDA_MIN_VERSION % 1000 / 10);
  if (result == CUDA_SUCCESS) result = cuda->cuInit(0);
  if (result == CUDA_SUCCESS) return PDS_OK;
  pds_cuda_check(cuda, result, "cannot be initialised");
  /* pds_fail() writes where pds_last_error() points. */
  char why[PDS_ERROR_BYTES];
  strncpy(why, pds_last_error(), sizeof why - 1);
  why[sizeof why - 1] = 0;
  return pds_fail(PDS_ERR_DRIVER, "%s: %s; " REMEDY, path, why);
}

pds_status pds_cuda_open(const char *path, pds_cuda *out_cuda) {
  pds_cuda cuda = {0};
  memset(out_cuda, 0, sizeof *out_cuda);
  if (!path || !*path) path = "libcuda.so.1";
  cuda.library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!cuda.library) {
    const char *why = dlerror();
    return pds_fail(PDS_ERR_DRIVER, "%s: the CUDA driver cannot be loaded (%.200s); " REMEDY, path,
                    why ? why : "no reason given");
  }
  pds_status status = resolve(path, &cuda);
  if (status == PDS_OK) status = start(path, &cuda);
  if (status != PDS_OK) {
    dlclose(cuda.library);
    return status;
  }
  *out_cuda = cuda;
  return PDS_OK;
}

void pds_cuda_close(pds_cuda *cuda) {
  if (cuda->library) dlclose(cuda->library);
  memset(cuda, 0, sizeof *cuda);
}

pds_status pds_cuda_check(const pds_cuda *cuda, CUresult result, const char *what) {
  if (result == CUDA_SUCCESS) return PDS_OK;
  const char *name = NULL, *text = NULL;
  cuda->cuGetErrorName(result, &name);
  cuda->cuGetErrorString(result, &text);
  const char *more = cuda->pds_mock_last ? cuda->pds_mock_last() : "";
  return pds_fail(result == CUDA_ERROR_OUT_OF_MEMORY ? PDS_ERR_MEMORY : PDS_ERR_GPU,
                  "%s: %s (%d): %s%s%s", what, name ? name : "CUDA error", (int)result,
                  text ? text : "unknown to this driver", *more ? ": " : "", more);
}
