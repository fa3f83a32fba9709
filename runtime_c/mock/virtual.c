/* virtual.c: the virtual clock. Nothing sleeps: time passes where the host waits, works
 * (pds_mock_host_begin), submits (setting `enqueue`) or says so (pds_mock_advance). Whatever the
 * device does up to then happens in the order of its times, the same in every run.
 *
 * At one instant work ends before other work begins, and copies begin last, so that all that are
 * ready then compete. A copy engine takes the copy that was ready first, then the one submitted
 * first. */
#include "mock.h"

static bool is_copy(const op *o) {
  return o->kind == OP_H2D || o->kind == OP_D2H;
}

/* The running head that ends first; NULL: nothing runs. */
static CUstream first_to_end(void) {
  CUstream best = NULL;
  for (CUstream s = mock.streams; s; s = s->next) {
    op *o = s->head;
    if (!o || !o->started) continue;
    if (is_copy(o)) o->end = mock_rate_end(o);
    if (!best || o->end < best->head->end ||
        (o->end == best->head->end && o->seq < best->head->seq))
      best = s;
  }
  return best;
}

/* When the head of a stream could begin; false: it waits for something that has not ended. */
static bool can_start(CUstream s, int64_t *out_at) {
  op *o = s->head;
  if (!o || o->started || o->never) return false;
  if (o->ready < s->reached) o->ready = s->reached;
  if (o->kind == OP_WAIT) {
    if (!o->awaited->done) return false;
    if (o->ready < o->awaited->end) o->ready = o->awaited->end;
  }
  *out_at = o->ready;
  if (!is_copy(o)) return true;
  const engine *e = &mock.engines[o->kind];
  if (e->used && *out_at < e->free_at) *out_at = e->free_at;
  return !e->current;
}

static CUstream first_to_start(int64_t *out_at) {
  CUstream best = NULL;
  for (CUstream s = mock.streams; s; s = s->next) {
    int64_t at;
    if (!can_start(s, &at)) continue;
    const op *o = s->head, *b = best ? best->head : NULL;
    bool before = !b || at < *out_at;
    if (b && at == *out_at) {
      if (is_copy(o) != is_copy(b))
        before = is_copy(b);
      else
        before = o->ready < b->ready || (o->ready == b->ready && o->seq < b->seq);
    }
    if (!before) continue;
    best = s;
    *out_at = at;
  }
  return best;
}

static void begin(CUstream s, int64_t at) {
  op *o = s->head;
  mock_start(o, at);
  mock_poison(o);
  if (o->kind == OP_KERNEL && mock.set.effects == KERNELS_START) mock_perform(o);
}

static void finish(CUstream s) {
  op *o = s->head;
  if (!(o->kind == OP_KERNEL && mock.set.effects == KERNELS_START)) mock_perform(o);
  if (is_copy(o)) {
    mock.engines[o->kind].current = NULL;
    mock.engines[o->kind].free_at = o->end;
  }
  s->reached = o->end;
  o->done = o->fault == CUDA_SUCCESS;
  mock_hold(o); /* it is dropped with its stream's other work where the context is lost */
  mock_pop(s);
  if (o->fault != CUDA_SUCCESS) mock_lose(o->fault, o->why);
  mock_drop(o);
}

/* What happens next, unless it is later than `limit`. */
static bool step(int64_t limit) {
  int64_t start_at = 0;
  CUstream ends = first_to_end(), starts = first_to_start(&start_at);
  if (ends && (!starts || ends->head->end <= start_at)) {
    int64_t at = ends->head->end;
    if (at > limit) return false;
    if (mock.now < at) mock.now = at;
    finish(ends);
    return true;
  }
  if (!starts || start_at > limit) return false;
  if (mock.now < start_at) mock.now = start_at;
  begin(starts, start_at);
  return true;
}

void mock_virtual_advance(int64_t to) {
  while (step(to)) continue;
  if (mock.now < to) mock.now = to;
}

int64_t mock_virtual_next(void) {
  CUstream first = first_to_end(); /* what can begin by now has begun */
  return first ? first->head->end : -1;
}

CUresult mock_virtual_wait(op *o) {
  while (!o->done && mock.lost == CUDA_SUCCESS)
    if (!step(INT64_MAX))
      return mock_error(CUDA_ERROR_UNKNOWN, "waits for work that nothing will finish");
  if (mock.lost != CUDA_SUCCESS)
    return mock_error(mock.lost, "the context is lost: %s", mock.lost_why);
  mock_virtual_advance(mock.now);
  if (mock.lost != CUDA_SUCCESS)
    return mock_error(mock.lost, "the context is lost: %s", mock.lost_why);
  return CUDA_SUCCESS;
}
