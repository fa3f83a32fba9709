/* ops_dense.c: the operators of every layer but attention and experts: embed, norm, dense and
 * shared MLP, lm_head. */
#include <string.h>

#include "ops.h"

/* Below these many rows a row-wise operator is cheaper in the caller than as a parallel job. */
enum { FEW_ROWS = 2 };

static uint32_t hidden_stride(const pds_step_ctx *ctx) {
  return pds_ceil(ctx->plan->hidden, 32);
}

static float widen(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Element k of a packed column: lane `lane` of the 64-byte rows of its panel. */
static float element(const pds_tensor *t, const unsigned char *panel, uint32_t lane, uint32_t k) {
  const unsigned char *word = panel + lane * 4;
  uint16_t half;
  float x;
  switch (t->dtype) {
  case PDS_F32: memcpy(&x, word + (size_t)k * 64, sizeof x); return x;
  case PDS_BF16: memcpy(&half, word + (size_t)(k / 2) * 64 + k % 2 * 2, sizeof half); break;
  default: {
    const size_t k_pad = pds_k_pad(t), rows = k_pad / (t->dtype == PDS_I8 ? 4 : 8);
    int q;
    if (t->dtype == PDS_I8) {
      q = (int8_t)word[(size_t)(k / 4) * 64 + k % 4];
    } else {
      const unsigned char pair = word[(size_t)(k / 8) * 64 + k % 4];
      q = (k % 8 < 4 ? pair & 15 : pair >> 4) - 8;
    }
    memcpy(&half, panel + rows * 64 + (size_t)(k / pds_group(t->dtype)) * 32 + lane * 2,
           sizeof half);
    return (float)q * widen(half);
  }
  }
  return widen(half);
}

/* Token t is column t of the packed matrix. */
static void embed_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  pds_step_ctx *ctx = arg;
  const pds_tensor *e = &ctx->plan->embed;
  const uint32_t token = (uint32_t)ctx->token[row], stride = hidden_stride(ctx);
  const unsigned char *panel =
      (const unsigned char *)pds_weight(ctx, e, 0) + token / PDS_LANES * pds_panel_bytes(e);
  float *y = (float *)pds_buf(ctx, PDS_BUF_HID) + (size_t)row * stride;
  for (uint32_t k = 0; k < e->k; k++) y[k] = element(e, panel, token % PDS_LANES, k);
  memset(y + e->k, 0, (stride - e->k) * sizeof *y);
}

void pds_op_embed(pds_step_ctx *ctx) {
  pds_run_rows(ctx, embed_row, ctx, ctx->rows, FEW_ROWS);
}

typedef struct norm_job {
  pds_step_ctx *ctx;
  const float *weight;
  float eps;
  const uint32_t *rows; /* NULL: all */
} norm_job;

static void norm_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const norm_job *job = arg;
  pds_step_ctx *ctx = job->ctx;
  const uint32_t n = ctx->plan->hidden, stride = hidden_stride(ctx),
                 src = job->rows ? job->rows[row] : row;
  const float *x = (const float *)pds_buf(ctx, PDS_BUF_HID) + (size_t)src * stride;
  float *xn = (float *)pds_buf(ctx, PDS_BUF_XN) + (size_t)row * stride;
  ctx->kernels->rms_norm(x, job->weight, n, job->eps, xn);
  memset(xn + n, 0, (stride - n) * sizeof *xn);
  pds_act(ctx)->convert(xn,
                        (unsigned char *)pds_buf(ctx, PDS_BUF_XACT) +
                            (size_t)row * stride * pds_act_bytes(ctx->plan),
                        stride);
}

void pds_op_norm(pds_step_ctx *ctx, uint32_t layer, pds_norm_site site) {
  const pds_plan *plan = ctx->plan;
  const pds_tensor *weight = &plan->final_norm;
  norm_job job = {.ctx = ctx, .eps = plan->final_norm_eps};
  uint32_t rows = ctx->rows;
  if (site == PDS_NORM_FINAL) {
    job.rows = ctx->logit_row;
    rows = ctx->n_logits;
  } else {
    const pds_layer *l = &plan->layers[layer];
    weight = site == PDS_NORM_ATTN ? &l->attn_norm : &l->mlp_norm;
    job.eps = site == PDS_NORM_ATTN ? l->attn_norm_eps : l->mlp_norm_eps;
  }
  job.weight = pds_weight(ctx, weight, 0);
  pds_run_rows(ctx, norm_row, &job, rows, FEW_ROWS);
}

/* y (+)= down(silu(gate x) * up x) through `mid`. */
static pds_mlp_job mlp_of(pds_step_ctx *ctx, const pds_mlp *m, pds_buffer mid, pds_buffer y,
                          pds_gemm_out out) {
  const uint32_t stride = hidden_stride(ctx), mid_stride = pds_ceil(m->inter, 32);
  void *between = pds_buf(ctx, mid);
  return (pds_mlp_job){.up = pds_swiglu_of(ctx, m, pds_buf(ctx, PDS_BUF_XACT), stride, between,
                                           mid_stride, ctx->rows),
                       .down = pds_gemm_of(ctx, &m->down, between, mid_stride, pds_buf(ctx, y),
                                           stride, ctx->rows, out)};
}

pds_mlp_job pds_shared_of(pds_step_ctx *ctx, uint32_t layer) {
  const pds_mlp *shared = &ctx->plan->layers[layer].shared;
  return mlp_of(ctx, shared, PDS_BUF_MID_SHARED, PDS_BUF_SHARED_OUT, PDS_OUT_F32);
}

static void run_mlp(pds_step_ctx *ctx, pds_mlp_job job) {
  _Atomic uint32_t left;
  job.left = &left;
  pds_run_mlps(ctx, &job, 1);
}

void pds_op_mlp(pds_step_ctx *ctx, uint32_t layer) {
  const pds_mlp *dense = &ctx->plan->layers[layer].dense;
  run_mlp(ctx, mlp_of(ctx, dense, PDS_BUF_MID, PDS_BUF_HID, PDS_OUT_ADD));
}

void pds_op_shared_expert(pds_step_ctx *ctx, uint32_t layer) {
  run_mlp(ctx, pds_shared_of(ctx, layer));
}

void pds_op_lm_head(pds_step_ctx *ctx) {
  const pds_plan *plan = ctx->plan;
  if (!ctx->n_logits) return;
  pds_gemm_job job =
      pds_gemm_of(ctx, &plan->lm_head, pds_buf(ctx, PDS_BUF_XACT), hidden_stride(ctx),
                  pds_buf(ctx, PDS_BUF_LOGITS), plan->vocab, ctx->n_logits, PDS_OUT_F32);
  pds_run_gemms(ctx, &job);
}
