/* serial_pool.c: pool.h without threads, for tests of operators: items run in the caller, in
 * order or backwards, and pretend to be on several workers. */
#include "serial_pool.h"

uint32_t pds_pool_threads(const pds_pool *pool) {
  return pool->threads;
}

void pds_pool_run(pds_pool *pool, pds_job_fn fn, void *ctx, uint32_t items) {
  for (uint32_t i = 0; i < items; i++) {
    fn(ctx, pool->backwards ? items - 1 - i : i, i % pool->threads);
  }
}
