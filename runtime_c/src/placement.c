/* placement.c: recompile on a GPU plan: what the gate chose, what is on the GPU or on its way, and what
 * the predictor expects, become a decision; the decision becomes holes, transfers and residency. */
#include <string.h>

#include "gpu.h"
#include "gpu_kernels.h"
#include "trace.h"

enum {
  HIT_SHARE = 8,         /* a layer's hit rate follows what happens by 1/8 a decision */
  HIT_LEAST = 65536 / 4, /* below that, predictions for the layer pause */
  PAUSE = 64,            /* for so many decisions, and then tries again */
  HIT_AGAIN = 65536 / 2  /* as if it hit so often */
};

/* --- lists --- */

/* A list's order: coldest first. */
static uint64_t key_of(const pds_due *due, uint32_t index) {
  _Static_assert(PDS_MAX_EXPERTS <= 1 << 10 && PDS_MAX_ROWS < 1 << 22, "a key's parts");
  return (uint64_t)due->tokens << 42 | (uint64_t)due->popularity << 10 | index;
}

/* Two ascending runs become one. */
static void merge(const uint64_t *a, uint32_t n_a, const uint64_t *b, uint32_t n_b, uint64_t *out) {
  uint32_t i = 0, j = 0;
  while (i < n_a && j < n_b) {
    const uint64_t x = a[i], y = b[j];
    const bool first = x < y;
    *out++ = first ? x : y;
    i += first;
    j += !first;
  }
  while (i < n_a) *out++ = a[i++];
  while (j < n_b) *out++ = b[j++];
}

static void sort_run(uint64_t *x, uint32_t n) {
  for (uint32_t i = 1; i < n; i++) {
    const uint64_t moved = x[i];
    uint32_t at = i;
    for (; at && x[at - 1] > moved; at--) x[at] = x[at - 1];
    x[at] = moved;
  }
}

/* Ascending; those at the same place in tokens and popularity are in the order of their experts, and stay
 * so. */
static void sort(pds_due *x, uint32_t n) {
  enum { RUN = 8 };
  uint64_t keys[2][PDS_MAX_EXPERTS];
  pds_due old[PDS_MAX_EXPERTS];
  if (n < 2) return;
  for (uint32_t i = 0; i < n; i++) keys[0][i] = key_of(&x[i], i);
  for (uint32_t i = 0; i < n; i += RUN) sort_run(keys[0] + i, n - i < RUN ? n - i : RUN);
  uint32_t from = 0;
  for (uint32_t run = RUN; run < n; run *= 2, from = !from)
    for (uint32_t i = 0; i < n; i += 2 * run) {
      const uint32_t n_a = n - i < run ? n - i : run, both = n - i < 2 * run ? n - i : 2 * run;
      merge(keys[from] + i, n_a, keys[from] + i + n_a, both - n_a, keys[!from] + i);
    }
  memcpy(old, x, n * sizeof *x);
  for (uint32_t i = 0; i < n; i++) x[i] = old[keys[from][i] % (1 << 10)];
}

enum { WORDS = PDS_MAX_EXPERTS / 64 };

typedef struct placing {
  pds_gpu_step *step;
  pds_gpu *gpu;
  pds_gpu_policy *policy;
  pds_residency *residency;
  const pds_program *program;
  uint32_t layer, n_cur, n_res, n_late, n_next;
  uint32_t free;     /* slots that may be taken when the decision is made */
  int64_t attention; /* ns */
  int64_t backlog;   /* until the last of the late ones has arrived */
  int64_t next_gpu;  /* of predicted experts that are there */
  uint64_t activated[WORDS], is_recalled[WORDS]; /* sets of experts, and of each of them: */
  uint16_t hole_of[PDS_MAX_EXPERTS];             /* index into the host's holes */
  uint16_t recall_of[PDS_MAX_EXPERTS];           /* and into `recalled` */
  pds_transfer recalled[PDS_MAX_EXPERTS];        /* prefetches that were not yet sent whole */
} placing;

static size_t expert_at(const placing *p, uint32_t layer, uint32_t expert) {
  return (size_t)layer * p->residency->experts + expert;
}

static uint32_t popularity_of(const placing *p, uint32_t layer, uint32_t expert) {
  return p->policy->popularity[expert_at(p, layer, expert)];
}

/* Sum of an expert's routing weights, for the policies that look at it. */
static uint32_t weight_of(const placing *p, const pds_hole *hole) {
  if (!pds_policy_weighs(p->policy->policy)) return 0;
  const float *weight = pds_buf(p->step->host, PDS_BUF_ROUTE_W);
  const int32_t *sorted = pds_buf(p->step->host, PDS_BUF_EXPERT_ROWS);
  double sum = 0;
  for (uint32_t r = 0; r < hole->rows; r++) sum += (double)weight[sorted[hole->first + r]];
  sum *= 65536;
  return sum > 0 ? sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX : 0;
}

/* ns until the link has moved prefetch j of the last decision. */
static int64_t arrival(const pds_gpu_policy *policy, uint32_t j) {
  return policy->free_at + (int64_t)(j + 1) * policy->costs.io_expert - policy->elapsed;
}

/* Predictions for this layer are not worth their time. */
static void pause(placing *p) {
  p->policy->paused[3 * p->layer + p->program->phase] = PAUSE;
  p->policy->ledger[p->layer].pauses++;
}

/* The experts that the last decision prefetched: those not activated are forgotten, and what of
 * them was sent is wasted. The hit rate follows. */
static void settle_prefetches(placing *p) {
  pds_gpu_policy *policy = p->policy;
  pds_residency *r = p->residency;
  pds_ledger *ledger = &policy->ledger[p->layer];
  for (uint32_t w = 0; w < r->words; w++) {
    ledger->drafted += pds_count(policy->draft[w]);
    ledger->drafted_right += pds_count(policy->draft[w] & p->activated[w]);
    policy->draft[w] = 0;
  }
  const uint64_t bytes = p->gpu->plan->layers[p->layer].experts.gate_up.stride;
  uint32_t hits = 0;
  for (uint32_t j = 0; j < policy->ahead; j++) {
    const uint32_t e = policy->ahead_expert[j];
    const uint64_t sent = pds_has(p->is_recalled, e) ? p->recalled[p->recall_of[e]].issued : bytes;
    ledger->prefetches++;
    if (pds_has(p->activated, e)) {
      hits++;
      ledger->useful_bytes += bytes;
      if (arrival(policy, j) > 0) ledger->late_bytes += bytes;
      continue;
    }
    ledger->wasted_bytes += sent;
    const int32_t slot = pds_slot_of(r, p->layer, e);
    if (slot != PDS_NO_SLOT && sent < bytes) pds_slot_drop(r, slot);
  }
  for (uint32_t w = 0; w < r->words; w++) /* predicted ones may go now */
    for (uint64_t left = pds_kept_of(r, p->layer)[w] & ~p->activated[w]; left; left &= left - 1) {
      const int32_t slot = pds_slot_of(r, p->layer, 64 * w + pds_lowest(left));
      pds_slot_keep(r, pds_cached_of(r, slot), 0);
    }
  if (!policy->ahead) return;
  uint32_t *hit = &policy->hit_q16[3 * p->layer + p->program->phase];
  *hit = *hit - *hit / HIT_SHARE + 65536 / HIT_SHARE * hits / policy->ahead;
  if (*hit >= HIT_LEAST) return;
  *hit = HIT_AGAIN;
  pause(p);
}

/* What a prefetched expert saves, if CPU and link share those that are not there. */
static int64_t saved(const placing *p, uint32_t tokens) {
  const int64_t cpu = pds_cost_at(&p->policy->costs.cpu_expert, tokens);
  const int64_t link = p->policy->costs.io_expert;
  return cpu + link ? link * ((cpu << 10) / (cpu + link)) >> 10 : 0;
}

/* What the last layer's prediction was for: a prefetch whose expert is activated saves time, and
 * predicting takes some. */
static void settle_prediction(placing *p) {
  pds_gpu_policy *policy = p->policy;
  const pds_step_ctx *host = p->step->host;
  if (!policy->predicted) return;
  policy->predicted = false;
  int64_t gained = 0;
  for (uint32_t j = 0; j < policy->ahead; j++) {
    const uint32_t e = policy->ahead_expert[j];
    if (pds_has(p->activated, e)) gained += saved(p, host->cpu_holes[p->hole_of[e]].rows);
  }
  int64_t *gain = &policy->gain[3 * p->layer + p->program->phase];
  *gain += gained / HIT_SHARE - *gain / HIT_SHARE;
  if (*gain >= policy->costs.predict) return;
  *gain = 2 * policy->costs.predict;
  pause(p);
}

/* An activated expert's score, which it has with or without a slot. */
static uint32_t score_of(placing *p, const pds_due *due) {
  pds_gpu_policy *policy = p->policy;
  const size_t at = expert_at(p, p->layer, due->expert);
  policy->score[at] = pds_score(policy->policy, policy->score[at],
                                due->weight / p->step->host->rows, policy->now - policy->seen[at]);
  policy->seen[at] = policy->now;
  return policy->score[at];
}

/* A slot that an expert was just given. */
static void label(placing *p, int32_t slot, uint32_t layer, uint32_t expert) {
  pds_cached *cached = pds_cached_of(p->residency, slot);
  cached->score = p->policy->score[expert_at(p, layer, expert)];
  cached->used = p->policy->seen[expert_at(p, layer, expert)];
}

/* cur and res of the running layer; who is there is in use from now on. */
static void list_activated(placing *p) {
  const pds_step_ctx *host = p->step->host;
  pds_gpu_policy *policy = p->policy;
  pds_due late[PDS_MAX_EXPERTS]; /* by the order of their prefetches */
  uint64_t is_late[WORDS];
  memset(is_late, 0, p->residency->words * sizeof *is_late);
  for (uint32_t i = 0; i < host->n_cpu_holes; i++) {
    const pds_hole *hole = &host->cpu_holes[i];
    const pds_due due = {.expert = hole->expert,
                         .tokens = hole->rows,
                         .popularity = popularity_of(p, p->layer, hole->expert),
                         .weight = weight_of(p, hole)};
    const int32_t slot = pds_slot_of(p->residency, p->layer, hole->expert);
    const uint32_t score = score_of(p, &due);
    if (slot == PDS_NO_SLOT) {
      policy->cur[p->n_cur++] = due;
      continue;
    }
    pds_cached *cached = pds_cached_of(p->residency, slot);
    uint32_t j = 0;
    bool comes_late = false;
    if (cached) {
      if (pds_has(policy->is_ahead, due.expert)) {
        j = policy->ahead_at[due.expert];
        comes_late = arrival(policy, j) > 0;
      }
      pds_slot_keep(p->residency, cached, PDS_KEPT_IN_USE);
      cached->used = policy->now;
      cached->popularity = due.popularity;
      cached->score = score;
    }
    if (comes_late) {
      late[j] = due;
      pds_put(is_late, j);
    } else {
      policy->res[p->n_res++] = due;
    }
  }
  /* The late ones in order of arrival. */
  for (uint32_t w = 0; w < p->residency->words; w++)
    for (uint64_t left = is_late[w]; left; left &= left - 1) {
      const uint32_t j = 64 * w + pds_lowest(left);
      policy->res[p->n_res++] = late[j];
      p->n_late++;
      p->backlog = arrival(policy, j);
    }
  sort(policy->cur, p->n_cur);
}

/* The next layer's draft: the experts that the predictor is sure of. Those that are not on the GPU are
 * listed, for the decision to prefetch; those that are stay. */
static void list_predicted(placing *p, uint32_t capacity) {
  const pds_step_ctx *host = p->step->host;
  if (!capacity || !pds_gpu_prediction_pays(p->step, p->layer, p->program->phase)) return;
  const uint32_t target = p->layer + 1;
  p->policy->predicted = true;
  const pds_gate *gate = &p->gpu->plan->layers[target].gate;
  const uint32_t picks = pds_predicting(host) * gate->top_k;
  const int32_t *id = pds_buf(host, PDS_BUF_PREDICT_ID);
  const float *weight = pds_buf(host, PDS_BUF_PREDICT_W);
  const double least = p->policy->sure_q16[3 * target + p->program->phase];
  struct {
    double sum;
    uint64_t count;
  } of[PDS_MAX_EXPERTS];
  memset(of, 0, gate->experts * sizeof *of);
  for (uint32_t i = 0; i < picks; i++) {
    of[id[i]].count++;
    of[id[i]].sum += (double)weight[i];
  }
  for (uint32_t e = 0; e < gate->experts; e++) {
    if (!of[e].count) continue;
    const double sure = of[e].sum / (double)of[e].count * 65536;
    if (sure < least) continue;
    pds_put(p->policy->draft, e);
    uint64_t tokens = of[e].count * host->predict_step;
    if (tokens > host->rows) tokens = host->rows;
    const int32_t slot = pds_slot_of(p->residency, target, e);
    if (slot != PDS_NO_SLOT) {
      pds_cached *cached = pds_cached_of(p->residency, slot);
      if (cached && !cached->kept) pds_slot_keep(p->residency, cached, PDS_KEPT_AHEAD);
      p->next_gpu += pds_cost_at(&p->policy->costs.gpu_expert, (uint32_t)tokens);
      continue;
    }
    /* In decode tokens say nothing: how sure the predictor is ranks them. */
    p->policy->next[p->n_next++] =
        (pds_due){.expert = e,
                  .tokens = (uint32_t)tokens,
                  .popularity = sure > 0 ? sure < 65536 ? (uint32_t)sure : 65536 : 0};
  }
  sort(p->policy->next, p->n_next);
}

/* --- the decision --- */

static int64_t attention_ns(const placing *p) {
  const pds_costs *costs = &p->policy->costs;
  const int64_t each =
      p->program->phase == PDS_PHASE_PREFILL ? costs->context_row_prefill : costs->context_row;
  return pds_cost_at(&costs->attention, p->step->host->rows) + each * (p->step->context / 1024);
}

static void decide(placing *p, pds_decision *out) {
  pds_gpu_policy *policy = p->policy;
  const pds_costs *costs = &policy->costs;
  const uint32_t rows = p->step->host->rows;
  p->free = pds_slots_free(p->residency, p->layer);
  const bool shared = p->program->shared != 0;
  const bool next_shared =
      p->layer + 1 < p->residency->layers && p->gpu->plan->layers[p->layer + 1].shared.inter;
  const pds_decision_in in = {
      .costs = costs,
      .cur = policy->cur,
      .res = policy->res,
      .next = policy->next,
      .n_cur = p->n_cur,
      .n_res = p->n_res,
      .n_late = p->n_late,
      .n_next = p->n_next,
      .policy = policy->policy,
      .phase = p->program->phase,
      .top_k = p->program->top_k,
      .hit_q16 = p->layer + 1 < p->residency->layers
                     ? policy->hit_q16[3 * (p->layer + 1) + p->program->phase]
                     : 0,
      .free_slots = p->free,
      .stream = 1,
      .attention = p->attention,
      .backlog = p->backlog,
      .gpu_busy = shared ? pds_cost_at(&costs->shared, rows) : 0,
      .next_gpu = p->next_gpu + (next_shared ? pds_cost_at(&costs->shared, rows) : 0)};
  pds_decide(&in, out);
}

/* What decisions take the link to do until the next one. */
static void expect(placing *p, const pds_decision *d) {
  pds_gpu_policy *policy = p->policy;
  const pds_costs *costs = &policy->costs;
  int64_t cpu = p->n_cur > d->n_on ? costs->cpu_start : 0, gpu = 0, last = 0;
  for (uint32_t i = 0; i < p->n_cur; i++)
    cpu += pds_cost_at(&costs->cpu_expert, policy->cur[i].tokens);
  for (uint32_t i = 0; i < d->n_on; i++) {
    const pds_hole *hole = &p->step->host->cpu_holes[p->hole_of[d->on[i].expert]];
    cpu -= pds_cost_at(&costs->cpu_expert, hole->rows);
    last = pds_cost_at(&costs->gpu_expert, hole->rows);
  }
  for (uint32_t i = 0; i < p->n_res; i++)
    gpu += pds_cost_at(&costs->gpu_expert, policy->res[i].tokens);
  if (p->n_res) gpu += costs->gpu_start;
  int64_t link = p->backlog;
  if (d->n_on) link += (link ? 0 : costs->io_start) + d->n_on * costs->io_expert;
  int64_t end = cpu > gpu ? cpu : gpu;
  if (d->n_on && link + costs->gpu_start + last > end) end = link + costs->gpu_start + last;
  policy->free_at = d->n_on || p->backlog ? link : costs->io_start;
  policy->elapsed = end + p->attention;
}

/* --- binding --- */

static pds_gpu_hole *bind(placing *p, uint32_t expert, int32_t slot) {
  pds_gpu_step *step = p->step;
  const pds_hole *from = &step->host->cpu_holes[p->hole_of[expert]];
  pds_gpu_hole *hole =
      step->session->holes + (size_t)p->layer * p->residency->experts + step->n_holes++;
  *hole = (pds_gpu_hole){.expert = expert,
                         .first = from->first,
                         .rows = from->rows,
                         .slot = slot,
                         .at = p->gpu->slots + (uint64_t)slot * p->gpu->expert_bytes};
  step->session->on_gpu[expert] = 1;
  return hole;
}

static pds_status ask_arrived(placing *p, uint32_t expert, bool *out_arrived) {
  const uint64_t begin = pds_now_ns();
  const pds_status status =
      pds_link_arrived(p->gpu, pds_slot_of(p->residency, p->layer, expert), out_arrived);
  p->step->driver_ns += pds_now_ns() - begin;
  return status;
}

/* How many of the prefetches that were sent, in that order, have arrived: they do so one after the other. */
static pds_status count_arrived(placing *p, const uint16_t *sent, uint32_t n, uint32_t *out_n) {
  uint32_t low = 0, high = n; /* that have; that may have */
  for (uint32_t asked = n; low < high; asked = (low + high + 1) / 2) {
    bool arrived;
    PDS_RETURN_IF_ERROR(ask_arrived(p, sent[asked - 1], &arrived));
    if (arrived)
      low = asked;
    else
      high = asked - 1;
  }
  *out_n = low;
  return PDS_OK;
}

/* ?r: first those that are there; then those on their way, in order: sent ones, and those that the
 * link takes up again before anything else. */
static pds_status bind_residents(placing *p) {
  pds_gpu_step *step = p->step;
  const pds_gpu_policy *policy = p->policy;
  uint16_t coming[PDS_MAX_EXPERTS];
  uint32_t n = 0, n_sent = 0, n_arrived;
  for (uint32_t j = 0; j < policy->ahead; j++) {
    const uint32_t e = policy->ahead_expert[j];
    if (!pds_has(p->activated, e)) continue;
    coming[n++] = (uint16_t)e;
    n_sent += !pds_has(p->is_recalled, e); /* the first ones */
  }
  PDS_RETURN_IF_ERROR(count_arrived(p, coming, n_sent, &n_arrived));
  uint64_t late[WORDS];
  memset(late, 0, p->residency->words * sizeof *late);
  for (uint32_t k = n_arrived; k < n; k++) pds_put(late, coming[k]);
  for (uint32_t i = 0; i < p->n_res; i++) { /* others' copies ended with an earlier step */
    const uint32_t e = policy->res[i].expert;
    if (!pds_has(late, e)) bind(p, e, pds_slot_of(p->residency, p->layer, e));
  }
  step->n_ready = step->n_holes;
  for (uint32_t k = n_arrived; k < n; k++) {
    const uint32_t e = coming[k];
    pds_gpu_hole *hole = bind(p, e, pds_slot_of(p->residency, p->layer, e));
    if (k < n_sent) {
      step->n_sent++;
      continue;
    }
    pds_transfer t = p->recalled[p->recall_of[e]];
    t.hole = hole;
    pds_link_load(p->gpu, &t);
  }
  return PDS_OK;
}

/* A layer that asks for slots. */
static pds_asked asks(const placing *p, uint32_t layer) {
  return (pds_asked){.policy = p->policy->policy,
                     .phase = p->program->phase,
                     .layer = layer,
                     .n_layers = p->residency->layers,
                     .now = p->policy->now};
}

/* ?l: slots that may be taken, but those that prefetches are to have; behind them the slots of the
 * first ones again. Returns how many found a place: the others stay on the CPU. */
static uint32_t bind_loads(placing *p, const pds_decision *d) {
  pds_gpu_policy *policy = p->policy;
  pds_ledger *ledger = &policy->ledger[p->layer];
  const pds_asked asked = asks(p, p->layer);
  const uint32_t room = p->free > d->n_pre ? p->free - d->n_pre : p->free ? 1 : 0;
  int32_t taken[PDS_MAX_EXPERTS];
  uint32_t n = 0;
  for (uint32_t i = 0; i < d->n_on; i++) {
    const uint32_t e = d->on[i].expert, popularity = popularity_of(p, p->layer, e);
    int32_t slot = PDS_NO_SLOT;
    if (n < room) slot = pds_slot_take(p->residency, &asked, e, popularity, PDS_KEPT_IN_USE);
    if (slot != PDS_NO_SLOT)
      taken[n++] = slot;
    else if (n)
      pds_slot_assign(p->residency, slot = taken[i % n], p->layer, e, popularity, policy->now);
    else
      return i;
    label(p, slot, p->layer, e);
    const pds_transfer t = {
        .layer = p->layer, .expert = e, .slot = slot, .again = i >= n, .hole = bind(p, e, slot)};
    pds_link_load(p->gpu, &t);
    ledger->loads++;
    ledger->load_bytes += p->gpu->plan->layers[p->layer].experts.gate_up.stride;
  }
  return d->n_on;
}

static void bind_prefetches(placing *p, const pds_decision *d, uint32_t capacity) {
  pds_gpu_policy *policy = p->policy;
  const pds_asked asked = asks(p, p->layer + 1);
  for (uint32_t i = 0; i < d->n_pre && i < capacity; i++) {
    const uint32_t e = d->pre[i].expert;
    const int32_t slot =
        pds_slot_take(p->residency, &asked, e, popularity_of(p, p->layer + 1, e), PDS_KEPT_AHEAD);
    if (slot == PDS_NO_SLOT) return;
    label(p, slot, p->layer + 1, e);
    const pds_transfer t = {.layer = p->layer + 1, .expert = e, .slot = slot};
    pds_link_prefetch(p->gpu, &t);
    pds_put(policy->is_ahead, e);
    policy->ahead_at[e] = (uint16_t)policy->ahead;
    policy->ahead_expert[policy->ahead++] = (uint16_t)e;
  }
}

/* ?c: what is left of the host's holes. */
static void bind_cpu(placing *p) {
  pds_step_ctx *host = p->step->host;
  uint32_t n = 0;
  for (uint32_t i = 0; i < host->n_cpu_holes; i++) {
    const pds_hole *h = &host->cpu_holes[i];
    if (!p->step->session->on_gpu[h->expert])
      host->cpu_holes[n++] = (pds_hole){.expert = h->expert, .first = h->first, .rows = h->rows};
  }
  host->n_cpu_holes = n;
}

static pds_status send_rows(placing *p) {
  const pds_plan *plan = p->gpu->plan;
  const pds_step_ctx *host = p->step->host;
  if (!p->step->n_holes || pds_gpu_tells_host(p->step)) return PDS_OK; /* kernels read the host's */
  const uint64_t begin = pds_now_ns();
  const CUresult result = p->gpu->cuda.cuMemcpyHtoDAsync(
      p->step->session->scratch + plan->buffer_offset[PDS_BUF_EXPERT_ROWS],
      pds_buf(host, PDS_BUF_EXPERT_ROWS), 4 * (uint64_t)host->rows * p->program->top_k,
      p->gpu->compute);
  p->step->driver_ns += pds_now_ns() - begin;
  return pds_gpu_check(p->gpu, result, "copying an expert's rows");
}

bool pds_gpu_prediction_pays(const pds_gpu_step *step, uint32_t layer, uint32_t phase) {
  return step->host->predicts && !step->gpu->policy.paused[3 * (layer + 1) + phase];
}

/* What the gate chose; and the prefetches for this layer that were not sent whole. */
static void open_layer(placing *p) {
  const pds_step_ctx *host = p->step->host;
  const size_t bytes = p->residency->words * sizeof *p->activated;
  memset(p->activated, 0, bytes);
  memset(p->is_recalled, 0, bytes);
  for (uint32_t i = 0; i < host->n_cpu_holes; i++) {
    const uint32_t e = host->cpu_holes[i].expert;
    pds_put(p->activated, e);
    p->hole_of[e] = (uint16_t)i;
  }
  const uint32_t n = pds_link_recall(p->gpu, p->recalled);
  for (uint32_t i = 0; i < n; i++) {
    pds_put(p->is_recalled, p->recalled[i].expert);
    p->recall_of[p->recalled[i].expert] = (uint16_t)i;
  }
  p->n_cur = p->n_res = p->n_late = p->n_next = 0;
  p->backlog = p->next_gpu = 0;
  p->attention = attention_ns(p);
}

pds_status pds_gpu_recompile(pds_gpu_step *step, const pds_program *program, const pds_instr *in) {
  placing p; /* large, and most of it is not used: no initialiser */
  p.step = step;
  p.gpu = step->gpu;
  p.policy = &step->gpu->policy;
  p.residency = &step->gpu->residency;
  p.program = program;
  p.layer = (uint32_t)program->layer;
  pds_op_recompile(step->host, p.layer);
  open_layer(&p);
  settle_prediction(&p);
  settle_prefetches(&p);
  list_activated(&p);
  const uint32_t ahead = in->hole_cap[PDS_HOLE_N];
  list_predicted(&p, ahead);

  pds_decision d = {.on = p.policy->on, .pre = p.policy->pre};
  decide(&p, &d);
  if (ahead && p.policy->paused[3 * (p.layer + 1) + program->phase])
    p.policy->paused[3 * (p.layer + 1) + program->phase]--;
  step->n_holes = step->n_ready = step->n_sent = 0;
  step->launches = false;
  memset(step->session->on_gpu, 0, p.residency->experts);
  PDS_RETURN_IF_ERROR(bind_residents(&p));
  d.n_on = bind_loads(&p, &d);
  expect(&p, &d);
  p.policy->ahead = 0;
  memset(p.policy->is_ahead, 0, p.residency->words * sizeof *p.policy->is_ahead);
  bind_prefetches(&p, &d, ahead);
  bind_cpu(&p);
  return send_rows(&p);
}

uint32_t pds_gpu_unload(pds_gpu_step *step) {
  const bool keep = pds_policy_keeps(step->gpu->policy.policy);
  const uint32_t n = pds_slots_release(&step->gpu->residency, step->layer, PDS_KEPT_IN_USE, !keep);
  return keep ? 0 : n;
}

/* An empty slot for each expert that is to be there first, as far as there are slots. */
pds_status pds_gpu_fill_ring(pds_gpu *gpu, const uint8_t *first) {
  pds_residency *r = &gpu->residency;
  const pds_gpu_policy *policy = &gpu->policy;
  PDS_RETURN_IF_ERROR(pds_gpu_enter(gpu));
  pds_status status = PDS_OK;
  uint32_t at = 0;
  for (uint32_t i = 0; i < r->layers * r->experts && status == PDS_OK; i++) {
    if (!first[i] || r->slot_of[i] != PDS_NO_SLOT) continue;
    while (at < r->ring && r->cached[at].layer >= 0) at++;
    if (at == r->ring) break;
    const uint32_t layer = i / r->experts, expert = i % r->experts;
    const int32_t slot = (int32_t)(r->hot + at);
    status = pds_gpu_check(
        gpu,
        gpu->cuda.cuMemcpyHtoDAsync(gpu->slots + (uint64_t)slot * gpu->expert_bytes,
                                    pds_expert_host(gpu->plan, gpu->host_files, layer, expert),
                                    gpu->plan->layers[layer].experts.gate_up.stride, gpu->compute),
        "copying the experts that are there first");
    if (status != PDS_OK) break;
    pds_slot_assign(r, slot, layer, expert, policy->popularity[i], policy->now);
    pds_cached *cached = &r->cached[at];
    pds_slot_keep(r, cached, 0);
    cached->score = policy->score[i];
    cached->used = policy->seen[i];
  }
  if (status == PDS_OK) status = pds_gpu_drain(gpu);
  pds_gpu_leave(gpu);
  return status;
}
