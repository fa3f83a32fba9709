/* int_avx2.h: words of four bytes in 16 int32 lanes as two AVX2 registers. The same names exist
 * in int_avx512.h. Part of vec_avx2.h. */
#ifndef PDS_INT_AVX2_H
#define PDS_INT_AVX2_H

#include "int_avx2_sums.h"

typedef struct {
  __m256i a, b;
} v16i;

PDS_INLINE v16i v16i_set1(int32_t x) {
  return (v16i){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
PDS_INLINE v16i v16i_load(const void *p) {
  const __m256i *row = p;
  return (v16i){_mm256_load_si256(row), _mm256_load_si256(row + 1)};
}
/* int8 as unsigned: w + 128. */
PDS_INLINE v16i v16i_flip(v16i w) {
  const __m256i top = _mm256_set1_epi32((int)0x80808080u);
  return (v16i){_mm256_xor_si256(w.a, top), _mm256_xor_si256(w.b, top)};
}
/* Low and high nibble of each byte. */
PDS_INLINE v16i v16i_low(v16i w) {
  const __m256i mask = _mm256_set1_epi32(0x0f0f0f0f);
  return (v16i){_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
PDS_INLINE v16i v16i_high(v16i w) {
  return v16i_low((v16i){_mm256_srli_epi16(w.a, 4), _mm256_srli_epi16(w.b, 4)});
}
PDS_INLINE v16 v16i_float(v16i v) {
  return (v16){_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)};
}
PDS_INLINE __m256 v16_load_bf16_half(const void *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PDS_INLINE v16 v16_load_bf16(const void *p) {
  return (v16){v16_load_bf16_half(p), v16_load_bf16_half((const char *)p + 16)};
}

/* The bits of the largest |x| of 32 bf16 values; 0x7f80 and more: one is not finite. */
PDS_INLINE uint32_t bf16_top(const uint16_t *x) {
  const __m256i mask = _mm256_set1_epi16(0x7fff);
  __m256i a = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)x), mask);
  __m256i b = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 16)), mask);
  return v16i_largest(_mm256_max_epu16(a, b));
}

/* 32 bf16 values times `factor` as int8, to nearest even; returns their sum. */
PDS_INLINE int32_t bf16_to_int8(const uint16_t *x, float factor, int8_t *q) {
  __m256i v[4];
  PDS_UNROLL
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v16_load_bf16_half(x + 8 * i), _mm256_set1_ps(factor)));
  }
  __m256i bytes =
      _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i *)q, bytes);
  return v16i_sum(bytes);
}

/* Four bytes of x for every lane, and acc + their products with w's: w unsigned, x signed.
 * nibbles: w is at most 15. */
typedef struct {
  __m256i even, odd; /* bytes as int16; nibbles: even holds all four bytes */
} x_int;
PDS_INLINE x_int x_int_load(const void *p, const int nibbles) {
  __m256i x = _mm256_set1_epi32(pds_load_word(p));
  if (nibbles) return (x_int){x, x};
  return (x_int){_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
PDS_INLINE __m256i v16i_dot_half(__m256i acc, __m256i w, x_int x, const int nibbles) {
  if (nibbles) { /* |pair| <= 2 * 15 * 128 */
    __m256i pairs = _mm256_maddubs_epi16(w, x.even);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(w, 8);
  return _mm256_add_epi32(
      acc, _mm256_add_epi32(_mm256_madd_epi16(even, x.even), _mm256_madd_epi16(odd, x.odd)));
}
PDS_INLINE v16i v16i_dot(v16i acc, v16i w, x_int x, const int nibbles) {
  return (v16i){v16i_dot_half(acc.a, w.a, x, nibbles), v16i_dot_half(acc.b, w.b, x, nibbles)};
}

/* See int_avx512.h: 16 registers of half the width. */
enum { INT_ROWS = 4 };
#define INT_PANELS(rows) ((rows) <= 2 ? 2 : 1)

#endif
