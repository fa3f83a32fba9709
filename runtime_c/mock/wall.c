/* wall.c: the real clock. Each stream has a thread, so kernels of different streams run at once. A
 * piece of work is done when its time by the settings has passed and it has really been done; the
 * times that follow from the settings alone do not drift with the sleeps. */
#define _GNU_SOURCE
#include <errno.h>
#include <time.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "mock.h"

int64_t mock_wall_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec - mock.epoch;
}

/* Naps, so that long work ends soon after the context is lost. With the lock held before and after. */
static void sleep_until(int64_t end) {
  enum { NAP = 10000000 };
  for (int64_t now; mock.lost == CUDA_SUCCESS && (now = mock_wall_now()) < end;) {
    const int64_t at = (end - now > NAP ? now + NAP : end) + mock.epoch;
    struct timespec t = {at / 1000000000, at % 1000000000};
    pthread_mutex_unlock(&mock.lock);
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
    pthread_mutex_lock(&mock.lock);
  }
}

static bool is_copy(const op *o) {
  return o->kind == OP_H2D || o->kind == OP_D2H;
}

/* No other copy of this direction was ready earlier, be its thread awake yet or not. */
static bool first_in_line(const op *o) {
  for (CUstream s = mock.streams; s; s = s->next) {
    const op *other = s->head;
    if (!other || other == o || other->started || other->kind != o->kind) continue;
    const int64_t ready = other->ready < s->reached ? s->reached : other->ready;
    if (ready < o->ready || (ready == o->ready && other->seq < o->seq)) return false;
  }
  return true;
}

/* Waits until the head may begin; false: the context is lost. */
static bool wait_for_turn(CUstream stream) {
  op *o = stream->head;
  if (o->ready < stream->reached) o->ready = stream->reached;
  if (o->kind == OP_WAIT) {
    while (!o->awaited->done && mock.lost == CUDA_SUCCESS)
      pthread_cond_wait(&mock.changed, &mock.lock);
    if (o->awaited->done && o->ready < o->awaited->end) o->ready = o->awaited->end;
  }
  while (o->never && mock.lost == CUDA_SUCCESS) pthread_cond_wait(&mock.changed, &mock.lock);
  if (is_copy(o))
    while ((mock.engines[o->kind].current || !first_in_line(o)) && mock.lost == CUDA_SUCCESS)
      pthread_cond_wait(&mock.changed, &mock.lock);
  return mock.lost == CUDA_SUCCESS;
}

/* With the lock held before and after, but not while memory is copied, a kernel runs, or time
 * passes. */
static void do_head(CUstream stream) {
  op *o = stream->head;
  int64_t at = o->ready;
  engine *e = is_copy(o) ? &mock.engines[o->kind] : NULL;
  if (e && e->used && at < e->free_at) at = e->free_at;
  mock_start(o, at);
  if (o->kind != OP_WAIT && o->kind != OP_RECORD) {
    mock.at_work++;
    pthread_mutex_unlock(&mock.lock);
    mock_perform(o);
    pthread_mutex_lock(&mock.lock);
    if (--mock.at_work == 0) pthread_cond_broadcast(&mock.changed);
    const int64_t performed = mock_wall_now();
    if (o->end < performed) o->end = performed; /* it took longer than the settings say */
  }
  sleep_until(o->end);
  if (e) {
    e->current = NULL;
    e->free_at = o->end;
  }
  stream->reached = o->end;
}

static void *run(void *argument) {
  CUstream stream = argument;
#ifdef __linux__
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* ns; the default is 50 us */
#endif
  pthread_mutex_lock(&mock.lock);
  for (;;) {
    while (!stream->head && stream->live) pthread_cond_wait(&mock.changed, &mock.lock);
    op *o = stream->head;
    if (!o) break;
    if (wait_for_turn(stream)) {
      do_head(stream);
      if (o->fault != CUDA_SUCCESS)
        mock_lose(o->fault, o->why);
      else
        o->done = true;
    }
    mock_pop(stream);
    pthread_cond_broadcast(&mock.changed);
  }
  mock_free_stream(stream);
  mock.threads--;
  pthread_cond_broadcast(&mock.changed);
  pthread_mutex_unlock(&mock.lock);
  return NULL;
}

bool mock_wall_thread(CUstream stream) {
  pthread_attr_t attributes;
  pthread_t thread;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  bool made = pthread_create(&thread, &attributes, run, stream) == 0;
  pthread_attr_destroy(&attributes);
  if (made) mock.threads++;
  return made;
}

CUresult mock_wall_wait(op *o) {
  while (!o->done && mock.lost == CUDA_SUCCESS) pthread_cond_wait(&mock.changed, &mock.lock);
  return mock_if_lost();
}
