/* vec_avx512.h: 16 fp32 lanes on AVX-512 F BW DQ VL. The same names exist in vec_avx2.h;
 * template.h uses only these. */
#ifndef PDS_VEC_AVX512_H
#define PDS_VEC_AVX512_H

#include <immintrin.h>

#include "inline.h"

typedef __m512 v16;

PDS_INLINE __mmask16 v16_first(uint32_t n) {
  return (__mmask16)((1u << n) - 1u);
}

PDS_INLINE v16 v16_set1(float a) {
  return _mm512_set1_ps(a);
}
PDS_INLINE v16 v16_load(const float *p) {
  return _mm512_loadu_ps(p);
}
PDS_INLINE void v16_store(float *p, v16 v) {
  _mm512_storeu_ps(p, v);
}
/* Past the caches; p is 64-byte aligned. Other threads see it after v16_stream_end. */
PDS_INLINE void v16_stream(float *p, v16 v) {
  _mm512_stream_ps(p, v);
}
PDS_INLINE void v16_stream_end(void) {
  _mm_sfence();
}
/* The first n lanes, n in 1..16; the others load as zero and are not stored. */
PDS_INLINE v16 v16_load_n(const float *p, uint32_t n) {
  return _mm512_maskz_loadu_ps(v16_first(n), p);
}
PDS_INLINE void v16_store_n(float *p, v16 v, uint32_t n) {
  _mm512_mask_storeu_ps(p, v16_first(n), v);
}
/* Lanes [lo, hi) of v, `fill` elsewhere; 0 <= lo <= hi <= 16. */
PDS_INLINE v16 v16_range(v16 v, uint32_t lo, uint32_t hi, float fill) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(fill), v16_first(hi) & (__mmask16)~v16_first(lo), v);
}

PDS_INLINE v16 v16_add(v16 a, v16 b) {
  return _mm512_add_ps(a, b);
}
PDS_INLINE v16 v16_sub(v16 a, v16 b) {
  return _mm512_sub_ps(a, b);
}
PDS_INLINE v16 v16_mul(v16 a, v16 b) {
  return _mm512_mul_ps(a, b);
}
PDS_INLINE v16 v16_div(v16 a, v16 b) {
  return _mm512_div_ps(a, b);
}
PDS_INLINE v16 v16_fma(v16 a, v16 b, v16 c) {
  return _mm512_fmadd_ps(a, b, c);
}
PDS_INLINE v16 v16_max(v16 a, v16 b) {
  return _mm512_max_ps(a, b);
}
/* max and min that give b where b is NaN. */
PDS_INLINE v16 v16_min(v16 a, v16 b) {
  return _mm512_min_ps(a, b);
}
PDS_INLINE float v16_reduce_max(v16 v) {
  return _mm512_reduce_max_ps(v);
}
PDS_INLINE float v16_reduce_add(v16 v) {
  return _mm512_reduce_add_ps(v);
}
PDS_INLINE v16 v16_round(v16 v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* p * 2^n, n integral */
PDS_INLINE v16 v16_scale2(v16 p, v16 n) {
  return _mm512_scalef_ps(p, n);
}

PDS_INLINE __m256i v16_to_bf16(v16 v) {
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
PDS_INLINE void v16_store_bf16(uint16_t *p, v16 v) {
  _mm256_storeu_si256((__m256i *)p, v16_to_bf16(v));
}
PDS_INLINE void v16_store_bf16_n(uint16_t *p, v16 v, uint32_t n) {
  _mm256_mask_storeu_epi16(p, v16_first(n), v16_to_bf16(v));
}

/* One 64-byte row of a packed fp32 panel, and its multiply-add with a broadcast k of x. */
typedef __m512 w_f32;
PDS_INLINE w_f32 w_f32_load(const void *p) {
  return _mm512_load_ps(p);
}
typedef __m512 x_f32;
PDS_INLINE x_f32 x_f32_load(const void *p) {
  return _mm512_set1_ps(*(const float *)p);
}
PDS_INLINE v16 v16_dot_f32(v16 acc, w_f32 w, x_f32 x) {
  return _mm512_fmadd_ps(w, x, acc);
}

/* The same of a packed bf16 panel: pairs of k. */
#ifdef __AVX512BF16__
typedef __m512i w_bf16;
PDS_INLINE w_bf16 w_bf16_load(const void *p) {
  return _mm512_load_si512(p);
}
typedef __m512i x_bf16;
PDS_INLINE x_bf16 x_bf16_load(const void *p) {
  return _mm512_set1_epi32(pds_load_word(p));
}
PDS_INLINE v16 v16_dot_bf16(v16 acc, w_bf16 w, x_bf16 x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
}
#else
typedef struct {
  __m512 even, odd;
} w_bf16;
typedef w_bf16 x_bf16;
PDS_INLINE w_bf16 v16_pair(__m512i u) {
  return (w_bf16){_mm512_castsi512_ps(_mm512_slli_epi32(u, 16)),
                  _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32((int)0xffff0000u)))};
}
PDS_INLINE w_bf16 w_bf16_load(const void *p) {
  return v16_pair(_mm512_load_si512(p));
}
PDS_INLINE x_bf16 x_bf16_load(const void *p) {
  return v16_pair(_mm512_set1_epi32(pds_load_word(p)));
}
PDS_INLINE v16 v16_dot_bf16(v16 acc, w_bf16 w, x_bf16 x) {
  return _mm512_fmadd_ps(w.odd, x.odd, _mm512_fmadd_ps(w.even, x.even, acc));
}
#endif

/* One stage of the transposition below: rows i and i + apart exchange halves of every 2 * apart
 * 64-bit columns. */
PDS_INLINE void v16_exchange(__m512i r[8], int apart) {
  const __m512i low[3] = {_mm512_setr_epi64(0, 8, 2, 10, 4, 12, 6, 14),
                          _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                          _mm512_setr_epi64(0, 1, 2, 3, 8, 9, 10, 11)};
  const __m512i high[3] = {_mm512_setr_epi64(1, 9, 3, 11, 5, 13, 7, 15),
                           _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15),
                           _mm512_setr_epi64(4, 5, 6, 7, 12, 13, 14, 15)};
  const int stage = apart == 4 ? 2 : apart - 1;
  PDS_UNROLL
  for (int i = 0; i < 8; i++) {
    if (i & apart) continue;
    const __m512i a = r[i], b = r[i + apart];
    r[i] = _mm512_permutex2var_epi64(a, low[stage], b);
    r[i + apart] = _mm512_permutex2var_epi64(a, high[stage], b);
  }
}

/* 8 packed bf16 rows (16 dimensions) of 16 tokens to 8 rows (16 tokens) of 16 dimensions; rows are
 * 64 bytes. A 64-bit column holds two dimensions of two tokens: transposed whole, then its middle
 * halves swapped. */
PDS_INLINE void v16_transpose_bf16(const unsigned char *from, unsigned char *to) {
  const __m512i swap =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  __m512i r[8];
  PDS_UNROLL
  for (int i = 0; i < 8; i++) r[i] = _mm512_loadu_si512(from + 64 * i);
  v16_exchange(r, 1);
  v16_exchange(r, 2);
  v16_exchange(r, 4);
  PDS_UNROLL
  for (int i = 0; i < 8; i++) {
    _mm512_storeu_si512(to + 64 * i, _mm512_shuffle_epi8(r[i], swap));
  }
}

/* Rows of a GEMM tile and panels beside each other for that many rows: accumulators, weights and
 * one broadcast fit the 32 registers, and few rows take more panels so that enough chains hide
 * the latency of the multiply-add. */
#define TILE_MANY 1
enum { TILE_ROWS = 8 };
#define TILE_PANELS(rows) ((rows) <= 2 ? 4 : 2)

#include "int_avx512.h"

#endif
