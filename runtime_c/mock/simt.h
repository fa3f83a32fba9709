/* simt.h: the language of cuda/kernels/device.h for any C compiler. A block's threads take turns as
 * fibers on the calling thread; mistakes that a GPU would not always show are errors with a text, and
 * what is read too early reads as 0xff bytes. docs/mock-driver.md says what is found. */
#ifndef PDS_MOCK_SIMT_H
#define PDS_MOCK_SIMT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* --- for launchers --- */

typedef void (*pds_simt_fn)(const void *params);
/* Runs every block of the grid, one after the other. 0; or -1, with the calling thread's
 * pds_simt_error(). Shared memory begins as 0xff bytes in each block. */
int pds_simt_run(pds_simt_fn fn, const void *params, const unsigned grid[3], unsigned threads,
                 unsigned shared_bytes);
const char *pds_simt_error(void);
/* What pds_simt_error() says from now on, in this thread; returns -1. */
int pds_simt_refuse(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* --- what device.h promises --- */

/* The block that runs, and the thread whose turn it is. */
typedef struct pds_simt_block {
  unsigned index[3], grid[3], threads, shared_bytes;
  unsigned char *shared;
} pds_simt_block;
typedef struct pds_simt_thread {
  const pds_simt_block *block;
  uint32_t tid;
} pds_simt_thread;
extern _Thread_local pds_simt_thread *pds_simt_self;

#define PDS_FN __attribute__((unused)) static inline
#define PDS_UNROLL
/* The function is <name>_simt, and <name>_threads the most threads of a block. */
#define PDS_KERNEL(name, params, threads)                                                          \
  enum { name##_threads = (threads) };                                                             \
  static void name##_body(const params *p);                                                        \
  void name##_simt(const params *p);                                                               \
  void name##_simt(const params *p) {                                                              \
    name##_body(p);                                                                                \
  }                                                                                                \
  static void name##_body(const params *p)

#define PDS_SHARED (pds_simt_self->block->shared)
#define PDS_TID (pds_simt_self->tid)
#define PDS_THREADS (pds_simt_self->block->threads)
#define PDS_LANE (pds_simt_self->tid & 31)
#define PDS_WARP (pds_simt_self->tid >> 5)
#define PDS_BLOCK_X (pds_simt_self->block->index[0])
#define PDS_BLOCK_Y (pds_simt_self->block->index[1])
#define PDS_BLOCK_Z (pds_simt_self->block->index[2])
#define PDS_GRID_X (pds_simt_self->block->grid[0])
#define PDS_INFINITY INFINITY

/* Where in a kernel's source a thread is: errors name it, and collective functions are called by all
 * from one line. */
typedef struct pds_simt_place {
  const char *file;
  int line;
} pds_simt_place;
#define PDS_SIMT_HERE ((pds_simt_place){__FILE__, __LINE__})

void pds_simt_sync(pds_simt_place here);
void pds_simt_warp_sync(pds_simt_place here);
uint32_t pds_simt_shfl(pds_simt_place here, uint32_t v, uint32_t lane);
uint32_t pds_simt_shfl_xor(pds_simt_place here, uint32_t v, uint32_t mask);
void pds_simt_mma_bf16(pds_simt_place here, float *d, const uint32_t *a, const uint32_t *b);
void pds_simt_ldmatrix(pds_simt_place here, uint32_t *r, const void *row, int transposed);
void pds_simt_copy16(pds_simt_place here, void *shared, const void *global, int valid);
void pds_simt_copy_commit(void);
void pds_simt_copy_wait(unsigned n);
void pds_simt_aligned(pds_simt_place here, const void *at, const char *what);

#define pds_sync() pds_simt_sync(PDS_SIMT_HERE)
#define pds_warp_sync() pds_simt_warp_sync(PDS_SIMT_HERE)
#define pds_shfl_u32(v, lane) pds_simt_shfl(PDS_SIMT_HERE, v, lane)
#define pds_shfl_xor_u32(v, mask) pds_simt_shfl_xor(PDS_SIMT_HERE, v, mask)
#define pds_shfl(v, lane) pds_float(pds_simt_shfl(PDS_SIMT_HERE, pds_bits(v), lane))
#define pds_shfl_xor(v, mask) pds_float(pds_simt_shfl_xor(PDS_SIMT_HERE, pds_bits(v), mask))
#define pds_mma_bf16(d, a, b) pds_simt_mma_bf16(PDS_SIMT_HERE, d, a, b)
#define pds_ldmatrix(r, row) pds_simt_ldmatrix(PDS_SIMT_HERE, r, row, 0)
#define pds_ldmatrix_trans(r, row) pds_simt_ldmatrix(PDS_SIMT_HERE, r, row, 1)
#define pds_copy16(shared, global, valid) pds_simt_copy16(PDS_SIMT_HERE, shared, global, valid)
#define pds_copy_commit() pds_simt_copy_commit()
#define pds_copy_wait(n) pds_simt_copy_wait(n)
#define pds_load16(global) pds_simt_load16(PDS_SIMT_HERE, global)
#define pds_load16_stream(global) pds_simt_load16(PDS_SIMT_HERE, global)
#define pds_store16(to, v) pds_simt_store16(PDS_SIMT_HERE, to, v)

PDS_FN pds_u4 pds_simt_load16(pds_simt_place here, const void *from) {
  pds_u4 r;
  pds_simt_aligned(here, from, "pds_load16");
  memcpy(&r, from, sizeof r);
  return r;
}
PDS_FN void pds_simt_store16(pds_simt_place here, void *to, pds_u4 v) {
  pds_simt_aligned(here, to, "pds_store16");
  memcpy(to, &v, sizeof v);
}

PDS_FN float pds_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
PDS_FN uint32_t pds_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
PDS_FN float pds_exp(float x) {
  return expf(x);
}
PDS_FN float pds_exp_fast(float x) {
  return expf(x);
}
PDS_FN float pds_div_fast(float a, float b) {
  return a / b;
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
/* A NaN becomes 0x7fff, as on a GPU. */
PDS_FN uint32_t pds_simt_bf16(float x) {
  const uint32_t bits = pds_bits(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
PDS_FN uint32_t pds_pack_bf16(float lo, float hi) {
  return pds_simt_bf16(lo) | pds_simt_bf16(hi) << 16;
}

#endif
