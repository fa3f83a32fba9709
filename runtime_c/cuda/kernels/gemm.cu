/* gemm.cu: y = x W^T on packed weights, and SwiGLU (params.h). Rows of 16 and fewer go to the
 * stream kernels, more to the tile kernels, both on tensor cores with bf16 x; the rest to the
 * scalar ones. launch_gemm.c chooses.
 *
 * Numbers: products are summed up in fp32, in an order that depends neither on the other rows of a
 * call nor on how many experts it has. The stream kernels add up parts of k, one a warp, of which
 * experts' blocks have fewer than others; all tile kernels go through k 16 at a time, so they agree
 * to the bit. Integer weights: the stream kernels multiply a group's sum by its scale, the tile
 * kernels round weight times scale to bf16, and the scalar ones, whose products of the two are
 * exact, do neither. */
#include "device.h"

#include "gemm_bits.h"
#include "gemm_common.h"

#include "gemm_scalar.h"

/* The row whose sums this thread finishes in a stream kernel. */
PDS_FN uint32_t gemm_stream_row(void) {
  return PDS_LANE / 4 + 8 * (PDS_WARP % 2);
}

/* The end of a pair of panels in a stream kernel: sums of the block's warps, an even number of them, are added up and
 * written. A lane's sum[i] is that of column 4 t + i: row g of the first panel, of the second one,
 * then row g + 8 of both. of: which pair; parts: [warp][16][lane], shared; y_at: gemm_y_at of this thread's row. */
PDS_FN void gemm_stream_finish(const pds_cu_gemm *p, const gemm_part *part, float *parts,
                               float (*sum)[4], uint32_t of, uint64_t y_at) {
  const uint32_t warps = PDS_THREADS / 32;
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) parts[(PDS_WARP * 16 + i) * 32 + PDS_LANE] = sum[i / 4][i % 4];
  pds_sync();
  if (gemm_stream_row() < part->rows) {
    for (uint32_t pair = PDS_WARP; pair < 8; pair += warps) {
      const uint32_t i = pair / 2, half = pair % 2, in_panel = PDS_LANE % 4 * 4 + i;
      float a = 0, b = 0;
      for (uint32_t w = 0; w < warps; w++) {
        a += parts[(w * 16 + i * 4 + half * 2) * 32 + PDS_LANE];
        b += parts[(w * 16 + i * 4 + half * 2 + 1) * 32 + PDS_LANE];
      }
      if (p->swiglu) {
        const uint32_t col = of * 16 + in_panel;
        gemm_put(p, part->y, y_at + col, col, gemm_silu(a) * b);
      } else {
        const uint32_t col = of * 32 + in_panel;
        gemm_put(p, part->y, y_at + col, col, a);
        gemm_put(p, part->y, y_at + col + 16, col + 16, b);
      }
    }
  }
  if ((of + 1) * 2 >= gemm_panels(p)) gemm_zero_pad(p, part, 0, part->rows);
}

/* Two products' sums for a row of x, rows 8 i + 2 t + e, as four columns. */
PDS_FN void gemm_group_four(float (*sum)[64], uint32_t i, uint32_t e, float *of) {
  of[0] = sum[0][i * 4 + e];
  of[1] = sum[0][i * 4 + 2 + e];
  of[2] = sum[1][i * 4 + e];
  of[3] = sum[1][i * 4 + 2 + e];
}

/* The end of a kernel of gemm_group.h: lanes have four columns of a panel, and four lanes a panel's
 * row, so y is written from registers. Rows from low on, panels from first on; y_at: of each row. */
PDS_FN void gemm_group_finish(const pds_cu_gemm *p, const gemm_part *part, const uint64_t *y_at,
                              float (*sum)[64], uint32_t low, uint32_t first) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, rows = part->rows - low;
  const uint32_t panel = first + PDS_WARP * 2 + g % 2;
  const uint32_t col = (p->swiglu ? panel / 2 : panel) * 16 + g / 2 * 4;
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) {
    float of[2][4];
    gemm_group_four(sum, i, 0, of[0]);
    gemm_group_four(sum, i, 1, of[1]);
    const uint32_t row = i * 8 + t * 2;
    if (p->swiglu) {
      /* gate is with even g, up with odd g: each takes the other's for one of the two rows */
      float y[4];
      PDS_UNROLL
      for (uint32_t c = 0; c < 4; c++) {
        const float other = pds_shfl_xor(g % 2 ? of[0][c] : of[1][c], 4);
        y[c] = g % 2 ? gemm_silu(other) * of[1][c] : gemm_silu(of[0][c]) * other;
      }
      const uint32_t mine = row + g % 2;
      if (mine < rows && col < p->cols) gemm_put4(p, part->y, y_at[mine] + col, col, y);
    } else if (col < p->cols) {
      if (row < rows) gemm_put4(p, part->y, y_at[row] + col, col, of[0]);
      if (row + 1 < rows) gemm_put4(p, part->y, y_at[row + 1] + col, col, of[1]);
    }
  }
  if (gemm_panels(p) - first <= GEMM_TILE_PANELS)
    gemm_zero_pad(p, part, low, gemm_min(low + GEMM_GROUP_ROWS, part->rows));
}

#define GEMM_CAT_(a, b) a##b
#define GEMM_CAT(a, b) GEMM_CAT_(a, b)
#define GEMM_N(name) GEMM_CAT(GEMM_CAT(gemm_, name), GEMM_CAT(_, GEMM_BITS))
#define GEMM_KERNEL(name, threads) PDS_KERNEL(name, pds_cu_gemm, threads)

#define GEMM_BITS 16
#define GEMM_STREAM pds_cu_gemm_stream_bf16
#define GEMM_GROUP_TILE pds_cu_gemm_group_bf16_128
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_bf16_, rows)
#include "gemm_format.h"
#define GEMM_BITS 8
#define GEMM_STREAM pds_cu_gemm_stream_i8
#define GEMM_GROUP_TILE pds_cu_gemm_group_i8_128
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_i8_, rows)
#include "gemm_format.h"
#define GEMM_BITS 4
#define GEMM_STREAM pds_cu_gemm_stream_i4
#define GEMM_GROUP_TILE pds_cu_gemm_group_i4_128
#define GEMM_TILE(rows) GEMM_CAT(pds_cu_gemm_i4_, rows)
#include "gemm_format.h"
