/* dispatch.c: the table of kernel paths. The build says which are there: -DPDS_HAVE_AVX2 and so
 * on. */
#include "dispatch.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"

/* Best first. */
static const pds_isa_path paths[] = {
#ifdef PDS_HAVE_AMX
    {"amx",
     "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 "
     "amx_int8",
     pds_kernels_amx},
#endif
#ifdef PDS_HAVE_AVX512BF16
    {"avx512bf16", "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16",
     pds_kernels_avx512bf16},
#endif
#ifdef PDS_HAVE_AVX512
    {"avx512", "avx2 fma f16c avx512f avx512bw avx512dq avx512vl", pds_kernels_avx512},
#endif
#ifdef PDS_HAVE_AVX2
    {"avx2", "avx2 fma f16c", pds_kernels_avx2},
#endif
    {"scalar", "", pds_kernels_scalar},
};
enum { PATHS = sizeof paths / sizeof *paths };

static bool runnable(const pds_isa_path *path) {
  size_t length;
  return pds_cpu_missing(path->features, &length) == NULL;
}

static char built_names[64], runnable_names[64];
static pthread_once_t names_once = PTHREAD_ONCE_INIT;

static void append_name(char *list, size_t size, const char *name) {
  size_t n = strlen(list), need = strlen(name) + (n > 0) + 1;
  if (n + need > size) return;
  if (n > 0) list[n++] = ',';
  memcpy(list + n, name, strlen(name) + 1);
}

static void list_names(void) {
  for (int i = 0; i < PATHS; i++) {
    append_name(built_names, sizeof built_names, paths[i].name);
    if (runnable(&paths[i])) append_name(runnable_names, sizeof runnable_names, paths[i].name);
  }
}

const char *pds_isa_built(void) {
  pthread_once(&names_once, list_names);
  return built_names;
}

const char *pds_isa_runnable(void) {
  pthread_once(&names_once, list_names);
  return runnable_names;
}

pds_status pds_isa_choose(const char *name, const pds_isa_path **out_path) {
  const char *source = "isa option";
  if (!name || !*name) {
    name = getenv("PDSCOPE_ISA");
    source = "PDSCOPE_ISA";
  }
  if (!name || !*name) {
    for (int i = 0; i < PATHS; i++) {
      if (!runnable(&paths[i])) continue;
      *out_path = &paths[i];
      return PDS_OK;
    }
  }
  static const char *const known[] = {"amx", "avx512bf16", "avx512", "avx2", "scalar"};
  for (int i = 0; i < PATHS; i++) {
    if (strcmp(paths[i].name, name) != 0) continue;
    size_t length;
    const char *missing = pds_cpu_missing(paths[i].features, &length);
    if (missing)
      return pds_fail(PDS_ERR_ISA,
                      "%s: %s needs the CPU feature %.*s, which is absent; possible: %s", source,
                      name, (int)length, missing, pds_isa_runnable());
    *out_path = &paths[i];
    return PDS_OK;
  }
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strcmp(known[i], name) == 0)
      return pds_fail(PDS_ERR_ISA, "%s: the plan was built without %s; possible: %s", source, name,
                      pds_isa_runnable());
  return pds_fail(PDS_ERR_ISA, "%s: '%.40s' is no kernel path; possible: %s", source, name,
                  pds_isa_runnable());
}
