/* case_pool.c: every item runs once, jobs are barriers, steps of several threads take turns, idle
 * is idle. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "map.h"
#include "memory.h"
#include "pool.h"
#include "test.h"

typedef struct fixture {
  unsigned char *memory;
  uint64_t bytes;
  pds_pool *pool;
} fixture;

static void open_pool(fixture *f, uint32_t threads) {
  pds_plan plan = {0};
  pds_engine_layout at = pds_layout_engine(&plan, threads);
  void *memory;
  f->bytes = at.total;
  CHECK_OK(pds_map_anon(at.total, "test", &memory));
  f->memory = memory;
  f->pool = (pds_pool *)(f->memory + at.pool);
  CHECK_OK(pds_pool_create(f->pool, f->memory + at.workers, f->memory + at.stacks, threads));
  CHECK_EQ(pds_pool_threads(f->pool), threads);
}

static void close_pool(fixture *f) {
  pds_pool_destroy(f->pool);
  pds_unmap(f->memory, f->bytes);
}

enum { ITEMS = 3000 };
typedef struct job {
  uint32_t threads;
  uint32_t ran[ITEMS]; /* plain: each item is written by one worker, read after the barrier */
  uint64_t sum;
  _Atomic uint32_t bad;
} job;

static void count(void *ctx, uint32_t item, uint32_t worker) {
  job *j = ctx;
  if (worker >= j->threads) j->bad++;
  j->ran[item]++;
}

static void once_each(uint32_t threads) {
  fixture f;
  open_pool(&f, threads);
  static job j;
  memset(&j, 0, sizeof j);
  j.threads = threads;
  uint32_t sizes[] = {0, 1, 2, threads, threads + 1, 7, ITEMS};
  uint32_t want[ITEMS] = {0};
  for (int step = 0; step < 30; step++) {
    pds_pool_open(f.pool);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
      pds_pool_run(f.pool, count, &j, sizes[i]);
      for (uint32_t item = 0; item < sizes[i]; item++) want[item]++;
      if (memcmp(want, j.ran, sizeof want) != 0) {
        CHECK(!"an item was lost, or ran twice");
        break;
      }
    }
    pds_pool_close(f.pool);
  }
  CHECK_EQ(j.bad, 0);
  close_pool(&f);
}

/* Pairs of stages: item n + i reads plain memory that item i writes, and waits for that one alone. */
enum { HALF = 500 };
typedef struct chain_job {
  _Atomic uint32_t left[HALF];
  uint32_t value[HALF];
  _Atomic uint32_t ran, wrong;
} chain_job;

static void run_chain(void *ctx, uint32_t item, uint32_t worker) {
  (void)worker;
  chain_job *j = ctx;
  j->ran++;
  if (item < HALF) {
    j->value[item] = item + 1;
    atomic_store_explicit(&j->left[item], 0, memory_order_release);
    return;
  }
  pds_pool_wait(&j->left[item - HALF]);
  if (j->value[item - HALF] != item - HALF + 1) j->wrong++;
}

static void waits(uint32_t threads) {
  fixture f;
  open_pool(&f, threads);
  static chain_job j;
  for (int step = 0; step < 20; step++) {
    memset(&j, 0, sizeof j);
    for (uint32_t i = 0; i < HALF; i++) j.left[i] = 1;
    pds_pool_open(f.pool);
    pds_pool_run(f.pool, run_chain, &j, 2 * HALF);
    pds_pool_close(f.pool);
    CHECK_EQ(j.ran, 2 * HALF);
    CHECK_EQ(j.wrong, 0);
  }
  close_pool(&f);
}

/* Several threads, each opening steps of the same pool: plain variables are safe inside a step. */
typedef struct shared {
  pds_pool *pool;
  uint64_t plain;
} shared;

static void nothing(void *ctx, uint32_t item, uint32_t worker) {
  (void)ctx;
  (void)item;
  (void)worker;
}

static void *stepper(void *argument) {
  shared *s = argument;
  for (int i = 0; i < 200; i++) {
    pds_pool_open(s->pool);
    uint64_t before = s->plain;
    pds_pool_run(s->pool, nothing, s, 5);
    s->plain = before + 1;
    pds_pool_close(s->pool);
  }
  return NULL;
}

static void turns(void) {
  fixture f;
  open_pool(&f, 3);
  shared s = {.pool = f.pool};
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) CHECK_EQ(pthread_create(&threads[i], NULL, stepper, &s), 0);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  CHECK_EQ(s.plain, 800);
  close_pool(&f);
}

#if defined(__linux__)
typedef struct seen {
  _Atomic uint32_t strayed; /* items run by a worker off its core */
  cpu_set_t cores[8];
} seen;

static void look(void *ctx, uint32_t item, uint32_t worker) {
  seen *s = ctx;
  cpu_set_t mine;
  (void)item;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0 || !CPU_EQUAL(&mine, &s->cores[worker]))
    s->strayed++;
}

/* Workers stay on their cores; the caller goes to its own for the step alone. */
static void pinned(void) {
  fixture f;
  pds_host host;
  cpu_set_t before, after;
  static seen s;
  pds_host_read("", NULL, &host);
  open_pool(&f, 3);
  if (pds_pool_pin(f.pool, &host)) {
    for (uint32_t i = 0; i < 3; i++) {
      pds_cpu_set core;
      pds_host_core(&host, i, &core);
      CPU_ZERO(&s.cores[i]);
      for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++)
        if (pds_cpu_in(&core, cpu)) CPU_SET(cpu, &s.cores[i]);
    }
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    for (int step = 0; step < 20; step++) {
      pds_pool_open(f.pool);
      pds_pool_run(f.pool, look, &s, 50);
      pds_pool_close(f.pool);
    }
    CHECK_EQ(s.strayed, 0);
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&before, &after));
  }
  close_pool(&f);
}
#else
static void pinned(void) {}
#endif

static double process_seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void idle(void) {
  fixture f;
  open_pool(&f, 4);
  pds_pool_open(f.pool);
  pds_pool_run(f.pool, nothing, NULL, 100);
  pds_pool_close(f.pool);
  /* Workers notice the closed step; on a loaded machine after a while. */
  double took = 1;
  for (int i = 0; i < 100 && took >= 0.025; i++) {
    double before = process_seconds();
    usleep(100000);
    took = process_seconds() - before;
  }
  CHECK(took < 0.025);
  close_pool(&f);
}

/* Lists come and go around jobs, which all run; what is begun is counted; nothing runs on. */
static void read_ahead(void) {
  enum { RANGES = 8, SLICES = 2, CHUNKS = 16 };
  static unsigned char memory[RANGES * SLICES * CHUNKS * PDS_AHEAD_CHUNK];
  fixture f;
  open_pool(&f, 3);
  static job j;
  memset(&j, 0, sizeof j);
  j.threads = 3;
  pds_ahead whole = {.ranges = RANGES, .slices = SLICES, .chunks = CHUNKS};
  for (uint32_t i = 0; i < RANGES; i++)
    whole.at[i] = memory + (size_t)i * SLICES * CHUNKS * PDS_AHEAD_CHUNK;
  pds_pool_open(f.pool);
  CHECK_EQ(pds_pool_stop_ahead(f.pool), 0);
  for (uint32_t round = 0; round < 200; round++) {
    pds_ahead part = whole;
    part.ranges = 1 + round % RANGES;
    part.slices = 1 + round % SLICES;
    part.chunks = 1 + round % CHUNKS;
    pds_pool_read_ahead(f.pool, &part);
    pds_pool_run(f.pool, count, &j, 50);
    if (round % 2) CHECK(pds_pool_stop_ahead(f.pool) <= part.ranges * part.slices * part.chunks);
  }
  CHECK_EQ(j.ran[0], 200);
  CHECK_EQ(j.ran[49], 200);
  /* Workers have nothing else to do; but a loaded machine may let them wait. */
  uint32_t chunks = 0;
  for (useconds_t wait = 10000; wait < 20000000 && chunks < RANGES * SLICES * CHUNKS; wait *= 2) {
    pds_pool_read_ahead(f.pool, &whole);
    usleep(wait);
    chunks = pds_pool_stop_ahead(f.pool);
  }
  CHECK_EQ(chunks, RANGES * SLICES * CHUNKS);
  pds_pool_read_ahead(f.pool, &whole);
  pds_pool_close(f.pool);
  CHECK_EQ(pds_pool_stop_ahead(f.pool), 0); /* the step has ended, and its list with it */
  close_pool(&f);
}

void case_pool(void) {
  once_each(1);
  once_each(2);
  once_each(9); /* more than the cores of most test machines */
  waits(1);
  waits(2);
  waits(9);
  turns();
  pinned();
  read_ahead();
  idle();
}
