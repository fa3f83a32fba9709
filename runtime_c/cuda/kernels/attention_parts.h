/* attention_parts.h: what all kernels of attention share: where things lie, which keys a query sees. */
#ifndef PDS_CUDA_ATTENTION_PARTS_H
#define PDS_CUDA_ATTENTION_PARTS_H

#include "row_math.h"

enum {
  PDS_CU_KEYS = 64, /* tokens of a KV block */
  PDS_CU_LANES = 16 /* columns of a panel */
};
#define PDS_LOG2_E 1.44269504f

PDS_FN uint32_t pds_up(uint32_t n, uint32_t unit) {
  return (n + unit - 1) / unit * unit;
}
PDS_FN uint32_t pds_least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
PDS_FN uint32_t pds_most(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}

/* Query heads of one cached head. */
PDS_FN uint32_t pds_group_heads(const pds_cu_attention *p) {
  return p->mla ? p->heads : p->heads / p->kv_heads;
}

/* KV head h of block b of a sequence: its keys; its values follow key_bytes on. */
PDS_FN uint8_t *pds_kv_at(const pds_cu_attention *p, int32_t seq, uint32_t b, uint32_t h) {
  const uint64_t block = p->table[(uint64_t)(uint32_t)seq * p->table_stride + b];
  return p->kv + block * p->block_bytes + h * p->head_bytes;
}

/* First key that the query at a position sees. */
PDS_FN uint32_t pds_first_key(const pds_cu_attention *p, uint32_t position) {
  return p->window && position + 1 > p->window ? position + 1 - p->window : 0;
}

/* Keys [begin, end) that rows first..last, of one sequence, see in a part of the context; 0 if none. */
PDS_FN int pds_keys_of(const pds_cu_attention *p, uint32_t first, uint32_t last, uint32_t split,
                       uint32_t *begin, uint32_t *end) {
  *begin = pds_first_key(p, (uint32_t)p->position[first]);
  *end = (uint32_t)p->position[last] + 1;
  if (p->splits > 1) {
    const uint32_t from = split * p->split_tokens;
    *begin = pds_most(*begin, from);
    *end = pds_least(*end, from + p->split_tokens);
  }
  return *begin < *end;
}

/* Part `split` of a (row, head): maximum, sum, output at 16. */
PDS_FN float *pds_partial_at(const pds_cu_attention *p, uint32_t row, uint32_t head,
                             uint32_t split) {
  const uint64_t part = ((uint64_t)row * p->heads + head) * p->most_splits + split;
  return p->partial + part * (pds_up(p->value_dims, 16) + 16);
}

/* Element 0 of a (row, head)'s output, in elements, in oact (MLA: ctx). */
PDS_FN uint64_t pds_output_at(const pds_cu_attention *p, uint32_t row, uint32_t head) {
  if (p->mla) return ((uint64_t)row * p->heads + head) * p->ctx_stride;
  return (uint64_t)row * p->oact_stride + head * p->v_dim;
}
PDS_FN void *pds_output(const pds_cu_attention *p) {
  return p->mla ? p->ctx : p->oact;
}
/* How many elements of a head are written: zeros follow its dimensions up to there. */
PDS_FN uint32_t pds_output_dims(const pds_cu_attention *p, uint32_t head) {
  if (p->mla) return p->ctx_stride;
  return head + 1 == p->heads ? p->oact_stride - head * p->v_dim : p->v_dim;
}

/* The last of rows first..most that continue row `first` in its sequence; the same in all lanes. */
PDS_FN uint32_t pds_run_end(const pds_cu_attention *p, uint32_t first, uint32_t most) {
  const int32_t seq = p->seq[first];
  uint32_t other = most + 1;
  for (uint32_t r = first + 1 + PDS_LANE; r <= most && other > most; r += 32) {
    if (p->seq[r] != seq) other = r;
  }
  PDS_UNROLL
  for (uint32_t m = 16; m; m /= 2) other = pds_least(other, pds_shfl_xor_u32(other, m));
  return other - 1;
}

/* How many rows right before `row` are of its sequence; the same in all lanes. */
PDS_FN uint32_t pds_rows_before(const pds_cu_attention *p, uint32_t row) {
  const int32_t seq = p->seq[row];
  for (uint32_t before = 0;; before += 32) {
    uint32_t other = 32, at = before + PDS_LANE; /* the nearest that is not */
    if (at >= row || p->seq[row - 1 - at] != seq) other = PDS_LANE;
    PDS_UNROLL
    for (uint32_t m = 16; m; m /= 2) other = pds_least(other, pds_shfl_xor_u32(other, m));
    if (other < 32) return before + other;
  }
}

#endif
