/* engine.h: the engine and the session as the runtime's own files see them. */
#ifndef PDS_ENGINE_H
#define PDS_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "dispatch.h"
#include "gpu.h"
#include "kv.h"
#include "learn.h"
#include "llc.h"
#include "memory.h"
#include "net.h"
#include "plan_desc.h"
#include "pool.h"
#include "program.h"
#include "trace.h"
#include "weights.h"

struct pds_engine {
  const pds_plan *plan;
  const pds_isa_path *path;
  pds_programs programs;
  pds_pool *pool; /* NULL until the workers run */
  const unsigned char **files;
  unsigned char *thread_scratch;
  pds_weights weights;
  uint64_t bytes;
  uint32_t threads, cores, nodes;
  pds_gpu *gpu;       /* NULL: everything runs on the CPU */
  void *gpu_programs; /* and those programs */
  uint64_t gpu_program_bytes;
  pds_llc llc;
  pds_net_slot *_Atomic nets; /* [n_layers][2]; NULL: none was ever set */
  _Atomic uint64_t net_bytes, learner_bytes;
  _Atomic bool net_busy;
  pds_learn *_Atomic learn;       /* NULL: the learner is off */
  _Atomic bool learn_busy;        /* it is being switched or read */
  uint32_t l2_bytes;              /* second-level cache of a core; 0: unknown */
  char cpus[5 * PDS_MAX_THREADS]; /* "0,2,4": for each worker the first CPU of its core; "": free */
  char cpus_why[96];
  pid_t pid;             /* the process that created it: workers do not survive fork */
  _Atomic uint32_t refs; /* itself and its sessions; the last one frees it */
};
_Static_assert(sizeof(struct pds_engine) <= PDS_ENGINE_HEADER, "PDS_ENGINE_HEADER");

struct pds_session {
  pds_engine *engine;
  pds_kv kv;
  unsigned char *scratch;
  pds_gpu_session gpu;
  uint32_t *logit_rows; /* [max_logits] */
  unsigned char *last;  /* [max_seqs][pds_last_bytes]; NULL: the plan has no predictor */
  uint64_t bytes;
  _Atomic bool busy;   /* a call that uses or changes the session's state is running */
  _Atomic bool cancel; /* asked for by pds_cancel, cleared by the step that obeys */
  pds_tap_fn tap;
  void *tap_user;
  const uint16_t *predictions; /* pds_session_set_predictions */
  uint32_t n_predictions;
  const uint16_t *routes; /* pds_session_set_routes */
  uint32_t n_routes;
  pds_trace trace;
  pds_llc_list llc; /* of the running step */
  /* Read by pds_session_get_stats while a step runs. */
  _Atomic uint64_t steps, rows, step_ns, expert_rows, experts_activated, weight_bytes;
  _Atomic uint32_t blocks_used;
  pds_llc_counts llc_counts;
};
_Static_assert(sizeof(struct pds_session) <= PDS_SESSION_HEADER, "PDS_SESSION_HEADER");

/* PDS_ERR_FORKED in a child process. */
pds_status pds_engine_check_fork(const pds_engine *engine);
void pds_engine_retain(pds_engine *engine);
void pds_engine_release(pds_engine *engine);

/* nets.c */
void pds_nets_free(pds_engine *engine);
void pds_learn_free(pds_engine *engine);
/* Predicts in the session's scratch; `ctx` is that of a step without rows. */
pds_status pds_predict_rows(pds_session *session, pds_step_ctx *ctx, const pds_prediction *asked,
                            float *out_logits);

/* measure.c: the same of a measurement. */
pds_status pds_measure_part(pds_session *session, pds_step_ctx *ctx, const pds_measurement *asked,
                            int64_t *out_ns);

#endif
