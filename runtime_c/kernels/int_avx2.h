/* int_avx2.h: words of four bytes in 16 int32 lanes as two AVX2 registers. The same names exist
 * in int_avx512.h. */
#ifndef PDS_INT_AVX2_H
#define PDS_INT_AVX2_H

#include "vec_avx2.h"

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
PDS_INLINE int32_t v16i_reduce_add(v16i v) {
  __m256i half = _mm256_add_epi32(v.a, v.b);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
PDS_INLINE v16i v16i_add(v16i x, v16i y) {
  return (v16i){_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
PDS_INLINE __m256 v16_load_bf16_half(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
PDS_INLINE v16 v16_load_bf16(const uint16_t *p) {
  return (v16){v16_load_bf16_half(p), v16_load_bf16_half(p + 8)};
}
PDS_INLINE v16 v16_abs(v16 v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return (v16){_mm256_andnot_ps(sign, v.a), _mm256_andnot_ps(sign, v.b)};
}
/* Nearest even; every lane within int8. */
PDS_INLINE v16i v16_store_int8(int8_t *p, v16 v) {
  v16i i = {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)};
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(i.a, i.b), 0xd8);
  __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)p, bytes);
  return i;
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
