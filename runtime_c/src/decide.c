/* decide.c: the policies' table, the costs, and Algorithm 1. */
#include "decide.h"

#include <stddef.h>

#include "decide_parts.h"

int64_t pds_cost_at(const pds_cost_curve *curve, uint32_t tokens) {
  uint32_t n = curve->n;
  if (!n) return 0;
  if (n == 1 || tokens <= curve->tokens[0]) return curve->ns[0];
  uint32_t k = 1; /* the knot at the right end of the piece; a loop of no surprise is the fastest */
  for (uint32_t i = 1; i < n - 1; i++) k += curve->tokens[i] < tokens;
  int64_t rise = curve->ns[k] - curve->ns[k - 1];
  int64_t run = curve->tokens[k] - curve->tokens[k - 1];
  return curve->ns[k - 1] + rise * (int64_t)(tokens - curve->tokens[k - 1]) / run;
}

int64_t pds_time(int64_t ns) {
  return ns < 0 ? 0 : ns > PDS_TIME_MAX ? PDS_TIME_MAX : ns;
}

int64_t pds_due_cpu(const pds_decision_in *in, const pds_due *due) {
  return pds_time(pds_cost_at(&in->costs->cpu_expert, due->tokens));
}

int64_t pds_due_gpu(const pds_decision_in *in, const pds_due *due) {
  return pds_time(pds_cost_at(&in->costs->gpu_expert, due->tokens));
}

int64_t pds_one_gpu(const pds_decision_in *in, const pds_due *due) {
  return pds_time(in->costs->gpu_start) + pds_due_gpu(in, due);
}

int64_t pds_io_expert(const pds_decision_in *in) {
  int64_t io = pds_time(in->costs->io_expert);
  return io ? io : 1;
}

uint32_t pds_room_on(const pds_decision_in *in) {
  if (!in->free_slots) return 0;
  return in->stream || in->n_cur < in->free_slots ? in->n_cur : in->free_slots;
}

uint32_t pds_room_pre(const pds_decision_in *in, uint32_t n_on) {
  uint32_t held = in->stream && n_on > 2 ? 2 : n_on;
  uint32_t room = in->free_slots > held ? in->free_slots - held : 0;
  return room < in->n_next ? room : in->n_next;
}

void pds_take_on(const pds_decision_in *in, uint32_t n, pds_decision *out) {
  for (uint32_t i = 0; i < n; i++)
    out->on[i] = (pds_load){(uint16_t)in->cur[in->n_cur - 1 - i].expert, 0};
  out->n_on = n;
}

void pds_take_pre(const pds_decision_in *in, uint32_t n, pds_decision *out) {
  for (uint32_t i = 0; i < n; i++)
    out->pre[i] = (pds_load){(uint16_t)in->next[in->n_next - 1 - i].expert, 0};
  out->n_pre = n;
}

/* --- Algorithm 1 --- */

/* t_c of n experts that add `sum` to the CPU's job. */
static int64_t job(const pds_decision_in *in, uint32_t n, int64_t sum) {
  return n ? pds_time(in->costs->cpu_start) + sum : 0;
}

/* n_c = argmin max((k - n_c) t_g, n_c t_c), of experts with one token; the smallest of several. */
static uint32_t balance(const pds_decision_in *in) {
  int64_t gpu = pds_time(pds_cost_at(&in->costs->gpu_expert, 1));
  int64_t cpu = pds_time(pds_cost_at(&in->costs->cpu_expert, 1));
  uint32_t best = 0;
  int64_t least = INT64_MAX;
  for (uint32_t n = 0; n <= in->top_k; n++) {
    int64_t on_gpu = (in->top_k - n) * gpu, on_cpu = n * cpu;
    int64_t end = on_gpu > on_cpu ? on_gpu : on_cpu;
    if (end < least) {
      least = end;
      best = n;
    }
  }
  return best;
}

/* Step 1: the first index of cur that lies in L_global; n_cur if none does. */
static uint32_t global_direction(const pds_decision_in *in, pds_decision_why *why) {
  uint32_t all = in->n_cur + in->n_next, c = 0, n = 0;
  int64_t sum = 0;
  for (uint32_t i = 0; i < all; i++) {
    /* Of equal ones, those of the next layer come first: they are the colder. */
    bool is_cur = n == in->n_next || (c < in->n_cur && in->cur[c].tokens < in->next[n].tokens);
    const pds_due *due = is_cur ? in->cur + c : in->next + n;
    sum += pds_due_cpu(in, due);
    why->global_gpu =
        pds_time(in->costs->io_start) + (all - i) * pds_io_expert(in) + pds_one_gpu(in, due);
    why->global_cpu = job(in, i + 1, sum) + pds_time(in->attention);
    if (why->global_gpu < why->global_cpu) {
      why->global_i = (int32_t)i;
      return c;
    }
    c += is_cur;
    n += !is_cur;
  }
  return in->n_cur;
}

/* Step 2: the smallest i' of first.. that is better on the GPU; n_cur if none is. `moved`: with Eq 5,
 * the boundary expert is counted on the CPU as well. Leaves T_G and T_C there in *why. */
static uint32_t local_boundary(const pds_decision_in *in, uint32_t first, bool moved,
                               pds_decision_why *why) {
  int64_t before = 0; /* of cur[:i] */
  for (uint32_t i = 0; i < in->n_cur; i++) {
    int64_t own = pds_due_cpu(in, in->cur + i);
    if (i >= first) {
      int64_t gpu = pds_time(in->costs->io_start) + (in->n_cur - i) * pds_io_expert(in) +
                    pds_one_gpu(in, in->cur + i);
      int64_t cpu = moved ? job(in, i + 1, before + own) : job(in, i, before);
      if (gpu < cpu) {
        why->local_i = (int32_t)i;
        why->local_gpu = gpu;
        why->local_cpu = cpu;
        return i;
      }
    }
    before += own;
  }
  why->local_gpu = 0;
  why->local_cpu = job(in, in->n_cur, before);
  return in->n_cur;
}

/* Eq 6: with the boundary prefetch, the next layer's GPU is not done later than its CPU would be
 * without. */
static bool next_gains(const pds_decision_in *in, uint32_t c, pds_decision_why *why) {
  uint32_t left = in->n_next - c + 1;
  int64_t sum = 0;
  for (uint32_t i = 0; i < left; i++) sum += pds_due_cpu(in, in->next + i);
  why->eq6_gpu = why->late + pds_one_gpu(in, in->next + in->n_next - c);
  why->eq6_cpu = job(in, left, sum);
  bool holds = why->eq6_gpu < why->eq6_cpu;
  why->eq6 = holds ? PDS_EQ6_HOLDS : PDS_EQ6_FAILS;
  return holds;
}

/* Step 3: how many of next to prefetch. */
static uint32_t hidden_prefetches(const pds_decision_in *in, uint32_t n_on, bool constrained,
                                  pds_decision_why *why) {
  int64_t io = pds_io_expert(in), x = why->local_cpu - why->local_gpu + pds_time(in->attention);
  int64_t c = (x + io - 1) / io, most = pds_room_pre(in, n_on);
  why->hidden = x;
  why->late = c * io - x;
  why->ceil_f = c > UINT32_MAX ? UINT32_MAX : (uint32_t)c;
  why->xi = in->hit_q16 * io > why->late * 65536;
  if (c > most) return (uint32_t)most; /* there is no partly hidden one */
  if (!c) return 0;
  bool last = why->xi && (!constrained || next_gains(in, (uint32_t)c, why));
  return (uint32_t)c - !last;
}

void pds_decide_paper(const pds_decision_in *in, pds_decision *out) {
  pds_decision_why *why = &out->why;
  bool constrained = in->phase != PDS_PHASE_PREFILL;
  why->mode = PDS_MODE_PREFILL;
  if (constrained) {
    why->n_c = balance(in);
    bool load = in->n_cur > why->n_c, prefetch = in->n_next > why->n_c;
    why->mode = prefetch ? PDS_MODE_PREFETCH : PDS_MODE_UNLOAD;
    if (load) why->mode = prefetch ? PDS_MODE_CROSS : PDS_MODE_LOAD;
    if (in->phase == PDS_PHASE_BATCH) why->mode = PDS_MODE_CROSS;
  }
  if (why->mode == PDS_MODE_UNLOAD) return;
  uint32_t first = 0, boundary;
  bool moved = why->mode == PDS_MODE_LOAD;
  if (why->mode == PDS_MODE_PREFETCH) first = in->n_cur;
  if (why->mode == PDS_MODE_CROSS || why->mode == PDS_MODE_PREFILL)
    first = global_direction(in, why);
  uint32_t room = pds_room_on(in);
  if (first < in->n_cur - room) first = in->n_cur - room;
  boundary = local_boundary(in, first, moved, why);
  pds_take_on(in, in->n_cur - boundary, out);
  if (!moved) pds_take_pre(in, hidden_prefetches(in, out->n_on, constrained, why), out);
}

/* --- the table --- */

static void (*const decide[PDS_POLICIES])(const pds_decision_in *, pds_decision *) = {
    [PDS_POLICY_ADAPTSCHED] = pds_decide_adaptsched,
    [PDS_POLICY_PAPER] = pds_decide_paper,
    [PDS_POLICY_STATIC] = pds_decide_static,
    [PDS_POLICY_ONDEMAND] = pds_decide_ondemand,
    [PDS_POLICY_FATE] = pds_decide_fate,
    [PDS_POLICY_FIDDLER] = pds_decide_fiddler,
    [PDS_POLICY_HYBRIMOE] = pds_decide_hybrimoe,
    [PDS_POLICY_LRU] = pds_decide_ondemand,
    [PDS_POLICY_APEX] = pds_decide_apex,
};

void pds_decide(const pds_decision_in *in, pds_decision *out) {
  out->n_on = out->n_pre = 0;
  out->why = (pds_decision_why){.global_i = -1, .local_i = -1};
  decide[in->policy](in, out);
}

void pds_look_up(const pds_decision_table *table, const pds_decision_in *in, pds_decision *out) {
  uint32_t counts = table->top_k + 1, most = 2 * table->top_k;
  int64_t bucket = (pds_time(in->backlog) + table->step - 1) / table->step;
  if (bucket > table->buckets - 1) bucket = table->buckets - 1;
  uint32_t slots = in->free_slots < most ? in->free_slots : most;
  uint64_t at = ((uint64_t)in->n_cur * counts + in->n_next) * table->buckets + (uint32_t)bucket;
  const uint8_t *entry = table->entries + 2 * (at * (most + 1) + slots);
  out->why = (pds_decision_why){.global_i = -1, .local_i = -1};
  pds_take_on(in, entry[0], out);
  pds_take_pre(in, entry[1], out);
}
