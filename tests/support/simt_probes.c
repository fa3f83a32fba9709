/* simt_probes.c: kernels that show what the emulator of a GPU's blocks does (mock/simt.h), as a library
 * of kernels for the mock driver. Each is called with a `probe` of words. */
#include <stddef.h>

#include "cuda/driver.h"
#include "cuda/kernels/device.h"

typedef struct probe {
  pds_cu_head head;
  const uint32_t *in;
  uint32_t *out;
  uint32_t n;
} probe;

/* in: a thread's a[0..3], b[0..1], d[0..3]; out: its d. */
PDS_KERNEL(mma, probe, 64) {
  const uint32_t *in = p->in + PDS_TID * 10;
  float d[4];
  PDS_UNROLL
  for (int i = 0; i < 4; i++) d[i] = pds_float(in[6 + i]);
  pds_mma_bf16(d, in, in + 4);
  for (int i = 0; i < 4; i++) p->out[PDS_TID * 4 + i] = pds_bits(d[i]);
}

/* in: 32 rows of 8 16-bit values. */
static void matrices(const probe *p, int transposed) {
  uint32_t *rows = (uint32_t *)PDS_SHARED, r[4];
  for (int i = 0; i < 4; i++) rows[PDS_LANE * 4 + i] = p->in[PDS_LANE * 4 + i];
  pds_warp_sync();
  if (transposed)
    pds_ldmatrix_trans(r, rows + PDS_LANE * 4);
  else
    pds_ldmatrix(r, rows + PDS_LANE * 4);
  for (int i = 0; i < 4; i++) p->out[PDS_LANE * 4 + i] = r[i];
}
PDS_KERNEL(ldmatrix, probe, 32) {
  matrices(p, 0);
}
PDS_KERNEL(ldmatrix_trans, probe, 32) {
  matrices(p, 1);
}

PDS_KERNEL(shuffles, probe, 64) {
  uint32_t *out = p->out + PDS_TID * 4;
  const uint32_t v = p->in[PDS_TID];
  out[0] = pds_shfl_u32(v, (PDS_LANE * 5 + 1) & 31);
  out[1] = pds_shfl_xor_u32(v, 5);
  out[2] = pds_bits(pds_shfl((float)v, 7));
  out[3] = pds_bits(pds_shfl_xor((float)v, 16));
}

/* Where each thread is, as it sees it. */
PDS_KERNEL(places, probe, 96) {
  const uint32_t block = (PDS_BLOCK_Z * 3 + PDS_BLOCK_Y) * PDS_GRID_X + PDS_BLOCK_X;
  uint32_t *out = p->out + (block * PDS_THREADS + PDS_TID) * 4;
  out[0] = block;
  out[1] = PDS_TID;
  out[2] = PDS_WARP * 32 + PDS_LANE;
  out[3] = *(const uint32_t *)(PDS_SHARED + 4 * PDS_TID); /* fresh shared memory */
}

/* Threads from n on leave; the others hand values through shared memory n times. */
PDS_KERNEL(leavers, probe, 128) {
  uint32_t *shared = (uint32_t *)PDS_SHARED;
  if (PDS_TID >= p->n) return;
  uint32_t v = p->in[PDS_TID];
  for (uint32_t i = 0; i < p->n; i++) {
    shared[PDS_TID] = v;
    pds_sync();
    v = shared[(PDS_TID + 1) % p->n];
    pds_sync();
  }
  p->out[PDS_TID] = v;
}

/* A value goes through shared memory without the barrier. */
PDS_KERNEL(unsynchronised, probe, 64) {
  uint32_t *shared = (uint32_t *)PDS_SHARED;
  shared[PDS_TID] = p->in[PDS_TID];
  p->out[PDS_TID] = shared[PDS_THREADS - 1 - PDS_TID];
}

PDS_KERNEL(two_barriers, probe, 64) {
  if (PDS_TID < p->n)
    pds_sync();
  else
    pds_sync();
}
PDS_KERNEL(half_a_warp, probe, 64) {
  uint32_t v = 1;
  if (PDS_LANE < 16) v = pds_shfl_xor_u32(v, 1);
  pds_sync();
  p->out[PDS_TID] = v;
}
PDS_KERNEL(two_functions, probe, 64) {
  if (PDS_LANE < 16)
    pds_warp_sync();
  else
    p->out[PDS_TID] = pds_shfl_u32(1, 0);
}
PDS_KERNEL(mma_by_some, probe, 64) {
  uint32_t a[6] = {0};
  float d[4] = {0};
  if (PDS_LANE == 31) return;
  pds_mma_bf16(d, a, a + 4);
  p->out[PDS_TID] = pds_bits(d[0]);
}

/* n: what to leave out: 1 waits for all but the last group, 2 does not wait, 3 does not commit. */
PDS_KERNEL(copies, probe, 32) {
  unsigned char *mine = PDS_SHARED + PDS_TID * 32;
  pds_copy16(mine, p->in + PDS_TID * 8, 1);
  pds_copy_commit();
  pds_copy16(mine + 16, p->in + PDS_TID * 8 + 4, PDS_TID % 2 == 0);
  if (p->n != 3) pds_copy_commit();
  if (p->n == 1)
    pds_copy_wait(1);
  else if (p->n != 2)
    pds_copy_wait(0);
  for (int i = 0; i < 2; i++) {
    const pds_u4 v = pds_load16(mine + 16 * i);
    pds_store16(p->out + PDS_TID * 8 + i * 4, v);
  }
}

/* n: which function gets an address that it must not have. */
PDS_KERNEL(addresses, probe, 32) {
  const unsigned char *in = (const unsigned char *)p->in + 4;
  uint32_t r[4];
  pds_u4 v = {0, 0, 0, 0};
  if (p->n == 0) v = pds_load16(in);
  if (p->n == 1) v = pds_load16_stream(in);
  if (p->n == 2) pds_store16(p->out + 1, v);
  if (p->n == 3) pds_copy16(PDS_SHARED, in, 1);
  if (p->n == 4) pds_copy16(PDS_SHARED + 8, p->in, 1);
  if (p->n == 5) pds_copy16(PDS_SHARED + 1024, p->in, 1);
  if (p->n == 6) pds_ldmatrix(r, PDS_SHARED + 2);
  if (p->n == 7) PDS_SHARED[1024 + PDS_TID] = 0;
  p->out[0] = v.x;
}

/* in: floats; out: packed with the next. */
PDS_KERNEL(pack, probe, 32) {
  for (uint32_t i = PDS_TID; i + 1 < p->n; i += PDS_THREADS)
    p->out[i] = pds_pack_bf16(pds_float(p->in[i]), pds_float(p->in[i + 1]));
}

/* A stack that is used: 4 KiB of it, across a barrier. */
PDS_KERNEL(deep, probe, 1024) {
  volatile uint32_t local[1024];
  for (uint32_t i = 0; i < 1024; i++) local[i] = i + PDS_TID;
  pds_sync();
  uint32_t sum = 0;
  for (uint32_t i = 0; i < 1024; i++) sum += local[i];
  p->out[PDS_TID] = sum;
}

#define PROBES(X)                                                                                  \
  X(mma)                                                                                           \
  X(ldmatrix)                                                                                      \
  X(ldmatrix_trans)                                                                                \
  X(shuffles)                                                                                      \
  X(places)                                                                                        \
  X(leavers)                                                                                       \
  X(unsynchronised)                                                                                \
  X(two_barriers)                                                                                  \
  X(half_a_warp)                                                                                   \
  X(two_functions)                                                                                 \
  X(mma_by_some)                                                                                   \
  X(copies)                                                                                        \
  X(addresses)                                                                                     \
  X(pack)                                                                                          \
  X(deep)

#define RUN(name)                                                                                  \
  static void body_##name(const void *p) {                                                         \
    name##_simt(p);                                                                                \
  }                                                                                                \
  static int run_##name(const void *p, const unsigned grid[3], unsigned threads,                   \
                        unsigned shared_bytes) {                                                   \
    return pds_simt_run(body_##name, p, grid, threads, shared_bytes);                              \
  }
PROBES(RUN)

#define COUNT(name) +1
typedef struct probe_image {
  char magic[8];
  uint32_t n;
  pds_twin_entry entries[PROBES(COUNT)];
} probe_image;
_Static_assert(offsetof(pds_twin_module, entries) == offsetof(probe_image, entries), "an image");

extern const probe_image pds_simt_image;
#define ENTRY(kernel) {.name = #kernel, .run = run_##kernel, .error = pds_simt_error},
__attribute__((visibility("default")))
const probe_image pds_simt_image = {PDS_TWIN_MAGIC, PROBES(COUNT), {PROBES(ENTRY)}};
