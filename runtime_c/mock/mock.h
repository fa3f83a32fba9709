/* mock.h: what the files of the mock CUDA driver share. The mock is a library of its own with the
 * CUDA driver's symbols: device memory is memory of this process, kernels are C functions of it
 * (pds_twin_module), and time is a virtual clock or the real one. docs/mock-driver.md says what it
 * models. It shares the declarations of cuda/driver.h with the runtime, and no code. */
#ifndef PDS_MOCK_H
#define PDS_MOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda/driver.h"

/* --- work in streams --- */

typedef enum op_kind { OP_H2D, OP_D2H, OP_D2D, OP_MEMSET, OP_KERNEL, OP_WAIT, OP_RECORD } op_kind;
enum { EVENT_BITS = 10 };
enum { DIRECTIONS = 2 }; /* OP_H2D and OP_D2H index the copy engines */

enum { LOST_BYTES = 320 }; /* of a text on why a context is lost */

typedef __int128 wide;

typedef struct grid {
  unsigned x[3], block[3], shared_bytes;
} grid;

typedef struct op {
  op_kind kind;
  uint32_t refs; /* the stream's, an event's, of each wait and each waiting thread */
  uint64_t seq;  /* order of submission, over all streams */
  bool started, done;
  bool never;     /* it does not end, nor does anything behind it in its stream */
  CUresult fault; /* what the context is lost with when it ends; CUDA_SUCCESS: nothing */
  char why[LOST_BYTES];
  int64_t ready; /* when its turn in the stream came; before that, when it was submitted */
  int64_t end;   /* when it is done */
  struct op *next;
  /* copies, memset */
  void *to;
  const void *from;
  size_t bytes;
  unsigned char value;
  bool pageable;
  wide left;     /* of a copy under way, bytes * 1e9 ... */
  int64_t since; /* ... at this time; from then on it moves */
  /* kernels */
  CUfunction function;
  grid grid;
  void *params;
  uint32_t *tokens;
  int64_t duration;
  struct op *awaited; /* wait: the record to wait for */
} op;

struct CUstream_st {
  struct CUstream_st *next;
  bool live;     /* false: destroyed, and about to end with its last work */
  bool blocking; /* synchronises with the NULL stream */
  op *head, *tail;
  int64_t reached; /* end of the last work that is done */
};

struct CUevent_st {
  struct CUevent_st *next;
  bool timing;
  op *record; /* the last one; NULL: never recorded */
};

/* --- memory, modules --- */

enum { SHARED_MOST = 48 << 10, SHARED_OPTIN = 163 << 10 }; /* bytes of a block */

typedef enum block_kind { BLOCK_DEVICE, BLOCK_PINNED, BLOCK_REGISTERED, BLOCK_FREED } block_kind;
typedef struct block {
  struct block *next;
  block_kind kind;
  unsigned char *base;
  size_t bytes, mapped;
} block;

struct CUfunc_st {
  CUmodule module;
  char *name;
  pds_twin_entry entry; /* its name is the module's */
  unsigned shared_most; /* bytes of dynamic shared memory that a launch may ask for */
  int64_t launches;
};

struct CUmod_st {
  struct CUmod_st *next;
  void *library; /* or NULL */
  uint32_t n;
  struct CUfunc_st functions[];
};

/* --- settings (config.c) --- */

/* When a kernel has its effect; none has any with the last one. */
typedef enum kernels_when { KERNELS_END, KERNELS_START, KERNELS_NONE } kernels_when;

enum { MAX_KNOTS = 64, MAX_NAME = 96 };
typedef struct cost {
  struct cost *next;
  char name[MAX_NAME];
  int64_t base;
  int64_t extra_num, extra_den; /* ns for each unit of extra work: floor(extra * num / den) */
  uint32_t n;
  int64_t tokens[MAX_KNOTS], ns[MAX_KNOTS];
} cost;

typedef struct settings {
  int64_t wall; /* the clock is the real one */
  int64_t devices, driver, compute, sms;
  int64_t memory, context, pinned;                 /* bytes; pinned 0: no limit */
  int64_t rate[DIRECTIONS], rate_busy[DIRECTIONS]; /* bytes/s; busy 0: the same */
  int64_t pageable;                                /* bytes/s; 0: those of pinned memory */
  int64_t latency[DIRECTIONS];                     /* ns of every copy */
  int64_t start[DIRECTIONS];                       /* ns more where the engine was idle */
  int64_t rate_d2d, latency_d2d;
  int64_t enqueue; /* ns of the host for each piece of work submitted */
  int64_t poison;  /* virtual clock: what is being copied to reads as 0xff until the end */
  int64_t effects; /* kernels_when */
  /* faults; counts run down with each call, and 0 is off */
  int64_t fail_copy, refuse_copy, fail_alloc, fail_pin, fail_launch, refuse_launch, lose_context;
  int64_t slow_link, slow_from, late_events, stop_record;
  cost *kernels, *host;
} settings;

/* --- the state, all of it under one lock --- */

typedef struct engine {
  op *current;
  bool used;
  int64_t free_at; /* end of its last copy */
} engine;

typedef struct counters {
  int64_t calls, launches, h2d_copies, d2h_copies, d2d_copies, h2d_bytes, d2h_bytes, d2d_bytes;
  int64_t device_live, device_peak, device_allocations, pinned_live, pinned_peak;
  int64_t streams, events, modules, implicit_waits;
} counters;

typedef struct mock_state {
  pthread_mutex_t lock;
  pthread_cond_t changed; /* wall clock: anything was submitted or done */
  bool settings_bad;      /* those of the environment */
  bool initialised;
  bool destroying;     /* the context; with the wall clock that takes time */
  uint64_t generation; /* counts resets, which leave no thread a context; 0: no call yet */
  uint32_t retained;   /* of the primary context */
  CUresult lost;       /* what every call answers since the context was lost */
  char lost_why[LOST_BYTES];
  settings set;
  counters count;
  CUstream streams; /* the NULL stream is the one that was made first */
  CUstream null_stream;
  CUevent events[1 << EVENT_BITS]; /* lists, by address */
  CUmodule modules;
  block *blocks;
  engine engines[DIRECTIONS];
  uint64_t next_seq;
  int64_t now;        /* virtual clock */
  int64_t busy_until; /* virtual clock: end of what pds_mock_host_begin began */
  int64_t epoch;      /* wall clock: CLOCK_MONOTONIC at the start */
  uint32_t threads;   /* wall clock: of streams, */
  uint32_t at_work;   /* and of these, those that copy or run a kernel now */
  bool stopped;       /* a record struck by stop_record was submitted */
} mock_state;
extern mock_state mock;

#if defined(__GNUC__)
#define MOCK_API __attribute__((visibility("default")))
#else
#define MOCK_API
#endif
#define MOCK_DECLARE(name, symbol, params) MOCK_API CUresult symbol params;
PDS_CUDA_FUNCTIONS(MOCK_DECLARE)
#undef MOCK_DECLARE
#define MOCK_DECLARE(type, name, params) MOCK_API type name params;
PDS_MOCK_FUNCTIONS(MOCK_DECLARE)
#undef MOCK_DECLARE

/* --- context.c --- */

/* Every function of the driver begins with one of these and ends with mock_leave(). They take the
 * lock also where they fail. mock_enter() wants a current context that is not lost;
 * mock_enter_driver() an initialised driver. */
CUresult mock_enter(const char *call);
CUresult mock_enter_driver(const char *call);
void mock_enter_any(const char *call);
CUresult mock_leave(CUresult result);
/* The error of a lost context, once nothing of it runs any more. */
CUresult mock_if_lost(void);
/* Returns `result` and keeps the text for pds_mock_last(), after the name of the call. */
CUresult mock_error(CUresult result, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* From now on every call answers with `result`, and all work is dropped. */
void mock_lose(CUresult result, const char *why);
/* Waits for all work, or drops it if some never ends; then gives back everything of the context. */
void mock_destroy_context(void);

/* --- config.c --- */

void mock_default_settings(settings *set);
void mock_free_settings(settings *set);
/* False with a text for pds_mock_last(). */
bool mock_parse(settings *set, const char *text, bool *out_reset);
/* ns of work of this name; that of "*" if the name has none, and 0 without it. */
int64_t mock_cost(const cost *costs, const char *name, uint32_t n, const uint32_t *tokens,
                  uint64_t extra);

/* --- streams.c --- */

/* NULL with an error text if there is no such stream. */
CUstream mock_stream(CUstream handle);
CUstream mock_new_stream(bool blocking);
op *mock_new_op(op_kind kind);
void *mock_alloc(size_t bytes); /* zeroed; ends the process for want of memory */
void mock_hold(op *o);
void mock_drop(op *o);
/* The stream's from now on. Returns with the lock held, after the host's time for it. */
void mock_submit(CUstream stream, op *o);
/* Takes the done head off; frees a destroyed stream with nothing left, and then returns true. */
bool mock_pop(CUstream stream);
void mock_free_stream(CUstream stream);
CUresult mock_wait(op *o);    /* until it is done, or the context lost */
CUresult mock_wait_all(void); /* for all work in all streams */

/* --- work.c --- */

int64_t mock_rate_end(const op *copy); /* when a copy under way ends, as things are */
void mock_rates_change(int64_t at);    /* call before what rates depend on does */
void mock_start(op *o, int64_t at);    /* begins a piece of work; sets `end` */
void mock_poison(const op *o);
void mock_perform(op *o); /* what it does to memory; a kernel runs */

/* --- clocks: virtual.c, wall.c --- */

int64_t mock_now(void);
void mock_virtual_advance(int64_t to);
int64_t mock_virtual_next(void);
CUresult mock_virtual_wait(op *o);
CUresult mock_wall_wait(op *o);
bool mock_wall_thread(CUstream stream);
int64_t mock_wall_now(void);

/* --- memory.c --- */

/* The block that `address` lies in, of any kind but device or of that alone; NULL: none. */
block *mock_find_block(const void *address, bool device);
void mock_free_blocks(void);

/* --- modules.c --- */

void mock_free_module(CUmodule module);

/* --- faults.c --- */

/* Counts one of what the fault waits for; true at the one that it strikes. */
bool mock_strikes(int64_t *fault);
/* Notes what the context is lost with when the work ends. */
void mock_fault(op *o, CUresult result, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
