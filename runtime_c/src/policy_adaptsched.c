/* policy_adaptsched.c: the default policy. For every number of on-demand loads, this layer's end and
 * then the next one's, as good as it can become from there; the first of the least. Counts what
 * Algorithm 1 leaves out: the link's backlog, what the residents take on the GPU, and that transfers
 * go on in the next layer. compiler/passes/schedule.py says the same, compiler/optimum.py the model. */
#include "decide_parts.h"

static int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}
static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* The next layer when the hottest k of its experts are prefetched, or loaded then. */
typedef struct ahead {
  const pds_decision_in *in;
  int64_t io, io_start, cpu_start, gpu_start, busy;
  int64_t cpu[PDS_MAX_EXPERTS + 1]; /* of the coldest k on the CPU */
  int64_t gpu[PDS_MAX_EXPERTS + 1]; /* of the hottest k on the GPU */
} ahead;

static void look_ahead(const pds_decision_in *in, ahead *a) {
  uint32_t m = in->n_next;
  a->in = in;
  a->io = pds_io_expert(in);
  a->io_start = pds_time(in->costs->io_start);
  a->cpu_start = pds_time(in->costs->cpu_start);
  a->gpu_start = pds_time(in->costs->gpu_start);
  a->busy = pds_time(in->next_gpu);
  a->cpu[0] = a->gpu[0] = 0;
  for (uint32_t k = 0; k < m; k++) {
    a->cpu[k + 1] = a->cpu[k] + pds_due_cpu(in, in->next + k);
    a->gpu[k + 1] = a->gpu[k] + pds_due_gpu(in, in->next + m - 1 - k);
  }
}

/* When this layer is over, the link is done with it at `link`, and has then moved `moved` ns of what
 * will be needed: `whole` experts. */
typedef struct moment {
  int64_t now, link, moved, whole;
} moment;

static int64_t cpu_end(const ahead *a, moment t, uint32_t loads) {
  uint32_t left = a->in->n_next - loads;
  return left ? t.now + a->cpu_start + a->cpu[left] : t.now;
}

/* The k-th of the late ones arrives when the link has moved k experts in all. GPU times descend, so the
 * chain of late submissions is held up by its first one or by its last. */
static int64_t gpu_end(const ahead *a, moment t, uint32_t loads) {
  uint32_t there = (uint32_t)smaller(t.whole, loads);
  int64_t end = t.now + a->busy;
  if (there) end += a->gpu_start + a->gpu[there];
  if (loads == there) return end;
  int64_t chain = (loads - there) * a->gpu_start + a->gpu[loads] - a->gpu[there];
  int64_t start = t.now;
  if (t.link > t.now)
    start = t.link;
  else if (t.moved == t.whole * a->io)
    start += a->io_start; /* the link is idle */
  int64_t first = start + (there + 1) * a->io - t.moved;
  int64_t last = start + loads * a->io - t.moved;
  last += a->gpu_start + a->gpu[loads] - a->gpu[loads - 1];
  return larger(larger(end, first) + chain, last);
}

/* The next layer's end, and the fewest loads that reach it; room, most: prefetches, and loads in all,
 * that the slots allow. The more loads, the later the GPU and the
 * earlier the CPU: the best is where they cross. */
static int64_t least(const ahead *a, moment t, uint32_t room, uint32_t most, uint32_t *loads) {
  int64_t span = pds_time(t.now - (t.link ? t.link : a->io_start));
  t.moved = smaller(span * a->in->hit_q16 >> 16, room * a->io); /* of prefetches, R_hit is needed */
  t.whole = t.moved / a->io;
  uint32_t low = 0, high = most;
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    if (gpu_end(a, t, middle) < cpu_end(a, t, middle))
      low = middle + 1;
    else
      high = middle;
  }
  int64_t end = larger(gpu_end(a, t, low), cpu_end(a, t, low));
  *loads = low;
  if (low) {
    int64_t fewer = larger(gpu_end(a, t, low - 1), cpu_end(a, t, low - 1));
    if (fewer <= end) {
      end = fewer;
      *loads = low - 1;
    }
  }
  return end;
}

/* How many of the `most` experts' transfers start before the next layer's gate output is known; the
 * last of them, partly hidden, only for a positive xi. */
static uint32_t started(const pds_decision_in *in, int64_t link, uint32_t most,
                        pds_decision_why *why) {
  int64_t io = pds_io_expert(in);
  int64_t free_from = link ? link : pds_time(in->costs->io_start);
  why->hidden = larger(why->layer_end + pds_time(in->attention) - free_from, 0);
  int64_t c = (why->hidden + io - 1) / io;
  why->ceil_f = (uint32_t)smaller(c, UINT32_MAX);
  why->late = c * io - why->hidden;
  why->xi = in->hit_q16 * io > why->late * 65536;
  if (!in->hit_q16) return 0;
  if (c > most) return most;
  return (uint32_t)(why->xi || !c ? c : c - 1);
}

void pds_decide_adaptsched(const pds_decision_in *in, pds_decision *out) {
  pds_decision_why *why = &out->why;
  ahead a;
  look_ahead(in, &a);

  /* The layer without on-demand loads. */
  uint32_t n = in->n_cur, n_there = in->n_res - in->n_late;
  int64_t gpu = pds_time(in->gpu_busy), cpu = 0, link = pds_time(in->backlog);
  if (n_there) gpu += a.gpu_start;
  for (uint32_t i = 0; i < n_there; i++) gpu += pds_due_gpu(in, in->res + i);
  for (uint32_t i = n_there; i < in->n_res; i++) {
    int64_t arrival = larger(link - (in->n_res - 1 - i) * a.io, 0);
    gpu = larger(gpu, arrival) + a.gpu_start + pds_due_gpu(in, in->res + i);
  }
  for (uint32_t i = 0; i < n; i++) cpu += pds_due_cpu(in, in->cur + i);

  uint32_t room = pds_room_on(in), best_on = 0, best_wanted = 0;
  int64_t best_link = 0;
  for (uint32_t on = 0; on <= room; on++) {
    if (on) {
      const pds_due *due = in->cur + n - on;
      link = (link ? link : a.io_start) + a.io;
      gpu = larger(gpu, link) + a.gpu_start + pds_due_gpu(in, due);
      cpu -= pds_due_cpu(in, due);
    }
    int64_t end = larger(gpu, on < n ? a.cpu_start + cpu : 0);
    moment t = {.now = end + pds_time(in->attention), .link = link};
    uint32_t pre = pds_room_pre(in, on), most = in->n_next;
    /* A stream of loads needs one slot: prefetches that take all leave none, or one stays away. */
    bool takes_all = in->stream && pre == in->free_slots;
    if (takes_all)
      most = pre;
    else if (!in->stream && in->free_slots < most)
      most = in->free_slots;
    for (int other = 0; other <= (takes_all && pre); other++) {
      if (other) most = in->n_next;
      uint32_t room = pre - (uint32_t)other, wanted;
      int64_t next_end = least(&a, t, room, most, &wanted);
      if ((!on && !other) || next_end < why->next_end ||
          (next_end == why->next_end && end < why->layer_end)) {
        why->next_end = next_end;
        why->layer_end = end;
        best_on = on;
        best_link = link;
        best_wanted = room < wanted ? room : wanted;
      }
    }
  }

  uint32_t pre = started(in, best_link, best_wanted, why);
  if (in->phase == PDS_PHASE_PREFILL)
    why->mode = PDS_MODE_PREFILL;
  else if (best_on)
    why->mode = pre ? PDS_MODE_CROSS : PDS_MODE_LOAD;
  else
    why->mode = pre ? PDS_MODE_PREFETCH : PDS_MODE_UNLOAD;
  pds_take_on(in, best_on, out);
  pds_take_pre(in, pre, out);
}
