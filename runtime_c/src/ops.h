/* ops.h: what the ops_*.c files share: cutting GEMMs into items of a parallel job. */
#ifndef PDS_OPS_H
#define PDS_OPS_H

#include "kv_layout.h"
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
  uint32_t rows_each; /* rows of one matrix, about, where `select` says how many; 0: gemm.rows */
  uint32_t gathers;   /* `select` sets x_index */
  uint32_t x_rows;    /* rows of x in all, where `select` or the indices choose among them */
  /* set by pds_run_gemms */
  void (*fn)(const pds_gemm *);
  uint32_t y_bytes, blocks, part_blocks, parts, part_rows, row_parts;
};

/* A job of one GEMM: y[rows, cols] = x W^T, cols = w->n (swiglu: see there), k and panels from
 * w. */
pds_gemm_job pds_gemm_of(pds_step_ctx *ctx, const pds_tensor *w, const void *x, size_t x_stride,
                         void *y, size_t y_stride, uint32_t rows, pds_gemm_out out);

/* The same of a SwiGLU: y = act(silu(gate) * up), `inter` columns, zero up to the next multiple
 * of 32. */
pds_gemm_job pds_swiglu_of(pds_step_ctx *ctx, const pds_mlp *mlp, const void *x, size_t x_stride,
                           void *y, size_t y_stride, uint32_t rows);

/* On int8 and int4 weights it first quantises the rows of x into PDS_BUF_XQ, and points x, its
 * stride and x_step there. */
void pds_run_gemms(pds_step_ctx *ctx, pds_gemm_job *job);
/* The same of two that do not depend on each other, as one parallel job. Where they read the same
 * rows they have x_rows in common. */
void pds_run_gemms_together(pds_step_ctx *ctx, pds_gemm_job *a, pds_gemm_job *b);

/* Bytes of PDS_BUF_XQ that the plan's GEMMs need at least. */
size_t pds_quant_need(const pds_plan *plan);

/* Runs fn over `items` in the caller if there are few, else as a parallel job. */
void pds_run_rows(pds_step_ctx *ctx, pds_job_fn fn, void *arg, uint32_t items, uint32_t few);

#endif
