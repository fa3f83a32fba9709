/* attention_rows.h: from projections to queries and cache (gqa_row, mla_q_a_row and mla_row of
 * ops_attention.c). A warp a head; the head's values stand in its part of shared memory. */
#ifndef PDS_CUDA_ATTENTION_ROWS_H
#define PDS_CUDA_ATTENTION_ROWS_H

#include "attention_parts.h"

/* No later row of this step belongs to the same sequence. */
PDS_FN int is_last_row(const pds_cu_attention *p, uint32_t row) {
  const int32_t seq = p->seq[row];
  for (uint32_t r0 = row + 1; r0 < p->rows; r0 += 32) {
    const uint32_t r = r0 + PDS_LANE;
    uint32_t found = r < p->rows && p->seq[r] == seq;
    PDS_UNROLL
    for (uint32_t m = 16; m; m /= 2) found |= pds_shfl_xor_u32(found, m);
    if (found) return 0;
  }
  return 1;
}

/* x[0..n) = RMSNorm of it, by the warp. */
PDS_FN void norm_head(float *x, const float *weight, uint32_t n, float eps) {
  float sum = 0;
  for (uint32_t i = PDS_LANE; i < n; i += 32) sum = fmaf(x[i], x[i], sum);
  const float r = pds_rsqrt(pds_warp_sum(sum) / (float)n + eps);
  for (uint32_t i = PDS_LANE; i < n; i += 32) x[i] = x[i] * r * weight[i];
}

PDS_FN void clamp_head(float *x, uint32_t n, float limit) {
  for (uint32_t i = PDS_LANE; i < n; i += 32) {
    if (x[i] > limit) x[i] = limit;
    if (x[i] < -limit) x[i] = -limit;
  }
}

/* Rotates the leading rope_dim values: pairs (i, i + half), or (2i, 2i + 1). */
PDS_FN void rotate_head(const pds_cu_attention *p, uint32_t row, float *x) {
  const uint32_t half = p->rope_dim / 2, step = p->interleaved ? 2 : 1,
                 apart = p->interleaved ? 1 : half;
  const float *table = p->rope + (uint64_t)row * p->rope_dim;
  for (uint32_t i = PDS_LANE; i < half; i += 32) {
    const float c = table[i], s = table[half + i], a = x[i * step], b = x[i * step + apart];
    x[i * step] = a * c - b * s;
    x[i * step + apart] = b * c + a * s;
  }
}

/* Elements [at, at + pad) of y: act(x), zero from n on. `at` and pad are even. */
PDS_FN void store_padded(const pds_cu_attention *p, const float *x, void *y, uint64_t at,
                         uint32_t n, uint32_t pad) {
  for (uint32_t i = PDS_LANE * 2; i < pad; i += 64)
    pds_store_act2(y, at + i, i < n ? x[i] : 0, i + 1 < n ? x[i + 1] : 0, p->act_dtype);
}

/* The key of the row's token: one 32-bit word of each row of its panel. */
PDS_FN void append_key(const pds_cu_attention *p, uint32_t row, uint32_t h, const float *x) {
  const uint32_t t = (uint32_t)p->position[row], lane = t % PDS_CU_KEYS, n = p->key_dims;
  uint32_t *word = (uint32_t *)(pds_kv_at(p, p->seq[row], t / PDS_CU_KEYS, h) +
                                lane / PDS_CU_LANES * p->key_panel_bytes) +
                   lane % PDS_CU_LANES;
  if (p->act_dtype == PDS_CU_BF16) {
    for (uint32_t i = PDS_LANE; i < (n + 1) / 2; i += 32)
      word[(uint64_t)i * PDS_CU_LANES] = pds_pack_bf16(x[2 * i], 2 * i + 1 < n ? x[2 * i + 1] : 0);
  } else {
    for (uint32_t i = PDS_LANE; i < n; i += 32) word[(uint64_t)i * PDS_CU_LANES] = pds_bits(x[i]);
  }
}

/* The value of the row's token. bf16: two tokens share a word, and its other half is made zero if no row
 * of this step writes it. */
PDS_FN void append_value(const pds_cu_attention *p, uint32_t row, uint32_t h, const float *x) {
  const uint32_t t = (uint32_t)p->position[row], k = t % PDS_CU_KEYS, n = p->v_dim;
  uint8_t *values = pds_kv_at(p, p->seq[row], t / PDS_CU_KEYS, h) + p->key_bytes;
  if (p->act_dtype != PDS_CU_BF16) {
    for (uint32_t d = PDS_LANE; d < n; d += 32)
      ((float *)values)[(d / PDS_CU_LANES * PDS_CU_KEYS + k) * PDS_CU_LANES + d % PDS_CU_LANES] =
          x[d];
    return;
  }
  const int clear = k % 2 == 0 && is_last_row(p, row);
  for (uint32_t d = PDS_LANE; d < n; d += 32) {
    const uint32_t word =
        (d / PDS_CU_LANES * (PDS_CU_KEYS / 2) + k / 2) * PDS_CU_LANES + d % PDS_CU_LANES;
    uint16_t *at = (uint16_t *)values + (uint64_t)word * 2 + k % 2;
    *at = pds_bf16(x[d]);
    if (clear) at[1] = 0;
  }
}

/* Heads of the row in order: queries, keys, values. room: qk_dim or v_dim floats; full: 1 / RMS of all
 * queries and of all keys, for a norm over all heads at once. */
PDS_FN void gqa_head(const pds_cu_attention *p, uint32_t row, uint32_t head, float *room,
                     const float *full) {
  const uint32_t heads = p->heads, keys = p->kv_heads, dim = p->qk_dim;
  const float *x = p->qkv + (uint64_t)row * p->qkv_stride;
  if (head >= heads + keys) {
    const uint32_t h = head - heads - keys;
    x += (uint64_t)(heads + keys) * dim + h * p->v_dim;
    for (uint32_t i = PDS_LANE; i < p->v_dim; i += 32) room[i] = x[i];
    if (p->clip > 0) clamp_head(room, p->v_dim, p->clip);
    append_value(p, row, h, room); /* a lane reads what it wrote */
    return;
  }
  const int query = head < heads;
  const uint32_t h = query ? head : head - heads;
  const float *weight = query ? p->q_norm : p->k_norm;
  x += (uint64_t)head * dim;
  if (p->qk_norm == 2) {
    const float r = query ? full[0] : full[1];
    for (uint32_t i = PDS_LANE; i < dim; i += 32) room[i] = x[i] * r * weight[h * dim + i];
  } else {
    for (uint32_t i = PDS_LANE; i < dim; i += 32) room[i] = x[i];
    if (p->qk_norm == 1) norm_head(room, weight, dim, p->norm_eps);
  }
  if (p->clip > 0) clamp_head(room, dim, p->clip);
  pds_warp_sync();
  rotate_head(p, row, room);
  pds_warp_sync();
  if (query)
    store_padded(p, room, p->q, ((uint64_t)row * heads + h) * p->q_stride, dim, p->q_stride);
  else
    append_key(p, row, h, room);
}

/* Query heads, then the latent. */
PDS_FN void mla_head(const pds_cu_attention *p, uint32_t row, uint32_t head, float *room) {
  const float *in = p->qkv + (uint64_t)row * p->qkv_stride;
  if (head == p->heads) {
    const float *latent = in + (p->q_lora ? p->q_lora : p->heads * p->qk_dim);
    for (uint32_t i = PDS_LANE; i < p->key_dims; i += 32) room[i] = latent[i];
    pds_warp_sync();
    norm_head(room, p->k_norm, p->kv_lora, p->norm_eps);
    rotate_head(p, row, room + p->kv_lora);
    pds_warp_sync();
    append_key(p, row, 0, room);
    return;
  }
  const uint64_t at = (uint64_t)row * p->heads + head;
  const float *q =
      (p->q_lora ? p->qb + (uint64_t)row * p->qb_stride : in) + (uint64_t)head * p->qk_dim;
  for (uint32_t i = PDS_LANE; i < p->qk_dim; i += 32) room[i] = q[i];
  pds_warp_sync();
  rotate_head(p, row, room + p->nope_dim);
  pds_warp_sync();
  store_padded(p, room, p->qhead, at * p->qhead_stride, p->nope_dim, p->qhead_stride);
  for (uint32_t i = PDS_LANE; i < p->q_stride - p->kv_lora; i += 32)
    pds_store_act(p->q, at * p->q_stride + p->kv_lora + i,
                  i < p->rope_dim ? room[p->nope_dim + i] : 0, p->act_dtype);
}

/* 1 / RMS of a row's n values from `first` on, for the whole block. */
PDS_FN float rms_of_row(const pds_cu_attention *p, uint32_t row, uint32_t first, uint32_t n,
                        float *room) {
  const float *x = p->qkv + (uint64_t)row * p->qkv_stride + first;
  float sum = 0;
  for (uint32_t i = PDS_TID; i < n; i += PDS_THREADS) sum = fmaf(x[i], x[i], sum);
  return pds_rsqrt(pds_block_sum(sum, room) / (float)n + p->norm_eps);
}

/* Grid: parts of the heads, rows. Shared memory: PDS_BLOCK_WARPS floats, then each warp's room. */
PDS_KERNEL(pds_cu_attention_rows, pds_cu_attention, 256) {
  float *room = (float *)PDS_SHARED, full[2] = {0, 0};
  const uint32_t row = PDS_BLOCK_Y, warps = PDS_THREADS / 32, dims = pds_most(p->qk_dim, p->v_dim);
  float *own = room + PDS_BLOCK_WARPS;
  const uint32_t all = p->mla ? p->heads + 1 : p->heads + 2 * p->kv_heads;
  if (!p->mla && p->qk_norm == 2) {
    const uint32_t queries = p->heads * p->qk_dim;
    full[0] = rms_of_row(p, row, 0, queries, room);
    full[1] = rms_of_row(p, row, queries, p->kv_heads * p->qk_dim, room);
  }
  own += (uint64_t)PDS_WARP * (pds_most(dims, p->key_dims) + 1);
  for (uint32_t h = PDS_BLOCK_X * warps + PDS_WARP; h < all; h += PDS_GRID_X * warps) {
    if (p->mla)
      mla_head(p, row, h, own);
    else
      gqa_head(p, row, h, own, full);
    pds_warp_sync();
  }
}

/* MLA: the normed q_a of a row, input of q_b. A block a row. */
PDS_KERNEL(pds_cu_attention_q_a, pds_cu_attention, 256) {
  const uint32_t row = PDS_BLOCK_X, n = p->q_lora;
  const float *x = p->qkv + (uint64_t)row * p->qkv_stride;
  const float r = rms_of_row(p, row, 0, n, (float *)PDS_SHARED);
  for (uint32_t i = PDS_TID; i < p->qact_stride; i += PDS_THREADS)
    pds_store_act(p->qact, (uint64_t)row * p->qact_stride + i, i < n ? x[i] * r * p->q_norm[i] : 0,
                  p->act_dtype);
}

#endif
