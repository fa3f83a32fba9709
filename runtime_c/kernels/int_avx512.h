/* int_avx512.h: words of four bytes in 16 int32 lanes on AVX-512 BW, with VNNI where the path has
 * it. The same names exist in int_avx2.h; int.h uses only these. Part of vec_avx512.h. */
#ifndef PDS_INT_AVX512_H
#define PDS_INT_AVX512_H

#include "int_avx2_sums.h"

typedef __m512i v16i;

PDS_INLINE v16i v16i_set1(int32_t x) {
  return _mm512_set1_epi32(x);
}
PDS_INLINE v16i v16i_load(const void *p) {
  return _mm512_load_si512(p);
}
/* int8 as unsigned: w + 128. */
PDS_INLINE v16i v16i_flip(v16i w) {
  return _mm512_xor_si512(w, _mm512_set1_epi32((int)0x80808080u));
}
/* Low and high nibble of each byte. */
PDS_INLINE v16i v16i_low(v16i w) {
  return _mm512_and_si512(w, _mm512_set1_epi32(0x0f0f0f0f));
}
PDS_INLINE v16i v16i_high(v16i w) {
  return v16i_low(_mm512_srli_epi16(w, 4));
}
PDS_INLINE v16 v16i_float(v16i v) {
  return _mm512_cvtepi32_ps(v);
}
PDS_INLINE v16 v16_load_bf16(const void *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* The bits of the largest |x| of 32 bf16 values; 0x7f80 and more: one is not finite. */
PDS_INLINE uint32_t bf16_top(const uint16_t *x) {
  __m512i v = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
  __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
  return v16i_largest(half);
}

/* 32 bf16 values times `factor` as int8, to nearest even; returns their sum. */
PDS_INLINE int32_t bf16_to_int8(const uint16_t *x, float factor, int8_t *q) {
  const v16 f = _mm512_set1_ps(factor);
  __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(v16_load_bf16(x), f));
  __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(v16_load_bf16(x + 16), f));
  __m256i bytes = _mm256_set_m128i(_mm512_cvtsepi32_epi8(b), _mm512_cvtsepi32_epi8(a));
  _mm256_storeu_si256((__m256i *)q, bytes);
  return v16i_sum(bytes);
}

/* Four bytes of x for every lane, and acc + their products with w's: w unsigned, x signed.
 * nibbles: w is at most 15. */
#ifdef __AVX512VNNI__
typedef __m512i x_int;
PDS_INLINE x_int x_int_load(const void *p, const int nibbles) {
  (void)nibbles;
  return _mm512_set1_epi32(pds_load_word(p));
}
PDS_INLINE v16i v16i_dot(v16i acc, v16i w, x_int x, const int nibbles) {
  (void)nibbles;
  return _mm512_dpbusd_epi32(acc, w, x);
}
#else
typedef struct {
  __m512i even, odd; /* bytes as int16; nibbles: even holds all four bytes */
} x_int;
PDS_INLINE x_int x_int_load(const void *p, const int nibbles) {
  __m512i x = _mm512_set1_epi32(pds_load_word(p));
  if (nibbles) return (x_int){x, x};
  return (x_int){_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
PDS_INLINE v16i v16i_dot(v16i acc, v16i w, x_int x, const int nibbles) {
  if (nibbles) { /* |pair| <= 2 * 15 * 128 */
    __m512i pairs = _mm512_maddubs_epi16(w, x.even);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(0xff)), odd = _mm512_srli_epi16(w, 8);
  return _mm512_add_epi32(
      acc, _mm512_add_epi32(_mm512_madd_epi16(even, x.even), _mm512_madd_epi16(odd, x.odd)));
}
#endif

/* As TILE_ROWS and TILE_PANELS of vec_avx512.h, for tiles of integer weights. */
enum { INT_ROWS = 8 };
#define INT_PANELS(rows) ((rows) <= 2 ? 4 : 2)

#endif
