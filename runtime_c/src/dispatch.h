/* dispatch.h: which kernel paths are built in, which can run here, and which one an engine uses. */
#ifndef PDS_DISPATCH_H
#define PDS_DISPATCH_H

#include "kernels/kernels.h"
#include "status.h"

typedef struct pds_isa_path {
  const char *name;     /* scalar, avx2, avx512, avx512bf16, amx */
  const char *features; /* CPU features that it needs, space-separated */
  const pds_kernels *(*kernels)(void);
} pds_isa_path;

/* The path called `name`, or, for NULL, the one that PDSCOPE_ISA names, else the best that runs
 * here. PDS_ERR_ISA, with the names that are possible, if it is unknown, not built, or not
 * runnable. */
pds_status pds_isa_choose(const char *name, const pds_isa_path **out_path);

#endif
