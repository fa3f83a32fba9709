/* ops.h: what the ops_*.c files share: cutting GEMMs into items of a parallel job. */
#ifndef PDS_OPS_H
#define PDS_OPS_H

#include "kv_layout.h"
#include "net.h"
#include "panels.h"
#include "step.h"

/* The kernels of the plan's act dtype. */
static inline const pds_act_kernels *pds_act(const pds_step_ctx *ctx) {
  return ctx->plan->act_dtype == PDS_BF16 ? &ctx->kernels->bf16 : &ctx->kernels->f32;
}

static inline void *pds_worker_scratch(const pds_step_ctx *ctx, uint32_t worker) {
  return ctx->thread_scratch + (size_t)worker * ctx->plan->thread_scratch_bytes;
}

/* One parallel job of `count` GEMMs that share k, cols and pad. The matrices of W follow each
 * other w->stride apart; `select` adapts `gemm` (that of matrix 0) to matrix i: it may change x,
 * y, w, rows and the indices. */
typedef struct pds_gemm_job pds_gemm_job;
struct pds_gemm_job {
  pds_gemm gemm;
  const pds_tensor *w;
  uint32_t count;
  uint32_t swiglu;
  void (*select)(const pds_gemm_job *job, uint32_t i, pds_gemm *gemm); /* NULL: count is 1 */
  const void *arg, *arg2;                                              /* of select */
  size_t x_step, y_step;                                               /* of select */
  const void *user;                                                    /* of select */
  uint64_t first;                                                      /* of select */
  uint32_t rows_each; /* rows of one matrix, about, where `select` says how many; 0: gemm.rows */
  uint32_t gathers;   /* `select` sets x_index */
  uint32_t x_rows;    /* rows of x in all, where `select` or the indices choose among them */
  void (*fn)(const pds_gemm *);
  uint32_t y_bytes;
  /* Set by pds_cut_gemms, in blocks of 16 columns. The first `coarse` items have part_blocks, `parts`
   * of them a matrix; the others fine_blocks, of the matrices or the part of one that is left. Each
   * is row_parts items of part_rows rows. */
  uint32_t blocks, part_blocks, parts, coarse, fine_blocks, fine_parts, part_rows, row_parts;
};

/* A job of one GEMM: y[rows, cols] = x W^T, cols = w->n (swiglu: see there), k and panels from
 * w. */
pds_gemm_job pds_gemm_of(pds_step_ctx *ctx, const pds_tensor *w, const void *x, size_t x_stride,
                         void *y, size_t y_stride, uint32_t rows, pds_gemm_out out);

/* The same of panels that lie at `data`. */
pds_gemm_job pds_gemm_at(pds_step_ctx *ctx, const pds_tensor *w, const void *data, const void *x,
                         size_t x_stride, void *y, size_t y_stride, uint32_t rows,
                         pds_gemm_out out);

/* The same of a SwiGLU: y = act(silu(gate) * up), `inter` columns, zero up to the next multiple
 * of 32. */
pds_gemm_job pds_swiglu_of(pds_step_ctx *ctx, const pds_mlp *mlp, const void *x, size_t x_stride,
                           void *y, size_t y_stride, uint32_t rows);

/* On int8 and int4 weights it first quantises the rows of x into PDS_BUF_XQ, and points x, its
 * stride and x_step there. */
void pds_run_gemms(pds_step_ctx *ctx, pds_gemm_job *job);

/* Two that do not depend on each other, as one parallel job. */
void pds_run_gemms_together(pds_step_ctx *ctx, pds_gemm_job *a, pds_gemm_job *b);

/* The same in parts, for jobs that run together. The first: n jobs, 1 or 2; two that read the same
 * rows have x_rows in common. Returns the bytes of PDS_BUF_XQ taken. */
size_t pds_quantise_x(pds_step_ctx *ctx, pds_gemm_job *const *jobs, uint32_t n);
/* The number of items; `last`: no other job follows, so that the last ones are small. */
uint32_t pds_cut_gemms(const pds_step_ctx *ctx, pds_gemm_job *job, int last);
void pds_run_gemm_item(const pds_gemm_job *job, uint32_t item);
uint32_t pds_gemm_item_matrix(const pds_gemm_job *job, uint32_t item);

/* Rows of x that become rows of int8. */
typedef struct pds_quantise {
  const pds_int_kernels *kernels; /* NULL: none */
  const uint16_t *x;
  unsigned char *y;
  size_t x_stride, y_stride; /* elements, bytes */
  uint32_t n, k, rows;
} pds_quantise;
/* Points the job at its rows of int8, at `to`, and says how they are to be made: kernels is NULL if
 * its weights ask for none. */
pds_quantise pds_quantise_of(const pds_step_ctx *ctx, pds_gemm_job *job, unsigned char *to);
void pds_quantise_row(const pds_quantise *q, uint32_t row);

/* A MLP, or several that follow each other: matrix i of `down` reads the rows that matrix i of `up`
 * writes, and waits for them alone. */
typedef struct pds_mlp_job {
  pds_gemm_job up, down;
  _Atomic uint32_t *left; /* for each matrix, left_step bytes apart: what `down` waits for */
  size_t left_step;
} pds_mlp_job;

/* That of a layer's shared expert, but `left`. */
pds_mlp_job pds_shared_of(pds_step_ctx *ctx, uint32_t layer);

/* All of n MLPs, 1 or 2, as one parallel job. */
void pds_run_mlps(pds_step_ctx *ctx, pds_mlp_job *mlps, uint32_t n);

/* The gate's GEMM on XN: logits to `scores` [rows, ceil16(experts)]. */
pds_gemm_job pds_gate_of(pds_step_ctx *ctx, const pds_gate *gate, float *scores);
/* Routing of one row by the gate's rule: logits [experts], which become scores, to its top_k
 * experts, best first, and their weights. */
void pds_route(pds_step_ctx *ctx, const pds_gate *gate, uint32_t worker, float *scores, int32_t *id,
               float *weight);
/* The same for `row` of the step, from GATE to ROUTE_ID and ROUTE_W. */
void pds_route_row(pds_step_ctx *ctx, uint32_t layer, uint32_t worker, uint32_t row);

/* Index of the greatest of x[0..n) that is not used; the lowest index wins a tie. One at least
 * must be unused. */
uint32_t pds_best_unused(const float *x, const uint8_t *used, uint32_t n);

/* torch's order: NaN is the greatest value. */
static inline int pds_above(float a, float b) {
  return a > b || (a == a) < (b == b);
}

/* Bytes of PDS_BUF_XQ that the plan's GEMMs need at least. */
size_t pds_quant_need(const pds_plan *plan);

enum { PDS_FEW_ROWS = 4 }; /* whose routing or combining is less work than waking workers */

/* A net's forward in two parts. The first is one GEMM, if any (false: none), which the second reads
 * with the layer's routing and NET_PREV, NET_NEXT: logits to PREDICT. */
int pds_net_first(pds_step_ctx *ctx, const pds_net *net, pds_gemm_job *out_job);
void pds_net_rest(pds_step_ctx *ctx, uint32_t layer, const pds_net *net);
/* What is known of the tokens before the step's rows, to NET_PREV and NET_NEXT. */
void pds_net_previous(pds_step_ctx *ctx, uint32_t layer);
/* Whether the plan's buffers have room for every net. */
pds_status pds_net_check(const pds_plan *plan);

/* Runs fn over `items` in the caller if there are few, else as a parallel job. */
void pds_run_rows(pds_step_ctx *ctx, pds_job_fn fn, void *arg, uint32_t items, uint32_t few);

#endif
