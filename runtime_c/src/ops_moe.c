/* ops_moe.c: the routed half of a MoE layer: gate, recompile (CPU-only policy), experts,
 * combine. */
#include <math.h>
#include <string.h>

#include "bits.h"
#include "ops.h"
#include "pds_isa.h"

typedef struct layer_job {
  pds_step_ctx *ctx;
  const pds_layer *layer;
  uint32_t index; /* of the layer */
  int shared;
} layer_job;

uint32_t pds_best_unused(const float *x, const uint8_t *used, uint32_t n) {
  uint32_t best = n;
  for (uint32_t i = 0; i < n; i++) {
    if (!used[i] && (best == n || pds_above(x[i], x[best]))) best = i;
  }
  return best;
}

/* Score of a group of experts: its greatest choice score, or the sum of its two greatest. */
static float group_score(const pds_gate *gate, const float *choice, uint32_t n) {
  float first = -INFINITY, second = -INFINITY;
  for (uint32_t i = 0; i < n; i++) {
    if (pds_above(choice[i], first)) {
      second = first;
      first = choice[i];
    } else if (pds_above(choice[i], second)) {
      second = choice[i];
    }
  }
  return gate->group_score == PDS_GROUP_TOP2 ? first + second : first;
}

/* Group-limited routing: experts outside the best top_groups groups cannot be chosen (-Inf), or
 * score 0. */
static void mask_groups(const pds_gate *gate, float *scores, float *choice, float *groups,
                        uint8_t *used) {
  const uint32_t size = gate->experts / gate->groups;
  for (uint32_t g = 0; g < gate->groups; g++)
    groups[g] = group_score(gate, choice + g * size, size);
  memset(used, 0, gate->groups);
  for (uint32_t i = 0; i < gate->top_groups; i++)
    used[pds_best_unused(groups, used, gate->groups)] = 1;
  for (uint32_t g = 0; g < gate->groups; g++) {
    if (used[g]) continue;
    for (uint32_t e = g * size; e < (g + 1) * size; e++) {
      choice[e] = gate->mask_zero ? 0 : -INFINITY;
      if (gate->mask_zero) scores[e] = 0;
    }
  }
}

void pds_route(pds_step_ctx *ctx, const pds_gate *gate, uint32_t worker, float *scores, int32_t *id,
               float *weight) {
  const uint32_t n = gate->experts, k = gate->top_k;
  pds_attention_scratch *scratch = pds_worker_scratch(ctx, worker);
  float *choice = scratch->scores[0], *groups = scratch->probs[0];
  uint8_t *used = (uint8_t *)(scratch->probs[PDS_TILE / 2]);

  if (gate->score == PDS_SIGMOID) {
    ctx->kernels->sigmoid(scores, n);
  } else {
    ctx->kernels->softmax(scores, n);
  }
  const float *bias = gate->bias.dtype == PDS_NONE ? NULL : pds_weight(ctx, &gate->bias, 0);
  for (uint32_t e = 0; e < n; e++) choice[e] = bias ? scores[e] + bias[e] : scores[e];
  if (gate->group_score != PDS_GROUP_NONE) mask_groups(gate, scores, choice, groups, used);

  float sum = 0;
  memset(used, 0, n);
  for (uint32_t r = 0; r < k; r++) {
    const uint32_t e = pds_best_unused(choice, used, n);
    used[e] = 1;
    id[r] = (int32_t)e;
    weight[r] = scores[e]; /* the bias decides the choice only */
    sum += weight[r];
  }
  for (uint32_t r = 0; r < k; r++) {
    if (gate->normalise) weight[r] /= sum + gate->norm_eps;
    weight[r] *= gate->scaling;
  }
}

/* What the caller has set, in place of what the gate would choose. */
static void take_route(pds_step_ctx *ctx, uint32_t layer, uint32_t row) {
  const uint32_t k = ctx->plan->layers[layer].gate.top_k;
  const size_t at = (uint32_t)ctx->position[row] % ctx->n_routes;
  const uint16_t *said = ctx->routes + (at * ctx->plan->n_layers + layer) * ctx->routes_k;
  int32_t *id = (int32_t *)pds_buf(ctx, PDS_BUF_ROUTE_ID) + (size_t)row * k;
  float *weight = (float *)pds_buf(ctx, PDS_BUF_ROUTE_W) + (size_t)row * k;
  for (uint32_t r = 0; r < k; r++) {
    id[r] = said[r];
    weight[r] = 1 / (float)k;
  }
}

void pds_op_take_routes(pds_step_ctx *ctx, uint32_t layer) {
  for (uint32_t row = 0; row < ctx->rows; row++) take_route(ctx, layer, row);
}

void pds_route_row(pds_step_ctx *ctx, uint32_t layer, uint32_t worker, uint32_t row) {
  const pds_gate *gate = &ctx->plan->layers[layer].gate;
  const uint32_t k = gate->top_k;
  pds_route(ctx, gate, worker,
            (float *)pds_buf(ctx, PDS_BUF_GATE) + (size_t)row * pds_ceil(gate->experts, PDS_LANES),
            (int32_t *)pds_buf(ctx, PDS_BUF_ROUTE_ID) + (size_t)row * k,
            (float *)pds_buf(ctx, PDS_BUF_ROUTE_W) + (size_t)row * k);
  if (ctx->n_routes) take_route(ctx, layer, row);
}

static void route_item(void *arg, uint32_t row, uint32_t worker) {
  const layer_job *job = arg;
  pds_route_row(job->ctx, job->index, worker, row);
}

pds_gemm_job pds_gate_of(pds_step_ctx *ctx, const pds_gate *gate, float *scores) {
  return pds_gemm_of(ctx, &gate->weight, pds_buf(ctx, PDS_BUF_XN), pds_ceil(ctx->plan->hidden, 32),
                     scores, pds_ceil(gate->experts, PDS_LANES), ctx->rows, PDS_OUT_F32);
}

void pds_op_gate(pds_step_ctx *ctx, uint32_t layer) {
  layer_job job = {.ctx = ctx, .layer = &ctx->plan->layers[layer], .index = layer};
  pds_gemm_job gemm = pds_gate_of(ctx, &job.layer->gate, pds_buf(ctx, PDS_BUF_GATE));
  pds_run_gemms(ctx, &gemm);
  pds_run_rows(ctx, route_item, &job, ctx->rows, PDS_FEW_ROWS);
}

/* Counting sort of all (row, rank) by expert, stable, by several workers where there are many: each counts
 * a part of the routes, and then knows where its part of each expert's rows begins. */
enum { SORT_PARTS = 16, SORT_EACH = 2048 };

typedef struct sort_job {
  const int32_t *id;
  int32_t *sorted;
  uint32_t n, parts;
  uint32_t *
      at[SORT_PARTS]; /* [experts] in some worker's scratch: counts; then where the next one goes */
} sort_job;

_Static_assert(sizeof(pds_attention_scratch) >= PDS_MAX_EXPERTS * sizeof(uint32_t), "sort_job.at");

static uint32_t part_begin(const sort_job *job, uint32_t part) {
  return (uint32_t)((uint64_t)job->n * part / job->parts);
}

static void count_part(void *arg, uint32_t part, uint32_t worker) {
  (void)worker;
  sort_job *job = arg;
  const int32_t *id = job->id;
  uint32_t *at = job->at[part];
  const uint32_t end = part_begin(job, part + 1);
  for (uint32_t i = part_begin(job, part); i < end; i++) at[id[i]]++;
}

static void place_part(void *arg, uint32_t part, uint32_t worker) {
  (void)worker;
  sort_job *job = arg;
  const int32_t *id = job->id;
  int32_t *sorted = job->sorted;
  uint32_t *at = job->at[part];
  const uint32_t end = part_begin(job, part + 1);
  for (uint32_t i = part_begin(job, part); i < end; i++) {
    const uint32_t to = at[id[i]]++;
    __builtin_prefetch(sorted + to + 64 / sizeof *sorted, 1); /* the expert's next cache line */
    sorted[to] = (int32_t)i;
  }
}

static void sort_many(pds_step_ctx *ctx, sort_job *job, uint32_t experts) {
  const uint32_t threads = pds_pool_threads(ctx->pool);
  job->parts = job->n / SORT_EACH;
  if (job->parts > SORT_PARTS) job->parts = SORT_PARTS;
  if (job->parts > threads) job->parts = threads;
  if (!job->parts) job->parts = 1;
  for (uint32_t p = 0; p < job->parts; p++) {
    job->at[p] = pds_worker_scratch(ctx, p);
    memset(job->at[p], 0, experts * sizeof *job->at[p]);
  }
  pds_pool_run(ctx->pool, count_part, job, job->parts);
  uint32_t first = 0;
  for (uint32_t e = 0; e < experts; e++) {
    const uint32_t begin = first;
    for (uint32_t p = 0; p < job->parts; p++) {
      const uint32_t count = job->at[p][e];
      job->at[p][e] = first;
      first += count;
    }
    if (first > begin)
      ctx->cpu_holes[ctx->n_cpu_holes++] =
          (pds_hole){.expert = e, .first = begin, .rows = first - begin};
  }
  pds_pool_run(ctx->pool, place_part, job, job->parts);
}

/* Few routes: no look at the experts that nobody chose. */
static void sort_few(pds_step_ctx *ctx, const sort_job *job, uint32_t experts) {
  uint64_t chosen[PDS_MAX_EXPERTS / 64];
  uint32_t at[PDS_MAX_EXPERTS], first = 0;
  memset(chosen, 0, pds_words(experts) * sizeof *chosen);
  for (uint32_t i = 0; i < job->n; i++) {
    const uint32_t e = (uint32_t)job->id[i];
    at[e] = pds_has(chosen, e) ? at[e] + 1 : 1;
    pds_put(chosen, e);
  }
  for (uint32_t w = 0; w < pds_words(experts); w++)
    for (uint64_t left = chosen[w]; left; left &= left - 1) {
      const uint32_t e = 64 * w + pds_lowest(left), rows = at[e];
      ctx->cpu_holes[ctx->n_cpu_holes++] = (pds_hole){.expert = e, .first = first, .rows = rows};
      at[e] = first;
      first += rows;
    }
  for (uint32_t i = 0; i < job->n; i++) job->sorted[at[job->id[i]]++] = (int32_t)i;
}

void pds_op_recompile(pds_step_ctx *ctx, uint32_t layer) {
  enum { FEW = 256 };
  const pds_gate *gate = &ctx->plan->layers[layer].gate;
  sort_job job = {.id = pds_buf(ctx, PDS_BUF_ROUTE_ID),
                  .sorted = pds_buf(ctx, PDS_BUF_EXPERT_ROWS),
                  .n = ctx->rows * gate->top_k};
  ctx->n_cpu_holes = 0;
  if (job.n <= FEW)
    sort_few(ctx, &job, gate->experts);
  else
    sort_many(ctx, &job, gate->experts);
}

/* Points g->w, that of expert 0, to hole i's. An expert is one blob: gate_up, then down. */
static void select_expert(const pds_gemm_job *job, uint32_t i, pds_gemm *g) {
  const pds_step_ctx *ctx = job->user;
  if (ctx->blobs)
    g->w = ctx->blobs[i] + (job->w->offset - job->first);
  else
    g->w = (const unsigned char *)g->w + ((const pds_hole *)job->arg + i)->expert * job->w->stride;
}

/* Matrix i of either stage is that of hole i. MID rows are in the order of EXPERT_ROWS. */
static void select_gate_up(const pds_gemm_job *job, uint32_t i, pds_gemm *g) {
  const pds_hole *hole = (const pds_hole *)job->arg + i;
  select_expert(job, i, g);
  g->x_index = (const int32_t *)job->arg2 + hole->first;
  g->y = (unsigned char *)g->y + hole->first * job->y_step;
  g->rows = hole->rows;
}

static void select_down(const pds_gemm_job *job, uint32_t i, pds_gemm *g) {
  const pds_hole *hole = (const pds_hole *)job->arg + i;
  select_expert(job, i, g);
  g->x = (const unsigned char *)g->x + hole->first * job->x_step;
  g->y_index = (const int32_t *)job->arg2 + hole->first;
  g->rows = hole->rows;
}

static pds_mlp_job routed_of(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes, uint32_t n_holes) {
  const pds_layer *l = &ctx->plan->layers[layer];
  const uint32_t stride = pds_ceil(ctx->plan->hidden, 32),
                 mid_stride = pds_ceil(l->experts.inter, 32);
  const size_t mid_bytes = (size_t)mid_stride * pds_act_bytes(ctx->plan);
  const void *rows = pds_buf(ctx, PDS_BUF_EXPERT_ROWS);
  void *mid = pds_buf(ctx, PDS_BUF_MID);
  uint32_t all = 0;
  for (uint32_t i = 0; i < n_holes; i++) all += holes[i].rows;
  pds_mlp_job job = {
      .up = pds_swiglu_of(ctx, &l->experts, pds_buf(ctx, PDS_BUF_XACT), stride, mid, mid_stride, 0),
      .down = pds_gemm_of(ctx, &l->experts.down, mid, mid_stride, pds_buf(ctx, PDS_BUF_EXPERT_OUT),
                          stride, 0, ctx->rounds_out ? PDS_OUT_ACT : PDS_OUT_F32),
      .left = &holes[0].left,
      .left_step = sizeof *holes};
  job.up.gemm.x_div = l->gate.top_k;
  job.up.select = select_gate_up;
  job.up.y_step = mid_bytes;
  job.up.gathers = 1;
  job.up.x_rows = ctx->rows;
  job.down.gemm.stream_y =
      (size_t)all * stride * sizeof(float) > (size_t)ctx->l2_bytes * pds_pool_threads(ctx->pool);
  job.down.select = select_down;
  job.down.x_step = mid_bytes;
  job.down.x_rows = holes[n_holes - 1].first + holes[n_holes - 1].rows;
  pds_gemm_job *both[] = {&job.up, &job.down};
  for (int i = 0; i < 2; i++) {
    both[i]->count = n_holes;
    both[i]->rows_each = all / n_holes;
    both[i]->arg = holes;
    both[i]->arg2 = rows;
    both[i]->user = ctx;
    both[i]->first = l->experts.gate_up.offset;
  }
  return job;
}

void pds_op_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes, uint32_t n_holes) {
  if (!n_holes) return;
  pds_mlp_job job = routed_of(ctx, layer, holes, n_holes);
  pds_run_mlps(ctx, &job, 1);
}

void pds_op_shared_and_expert(pds_step_ctx *ctx, uint32_t layer, pds_hole *holes,
                              uint32_t n_holes) {
  if (!n_holes) {
    pds_op_shared_expert(ctx, layer);
    return;
  }
  _Atomic uint32_t left;
  pds_mlp_job jobs[] = {pds_shared_of(ctx, layer), routed_of(ctx, layer, holes, n_holes)};
  jobs[0].left = &left;
  pds_run_mlps(ctx, jobs, 2);
}

static void combine_row(void *arg, uint32_t row, uint32_t worker) {
  (void)worker;
  const layer_job *job = arg;
  pds_step_ctx *ctx = job->ctx;
  const uint32_t n = ctx->plan->hidden, stride = pds_ceil(n, 32), k = job->layer->gate.top_k;
  float *hid = (float *)pds_buf(ctx, PDS_BUF_HID) + (size_t)row * stride;
  const size_t at = (size_t)row * k * stride;
  const float *out = (const float *)pds_buf(ctx, PDS_BUF_EXPERT_OUT) + at;
  const float *weight = (const float *)pds_buf(ctx, PDS_BUF_ROUTE_W) + (size_t)row * k;
  const int32_t *id = (const int32_t *)pds_buf(ctx, PDS_BUF_ROUTE_ID) + (size_t)row * k;
  for (uint32_t r = 0; r < k; r++) {
    const float *from = ctx->on_gpu && !ctx->on_gpu[id[r]] ? ctx->cpu_out + at : out;
    ctx->kernels->axpy(weight[r], from + (size_t)r * stride, hid, n);
  }
  if (job->shared) {
    ctx->kernels->axpy(1, (const float *)pds_buf(ctx, PDS_BUF_SHARED_OUT) + (size_t)row * stride,
                       hid, n);
  }
}

void pds_op_combine(pds_step_ctx *ctx, uint32_t layer, int shared) {
  layer_job job = {.ctx = ctx, .layer = &ctx->plan->layers[layer], .shared = shared};
  pds_run_rows(ctx, combine_row, &job, ctx->rows, PDS_FEW_ROWS);
}
