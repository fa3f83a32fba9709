/* llc.h: `prefetch ?p[*] -> llc`: workers that have nothing to do pull the first blocks of the
 * experts that the next layer is predicted to choose into the last-level cache; whether that pays is
 * measured while the engine is used. No result depends on any of it. */
#ifndef PDS_LLC_H
#define PDS_LLC_H

#include <stdatomic.h>
#include <stdbool.h>

#include "pds_isa.h"
#include "pdscope.h"
#include "pool.h"
#include "step.h"

enum {
  PDS_LLC_SLICE = 256 * 1024, /* of an expert's gate_up, taken in turn: about one item of work */
  PDS_LLC_MOST = 16 << 20,    /* bytes a layer: what 160 GB/s read in 100 idle microseconds, */
  PDS_LLC_SHARE = 4           /* and no more than one part in so many of the last-level cache */
};

/* The trial of one phase: windows of steps with and without, in turn, then a verdict that holds for
 * long. Steps of one engine take turns, so only what others look at is atomic. */
enum {
  PDS_LLC_WARMUP = 32,   /* steps before the first trial: weights are touched, clocks rise */
  PDS_LLC_WINDOW = 16,   /* steps of a window, */
  PDS_LLC_SKIP = 2,      /* of which the first do not count */
  PDS_LLC_ROUNDS = 8,    /* pairs of windows, the order alternating */
  PDS_LLC_WINS = 7,      /* rounds that must be won, */
  PDS_LLC_GAIN = 50,     /* and the median gain that there must be, in 1/100 percent */
  PDS_LLC_RECHECK = 4096 /* steps that a verdict holds */
};

typedef struct pds_llc_trial {
  uint32_t left; /* steps until the next trial begins; 0: one is running */
  uint32_t key;  /* what the compared steps have in common */
  uint32_t others, round, step;
  bool second, verdict;
  double ns[PDS_LLC_WINDOW], first; /* median of the round's first window */
  double speedup[PDS_LLC_ROUNDS];
  _Atomic int32_t state;   /* PDS_CACHE_PREFETCH_*; AUTO: no verdict yet, or being measured again */
  _Atomic int32_t gain;    /* median of the last trial, in 1/100 percent */
  _Atomic uint32_t trials; /* finished */
} pds_llc_trial;

void pds_llc_trial_init(pds_llc_trial *trial);
/* Whether the next step prefetches. */
bool pds_llc_trial_on(const pds_llc_trial *trial);
/* Takes in a step that took `ns`; steps of another `key` do not count in a trial. */
void pds_llc_trial_step(pds_llc_trial *trial, uint32_t key, uint64_t ns);

/* Of a session, and of all of an engine. */
typedef struct pds_llc_counts {
  _Atomic uint64_t bytes, useful_bytes; /* begun to be pulled in; of these, of activated experts */
  _Atomic uint64_t predicted, hits;     /* experts; of these, activated */
} pds_llc_counts;

/* Of an engine. */
typedef struct pds_llc {
  int32_t asked;          /* PDS_CACHE_PREFETCH_* */
  bool possible;          /* there are idle workers and predictions */
  uint64_t budget;        /* bytes a layer */
  const char *why;        /* pds_cache_prefetch_info.why */
  pds_llc_trial trial[2]; /* decode, batch */
  pds_llc_counts counts;
} pds_llc;

/* The predictions that the running layer was given. */
typedef struct pds_llc_list {
  uint32_t target;    /* whose experts they are */
  uint32_t predicted; /* experts; 0: no list */
  pds_ahead ahead;
  uint64_t is_predicted[PDS_MAX_EXPERTS / 64];
  uint16_t expert[PDS_AHEAD_RANGES]; /* of each range */
} pds_llc_list;

/* llc_bytes 0: unknown. */
void pds_llc_init(pds_llc *llc, int32_t asked, const pds_plan *plan, uint32_t threads,
                  uint64_t llc_bytes);
/* Around the instructions of a step, while it holds the pool: whether to predict and prefetch. */
bool pds_llc_begin(const pds_llc *llc, uint32_t rows);
void pds_llc_end(pds_llc *llc, uint32_t rows, uint32_t n_logits, uint64_t ns);

/* Hands the experts in ?p to the idle workers; returns to how many of them it came. */
uint32_t pds_llc_prefetch(const pds_llc *llc, pds_llc_list *list, pds_step_ctx *ctx,
                          uint32_t layer);
/* Ends what was prefetched for `layer`, whose ?c is bound: late is useless. Counts for the engine
 * and for the session. */
void pds_llc_settle(pds_llc *llc, pds_llc_list *list, pds_llc_counts *counts,
                    const pds_step_ctx *ctx, uint32_t layer);

#endif
