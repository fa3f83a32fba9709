/* llc.c: what is prefetched into the last-level cache, what came of it, and whether it pays. */
#include "llc.h"

#include <string.h>

#include "kv_layout.h"
#include "panels.h"

/* --- the trial --- */

void pds_llc_trial_init(pds_llc_trial *t) {
  t->left = PDS_LLC_WARMUP;
  atomic_store_explicit(&t->state, PDS_CACHE_PREFETCH_AUTO, memory_order_relaxed);
}

bool pds_llc_trial_on(const pds_llc_trial *t) {
  if (t->left) return t->verdict;
  return t->second == (t->round % 2 == 0); /* off and on, on and off, ... */
}

static void begin_trial(pds_llc_trial *t, uint32_t key) {
  t->key = key;
  t->others = t->round = t->step = 0;
  t->second = false;
  atomic_store_explicit(&t->state, PDS_CACHE_PREFETCH_AUTO, memory_order_relaxed);
}

/* Sorts x. */
static double median(double *x, uint32_t n) {
  for (uint32_t i = 1; i < n; i++)
    for (uint32_t j = i; j && x[j] < x[j - 1]; j--) {
      const double y = x[j];
      x[j] = x[j - 1];
      x[j - 1] = y;
    }
  return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

static void decide(pds_llc_trial *t) {
  uint32_t wins = 0;
  for (uint32_t i = 0; i < PDS_LLC_ROUNDS; i++) wins += t->speedup[i] > 1;
  const double gain = (median(t->speedup, PDS_LLC_ROUNDS) - 1) * 1e4;
  const int32_t rounded = gain < 1e6 ? (int32_t)gain : 1000000;
  t->verdict = wins >= PDS_LLC_WINS && rounded >= PDS_LLC_GAIN;
  t->left = PDS_LLC_RECHECK;
  atomic_store_explicit(&t->gain, rounded, memory_order_relaxed);
  atomic_fetch_add_explicit(&t->trials, 1, memory_order_relaxed);
  atomic_store_explicit(&t->state, t->verdict ? PDS_CACHE_PREFETCH_ON : PDS_CACHE_PREFETCH_OFF,
                        memory_order_relaxed);
}

void pds_llc_trial_step(pds_llc_trial *t, uint32_t key, uint64_t ns) {
  enum { OTHERS = 64 }; /* steps of another key, one after the other: the caller has moved on */
  if (t->left) {
    if (--t->left == 0) begin_trial(t, key);
    return;
  }
  if (key != t->key) {
    if (++t->others == OTHERS) begin_trial(t, key);
    return;
  }
  t->others = 0;
  t->ns[t->step++] = ns ? (double)ns : 1;
  if (t->step < PDS_LLC_WINDOW) return;
  t->step = 0;
  const double usual = median(t->ns + PDS_LLC_SKIP, PDS_LLC_WINDOW - PDS_LLC_SKIP);
  t->second = !t->second;
  if (t->second) {
    t->first = usual;
    return;
  }
  const double ratio = t->first / usual; /* even rounds: off / on */
  t->speedup[t->round] = t->round % 2 == 0 ? ratio : 1 / ratio;
  if (++t->round == PDS_LLC_ROUNDS) decide(t);
}

/* --- the engine --- */

static bool has_predictor(const pds_plan *plan) {
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].predictor.kind != PDS_PREDICT_NONE) return true;
  return false;
}

void pds_llc_init(pds_llc *llc, int32_t asked, const pds_plan *plan, uint32_t threads,
                  uint64_t llc_bytes) {
  enum { USUAL = 32 << 20 };
  const uint64_t share = (llc_bytes ? llc_bytes : USUAL) / PDS_LLC_SHARE;
  llc->asked = asked;
  llc->budget = share < PDS_LLC_MOST ? share : PDS_LLC_MOST;
  llc->possible = false;
  if (!has_predictor(plan)) {
    llc->why = "the plan's programs have no cache prefetch";
  } else if (threads == 1) {
    llc->why = "one thread: no worker is ever idle";
  } else {
    llc->possible = true;
    llc->why = asked == PDS_CACHE_PREFETCH_AUTO ? "auto: on where steps were measured to gain"
                                                : "asked for";
  }
  const bool measures = llc->possible && asked == PDS_CACHE_PREFETCH_AUTO;
  const int32_t fixed = llc->possible && asked == PDS_CACHE_PREFETCH_ON ? PDS_CACHE_PREFETCH_ON
                                                                        : PDS_CACHE_PREFETCH_OFF;
  for (int i = 0; i < 2; i++) {
    pds_llc_trial_init(&llc->trial[i]);
    if (!measures) atomic_store_explicit(&llc->trial[i].state, fixed, memory_order_relaxed);
  }
}

static uint32_t phase_of(uint32_t rows) {
  return rows > 1; /* decode, batch */
}

bool pds_llc_begin(const pds_llc *llc, uint32_t rows) {
  if (!llc->possible || rows > PDS_PREDICT_ROWS) return false;
  if (llc->asked != PDS_CACHE_PREFETCH_AUTO) return llc->asked == PDS_CACHE_PREFETCH_ON;
  return pds_llc_trial_on(&llc->trial[phase_of(rows)]);
}

void pds_llc_end(pds_llc *llc, uint32_t rows, uint32_t n_logits, uint64_t ns) {
  if (!llc->possible || rows > PDS_PREDICT_ROWS || llc->asked != PDS_CACHE_PREFETCH_AUTO) return;
  pds_llc_trial_step(&llc->trial[phase_of(rows)], rows << 8 | n_logits, ns);
}

/* --- lists --- */

static uint32_t clamp(uint64_t n, uint64_t most) {
  return n > most ? (uint32_t)most : n ? (uint32_t)n : 1;
}

/* How much of each of the `wanted` experts, whose gate_up has `bytes`. */
static void share_out(uint64_t budget, uint32_t wanted, uint64_t bytes, pds_ahead *out) {
  const uint64_t slices = budget / PDS_LLC_SLICE;
  out->ranges = clamp(slices, wanted < PDS_AHEAD_RANGES ? wanted : PDS_AHEAD_RANGES);
  if (bytes < PDS_LLC_SLICE) { /* whole chunks: a blob ends at a multiple of 4096 */
    out->slices = 1;
    out->chunks = (uint32_t)((bytes + PDS_AHEAD_CHUNK - 1) / PDS_AHEAD_CHUNK);
  } else {
    out->slices = clamp(slices / out->ranges, bytes / PDS_LLC_SLICE);
    out->chunks = PDS_LLC_SLICE / PDS_AHEAD_CHUNK;
  }
}

uint32_t pds_llc_prefetch(const pds_llc *llc, pds_llc_list *list, pds_step_ctx *ctx,
                          uint32_t layer) {
  if (!ctx->predicts || !ctx->n_llc_holes) return 0;
  const int32_t *hole = pds_buf(ctx, PDS_BUF_LLC_HOLES);
  memset(list, 0, sizeof *list);
  list->target = ctx->plan->layers[layer].predictor.target;
  list->predicted = ctx->n_llc_holes;
  const pds_tensor *w = &ctx->plan->layers[list->target].experts.gate_up;
  const uint64_t bytes = (uint64_t)pds_ceil(w->n, PDS_LANES) / PDS_LANES * pds_panel_bytes(w);
  share_out(llc->budget, list->predicted, bytes, &list->ahead);
  for (uint32_t i = 0; i < list->predicted; i++)
    list->is_predicted[hole[i] / 64] |= (uint64_t)1 << hole[i] % 64;
  for (uint32_t i = 0; i < list->ahead.ranges; i++) {
    list->expert[i] = (uint16_t)hole[i];
    list->ahead.at[i] = pds_weight(ctx, w, (uint32_t)hole[i]);
  }
  pds_pool_read_ahead(ctx->pool, &list->ahead);
  return list->ahead.ranges;
}

static void count(pds_llc_counts *counts, const pds_llc_list *list, uint32_t hits, uint64_t begun,
                  uint64_t useful) {
  const memory_order relaxed = memory_order_relaxed;
  atomic_fetch_add_explicit(&counts->predicted, list->predicted, relaxed);
  atomic_fetch_add_explicit(&counts->hits, hits, relaxed);
  atomic_fetch_add_explicit(&counts->bytes, begun * PDS_AHEAD_CHUNK, relaxed);
  atomic_fetch_add_explicit(&counts->useful_bytes, useful * PDS_AHEAD_CHUNK, relaxed);
}

void pds_llc_settle(pds_llc *llc, pds_llc_list *list, pds_llc_counts *counts,
                    const pds_step_ctx *ctx, uint32_t layer) {
  if (!list->predicted || list->target != layer) return;
  const uint32_t begun = pds_pool_stop_ahead(ctx->pool);
  uint32_t hits = 0, useful = 0;
  uint64_t activated[PDS_MAX_EXPERTS / 64] = {0};
  for (uint32_t i = 0; i < ctx->n_cpu_holes; i++) {
    const uint32_t e = ctx->cpu_holes[i].expert;
    activated[e / 64] |= (uint64_t)1 << e % 64;
    hits += list->is_predicted[e / 64] >> e % 64 & 1;
  }
  const pds_ahead *ahead = &list->ahead;
  for (uint32_t at = 0, nth = 0; at < begun; at += ahead->chunks, nth++) { /* slice by slice */
    const uint32_t e = list->expert[nth % ahead->ranges];
    const uint32_t chunks = begun - at < ahead->chunks ? begun - at : ahead->chunks;
    if (activated[e / 64] >> e % 64 & 1) useful += chunks;
  }
  count(counts, list, hits, begun, useful);
  count(&llc->counts, list, hits, begun, useful);
  list->predicted = 0;
}
