/* gemm_group.h: GEMMs of many rows on Hopper, whose tensor cores reach their full rate only in
 * products of four warps together (pds_group_mma). No include guard: gemm_format.h includes it;
 * GEMM_GROUP_TILE is the kernel's name.
 *
 * A block has 128 rows of one matrix by 16 panels, and stages of 64 k, as in gemm_tile.h. What is
 * computed is y^T: weights come from shared memory to registers, as the left operand, and x, the
 * right one, is read where it is. A warp has all rows by one pair of panels. Columns are dealt to
 * lanes as elsewhere: a lane (g, t) reads four columns of panel g % 2, from 4 (g / 2) on, at once,
 * which are its rows g and g + 8 of two products; so its sums are those of these four columns, in
 * rows 8 i + 2 t and 8 i + 2 t + 1 of x. */

#define GEMM_STAGE_BYTES GEMM_GROUP_STAGE(GEMM_BITS)

/* A stage's x, in the background; zeros if not `valid`. x: this thread's 16 bytes, number tid % 8 of
 * eight, of rows tid / 8 + 32 i, or NULL. */
PDS_FN void GEMM_N(group_fetch_x)(const pds_cu_gemm *p, uint8_t *to, const uint8_t *const *x,
                                  uint32_t number, uint32_t x_end, int valid) {
  const uint32_t row = PDS_TID / 8, piece = PDS_TID % 8, k = number * GEMM_TILE_K;
  const int inside = valid && k + piece * 8 < x_end;
  uint8_t *mine = to + row * 128 + ((piece ^ (row & 7)) * 16);
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_GROUP_ROWS / 32; i++) {
    const int there = inside && x[i];
    pds_copy16(mine + i * 32 * 128, there ? x[i] + k * 2 : (const uint8_t *)p->x, there);
  }
}

/* A lane's operands for 16 k, number `step` of a stage: a[0] and a[1], of two products. */
PDS_FN void GEMM_N(group_operands)(const uint8_t *w, uint32_t step, uint32_t *scale,
                                   uint32_t (*a)[4]) {
  const uint32_t panel = PDS_WARP * 2 + PDS_LANE / 4 % 2;
  uint32_t of[4][2];
  if (step % 2 == 0) GEMM_N(scales)(w, panel, step, scale);
  GEMM_N(operands)(w, panel, step, scale, of);
  PDS_UNROLL
  for (uint32_t i = 0; i < 8; i++) a[i / 4][i % 4] = of[i / 4 * 2 + i % 2][i / 2 % 2];
}

GEMM_KERNEL(GEMM_GROUP_TILE, GEMM_TILE_THREADS) {
  const uint32_t matrix = p->n_holes ? gemm_hole_of(p, PDS_BLOCK_X) : PDS_BLOCK_Y;
  const gemm_part part = gemm_part_of(p, matrix);
  const uint32_t tile = PDS_BLOCK_X - (p->n_holes ? p->holes[matrix].tile : 0);
  const uint32_t row_tiles = (part.rows + GEMM_GROUP_ROWS - 1) / GEMM_GROUP_ROWS;
  const uint32_t low = tile % row_tiles * GEMM_GROUP_ROWS;
  const uint32_t first = tile / row_tiles * GEMM_TILE_PANELS;
  const uint32_t panels = gemm_panels(p) - first, x_end = gemm_x_end(p);
  const uint32_t numbers = (p->k_pad + GEMM_TILE_K - 1) / GEMM_TILE_K;
  const uint8_t *w = part.w + first * p->panel_bytes;
  const uint8_t *x[GEMM_GROUP_ROWS / 32];
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_GROUP_ROWS / 32; i++) {
    const uint32_t row = low + PDS_TID / 8 + i * 32;
    x[i] = row < part.rows ? part.x + gemm_x_at(p, &part, row) * 2 + PDS_TID % 8 * 16 : 0;
  }

  PDS_UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    uint8_t *to = PDS_SHARED + i * GEMM_STAGE_BYTES;
    GEMM_N(group_fetch_x)(p, to, x, i, x_end, i < numbers);
    GEMM_N(fetch)(p, to + GEMM_GROUP_ROWS * 128, w, panels, i, i < numbers);
    pds_copy_commit();
  }
  uint64_t *y_at = (uint64_t *)(PDS_SHARED + GEMM_GROUP_STAGES * GEMM_STAGE_BYTES);
  if (PDS_TID < GEMM_GROUP_ROWS && low + PDS_TID < part.rows)
    y_at[PDS_TID] = gemm_y_at(p, &part, low + PDS_TID);

  float sum[2][64]; /* the first products write them */
  for (uint32_t number = 0; number < numbers; number++) {
    pds_copy_wait(1);
    pds_group_publish();
    pds_sync(); /* the stage is there for all, and all are done with the one before the last */
    const uint32_t next = number + 2;
    uint8_t *to = PDS_SHARED + next % GEMM_GROUP_STAGES * GEMM_STAGE_BYTES;
    const uint8_t *x_stage = PDS_SHARED + number % GEMM_GROUP_STAGES * GEMM_STAGE_BYTES;
    const uint8_t *w_stage = x_stage + GEMM_GROUP_ROWS * 128;
    /* products of one step run while the next one's operands are read, and more is asked for */
    uint32_t a[2][2][4], scale[4];
    GEMM_N(group_operands)(w_stage, 0, scale, a[0]);
    PDS_UNROLL
    for (uint32_t step = 0; step < GEMM_TILE_K / 16; step++) {
      pds_group_begin();
      pds_group_mma(sum[0], a[step % 2][0], x_stage + step * 32, number + step > 0);
      pds_group_mma(sum[1], a[step % 2][1], x_stage + step * 32, number + step > 0);
      pds_group_commit();
      if (step == 0) GEMM_N(group_fetch_x)(p, to, x, next, x_end, next < numbers);
      if (step == 1) GEMM_N(fetch)(p, to + GEMM_GROUP_ROWS * 128, w, panels, next, next < numbers);
      pds_group_wait(1);
      if (step + 1 < GEMM_TILE_K / 16)
        GEMM_N(group_operands)(w_stage, step + 1, scale, a[(step + 1) % 2]);
    }
    pds_copy_commit();
  }
  pds_group_wait(0);
  gemm_group_finish(p, &part, y_at, sum, low, first);
}

#undef GEMM_STAGE_BYTES
