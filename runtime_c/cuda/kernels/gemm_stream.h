/* gemm_stream.h: GEMMs of up to 16 rows, which cost what reading their weights costs. No include guard:
 * gemm.cu includes it with GEMM_BITS 16, 8 and 4; GEMM_STREAM is the kernel's name, GEMM_N(name) that of
 * a function of this inclusion.
 *
 * A block takes two panels of one matrix, each of its warps a part of k, and the parts are added up in
 * order of warps. The tensor cores multiply 16 rows of x by 8 columns. A lane (g, t) = (lane / 4,
 * lane % 4) reads 16 bytes, columns 4 (g / 2) .. + 3 of row 't' of panel g % 2, so the four words are
 * its operands in four products, of column 4 (g / 2) + i for i = 0 .. 3; and its sums are those of
 * columns 4 t + i of both panels, rows g and g + 8. Which k a lane's words hold is free, as long as its
 * words of x hold the same: k 8 t .. 8 t + 7 of 32, which is 16 bytes of x. */

/* 16-byte loads of a lane for 32 k; k of a warp's step; steps that it has under way together. */
#define GEMM_LOADS (GEMM_BITS / 4)
#if GEMM_BITS == 16
#define GEMM_STEP 32u
#define GEMM_GROUP 32
#define GEMM_AHEAD 4
#elif GEMM_BITS == 8
#define GEMM_STEP 64u
#define GEMM_GROUP 64
#define GEMM_AHEAD 4
#else
#define GEMM_STEP 64u
#define GEMM_GROUP 32
#define GEMM_AHEAD 4
#endif
#define GEMM_BLOCKS (GEMM_STEP / 32)                /* of 32 k */
#define GEMM_GROUPS (GEMM_STEP / GEMM_GROUP)        /* of a scale */
#define GEMM_STEP_BYTES (GEMM_STEP * GEMM_BITS * 2) /* of a panel */

/* Columns i of a lane's words: k pairs `half` * 2 and + 1 of its four. */
PDS_FN void GEMM_N(operand)(const uint32_t (*w)[4], uint32_t i, uint32_t half, uint32_t *b) {
#if GEMM_BITS == 16
  b[0] = w[2 * half][i];
  b[1] = w[2 * half + 1][i];
#elif GEMM_BITS == 8
  b[0] = gemm_int8(w[half][i], GEMM_LOW_PAIR);
  b[1] = gemm_int8(w[half][i], GEMM_HIGH_PAIR);
#else
  const uint32_t nibbles = w[0][i] >> (4 * half) & 0x0f0f0f0fu;
  b[0] = gemm_int4(nibbles, GEMM_LOW_PAIR);
  b[1] = gemm_int4(nibbles, GEMM_HIGH_PAIR);
#endif
}

/* sum += 32 k of 16 rows, x0 of row g and x1 of row g + 8, and of 32 columns. */
PDS_FN void GEMM_N(multiply)(float (*sum)[4], const uint32_t (*w)[4], pds_u4 x0, pds_u4 x1) {
  const uint32_t a[2][4] = {{x0.x, x1.x, x0.y, x1.y}, {x0.z, x1.z, x0.w, x1.w}};
  PDS_UNROLL
  for (uint32_t half = 0; half < 2; half++) {
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      uint32_t b[2];
      GEMM_N(operand)(w, i, half, b);
      pds_mma_bf16(sum[i], a[half], b);
    }
  }
}

/* A lane's part of k [0, end) of two rows of x: 8 k from k, or zeros. */
PDS_FN pds_u4 GEMM_N(x_of)(const uint8_t *row, uint32_t k, uint32_t end) {
  pds_u4 v = {0, 0, 0, 0};
  if (row && k < end) v = pds_load16(row + k * 2);
  return v;
}

GEMM_KERNEL(GEMM_STREAM, GEMM_STREAM_WARPS * 32) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Y);
  if (!part.rows) return;
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, panels = gemm_panels(p);
  const uint32_t first = PDS_BLOCK_X * 2, steps = p->k_pad / GEMM_STEP, x_end = gemm_x_end(p);
  /* without a second panel, its lanes read the first one, for nothing */
  const uint8_t *panel = part.w + gemm_min(first + g % 2, panels - 1) * p->panel_bytes;
  const uint8_t *w = panel + t * GEMM_LOADS * 64 + g / 2 * 16;
  const uint8_t *row[2] = {0, 0};
  PDS_UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    if (g + 8 * h < part.rows) row[h] = part.x + gemm_x_at(p, &part, g + 8 * h) * 2;
  }
#if GEMM_BITS < 16
  /* of this lane's columns, in both panels */
  const uint8_t *scale0 = gemm_scales(p, part.w + first * p->panel_bytes) + t * 8;
  const uint8_t *scale1 =
      gemm_scales(p, part.w + gemm_min(first + 1, panels - 1) * p->panel_bytes) + t * 8;
#endif

  float sum[4][4] = {{0}};
  for (uint32_t step = PDS_WARP; step < steps; step += GEMM_AHEAD * GEMM_STREAM_WARPS) {
    uint32_t word[GEMM_AHEAD][GEMM_BLOCKS * GEMM_LOADS][4];
#if GEMM_BITS < 16
    gemm_u2 scale[GEMM_AHEAD][GEMM_GROUPS][2];
#endif
    PDS_UNROLL
    for (uint32_t a = 0; a < GEMM_AHEAD; a++) {
      const uint32_t at = step + a * GEMM_STREAM_WARPS;
      if (at < steps) {
        PDS_UNROLL
        for (uint32_t i = 0; i < GEMM_BLOCKS * GEMM_LOADS; i++) {
          const pds_u4 v =
              pds_load16_stream(w + (uint64_t)at * GEMM_STEP_BYTES +
                                i / GEMM_LOADS * (GEMM_LOADS * 256) + i % GEMM_LOADS * 64);
          word[a][i][0] = v.x;
          word[a][i][1] = v.y;
          word[a][i][2] = v.z;
          word[a][i][3] = v.w;
        }
#if GEMM_BITS < 16
        PDS_UNROLL
        for (uint32_t i = 0; i < GEMM_GROUPS; i++) {
          scale[a][i][0] = *(const gemm_u2 *)(scale0 + (at * GEMM_GROUPS + i) * 32);
          scale[a][i][1] = *(const gemm_u2 *)(scale1 + (at * GEMM_GROUPS + i) * 32);
        }
#endif
      }
    }
    PDS_UNROLL
    for (uint32_t a = 0; a < GEMM_AHEAD; a++) {
      const uint32_t at = step + a * GEMM_STREAM_WARPS;
      if (at < steps) {
        pds_u4 x[GEMM_BLOCKS][2];
        PDS_UNROLL
        for (uint32_t i = 0; i < GEMM_BLOCKS; i++) {
          x[i][0] = GEMM_N(x_of)(row[0], at * GEMM_STEP + i * 32 + t * 8, x_end);
          x[i][1] = GEMM_N(x_of)(row[1], at * GEMM_STEP + i * 32 + t * 8, x_end);
        }
#if GEMM_BITS == 16
        GEMM_N(multiply)(sum, word[a], x[0][0], x[0][1]);
#else
        PDS_UNROLL
        for (uint32_t i = 0; i < GEMM_GROUPS; i++) {
          float of_group[4][4] = {{0}};
          PDS_UNROLL
          for (uint32_t b = i * GEMM_GROUP / 32; b < (i + 1) * GEMM_GROUP / 32; b++) {
            GEMM_N(multiply)(of_group, word[a] + b * GEMM_LOADS, x[b][0], x[b][1]);
          }
          PDS_UNROLL
          for (uint32_t c = 0; c < 4; c++) {
            const uint32_t shift = c % 2 * 16;
            const float s0 =
                pds_widen((c < 2 ? scale[a][i][0].x : scale[a][i][0].y) >> shift & 0xffff);
            const float s1 =
                pds_widen((c < 2 ? scale[a][i][1].x : scale[a][i][1].y) >> shift & 0xffff);
            sum[c][0] = fmaf(of_group[c][0], s0, sum[c][0]);
            sum[c][1] = fmaf(of_group[c][1], s1, sum[c][1]);
            sum[c][2] = fmaf(of_group[c][2], s0, sum[c][2]);
            sum[c][3] = fmaf(of_group[c][3], s1, sum[c][3]);
          }
        }
#endif
      }
    }
  }
  gemm_stream_finish(p, &part, sum);
}

#undef GEMM_LOADS
#undef GEMM_STEP
#undef GEMM_GROUP
#undef GEMM_AHEAD
#undef GEMM_BLOCKS
#undef GEMM_GROUPS
#undef GEMM_STEP_BYTES
