/* gemm.cu: y = x W^T on packed weights, and SwiGLU (params.h). Rows of 16 and fewer go to the stream
 * kernels, more to the tile kernels, both on tensor cores with bf16 x; the rest to the scalar ones.
 * launch_gemm.c chooses.
 *
 * Numbers: products are summed up in fp32, in an order that depends neither on the other rows of a call
 * nor on its holes: the stream kernels add up parts of k, one a warp; the tile kernels 16 k after 16 k.
 * Integer weights: the stream kernels multiply a group's sum by its scale, the tile kernels round
 * weight times scale to bf16, and the scalar ones round neither. */
#include "device.h"

#include "gemm_bits.h"
#include "gemm_common.h"

#include "gemm_scalar.h"

/* The end of a stream kernel: sums of the block's warps are added up and written. A lane's sum[i] is
 * that of column 4 t + i: row g of the first panel, of the second one, then row g + 8 of both. */
PDS_FN void gemm_stream_finish(const pds_cu_gemm *p, const gemm_part *part, float (*sum)[4]) {
  float *parts = (float *)PDS_SHARED; /* [warp][16][lane] */
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) parts[(PDS_WARP * 16 + i) * 32 + PDS_LANE] = sum[i / 4][i % 4];
  pds_sync();
  const uint32_t i = PDS_WARP / 2, half = PDS_WARP % 2;
  const uint32_t row = PDS_LANE / 4 + 8 * half, in_panel = PDS_LANE % 4 * 4 + i;
  float total[2] = {0, 0};
  if (row < part->rows) {
    PDS_UNROLL
    for (uint32_t w = 0; w < GEMM_STREAM_WARPS; w++) {
      total[0] += parts[(w * 16 + i * 4 + half * 2) * 32 + PDS_LANE];
      total[1] += parts[(w * 16 + i * 4 + half * 2 + 1) * 32 + PDS_LANE];
    }
    const uint64_t at = gemm_y_at(p, part, row);
    if (p->swiglu) {
      const uint32_t col = PDS_BLOCK_X * 16 + in_panel;
      gemm_put(p, part->y, at + col, col, gemm_silu(total[0]) * total[1]);
    } else {
      const uint32_t col = PDS_BLOCK_X * 32 + in_panel;
      gemm_put(p, part->y, at + col, col, total[0]);
      gemm_put(p, part->y, at + col + 16, col + 16, total[1]);
    }
  }
  if ((PDS_BLOCK_X + 1) * 2 >= gemm_panels(p)) gemm_zero_pad(p, part, 0, part->rows);
}

#define GEMM_CAT_(a, b) a##b
#define GEMM_CAT(a, b) GEMM_CAT_(a, b)
#define GEMM_N(name) GEMM_CAT(GEMM_CAT(gemm_, name), GEMM_CAT(_, GEMM_BITS))
#define GEMM_KERNEL(name, threads) PDS_KERNEL(name, pds_cu_gemm, threads)

#define GEMM_BITS 16
#define GEMM_STREAM pds_cu_gemm_stream_bf16
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_bf16_, rows)
#include "gemm_format.h"
#define GEMM_BITS 8
#define GEMM_STREAM pds_cu_gemm_stream_i8
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_i8_, rows)
#include "gemm_format.h"
#define GEMM_BITS 4
#define GEMM_STREAM pds_cu_gemm_stream_i4
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_i4_, rows)
#include "gemm_format.h"
