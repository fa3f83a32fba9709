/* device.h: the language that the GPU's kernels are written in: C11 that is CUDA C too. NVRTC compiles
 * them for a GPU; any C compiler for the mock driver, where a block's threads take turns (mock/simt.h).
 *
 * Blocks are one-dimensional. A kernel is
 *     PDS_KERNEL(name, parameter type, most threads of a block) { ... p->rows ... }
 * It may use what is below, fmaxf, fminf, fmaf, sqrtf, fabsf, and C's own operators; no static __shared__
 * arrays (PDS_SHARED is the block's dynamic shared memory, 1024-byte aligned), no libraries. Collective
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

extern __shared__ __align__(1024) unsigned char pds_shared[];
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

/* Matrix products of four warps together, in the background (PTX ISA, wgmma): Hopper has them. Elsewhere
 * it is pds_mma_bf16's, at once. d = a x^T, or d += if `add`: m64n128k16, each warp with its 16 of the 64 rows of a: a
 * thread's a[0..3], and d[4 i .. 4 i + 3] for rows 8 i .. 8 i + 7 of x, are as in pds_mma_bf16. x: 128
 * rows of 128 bytes in shared memory, from a multiple of 1024 bytes on, plus 32 bytes for each 16 k; 16
 * bytes number i of row r are at number i ^ (r % 8). */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PDS_GROUP_MMA 1
PDS_FN void pds_group_mma(float *d, const uint32_t *a, const void *x, int add) {
  /* 128-byte swizzle, 1024 bytes from 8 rows to the next */
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(x);
  const uint64_t where = 1ull << 62 | 64ull << 32 | 1ull << 16 | (at >> 4 & 0x3fff);
  asm volatile("{ .reg .pred yes; setp.ne.s32 yes, %69, 0; "
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
               "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
               "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
               "{%64,%65,%66,%67}, %68, yes, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]),
                 "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                 "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
                 "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
                 "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                 "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
                 "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
                 "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]),
                 "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(where), "r"(add)
               : "memory");
}
/* Before the first of some products, once a and d are written. */
PDS_FN void pds_group_begin(void) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
PDS_FN void pds_group_commit(void) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All but the last n commits are done; n is a constant. */
#define pds_group_wait(n) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory")
/* What this thread brought to shared memory, and waited for, is there for pds_group_mma after a
 * pds_sync. */
PDS_FN void pds_group_publish(void) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

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
PDS_FN float pds_div_fast(float a, float b) { /* 2 ulp; b < 2^126, else 0 */
  return __fdividef(a, b);
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

#ifndef PDS_GROUP_MMA
PDS_FN void pds_group_mma(float *d, const uint32_t *a, const void *x, int add) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4;
  const uint32_t at = (uint32_t)((const unsigned char *)x - PDS_SHARED);
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) {
    const uint32_t row = (at & ~127u) + (i * 8 + g) * 128, piece = at / 16 % 8;
    const uint32_t b[2] = {*(const uint32_t *)(PDS_SHARED + row + (piece ^ g) * 16 + t * 4),
                           *(const uint32_t *)(PDS_SHARED + row + ((piece + 1) ^ g) * 16 + t * 4)};
    for (uint32_t j = 0; j < 4; j++) d[i * 4 + j] = add ? d[i * 4 + j] : 0;
    pds_mma_bf16(d + i * 4, a, b);
  }
}
PDS_FN void pds_group_begin(void) {}
PDS_FN void pds_group_commit(void) {}
#define pds_group_wait(n) ((void)(n))
PDS_FN void pds_group_publish(void) {}
#endif

PDS_FN float pds_widen(uint32_t bf16) {
  return pds_float(bf16 << 16);
}
PDS_FN uint16_t pds_bf16(float x) {
  return (uint16_t)pds_pack_bf16(x, 0);
}

#endif
