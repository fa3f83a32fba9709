/* gemm_stream.h: GEMMs of up to 16 rows, which cost what reading their weights costs. No include
 * guard: gemm_format.h includes it with GEMM_BITS 16, 8 or 4; GEMM_STREAM is the kernel's name,
 * GEMM_N(name) that of a function of this inclusion.
 *
 * A block takes two panels of one matrix, each of its warps a part of k, and the parts are added up
 * in order of warps. The tensor cores multiply 16 rows of x by 8 columns. A lane (g, t) = (lane /
 * 4, lane % 4) reads 16 bytes, columns 4 (g / 2) .. + 3 of rows of panel g % 2, so the four words
 * are its operands in four products, of column 4 (g / 2) + i for i = 0 .. 3; and its sums are those
 * of columns 4 t + i of both panels, rows g and g + 8. Which k a lane's words hold is free, as long
 * as its words of x hold the same: k 8 t .. 8 t + 7 of 32, which is 16 bytes of x. */

/* 16-byte loads of a lane for 32 k; k of a warp's step; steps that it has under way together. */
#define GEMM_LOADS (GEMM_BITS / 4)
#if GEMM_BITS == 16
#define GEMM_STEP 32u
#define GEMM_GROUP 32
#define GEMM_AHEAD 4
#elif GEMM_BITS == 8
#define GEMM_STEP 64u
#define GEMM_GROUP 64
#define GEMM_AHEAD 2
#else
#define GEMM_STEP 64u
#define GEMM_GROUP 32
#define GEMM_AHEAD 2
#endif
#define GEMM_BLOCKS (GEMM_STEP / 32)                /* of 32 k */
#define GEMM_GROUPS (GEMM_STEP / GEMM_GROUP)        /* of a scale */
#define GEMM_STEP_BYTES (GEMM_STEP * GEMM_BITS * 2) /* of a panel */

/* Column i of a lane's words: pairs of k number 2 half and 2 half + 1 of its four. */
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

/* What a lane needs of x for 32 k, number `block` of them: 8 k of two rows, zero beyond `end`. */
PDS_FN void GEMM_N(read_x)(pds_u4 *x, const uint8_t *const *row, uint32_t block, uint32_t end) {
  const uint32_t k = block * 32 + PDS_LANE % 4 * 8;
  PDS_UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    const pds_u4 none = {0, 0, 0, 0};
    x[h] = row[h] && k < end ? pds_load16(row[h] + k * 2) : none;
  }
}

/* And of the weights for a step, from `w` on. */
PDS_FN void GEMM_N(read_w)(uint32_t (*word)[4], const uint8_t *w, uint32_t step) {
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_BLOCKS * GEMM_LOADS; i++) {
    const pds_u4 v = pds_load16_stream(w + (uint64_t)step * GEMM_STEP_BYTES +
                                       i / GEMM_LOADS * (GEMM_LOADS * 256) + i % GEMM_LOADS * 64);
    word[i][0] = v.x;
    word[i][1] = v.y;
    word[i][2] = v.z;
    word[i][3] = v.w;
  }
}

#if GEMM_BITS < 16
/* And of the scales of both panels. */
PDS_FN void GEMM_N(read_scales)(gemm_u2 (*scale)[2], const uint8_t *const *from, uint32_t step) {
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_GROUPS * 2; i++)
    scale[i / 2][i % 2] = *(const gemm_u2 *)(from[i % 2] + (step * GEMM_GROUPS + i / 2) * 32);
}

/* sum += that of one group of k, times the scales of this lane's columns. */
PDS_FN void GEMM_N(add_group)(float (*sum)[4], float (*group)[4], const gemm_u2 *scale) {
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    PDS_UNROLL
    for (uint32_t panel = 0; panel < 2; panel++) {
      const uint32_t pair = i < 2 ? scale[panel].x : scale[panel].y;
      const float s = pds_widen(pair >> (i % 2 * 16) & 0xffff);
      sum[i][panel] = fmaf(group[i][panel], s, sum[i][panel]);
      sum[i][panel + 2] = fmaf(group[i][panel + 2], s, sum[i][panel + 2]);
    }
  }
}
#endif

GEMM_KERNEL(GEMM_STREAM, GEMM_STREAM_WARPS * 32) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Y);
  if (!part.rows) return;
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4, panels = gemm_panels(p);
  const uint32_t first = PDS_BLOCK_X * 2, steps = p->k_pad / GEMM_STEP, x_end = gemm_x_end(p);
  const uint32_t warps = PDS_THREADS / 32;
  /* without a second panel, its lanes read the first one, for nothing */
  const uint8_t *const pair[2] = {part.w + first * p->panel_bytes,
                                  part.w + gemm_min(first + 1, panels - 1) * p->panel_bytes};
  const uint8_t *w = (g % 2 ? pair[1] : pair[0]) + t * GEMM_LOADS * 64 + g / 2 * 16;

  /* weights of the first steps are under way before anything else is looked at */
  uint32_t word[GEMM_AHEAD][GEMM_BLOCKS * GEMM_LOADS][4];
#if GEMM_BITS < 16
  const uint8_t *const scales[2] = {gemm_scales(p, pair[0]) + t * 8,
                                    gemm_scales(p, pair[1]) + t * 8};
  gemm_u2 scale[GEMM_AHEAD][GEMM_GROUPS][2];
#endif
  PDS_UNROLL
  for (uint32_t a = 0; a < GEMM_AHEAD; a++) {
    if (PDS_WARP + a * warps < steps) {
      GEMM_N(read_w)(word[a], w, PDS_WARP + a * warps);
#if GEMM_BITS < 16
      GEMM_N(read_scales)(scale[a], scales, PDS_WARP + a * warps);
#endif
    }
  }
  const uint8_t *row[2] = {0, 0};
  PDS_UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    if (g + 8 * h < part.rows) row[h] = part.x + gemm_x_at(p, &part, g + 8 * h) * 2;
  }
  const uint32_t y_row = gemm_stream_row();
  const uint64_t y_at = y_row < part.rows ? gemm_y_at(p, &part, y_row) : 0;

  float sum[4][4] = {{0}};
  pds_u4 x[2][2]; /* of this block of 32 k and the next */
  GEMM_N(read_x)(x[0], row, PDS_WARP * GEMM_BLOCKS, x_end);
  for (uint32_t step = PDS_WARP; step < steps; step += GEMM_AHEAD * warps) {
    PDS_UNROLL
    for (uint32_t a = 0; a < GEMM_AHEAD; a++) {
      const uint32_t at = step + a * warps, then = at + GEMM_AHEAD * warps;
      if (at < steps) {
#if GEMM_BITS < 16
        float group[4][4];
#endif
        PDS_UNROLL
        for (uint32_t b = 0; b < GEMM_BLOCKS; b++) {
          const uint32_t next =
              b + 1 < GEMM_BLOCKS ? at * GEMM_BLOCKS + b + 1 : (at + warps) * GEMM_BLOCKS;
          const uint32_t turn = (a * GEMM_BLOCKS + b) % 2;
          GEMM_N(read_x)(x[1 - turn], row, next, x_end);
#if GEMM_BITS == 16
          GEMM_N(multiply)(sum, word[a], x[turn][0], x[turn][1]);
#else
          if (b * 32 % GEMM_GROUP == 0) {
            PDS_UNROLL
            for (uint32_t i = 0; i < 16; i++) group[i / 4][i % 4] = 0;
          }
          GEMM_N(multiply)(group, word[a] + b * GEMM_LOADS, x[turn][0], x[turn][1]);
          if ((b + 1) * 32 % GEMM_GROUP == 0)
            GEMM_N(add_group)(sum, group, scale[a][b * 32 / GEMM_GROUP]);
#endif
        }
        if (then < steps) {
          GEMM_N(read_w)(word[a], w, then);
#if GEMM_BITS < 16
          GEMM_N(read_scales)(scale[a], scales, then);
#endif
        }
      }
    }
  }
  gemm_stream_finish(p, &part, sum, y_at);
}

#undef GEMM_LOADS
#undef GEMM_STEP
#undef GEMM_GROUP
#undef GEMM_AHEAD
#undef GEMM_BLOCKS
#undef GEMM_GROUPS
#undef GEMM_STEP_BYTES
