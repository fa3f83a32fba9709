/* gemm_bits.h: int8 and int4 weights as bf16, two at a time. All whole numbers from -128 to 127 are
 * bf16. */
#ifndef PDS_CUDA_GEMM_BITS_H
#define PDS_CUDA_GEMM_BITS_H

#ifdef __CUDACC__
/* The bytes of (high, low) that the four lower nibbles of `select` name. */
PDS_FN uint32_t gemm_bytes(uint32_t low, uint32_t high, uint32_t select) {
  return __byte_perm(low, high, select);
}
/* a b + c on both halves, rounded once. */
PDS_FN uint32_t gemm_fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
#else
PDS_FN uint32_t gemm_bytes(uint32_t low, uint32_t high, uint32_t select) {
  uint32_t r = 0;
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t from = select >> (4 * i) & 7;
    r |= ((from < 4 ? low : high) >> (from % 4 * 8) & 255) << (8 * i);
  }
  return r;
}
/* In the uses below the fp32 result is exact, so it is rounded once here too. */
PDS_FN uint32_t gemm_fma2(uint32_t a, uint32_t b, uint32_t c) {
  const float low = fmaf(pds_widen(a & 0xffff), pds_widen(b & 0xffff), pds_widen(c & 0xffff));
  const float high = fmaf(pds_widen(a >> 16), pds_widen(b >> 16), pds_widen(c >> 16));
  return pds_pack_bf16(low, high);
}
#endif

/* Bytes 0 and 1 of a pair as bytes 0 and 2 of two bf16 from 128 on, whose upper byte is 0x43: a
 * byte below 128 is then 128 more than itself. */
enum { GEMM_LOW_PAIR = 0x4140, GEMM_HIGH_PAIR = 0x4342 };

/* Two int8 of a word, those of `pair`: 128 + the lower 7 bits, less 128 or, if negative, 256, which
 * is a bf16 whose lower byte is the sign. */
PDS_FN uint32_t gemm_int8(uint32_t word, uint32_t pair) {
  const uint32_t value = gemm_bytes(word & 0x7f7f7f7fu, 0x43434343u, pair);
  const uint32_t less = gemm_bytes(word & 0x80808080u, 0xc3c3c3c3u, pair);
  return gemm_fma2(value, 0x3f803f80u, less);
}
/* Two int4 of a word of nibbles in bytes: value + 8. */
PDS_FN uint32_t gemm_int4(uint32_t nibbles, uint32_t pair) {
  return gemm_fma2(gemm_bytes(nibbles, 0x43434343u, pair), 0x3f803f80u, 0xc308c308u);
}
/* Two bf16 products, rounded to bf16: -0 + a b. */
PDS_FN uint32_t gemm_mul2(uint32_t a, uint32_t b) {
  return gemm_fma2(a, b, 0x80008000u);
}

#endif
