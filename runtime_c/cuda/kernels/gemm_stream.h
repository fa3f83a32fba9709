/* gemm_stream.h: GEMMs of up to 16 rows, which cost what reading their weights costs. No include
 * guard: gemm_format.h includes it with GEMM_BITS 16, 8 or 4; GEMM_STREAM is the kernel's name,
 * GEMM_N(name) that of a function of this inclusion.
 *
 * A block takes some pairs of panels of one matrix, one after the other; of each, its warps take
 * steps of k in turn, and their sums are added up in order of warps. What a warp needs of weights
 * and x comes to its own part of shared memory, some steps ahead and across pairs, so that the
 * block's requests never end; the weights' first requests go out before anything else is looked at.
 *
 * The tensor cores multiply 16 rows of x by 8 columns. A lane (g, t) = (lane / 4, lane % 4) reads
 * 16 bytes, columns 4 (g / 2) .. + 3 of rows of panel g % 2, so the four words are its operands in
 * four products, of column 4 (g / 2) + i for i = 0 .. 3; and its sums are those of columns 4 t + i
 * of both panels, rows g and g + 8. Which k a lane's words hold is free, as long as its words of x
 * hold the same: k 8 t .. 8 t + 7 of 32, which is 16 bytes of x. */

#define GEMM_LOADS (GEMM_BITS / 4) /* of 16 bytes, of a lane, for 32 k of a pair */
#define GEMM_STEP GEMM_STREAM_STEP(GEMM_BITS)
#define GEMM_BLOCKS (GEMM_STEP / 32) /* of 32 k */
#define GEMM_GROUP (GEMM_BITS == 8 ? 64 : 32)
#define GEMM_GROUPS (GEMM_STEP / GEMM_GROUP)    /* of a scale */
#define GEMM_CHUNKS (GEMM_STEP * GEMM_BITS / 8) /* 16 bytes of a panel, of a step */
#define GEMM_SLOT (GEMM_STREAM_WEIGHTS(GEMM_BITS) + GEMM_STREAM_SCALES(GEMM_BITS))

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

/* Where a panel's 16 bytes number `chunk` of a step are: moved so that the eight lanes that read
 * together, two panels and four t, find all banks. */
PDS_FN uint32_t GEMM_N(stream_chunk)(uint32_t chunk, uint32_t panel) {
  const uint32_t far = chunk >> (GEMM_BITS == 16 ? 4 : 3) & 3;
  return (panel * GEMM_CHUNKS + (chunk ^ (far << 1) ^ panel)) * 16;
}

/* A pair of panels' weights and scales of a step, in the background. */
PDS_FN void GEMM_N(fetch_w)(const pds_cu_gemm *p, uint8_t *to, const uint8_t *w, uint32_t pair,
                            uint32_t step) {
  /* without a second panel, the first one, for nothing */
  const uint32_t last = gemm_panels(p) - 1;
  const uint8_t *const from[2] = {w + pair * 2 * p->panel_bytes,
                                  w + gemm_min(pair * 2 + 1, last) * p->panel_bytes};
  const uint32_t at = step * (GEMM_CHUNKS * 16) + PDS_LANE * 16;
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_CHUNKS / 16; i++) {
    const uint32_t panel = i / (GEMM_CHUNKS / 32), part = i % (GEMM_CHUNKS / 32) * 32;
    pds_copy16(to + GEMM_N(stream_chunk)(part + PDS_LANE, panel), from[panel] + at + part * 16, 1);
  }
#if GEMM_BITS < 16
  const uint32_t panel = PDS_LANE / (GEMM_GROUPS * 2), piece = PDS_LANE % (GEMM_GROUPS * 2);
  if (panel < 2)
    pds_copy16(to + GEMM_STREAM_WEIGHTS(GEMM_BITS) + PDS_LANE * 16,
               gemm_scales(p, panel ? from[1] : from[0]) + (step * GEMM_GROUPS * 2 + piece) * 16,
               1);
#endif
}

/* What a lane needs of x for a step, of one row or two: zeros beyond `end`. */
PDS_FN void GEMM_N(fetch_x)(const pds_cu_gemm *p, uint8_t *to, const uint8_t *const *row,
                            uint32_t halves, uint32_t step, uint32_t end) {
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_BLOCKS * 2; i++) {
    const uint32_t b = i / 2, h = i % 2, k = step * GEMM_STEP + b * 32 + PDS_LANE % 4 * 8;
    if (row[h])
      pds_copy16(to + ((b * halves + h) * 32 + PDS_LANE) * 16,
                 k < end ? row[h] + k * 2 : (const uint8_t *)p->x, k < end);
  }
}

#if GEMM_BITS < 16
/* sum += that of one group of k, times the scales of this lane's columns. */
PDS_FN void GEMM_N(add_group)(float (*sum)[4], float (*group)[4], const uint8_t *scales) {
  gemm_u2 scale[2];
  PDS_UNROLL
  for (uint32_t panel = 0; panel < 2; panel++)
    scale[panel] = *(const gemm_u2 *)(scales + panel * GEMM_GROUPS * 32 + PDS_LANE % 4 * 8);
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

/* sum += a step's products. */
PDS_FN void GEMM_N(step)(float (*sum)[4], const uint8_t *w, const uint8_t *x,
                         const uint8_t *const *row, uint32_t halves) {
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4;
#if GEMM_BITS < 16
  float group[4][4];
#endif
  PDS_UNROLL
  for (uint32_t b = 0; b < GEMM_BLOCKS; b++) {
    uint32_t word[GEMM_LOADS][4];
    PDS_UNROLL
    for (uint32_t i = 0; i < GEMM_LOADS; i++) {
      const uint32_t chunk = ((b * 4 + t) * GEMM_LOADS + i) * 4 + g / 2;
      const pds_u4 v = pds_load16(w + GEMM_N(stream_chunk)(chunk, g % 2));
      word[i][0] = v.x;
      word[i][1] = v.y;
      word[i][2] = v.z;
      word[i][3] = v.w;
    }
    const pds_u4 none = {0, 0, 0, 0};
    const uint8_t *mine = x + (b * halves * 32 + PDS_LANE) * 16;
    const pds_u4 x0 = row[0] ? pds_load16(mine) : none;
    const pds_u4 x1 = row[1] ? pds_load16(mine + 512) : none;
#if GEMM_BITS == 16
    GEMM_N(multiply)(sum, word, x0, x1);
#else
    if (b * 32 % GEMM_GROUP == 0) {
      PDS_UNROLL
      for (uint32_t i = 0; i < 16; i++) group[i / 4][i % 4] = 0;
    }
    GEMM_N(multiply)(group, word, x0, x1);
    if ((b + 1) * 32 % GEMM_GROUP == 0)
      GEMM_N(add_group)(sum, group, w + GEMM_STREAM_WEIGHTS(GEMM_BITS) + b * 32 / GEMM_GROUP * 32);
#endif
  }
}

GEMM_KERNEL(GEMM_STREAM, GEMM_STREAM_WARPS * 32) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Y);
  if (!part.rows) return;
  const uint32_t warps = PDS_THREADS / 32, x_end = gemm_x_end(p), keep = p->free & GEMM_KEEP_X;
  const uint32_t steps = p->k_pad / GEMM_STEP, mine = (steps + warps - 1 - PDS_WARP) / warps;
  const uint32_t turns = p->free >> GEMM_TURNS_SHIFT, pairs = (gemm_panels(p) + 1) / 2;
  const uint32_t first = PDS_BLOCK_X * turns, end = gemm_min(first + turns, pairs);
  const uint32_t total = (end - first) * mine, halves = part.rows > 8 ? 2 : 1;
  const uint32_t x_bytes = GEMM_STREAM_X(GEMM_BITS, part.rows);
  const uint32_t area = GEMM_STREAM_WARP(GEMM_BITS, part.rows,
                                         keep ? (steps + warps - 1) / warps : GEMM_STREAM_AHEAD);
  uint8_t *const ring = PDS_SHARED + PDS_WARP * area, *const xs =
                                                          ring + GEMM_STREAM_AHEAD * GEMM_SLOT;

  uint32_t step = PDS_WARP, pair = first; /* to fetch */
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_STREAM_AHEAD - 1; i++) {
    if (i < total) GEMM_N(fetch_w)(p, ring + i * GEMM_SLOT, part.w, pair, step);
    step += warps;
    if (step >= steps) {
      step = PDS_WARP;
      pair++;
    }
  }
  const uint8_t *row[2] = {0, 0};
  PDS_UNROLL
  for (uint32_t h = 0; h < 2; h++) {
    const uint32_t r = PDS_LANE / 4 + 8 * h;
    if (r < part.rows) row[h] = part.x + gemm_x_at(p, &part, r) * 2;
  }
  const uint32_t y_row = gemm_stream_row();
  const uint64_t y_at = y_row < part.rows ? gemm_y_at(p, &part, y_row) : 0;
  uint32_t x_step = PDS_WARP;
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_STREAM_AHEAD - 1; i++) {
    if (i < (keep ? mine : total)) GEMM_N(fetch_x)(p, xs + i * x_bytes, row, halves, x_step, x_end);
    pds_copy_commit();
    x_step += warps;
    if (x_step >= steps) x_step = PDS_WARP;
  }

  uint32_t number = 0;
  for (uint32_t turn = first; turn < end; turn++) {
    float sum[4][4] = {{0}};
    for (uint32_t i = 0; i < mine; i++, number++) {
      pds_copy_wait(GEMM_STREAM_AHEAD - 2);
      pds_warp_sync(); /* this step is there for all lanes, and all are done with the one before */
      const uint32_t slot = number % GEMM_STREAM_AHEAD, then = number + GEMM_STREAM_AHEAD - 1;
      if (then < total) {
        const uint32_t into = then % GEMM_STREAM_AHEAD;
        GEMM_N(fetch_w)(p, ring + into * GEMM_SLOT, part.w, pair, step);
        if (!keep || then < mine)
          GEMM_N(fetch_x)(p, xs + (keep ? then : into) * x_bytes, row, halves, step, x_end);
        step += warps;
        if (step >= steps) {
          step = PDS_WARP;
          pair++;
        }
      }
      pds_copy_commit();
      GEMM_N(step)(sum, ring + slot * GEMM_SLOT, xs + (keep ? i : slot) * x_bytes, row, halves);
    }
    if (turn > first) pds_sync(); /* the sums before these are read */
    gemm_stream_finish(p, &part, (float *)(PDS_SHARED + warps * area), sum, turn, y_at);
  }
}

#undef GEMM_LOADS
#undef GEMM_STEP
#undef GEMM_BLOCKS
#undef GEMM_GROUP
#undef GEMM_GROUPS
#undef GEMM_CHUNKS
#undef GEMM_SLOT
