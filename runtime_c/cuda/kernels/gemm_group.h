/* gemm_group.h: GEMMs of many rows on Hopper, whose tensor cores reach their full rate only in
 * products of four warps together (pds_group_mma). No include guard: gemm_format.h includes it;
 * GEMM_GROUP_TILE is the kernel's name.
 *
 * A tile is 128 rows of one matrix by 16 panels, with stages of 64 k, as in gemm_tile.h. A block
 * takes every so many'th tile, and asks for the next one's first stages before it ends one. What is
 * computed is y^T: weights come from shared memory to registers, as the left operand, and x, the
 * right one, is read where it is. A warp has all rows by one pair of panels. Columns are dealt to
 * lanes as elsewhere: a lane (g, t) reads four columns of panel g % 2, from 4 (g / 2) on, at once,
 * which are its rows g and g + 8 of two products; so its sums are those of these four columns, in
 * rows 8 i + 2 t and 8 i + 2 t + 1 of x. */

#define GEMM_STAGE_BYTES GEMM_GROUP_STAGE(GEMM_BITS)
#define GEMM_NEXT GEMM_N(group_next)
#define GEMM_SEEK GEMM_N(group_seek)
#define GEMM_FETCH GEMM_N(fetch)

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

/* What a thread fetches next: a stage of a tile. */
typedef struct GEMM_NEXT {
  const uint8_t *w, *x[GEMM_GROUP_ROWS / 32];
  uint32_t tile, panels, stage, fetched; /* of all stages */
} GEMM_NEXT;

/* Goes to the next tile, whose y_at is the block's after a pds_sync. */
PDS_FN void GEMM_SEEK(const pds_cu_gemm *p, GEMM_NEXT *next, uint32_t tile, uint64_t *y_at) {
  next->tile = tile;
  next->stage = 0;
  if (tile >= p->free >> GEMM_TURNS_SHIFT) return;
  const gemm_tile at = gemm_group_at(p, tile);
  next->w = at.part.w + at.first * p->panel_bytes;
  next->panels = gemm_panels(p) - at.first;
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_GROUP_ROWS / 32; i++) {
    const uint32_t row = at.low + PDS_TID / 8 + i * 32;
    next->x[i] =
        row < at.part.rows ? at.part.x + gemm_x_at(p, &at.part, row) * 2 + PDS_TID % 8 * 16 : 0;
  }
  if (PDS_TID < GEMM_GROUP_ROWS && at.low + PDS_TID < at.part.rows)
    y_at[PDS_TID] = gemm_y_at(p, &at.part, at.low + PDS_TID);
}

GEMM_KERNEL(GEMM_GROUP_TILE, GEMM_TILE_THREADS) {
  const uint32_t tiles = p->free >> GEMM_TURNS_SHIFT, x_end = gemm_x_end(p);
  const uint32_t numbers = (p->k_pad + GEMM_TILE_K - 1) / GEMM_TILE_K;
  uint64_t *y_at = (uint64_t *)(PDS_SHARED + GEMM_GROUP_STAGES * GEMM_STAGE_BYTES);
  GEMM_NEXT next = {0};
  GEMM_SEEK(p, &next, PDS_BLOCK_X, y_at);
  uint32_t seeks = 1, done = 0; /* tiles sought; stages multiplied */
  for (; next.fetched < 2; next.fetched++) {
    uint8_t *to = PDS_SHARED + next.fetched * GEMM_STAGE_BYTES;
    GEMM_N(group_fetch_x)(p, to, next.x, next.stage, x_end, next.tile < tiles);
    GEMM_FETCH(p, to + GEMM_GROUP_ROWS * 128, next.w, next.panels, next.stage, next.tile < tiles);
    pds_copy_commit();
    if (++next.stage == numbers) {
      GEMM_SEEK(p, &next, next.tile + PDS_GRID_X,
                y_at + seeks % GEMM_GROUP_PLACES * GEMM_GROUP_ROWS);
      seeks++;
    }
  }

  uint32_t turn = 0;
  for (uint32_t tile = PDS_BLOCK_X; tile < tiles; tile += PDS_GRID_X, turn++) {
    float sum[2][64]; /* the first products write them */
    for (uint32_t number = 0; number < numbers; number++, done++, next.fetched++) {
      pds_copy_wait(1);
      pds_group_publish();
      pds_sync(); /* the stage is there for all, and all are done with the one before the last */
      const int more = next.tile < tiles;
      uint8_t *to = PDS_SHARED + next.fetched % GEMM_GROUP_STAGES * GEMM_STAGE_BYTES;
      const uint8_t *x_stage = PDS_SHARED + done % GEMM_GROUP_STAGES * GEMM_STAGE_BYTES;
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
        if (step == 0) GEMM_N(group_fetch_x)(p, to, next.x, next.stage, x_end, more);
        if (step == 1)
          GEMM_FETCH(p, to + GEMM_GROUP_ROWS * 128, next.w, next.panels, next.stage, more);
        pds_group_wait(1);
        if (step + 1 < GEMM_TILE_K / 16)
          GEMM_N(group_operands)(w_stage, step + 1, scale, a[(step + 1) % 2]);
      }
      pds_copy_commit();
      if (++next.stage == numbers) {
        GEMM_SEEK(p, &next, next.tile + PDS_GRID_X,
                  y_at + seeks % GEMM_GROUP_PLACES * GEMM_GROUP_ROWS);
        seeks++;
      }
    }
    pds_group_wait(0);
    gemm_group_finish(p, tile, y_at + turn % GEMM_GROUP_PLACES * GEMM_GROUP_ROWS,
                      (float *)(y_at + GEMM_GROUP_PLACES * GEMM_GROUP_ROWS), sum);
  }
}

#undef GEMM_STAGE_BYTES
#undef GEMM_NEXT
#undef GEMM_SEEK
#undef GEMM_FETCH
