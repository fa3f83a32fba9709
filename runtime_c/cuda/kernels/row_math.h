/* row_math.h: what kernels that work row by row share: sums over a warp and a block, four floats at a
 * time, values that become act. */
#ifndef PDS_CUDA_ROW_MATH_H
#define PDS_CUDA_ROW_MATH_H

#include "device.h"

enum { PDS_BLOCK_WARPS = 8 }; /* most warps of a block that uses pds_block_sum */

typedef struct __attribute__((aligned(16))) pds_f4 {
  float x[4];
} pds_f4;

typedef struct __attribute__((aligned(8))) pds_u2 {
  uint32_t x, y;
} pds_u2;

PDS_FN pds_u2 pds_load8(const void *from) {
  return *(const pds_u2 *)from;
}
PDS_FN pds_f4 pds_load_f4(const float *from) {
  const pds_u4 v = pds_load16(from);
  pds_f4 r;
  r.x[0] = pds_float(v.x);
  r.x[1] = pds_float(v.y);
  r.x[2] = pds_float(v.z);
  r.x[3] = pds_float(v.w);
  return r;
}
/* The first n of four floats, n at most 4; the others are zero, and are not read. */
PDS_FN pds_f4 pds_load_some(const float *from, uint32_t n) {
  if (n >= 4) return pds_load_f4(from);
  pds_f4 r;
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) r.x[i] = i < n ? from[i] : 0;
  return r;
}
PDS_FN void pds_store_f4(float *to, pds_f4 v) {
  pds_u4 r;
  r.x = pds_bits(v.x[0]);
  r.y = pds_bits(v.x[1]);
  r.z = pds_bits(v.x[2]);
  r.w = pds_bits(v.x[3]);
  pds_store16(to, r);
}

/* The product, rounded, that no compiler fuses with a sum. */
PDS_FN float pds_product(float a, float b) {
#ifdef __CUDACC__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

PDS_FN float pds_warp_sum(float v) {
  PDS_UNROLL
  for (uint32_t m = 16; m; m /= 2) v += pds_shfl_xor(v, m);
  return v;
}
PDS_FN float pds_warp_max(float v) {
  PDS_UNROLL
  for (uint32_t m = 16; m; m /= 2) v = fmaxf(v, pds_shfl_xor(v, m));
  return v;
}
/* The same for all threads. `room`: PDS_BLOCK_WARPS floats of shared memory. */
PDS_FN float pds_block_sum(float v, float *room) {
  v = pds_warp_sum(v);
  pds_sync();
  if (PDS_LANE == 0) room[PDS_WARP] = v;
  pds_sync();
  float sum = 0;
  for (uint32_t w = 0; w < PDS_THREADS / 32; w++) sum += room[w];
  return sum;
}

PDS_FN float pds_block_max(float v, float *room) {
  v = pds_warp_max(v);
  pds_sync();
  if (PDS_LANE == 0) room[PDS_WARP] = v;
  pds_sync();
  float top = room[0];
  for (uint32_t w = 1; w < PDS_THREADS / 32; w++) top = fmaxf(top, room[w]);
  return top;
}

/* Element i of a row of act. */
PDS_FN void pds_store_act(void *y, uint64_t i, float v, uint32_t act) {
  if (act == PDS_CU_BF16)
    ((uint16_t *)y)[i] = pds_bf16(v);
  else
    ((float *)y)[i] = v;
}
/* Elements i and i + 1; i is even. */
PDS_FN void pds_store_act2(void *y, uint64_t i, float a, float b, uint32_t act) {
  if (act == PDS_CU_BF16) {
    ((uint32_t *)y)[i / 2] = pds_pack_bf16(a, b);
  } else {
    ((float *)y)[i] = a;
    ((float *)y)[i + 1] = b;
  }
}
PDS_FN float pds_load_act(const void *x, uint64_t i, uint32_t act) {
  return act == PDS_CU_BF16 ? pds_widen(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

#endif
