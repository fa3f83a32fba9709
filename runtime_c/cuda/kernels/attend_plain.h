/* attend_plain.h: attention of any dimensions and either act, without tensor cores: fp32 plans, and heads
 * wider than the other kernels take. One block a row, head and part of the context. */
#ifndef PDS_CUDA_ATTEND_PLAIN_H
#define PDS_CUDA_ATTEND_PLAIN_H

#include "attention_parts.h"

/* Dimension d of the key of token t of a block. */
PDS_FN float plain_key(const pds_cu_attention *p, const uint8_t *keys, uint32_t t, uint32_t d) {
  const uint8_t *panel = keys + t / PDS_CU_LANES * p->key_panel_bytes;
  const uint32_t lane = t % PDS_CU_LANES;
  if (p->act_dtype != PDS_CU_BF16) return ((const float *)panel)[d * PDS_CU_LANES + lane];
  return pds_widen(((const uint16_t *)panel)[(d / 2 * PDS_CU_LANES + lane) * 2 + d % 2]);
}
PDS_FN float plain_value(const pds_cu_attention *p, const uint8_t *keys, uint32_t t, uint32_t d) {
  if (p->mla) return plain_key(p, keys, t, d);
  const uint8_t *values = keys + p->key_bytes;
  const uint32_t panel = d / PDS_CU_LANES * PDS_CU_KEYS, lane = d % PDS_CU_LANES;
  if (p->act_dtype != PDS_CU_BF16) return ((const float *)values)[(panel + t) * 16 + lane];
  return pds_widen(((const uint16_t *)values)[((panel + t) / 2 * 16 + lane) * 2 + t % 2]);
}

/* Shared memory: query [key_dims], scores [64], output [value_dims]. */
PDS_KERNEL(pds_cu_attend_plain, pds_cu_attention, 128) {
  const uint32_t row = PDS_BLOCK_X, head = PDS_BLOCK_Y, kv_head = head / pds_group_heads(p),
                 position = (uint32_t)p->position[row], seen = pds_first_key(p, position);
  float *q = (float *)PDS_SHARED, *score = q + p->key_dims, *out = score + PDS_CU_KEYS;
  uint32_t begin, end;
  if (!pds_keys_of(p, row, row, PDS_BLOCK_Z, &begin, &end)) return;
  for (uint32_t d = PDS_TID; d < p->key_dims; d += PDS_THREADS)
    q[d] = pds_load_act(p->q, ((uint64_t)row * p->heads + head) * p->q_stride + d, p->act_dtype);
  for (uint32_t d = PDS_TID; d < p->value_dims; d += PDS_THREADS) out[d] = 0;
  float top = -PDS_INFINITY, sum = 0;
  for (uint32_t block = begin / PDS_CU_KEYS; block * PDS_CU_KEYS < end; block++) {
    const uint8_t *keys = pds_kv_at(p, p->seq[row], block, kv_head);
    const uint32_t first = block * PDS_CU_KEYS, lo = seen > first ? seen - first : 0,
                   hi = pds_least(end - first, PDS_CU_KEYS);
    pds_sync();
    for (uint32_t t = lo + PDS_TID; t < hi; t += PDS_THREADS) {
      float s = 0;
      for (uint32_t d = 0; d < p->key_dims; d++) s = fmaf(q[d], plain_key(p, keys, t, d), s);
      score[t] = s * p->scale;
    }
    pds_sync();
    const float before = top;
    for (uint32_t t = lo; t < hi; t++) top = score[t] > top ? score[t] : top;
    const float base = top == -PDS_INFINITY ? 0 : top, factor = pds_exp(before - base);
    pds_sync();
    for (uint32_t t = lo + PDS_TID; t < hi; t += PDS_THREADS) score[t] = pds_exp(score[t] - base);
    pds_sync();
    sum *= factor;
    for (uint32_t t = lo; t < hi; t++) sum += score[t];
    for (uint32_t d = PDS_TID; d < p->value_dims; d += PDS_THREADS) {
      float o = out[d] * factor;
      for (uint32_t t = lo; t < hi; t++) {
        const float e = p->act_dtype == PDS_CU_BF16 ? pds_widen(pds_bf16(score[t])) : score[t];
        o = fmaf(e, plain_value(p, keys, t, d), o);
      }
      out[d] = o;
    }
  }
  if (p->splits > 1) {
    float *part = pds_partial_at(p, row, head, PDS_BLOCK_Z);
    if (PDS_TID == 0) {
      part[0] = top;
      part[1] = sum;
    }
    for (uint32_t d = PDS_TID; d < p->value_dims; d += PDS_THREADS) part[16 + d] = out[d];
    return;
  }
  const uint64_t at = pds_output_at(p, row, head);
  const uint32_t dims = pds_output_dims(p, head);
  for (uint32_t d = PDS_TID; d < dims; d += PDS_THREADS)
    pds_store_act(pds_output(p), at + d, d < p->value_dims ? out[d] * (1 / sum) : 0, p->act_dtype);
}

/* Joins the parts of a (row, head), each output's in order of position. Grid: heads, rows. Shared memory:
 * PDS_BLOCK_WARPS floats, then a factor for each part. */
PDS_KERNEL(pds_cu_attention_merge, pds_cu_attention, 128) {
  const uint32_t row = PDS_BLOCK_Y, head = PDS_BLOCK_X, position = (uint32_t)p->position[row];
  const uint32_t first = pds_first_key(p, position) / p->split_tokens,
                 n = position / p->split_tokens + 1 - first, step = pds_up(p->value_dims, 16) + 16;
  const float *part = pds_partial_at(p, row, head, first);
  float *room = (float *)PDS_SHARED, *factor = room + PDS_BLOCK_WARPS, top = -PDS_INFINITY, sum = 0;
  for (uint32_t i = PDS_TID; i < n; i += PDS_THREADS) top = fmaxf(top, part[(uint64_t)i * step]);
  top = pds_block_max(top, room);
  for (uint32_t i = PDS_TID; i < n; i += PDS_THREADS) {
    const float m = part[(uint64_t)i * step];
    factor[i] = m == top ? 1 : pds_exp(m - top);
    sum += part[(uint64_t)i * step + 1] * factor[i];
  }
  sum = pds_block_sum(sum, room); /* and the factors are there */
  const uint64_t at = pds_output_at(p, row, head);
  const uint32_t dims = pds_output_dims(p, head);
  for (uint32_t d = PDS_TID; d < dims; d += PDS_THREADS) {
    float o = 0;
    if (d < p->value_dims) {
      const float *from = part + 16 + d;
      for (uint32_t i = 0; i < n; i++) o += pds_product(factor[i], from[(uint64_t)i * step]);
    }
    pds_store_act(pds_output(p), at + d, d < p->value_dims ? o * (1 / sum) : 0, p->act_dtype);
  }
}

#endif
