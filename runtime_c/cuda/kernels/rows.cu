/* rows.cu: operators that work row by row: rope table, norm, routing, combine. What each computes is said
 * in ops_attention.c, ops_dense.c and ops_moe.c. */
#include "row_math.h"

PDS_KERNEL(pds_cu_rope_rows, pds_cu_rope, 256) {
  const uint32_t half = p->dim / 2, all = p->rows * half;
  for (uint32_t i = PDS_BLOCK_X * PDS_THREADS + PDS_TID; i < all; i += PDS_GRID_X * PDS_THREADS) {
    const uint32_t row = i / half, pair = i % half;
    float *table = p->table + (uint64_t)row * p->dim;
    const float angle = (float)p->position[row] * p->inv_freq[pair];
    table[pair] = pds_cos(angle) * p->scale;
    table[half + pair] = pds_sin(angle) * p->scale;
  }
}

/* A block a row. */
PDS_KERNEL(pds_cu_norm_rows, pds_cu_norm, 256) {
  const uint32_t row = PDS_BLOCK_X, n = p->n, step = PDS_THREADS * 4;
  const float *x = p->x + (uint64_t)(p->index ? p->index[row] : row) * p->stride;
  const uint64_t at = (uint64_t)row * p->stride;
  float sum = 0;
  for (uint32_t i = PDS_TID * 4; i < n; i += step) {
    const pds_f4 v = pds_load_some(x + i, n - i);
    PDS_UNROLL
    for (uint32_t j = 0; j < 4; j++) sum = fmaf(v.x[j], v.x[j], sum);
  }
  sum = pds_block_sum(sum, (float *)PDS_SHARED);
  const float r = pds_rsqrt(sum / (float)n + p->eps);
  for (uint32_t i = PDS_TID * 4; i < p->stride; i += step) {
    pds_f4 v, w;
    if (i < n) {
      v = pds_load_some(x + i, n - i);
      w = pds_load_some(p->weight + i, n - i);
      PDS_UNROLL
      for (uint32_t j = 0; j < 4; j++) v.x[j] = i + j < n ? v.x[j] * r * w.x[j] : 0;
    } else {
      v.x[0] = v.x[1] = v.x[2] = v.x[3] = 0;
    }
    pds_store_f4(p->xn + at + i, v);
    pds_store_act2(p->xact, at + i, v.x[0], v.x[1], p->act_dtype);
    pds_store_act2(p->xact, at + i + 2, v.x[2], v.x[3], p->act_dtype);
    if (p->host_xn) pds_store_f4(p->host_xn + at + i, v);
    if (p->host_xact) {
      pds_store_act2(p->host_xact, at + i, v.x[0], v.x[1], p->act_dtype);
      pds_store_act2(p->host_xact, at + i + 2, v.x[2], v.x[3], p->act_dtype);
    }
  }
}

/* ---- routing: a warp a row ---- */

enum { ROUTE_USED = 0 }; /* below the key of every float */

/* Unsigned keys in torch's order of floats: NaN is the greatest, -0 equals 0. */
PDS_FN uint32_t route_key(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = pds_bits(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* Index of the greatest key, the lowest of equals; the same for all lanes. */
PDS_FN uint32_t route_best(const uint32_t *key, uint32_t n) {
  uint32_t best = ROUTE_USED, at = n;
  for (uint32_t i = PDS_LANE; i < n; i += 32) {
    if (key[i] > best) {
      best = key[i];
      at = i;
    }
  }
  PDS_UNROLL
  for (uint32_t m = 16; m; m /= 2) {
    const uint32_t other = pds_shfl_xor_u32(best, m), where = pds_shfl_xor_u32(at, m);
    if (other > best || (other == best && where < at)) {
      best = other;
      at = where;
    }
  }
  return at;
}

PDS_FN int route_above(float a, float b) {
  return a > b || (a == a) < (b == b);
}

/* A group's greatest choice score, or the sum of its two greatest (group_score 2). */
PDS_FN float route_group(const float *choice, uint32_t n, uint32_t kind) {
  float first = -PDS_INFINITY, second = -PDS_INFINITY;
  for (uint32_t i = 0; i < n; i++) {
    const float x = choice[i];
    if (route_above(x, first)) {
      second = first;
      first = x;
    } else if (route_above(x, second)) {
      second = x;
    }
  }
  return kind == 2 ? first + second : first;
}

/* Experts outside the best groups: -Inf, or 0 for choice and score both. */
PDS_FN void route_mask(const pds_cu_route *p, float *scores, float *choice, uint32_t *key) {
  const uint32_t size = p->experts / p->groups;
  for (uint32_t g = PDS_LANE; g < p->groups; g += 32)
    key[g] = route_key(route_group(choice + g * size, size, p->group_score));
  pds_warp_sync();
  for (uint32_t i = 0; i < p->top_groups; i++) {
    const uint32_t g = route_best(key, p->groups);
    pds_warp_sync();
    if (PDS_LANE == 0) key[g] = ROUTE_USED;
    pds_warp_sync();
  }
  for (uint32_t e = PDS_LANE; e < p->groups * size; e += 32) {
    if (key[e / size] == ROUTE_USED) continue;
    choice[e] = p->mask_zero ? 0 : -PDS_INFINITY;
    if (p->mask_zero) scores[e] = 0;
  }
  pds_warp_sync();
}

PDS_FN void route_scores(const pds_cu_route *p, float *scores) {
  const uint32_t n = p->experts;
  if (p->score == 1) { /* sigmoid */
    for (uint32_t e = PDS_LANE; e < n; e += 32) scores[e] = 1 / (1 + pds_exp(-scores[e]));
    return;
  }
  float top = -PDS_INFINITY, sum = 0;
  for (uint32_t e = PDS_LANE; e < n; e += 32) top = fmaxf(top, scores[e]);
  top = pds_warp_max(top);
  for (uint32_t e = PDS_LANE; e < n; e += 32) {
    scores[e] = pds_exp(scores[e] - top);
    sum += scores[e];
  }
  sum = pds_warp_sum(sum);
  for (uint32_t e = PDS_LANE; e < n; e += 32) scores[e] /= sum;
}

PDS_KERNEL(pds_cu_route_rows, pds_cu_route, 256) {
  const uint32_t row = PDS_BLOCK_X * (PDS_THREADS / 32) + PDS_WARP, n = p->experts;
  if (row >= p->rows) return;
  /* a warp's own: scores, choice scores, keys */
  float *scores = (float *)PDS_SHARED + (uint64_t)PDS_WARP * 3 * n, *choice = scores + n;
  uint32_t *key = (uint32_t *)(choice + n);
  float *from = p->scores + (uint64_t)row * p->stride;

  for (uint32_t e = PDS_LANE; e < n; e += 32) scores[e] = from[e];
  route_scores(p, scores);
  for (uint32_t e = PDS_LANE; e < n; e += 32)
    choice[e] = p->bias ? scores[e] + p->bias[e] : scores[e];
  pds_warp_sync();
  if (p->group_score) route_mask(p, scores, choice, key);
  for (uint32_t e = PDS_LANE; e < n; e += 32) {
    key[e] = route_key(choice[e]);
    from[e] = scores[e];
  }
  pds_warp_sync();

  int32_t *id = p->id + (uint64_t)row * p->top_k;
  float *weight = p->weight + (uint64_t)row * p->top_k, sum = 0;
  for (uint32_t r = 0; r < p->top_k; r++) {
    const uint32_t e = route_best(key, n);
    pds_warp_sync();
    sum += scores[e];
    if (PDS_LANE == 0) {
      key[e] = ROUTE_USED;
      choice[r] = scores[e]; /* no more needed as choice: the weights, in order */
      id[r] = (int32_t)e;
      if (p->host_id) p->host_id[(uint64_t)row * p->top_k + r] = (int32_t)e;
    }
    pds_warp_sync();
  }
  for (uint32_t r = PDS_LANE; r < p->top_k; r += 32) {
    float w = choice[r];
    if (p->normalise) w /= sum + p->norm_eps;
    weight[r] = w * p->scaling;
    if (p->host_weight) p->host_weight[(uint64_t)row * p->top_k + r] = w * p->scaling;
  }
}

/* ---- combine ---- */

enum { COMBINE_RANKS = 8 }; /* loads of so many outputs are under way together */

/* Where a rank's output is, and what it weighs. */
typedef struct combine_rank {
  const uint8_t *from;
  float weight;
  uint32_t bf16;
} combine_rank;

PDS_FN pds_f4 combine_load(const combine_rank *rank, uint32_t i) {
  if (!rank->bf16) return pds_load_f4((const float *)rank->from + i);
  const pds_u2 v = pds_load8(rank->from + i * 2);
  pds_f4 r;
  r.x[0] = pds_widen(v.x & 0xffff);
  r.x[1] = pds_widen(v.x >> 16);
  r.x[2] = pds_widen(v.y & 0xffff);
  r.x[3] = pds_widen(v.y >> 16);
  return r;
}

/* Grid: parts of a row, rows. */
PDS_KERNEL(pds_cu_combine_rows, pds_cu_combine, 256) {
  const uint32_t row = PDS_BLOCK_Y, n = p->n, k = p->top_k;
  combine_rank *rank = (combine_rank *)PDS_SHARED;
  const uint64_t first = (uint64_t)row * k;
  for (uint32_t r = PDS_TID; r < k; r += PDS_THREADS) {
    const uint32_t id = (uint32_t)p->id[first + r];
    const uint32_t here = p->on_gpu[id / 32] >> id % 32 & 1;
    const uint8_t *out = here ? (const uint8_t *)p->out : (const uint8_t *)p->cpu_out;
    rank[r].bf16 = !here && p->cpu_bf16;
    rank[r].from = out + (first + r) * p->stride * (rank[r].bf16 ? 2 : 4);
    rank[r].weight = p->weight[first + r];
  }
  pds_sync();
  const uint32_t i = (PDS_BLOCK_X * PDS_THREADS + PDS_TID) * 4;
  if (i >= n) return;
  float *hid = p->hid + (uint64_t)row * p->stride + i;
  pds_f4 sum = pds_load_f4(hid), add[COMBINE_RANKS];
  for (uint32_t r0 = 0; r0 < k; r0 += COMBINE_RANKS) {
    PDS_UNROLL
    for (uint32_t r = 0; r < COMBINE_RANKS; r++) {
      if (r0 + r < k) add[r] = combine_load(&rank[r0 + r], i);
    }
    PDS_UNROLL
    for (uint32_t r = 0; r < COMBINE_RANKS; r++) {
      if (r0 + r >= k) continue;
      PDS_UNROLL
      for (uint32_t j = 0; j < 4; j++) sum.x[j] += pds_product(rank[r0 + r].weight, add[r].x[j]);
    }
  }
  if (p->shared) {
    add[0] = pds_load_f4(p->shared + (uint64_t)row * p->stride + i);
    PDS_UNROLL
    for (uint32_t j = 0; j < 4; j++) sum.x[j] += add[0].x[j];
  }
  if (i + 4 <= n) {
    pds_store_f4(hid, sum);
  } else { /* the padding stays as it is */
    PDS_UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      if (i + j < n) hid[j] = sum.x[j];
    }
  }
}
