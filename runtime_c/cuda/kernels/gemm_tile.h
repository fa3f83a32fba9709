/* gemm_tile.h: GEMMs of many rows. No include guard: gemm_format.h includes it with GEMM_ROWS, the
 * rows of a block's tile; GEMM_WARP_ROWS, the warps side by side in them; and what one warp has:
 * GEMM_SUBTILES times 16 rows, GEMM_PAIRS of panels.
 *
 * A block has GEMM_ROWS rows of one matrix by 16 panels. x and weights pass through shared memory
 * in stages of 64 k, several of them under way. Columns are dealt to lanes as in gemm_stream.h: a
 * lane's sums are those of columns 4 (lane % 4) + i of both panels of a pair, so that gate and up
 * meet. */

#define GEMM_STAGE_BYTES GEMM_TILE_STAGE(GEMM_ROWS, GEMM_BITS)
#define GEMM_PASS_ROWS (GEMM_WARP_ROWS * 16)
#define GEMM_FETCH_ROWS (GEMM_ROWS / 32) /* rows of x that a thread fetches 16 bytes of */

GEMM_KERNEL(GEMM_TILE(GEMM_ROWS), GEMM_TILE_THREADS) {
  /* which matrix, which rows and panels: tiles of the same weights follow each other */
  const uint32_t matrix = p->n_holes ? gemm_hole_of(p, PDS_BLOCK_X) : PDS_BLOCK_Y;
  const gemm_part part = gemm_part_of(p, matrix);
  const uint32_t tile = PDS_BLOCK_X - (p->n_holes ? p->holes[matrix].tile : 0);
  const uint32_t row_tiles = (part.rows + GEMM_ROWS - 1) / GEMM_ROWS;
  const uint32_t low = tile % row_tiles * GEMM_ROWS, first = tile / row_tiles * GEMM_TILE_PANELS;
  const uint32_t panels = gemm_panels(p) - first, x_end = gemm_x_end(p);
  const uint32_t numbers = (p->k_pad + GEMM_TILE_K - 1) / GEMM_TILE_K;
  const uint32_t stages = p->free & GEMM_STAGES_MASK;
  const uint8_t *w = part.w + first * p->panel_bytes;

  /* what this thread fetches of x: 16 bytes, number piece of a stage's eight, of some rows */
  const uint32_t piece = PDS_TID % 8, fetch_row = PDS_TID / 8;
  const uint8_t *x[GEMM_FETCH_ROWS];
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_FETCH_ROWS; i++) {
    const uint32_t row = low + fetch_row + i * 32;
    x[i] = row < part.rows ? part.x + gemm_x_at(p, &part, row) * 2 + piece * 16 : 0;
  }

  const uint32_t warp_row = PDS_WARP % GEMM_WARP_ROWS * (GEMM_SUBTILES * 16);
  const uint32_t warp_panel = PDS_WARP / GEMM_WARP_ROWS * (GEMM_PAIRS * 2);
  const uint32_t g = PDS_LANE / 4, t = PDS_LANE % 4;
  float sum[GEMM_SUBTILES][GEMM_PAIRS][4][4];
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_SUBTILES * GEMM_PAIRS * 16; i++)
    sum[i / (GEMM_PAIRS * 16)][i / 16 % GEMM_PAIRS][i / 4 % 4][i % 4] = 0;

  uint32_t slot = 0; /* of the stage to multiply */
  uint32_t fetched = 0, into = 0;
  for (uint32_t number = 0; number < numbers + stages - 1; number++) {
    if (number >= stages - 1) {
      if (stages == 4) {
        pds_copy_wait(2);
      } else if (stages == 3) {
        pds_copy_wait(1);
      } else {
        pds_copy_wait(0);
      }
      pds_sync(); /* the stage is there for all, and all are done with the one before it */
    }
    if (fetched < numbers) {
      uint8_t *to = PDS_SHARED + into * GEMM_STAGE_BYTES;
      const uint32_t k = fetched * GEMM_TILE_K;
      PDS_UNROLL
      for (uint32_t i = 0; i < GEMM_FETCH_ROWS; i++) {
        const uint32_t row = fetch_row + i * 32;
        const int valid = x[i] && k + piece * 8 < x_end;
        pds_copy16(to + row * 128 + ((piece ^ (row & 7)) * 16),
                   valid ? x[i] + k * 2 : (const uint8_t *)p->x, valid);
      }
      GEMM_N(fetch)(p, to + GEMM_ROWS * 128, w, panels, fetched, 1);
      fetched++;
      into = into + 1 == stages ? 0 : into + 1;
    }
    pds_copy_commit();
    if (number < stages - 1) continue;

    const uint8_t *x_stage = PDS_SHARED + slot * GEMM_STAGE_BYTES;
    const uint8_t *w_stage = x_stage + GEMM_ROWS * 128;
    slot = slot + 1 == stages ? 0 : slot + 1;
    uint32_t scale[GEMM_PAIRS][4];
    PDS_UNROLL
    for (uint32_t step = 0; step < GEMM_TILE_K / 16; step++) {
      uint32_t a[GEMM_SUBTILES][4], b[GEMM_PAIRS][4][2];
      PDS_UNROLL
      for (uint32_t m = 0; m < GEMM_SUBTILES; m++) {
        const uint32_t row = warp_row + m * 16 + PDS_LANE % 16;
        const uint32_t at = step * 2 + PDS_LANE / 16;
        pds_ldmatrix(a[m], x_stage + row * 128 + ((at ^ (row & 7)) * 16));
      }
      PDS_UNROLL
      for (uint32_t n = 0; n < GEMM_PAIRS; n++) {
        const uint32_t panel = warp_panel + n * 2 + g % 2;
        if (step % 2 == 0) GEMM_N(scales)(w_stage, panel, step, scale[n]);
        GEMM_N(operands)(w_stage, panel, step, scale[n], b[n]);
      }
      PDS_UNROLL
      for (uint32_t n = 0; n < GEMM_PAIRS; n++) {
        PDS_UNROLL
        for (uint32_t m = 0; m < GEMM_SUBTILES; m++) {
          PDS_UNROLL
          for (uint32_t i = 0; i < 4; i++) pds_mma_bf16(sum[m][n][i], a[m], b[n][i]);
        }
      }
    }
  }

  /* 16 rows of each warp at a time pass through shared memory: lines of y are written whole */
  float *line = (float *)PDS_SHARED;
  uint64_t *y_at = (uint64_t *)(line + GEMM_PASS_ROWS * GEMM_TILE_LINE);
  const uint32_t cols = GEMM_TILE_PANELS * 16 / (p->swiglu ? 2 : 1);
  const uint32_t first_col = first * 16 / (p->swiglu ? 2 : 1);
  pds_copy_wait(0);
  pds_sync();
  if (PDS_TID < GEMM_ROWS && low + PDS_TID < part.rows)
    y_at[PDS_TID] = gemm_y_at(p, &part, low + PDS_TID);
  PDS_UNROLL
  for (uint32_t m = 0; m < GEMM_SUBTILES; m++) {
    PDS_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      float *to = line + (warp_row / GEMM_SUBTILES + half * 8 + g) * GEMM_TILE_LINE + t * 4;
      PDS_UNROLL
      for (uint32_t n = 0; n < GEMM_PAIRS; n++) {
        float a[4], b[4];
        PDS_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
          a[i] = sum[m][n][i][half * 2];
          b[i] = sum[m][n][i][half * 2 + 1];
          if (p->swiglu) a[i] = gemm_silu(a[i]) * b[i];
        }
        const gemm_f4 v = {a[0], a[1], a[2], a[3]}, u = {b[0], b[1], b[2], b[3]};
        if (p->swiglu) {
          *(gemm_f4 *)(to + (warp_panel / 2 + n) * 16) = v;
        } else {
          *(gemm_f4 *)(to + (warp_panel + n * 2) * 16) = v;
          *(gemm_f4 *)(to + (warp_panel + n * 2) * 16 + 16) = u;
        }
      }
    }
    pds_sync();
    const uint32_t quads = cols / 4, quad = PDS_TID % quads, col = first_col + quad * 4;
    for (uint32_t i = PDS_TID / quads; i < GEMM_PASS_ROWS; i += GEMM_TILE_THREADS / quads) {
      const uint32_t row = i / 16 * (GEMM_SUBTILES * 16) + m * 16 + i % 16;
      if (low + row >= part.rows || col >= p->cols) continue;
      const gemm_f4 v = *(const gemm_f4 *)(line + i * GEMM_TILE_LINE + quad * 4);
      const float of[4] = {v.x, v.y, v.z, v.w};
      gemm_put4(p, part.y, y_at[row] + col, col, of);
    }
    pds_sync();
  }
  if (panels <= GEMM_TILE_PANELS)
    gemm_zero_pad(p, &part, low, gemm_min(low + GEMM_ROWS, part.rows));
}

#undef GEMM_STAGE_BYTES
#undef GEMM_PASS_ROWS
#undef GEMM_FETCH_ROWS
#undef GEMM_ROWS
#undef GEMM_WARP_ROWS
#undef GEMM_SUBTILES
#undef GEMM_PAIRS
