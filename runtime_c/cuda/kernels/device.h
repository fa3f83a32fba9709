/* device.h: the language that the GPU's kernels are written in: C11 that is CUDA C too. NVRTC compiles
 * them for a GPU; any C compiler for the mock driver, where a block's threads take turns (mock/simt.h).
 *
 * Blocks are one-dimensional. A kernel is
 *     PDS_KERNEL(name, parameter type, most threads of a block) { ... p->rows ... }
 * It may use what is below, fmaxf, fminf, fmaf, sqrtf, fabsf, and C's own operators; no static __shared__
 * arrays (PDS_SHARED is the block's dynamic shared memory, 128-byte aligned), no libraries. Collective
 * functions (pds_sync, pds_warp_sync, pds_shfl_*, pds_mma_*, pds_ldmatrix_*) are called by all threads of
 * the block, or of the warp, together. */
#ifndef PDS_CUDA_DEVICE_H
#define PDS_CUDA_DEVICE_H

#include "params.h"

typedef struct __attribute__((aligned(16))) pds_u4 {
  uint32_t x, y, z, w;
} pds_u4;

#ifndef __CUDACC__
#include "mock/simt.h"
#else

#define PDS_FN static __device__ __forceinline__
#define PDS_UNROLL _Pragma("unroll")
#define PDS_KERNEL(name, params, threads)                                                          \
  PDS_FN void name##_body(const params *p);                                                        \
  extern "C" __global__ void __launch_bounds__(threads)                                            \
      name(const __grid_constant__ params args) {                                                  \
    name##_body(&args);                                                                            \
  }                                                                                                \
  PDS_FN void name##_body(const params *p)

extern __shared__ __align__(128) unsigned char pds_shared[];
#define PDS_SHARED pds_shared
#define PDS_TID (threadIdx.x)
#define PDS_THREADS (blockDim.x)
#define PDS_LANE (threadIdx.x & 31)
#define PDS_WARP (threadIdx.x >> 5)
#define PDS_BLOCK_X (blockIdx.x)
#define PDS_BLOCK_Y (blockIdx.y)
#define PDS_BLOCK_Z (blockIdx.z)
#define PDS_GRID_X (gridDim.x)
#define PDS_INFINITY (__int_as_float(0x7f800000))

PDS_FN void pds_sync(void) {
  __syncthreads();
}
PDS_FN void pds_warp_sync(void) {
  __syncwarp();
}
PDS_FN float pds_shfl_xor(float v, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, v, (int)mask);
}
PDS_FN float pds_shfl(float v, uint32_t lane) {
  return __shfl_sync(0xffffffffu, v, (int)lane);
}
PDS_FN uint32_t pds_shfl_xor_u32(uint32_t v, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, v, (int)mask);
}
PDS_FN uint32_t pds_shfl_u32(uint32_t v, uint32_t lane) {
  return __shfl_sync(0xffffffffu, v, (int)lane);
}

/* d += a b: m16n8k16 on bf16 (PTX ISA, mma.m16n8k16): a thread's a[0..3], b[0..1], d[0..3]. */
PDS_FN void pds_mma_bf16(float *d, const uint32_t *a, const uint32_t *b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
               "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Four 8x8 matrices of 16-bit values from shared memory (PTX ISA, ldmatrix.x4): thread i names row i % 8
 * of matrix i / 8. */
PDS_FN void pds_ldmatrix(uint32_t *r, const void *row) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
PDS_FN void pds_ldmatrix_trans(uint32_t *r, const void *row) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

/* 16 bytes from global to shared memory, in the background; zeros if not `valid`. */
PDS_FN void pds_copy16(void *shared, const void *global, int valid) {
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
PDS_FN void pds_copy_commit(void) {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/* All but the last n groups are there, for this thread; n is a constant. */
#define pds_copy_wait(n) asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory")

PDS_FN pds_u4 pds_load16(const void *global) {
  const uint4 v = *(const uint4 *)global;
  pds_u4 r = {v.x, v.y, v.z, v.w};
  return r;
}
/* The same of what nobody writes during the kernel and nobody will read again soon. */
PDS_FN pds_u4 pds_load16_stream(const void *global) {
  pds_u4 r;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(global));
  return r;
}
PDS_FN void pds_store16(void *to, pds_u4 v) {
  *(uint4 *)to = make_uint4(v.x, v.y, v.z, v.w);
}

PDS_FN float pds_float(uint32_t bits) {
  return __uint_as_float(bits);
}
PDS_FN uint32_t pds_bits(float x) {
  return __float_as_uint(x);
}
PDS_FN float pds_exp(float x) {
  return expf(x);
}
PDS_FN float pds_exp_fast(float x) { /* 2 ulp or so: for probabilities that become bf16 */
  return __expf(x);
}
PDS_FN float pds_rsqrt(float x) {
  return 1.0f / sqrtf(x);
}
PDS_FN float pds_cos(float x) {
  return cosf(x);
}
PDS_FN float pds_sin(float x) {
  return sinf(x);
}
/* lo in the lower half; rounded to nearest even. */
PDS_FN uint32_t pds_pack_bf16(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
#endif

PDS_FN float pds_widen(uint32_t bf16) {
  return pds_float(bf16 << 16);
}
PDS_FN uint16_t pds_bf16(float x) {
  return (uint16_t)pds_pack_bf16(x, 0);
}

#endif
