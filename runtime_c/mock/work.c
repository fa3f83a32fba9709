/* work.c: how long pieces of work take, and what they do to memory; the same for both clocks. All
 * times are whole nanoseconds. */
#define _GNU_SOURCE
#include <string.h>

#include "mock.h"

enum { SECOND = 1000000000 };

static int64_t ceil_div(wide a, int64_t b) {
  return (int64_t)((a + b - 1) / b);
}

/* Bytes per second of a copy: before and after the link gets slow. */
static int64_t rate_of(const op *copy, bool slow) {
  const settings *s = &mock.set;
  int64_t rate = s->rate[copy->kind];
  if (mock.host_busy && s->rate_busy[copy->kind]) rate = s->rate_busy[copy->kind];
  if (copy->pageable && s->pageable) rate = s->pageable;
  if (slow) rate /= s->slow_link;
  return rate > 0 ? rate : 1;
}

static bool slow_at(int64_t at) {
  return mock.set.slow_link > 1 && at >= mock.set.slow_from;
}

/* The time in [since, to) after which the link is slow: `to` if it does not get slow in between. */
static int64_t turn_within(int64_t since, int64_t to) {
  if (slow_at(since) || !slow_at(to)) return to;
  return mock.set.slow_from;
}

int64_t mock_rate_end(const op *copy) {
  int64_t end = copy->since + ceil_div(copy->left, rate_of(copy, slow_at(copy->since)));
  int64_t turn = turn_within(copy->since, end);
  if (turn == end) return end;
  wide left = copy->left - (wide)(turn - copy->since) * rate_of(copy, false);
  return turn + ceil_div(left, rate_of(copy, true));
}

void mock_rate_changes(int64_t at) {
  for (int d = 0; d < DIRECTIONS; d++) {
    op *copy = mock.engines[d].current;
    if (!copy || copy->since >= at) continue;
    int64_t turn = turn_within(copy->since, at);
    copy->left -= (wide)(turn - copy->since) * rate_of(copy, slow_at(copy->since));
    copy->left -= (wide)(at - turn) * rate_of(copy, true); /* nothing where turn is `at` */
    if (copy->left < 0) copy->left = 0;
    copy->since = at;
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

void mock_perform(op *o) {
  if (o->fault != CUDA_SUCCESS) return;
  if (is_copy(o) || o->kind == OP_D2D) memmove(o->to, o->from, o->bytes);
  if (o->kind == OP_MEMSET) memset(o->to, o->value, o->bytes);
  if (o->kind == OP_KERNEL) o->fn(o->params);
}
