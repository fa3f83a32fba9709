/* modules.c: modules of C functions, and their launch. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock.h"

static CUmodule find_module(CUmodule handle) {
  for (CUmodule m = mock.modules; m; m = m->next)
    if (m == handle) return m;
  mock_error(CUDA_ERROR_INVALID_HANDLE, "no such module: never loaded, or unloaded");
  return NULL;
}

static CUfunction find_function(CUfunction handle) {
  for (CUmodule m = mock.modules; m; m = m->next)
    for (uint32_t i = 0; i < m->n; i++)
      if (&m->functions[i] == handle) return handle;
  mock_error(CUDA_ERROR_INVALID_HANDLE, "no such function, or its module was unloaded");
  return NULL;
}

static bool is_twin(const void *image) {
  /* A string comparison: an image of another kind may be shorter than the magic. */
  return strncmp(image, PDS_TWIN_MAGIC, sizeof PDS_TWIN_MAGIC) == 0;
}

/* The module of the library that the text of an image names; NULL with an error text. */
static const pds_twin_module *open_library(const char *text, void **out_library) {
  const size_t bytes = strcspn(text, "\n");
  char *path = mock_alloc(bytes + 1);
  memcpy(path, text, bytes);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  free(path);
  const void *image = library ? dlsym(library, PDS_TWIN_SYMBOL) : NULL;
  if (image && is_twin(image)) {
    *out_library = library;
    return image;
  }
  const char *why = library ? NULL : dlerror();
  mock_error(CUDA_ERROR_INVALID_IMAGE, "no library of kernels: %.200s",
             why ? why : "it has no " PDS_TWIN_SYMBOL);
  if (library) dlclose(library);
  return NULL;
}

CUresult cuModuleLoadData(CUmodule *out_module, const void *image) {
  CUresult result = mock_enter("cuModuleLoadData");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (!out_module || !image)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "no image, or no place for the module"));
  const pds_twin_module *twin = image;
  void *library = NULL;
  if (strncmp(image, PDS_TWIN_LIBRARY, strlen(PDS_TWIN_LIBRARY)) == 0) {
    twin = open_library((const char *)image + strlen(PDS_TWIN_LIBRARY), &library);
    if (!twin) return mock_leave(CUDA_ERROR_INVALID_IMAGE);
  } else if (!is_twin(image)) {
    return mock_leave(mock_error(CUDA_ERROR_INVALID_IMAGE,
                                 "the mock runs kernels of pds_twin_module, not PTX or a cubin"));
  }
  CUmodule module = mock_alloc(sizeof *module + twin->n * sizeof *module->functions);
  module->library = library;
  module->n = twin->n;
  for (uint32_t i = 0; i < twin->n; i++) {
    size_t bytes = strlen(twin->entries[i].name) + 1;
    char *name = mock_alloc(bytes);
    memcpy(name, twin->entries[i].name, bytes);
    module->functions[i] = (struct CUfunc_st){module, name, twin->entries[i], SHARED_MOST, 0};
  }
  module->next = mock.modules;
  mock.modules = module;
  mock.count.modules++;
  *out_module = module;
  return mock_leave(CUDA_SUCCESS);
}

void mock_free_module(CUmodule module) {
  CUmodule *at = &mock.modules;
  while (*at != module) at = &(*at)->next;
  *at = module->next;
  for (uint32_t i = 0; i < module->n; i++) free(module->functions[i].name);
  if (module->library) dlclose(module->library);
  free(module);
}

CUresult cuModuleUnload(CUmodule handle) {
  CUresult result = mock_enter("cuModuleUnload");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (!find_module(handle)) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  result = mock_wait_all();
  if (result == CUDA_SUCCESS && !find_module(handle)) result = CUDA_ERROR_INVALID_HANDLE;
  if (result != CUDA_SUCCESS) return mock_leave(result);
  mock_free_module(handle);
  mock.count.modules--;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *out_function, CUmodule handle, const char *name) {
  CUresult result = mock_enter("cuModuleGetFunction");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUmodule module = find_module(handle);
  if (!module) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (!out_function || !name)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "no name, or no place for it"));
  for (uint32_t i = 0; i < module->n; i++)
    if (strcmp(module->functions[i].name, name) == 0) {
      *out_function = &module->functions[i];
      return mock_leave(CUDA_SUCCESS);
    }
  return mock_leave(mock_error(CUDA_ERROR_NOT_FOUND, "no kernel %.80s in the module", name));
}

/* --- what the mock has not --- */

#define NOT_HERE(name, unused, ...)                                                                \
  CUresult name(__VA_ARGS__) {                                                                     \
    unused;                                                                                        \
    CUresult result = mock_enter(#name);                                                           \
    if (result == CUDA_SUCCESS)                                                                    \
      result = mock_error(CUDA_ERROR_NOT_SUPPORTED,                                                \
                          "the mock has no graphs, nor copies of pitched rows");                   \
    return mock_leave(result);                                                                     \
  }
NOT_HERE(cuStreamBeginCapture_v2, (void)stream;
         (void)mode, CUstream stream, CUstreamCaptureMode mode)
NOT_HERE(cuStreamEndCapture, (void)stream; (void)out, CUstream stream, CUgraph *out)
NOT_HERE(cuGraphInstantiateWithFlags, (void)out; (void)graph;
         (void)flags, CUgraphExec *out, CUgraph graph, unsigned long long flags)
NOT_HERE(cuGraphLaunch, (void)exec; (void)stream, CUgraphExec exec, CUstream stream)
NOT_HERE(cuGraphExecDestroy, (void)exec, CUgraphExec exec)
NOT_HERE(cuMemcpy2DAsync_v2, (void)copy; (void)stream, const CUDA_MEMCPY2D *copy, CUstream stream)
NOT_HERE(cuGraphDestroy, (void)graph, CUgraph graph)

/* --- launch --- */

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  CUresult result = mock_enter("cuFuncSetAttribute");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUfunction function = find_function(handle);
  if (!function) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return mock_leave(
        mock_error(CUDA_ERROR_INVALID_VALUE, "attribute %d cannot be set here", attribute));
  if (value < 0 || value > SHARED_OPTIN)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE,
                                 "%d bytes of shared memory a block, at most %d", value,
                                 SHARED_OPTIN));
  function->shared_most = (unsigned)value;
  return mock_leave(CUDA_SUCCESS);
}

static CUresult check_grid(const grid *g, CUfunction function) {
  static const uint64_t most[3] = {2147483647, 65535, 65535}; /* of compute capability 3.0 and up */
  uint64_t threads = 1;
  for (int i = 0; i < 3; i++) {
    if (g->x[i] == 0 || g->x[i] > most[i])
      return mock_error(CUDA_ERROR_INVALID_VALUE, "a grid dimension is %u", g->x[i]);
    if (g->block[i] == 0 || g->block[i] > 1024)
      return mock_error(CUDA_ERROR_INVALID_VALUE, "a block dimension is %u", g->block[i]);
    threads *= g->block[i];
  }
  if (threads > 1024)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%llu threads a block, at most 1024",
                      (unsigned long long)threads);
  if (g->shared_bytes > function->shared_most)
    return mock_error(CUDA_ERROR_INVALID_VALUE,
                      "%u bytes of shared memory a block; %s has at most %u, and up to %d with "
                      "cuFuncSetAttribute",
                      g->shared_bytes, function->name, function->shared_most, SHARED_OPTIN);
  if (function->entry.run && threads != g->block[0])
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%s takes blocks of one dimension", function->name);
  return CUDA_SUCCESS;
}

/* A copy of the parameter struct, and of what its header points to. */
static CUresult copy_params(const void *params, op *o) {
  const pds_twin_work *work = params;
  if (work->bytes < sizeof *work)
    return mock_error(CUDA_ERROR_INVALID_VALUE,
                      "the parameter struct says it has %u bytes, its header alone has %zu",
                      work->bytes, sizeof *work);
  if (work->n > 0 && !work->tokens)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%u pieces of work without their tokens", work->n);
  o->params = mock_alloc(work->bytes);
  memcpy(o->params, params, work->bytes);
  if (work->n > 0) {
    o->tokens = mock_alloc(work->n * sizeof *o->tokens);
    memcpy(o->tokens, work->tokens, work->n * sizeof *o->tokens);
  }
  ((pds_twin_work *)o->params)->tokens = o->tokens;
  return CUDA_SUCCESS;
}

static CUresult launch(CUfunction handle, const grid *g, CUstream stream_handle, void **params,
                       void **extra) {
  CUfunction function = find_function(handle);
  CUstream stream = function ? mock_stream(stream_handle) : NULL;
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  CUresult result = check_grid(g, function);
  if (result != CUDA_SUCCESS) return result;
  if (!params || !params[0] || extra)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "expected the parameter struct in params[0], and "
                                                "nothing in extra");
  op *o = mock_new_op(OP_KERNEL);
  result = copy_params(params[0], o);
  if (result == CUDA_SUCCESS && mock_strikes(&mock.set.refuse_launch))
    result = mock_error(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "fault refuse_launch");
  if (result != CUDA_SUCCESS) {
    mock_drop(o);
    return result;
  }
  const pds_twin_work *work = o->params;
  o->function = function;
  o->grid = *g;
  o->duration = mock_cost(mock.set.kernels, function->name, work->n, o->tokens, work->extra);
  if (mock_strikes(&mock.set.fail_launch))
    mock_fault(o, CUDA_ERROR_LAUNCH_FAILED, "fault fail_launch");
  function->launches++;
  mock.count.launches++;
  mock_submit(stream, o);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                        CUstream stream, void **params, void **extra) {
  CUresult result = mock_enter("cuLaunchKernel");
  grid g = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
  if (result == CUDA_SUCCESS) result = launch(function, &g, stream, params, extra);
  return mock_leave(result);
}
