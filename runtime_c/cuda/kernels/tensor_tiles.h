/* tensor_tiles.h: panels of the KV cache as fragments of tensor core products (mma m16n8k16, bf16).
 *
 * A panel is rows of 64 bytes: 16 columns, each a word of two consecutive k. Fragments are read so that
 * no register has to be moved: what a product wants in neighbouring registers, one load brings.
 *   - Keys are B of scores = queries keys^T. The order of k is free: thread (g = lane / 4, t = lane % 4)
 *     has rows 4t..4t+3 of 16, k = 8t..8t+7 of 32, of queries and keys. Columns are tokens in order.
 *   - Values are A of output^T = values^T weights^T, with 8 bytes a load: rows g and g + 8 of the product
 *     are dimensions 2g and 2g + 1 of a panel. The exponentials of scores are its B as they lie.
 *
 * In shared memory panel rows lie two to 128 bytes, with the 16-byte chunks of such a line in an order
 * that lets the threads of one phase of a load read different banks. */
#ifndef PDS_CUDA_TENSOR_TILES_H
#define PDS_CUDA_TENSOR_TILES_H

#include "attention_parts.h"

/* A kernel whose name is a macro. */
#define PDS_KERNEL_OF(name, params, threads) PDS_KERNEL(name, params, threads)

/* Where 16-byte chunk `chunk` of a row lies; panels have `rows` rows. Keys: threads read rows 4t + i;
 * values: rows t + i. */
PDS_FN uint32_t pds_key_at(uint32_t panel, uint32_t row, uint32_t chunk, uint32_t rows) {
  const uint32_t slot = (row % 2 * 4 + chunk) ^ (row / 4 % 4 * 2);
  return (panel * rows + row / 2 * 2) * 64 + slot * 16;
}
PDS_FN uint32_t pds_value_at(uint32_t panel, uint32_t row, uint32_t chunk, uint32_t rows) {
  const uint32_t slot = (row % 2 * 4 + chunk) ^ (row / 2 % 2 * 2);
  return (panel * rows + row / 2 * 2) * 64 + slot * 16;
}

/* One word, and two, of shared memory. */
PDS_FN uint32_t pds_word(const uint8_t *shared) {
#ifdef __CUDACC__
  return *(const uint32_t *)shared;
#else
  uint32_t r;
  memcpy(&r, shared, sizeof r);
  return r;
#endif
}
PDS_FN void pds_two_words(uint32_t *to, const uint8_t *shared) {
#ifdef __CUDACC__
  const uint2 v = *(const uint2 *)shared;
  to[0] = v.x;
  to[1] = v.y;
#else
  memcpy(to, shared, 8);
#endif
}

PDS_FN void pds_store_two(float *shared, float a, float b) {
#ifdef __CUDACC__
  *(float2 *)shared = make_float2(a, b);
#else
  shared[0] = a;
  shared[1] = b;
#endif
}

PDS_FN float pds_exp2(float x) {
#ifdef __CUDACC__
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return pds_exp_fast(x * 0.693147181f);
#endif
}

/* A thread's words of keys, rows 4t + i of the first 8 tokens: i = 0; i = 1 is 64 bytes on or back, i = 2
 * 128 on, the next 8 tokens 32 on or back. */
PDS_FN uint32_t pds_thread_keys(void) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4;
  return pds_key_at(0, 4 * t, g / 4, 16) + g % 4 * 4;
}
/* B of k = 16 of 8 tokens: of half `half` of k = 32, tokens 8 `eight` on. */
PDS_FN void pds_key_words(uint32_t *b, const uint8_t *keys, uint32_t at, uint32_t half,
                          uint32_t eight) {
  at ^= eight * 32;
  b[0] = pds_word(keys + at + half * 128);
  b[1] = pds_word(keys + (at ^ 64) + half * 128);
}

/* A thread's words of values, row t, dimensions 2g and 2g + 1 of a panel. */
PDS_FN uint32_t pds_thread_values(void) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4;
  return pds_value_at(0, t, g / 2, 16) + g % 2 * 8;
}
/* A of 16 dimensions and 16 tokens. */
PDS_FN void pds_value_words(uint32_t *a, const uint8_t *values) {
  pds_two_words(a, values);
  pds_two_words(a + 2, values + 256);
}

/* The query of a (row, head), dimensions d..d+7; zero beyond its stride. */
PDS_FN pds_u4 pds_query_at(const pds_cu_attention *p, uint32_t row, uint32_t head, uint32_t d) {
  if (d < p->q_stride)
    return pds_load16((const uint16_t *)p->q + ((uint64_t)row * p->heads + head) * p->q_stride + d);
  const pds_u4 zero = {0, 0, 0, 0};
  return zero;
}

/* The query of a (row, head) and of another, for k = 32 from dimension d on, as the words that threads
 * hold: each thread's 16 bytes for one half of k are together, a warp's 512 for both. of_columns: 0 for A
 * (rows g and g + 8 of a product), 1 for B (columns g of two products). */
PDS_FN void pds_store_query(uint8_t *to, pds_u4 low, pds_u4 high, int of_columns) {
  pds_u4 first = {low.x, high.x, low.y, high.y}, second = {low.z, high.z, low.w, high.w};
  if (of_columns) {
    first.y = low.y;
    first.z = high.x;
    second.y = low.w;
    second.z = high.z;
  }
  pds_store16(to + PDS_LANE * 16, first);
  pds_store16(to + 512 + PDS_LANE * 16, second);
}

/* What a thread knows of a query row. */
typedef struct pds_query_row {
  uint32_t end;   /* the first key beyond what it sees; 0: it sees none */
  float max, sum; /* of unscaled scores; of this thread's exponentials */
} pds_query_row;

PDS_FN void pds_query_begin(const pds_cu_attention *p, pds_query_row *q, uint32_t row, int valid) {
  q->end = valid ? (uint32_t)p->position[row] + 1 : 0;
  q->max = -PDS_INFINITY;
  q->sum = 0;
}
/* First key that it sees. */
PDS_FN uint32_t pds_query_first(const pds_cu_attention *p, const pds_query_row *q) {
  return p->window && q->end > p->window ? q->end - p->window : 0;
}

/* Scores that the row does not see become -Inf: s[j] are tokens first + 8 j.., n in all. */
PDS_FN void pds_mask(const pds_cu_attention *p, const pds_query_row *q, uint32_t which,
                     float (*s)[4], uint32_t n, uint32_t first) {
  const uint32_t seen = pds_query_first(p, q);
  if (first >= seen && first + 8 * n <= q->end) return;
  PDS_UNROLL
  for (uint32_t j = 0; j < n; j++) {
    PDS_UNROLL
    for (uint32_t c = 0; c < 2; c++) {
      const uint32_t token = first + 8 * j + PDS_LANE % 4 * 2 + c;
      if (token < seen || token >= q->end) s[j][2 * which + c] = -PDS_INFINITY;
    }
  }
}

/* Streaming softmax of one row of scores, n times 8: they become exponentials. The factor for what was
 * accumulated before. -Inf weighs nothing, NaN makes the row NaN. Four threads share a row. */
PDS_FN float pds_softmax(pds_query_row *q, uint32_t which, float (*s)[4], uint32_t n, float scale) {
  float top = q->max, sum = 0;
  PDS_UNROLL
  for (uint32_t j = 0; j < n; j++) top = fmaxf(top, fmaxf(s[j][2 * which], s[j][2 * which + 1]));
  top = fmaxf(top, pds_shfl_xor(top, 1));
  top = fmaxf(top, pds_shfl_xor(top, 2));
  /* Not fma(score, scale, -base * scale): great scores would not cancel. */
  const float base = top == -PDS_INFINITY ? 0 : top, factor = pds_exp2((q->max - base) * scale);
  PDS_UNROLL
  for (uint32_t j = 0; j < n; j++) {
    PDS_UNROLL
    for (uint32_t c = 0; c < 2; c++) {
      const float e = pds_exp2((s[j][2 * which + c] - base) * scale);
      s[j][2 * which + c] = e;
      sum += e;
    }
  }
  q->sum = q->sum * factor + sum;
  q->max = top;
  return factor;
}

/* A value of rows g and g + 8 for the columns of outputs: of[n][c] that of pair 8 n + 2 t + c. */
PDS_FN void pds_to_columns(float (*of)[2], const float *row) {
  PDS_UNROLL
  for (uint32_t n = 0; n < 2; n++) {
    PDS_UNROLL
    for (uint32_t c = 0; c < 2; c++) of[n][c] = pds_shfl(row[n], 4 * (PDS_LANE % 4 * 2 + c));
  }
}
PDS_FN void pds_scale_column(float *o, const float *factor) {
  o[0] *= factor[0];
  o[1] *= factor[1];
  o[2] *= factor[0];
  o[3] *= factor[1];
}

/* Dimensions d..d+n-1 of a (row, head)'s output, n 2 or 4, d a multiple of it: to its part of the
 * context, or where o_proj reads. */
PDS_FN void pds_store_some(const pds_cu_attention *p, uint32_t row, uint32_t head, uint32_t split,
                           uint32_t d, uint32_t n, const float *v) {
  if (d >= p->value_dims) return;
  if (p->splits > 1) { /* which has room for whole panels */
    float *to = pds_partial_at(p, row, head, split) + 16 + d;
    PDS_UNROLL
    for (uint32_t i = 0; i < n; i++) to[i] = v[i];
    return;
  }
  uint16_t *to = (uint16_t *)pds_output(p) + pds_output_at(p, row, head) + d;
  const int words = p->mla || p->v_dim % 2 == 0; /* behind an odd latent there is padding */
  PDS_UNROLL
  for (uint32_t i = 0; i < n; i += 2) {
    if (d + i >= p->value_dims) continue;
    const int both = d + i + 1 < p->value_dims;
    if (words) {
      *(uint32_t *)(to + i) = pds_pack_bf16(v[i], both ? v[i + 1] : 0);
    } else {
      to[i] = pds_bf16(v[i]);
      if (both) to[i + 1] = pds_bf16(v[i + 1]);
    }
  }
}
/* The zeros behind a (row, head)'s output. */
PDS_FN void pds_store_padding(const pds_cu_attention *p, uint32_t row, uint32_t head) {
  uint16_t *to = (uint16_t *)pds_output(p) + pds_output_at(p, row, head);
  const uint32_t dims = pds_output_dims(p, head);
  for (uint32_t d = p->value_dims; d < dims; d++) to[d] = 0;
}

#endif
