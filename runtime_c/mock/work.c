/* work.c: how long pieces of work take, and what they do to memory; the same for both clocks. All
 * times are whole nanoseconds. */
#define _GNU_SOURCE
#include <string.h>

#include "mock.h"

enum { SECOND = 1000000000 };

/* Rounded up; what exceeds a century counts as one. */
static int64_t ceil_div(wide a, int64_t b) {
  const wide quotient = (a + b - 1) / b, most = INT64_MAX / 4;
  return (int64_t)(quotient < most ? quotient : most);
}

/* Bytes per second of a copy that is under way at a time. */
static int64_t rate_at(const op *copy, int64_t at) {
  const settings *s = &mock.set;
  int64_t rate = s->rate[copy->kind];
  if (at < mock.busy_until && s->rate_busy[copy->kind]) rate = s->rate_busy[copy->kind];
  if (copy->pageable && s->pageable) rate = s->pageable;
  if (s->slow_link > 1 && at >= s->slow_from) rate /= s->slow_link;
  return rate > 0 ? rate : 1;
}

/* When rates change next, as far as is known: the host gets idle, or the link slow. */
static int64_t next_change(int64_t after) {
  int64_t next = INT64_MAX;
  if (mock.busy_until > after) next = mock.busy_until;
  if (mock.set.slow_link > 1 && mock.set.slow_from > after && mock.set.slow_from < next)
    next = mock.set.slow_from;
  return next;
}

/* Piece by piece between changes of the rate, exactly; only the end is rounded. */
int64_t mock_rate_end(const op *copy) {
  wide left = copy->left;
  for (int64_t at = copy->since;;) {
    const int64_t rate = rate_at(copy, at), change = next_change(at);
    const int64_t end = at + ceil_div(left, rate);
    if (end <= change) return end;
    left -= (wide)(change - at) * rate;
    at = change;
  }
}

void mock_rates_change(int64_t at) {
  for (int d = 0; d < DIRECTIONS; d++) {
    op *copy = mock.engines[d].current;
    while (copy && copy->since < at) {
      int64_t change = next_change(copy->since);
      if (change > at) change = at;
      copy->left -= (wide)(change - copy->since) * rate_at(copy, copy->since);
      copy->since = change;
    }
  }
}

static bool is_copy(const op *o) {
  return o->kind == OP_H2D || o->kind == OP_D2H;
}

void mock_start(op *o, int64_t at) {
  const settings *s = &mock.set;
  o->started = true;
  if (is_copy(o)) {
    engine *e = &mock.engines[o->kind];
    bool idle = !e->used || o->ready > e->free_at;
    e->used = true;
    e->current = o;
    o->left = (wide)o->bytes * SECOND;
    o->since = at + s->latency[o->kind] + (idle ? s->start[o->kind] : 0);
    o->end = mock_rate_end(o);
    return;
  }
  int64_t ns = 0;
  if (o->kind == OP_D2D || o->kind == OP_MEMSET)
    ns = s->latency_d2d + ceil_div((wide)o->bytes * SECOND, s->rate_d2d);
  if (o->kind == OP_KERNEL) ns = o->duration;
  if (o->kind == OP_RECORD) ns = s->late_events;
  o->end = at + ns;
}

void mock_poison(const op *o) {
  if (!mock.set.poison || !(is_copy(o) || o->kind == OP_D2D)) return;
  /* A copy within a block may overlap itself: what it reads must stay. */
  const unsigned char *to = o->to, *from = o->from;
  if (to + o->bytes <= from || from + o->bytes <= to) memset(o->to, 0xff, o->bytes);
}

static void run_kernel(op *o) {
  const pds_twin_entry *e = &o->function->entry;
  const grid *g = &o->grid;
  if (e->fn)
    e->fn(o->params);
  else if (e->run(o->params, g->x, g->block[0], g->shared_bytes) != 0)
    mock_fault(o, CUDA_ERROR_LAUNCH_FAILED, "kernel %s: %s", o->function->name, e->error());
}

void mock_perform(op *o) {
  if (o->fault != CUDA_SUCCESS) return;
  if (is_copy(o) || o->kind == OP_D2D) memmove(o->to, o->from, o->bytes);
  if (o->kind == OP_MEMSET) memset(o->to, o->value, o->bytes);
  if (o->kind == OP_KERNEL && mock.set.effects != KERNELS_NONE) run_kernel(o);
}
