/* policy_rivals.c: what other systems would do. compiler/policies.py says the same in Python, and
 * docs/policies.md where each comes from. Slots bound every policy alike; what a policy would load and
 * cannot runs on the CPU. */
#include <stddef.h>

#include "decide_parts.h"

static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Nothing moves. */
void pds_decide_static(const pds_decision_in *in, pds_decision *out) {
  (void)in;
  (void)out;
}

/* Everything runs on the GPU; what is not there is loaded now. */
void pds_decide_ondemand(const pds_decision_in *in, pds_decision *out) {
  pds_take_on(in, pds_room_on(in), out);
}

/* As ondemand, and everything predicted for the next layer is prefetched. */
void pds_decide_fate(const pds_decision_in *in, pds_decision *out) {
  pds_decide_ondemand(in, out);
  pds_take_pre(in, pds_room_pre(in, out->n_on), out);
}

/* Each expert by itself: to the GPU if transfer and computing there take less than the CPU. */
void pds_decide_fiddler(const pds_decision_in *in, pds_decision *out) {
  int64_t transfer = pds_time(in->costs->io_start) + pds_io_expert(in);
  int64_t cpu_start = pds_time(in->costs->cpu_start);
  uint32_t room = pds_room_on(in);
  for (uint32_t i = in->n_cur; i-- > 0 && out->n_on < room;) {
    const pds_due *due = in->cur + i;
    if (transfer + pds_one_gpu(in, due) < cpu_start + pds_due_cpu(in, due))
      out->on[out->n_on++] = (pds_load){(uint16_t)due->expert, 0};
  }
}

/* Greedy balance of an ascending list: the CPU takes the coldest expert that is left or the link the
 * hottest, whichever is computed first; the CPU if both are. Returns the loads, at most `most`; *link
 * is when the link is free, *gpu when the GPU is, which ends as the end of both. */
static uint32_t balanced(const pds_decision_in *in, const pds_due *dues, uint32_t n, uint32_t most,
                         int64_t *gpu, int64_t *link) {
  uint32_t low = 0, high = n;
  int64_t io = pds_io_expert(in), cpu = pds_time(in->costs->cpu_start);
  while (low < high) {
    int64_t by_cpu = cpu + pds_due_cpu(in, dues + low);
    int64_t by_gpu = larger(*gpu, *link + io) + pds_one_gpu(in, dues + high - 1);
    if (by_gpu < by_cpu && n - high < most) {
      high--;
      *gpu = by_gpu;
      *link += io;
    } else {
      low++;
      cpu = by_cpu;
    }
  }
  if (low) *gpu = larger(*gpu, cpu);
  return n - high;
}

/* How long the balanced next layer takes when the hottest `pre` of it are there; `their_gpu`: what
 * they add on the GPU. */
static int64_t next_layer(const pds_decision_in *in, uint32_t pre, int64_t their_gpu) {
  int64_t gpu = pds_time(in->next_gpu), link = pds_time(in->costs->io_start);
  if (pre) gpu += pds_time(in->costs->gpu_start) + their_gpu;
  balanced(in, in->next, in->n_next - pre, in->n_next - pre, &gpu, &link);
  return gpu;
}

/* Greedy balance of this layer's queues; while the link is idle before the next layer, it prefetches
 * the hottest of the predicted as long as each shortens the next layer. */
void pds_decide_hybrimoe(const pds_decision_in *in, pds_decision *out) {
  int64_t end = pds_time(in->gpu_busy), link = pds_time(in->backlog);
  if (in->n_res) {
    end += pds_time(in->costs->gpu_start);
    for (uint32_t i = 0; i < in->n_res; i++) end += pds_due_gpu(in, in->res + i);
    if (in->n_late) end = larger(end, link);
  }
  if (!link) link = pds_time(in->costs->io_start);
  pds_take_on(in, balanced(in, in->cur, in->n_cur, pds_room_on(in), &end, &link), out);
  int64_t fit = larger(end + pds_time(in->attention) - link, 0) / pds_io_expert(in);
  uint32_t most = pds_room_pre(in, out->n_on), pre = 0;
  if (fit < most) most = (uint32_t)fit;
  int64_t before = next_layer(in, 0, 0), their_gpu = 0;
  while (pre < most) {
    their_gpu += pds_due_gpu(in, in->next + in->n_next - 1 - pre);
    int64_t after = next_layer(in, pre + 1, their_gpu);
    if (after >= before) break;
    before = after;
    pre++;
  }
  pds_take_pre(in, pre, out);
}

/* The weight of those before `due`, the heaviest first, of equal ones the lowest id. */
static int64_t heavier(const pds_due *due, const pds_due *dues, uint32_t n) {
  int64_t sum = 0;
  for (uint32_t i = 0; i < n; i++)
    if (dues[i].weight > due->weight ||
        (dues[i].weight == due->weight && dues[i].expert < due->expert))
      sum += dues[i].weight;
  return sum;
}

/* Low: the loads behind the experts that hold the first 6/10 of the routing weight of two lists. The
 * loads are the hottest of `dues`, hottest first. */
static void mark(pds_load *loads, uint32_t n_loads, const pds_due *dues, uint32_t n,
                 const pds_due *others, uint32_t n_others) {
  int64_t total = 0;
  for (uint32_t i = 0; i < n; i++) total += dues[i].weight;
  for (uint32_t i = 0; i < n_others; i++) total += others[i].weight;
  for (uint32_t i = 0; i < n_loads; i++) {
    const pds_due *due = dues + n - 1 - i;
    int64_t before = heavier(due, dues, n) + heavier(due, others, n_others);
    if (before * 10 > total * 6) loads[i].flags |= PDS_LOAD_LOW;
  }
}

/* As hybrimoe; loads of experts that matter little may be of the smaller format. */
void pds_decide_apex(const pds_decision_in *in, pds_decision *out) {
  pds_decide_hybrimoe(in, out);
  mark(out->on, out->n_on, in->cur, in->n_cur, in->res, in->n_res);
  mark(out->pre, out->n_pre, in->next, in->n_next, NULL, 0);
}
