/* gemm.cu: y = x W^T on packed weights, and SwiGLU (params.h). Rows of 16 and fewer go to the
 * stream kernels, more to the tile kernels, both on tensor cores with bf16 x; the rest to the
 * scalar ones. launch_gemm.c chooses.
 *
 * Numbers: products are summed up in fp32, in an order that depends neither on the other rows of a
 * call nor on how many experts it has. The stream kernels add up parts of k, one a warp, of which
 * experts' blocks have fewer than others; all tile kernels go through k 16 at a time, so those of
 * one kind of tensor-core instruction (Hopper has another one for 128 rows) agree to the bit.
 * Integer weights: the stream kernels multiply a group's sum by its scale, the tile kernels round
 * weight times scale to bf16, and the scalar ones, whose products of the two are exact, do
 * neither. */
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

/* A tile of a kernel of gemm_group.h: rows from low on, panels from first on. */
typedef struct gemm_tile {
  gemm_part part;
  uint32_t low, first;
} gemm_tile;
PDS_FN gemm_tile gemm_group_at(const pds_cu_gemm *p, uint32_t tile) {
  const uint32_t matrix = p->n_holes ? gemm_hole_of(p, tile) : PDS_BLOCK_Y;
  gemm_tile at;
  at.part = gemm_part_of(p, matrix);
  if (p->n_holes) tile -= p->holes[matrix].tile;
  const uint32_t row_tiles = (at.part.rows + GEMM_GROUP_ROWS - 1) / GEMM_GROUP_ROWS;
  at.low = tile % row_tiles * GEMM_GROUP_ROWS;
  at.first = tile / row_tiles * GEMM_TILE_PANELS;
  return at;
}

/* Two products' sums for a row of x, rows 8 i + 2 t + e, as four columns. */
PDS_FN void gemm_group_four(float (*sum)[64], uint32_t i, uint32_t e, float *of) {
  of[0] = sum[0][i * 4 + e];
  of[1] = sum[0][i * 4 + 2 + e];
  of[2] = sum[1][i * 4 + e];
  of[3] = sum[1][i * 4 + 2 + e];
}

/* The ends of a tile: y_at: of each row. Where all columns are y's, and aligned, y is written from registers: lanes have four columns of a
 * panel, and four lanes a panel's row. */
PDS_FN void gemm_group_swiglu(const gemm_part *part, const uint64_t *y_at, float (*sum)[64],
                              uint32_t low, uint32_t first) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, rows = part->rows - low;
  uint16_t *y = (uint16_t *)part->y + first * 8 + PDS_WARP * 16 + g / 2 * 4;
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) {
    /* gate is with even g, up with odd g: each takes the other's for one of the two rows */
    float of[2][4], v[4];
    gemm_group_four(sum, i, 0, of[0]);
    gemm_group_four(sum, i, 1, of[1]);
    PDS_UNROLL
    for (uint32_t c = 0; c < 4; c++) {
      const float other = pds_shfl_xor(g % 2 ? of[0][c] : of[1][c], 4);
      v[c] = gemm_silu_fast(g % 2 ? other : of[0][c]) * (g % 2 ? of[1][c] : other);
    }
    const uint32_t row = i * 8 + t * 2 + g % 2;
    const gemm_u2 packed = {pds_pack_bf16(v[0], v[1]), pds_pack_bf16(v[2], v[3])};
    if (row < rows) *(gemm_u2 *)(y + y_at[row]) = packed;
  }
}

PDS_FN void gemm_group_plain(const pds_cu_gemm *p, const gemm_part *part, const uint64_t *y_at,
                             float (*sum)[64], uint32_t low, uint32_t first) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, rows = part->rows - low;
  const uint32_t col = (first + PDS_WARP * 2 + g % 2) * 16 + g / 2 * 4;
  const gemm_f4 zero = {0, 0, 0, 0};
  gemm_f4 add[8], bias = zero;
  if (p->bias) {
    bias.x = p->bias[col];
    bias.y = p->bias[col + 1];
    bias.z = p->bias[col + 2];
    bias.w = p->bias[col + 3];
  }
  PDS_UNROLL
  for (uint32_t turn = 0; turn < 4; turn++) {
    PDS_UNROLL
    for (uint32_t j = 0; j < 8; j++) { /* what is there is asked for together */
      const uint32_t row = (turn * 4 + j / 2) * 8 + t * 2 + j % 2;
      add[j] = zero;
      if (p->out == PDS_CU_OUT_ADD && row < rows)
        add[j] = *(const gemm_f4 *)((const float *)part->y + y_at[row] + col);
    }
    PDS_UNROLL
    for (uint32_t j = 0; j < 8; j++) {
      const uint32_t row = (turn * 4 + j / 2) * 8 + t * 2 + j % 2;
      float of[4];
      gemm_group_four(sum, turn * 4 + j / 2, j % 2, of);
      const gemm_f4 v = {of[0] + bias.x + add[j].x, of[1] + bias.y + add[j].y,
                         of[2] + bias.z + add[j].z, of[3] + bias.w + add[j].w};
      if (row >= rows) continue;
      if (p->out == PDS_CU_OUT_ACT) {
        const gemm_u2 packed = {pds_pack_bf16(v.x, v.y), pds_pack_bf16(v.z, v.w)};
        *(gemm_u2 *)((uint16_t *)part->y + y_at[row] + col) = packed;
      } else {
        *(gemm_f4 *)((float *)part->y + y_at[row] + col) = v;
      }
    }
  }
}

/* Otherwise through shared memory, 16 rows at a time. */
PDS_FN void gemm_group_edge(const pds_cu_gemm *p, const gemm_part *part, const uint64_t *y_at,
                            float *line, float (*sum)[64], uint32_t low, uint32_t first) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, rows = part->rows - low;
  const uint32_t cols = GEMM_TILE_PANELS * 16 / (p->swiglu ? 2 : 1);
  float *to = line + (PDS_WARP * 2 + g % 2) * 16 + g / 2 * 4;
  PDS_UNROLL
  for (uint32_t turn = 0; turn < GEMM_GROUP_ROWS / 16; turn++) {
    pds_sync();
    PDS_UNROLL
    for (uint32_t j = 0; j < 4; j++) {
      float of[4];
      gemm_group_four(sum, turn * 2 + j / 2, j % 2, of);
      const gemm_f4 v = {of[0], of[1], of[2], of[3]};
      *(gemm_f4 *)(to + (j / 2 * 8 + t * 2 + j % 2) * GEMM_TILE_LINE) = v;
    }
    pds_sync();
    for (uint32_t i = PDS_TID; i < 16 * cols; i += GEMM_TILE_THREADS) {
      const uint32_t row = turn * 16 + i / cols, in = i % cols;
      if (row >= rows) break;
      const uint32_t col = first * 16 / (p->swiglu ? 2 : 1) + in;
      const float *from = line + i / cols * GEMM_TILE_LINE, *gate = from + in / 16 * 32 + in % 16;
      const float v = p->swiglu ? gemm_silu_fast(gate[0]) * gate[16] : from[in];
      gemm_put(p, part->y, y_at[row] + col, col, v);
    }
  }
  if (gemm_panels(p) - first <= GEMM_TILE_PANELS)
    gemm_zero_pad(p, part, low, gemm_min(low + GEMM_GROUP_ROWS, part->rows));
}

PDS_FN void gemm_group_finish(const pds_cu_gemm *p, uint32_t tile, const uint64_t *y_at,
                              float *line, float (*sum)[64]) {
  const gemm_tile at = gemm_group_at(p, tile);
  const uint32_t last = at.first + GEMM_TILE_PANELS; /* y, if act, may have zeros after it */
  const int whole = last * 16 <= p->cols * (p->swiglu ? 2 : 1) && p->free & GEMM_Y_ALIGNED;
  if (!whole || (last == gemm_panels(p) && p->pad > p->cols)) {
    gemm_group_edge(p, &at.part, y_at, line, sum, at.low, at.first);
  } else if (p->swiglu) {
    gemm_group_swiglu(&at.part, y_at, sum, at.low, at.first);
  } else {
    gemm_group_plain(p, &at.part, y_at, sum, at.low, at.first);
  }
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
