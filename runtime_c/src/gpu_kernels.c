/* gpu_kernels.c: from operators to launches. The kernels read the CPU's layouts: weights, buffers and KV
 * blocks are the same on both sides. */
#define _GNU_SOURCE
#include "gpu_kernels.h"

#include <fcntl.h>
#include <stddef.h>
#include <string.h>

#include "kv_layout.h"
#include "map.h"
#include "memory.h"
#include "ops_rope.h"
#include "panels.h"

_Static_assert((uint32_t)PDS_CU_EXPERTS >= PDS_MAX_EXPERTS, "PDS_CU_EXPERTS");

static const char *const names[] = {
#define PDS_CU_NAME(name, params, threads) "pds_cu_" #name,
    PDS_CU_KERNELS(PDS_CU_NAME)
#undef PDS_CU_NAME
};

/* --- loading --- */

static pds_status find_kernels(pds_gpu *gpu) {
  for (int i = 0; i < PDS_CU_COUNT; i++) {
    PDS_CUDA_CALL(gpu, names[i], cuModuleGetFunction, &gpu->cu[i], gpu->module, names[i]);
    PDS_CUDA_CALL(gpu, names[i], cuFuncSetAttribute, gpu->cu[i],
                  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)gpu->cu_device.shared_most);
  }
  return PDS_OK;
}

/* A cubin, or PTX: no mock runs that. */
static bool is_for_gpus(const char *image) {
  return strncmp(image, "\177ELF", 4) == 0 || strstr(image, ".version");
}

/* Loads an image, if it is one for this device; *out_for_gpus: it is one for GPUs. PTX is a string: a zero
 * follows the file. */
static pds_status try_image(pds_gpu *gpu, const char *path, bool *out_for_gpus) {
  void *image;
  uint64_t bytes = 0;
  PDS_RETURN_IF_ERROR(pds_file_bytes(AT_FDCWD, path, &bytes));
  const uint64_t room = pds_round_up(bytes + 1, PDS_GRAIN);
  PDS_RETURN_IF_ERROR(pds_map_anon(room, "kernels", &image));
  const pds_status status = pds_read_file(AT_FDCWD, path, image, bytes);
  CUresult result = CUDA_SUCCESS;
  *out_for_gpus = status == PDS_OK && is_for_gpus(image);
  if (status == PDS_OK && (gpu->real || !*out_for_gpus))
    result = gpu->cuda.cuModuleLoadData(&gpu->module, image);
  pds_unmap(image, room);
  if (status != PDS_OK || result == CUDA_ERROR_INVALID_IMAGE ||
      result == CUDA_ERROR_NO_BINARY_FOR_GPU || result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
    return status;
  return pds_gpu_check(gpu, result, "loading kernels");
}

pds_status pds_gpu_load_images(pds_gpu *gpu, const char *files) {
  bool all_for_gpus = true;
  for (const char *name = files; !gpu->module && *name;) {
    char path[4096];
    const size_t n = strcspn(name, "\n");
    if (n >= sizeof path)
      return pds_fail(PDS_ERR_ARGUMENT, "gpu_kernels: a path of %zu bytes, expected less than %zu",
                      n, sizeof path);
    memcpy(path, name, n);
    path[n] = 0;
    bool for_gpus;
    PDS_RETURN_IF_ERROR(try_image(gpu, path, &for_gpus));
    all_for_gpus = all_for_gpus && for_gpus;
    name += n + (name[n] == '\n');
  }
  if (gpu->module) return find_kernels(gpu);
  if (!gpu->real && all_for_gpus) return PDS_OK;
  const uint32_t compute = gpu->cu_device.compute;
  return pds_fail(PDS_ERR_DRIVER,
                  "%s: the plan has no kernels for compute capability %u.%u that this driver takes "
                  "(%.300s); compile with --gpu-arch sm_%u, or run on the CPU (device cpu)",
                  gpu->name, compute / 10, compute % 10, *files ? files : "none at all", compute);
}

pds_status pds_gpu_check_plan(const pds_plan *plan) {
  for (uint32_t i = 0; i < plan->n_layers; i++)
    if (plan->layers[i].attn.rope.dim > 2 * PDS_CU_ROPE)
      return pds_fail(
          PDS_ERR_PLAN_FORMAT,
          "plan constants: layer %u rotates %u dimensions of a head, expected at most %u "
          "on a GPU",
          i, plan->layers[i].attn.rope.dim, 2 * PDS_CU_ROPE);
  return PDS_OK;
}

/* --- launching --- */

typedef struct run {
  const pds_gpu_step *step;
  const pds_step_ctx *ctx; /* the device's */
  const pds_plan *plan;
  const pds_layer *layer;
  const char *what;
} run;

static pds_status launch(const run *r, const pds_cu_launch *l, void *params) {
  pds_gpu *gpu = r->step->gpu;
  void *all[] = {params};
  PDS_CUDA_CALL(gpu, r->what, cuLaunchKernel, gpu->cu[l->kernel], l->grid[0], l->grid[1],
                l->grid[2], l->threads, 1, 1, l->shared_bytes, gpu->compute, all, NULL);
  return PDS_OK;
}

/* How much work a launch is, for the mock's costs. */
static pds_cu_head head_of(uint32_t bytes, const uint32_t *rows) {
  return (pds_cu_head){.bytes = bytes, .n = 1, .tokens = rows};
}

static uint32_t hidden_stride(const run *r) {
  return pds_ceil(r->plan->hidden, 32);
}

/* --- GEMMs --- */

/* All but the holes, which are 3 KiB that most launches do not need. */
static void clear(pds_cu_gemm *g) {
  memset(g, 0, offsetof(pds_cu_gemm, holes));
}

static void gemm_of(const run *r, pds_cu_gemm *g, const pds_tensor *w, const void *x,
                    uint32_t x_stride, void *y, uint32_t y_stride, pds_gemm_out out) {
  clear(g);
  g->x = x;
  g->x_stride = x_stride;
  g->x_div = 1;
  g->w = pds_weight(r->ctx, w, 0);
  g->panel_bytes = pds_panel_bytes(w);
  g->y = y;
  g->y_stride = y_stride;
  g->rows = r->ctx->rows;
  g->k = w->k;
  g->k_pad = pds_k_pad(w);
  g->cols = w->n;
  g->count = 1;
  g->w_dtype = w->dtype;
  g->act_dtype = w->dtype == PDS_F32 ? PDS_CU_F32 : PDS_CU_BF16;
  g->out = (uint8_t)out;
}

static void swiglu_of(const run *r, pds_cu_gemm *g, const pds_mlp *mlp, const void *x, void *y) {
  gemm_of(r, g, &mlp->gate_up, x, hidden_stride(r), y, pds_ceil(mlp->inter, 32), PDS_OUT_ACT);
  g->cols = mlp->inter;
  g->pad = pds_ceil(mlp->inter, 32);
  g->swiglu = 1;
}

static pds_status run_gemm(const run *r, pds_cu_gemm *g) {
  if (!g->rows && !g->n_holes) return PDS_OK;
  g->head = head_of(sizeof *g, &g->rows);
  const pds_cu_launch l = pds_cu_shape_gemm(&r->step->gpu->cu_device, g);
  return launch(r, &l, g);
}

static const void *bias_of(const run *r, const pds_tensor *bias) {
  return bias->dtype == PDS_NONE ? NULL : pds_weight(r->ctx, bias, 0);
}

/* y (+)= down(silu(gate x) * up x) through `mid`. */
static pds_status run_mlp(const run *r, const pds_mlp *mlp, pds_buffer mid, pds_buffer y,
                          pds_gemm_out out) {
  pds_cu_gemm g;
  void *between = pds_buf(r->ctx, mid);
  swiglu_of(r, &g, mlp, pds_buf(r->ctx, PDS_BUF_XACT), between);
  PDS_RETURN_IF_ERROR(run_gemm(r, &g));
  gemm_of(r, &g, &mlp->down, between, pds_ceil(mlp->inter, 32), pds_buf(r->ctx, y),
          hidden_stride(r), out);
  return run_gemm(r, &g);
}

/* --- experts --- */

static void set_holes(pds_cu_gemm *g, const pds_gpu_hole *holes, uint32_t n) {
  g->n_holes = n;
  for (uint32_t i = 0; i < n; i++)
    g->holes[i] = (pds_cu_hole){.at = (const uint8_t *)(uintptr_t)holes[i].at,
                                .first = holes[i].first,
                                .rows = holes[i].rows};
}

/* MID rows are in the order of EXPERT_ROWS. */
static pds_status some_experts(const run *r, const pds_gpu_hole *holes, uint32_t n) {
  const pds_mlp *experts = &r->layer->experts;
  /* of few rows, from pinned memory: see send_rows of placement.c */
  const int32_t *rows =
      pds_buf(pds_gpu_tells_host(r->step) ? r->step->host : r->ctx, PDS_BUF_EXPERT_ROWS);
  void *mid = pds_buf(r->ctx, PDS_BUF_MID);
  pds_cu_gemm g;
  swiglu_of(r, &g, experts, pds_buf(r->ctx, PDS_BUF_XACT), mid);
  g.x_index = rows;
  g.x_div = r->layer->gate.top_k;
  set_holes(&g, holes, n);
  PDS_RETURN_IF_ERROR(run_gemm(r, &g));
  gemm_of(r, &g, &experts->down, mid, pds_ceil(experts->inter, 32),
          pds_buf(r->ctx, PDS_BUF_EXPERT_OUT), hidden_stride(r), PDS_OUT_F32);
  g.y_index = rows;
  g.w_offset = experts->down.offset - experts->gate_up.offset;
  set_holes(&g, holes, n);
  return run_gemm(r, &g);
}

static pds_status run_experts(const run *r, const pds_gpu_hole *holes, uint32_t n) {
  for (uint32_t first = 0; first < n; first += PDS_CU_HOLES)
    PDS_RETURN_IF_ERROR(
        some_experts(r, holes + first, n - first < PDS_CU_HOLES ? n - first : PDS_CU_HOLES));
  return PDS_OK;
}

/* --- attention --- */

static void describe(const run *r, pds_cu_attention *p) {
  const pds_step_ctx *ctx = r->ctx;
  const pds_attention *a = &r->layer->attn;
  const uint32_t index = (uint32_t)(r->layer - r->plan->layers);
  *p = (pds_cu_attention){.position = ctx->position,
                          .seq = ctx->seq,
                          .table = ctx->table,
                          .kv = ctx->kv + pds_kv_layer_offset(r->plan, index),
                          .block_bytes = r->plan->kv_block_bytes,
                          .rows = ctx->rows,
                          .table_stride = ctx->table_stride,
                          .mla = a->kind == PDS_MLA,
                          .qk_norm = a->qk_norm,
                          .interleaved = a->rope.interleaved,
                          .act_dtype = r->plan->act_dtype == PDS_BF16 ? PDS_CU_BF16 : PDS_CU_F32,
                          .heads = a->heads,
                          .kv_heads = pds_kv_heads(a),
                          .qk_dim = a->qk_dim,
                          .v_dim = a->v_dim,
                          .nope_dim = a->nope_dim,
                          .q_lora = a->q_lora,
                          .kv_lora = a->kv_lora,
                          .rope_dim = a->rope.dim,
                          .window = a->window,
                          .key_dims = pds_key_dims(a),
                          .value_dims = pds_value_dims(a),
                          .key_panel_bytes = pds_key_panel_bytes(r->plan, a),
                          .key_bytes = pds_kv_key_bytes(r->plan, a),
                          .head_bytes = pds_kv_head_bytes(r->plan, a),
                          .scale = a->scale,
                          .norm_eps = a->norm_eps,
                          .clip = a->clip,
                          .q_norm = bias_of(r, &a->q_norm),
                          .k_norm = bias_of(r, &a->k_norm),
                          .rope = a->rope.dim ? pds_rope_row(ctx, &a->rope, 0) : NULL,
                          .qkv = pds_buf(ctx, PDS_BUF_QKV),
                          .qb = pds_buf(ctx, PDS_BUF_QB),
                          .qact = pds_buf(ctx, PDS_BUF_QACT),
                          .q = pds_buf(ctx, PDS_BUF_Q),
                          .qhead = pds_buf(ctx, PDS_BUF_QHEAD),
                          .ctx = pds_buf(ctx, PDS_BUF_CTXACT),
                          .oact = pds_buf(ctx, PDS_BUF_OACT),
                          .partial = pds_buf(ctx, PDS_BUF_PARTIAL),
                          .qkv_stride = pds_ceil(a->in_proj.n, PDS_LANES),
                          .qb_stride = pds_ceil(a->heads * a->qk_dim, PDS_LANES),
                          .qact_stride = pds_ceil(a->q_lora, 32),
                          .q_stride = pds_ceil(pds_key_dims(a), 32),
                          .qhead_stride = pds_ceil(a->nope_dim, 32),
                          .ctx_stride = pds_ceil(a->kv_lora, 32),
                          .oact_stride = pds_ceil(a->heads * a->v_dim, 32),
                          .split_tokens = UINT32_MAX,
                          .splits = 1,
                          .most_splits =
                              (r->plan->max_context + r->plan->kv_split - 1) / r->plan->kv_split};
}

static pds_status stage(const run *r, pds_cu_attention *p, pds_cu_stage which) {
  p->head = head_of(sizeof *p, &p->rows);
  const pds_cu_launch l = pds_cu_shape_attention(&r->step->gpu->cu_device, p, which);
  return launch(r, &l, p);
}

/* One matrix a head. */
static pds_status run_heads(const run *r, const pds_tensor *w, const void *x, uint32_t x_head,
                            void *y, uint32_t y_stride, uint32_t y_head) {
  pds_cu_gemm g;
  const uint32_t heads = r->layer->attn.heads;
  gemm_of(r, &g, w, x, heads * x_head, y, y_stride, PDS_OUT_ACT);
  g.count = heads;
  g.w_step = w->stride;
  g.x_step = x_head;
  g.y_step = y_head;
  return run_gemm(r, &g);
}

static pds_status mla_queries(const run *r, pds_cu_attention *p) {
  const pds_attention *a = &r->layer->attn;
  if (a->q_lora) {
    PDS_RETURN_IF_ERROR(stage(r, p, PDS_CU_STAGE_Q_A));
    pds_cu_gemm g;
    gemm_of(r, &g, &a->q_b, p->qact, p->qact_stride, p->qb, p->qb_stride, PDS_OUT_F32);
    PDS_RETURN_IF_ERROR(run_gemm(r, &g));
  }
  PDS_RETURN_IF_ERROR(stage(r, p, PDS_CU_STAGE_ROWS));
  return run_heads(r, &a->uk, p->qhead, p->qhead_stride, p->q, a->heads * p->q_stride, p->q_stride);
}

/* MLA: what o_proj reads beyond the last head. */
static pds_status clear_padding(const run *r, const pds_cu_attention *p) {
  pds_gpu *gpu = r->step->gpu;
  const pds_attention *a = &r->layer->attn;
  if (a->heads * a->v_dim == p->oact_stride) return PDS_OK;
  PDS_CUDA_CALL(gpu, r->what, cuMemsetD8Async, (CUdeviceptr)(uintptr_t)p->oact, 0,
                (size_t)p->rows * p->oact_stride * pds_act_bytes(r->plan), gpu->compute);
  return PDS_OK;
}

static uint32_t farthest(const pds_step_ctx *host) {
  int32_t far = 0;
  for (uint32_t i = 0; i < host->rows; i++) far = host->position[i] > far ? host->position[i] : far;
  return (uint32_t)far;
}

static void describe_cut(const run *r, pds_cu_attention *p) {
  enum { SPLIT_ROWS = 16 }; /* PARTIAL has room for so many, or for as many more parts of fewer */
  const uint32_t most = r->plan->max_rows < SPLIT_ROWS ? r->plan->max_rows : SPLIT_ROWS;
  describe(r, p);
  if (p->rows > most) return;
  const uint32_t fewer = most / p->rows, least = r->plan->kv_split / fewer / PDS_KEYS * PDS_KEYS;
  p->most_splits *= fewer;
  pds_cu_cut_context(&r->step->gpu->cu_device, p, farthest(r->step->host),
                     least < PDS_KEYS ? PDS_KEYS : least);
}

static pds_status run_attention(const run *r) {
  const pds_attention *a = &r->layer->attn;
  const uint32_t hidden = hidden_stride(r);
  pds_cu_gemm g;
  pds_cu_attention p;
  describe_cut(r, &p);
  gemm_of(r, &g, &a->in_proj, pds_buf(r->ctx, PDS_BUF_XACT), hidden, p.qkv, p.qkv_stride,
          PDS_OUT_F32);
  g.bias = bias_of(r, &a->in_bias);
  PDS_RETURN_IF_ERROR(run_gemm(r, &g));
  if (p.mla)
    PDS_RETURN_IF_ERROR(mla_queries(r, &p));
  else
    PDS_RETURN_IF_ERROR(stage(r, &p, PDS_CU_STAGE_ROWS));
  PDS_RETURN_IF_ERROR(stage(r, &p, PDS_CU_STAGE_ATTEND));
  if (p.splits > 1) PDS_RETURN_IF_ERROR(stage(r, &p, PDS_CU_STAGE_MERGE));
  if (p.mla) {
    PDS_RETURN_IF_ERROR(clear_padding(r, &p));
    PDS_RETURN_IF_ERROR(run_heads(r, &a->uv, p.ctx, p.ctx_stride, p.oact, p.oact_stride, a->v_dim));
  }
  gemm_of(r, &g, &a->o_proj, p.oact, p.oact_stride, pds_buf(r->ctx, PDS_BUF_HID), hidden,
          PDS_OUT_ADD);
  g.bias = bias_of(r, &a->o_bias);
  return run_gemm(r, &g);
}

/* --- the others --- */

/* Layers whose ropes are alike share a table. */
static pds_status run_ropes(const run *r) {
  const pds_layer *layers = r->plan->layers;
  for (uint32_t l = 0; l < r->plan->n_layers; l++) {
    const pds_rope *rope = &layers[l].attn.rope;
    uint32_t earlier = l;
    while (earlier > 0 && layers[earlier - 1].attn.rope.table_offset != rope->table_offset)
      earlier--;
    if (earlier > 0 || rope->dim == 0) continue;
    pds_cu_rope p = {.head = head_of(sizeof p, &r->ctx->rows),
                     .position = r->ctx->position,
                     .table = (float *)pds_rope_row(r->ctx, rope, 0),
                     .rows = r->ctx->rows,
                     .dim = rope->dim,
                     .scale = rope->scale};
    memcpy(p.inv_freq, rope->inv_freq, rope->dim / 2 * sizeof *p.inv_freq);
    const pds_cu_launch shape = pds_cu_shape_rope(&p);
    PDS_RETURN_IF_ERROR(launch(r, &shape, &p));
  }
  return PDS_OK;
}

static pds_status run_norm(const run *r, pds_norm_site site) {
  const pds_tensor *weight = &r->plan->final_norm;
  pds_cu_norm p = {.x = pds_buf(r->ctx, PDS_BUF_HID),
                   .xn = pds_buf(r->ctx, PDS_BUF_XN),
                   .xact = pds_buf(r->ctx, PDS_BUF_XACT),
                   .rows = r->ctx->rows,
                   .n = r->plan->hidden,
                   .stride = hidden_stride(r),
                   .eps = r->plan->final_norm_eps,
                   .act_dtype = r->plan->act_dtype == PDS_BF16 ? PDS_CU_BF16 : PDS_CU_F32};
  if (site == PDS_NORM_FINAL) {
    p.index = r->ctx->logit_row;
    p.rows = r->ctx->n_logits;
  } else {
    weight = site == PDS_NORM_ATTN ? &r->layer->attn_norm : &r->layer->mlp_norm;
    p.eps = site == PDS_NORM_ATTN ? r->layer->attn_norm_eps : r->layer->mlp_norm_eps;
  }
  p.weight = pds_weight(r->ctx, weight, 0);
  if (site == PDS_NORM_MLP && r->layer->moe && pds_gpu_tells_host(r->step)) {
    const pds_step_ctx *host = r->step->host;
    p.host_xact = pds_buf(host, PDS_BUF_XACT);
    if (host->predicts || host->learn) p.host_xn = pds_buf(host, PDS_BUF_XN);
  }
  p.head = head_of(sizeof p, &p.rows);
  const pds_cu_launch l = pds_cu_shape_norm(&p);
  return launch(r, &l, &p);
}

static pds_status run_gate(const run *r) {
  const pds_gate *gate = &r->layer->gate;
  const uint32_t stride = pds_ceil(gate->experts, PDS_LANES);
  pds_cu_gemm g;
  gemm_of(r, &g, &gate->weight, pds_buf(r->ctx, PDS_BUF_XN), hidden_stride(r),
          pds_buf(r->ctx, PDS_BUF_GATE), stride, PDS_OUT_F32);
  PDS_RETURN_IF_ERROR(run_gemm(r, &g));
  pds_cu_route p = {.head = head_of(sizeof p, &r->ctx->rows),
                    .scores = pds_buf(r->ctx, PDS_BUF_GATE),
                    .bias = bias_of(r, &gate->bias),
                    .id = pds_buf(r->ctx, PDS_BUF_ROUTE_ID),
                    .weight = pds_buf(r->ctx, PDS_BUF_ROUTE_W),
                    .rows = r->ctx->rows,
                    .stride = stride,
                    .experts = gate->experts,
                    .top_k = gate->top_k,
                    .groups = gate->groups,
                    .top_groups = gate->top_groups,
                    .score = gate->score,
                    .group_score = gate->group_score,
                    .normalise = gate->normalise,
                    .mask_zero = gate->mask_zero,
                    .norm_eps = gate->norm_eps,
                    .scaling = gate->scaling};
  if (pds_gpu_tells_host(r->step) && !r->step->host->n_routes) {
    p.host_id = pds_buf(r->step->host, PDS_BUF_ROUTE_ID);
    p.host_weight = pds_buf(r->step->host, PDS_BUF_ROUTE_W);
  }
  const pds_cu_launch l = pds_cu_shape_route(&p);
  return launch(r, &l, &p);
}

static pds_status run_combine(const run *r, bool shared) {
  pds_cu_combine p = {.head = head_of(sizeof p, &r->ctx->rows),
                      .hid = pds_buf(r->ctx, PDS_BUF_HID),
                      .out = pds_buf(r->ctx, PDS_BUF_EXPERT_OUT),
                      .cpu_out = r->ctx->cpu_out,
                      .cpu_bf16 = r->step->host->rounds_out,
                      .weight = pds_buf(r->ctx, PDS_BUF_ROUTE_W),
                      .shared = shared ? pds_buf(r->ctx, PDS_BUF_SHARED_OUT) : NULL,
                      .id = pds_buf(r->ctx, PDS_BUF_ROUTE_ID),
                      .rows = r->ctx->rows,
                      .top_k = r->layer->gate.top_k,
                      .n = r->plan->hidden,
                      .stride = hidden_stride(r)};
  for (uint32_t e = 0; e < r->layer->gate.experts; e++)
    if (r->ctx->on_gpu[e]) p.on_gpu[e / 32] |= 1u << e % 32;
  const pds_cu_launch l = pds_cu_shape_combine(&p);
  return launch(r, &l, &p);
}

static pds_status run_lm_head(const run *r) {
  pds_cu_gemm g;
  gemm_of(r, &g, &r->plan->lm_head, pds_buf(r->ctx, PDS_BUF_XACT), hidden_stride(r),
          pds_buf(r->ctx, PDS_BUF_LOGITS), r->plan->vocab, PDS_OUT_F32);
  g.rows = r->ctx->n_logits;
  return run_gemm(r, &g);
}

static run run_of(const pds_gpu_step *step, uint32_t layer, const char *what) {
  return (run){.step = step,
               .ctx = &step->device,
               .plan = step->gpu->plan,
               .layer = &step->gpu->plan->layers[layer],
               .what = what};
}

uint64_t pds_gpu_shape_key(const pds_gpu_step *step, uint32_t layer) {
  const run r = run_of(step, layer, "attention");
  const uint64_t normed = step->host->predicts || step->host->learn;
  const uint64_t given = step->host->n_routes > 0;
  pds_cu_attention p;
  describe_cut(&r, &p);
  return (uint64_t)p.split_tokens << 32 | (uint64_t)p.splits << 16 | p.rows << 2 | given << 1 |
         normed;
}

pds_status pds_gpu_run(pds_gpu_step *step, pds_kernel op, uint32_t layer, uint32_t arg,
                       const pds_gpu_hole *holes, uint32_t n_holes) {
  const run r = run_of(step, layer, pds_kernel_names[op]);
  switch (op) {
  case PDS_KERNEL_ROPE: return run_ropes(&r);
  case PDS_KERNEL_NORM: return run_norm(&r, (pds_norm_site)arg);
  case PDS_KERNEL_ATTENTION: return run_attention(&r);
  case PDS_KERNEL_MLP: return run_mlp(&r, &r.layer->dense, PDS_BUF_MID, PDS_BUF_HID, PDS_OUT_ADD);
  case PDS_KERNEL_GATE: return run_gate(&r);
  case PDS_KERNEL_EXPERTS: return run_experts(&r, holes, n_holes);
  case PDS_KERNEL_SHARED:
    return run_mlp(&r, &r.layer->shared, PDS_BUF_MID_SHARED, PDS_BUF_SHARED_OUT, PDS_OUT_F32);
  case PDS_KERNEL_COMBINE: return run_combine(&r, arg != 0);
  default: return run_lm_head(&r);
  }
}
