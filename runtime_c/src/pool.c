/* pool.c: worker threads that claim the items of a job one by one.
 *
 * A job is published as one 64-bit word, items << 32 | next item. A claim is one fetch_add on it,
 * whose result says by itself whether the claim is good (next < items), so a worker that wakes late
 * can neither run an item of a finished job nor hold up a new one: whoever holds a good claim keeps
 * that job's fn and ctx in place, as the job cannot end before the claim is done.
 *
 * What is read ahead is claimed in the same way. But nobody waits for such a claim: its list may be
 * replaced meanwhile, and the chunk then be one of the new list, or no memory of ours. Prefetch
 * instructions may be given any address, so the list needs to be atomic word by word alone. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#include "cpu.h"
#include "memory.h"

/* Turns of the spin loop before the core is offered to others, so that one core, or more threads
 * than cores, still make progress: about 20 microseconds of pause instructions. */
enum { SPINS = 512 };
/* Turns between two looks at what is watched. */
enum { WATCH_TURNS = 16 };

typedef struct worker {
  pds_pool *pool;
  pthread_t thread;
  uint32_t index;
} worker;

struct pds_pool {
  /* Sleeping and the queue of steps. */
  pthread_mutex_t mutex;
  pthread_cond_t wake;                   /* workers: open or quit changed */
  pthread_cond_t turn;                   /* callers of pds_pool_open: `serving` changed */
  _Atomic uint64_t next_ticket, serving; /* read outside of the mutex by pds_pool_mark and _past */
  bool quit;
  uint32_t threads;
  worker *workers;
  bool pinned;
  pds_watch_fn watch; /* of worker 0, or NULL */
  void *watched;
  bool moved;                /* the open step's caller is on `core` for its duration */
  pds_cpu_set core, callers; /* worker 0's core; what the caller's affinity was */
  _Alignas(64) _Atomic bool open;
  /* The running job, each on its own cache line: claims and completions are the busy words. */
  _Alignas(64) _Atomic uint64_t job; /* items << 32 | next item */
  pds_job_fn fn;
  void *ctx;
  _Alignas(64) _Atomic uint32_t done;
  _Alignas(64) _Atomic uint64_t ahead; /* chunks << 32 | next chunk */
  _Atomic uint32_t ahead_ranges;       /* never 0 once there was a list, */
  _Atomic uint32_t ahead_slice;        /* nor these: chunks of a slice */
  _Atomic uintptr_t ahead_at[PDS_AHEAD_RANGES];
};

_Static_assert(sizeof(struct pds_pool) <= PDS_POOL_BYTES, "PDS_POOL_BYTES");
_Static_assert(sizeof(worker) <= PDS_WORKER_BYTES, "PDS_WORKER_BYTES");

uint32_t pds_pool_threads(const pds_pool *pool) {
  return pool->threads;
}

static void spin(uint32_t *turns) {
  if (++*turns < SPINS)
    pds_cpu_relax();
  else
    sched_yield();
}

static void watch(pds_pool *pool) {
  if (pool->watch) pool->watch(pool->watched);
}

void pds_pool_watch(pds_pool *pool, pds_watch_fn fn, void *ctx) {
  pool->watch = fn;
  pool->watched = ctx;
}

/* Claims and runs items until none is left. False if there was none. */
static bool drain(pds_pool *pool, uint32_t index) {
  uint32_t ran = 0;
  for (;;) {
    uint64_t job = atomic_load_explicit(&pool->job, memory_order_relaxed);
    if ((uint32_t)job >= job >> 32) break;
    job = atomic_fetch_add_explicit(&pool->job, 1, memory_order_acq_rel);
    if ((uint32_t)job >= job >> 32) break;
    pool->fn(pool->ctx, (uint32_t)job, index);
    atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
    if (index == 0) watch(pool);
    ran++;
  }
  return ran > 0;
}

void pds_pool_run(pds_pool *pool, pds_job_fn fn, void *ctx, uint32_t items) {
  if (pool->threads == 1 || items <= 1) {
    for (uint32_t item = 0; item < items; item++) {
      watch(pool);
      fn(ctx, item, 0);
    }
    return;
  }
  pool->fn = fn;
  pool->ctx = ctx;
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
  atomic_store_explicit(&pool->job, (uint64_t)items << 32, memory_order_release);
  watch(pool);
  drain(pool, 0);
  uint32_t turns = 0;
  while (atomic_load_explicit(&pool->done, memory_order_acquire) != items) {
    spin(&turns);
    if (turns % WATCH_TURNS == 0) watch(pool);
  }
}

void pds_pool_wait(const _Atomic uint32_t *left) {
  uint32_t turns = 0;
  while (atomic_load_explicit(left, memory_order_acquire)) spin(&turns);
}

void pds_pool_read_ahead(pds_pool *pool, const pds_ahead *ahead) {
  pds_pool_stop_ahead(pool);
  for (uint32_t i = 0; i < ahead->ranges; i++)
    atomic_store_explicit(&pool->ahead_at[i], (uintptr_t)ahead->at[i], memory_order_relaxed);
  atomic_store_explicit(&pool->ahead_ranges, ahead->ranges, memory_order_relaxed);
  atomic_store_explicit(&pool->ahead_slice, ahead->chunks, memory_order_relaxed);
  const uint64_t chunks = (uint64_t)ahead->ranges * ahead->slices * ahead->chunks;
  atomic_store_explicit(&pool->ahead, chunks << 32, memory_order_release);
}

uint32_t pds_pool_stop_ahead(pds_pool *pool) {
  const uint64_t ahead = atomic_exchange_explicit(&pool->ahead, 0, memory_order_relaxed);
  const uint32_t chunks = (uint32_t)(ahead >> 32), next = (uint32_t)ahead;
  return next < chunks ? next : chunks;
}

/* Pulls in the next chunk. False if there is none. */
static bool read_ahead(pds_pool *pool) {
  enum { LINE = 64 };
  uint64_t ahead = atomic_load_explicit(&pool->ahead, memory_order_relaxed);
  if ((uint32_t)ahead >= ahead >> 32) return false;
  ahead = atomic_fetch_add_explicit(&pool->ahead, 1, memory_order_acquire);
  if ((uint32_t)ahead >= ahead >> 32) return false;
  const uint32_t ranges = atomic_load_explicit(&pool->ahead_ranges, memory_order_relaxed);
  const uint32_t slice = atomic_load_explicit(&pool->ahead_slice, memory_order_relaxed);
  const uint32_t chunk = (uint32_t)ahead, of_slice = chunk % slice, nth = chunk / slice;
  uintptr_t at = atomic_load_explicit(&pool->ahead_at[nth % ranges], memory_order_relaxed);
  at += ((uintptr_t)(nth / ranges) * slice + of_slice) * PDS_AHEAD_CHUNK;
  for (uint32_t i = 0; i < PDS_AHEAD_CHUNK; i += LINE)
    __builtin_prefetch((const void *)(at + i), 0, 1); /* prefetcht2 */
  return true;
}

static void *worker_main(void *argument) {
  worker *self = argument;
  pds_pool *pool = self->pool;
  pds_fp_default();
  for (;;) {
    pthread_mutex_lock(&pool->mutex);
    while (!pool->quit && !atomic_load_explicit(&pool->open, memory_order_relaxed))
      pthread_cond_wait(&pool->wake, &pool->mutex);
    bool quit = pool->quit;
    pthread_mutex_unlock(&pool->mutex);
    if (quit) return NULL;
    uint32_t turns = 0;
    while (atomic_load_explicit(&pool->open, memory_order_relaxed)) {
      if (drain(pool, self->index) || read_ahead(pool))
        turns = 0;
      else
        spin(&turns);
    }
  }
}

/* Starts worker `index` on its stack, with all signals blocked so that they go to the program's own
 * threads. */
static int start_worker(worker *self, unsigned char *stack) {
  if (mprotect(stack, PDS_STACK_GUARD, PROT_NONE) != 0) return 1;
  pthread_attr_t attr;
  if (pthread_attr_init(&attr) != 0) return 1;
  int error =
      pthread_attr_setstack(&attr, stack + PDS_STACK_GUARD, PDS_STACK_BYTES - PDS_STACK_GUARD);
  if (!error) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    error = pthread_create(&self->thread, &attr, worker_main, self);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
  }
  pthread_attr_destroy(&attr);
#if defined(__linux__)
  if (!error) pthread_setname_np(self->thread, "pdscope");
#endif
  return error;
}

pds_status pds_pool_create(void *memory, void *workers, unsigned char *stacks, uint32_t threads) {
  pds_pool *pool = memory;
  pool->threads = threads;
  pool->workers = NULL;
  pthread_mutex_init(&pool->mutex, NULL);
  pthread_cond_init(&pool->wake, NULL);
  pthread_cond_init(&pool->turn, NULL);
  for (uint32_t i = 1; i < threads; i++) {
    /* Control blocks are PDS_WORKER_BYTES apart: two workers never share a cache line. */
    worker *self = (worker *)((unsigned char *)workers + (size_t)i * PDS_WORKER_BYTES);
    self->pool = pool;
    self->index = i;
    int error = start_worker(self, stacks + (size_t)(i - 1) * PDS_STACK_BYTES);
    if (error) {
      pool->workers = workers;
      pool->threads = i;
      pds_pool_destroy(pool);
      return pds_fail(PDS_ERR_THREAD,
                      "worker %u of %u could not be started: %s; ask for fewer threads", i, threads,
                      strerror(error));
    }
  }
  pool->workers = workers;
  return PDS_OK;
}

void pds_pool_destroy(pds_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  pool->quit = true;
  pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  for (uint32_t i = 1; i < pool->threads; i++) {
    worker *w = (worker *)((unsigned char *)pool->workers + (size_t)i * PDS_WORKER_BYTES);
    pthread_join(w->thread, NULL);
  }
  pthread_cond_destroy(&pool->turn);
  pthread_cond_destroy(&pool->wake);
  pthread_mutex_destroy(&pool->mutex);
}

/* --- affinity --- */

static bool set_affinity(pthread_t thread, const pds_cpu_set *set) {
#if defined(__linux__)
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS && cpu < CPU_SETSIZE; cpu++)
    if (pds_cpu_in(set, cpu)) CPU_SET(cpu, &cpus);
  return pthread_setaffinity_np(thread, sizeof cpus, &cpus) == 0;
#else
  (void)thread;
  (void)set;
  return false;
#endif
}

static bool get_affinity(pthread_t thread, pds_cpu_set *out) {
  memset(out, 0, sizeof *out);
#if defined(__linux__)
  cpu_set_t cpus;
  if (pthread_getaffinity_np(thread, sizeof cpus, &cpus) != 0) return false;
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS && cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &cpus)) out->bits[cpu / 64] |= (uint64_t)1 << cpu % 64;
  return true;
#else
  (void)thread;
  return false;
#endif
}

static bool overlap(const pds_cpu_set *a, const pds_cpu_set *b) {
  for (size_t i = 0; i < sizeof a->bits / sizeof *a->bits; i++)
    if (a->bits[i] & b->bits[i]) return true;
  return false;
}

/* A caller that the program has pinned elsewhere is left there. */
static void pin_caller(pds_pool *pool) {
  pool->moved = get_affinity(pthread_self(), &pool->callers) &&
                overlap(&pool->callers, &pool->core) && set_affinity(pthread_self(), &pool->core);
}

bool pds_pool_pin(pds_pool *pool, const pds_host *host) {
  pds_cpu_set mine;
  if (!get_affinity(pthread_self(), &mine) || !set_affinity(pthread_self(), &mine)) return false;
  for (uint32_t i = 1; i < pool->threads; i++) {
    const worker *w = (worker *)((unsigned char *)pool->workers + (size_t)i * PDS_WORKER_BYTES);
    pds_cpu_set core;
    pds_host_core(host, i, &core);
    if (set_affinity(w->thread, &core)) continue;
    for (uint32_t j = 1; j < i; j++) {
      w = (worker *)((unsigned char *)pool->workers + (size_t)j * PDS_WORKER_BYTES);
      set_affinity(w->thread, &mine);
    }
    return false;
  }
  pds_host_core(host, 0, &pool->core);
  pool->pinned = true;
  return true;
}

/* --- steps --- */

void pds_pool_open(pds_pool *pool) {
  pthread_mutex_lock(&pool->mutex);
  uint64_t ticket = atomic_fetch_add_explicit(&pool->next_ticket, 1, memory_order_acq_rel);
  while (atomic_load_explicit(&pool->serving, memory_order_relaxed) != ticket)
    pthread_cond_wait(&pool->turn, &pool->mutex);
  atomic_store_explicit(&pool->open, true, memory_order_relaxed);
  if (pool->threads > 1) pthread_cond_broadcast(&pool->wake);
  pthread_mutex_unlock(&pool->mutex);
  if (pool->pinned) pin_caller(pool);
}

void pds_pool_close(pds_pool *pool) {
  pds_pool_stop_ahead(pool);
  if (pool->moved) set_affinity(pthread_self(), &pool->callers);
  pthread_mutex_lock(&pool->mutex);
  atomic_store_explicit(&pool->open, false, memory_order_relaxed);
  atomic_fetch_add_explicit(&pool->serving, 1, memory_order_release);
  pthread_cond_broadcast(&pool->turn);
  pthread_mutex_unlock(&pool->mutex);
}

uint64_t pds_pool_mark(pds_pool *pool) {
  /* a write, which the next to open reads from */
  return atomic_fetch_add_explicit(&pool->next_ticket, 0, memory_order_acq_rel);
}

bool pds_pool_past(pds_pool *pool, uint64_t mark) {
  return atomic_load_explicit(&pool->serving, memory_order_acquire) >= mark;
}
