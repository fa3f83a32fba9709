/* step.h: all that an operator sees of the running step. The executor fills it; ops_*.c read it. */
#ifndef PDS_STEP_H
#define PDS_STEP_H

#include <stdint.h>

#include "kernels/kernels.h"
#include "plan_desc.h"
#include "pool.h"

/* One activated expert of the running layer: rows EXPERT_ROWS[first .. first + rows). */
typedef struct pds_hole {
  uint32_t expert, first, rows;
  _Atomic uint32_t left; /* pds_mlp_job.left */
} pds_hole;

typedef struct pds_step_ctx {
  const pds_plan *plan;
  const pds_kernels *kernels;
  uint32_t l2_bytes; /* pds_gemm.l2_bytes */
  pds_pool *pool;
  const unsigned char *const *files; /* base address of each mapped weight file */
  unsigned char *scratch;            /* session scratch; pds_buf() below */
  unsigned char *thread_scratch;     /* [threads][plan->thread_scratch_bytes], 64-byte aligned */
  /* the batch */
  uint32_t rows;
  const int32_t *token, *position, *seq;
  const uint32_t *logit_row; /* [n_logits] row indices that want logits */
  uint32_t n_logits;
  /* KV: block b of sequence s is kv + (size_t)table[s * table_stride + b] * plan->kv_block_bytes */
  unsigned char *kv;
  const uint32_t *table;
  uint32_t table_stride;
  /* holes of the running layer, bound by recompile */
  pds_hole *cpu_holes; /* ?c: in PDS_BUF_HOLES */
  uint32_t n_cpu_holes;
  /* GPU plans, on the GPU: addresses of the holes' experts, whose outputs are in EXPERT_OUT if
   * on_gpu[expert], else in cpu_out. NULL: experts lie in weight files, outputs in EXPERT_OUT. */
  const unsigned char *const *blobs;
  const float *cpu_out;
  const uint8_t *on_gpu;
  uint8_t
      rounds_out; /* the CPU's experts leave act in EXPERT_OUT, half of what a link has to move */
  /* cache prefetch (llc.h); without it predict, ?p and the prefetches retire at once */
  uint32_t predicts;
  uint32_t n_llc_holes; /* ?p: in PDS_BUF_LLC_HOLES */
  /* predictors (net.h): they read rows 0, predict_step, 2 predict_step, ... of the step */
  uint32_t predict_step;
  const struct pds_net_slot *nets; /* [n_layers][2]; NULL: none was set */
  uint32_t net_phase;              /* PDS_NET_PREFILL or PDS_NET_DECODE */
  unsigned char *last;             /* [seqs][pds_last_bytes]; NULL: nothing is remembered */
  const uint32_t *length;          /* tokens of each sequence before the step */
  const uint16_t *predictions; /* [n_predictions][n_layers][last_top_k] in place of predictors' */
  uint32_t n_predictions;
  const uint16_t *routes; /* [n_routes][n_layers][routes_k] in place of gates' */
  uint32_t n_routes, routes_k;
  struct pds_learn *learn; /* learn.h; NULL: nothing is kept */
} pds_step_ctx;

static inline void *pds_buf(const pds_step_ctx *ctx, pds_buffer b) {
  return ctx->scratch + ctx->plan->buffer_offset[b];
}
static inline const void *pds_weight(const pds_step_ctx *ctx, const pds_tensor *t, uint32_t index) {
  return ctx->files[t->file] + t->offset + (uint64_t)index * t->stride;
}

/* At load: the plan's sizes are those that these operators work with, else PDS_ERR_PLAN_FORMAT. */
pds_status pds_ops_check(const pds_plan *plan);

/* Operators: one function an opcode. None allocates, blocks on I/O or fails. */
typedef enum pds_norm_site {
  PDS_NORM_ATTN = 0,
  PDS_NORM_MLP = 1,
  PDS_NORM_FINAL = 2
} pds_norm_site;
/* once a step: PDS_BUF_ROPE (per distinct rope, see ops_attention.c) */
void pds_op_rope_table(pds_step_ctx *ctx);
void pds_op_embed(pds_step_ctx *ctx); /* token -> HID */
/* HID -> XN, XACT; FINAL: only the rows that want logits, compacted */
void pds_op_norm(pds_step_ctx *ctx, uint32_t layer, pds_norm_site site);
/* XACT -> KV append, HID += o_proj(attention) */
void pds_op_attention(pds_step_ctx *ctx, uint32_t layer);
/* dense layer: XACT -> HID += mlp */
void pds_op_mlp(pds_step_ctx *ctx, uint32_t layer);
void pds_op_gate(pds_step_ctx *ctx, uint32_t layer); /* XN -> ROUTE_ID, ROUTE_W */
/* routes -> ROUTE_ID, ROUTE_W, of all rows: what the gate of a step with routes gives */
void pds_op_take_routes(pds_step_ctx *ctx, uint32_t layer);
/* XN, XACT, ROUTE_ID, ROUTE_W -> PREDICT_ID, PREDICT_W: which experts of the predictor's target each
 * of the rows that predict will choose */
void pds_op_predict(pds_step_ctx *ctx, uint32_t layer);
void pds_op_gate_and_predict(pds_step_ctx *ctx, uint32_t layer); /* as one job */
/* XN, XACT, ROUTE_ID, ROUTE_W, NET_PREV, NET_NEXT -> PREDICT: the predictor's logits alone */
void pds_op_predict_logits(pds_step_ctx *ctx, uint32_t layer);
/* Rows that predict. */
static inline uint32_t pds_predicting(const pds_step_ctx *ctx) {
  return (ctx->rows + ctx->predict_step - 1) / ctx->predict_step;
}
/* ROUTE_ID -> last: what each sequence's last token chose */
void pds_op_remember(pds_step_ctx *ctx, uint32_t layer);
/* PREDICT_ID, PREDICT_W -> LLC_HOLES: experts by the sum of their weights over the rows, the
 * greatest first (equal ones: lowest id first), `capacity` at most */
void pds_op_bind_llc(pds_step_ctx *ctx, uint32_t layer, uint32_t capacity);
/* ROUTE_ID -> EXPERT_ROWS, cpu_holes (ascending expert id) */
void pds_op_recompile(pds_step_ctx *ctx, uint32_t layer);
void pds_op_shared_expert(pds_step_ctx *ctx, uint32_t layer); /* XACT -> SHARED_OUT */
/* XACT -> MID -> EXPERT_OUT */
void pds_op_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes, uint32_t n_holes);
void pds_op_shared_and_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes,
                              uint32_t n_holes); /* both, as one parallel job */
/* HID += sum over ranks in order of ROUTE_W * EXPERT_OUT (+ SHARED_OUT) */
void pds_op_combine(pds_step_ctx *ctx, uint32_t layer, int shared);
void pds_op_lm_head(pds_step_ctx *ctx); /* XACT -> LOGITS */

#endif
