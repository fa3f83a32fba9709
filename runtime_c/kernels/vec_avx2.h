/* vec_avx2.h: 16 fp32 lanes as two AVX2 registers (AVX2 FMA F16C). The same names exist in
 * vec_avx512.h. */
#ifndef PDS_VEC_AVX2_H
#define PDS_VEC_AVX2_H

#include <immintrin.h>

#include "inline.h"

typedef struct {
  __m256 a, b;
} v16;

PDS_INLINE v16 v16_set1(float x) {
  return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
PDS_INLINE v16 v16_load(const float *p) {
  return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
PDS_INLINE void v16_store(float *p, v16 v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
/* Past the caches; p is 64-byte aligned. Other threads see it after v16_stream_end. */
PDS_INLINE void v16_stream(float *p, v16 v) {
  _mm256_stream_ps(p, v.a);
  _mm256_stream_ps(p + 8, v.b);
}
PDS_INLINE void v16_stream_end(void) {
  _mm_sfence();
}
/* The first n lanes, n in 1..16; the others load as zero and are not stored. */
PDS_INLINE v16 v16_load_n(const float *p, uint32_t n) {
  if (n == 16) return v16_load(p);
  float lanes[16] = {0};
  memcpy(lanes, p, n * sizeof *p);
  return v16_load(lanes);
}
PDS_INLINE void v16_store_n(float *p, v16 v, uint32_t n) {
  if (n == 16) {
    v16_store(p, v);
    return;
  }
  float lanes[16];
  v16_store(lanes, v);
  memcpy(p, lanes, n * sizeof *p);
}
/* All ones in lanes below n, for the half that starts at lane `first`. */
PDS_INLINE __m256 v16_below(uint32_t n, int first) {
  __m256i lane =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane));
}
/* Lanes [lo, hi) of v, `fill` elsewhere; 0 <= lo <= hi <= 16. */
PDS_INLINE v16 v16_range(v16 v, uint32_t lo, uint32_t hi, float fill) {
  __m256 f = _mm256_set1_ps(fill);
  __m256 a = _mm256_andnot_ps(v16_below(lo, 0), v16_below(hi, 0));
  __m256 b = _mm256_andnot_ps(v16_below(lo, 8), v16_below(hi, 8));
  return (v16){_mm256_blendv_ps(f, v.a, a), _mm256_blendv_ps(f, v.b, b)};
}

PDS_INLINE v16 v16_add(v16 x, v16 y) {
  return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
PDS_INLINE v16 v16_sub(v16 x, v16 y) {
  return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
PDS_INLINE v16 v16_mul(v16 x, v16 y) {
  return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
PDS_INLINE v16 v16_div(v16 x, v16 y) {
  return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
PDS_INLINE v16 v16_fma(v16 x, v16 y, v16 z) {
  return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
/* max and min that give y where y is NaN. */
PDS_INLINE v16 v16_max(v16 x, v16 y) {
  return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
PDS_INLINE v16 v16_min(v16 x, v16 y) {
  return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
PDS_INLINE float v16_reduce_max(v16 v) {
  __m256 half = _mm256_max_ps(v.a, v.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
PDS_INLINE float v16_reduce_add(v16 v) {
  __m256 half = _mm256_add_ps(v.a, v.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
PDS_INLINE v16 v16_round(v16 v) {
  return (v16){_mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
               _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/* p * 2^n, n integral in -160..160: in two steps, each a normal power of two, so that results
 * may be denormal or Inf. */
PDS_INLINE __m256 v16_scale2_half(__m256 p, __m256 n) {
  __m256i i = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(i, 1),
          rest = _mm256_sub_epi32(i, first);
  __m256i bias = _mm256_set1_epi32(127);
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
PDS_INLINE v16 v16_scale2(v16 p, v16 n) {
  return (v16){v16_scale2_half(p.a, n.a), v16_scale2_half(p.b, n.b)};
}

/* The upper 16 bits of each 32-bit lane, rounded to nearest even; NaN made quiet. */
PDS_INLINE __m256i v16_to_bf16_half(__m256 v) {
  __m256i u = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
PDS_INLINE void v16_store_bf16(uint16_t *p, v16 v) {
  __m256i packed = _mm256_packus_epi32(v16_to_bf16_half(v.a), v16_to_bf16_half(v.b));
  _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
PDS_INLINE void v16_store_bf16_n(uint16_t *p, v16 v, uint32_t n) {
  if (n == 16) {
    v16_store_bf16(p, v);
    return;
  }
  uint16_t lanes[16];
  v16_store_bf16(lanes, v);
  memcpy(p, lanes, n * sizeof *p);
}

/* One 64-byte row of a packed fp32 panel, and its multiply-add with a broadcast k of x. */
typedef v16 w_f32;
PDS_INLINE w_f32 w_f32_load(const void *p) {
  return v16_load(p);
}
typedef __m256 x_f32;
PDS_INLINE x_f32 x_f32_load(const void *p) {
  return _mm256_broadcast_ss(p);
}
PDS_INLINE v16 v16_dot_f32(v16 acc, w_f32 w, x_f32 x) {
  return (v16){_mm256_fmadd_ps(w.a, x, acc.a), _mm256_fmadd_ps(w.b, x, acc.b)};
}

/* The same of a packed bf16 panel: pairs of k. */
typedef struct {
  __m256 even, odd;
} x_bf16;
typedef struct {
  x_bf16 a, b;
} w_bf16;
PDS_INLINE x_bf16 v16_pair(__m256i u) {
  return (x_bf16){_mm256_castsi256_ps(_mm256_slli_epi32(u, 16)),
                  _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32((int)0xffff0000u)))};
}
PDS_INLINE w_bf16 w_bf16_load(const void *p) {
  const __m256i *row = p;
  return (w_bf16){v16_pair(_mm256_load_si256(row)), v16_pair(_mm256_load_si256(row + 1))};
}
PDS_INLINE x_bf16 x_bf16_load(const void *p) {
  return v16_pair(_mm256_set1_epi32(pds_load_word(p)));
}
PDS_INLINE v16 v16_dot_bf16(v16 acc, w_bf16 w, x_bf16 x) {
  return (v16){_mm256_fmadd_ps(w.a.odd, x.odd, _mm256_fmadd_ps(w.a.even, x.even, acc.a)),
               _mm256_fmadd_ps(w.b.odd, x.odd, _mm256_fmadd_ps(w.b.even, x.even, acc.b))};
}

/* 4 half rows from `from` on (8 dimensions of 8 tokens) to 4 half rows (8 tokens of 8 dimensions):
 * a 64-bit column holds two dimensions of two tokens; it moves whole, then its middle halves swap. */
PDS_INLINE void v16_transpose_half(const unsigned char *from, unsigned char *to) {
  const __m256i swap = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  __m256i r[4], pair[4];
  PDS_UNROLL
  for (int i = 0; i < 4; i++) r[i] = _mm256_loadu_si256((const __m256i *)(from + 64 * i));
  pair[0] = _mm256_unpacklo_epi64(r[0], r[1]);
  pair[1] = _mm256_unpackhi_epi64(r[0], r[1]);
  pair[2] = _mm256_unpacklo_epi64(r[2], r[3]);
  pair[3] = _mm256_unpackhi_epi64(r[2], r[3]);
  r[0] = _mm256_permute2x128_si256(pair[0], pair[2], 0x20);
  r[1] = _mm256_permute2x128_si256(pair[1], pair[3], 0x20);
  r[2] = _mm256_permute2x128_si256(pair[0], pair[2], 0x31);
  r[3] = _mm256_permute2x128_si256(pair[1], pair[3], 0x31);
  PDS_UNROLL
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_si256((__m256i *)(to + 64 * i), _mm256_shuffle_epi8(r[i], swap));
  }
}

/* 8 packed bf16 rows (16 dimensions) of 16 tokens to 8 rows (16 tokens) of 16 dimensions; rows are
 * 64 bytes. */
PDS_INLINE void v16_transpose_bf16(const unsigned char *from, unsigned char *to) {
  for (int half = 0; half < 2; half++) { /* dimensions */
    v16_transpose_half(from + 256 * half, to + 32 * half);
    v16_transpose_half(from + 256 * half + 32, to + 256 + 32 * half);
  }
}

/* See vec_avx512.h: 16 registers of half the width. */
#define TILE_MANY 0
enum { TILE_ROWS = 4 };
#define TILE_PANELS(rows) ((rows) == 1 ? 4 : (rows) == 2 ? 2 : 1)

#include "int_avx2.h"

#endif
