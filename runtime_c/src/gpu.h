/* gpu.h: a GPU of an engine: its memory, its streams, the experts in its slots, and the link to it.
 *
 * The thread that runs a step is the only one that talks to the driver, and holds the engine's pool
 * while it does. What it queues is ordered by two streams and by events: `compute` runs kernels and the
 * small copies around them, `copies` moves experts. Instructions are issued in the program's order; the
 * host waits only for the gate's output (recompile), and at the end of a step. */
#ifndef PDS_GPU_H
#define PDS_GPU_H

#include <stdbool.h>

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "decide.h"
#include "kv.h"
#include "plan_desc.h"
#include "pool.h"
#include "program.h"
#include "residency.h"
#include "spans.h"
#include "step.h"

typedef struct pds_gpu pds_gpu;

/* --- device memory --- */

enum { PDS_DEVICE_ALIGN = 256 };

static inline uint64_t pds_device_round(uint64_t bytes) {
  return (bytes + PDS_DEVICE_ALIGN - 1) / PDS_DEVICE_ALIGN * PDS_DEVICE_ALIGN;
}

/* Bytes of weight file `f` that the GPU needs besides experts: its beginning. */
uint64_t pds_device_file_bytes(const pds_plan *plan, uint32_t f);
/* Bytes of an expert, as it lies in its file: one copy. 0: the plan has none. */
uint64_t pds_expert_bytes(const pds_plan *plan);
/* An expert's bytes in host memory. */
const unsigned char *pds_expert_host(const pds_plan *plan, const unsigned char *const *files,
                                     uint32_t layer, uint32_t expert);

/* --- kernels --- */

typedef enum pds_kernel {
  PDS_KERNEL_ROPE,
  PDS_KERNEL_NORM,
  PDS_KERNEL_ATTENTION,
  PDS_KERNEL_MLP,
  PDS_KERNEL_GATE,
  PDS_KERNEL_EXPERTS,
  PDS_KERNEL_SHARED,
  PDS_KERNEL_COMBINE,
  PDS_KERNEL_LM_HEAD,
  PDS_KERNELS
} pds_kernel;
extern const char *const pds_kernel_names[PDS_KERNELS];

/* An expert that the GPU computes: rows EXPERT_ROWS[first .. first + rows). */
typedef struct pds_gpu_hole {
  uint32_t expert, first, rows;
  int32_t slot;
  CUdeviceptr at;
} pds_gpu_hole;

/* What every kernel is launched with. */
typedef struct pds_kernel_args {
  pds_twin_work work;
  pds_step_ctx ctx; /* pointers into device or pinned memory */
  uint32_t layer, arg;
  const pds_gpu_hole *holes; /* pinned */
  uint32_t n_holes;
} pds_kernel_args;

/* The module of kernels that are C functions, for the mock driver. */
const void *pds_twin_image(void);

/* --- the link --- */

/* Under way: of prefetches, which may be cancelled, and of everything, at most. */
enum { PDS_LINK_CHUNK = 4 << 20, PDS_LINK_IN_FLIGHT = 2, PDS_LINK_DEPTH = 16 };

/* One expert on its way to a slot of the ring. */
typedef struct pds_transfer {
  uint32_t layer, expert;
  int32_t slot;
  uint64_t issued;          /* bytes */
  bool again;               /* the slot is that of an expert before it in the queue */
  const pds_gpu_hole *hole; /* computed once its copy is queued; NULL: a prefetch */
} pds_transfer;

typedef struct pds_transfers {
  pds_transfer *at; /* [room], a ring */
  uint32_t room, first, count;
} pds_transfers;

/* Copies go out in chunks, few at a time: those on demand first; what is not out yet can be
 * cancelled. */
typedef struct pds_link {
  pds_transfers demand, spec;
  CUevent chunk[PDS_LINK_DEPTH]; /* behind each chunk that is out */
  uint32_t oldest, in_flight;
  uint32_t depth; /* of chunks on demand that may be out */
  CUevent *ready; /* [ring] behind the last chunk of a slot's copy */
  CUevent *freed; /* [ring] behind the last kernel that reads the slot */
} pds_link;

/* --- policy --- */

/* What decisions are made with, and what came of them. */
typedef struct pds_gpu_policy {
  bool set;
  uint32_t policy;
  pds_costs costs;
  uint32_t *popularity; /* [layers][experts] */
  uint32_t *score;      /* [layers][experts]: pds_score, when the expert was last activated, */
  uint32_t *seen;       /* and the step of that */
  uint32_t *hit_q16;  /* [layers][3]: of prefetches for the layer, by phase; follows what happens */
  uint32_t *sure_q16; /* [layers][3]: pds_schedule.sure_q16 */
  pds_ledger *ledger; /* [layers] */
  int64_t *gain; /* [layers][3]: ns that a prediction for the layer saves; follows what happens */
  uint32_t *paused; /* [layers][3]: decisions without prediction that are left */
  pds_due *cur, *res, *next;
  pds_load *on, *pre;
  /* The link as decisions see it: what is queued, and how long each takes; never asked of the driver. */
  int64_t free_at; /* from the last decision: when the link has moved all on-demand loads */
  int64_t elapsed; /* what this layer and the next attention are expected to take */
  bool predicted;  /* the last layer predicted this one */
  uint64_t draft[PDS_MAX_EXPERTS / 64];    /* experts that the next layer is expected to activate */
  uint32_t ahead;                          /* prefetches behind them */
  uint16_t *ahead_expert;                  /* [ring], in order, */
  uint64_t is_ahead[PDS_MAX_EXPERTS / 64]; /* as a set, */
  uint16_t ahead_at[PDS_MAX_EXPERTS];      /* and of its experts, where in that order */
  uint32_t now;                            /* steps */
  pds_span_counts recompile[3], recompile_driver[3]; /* pds_gpu_info */
} pds_gpu_policy;

struct pds_gpu {
  pds_cuda cuda;
  const pds_plan *plan;
  const unsigned char *const *host_files;
  CUdevice device;
  CUcontext context;
  CUmodule module;
  bool twins;                      /* operators are C functions of this process: the mock driver */
  CUfunction kernels[PDS_KERNELS]; /* twins */
  CUfunction cu[PDS_CU_COUNT];     /* a GPU's */
  pds_cu_device cu_device;
  bool real; /* no mock: it has graphs, and copies of pitched rows */
  CUstream compute, copies;
  bool is_virtual;    /* the driver's clock is not this machine's */
  uint64_t cap, used; /* bytes of device memory: most, and taken */
  CUdeviceptr weights, slots;
  uint64_t weight_bytes, expert_bytes;
  const unsigned char **files; /* [n_files] where each file's beginning lies on the device */
  void *pinned;                /* registered host weights, or NULL */
  pds_residency residency;
  pds_link link;
  pds_gpu_policy policy;
  pds_status failed; /* not PDS_OK: the GPU's work is lost */
  bool stopped;      /* it does not end what it was given: no call that may wait is made any more */
  uint64_t patience_ns;
  char why[PDS_ERROR_BYTES];
  char name[64];
  /* twins run in one thread of their own: a pool and scratch for it */
  pds_pool *twin_pool;
  unsigned char *twin_scratch;
  uint64_t bytes;            /* of this mapping */
  struct pds_gpu_step *step; /* the running one */
};

/* A layer's launches up to its gate, as they were when its key was. */
typedef struct pds_graph {
  CUgraphExec exec;
  uint64_t key;
} pds_graph;
typedef enum pds_graph_state {
  PDS_GRAPH_NONE,
  PDS_GRAPH_CAPTURED, /* what is launched becomes part of a graph */
  PDS_GRAPH_REPLAYED  /* it is launched already */
} pds_graph_state;

/* A session's part on the GPU. */
typedef struct pds_gpu_session {
  CUdeviceptr arena, scratch, kv, rows, table;
  uint64_t arena_bytes;
  void *pinned; /* what follows lies in it */
  uint64_t pinned_bytes;
  int32_t *row_stage;  /* [4][max_rows]: token, position, sequence, row with logits */
  pds_gpu_hole *holes; /* [layers][experts] */
  uint8_t *on_gpu;     /* [experts] */
  bool registered;     /* the session's host scratch */
  pds_graph *graphs;   /* [layers] */
  CUevent routed;      /* behind the copies that recompile reads */
} pds_gpu_session;

/* The running step. */
typedef struct pds_gpu_step {
  pds_gpu *gpu;
  pds_gpu_session *session;
  bool tapped;         /* somebody looks at what each instruction leaves */
  pds_step_ctx *host;  /* the step as the CPU sees it */
  pds_step_ctx device; /* and as the GPU does */
  uint32_t layer;
  bool wants_routes; /* copies that `routed` stands behind are queued, and were not waited for */
  uint32_t n_holes;  /* of the running layer, in session->holes[layer] */
  uint32_t n_ready;  /* of them, the first ones: those that are there */
  uint32_t n_sent;   /* of the others, the first ones: those whose copy is queued */
  pds_graph_state graph;
  /* A real GPU's launches behind recompile wait until the CPU's workers have begun with theirs. */
  bool defers;        /* they do, in this layer */
  bool has_shared;    /* and the shared expert is among them */
  bool launches;      /* what is sent from now on is launched as it is sent */
  pds_status pumped;  /* what came of the link while the CPU computed */
  uint64_t driver_ns; /* that this recompile has spent in the driver's calls */
  int64_t context;    /* sum of the rows' positions */
} pds_gpu_step;

/* --- life --- */

typedef struct pds_gpu_options {
  const char *driver;
  int32_t device;
  uint64_t cap;         /* 0: all that the device has */
  const char *kernels;  /* paths of their images, '\n' between; NULL: none */
  uint32_t patience_ms; /* 0: two minutes */
} pds_gpu_options;

/* Opens the device, copies what stays there. On failure nothing is left. */
pds_status pds_gpu_open(const pds_gpu_options *options, const pds_plan *plan,
                        const pds_programs *programs, const unsigned char *const *host_files,
                        void *pinned, uint64_t pinned_bytes, pds_gpu **out_gpu);
void pds_gpu_close(pds_gpu *gpu);

/* Makes the device's context the calling thread's, and undoes it. */
pds_status pds_gpu_enter(pds_gpu *gpu);
void pds_gpu_leave(pds_gpu *gpu);

/* Between enter and leave. `scratch`: the session's host scratch, `scratch_bytes` of whole pages. */
pds_status pds_gpu_session_open(pds_gpu *gpu, uint64_t kv_bytes, uint64_t table_bytes,
                                void *scratch, uint64_t scratch_bytes, pds_gpu_session *out);
void pds_gpu_session_close(pds_gpu *gpu, pds_gpu_session *session, void *scratch);

/* Turns a driver's result into a status; anything but success or want of memory is remembered: the
 * engine then refuses every further step. */
pds_status pds_gpu_check(pds_gpu *gpu, CUresult result, const char *what);

#define PDS_CUDA_CALL(gpu, what, function, ...)                                                    \
  PDS_RETURN_IF_ERROR(pds_gpu_check(gpu, (gpu)->cuda.function(__VA_ARGS__), what))

/* Waits for an event; meanwhile copies go on. */
pds_status pds_gpu_wait(pds_gpu *gpu, CUevent event);
/* Waits for all that a stream was given. */
pds_status pds_gpu_wait_stream(pds_gpu *gpu, CUstream stream);
/* Copies to, from or within the device, and waits. */
pds_status pds_gpu_copy(pds_gpu *gpu, void *to, const void *from, uint64_t bytes, pds_kv_way way);
/* Whether decisions use predictions. */
bool pds_gpu_predicts(const pds_gpu *gpu);
/* Waits for both streams; a device that makes no progress for too long has stopped, which is an error. */
pds_status pds_gpu_drain(pds_gpu *gpu);
/* The host is busy with `n` pieces of work: in a virtual clock's time. */
pds_status pds_gpu_host_work(pds_gpu *gpu, const char *name, uint32_t n, const uint32_t *tokens);
/* ns on the clock that the driver's work is measured with. */
uint64_t pds_gpu_now(const pds_gpu *gpu);

/* --- link.c --- */

/* Sends out chunks, as many as there may be. */
pds_status pds_link_pump(pds_gpu *gpu);
/* Queues a transfer. */
void pds_link_load(pds_gpu *gpu, const pds_transfer *t);
void pds_link_prefetch(pds_gpu *gpu, const pds_transfer *t);
/* Until nothing on demand is left to send. */
pds_status pds_link_flush(pds_gpu *gpu);
/* Takes all prefetches out of their queue: their number, and the transfers to `out` [ring]. */
uint32_t pds_link_recall(pds_gpu *gpu, pds_transfer *out);
/* Whether a slot's copy is over; one that was never made is. */
pds_status pds_link_arrived(pds_gpu *gpu, int32_t slot, bool *out_arrived);

/* --- gpu_step.c --- */

/* Around the instructions of a step. */
pds_status pds_gpu_begin(pds_gpu *gpu, pds_gpu_session *session, pds_step_ctx *host,
                         pds_gpu_step *out);
/* The parts of pds_gpu_begin that measurements need too: the step's contexts, of as many rows as `host`
 * has; and its rows, block tables and rotations on the device. */
void pds_gpu_open_step(pds_gpu *gpu, pds_gpu_session *session, pds_step_ctx *host,
                       pds_gpu_step *out);
pds_status pds_gpu_send_batch(pds_gpu_step *step);
/* An operator that takes no argument, on `compute`. `holes`: pinned, of PDS_KERNEL_EXPERTS. */
pds_status pds_gpu_launch(pds_gpu_step *step, pds_kernel kernel, uint32_t layer,
                          const pds_gpu_hole *holes, uint32_t n);
/* `status`: that of the instructions; returned if the end is no worse. */
pds_status pds_gpu_end(pds_gpu_step *step, pds_status status);
/* One instruction; *out_experts: experts that it named. */
pds_status pds_gpu_instr(pds_gpu_step *step, const pds_program *program, const pds_instr *in,
                         uint32_t *out_experts);
/* The copy of a hole's expert is queued: it is computed behind it. */
pds_status pds_gpu_sent(pds_gpu *gpu, const pds_gpu_hole *hole);
/* Brings a buffer of the device to its place in the host's scratch, now. */
pds_status pds_gpu_fetch(pds_gpu_step *step, pds_buffer buffer, uint64_t bytes);

/* --- placement.c --- */

/* Whether the layer's prediction for the next one pays: else `predict` does nothing but for a tap. */
bool pds_gpu_prediction_pays(const pds_gpu_step *step, uint32_t layer, uint32_t phase);
/* recompile: from the host's routes and predictions to holes, transfers and residency. */
pds_status pds_gpu_recompile(pds_gpu_step *step, const pds_program *program, const pds_instr *in);
/* Copies experts that are to be there first (pds_schedule.first) to slots of the ring that are empty. */
pds_status pds_gpu_fill_ring(pds_gpu *gpu, const uint8_t *first);
/* unload: what the policy gives up behind the layer. */
uint32_t pds_gpu_unload(pds_gpu_step *step);

#endif
