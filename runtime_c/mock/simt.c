/* simt.c: blocks of threads that take turns. Each thread of a block is a fiber with a stack of its
 * own: it runs until it must wait for others, in a collective function, or ends. A warp's lanes take
 * turns until all of them wait for the block. The order of turns is reversed at each pds_sync() and in
 * every second block, so that a missing one shows. Fibers, once made, are kept and used again: to
 * make one takes system calls, to change between two does not. */
#define _GNU_SOURCE
/* longjmp between stacks is what its checks are against. */
#undef _FORTIFY_SOURCE
#define _FORTIFY_SOURCE 0
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "cuda/kernels/device.h"

enum { WARP = 32, MOST_THREADS = 1024, STACK = 64 << 10, FENCE = 256 };
enum { POISON = 0xff, FENCE_BYTE = 0xa5 };

typedef enum thread_state {
  RUNS, /* or could */
  ENDED,
  IN_SYNC,
  IN_WARP_SYNC,
  IN_SHFL,
  IN_MMA,
  IN_LDMATRIX,
  IN_LDMATRIX_TRANS
} thread_state;
static const char *const NAMES[] = {"",
                                    "",
                                    "pds_sync",
                                    "pds_warp_sync",
                                    "pds_shfl",
                                    "pds_mma_bf16",
                                    "pds_ldmatrix",
                                    "pds_ldmatrix_trans"};

typedef struct copy {
  void *to;
  const void *from; /* NULL: zeros */
  uint32_t group;
} copy;

/* A stack, and where it was left. */
typedef struct spot {
  jmp_buf at;
  void *bottom; /* bottom, bytes, fake, fiber: for sanitizers */
  size_t bytes;
  void *fake, *fiber;
} spot;

typedef struct thread {
  pds_simt_thread seen; /* first: what pds_simt_self points to */
  struct block *block;
  spot here;
  thread_state state;
  pds_simt_place place; /* of the collective function */
  /* its arguments */
  uint32_t value, lane; /* pds_shfl: what this thread gives, then gets; from which lane */
  float *d;
  const uint32_t *a, *b;
  uint32_t *r;
  const void *row;
  /* copies that no pds_copy_wait() has waited for yet, oldest first; groups committed */
  copy *copies;
  uint32_t n_copies, room, group;
} thread;

typedef struct warp {
  uint32_t lanes, living, waiting; /* waiting: in a function of the warp */
} warp;

typedef struct block {
  pds_simt_block seen;
  pds_simt_fn fn;
  const void *params;
  spot scheduler;
  thread *threads;
  warp warps[MOST_THREADS / WARP];
  uint32_t living, waiting; /* waiting: in pds_sync() */
  bool backwards, failed;
} block;

typedef struct fibers {
  struct fibers *next;
  uint32_t n;
  unsigned char *stacks;
  size_t stack, bytes; /* of one with its guard page, of all */
  thread threads[];
} fibers;

_Thread_local pds_simt_thread *pds_simt_self;
static _Thread_local char error_text[256];

const char *pds_simt_error(void) {
  return error_text;
}

int pds_simt_refuse(const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  vsnprintf(error_text, sizeof error_text, fmt, args);
  va_end(args);
  return -1;
}

/* --- fibers --- */

/* Sanitizers must know of stacks; where the process has none, nobody defines these. */
#define SANITIZER __attribute__((weak, visibility("default")))
SANITIZER void __sanitizer_start_switch_fiber(void **fake, const void *bottom, size_t bytes);
SANITIZER void __sanitizer_finish_switch_fiber(void *fake, const void **bottom, size_t *bytes);
SANITIZER void *__tsan_get_current_fiber(void);
SANITIZER void *__tsan_create_fiber(unsigned flags);
SANITIZER void __tsan_destroy_fiber(void *fiber);
SANITIZER void __tsan_switch_to_fiber(void *fiber, unsigned flags);

static void announce(spot *to, void **fake) {
  if (__sanitizer_start_switch_fiber) __sanitizer_start_switch_fiber(fake, to->bottom, to->bytes);
  if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to->fiber, 0);
}

static void arrived(const spot *here) {
  if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(here->fake, NULL, NULL);
}

static void __attribute__((noinline)) change(spot *from, spot *to) {
  if (_setjmp(from->at) == 0) {
    announce(to, &from->fake);
    _longjmp(to->at, 1);
  }
  arrived(from);
}

/* For good. */
static void __attribute__((noinline, noreturn)) leave(spot *to) {
  announce(to, NULL);
  _longjmp(to->at, 1);
}

/* The calling thread's stack. */
static void find_own(spot *p) {
  pthread_attr_t attributes;
  if (__tsan_get_current_fiber) p->fiber = __tsan_get_current_fiber();
  if (!__sanitizer_start_switch_fiber || pthread_getattr_np(pthread_self(), &attributes) != 0)
    return;
  pthread_attr_getstack(&attributes, &p->bottom, &p->bytes);
  pthread_attr_destroy(&attributes);
}

/* Until its turn comes again. The next lane that can go on has it now; after the last, the scheduler. */
static void give_turn(thread *t) {
  const block *b = t->block;
  const warp *own = &b->warps[t->seen.tid / WARP];
  thread *lanes = t - t->seen.tid % WARP;
  const uint32_t step = b->backwards ? UINT32_MAX : 1;
  for (uint32_t i = t->seen.tid % WARP + step; i < own->lanes; i += step)
    if (lanes[i].state == RUNS) {
      pds_simt_self = &lanes[i].seen;
      change(&t->here, &lanes[i].here);
      return;
    }
  change(&t->here, &t->block->scheduler);
}

/* The block ends here: all its threads are dropped where they are. */
static void fail(thread *t, pds_simt_place at, const char *fmt, ...)
    __attribute__((format(printf, 3, 4), noreturn));
static void fail(thread *t, pds_simt_place at, const char *fmt, ...) {
  const unsigned *index = t->block->seen.index;
  char text[160];
  va_list args;
  va_start(args, fmt);
  vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  pds_simt_refuse("%s:%d: %s (block %u,%u,%u thread %u)", at.file, at.line, text, index[0],
                  index[1], index[2], t->seen.tid);
  t->block->failed = true;
  leave(&t->block->scheduler);
}

static void complete_warp(block *b, uint32_t w);
static void complete_block(block *b);

/* Those that are left need not wait for it. */
static void __attribute__((noinline)) end_thread(thread *t) {
  block *b = t->block;
  const uint32_t w = t->seen.tid / WARP;
  warp *own = &b->warps[w];
  t->state = ENDED;
  b->living--;
  own->living--;
  if (own->living > 0 && own->waiting == own->living) complete_warp(b, w);
  if (b->living > 0 && b->waiting == b->living) complete_block(b);
}

/* A fiber lives through many blocks, and may go on in another thread of the process: it must not
 * look at thread-local variables itself. */
static void live(unsigned high, unsigned low) {
  thread *t = (thread *)((uintptr_t)high << 16 << 16 | low);
  arrived(&t->here);
  for (;;) {
    change(&t->here, &t->block->scheduler);
    t->block->fn(t->block->params);
    end_thread(t);
  }
}

static bool make_fiber(const fibers *f, thread *t, unsigned char *stack) {
  const size_t guard = f->stack - STACK;
  const uintptr_t address = (uintptr_t)t;
  ucontext_t context;
  block maker = {0}; /* for its scheduler alone */
  if (mprotect(stack, guard, PROT_NONE) != 0 || getcontext(&context) != 0) return false;
  context.uc_stack.ss_sp = stack + guard;
  context.uc_stack.ss_size = STACK;
  context.uc_link = NULL;
  makecontext(&context, (void (*)(void))live, 2, (unsigned)(address >> 16 >> 16),
              (unsigned)address);
  find_own(&maker.scheduler);
  t->here = (spot){.bottom = stack + guard, .bytes = STACK};
  if (__tsan_create_fiber) t->here.fiber = __tsan_create_fiber(0);
  t->block = &maker;
  if (_setjmp(maker.scheduler.at) == 0) {
    announce(&t->here, &maker.scheduler.fake);
    setcontext(&context);
    return false;
  }
  arrived(&maker.scheduler);
  return true;
}

static void free_fibers(fibers *f) {
  for (uint32_t i = 0; i < f->n; i++) {
    free(f->threads[i].copies);
    if (f->threads[i].here.fiber) __tsan_destroy_fiber(f->threads[i].here.fiber);
  }
  if (f->stacks != MAP_FAILED) munmap(f->stacks, f->bytes);
  free(f);
}

static fibers *make_fibers(uint32_t n) {
  fibers *f = calloc(1, sizeof *f + n * sizeof *f->threads);
  if (!f) return NULL;
  f->n = n;
  f->stack = STACK + (size_t)sysconf(_SC_PAGESIZE);
  f->bytes = f->stack * n;
  f->stacks = mmap(NULL, f->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  bool made = f->stacks != MAP_FAILED;
  for (uint32_t i = 0; made && i < n; i++)
    made = make_fiber(f, &f->threads[i], f->stacks + i * f->stack);
  if (made) return f;
  free_fibers(f);
  return NULL;
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fibers *unused;

static fibers *take_fibers(uint32_t n) {
  pthread_mutex_lock(&lock);
  fibers **at = &unused;
  while (*at && (*at)->n < n) at = &(*at)->next;
  fibers *f = *at;
  if (f) *at = f->next;
  pthread_mutex_unlock(&lock);
  return f ? f : make_fibers((n + WARP - 1) / WARP * WARP);
}

static void keep_fibers(fibers *f) {
  pthread_mutex_lock(&lock);
  f->next = unused;
  unused = f;
  pthread_mutex_unlock(&lock);
}

__attribute__((destructor)) static void drop_fibers(void) {
  while (unused) {
    fibers *f = unused;
    unused = f->next;
    free_fibers(f);
  }
}

/* --- a block --- */

/* Until no lane can go on; false: none could. */
static bool run_warp(block *b, uint32_t w) {
  thread *threads = &b->threads[w * WARP];
  const uint32_t lanes = b->warps[w].lanes;
  bool ever = false;
  for (bool any = true; any;) {
    any = false;
    for (uint32_t i = 0; i < lanes; i++) {
      thread *t = &threads[b->backwards ? lanes - 1 - i : i];
      if (t->state != RUNS) continue;
      any = ever = true;
      pds_simt_self = &t->seen;
      change(&b->scheduler, &t->here);
      if (b->failed) return true;
    }
  }
  return ever;
}

/* Nobody can go on: says where two of those that wait, wait. */
static void report_stuck(block *b) {
  const thread *first = NULL, *second = NULL;
  for (uint32_t i = 0; i < b->seen.threads; i++) {
    const thread *t = &b->threads[i];
    if (t->state == ENDED) continue;
    if (!first) first = t;
    if (!second && (t->state != first->state || t->place.line != first->place.line)) second = t;
  }
  const unsigned *index = b->seen.index;
  char other[96] = "";
  if (second)
    snprintf(other, sizeof other, "; thread %u is in %s of line %d", second->seen.tid,
             NAMES[second->state], second->place.line);
  pds_simt_refuse("%s:%d: %s: waits for threads that never come (block %u,%u,%u thread %u%s)",
                  first->place.file, first->place.line, NAMES[first->state], index[0], index[1],
                  index[2], first->seen.tid, other);
  b->failed = true;
}

static void begin_block(block *b) {
  const uint32_t n = b->seen.threads;
  memset(b->seen.shared, POISON, b->seen.shared_bytes);
  memset(b->seen.shared + b->seen.shared_bytes, FENCE_BYTE, FENCE);
  b->living = n;
  b->waiting = 0;
  for (uint32_t w = 0; w * WARP < n; w++) {
    const uint32_t lanes = n - w * WARP < WARP ? n - w * WARP : WARP;
    b->warps[w] = (warp){lanes, lanes, 0};
  }
  for (uint32_t i = 0; i < n; i++) {
    thread *t = &b->threads[i];
    t->seen = (pds_simt_thread){&b->seen, i};
    t->block = b;
    t->state = RUNS;
    t->n_copies = t->group = 0;
  }
}

static void run_block(block *b) {
  const uint32_t warps = (b->seen.threads + WARP - 1) / WARP;
  begin_block(b);
  while (b->living > 0 && !b->failed) {
    bool any = false;
    for (uint32_t i = 0; i < warps && !b->failed; i++)
      any |= run_warp(b, b->backwards ? warps - 1 - i : i);
    if (!any) report_stuck(b);
  }
  for (uint32_t i = 0; i < FENCE && !b->failed; i++)
    if (b->seen.shared[b->seen.shared_bytes + i] != FENCE_BYTE) {
      pds_simt_refuse("block %u,%u,%u wrote to byte %u of its %u bytes of shared memory",
                      b->seen.index[0], b->seen.index[1], b->seen.index[2],
                      b->seen.shared_bytes + i, b->seen.shared_bytes);
      b->failed = true;
    }
}

static void run_grid(block *b) {
  const unsigned *grid = b->seen.grid;
  unsigned *index = b->seen.index;
  bool odd = false;
  for (index[2] = 0; index[2] < grid[2]; index[2]++)
    for (index[1] = 0; index[1] < grid[1]; index[1]++)
      for (index[0] = 0; index[0] < grid[0]; index[0]++) {
        b->backwards = odd;
        odd = !odd;
        run_block(b);
        if (b->failed) return;
      }
}

int pds_simt_run(pds_simt_fn fn, const void *params, const unsigned grid[3], unsigned threads,
                 unsigned shared_bytes) {
  if (threads == 0 || threads > MOST_THREADS)
    return pds_simt_refuse("%u threads a block, at most %d", threads, MOST_THREADS);
  block *b = calloc(1, sizeof *b);
  unsigned char *shared = aligned_alloc(128, ((size_t)shared_bytes + FENCE + 127) / 128 * 128);
  fibers *f = b && shared ? take_fibers(threads) : NULL;
  if (!f) {
    free(b);
    free(shared);
    return pds_simt_refuse("no memory for a block of %u threads", threads);
  }
  b->seen = (pds_simt_block){{0}, {grid[0], grid[1], grid[2]}, threads, shared_bytes, shared};
  b->fn = fn;
  b->params = params;
  b->threads = f->threads;
  find_own(&b->scheduler);
  run_grid(b);
  pds_simt_self = NULL;
  const bool failed = b->failed;
  if (failed)
    free_fibers(f); /* they are somewhere in the kernel */
  else
    keep_fibers(f);
  free(shared);
  free(b);
  return failed ? -1 : 0;
}

/* --- collective functions: who comes last does it for all --- */

static thread *self(void) {
  return (thread *)pds_simt_self;
}

/* All of [first, first + n) that live are in the same function of the same line. */
static thread *same_place(thread *threads, uint32_t n) {
  thread *first = NULL;
  for (uint32_t i = 0; i < n; i++) {
    thread *t = &threads[i];
    if (t->state == ENDED) continue;
    if (!first) first = t;
    if (t->state != first->state || t->place.line != first->place.line)
      fail(t, t->place, "%s, while thread %u is in %s of line %d", NAMES[t->state], first->seen.tid,
           NAMES[first->state], first->place.line);
  }
  return first;
}

static void let_run(thread *threads, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (threads[i].state != ENDED) threads[i].state = RUNS;
}

static void complete_block(block *b) {
  same_place(b->threads, b->seen.threads);
  let_run(b->threads, b->seen.threads);
  b->waiting = 0;
  b->backwards = !b->backwards;
}

/* What a lane gives that has ended is poison. */
static void shuffle(thread *lanes, uint32_t n) {
  uint32_t given[WARP];
  memset(given, POISON, sizeof given);
  for (uint32_t i = 0; i < n; i++)
    if (lanes[i].state != ENDED) given[i] = lanes[i].value;
  for (uint32_t i = 0; i < n; i++) lanes[i].value = given[lanes[i].lane];
}

/* One value of two bf16. */
static float half_of(uint32_t pair, int high) {
  return pds_float(high ? pair & 0xffff0000u : pair << 16);
}

/* Fragments as the PTX ISA has them for mma.m16n8k16. Each sum is in the order of k. */
static void multiply(thread *lanes) {
  float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < WARP; i++) {
    const thread *t = &lanes[i];
    const int group = i / 4, pair = i % 4 * 2;
    for (int h = 0; h < 2; h++) {
      for (int r = 0; r < 4; r++) a[group + r % 2 * 8][pair + r / 2 * 8 + h] = half_of(t->a[r], h);
      for (int r = 0; r < 2; r++) b[pair + r * 8 + h][group] = half_of(t->b[r], h);
      for (int r = 0; r < 2; r++) d[group + r * 8][pair + h] = t->d[r * 2 + h];
    }
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int col = 0; col < 8; col++) d[row][col] += a[row][k] * b[k][col];
  for (int i = 0; i < WARP; i++)
    for (int r = 0; r < 4; r++) lanes[i].d[r] = d[i / 4 + r / 2 * 8][i % 4 * 2 + r % 2];
}

/* Fragments as the PTX ISA has them for ldmatrix.x4. */
static void load_matrices(thread *lanes, bool transposed) {
  for (int m = 0; m < 4; m++) {
    uint16_t value[8][8];
    for (int i = 0; i < 8; i++) memcpy(value[i], lanes[m * 8 + i].row, sizeof value[i]);
    for (int i = 0; i < WARP; i++) {
      const int row = i / 4, col = i % 4 * 2;
      const uint32_t low = transposed ? value[col][row] : value[row][col];
      const uint32_t high = transposed ? value[col + 1][row] : value[row][col + 1];
      lanes[i].r[m] = low | high << 16;
    }
  }
}

static void complete_warp(block *b, uint32_t w) {
  thread *lanes = &b->threads[w * WARP];
  const uint32_t n = b->warps[w].lanes;
  thread *first = same_place(lanes, n);
  const thread_state in = first->state;
  if (in >= IN_MMA && b->warps[w].living < WARP)
    fail(first, first->place, "%s by %u of a warp's 32 threads", NAMES[in], b->warps[w].living);
  if (in == IN_SHFL) shuffle(lanes, n);
  if (in == IN_MMA) multiply(lanes);
  if (in == IN_LDMATRIX || in == IN_LDMATRIX_TRANS) load_matrices(lanes, in == IN_LDMATRIX_TRANS);
  let_run(lanes, n);
  b->warps[w].waiting = 0;
}

static void meet_warp(thread *t, thread_state in, pds_simt_place here) {
  const uint32_t w = t->seen.tid / WARP;
  warp *own = &t->block->warps[w];
  t->place = here;
  t->state = in;
  if (++own->waiting == own->living)
    complete_warp(t->block, w);
  else
    give_turn(t);
}

void pds_simt_sync(pds_simt_place here) {
  thread *t = self();
  t->place = here;
  t->state = IN_SYNC;
  if (++t->block->waiting == t->block->living)
    complete_block(t->block);
  else
    give_turn(t);
}

void pds_simt_warp_sync(pds_simt_place here) {
  meet_warp(self(), IN_WARP_SYNC, here);
}

uint32_t pds_simt_shfl(pds_simt_place here, uint32_t v, uint32_t lane) {
  thread *t = self();
  t->value = v;
  t->lane = lane % WARP;
  meet_warp(t, IN_SHFL, here);
  return t->value;
}

uint32_t pds_simt_shfl_xor(pds_simt_place here, uint32_t v, uint32_t mask) {
  if (mask >= WARP) fail(self(), here, "pds_shfl_xor with mask %u", mask);
  return pds_simt_shfl(here, v, PDS_LANE ^ mask);
}

void pds_simt_mma_bf16(pds_simt_place here, float *d, const uint32_t *a, const uint32_t *b) {
  thread *t = self();
  t->d = d;
  t->a = a;
  t->b = b;
  meet_warp(t, IN_MMA, here);
}

/* --- memory --- */

void pds_simt_aligned(pds_simt_place here, const void *at, const char *what) {
  if ((uintptr_t)at % 16 != 0) fail(self(), here, "%s: %p is not 16-byte aligned", what, at);
}

static void check_shared(pds_simt_place here, const void *at, const char *what) {
  const pds_simt_block *b = pds_simt_self->block;
  pds_simt_aligned(here, at, what);
  const uintptr_t offset = (uintptr_t)at - (uintptr_t)b->shared;
  if (offset >= b->shared_bytes || offset + 16 > b->shared_bytes)
    fail(self(), here, "%s: byte %lld of %u bytes of shared memory", what, (long long)offset,
         b->shared_bytes);
}

void pds_simt_ldmatrix(pds_simt_place here, uint32_t *r, const void *row, int transposed) {
  thread *t = self();
  const thread_state in = transposed ? IN_LDMATRIX_TRANS : IN_LDMATRIX;
  check_shared(here, row, NAMES[in]);
  t->r = r;
  t->row = row;
  meet_warp(t, in, here);
}

/* The bytes come as late as they may; until then the place holds no good ones. */
void pds_simt_copy16(pds_simt_place here, void *shared, const void *global, int valid) {
  thread *t = self();
  check_shared(here, shared, "pds_copy16");
  if (valid) pds_simt_aligned(here, global, "pds_copy16");
  if (t->n_copies == t->room) {
    const uint32_t room = t->room ? 2 * t->room : 32;
    copy *more = realloc(t->copies, room * sizeof *more);
    if (!more) fail(t, here, "pds_copy16: no memory");
    t->copies = more;
    t->room = room;
  }
  t->copies[t->n_copies++] = (copy){shared, valid ? global : NULL, t->group};
  memset(shared, POISON, 16);
}

void pds_simt_copy_commit(void) {
  self()->group++;
}

void pds_simt_copy_wait(unsigned n) {
  thread *t = self();
  uint32_t done = 0;
  for (; done < t->n_copies; done++) {
    const copy *c = &t->copies[done];
    if ((uint64_t)c->group + n >= t->group) break; /* one of the last n, or not committed */
    if (c->from)
      memcpy(c->to, c->from, 16);
    else
      memset(c->to, 0, 16);
  }
  if (done == 0) return;
  t->n_copies -= done;
  memmove(t->copies, t->copies + done, t->n_copies * sizeof *t->copies);
}
