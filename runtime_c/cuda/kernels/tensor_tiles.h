/* tensor_tiles.h: panels of the KV cache as fragments of tensor core products (mma m16n8k16, bf16).
 *
 * A panel is rows of 64 bytes: 16 columns, each a word of two consecutive k. That is a B fragment but for
 * the order of n and k, which are free as long as all that meet agree. Here a thread (g = lane / 4, t =
 * lane % 4) reads 16 bytes: four columns, 4 (g % 4).., of rows 4t..4t+3 of 16 (k = 8t..8t+7 of 32), of
 * panel g / 4 of two (n = 4g..4g+3 of 32). So of a product with n = 32, column 2t of tile i is n = 8t + i,
 * column 2t + 1 is n = 8t + 4 + i: a thread holds n = 8t..8t+7 of its rows g and g + 8, which is what it
 * needs as A of the next product.
 *
 * In shared memory rows lie two to 128 bytes, with the 16-byte chunks of such a line in an order that lets
 * the eight threads of a phase read eight different ones. */
#ifndef PDS_CUDA_TENSOR_TILES_H
#define PDS_CUDA_TENSOR_TILES_H

#include "attention_parts.h"

/* A kernel whose name is a macro. */
#define PDS_KERNEL_OF(name, params, threads) PDS_KERNEL(name, params, threads)

/* Where 16-byte chunk `chunk` of a row lies; panels have `rows` rows, a multiple of 16. */
PDS_FN uint32_t pds_tile_at(uint32_t panel, uint32_t row, uint32_t chunk, uint32_t rows) {
  const uint32_t slot = (row % 2 * 4 + chunk) ^ (row / 4 % 4 * 2) ^ panel % 2;
  return (panel * rows + row / 2 * 2) * 64 + slot * 16;
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

/* d[0..4) += A B: A is the two halves a[0..4), a[4..8) of k = 32, B the rows 4t..4t+3 at `even` (row 4t)
 * and `odd` (row 4t + 1). */
PDS_FN void pds_mma_panel(float (*d)[4], const uint32_t *a, const uint8_t *even,
                          const uint8_t *odd) {
  const pds_u4 w0 = pds_load16(even), w1 = pds_load16(odd), w2 = pds_load16(even + 128),
               w3 = pds_load16(odd + 128);
  const uint32_t b[8][2] = {{w0.x, w1.x}, {w0.y, w1.y}, {w0.z, w1.z}, {w0.w, w1.w},
                            {w2.x, w3.x}, {w2.y, w3.y}, {w2.z, w3.z}, {w2.w, w3.w}};
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) pds_mma_bf16(d[i], a, b[i]);
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) pds_mma_bf16(d[i], a + 4, b[4 + i]);
}

/* A of rows g and g + 8 from 16 bytes of each: k = 8t..8t+7 of 32. */
PDS_FN void pds_rows_as_a(uint32_t *a, pds_u4 low, pds_u4 high) {
  a[0] = low.x;
  a[1] = high.x;
  a[2] = low.y;
  a[3] = high.y;
  a[4] = low.z;
  a[5] = high.z;
  a[6] = low.w;
  a[7] = high.w;
}
/* Products of n = 32 as A of k = 32. */
PDS_FN void pds_products_as_a(uint32_t *a, float (*d)[4]) {
  PDS_UNROLL
  for (uint32_t c = 0; c < 2; c++) {
    a[4 * c] = pds_pack_bf16(d[0][c], d[1][c]);
    a[4 * c + 1] = pds_pack_bf16(d[0][2 + c], d[1][2 + c]);
    a[4 * c + 2] = pds_pack_bf16(d[2][c], d[3][c]);
    a[4 * c + 3] = pds_pack_bf16(d[2][2 + c], d[3][2 + c]);
  }
}

/* The query of a (row, head), dimensions d..d+7; zero beyond its stride. */
PDS_FN pds_u4 pds_query_at(const pds_cu_attention *p, uint32_t row, uint32_t head, uint32_t d) {
  if (d < p->q_stride)
    return pds_load16((const uint16_t *)p->q + ((uint64_t)row * p->heads + head) * p->q_stride + d);
  const pds_u4 zero = {0, 0, 0, 0};
  return zero;
}

/* What a thread knows of one of its two query rows. */
typedef struct pds_query_row {
  uint32_t row, head;
  int valid;
  uint32_t seen, end; /* keys [seen, end) */
  float max, sum;     /* of unscaled scores; of this thread's exponentials */
} pds_query_row;

/* Scores that the row does not see become -Inf. `first`: the token of column 0 of 32 n columns. */
PDS_FN void pds_mask(const pds_query_row *q, uint32_t which, float (*s)[4], uint32_t halves,
                     uint32_t first) {
  const uint32_t t = PDS_LANE % 4;
  if (first >= q->seen && first + 32 * halves <= q->end) return;
  PDS_UNROLL
  for (uint32_t j = 0; j < 4 * halves; j++) {
    PDS_UNROLL
    for (uint32_t c = 0; c < 2; c++) {
      const uint32_t token = first + j / 4 * 32 + 8 * t + 4 * c + j % 4;
      if (token < q->seen || token >= q->end) s[j][2 * which + c] = -PDS_INFINITY;
    }
  }
}

/* Streaming softmax of one row of 32 `halves` scores: they become exponentials. The factor for what was
 * accumulated before. -Inf weighs nothing, NaN makes the row NaN. Four threads share a row. */
PDS_FN float pds_softmax(pds_query_row *q, uint32_t which, float (*s)[4], uint32_t halves,
                         float scale) {
  float top = q->max, sum = 0;
  PDS_UNROLL
  for (uint32_t j = 0; j < 4 * halves; j++)
    top = fmaxf(top, fmaxf(s[j][2 * which], s[j][2 * which + 1]));
  top = fmaxf(top, pds_shfl_xor(top, 1));
  top = fmaxf(top, pds_shfl_xor(top, 2));
  /* Not fma(score, scale, -base * scale): great scores would not cancel. */
  const float base = top == -PDS_INFINITY ? 0 : top, factor = pds_exp2((q->max - base) * scale);
  PDS_UNROLL
  for (uint32_t j = 0; j < 4 * halves; j++) {
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

/* o[0..n) of both rows times their factors. */
PDS_FN void pds_rescale(float (*o)[4], uint32_t n, const float *factor) {
  if (factor[0] == 1 && factor[1] == 1) return;
  PDS_UNROLL
  for (uint32_t j = 0; j < n; j++) {
    o[j][0] *= factor[0];
    o[j][1] *= factor[0];
    o[j][2] *= factor[1];
    o[j][3] *= factor[1];
  }
}

/* Dimensions d..d+n-1 of a (row, head)'s output, n 4 or 8: to its part of the context, or where o_proj
 * reads. */
PDS_FN void pds_store_some(const pds_cu_attention *p, uint32_t row, uint32_t head, uint32_t split,
                           uint32_t d, uint32_t n, const float *v) {
  if (d >= p->value_dims) return;
  if (p->splits > 1) {
    float *to = pds_partial_at(p, row, head, split) + 16 + d;
    PDS_UNROLL
    for (uint32_t i = 0; i < n; i += 4) {
      pds_f4 f;
      PDS_UNROLL
      for (uint32_t j = 0; j < 4; j++) f.x[j] = v[i + j];
      pds_store_f4(to + i, f);
    }
    return;
  }
  uint16_t *to = (uint16_t *)pds_output(p) + pds_output_at(p, row, head) + d;
  if (n == 8 && p->v_dim % 8 == 0 && p->value_dims % 8 == 0) {
    pds_u4 w;
    w.x = pds_pack_bf16(v[0], v[1]);
    w.y = pds_pack_bf16(v[2], v[3]);
    w.z = pds_pack_bf16(v[4], v[5]);
    w.w = pds_pack_bf16(v[6], v[7]);
    pds_store16(to, w);
    return;
  }
  PDS_UNROLL
  for (uint32_t i = 0; i < n; i++) {
    if (d + i < p->value_dims) to[i] = pds_bf16(v[i]);
  }
}
/* The zeros behind a (row, head)'s output. */
PDS_FN void pds_store_padding(const pds_cu_attention *p, uint32_t row, uint32_t head) {
  uint16_t *to = (uint16_t *)pds_output(p) + pds_output_at(p, row, head);
  const uint32_t dims = pds_output_dims(p, head);
  for (uint32_t d = p->value_dims; d < dims; d++) to[d] = 0;
}

#endif
