/* int_avx2_sums.h: sums across the lanes of AVX2 registers, for every path that has them. */
#ifndef PDS_INT_AVX2_SUMS_H
#define PDS_INT_AVX2_SUMS_H

#include <immintrin.h>

#include "inline.h"

/* The largest of 16 uint16. */
PDS_INLINE uint32_t v16i_largest(__m256i v) {
  __m128i x = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i ones = _mm_set1_epi16(-1); /* the smallest complement is what there is */
  return 0xffffu ^ ((uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(x, ones))) & 0xffff);
}

/* The sum of 32 int8. */
PDS_INLINE int32_t v16i_sum(__m256i bytes) {
  __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)),
                                 _mm256_setzero_si256()); /* of x + 128 */
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e))) - 32 * 128;
}

#endif
