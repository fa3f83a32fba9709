/* case_llc.c: what is prefetched and counted, and when a trial says that it pays. */
#define _GNU_SOURCE
#include "llc.h"

#include <unistd.h>

#include "map.h"
#include "memory.h"
#include "test.h"

/* --- the trial --- */

enum {
  KEY = 1 << 8 | 1,
  TRIAL = PDS_LLC_ROUNDS * 2 * PDS_LLC_WINDOW, /* steps */
};

/* Steps that take `off` or `on` ns, and now and then much longer; the count of those with it on. */
static uint32_t steps(pds_llc_trial *t, uint32_t n, uint32_t key, uint64_t off, uint64_t on) {
  uint32_t with = 0;
  for (uint32_t i = 0; i < n; i++) {
    const bool is_on = pds_llc_trial_on(t);
    with += is_on;
    pds_llc_trial_step(t, key, (is_on ? on : off) * (i % 7 == 3 ? 5 : 1));
  }
  return with;
}

static void trial(uint64_t off, uint64_t on, int32_t verdict, int32_t gain) {
  pds_llc_trial t = {0};
  pds_llc_trial_init(&t);
  CHECK_EQ(t.state, PDS_CACHE_PREFETCH_AUTO);
  CHECK_EQ(steps(&t, PDS_LLC_WARMUP, KEY, off, on), 0); /* off without evidence */
  CHECK_EQ(steps(&t, TRIAL - 1, KEY, off, on), TRIAL / 2 - (PDS_LLC_ROUNDS % 2 ? 1 : 0));
  CHECK_EQ(t.state, PDS_CACHE_PREFETCH_AUTO);
  steps(&t, 1, KEY, off, on);
  CHECK_EQ(t.state, verdict);
  CHECK_EQ(t.gain, gain);
  CHECK_EQ(t.trials, 1);
  CHECK_EQ(steps(&t, PDS_LLC_RECHECK, KEY, off, on),
           verdict == PDS_CACHE_PREFETCH_ON ? PDS_LLC_RECHECK : 0);
  CHECK_EQ(t.state, PDS_CACHE_PREFETCH_AUTO); /* measured again, */
  steps(&t, TRIAL, KEY, on, off);             /* on a machine that has changed its mind */
  CHECK_EQ(t.trials, 2);
  CHECK_EQ(t.state, off > on    ? PDS_CACHE_PREFETCH_OFF
                    : off == on ? verdict
                                : PDS_CACHE_PREFETCH_ON);
}

/* Steps with other numbers of rows do not count; where no others come, the trial starts anew. */
static void other_steps(void) {
  pds_llc_trial t = {0};
  pds_llc_trial_init(&t);
  steps(&t, PDS_LLC_WARMUP, KEY, 100, 100);
  for (uint32_t i = 0; i < TRIAL; i++) {
    steps(&t, 1, KEY, 100, 90);
    steps(&t, 3, KEY + 1, 5, 7000);
  }
  CHECK_EQ(t.state, PDS_CACHE_PREFETCH_ON);
  CHECK_EQ(t.gain, 1111);
  steps(&t, PDS_LLC_RECHECK, KEY, 100, 90);
  steps(&t, 40, KEY, 100, 90);
  steps(&t, 64 + TRIAL, KEY + 1, 90, 100);
  CHECK_EQ(t.state, PDS_CACHE_PREFETCH_OFF);
}

/* --- lists and counts --- */

enum { EXPERTS = 6, BLOB = 2 * PDS_LLC_SLICE };

/* Has a layer's list read and settles it: until `bytes` were, since a loaded machine may let the
 * workers wait, who have nothing else to do. Returns how many experts the list has. */
static uint32_t read_and_settle(pds_llc *llc, pds_llc_list *list, pds_llc_counts *counts,
                                pds_step_ctx *ctx, uint64_t bytes) {
  const pds_llc_counts before = *counts, whole = llc->counts;
  for (useconds_t wait = 10000;; wait *= 2) {
    const uint32_t n = pds_llc_prefetch(llc, list, ctx, 0);
    usleep(wait);
    pds_llc_settle(llc, list, counts, ctx, 0); /* not of that layer */
    CHECK_EQ(counts->predicted, before.predicted);
    pds_llc_settle(llc, list, counts, ctx, 1);
    if (counts->bytes - before.bytes == bytes || wait > 20000000) return n;
    *counts = before;
    llc->counts = whole;
  }
}

static void lists(void) {
  static unsigned char weights[EXPERTS * BLOB];
  static int32_t predicted[EXPERTS] = {4, 1, 5, 0};
  const unsigned char *files[] = {weights};
  /* 512 columns of 256 fp32 inputs: 512 KiB, two slices */
  const pds_layer layers[] = {
      {.moe = 1, .predictor = {PDS_PREDICT_CROSS_GATE, 1}},
      {.moe = 1,
       .gate = {.experts = EXPERTS},
       .experts = {.inter = 256, .gate_up = {PDS_F32, 0, 512, 256, EXPERTS, 0, BLOB}}},
  };
  const pds_plan plan = {.n_layers = 2, .layers = layers};
  pds_engine_layout at = pds_layout_engine(&plan, 3);
  void *base;
  CHECK_OK(pds_map_anon(at.total, "test", &base));
  unsigned char *arena = base;
  pds_pool *pool = (pds_pool *)(arena + at.pool);
  CHECK_OK(pds_pool_create(pool, arena + at.workers, arena + at.stacks, 3));
  pds_hole holes[] = {{.expert = 0, .rows = 1}, {.expert = 3, .rows = 1}, {.expert = 4, .rows = 2}};
  pds_step_ctx ctx = {.plan = &plan,
                      .pool = pool,
                      .files = files,
                      .scratch = (unsigned char *)predicted, /* LLC_HOLES is at 0 */
                      .rows = 2,
                      .cpu_holes = holes,
                      .n_cpu_holes = 3,
                      .predicts = 1,
                      .n_llc_holes = 4};
  pds_llc llc = {0};
  pds_llc_list list = {0};
  pds_llc_counts counts = {0};
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_ON, &plan, 3, 12 * PDS_LLC_SLICE);
  CHECK_EQ(llc.budget, 3 * PDS_LLC_SLICE); /* a quarter of the cache */
  CHECK(pds_llc_begin(&llc, 1) && pds_llc_begin(&llc, 16) && !pds_llc_begin(&llc, 17));

  pds_pool_open(pool);
  CHECK_EQ(read_and_settle(&llc, &list, &counts, &ctx, 3 * PDS_LLC_SLICE), 3);
  CHECK_EQ(counts.predicted, 4);
  CHECK_EQ(counts.hits, 2); /* 4 and 0 */
  CHECK_EQ(counts.bytes, 3 * PDS_LLC_SLICE);
  CHECK_EQ(counts.useful_bytes, PDS_LLC_SLICE);  /* of 4; 0 was beyond the budget */
  pds_llc_settle(&llc, &list, &counts, &ctx, 1); /* once */
  CHECK_EQ(counts.predicted, 4);

  /* With more to spend, a second slice of each behind the first of all. */
  llc.budget = 7 * PDS_LLC_SLICE;
  ctx.n_llc_holes = 2;
  CHECK_EQ(read_and_settle(&llc, &list, &counts, &ctx, 4 * PDS_LLC_SLICE), 2);
  CHECK_EQ(list.ahead.slices, 2); /* there are no more */
  CHECK_EQ(counts.bytes, (3 + 4) * PDS_LLC_SLICE);
  CHECK_EQ(counts.useful_bytes, (1 + 2) * PDS_LLC_SLICE); /* 4, not 1 */

  CHECK_EQ(llc.counts.hits, counts.hits);
  CHECK_EQ(llc.counts.bytes, counts.bytes);

  ctx.predicts = 0;
  CHECK_EQ(pds_llc_prefetch(&llc, &list, &ctx, 0), 0);
  pds_pool_close(pool);
  pds_pool_destroy(pool);
  pds_unmap(base, at.total);
}

static void reasons(void) {
  const pds_layer with[] = {{.predictor = {PDS_PREDICT_CROSS_GATE, 1}}, {.moe = 1}};
  const pds_layer without[] = {{.moe = 1}};
  const pds_plan plan = {.n_layers = 2, .layers = with};
  const pds_plan none = {.n_layers = 1, .layers = without};
  pds_llc llc = {0};
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_ON, &plan, 1, 0);
  CHECK(strstr(llc.why, "one thread") && !pds_llc_begin(&llc, 1));
  CHECK_EQ(llc.trial[0].state, PDS_CACHE_PREFETCH_OFF);
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_AUTO, &none, 8, 0);
  CHECK(strstr(llc.why, "no cache prefetch") && !pds_llc_begin(&llc, 1));
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_OFF, &plan, 8, 0);
  CHECK(strstr(llc.why, "asked") && !pds_llc_begin(&llc, 1));
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_AUTO, &plan, 8, 0);
  CHECK(strstr(llc.why, "auto") && !pds_llc_begin(&llc, 1)); /* nothing is known yet */
  CHECK_EQ(llc.trial[0].state, PDS_CACHE_PREFETCH_AUTO);
  CHECK_EQ(llc.budget, 8 << 20); /* of a cache of unknown size */
  pds_llc_init(&llc, PDS_CACHE_PREFETCH_AUTO, &plan, 8, 300 << 20);
  CHECK_EQ(llc.budget, PDS_LLC_MOST);
}

void case_llc(void) {
  trial(100, 90, PDS_CACHE_PREFETCH_ON, 1111);
  trial(100, 100, PDS_CACHE_PREFETCH_OFF, 0);
  trial(1000, 997, PDS_CACHE_PREFETCH_OFF, 30); /* too little to tell from noise */
  trial(90, 100, PDS_CACHE_PREFETCH_OFF, -1000);
  other_steps();
  lists();
  reasons();
}
