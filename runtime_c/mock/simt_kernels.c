/* simt_kernels.c: the GPU's kernels as C functions, and their image for the mock driver. */
#include "cuda/driver.h"
#include "cuda/kernels/device.h"
#include "cuda/kernels/list.h"

#include "cuda/kernels/attention.cu"
#include "cuda/kernels/gemm.cu"
#include "cuda/kernels/rows.cu"

/* What a GPU checks at the launch, or what would be read wrongly there. */
PDS_FN int check(const char *name, const void *params, size_t bytes, unsigned most,
                 unsigned threads) {
  if (((const pds_cu_head *)params)->bytes != bytes)
    return pds_simt_refuse("%s: the parameter struct says it has %u bytes, the kernel's has %zu",
                           name, ((const pds_cu_head *)params)->bytes, bytes);
  if (threads > most)
    return pds_simt_refuse("%s: %u threads a block, list.h has at most %u", name, threads, most);
  return 0;
}

#define RUN(name, params, most)                                                                    \
  _Static_assert(sizeof(params) <= 4096, "what a kernel's parameters may take");                   \
  _Static_assert(pds_cu_##name##_threads == (most), "list.h and the kernel on its threads");       \
  static void body_##name(const void *p) {                                                         \
    pds_cu_##name##_simt((const params *)p);                                                       \
  }                                                                                                \
  static int run_##name(const void *p, const unsigned grid[3], unsigned threads,                   \
                        unsigned shared_bytes) {                                                   \
    if (check("pds_cu_" #name, p, sizeof(params), most, threads) != 0) return -1;                  \
    return pds_simt_run(body_##name, p, grid, threads, shared_bytes);                              \
  }
PDS_CU_KERNELS(RUN)
#undef RUN

typedef struct kernel_image {
  char magic[8];
  uint32_t n;
  pds_twin_entry entries[PDS_CU_COUNT];
} kernel_image;
_Static_assert(offsetof(pds_twin_module, entries) == offsetof(kernel_image, entries), "an image");

#define ENTRY(kernel, params, most)                                                                \
  {.name = "pds_cu_" #kernel, .run = run_##kernel, .error = pds_simt_error},
#define ENTRIES {PDS_CU_KERNELS(ENTRY)}
extern const kernel_image pds_simt_image;
__attribute__((visibility("default")))
const kernel_image pds_simt_image = {PDS_TWIN_MAGIC, PDS_CU_COUNT, ENTRIES};
