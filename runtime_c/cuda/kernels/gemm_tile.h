/* gemm_tile.h: GEMMs of many rows. No include guard: gemm_format.h includes it with GEMM_ROWS, the rows
 * of a block's tile; GEMM_WARP_ROWS, the warps side by side in them; and what one warp has:
 * GEMM_SUBTILES times 16 rows, GEMM_PAIRS of panels.
 *
 * A block has GEMM_ROWS rows of one matrix by 16 panels. x and weights pass through shared memory in
 * stages of 64 k, several of them under way. Columns are dealt to lanes as in gemm_stream.h: a lane's
 * sums are those of columns 4 (lane % 4) + i of both panels of a pair, so that gate and up meet. */

#define GEMM_STAGE_BYTES GEMM_TILE_STAGE(GEMM_ROWS, GEMM_BITS)
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
      GEMM_N(fetch)(p, to + GEMM_ROWS * 128, w, panels, fetched);
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

  PDS_UNROLL
  for (uint32_t m = 0; m < GEMM_SUBTILES; m++) {
    PDS_UNROLL
    for (uint32_t half = 0; half < 2; half++) {
      const uint32_t row = low + warp_row + m * 16 + half * 8 + g;
      if (row >= part.rows) continue;
      const uint64_t at = gemm_y_at(p, &part, row);
      PDS_UNROLL
      for (uint32_t n = 0; n < GEMM_PAIRS; n++) {
        float v[2][4];
        PDS_UNROLL
        for (uint32_t i = 0; i < 8; i++) v[i / 4][i % 4] = sum[m][n][i % 4][half * 2 + i / 4];
        if (p->swiglu) {
          const uint32_t col = (first + warp_panel) / 2 * 16 + n * 16 + t * 4;
          PDS_UNROLL
          for (uint32_t i = 0; i < 4; i++) v[0][i] = gemm_silu(v[0][i]) * v[1][i];
          gemm_put4(p, part.y, at + col, col, v[0]);
        } else {
          const uint32_t col = (first + warp_panel + n * 2) * 16 + t * 4;
          gemm_put4(p, part.y, at + col, col, v[0]);
          gemm_put4(p, part.y, at + col + 16, col + 16, v[1]);
        }
      }
    }
  }
  if (panels <= GEMM_TILE_PANELS)
    gemm_zero_pad(p, &part, low, gemm_min(low + GEMM_ROWS, part.rows));
}

#undef GEMM_STAGE_BYTES
#undef GEMM_FETCH_ROWS
#undef GEMM_ROWS
#undef GEMM_WARP_ROWS
#undef GEMM_SUBTILES
#undef GEMM_PAIRS
