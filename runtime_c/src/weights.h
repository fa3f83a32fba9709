/* weights.h: a plan's weight files in memory, mapped, copied or made up. */
#ifndef PDS_WEIGHTS_H
#define PDS_WEIGHTS_H

#include <stdint.h>

#include "host.h"
#include "plan_desc.h"
#include "pool.h"
#include "pdscope.h"

typedef struct pds_weights {
  int32_t mode; /* PDS_WEIGHTS_MMAP, PDS_WEIGHTS_COPY or PDS_WEIGHTS_DUMMY, once loaded */
  unsigned char *copy;
  uint64_t bytes;      /* of the files */
  uint64_t copy_bytes; /* of `copy`; 0: mapped */
  uint64_t huge_bytes; /* of `copy` in huge pages */
  uint32_t nodes;      /* NUMA nodes that the copy is interleaved over; 0: nobody said where */
  char why[128];       /* what decided on the mode */
} pds_weights;

/* Brings the plan's weight files, relative to `dir_fd`, to files[plan->n_files], read-only.
 *
 * PDS_WEIGHTS_MMAP: page cache, read as it is used. PDS_WEIGHTS_COPY: all files are read, in
 * parallel, to one anonymous mapping of huge pages (memory.h), interleaved over the host's nodes.
 * PDS_WEIGHTS_AUTO: the copy where memory is there for it with room to spare, else the map.
 * PDS_WEIGHTS_DUMMY: memory as the copy's, filled by pds_dummy_fill(); no file is opened.
 * On failure what there is stays in `out`, for pds_weights_unload(). */
pds_status pds_weights_load(const pds_plan *plan, int dir_fd, int32_t asked, const pds_host *host,
                            pds_pool *pool, const unsigned char **files, pds_weights *out);

/* The copy alone. `past_cache`: the page cache holds no more of the files than before. */
pds_status pds_weights_copy(const pds_plan *plan, int dir_fd, const pds_host *host, pds_pool *pool,
                            bool past_cache, const unsigned char **files, pds_weights *out);

void pds_weights_unload(const pds_plan *plan, const unsigned char **files, pds_weights *weights);

#endif
