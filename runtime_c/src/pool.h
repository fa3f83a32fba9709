/* pool.h: the worker threads of an engine. Workers spin only while a step is open and sleep between
 * steps: looking out for the next step a while longer was measured not to pay. */
#ifndef PDS_POOL_H
#define PDS_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "host.h"
#include "status.h"

typedef struct pds_pool pds_pool;

/* One item of a parallel job: `item` in [0, items), `worker` in [0, threads): index of the
 * caller's private scratch. Items are independent; which worker runs which one must not change
 * any result. */
typedef void (*pds_job_fn)(void *ctx, uint32_t item, uint32_t worker);

uint32_t pds_pool_threads(const pds_pool *pool);
/* Runs fn over all items on all workers; the caller is worker 0. Returns when every item is done (a
 * full barrier: all writes of the job are visible to the caller and to the next job). Only between
 * open and close, and never from inside a job. */
void pds_pool_run(pds_pool *pool, pds_job_fn fn, void *ctx, uint32_t items);

/* While the pool is open: fn is called by the opener, before each of its items and while it waits for others', and
 * must not use the pool. NULL: nothing more. */
typedef void (*pds_watch_fn)(void *ctx);
void pds_pool_watch(pds_pool *pool, pds_watch_fn fn, void *ctx);

/* From an item: waits until another item of the job, claimed before, has made *left 0. */
void pds_pool_wait(const _Atomic uint32_t *left);

/* Reading ahead: workers with no item to run pull memory towards the last-level cache, chunk by
 * chunk, and look for a job before each. It changes no result, and nobody waits for it. */
enum { PDS_AHEAD_RANGES = 64, PDS_AHEAD_CHUNK = 4096 };
typedef struct pds_ahead {
  const void *at[PDS_AHEAD_RANGES]; /* ranges of memory, the most wanted first */
  uint32_t ranges;
  uint32_t slices, chunks; /* of each range: its first slice of all, then their second, ... */
} pds_ahead;
/* Replaces the list before. `ahead` is copied; each count is at least 1. By the caller of a step. */
void pds_pool_read_ahead(pds_pool *pool, const pds_ahead *ahead);
/* Drops the list; returns how many of its chunks, in that order, were begun. Closing a step does
 * too. */
uint32_t pds_pool_stop_ahead(pds_pool *pool);

/* Starts threads - 1 workers in memory of the caller (memory.h): `pool` has PDS_POOL_BYTES,
 * `workers` threads * PDS_WORKER_BYTES, `stacks` (threads - 1) * PDS_STACK_BYTES; all zeroed. On
 * failure no thread is left. */
pds_status pds_pool_create(void *pool, void *workers, unsigned char *stacks, uint32_t threads);
/* Before the first step: each worker stays on a core of its own (pds_host_core). The caller of a
 * step is moved to that of worker 0 in pds_pool_open() and gets its own affinity back in
 * pds_pool_close(). False, with nothing changed, where the system does not let us. */
bool pds_pool_pin(pds_pool *pool, const pds_host *host);
/* Stops and joins the workers; not while a step is open. */
void pds_pool_destroy(pds_pool *pool);

/* A step's edges. Open waits, first come first served, until no other step holds the pool; then it
 * wakes the workers, and the calling thread is worker 0 until close. */
void pds_pool_open(pds_pool *pool);
void pds_pool_close(pds_pool *pool);

/* For what is taken from steps while they run: whoever opens after pds_pool_mark() sees what was
 * written before it, and once pds_pool_past() the others have closed. Neither waits. */
uint64_t pds_pool_mark(pds_pool *pool);
bool pds_pool_past(pds_pool *pool, uint64_t mark);

#endif
