/* decide.h: which experts of a layer cross the link. A decision is made once per layer, when its gate's
 * output is known, by one function for all phases and policies. compiler/passes/schedule.py is the
 * same in Python: they agree on every input.
 *
 * Times are ns in int64_t, below PDS_TIME_MAX (longer ones count as that); probabilities are in
 * 1/65536; nothing is a float. No function here allocates, keeps or locks anything.
 *
 * The block between the two marker lines is read verbatim by cffi. */
#ifndef PDS_DECIDE_H
#define PDS_DECIDE_H

#include <stdint.h>

#include "pds_isa.h"
#include "pdscope.h"

#define PDS_TIME_MAX (((int64_t)1 << 40) - 1) /* 18 minutes */

/* clang-format off */
/* decide-cdef-begin */

typedef enum pds_policy {
  PDS_POLICY_ADAPTSCHED = 0,   /* the default */
  PDS_POLICY_PAPER = 1,        /* Algorithm 1 as printed */
  PDS_POLICY_STATIC = 2,
  PDS_POLICY_ONDEMAND = 3,
  PDS_POLICY_FATE = 4,
  PDS_POLICY_FIDDLER = 5,
  PDS_POLICY_HYBRIMOE = 6,
  PDS_POLICY_LRU = 7,
  PDS_POLICY_APEX = 8,
  PDS_POLICIES = 9
} pds_policy;

/* An expert with work. In lists that "ascend", a comes before b if a's (tokens, popularity, expert) is
 * smaller; no expert is twice in a list. */
typedef struct pds_due {
  uint32_t expert;
  uint32_t tokens;     /* pending; of the next layer: predicted. 1 to PDS_MAX_ROWS */
  uint32_t popularity; /* how often it is activated: of the rows of its phase, in 1/65536 */
  uint32_t weight;     /* sum of its routing weights in this step, in 1/65536; saturates */
} pds_due;

typedef struct pds_decision_in {
  const pds_costs *costs;
  const pds_due *cur;  /* activated, and neither on the GPU nor on its way; ascends */
  const pds_due *res;  /* activated, and on the GPU; the last n_late: on their way, in order of arrival */
  const pds_due *next; /* predicted for the next layer, and neither on the GPU nor on its way; ascends */
  uint32_t n_cur, n_res, n_late, n_next; /* each at most PDS_MAX_EXPERTS */
  uint32_t policy;     /* pds_policy */
  uint32_t phase;      /* pds_phase */
  uint32_t top_k;      /* experts that a token activates */
  uint32_t hit_q16;    /* of what was prefetched, the part that was then activated */
  uint32_t free_slots; /* slots that may be taken now, the ones to be emptied first included */
  uint32_t stream;     /* a slot is taken again as soon as its expert is computed: on-demand loads may be
                        * more than the slots, and hold two of them in the end */
  int64_t attention;   /* what lies between this layer's experts and the next layer's */
  int64_t backlog;     /* until the link has moved what is on its way and useful: the last of `res` comes then */
  int64_t gpu_busy;    /* what the GPU has to do in this layer besides `res`: the shared expert */
  int64_t next_gpu;    /* what it will have to do in the next one: its shared expert and the predicted
                        * experts that are there or on their way */
} pds_decision_in;

enum { PDS_LOAD_LOW = 1 }; /* a load's flag: the expert matters little, take its smaller format if there is one */

typedef struct pds_load {
  uint16_t expert;
  uint16_t flags;
} pds_load;

typedef enum pds_mode {
  PDS_MODE_NONE = 0,     /* the policy has no modes */
  PDS_MODE_LOAD = 1,     /* a: decode, this layer has too many experts on the CPU */
  PDS_MODE_PREFETCH = 2, /* b: the next layer will have */
  PDS_MODE_UNLOAD = 3,   /* c: neither */
  PDS_MODE_CROSS = 4,    /* d: both */
  PDS_MODE_PREFILL = 5
} pds_mode;

enum { PDS_EQ6_NOT_ASKED = 0, PDS_EQ6_HOLDS = 1, PDS_EQ6_FAILS = 2 };

/* What was compared. Indices are -1 where nothing was found or nothing was asked. */
typedef struct pds_decision_why {
  uint32_t mode;    /* pds_mode */
  uint32_t n_c;     /* balance target of decode */
  int32_t global_i; /* Step 1: first of the merged list that is better on the GPU */
  int32_t local_i;  /* Step 2: first of cur that is */
  int64_t global_gpu, global_cpu; /* Eq 3 there; without one, at the last index */
  int64_t local_gpu, local_cpu;   /* Eq 4 or 5 there; without one, 0 and the whole of cur on the CPU */
  int64_t hidden;   /* Step 3: the link's bubble and the attention, which prefetches hide behind */
  uint32_t ceil_f;  /* prefetches that start in it */
  uint32_t xi;      /* 1: the last of them, partly hidden, is worth it */
  int64_t late;     /* ns that this one comes too late */
  uint32_t eq6;     /* PDS_EQ6_* */
  uint32_t unused;
  int64_t eq6_gpu, eq6_cpu;
  int64_t layer_end, next_end; /* adaptsched: expected ends of this layer and of the next one, from now */
} pds_decision_why;

typedef struct pds_decision {
  pds_load *on;  /* the caller's, [PDS_MAX_EXPERTS]: to load for this layer, in the order of their transfers */
  pds_load *pre; /* the caller's, [PDS_MAX_EXPERTS]: to prefetch for the next layer, in that order, behind on */
  uint32_t n_on, n_pre;
  pds_decision_why why;
} pds_decision;

/* Fills everything of *out but the two pointers. What of cur is not in `on` runs on the CPU. */
void pds_decide(const pds_decision_in *in, pds_decision *out);

/* Decode's decisions by counts, made by compiler/decode_table.py: entries[N][M][bucket][slots], two bytes
 * each, on-demand loads and prefetches. N and M from 0 to top_k, slots to 2 top_k; a bucket holds `step`
 * ns of backlog, bucket 0 none, and the last all that is more. */
typedef struct pds_decision_table {
  const uint8_t *entries;
  uint32_t top_k, buckets;
  int64_t step;
} pds_decision_table;

/* The decision of one row, as pds_decide makes it for the longest backlog of the bucket; `why` has nothing
 * in it. n_cur and n_next are at most top_k. */
void pds_look_up(const pds_decision_table *table, const pds_decision_in *in, pds_decision *out);

/* An expert in a slot, as a policy sees it. */
typedef struct pds_cached {
  int32_t layer;       /* -1: the slot is empty */
  uint32_t expert;
  uint32_t popularity;
  uint32_t used;       /* step in which it was last activated */
  uint32_t score;      /* in 1/65536, when it was last activated: see pds_score */
  uint32_t kept;       /* not 0: may not be taken now (in use, on its way, or prefetched and not yet asked for) */
} pds_cached;

/* Who asks for a slot: `layer` of n_layers, in step `now`, which is of this phase. */
typedef struct pds_asked {
  uint32_t policy, phase, layer, n_layers, now;
} pds_asked;

/* The slot that the policy takes next, or -1 if all are kept. Empty slots go first, then those with the
 * least to lose; of equal ones that unused for longest, then the lowest index. */
int32_t pds_victim(const pds_asked *asked, const pds_cached *slots, uint32_t n);

/* What is lost with a slot is worth pds_worth of it, and pds_worth_of_layer of its layer. */
uint64_t pds_worth(const pds_asked *asked, const pds_cached *slot);
uint64_t pds_worth_of_layer(const pds_asked *asked, uint32_t layer);

/* Not 0: what the policy loaded stays in its slot until another expert takes it; otherwise the slot is
 * empty when the layer is over. */
int32_t pds_policy_keeps(uint32_t policy);

/* Not 0: the policy prefetches, so it asks what the next layer's experts will be. */
int32_t pds_policy_predicts(uint32_t policy);

/* Not 0: what it asks are PhasePer's nets; otherwise the next layer's gate. */
int32_t pds_policy_has_nets(uint32_t policy);

/* Not 0: the policy looks at routing weights. */
int32_t pds_policy_weighs(uint32_t policy);

/* An expert's score when its layer activates it, with this routing weight, `age` steps after the last time.
 * hybrimoe's is the mean of its weights over about 8 steps, the others' the part of about 32 steps that
 * activated it. It decays by itself: pds_victim counts what is left of it. The caller keeps one for every
 * expert of every layer, in a slot or not, which begins as its popularity: those that lose their history
 * with their slot are taken in and thrown out again. */
uint32_t pds_score(uint32_t policy, uint32_t score, uint32_t weight, uint32_t age);

/* The curve at `tokens` (at most PDS_MAX_ROWS). */
int64_t pds_cost_at(const pds_cost_curve *curve, uint32_t tokens);

/* decide-cdef-end */
/* clang-format on */

#endif
