/* serial_pool.c: pool.h without threads, for tests of operators: items run in the caller, in order
 * or backwards, and pretend to be on several workers. An item that waits for earlier ones runs
 * them. One job at a time. */
#include "serial_pool.h"

#include <string.h>

enum { MOST_ITEMS = 1 << 16 };

static struct {
  pds_job_fn fn;
  void *ctx;
  uint32_t items, threads;
  unsigned char begun[MOST_ITEMS];
} job;

uint32_t pds_pool_threads(const pds_pool *pool) {
  return pool->threads;
}

static void run(uint32_t item) {
  if (job.begun[item]) return;
  job.begun[item] = 1;
  job.fn(job.ctx, item, item % job.threads);
}

void pds_pool_run(pds_pool *pool, pds_job_fn fn, void *ctx, uint32_t items) {
  job.fn = fn;
  job.ctx = ctx;
  job.items = items;
  job.threads = pool->threads;
  memset(job.begun, 0, items);
  for (uint32_t i = 0; i < items; i++) run(pool->backwards ? items - 1 - i : i);
}

void pds_pool_wait(const _Atomic uint32_t *left) {
  for (uint32_t i = 0; *left && i < job.items; i++) run(i);
}
