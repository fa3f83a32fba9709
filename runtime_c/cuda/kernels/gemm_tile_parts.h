/* gemm_tile_parts.h: how the tile kernels fetch weights of one format, and make operands of them.
 * No include guard: gemm_format.h includes it. */

#define GEMM_PANEL_STAGE (GEMM_TILE_K * 2 * GEMM_BITS) /* bytes of a panel's rows */
#define GEMM_CHUNKS (GEMM_PANEL_STAGE / 16)

/* Where 16 bytes, columns 4 quad .. + 3 of a row of a panel, are in its part of a stage: moved so
 * that the eight lanes that read together, two panels and up to four rows, find all banks. */
PDS_FN uint32_t GEMM_N(chunk)(uint32_t row, uint32_t quad, uint32_t panel) {
  return (row * 4 + (quad ^ ((row & 2) + (panel & 1)))) * 16;
}

/* The block's panels, GEMM_TILE_K k from stage `number` on, in the background. `w`: the first
 * panel; instead of what lies beyond `panels` of them comes the last one again, for nothing. Beyond
 * k_pad, and if not `valid`, zeros. */
PDS_FN void GEMM_N(fetch)(const pds_cu_gemm *p, uint8_t *to, const uint8_t *w, uint32_t panels,
                          uint32_t number, int valid) {
  const uint32_t chunk = PDS_TID % GEMM_CHUNKS, first = PDS_TID / GEMM_CHUNKS;
  const uint32_t at = number * GEMM_PANEL_STAGE + chunk * 16;
  const int inside = valid && at < p->k_pad * 2 * GEMM_BITS;
  const uint8_t *from = inside ? w + at : w;
  uint8_t *mine = to + first * GEMM_PANEL_STAGE + GEMM_N(chunk)(chunk / 4, chunk % 4, first);
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_TILE_PANELS * GEMM_CHUNKS / GEMM_TILE_THREADS; i++) {
    /* the step is even, or the second panel of all pairs: the place in a panel stays the same */
    const uint32_t panel = first + i * (GEMM_TILE_THREADS / GEMM_CHUNKS);
    pds_copy16(mine + (panel - first) * GEMM_PANEL_STAGE,
               from + gemm_min(panel, panels - 1) * p->panel_bytes, inside);
  }
#if GEMM_BITS < 16
  const uint32_t pieces = GEMM_TILE_SCALES(GEMM_BITS) / 16;
  if (PDS_TID < GEMM_TILE_PANELS * pieces) {
    const uint32_t panel = PDS_TID / pieces, piece = PDS_TID % pieces;
    const uint8_t *scales = gemm_scales(p, w) + gemm_min(panel, panels - 1) * p->panel_bytes;
    pds_copy16(to + GEMM_TILE_PANELS * GEMM_PANEL_STAGE + PDS_TID * 16,
               valid ? scales + (number * pieces + piece) * 16 : w, valid);
  }
#endif
}

/* Operands of 16 k, number `step` of a stage, and a lane's four columns of a panel: b[i]. `stage`:
 * of the weights; panel: of the block. scale: of these columns, in both halves. */
PDS_FN void GEMM_N(operands)(const uint8_t *stage, uint32_t panel, uint32_t step,
                             const uint32_t *scale, uint32_t (*b)[2]) {
  const uint32_t quad = PDS_LANE / 8, t = PDS_LANE % 4;
  const uint8_t *rows = stage + panel * GEMM_PANEL_STAGE;
#if GEMM_BITS == 16
  const pds_u4 v = pds_load16(rows + GEMM_N(chunk)(step * 8 + t, quad, panel));
  const pds_u4 u = pds_load16(rows + GEMM_N(chunk)(step * 8 + 4 + t, quad, panel));
#elif GEMM_BITS == 8
  const pds_u4 v = pds_load16(rows + GEMM_N(chunk)(step * 4 + t / 2, quad, panel));
  const pds_u4 u = pds_load16(rows + GEMM_N(chunk)(step * 4 + 2 + t / 2, quad, panel));
#else
  const pds_u4 v = pds_load16(rows + GEMM_N(chunk)(step * 2, quad, panel));
  const pds_u4 u = pds_load16(rows + GEMM_N(chunk)(step * 2 + 1, quad, panel));
#endif
  const uint32_t word[2][4] = {{v.x, v.y, v.z, v.w}, {u.x, u.y, u.z, u.w}};
  PDS_UNROLL
  for (uint32_t i = 0; i < 8; i++) {
    const uint32_t w = word[i % 2][i / 2];
#if GEMM_BITS == 16
    b[i / 2][i % 2] = w;
#elif GEMM_BITS == 8
    b[i / 2][i % 2] = gemm_mul2(gemm_int8(w, t % 2 ? GEMM_HIGH_PAIR : GEMM_LOW_PAIR), scale[i / 2]);
#else
    b[i / 2][i % 2] =
        gemm_mul2(gemm_int4(w >> (t / 2 * 4) & 0x0f0f0f0fu, t % 2 ? GEMM_HIGH_PAIR : GEMM_LOW_PAIR),
                  scale[i / 2]);
#endif
  }
  (void)scale;
}

/* A lane's scales of a panel, for step `step` of a stage. */
PDS_FN void GEMM_N(scales)(const uint8_t *stage, uint32_t panel, uint32_t step, uint32_t *scale) {
#if GEMM_BITS < 16
  const uint32_t group = GEMM_BITS == 8 ? 0 : step / 2;
  const uint8_t *from = stage + GEMM_TILE_PANELS * GEMM_PANEL_STAGE +
                        panel * GEMM_TILE_SCALES(GEMM_BITS) + group * 32 + PDS_LANE / 8 * 8;
  const gemm_u2 v = *(const gemm_u2 *)from;
  scale[0] = gemm_bytes(v.x, 0, 0x1010);
  scale[1] = gemm_bytes(v.x, 0, 0x3232);
  scale[2] = gemm_bytes(v.y, 0, 0x1010);
  scale[3] = gemm_bytes(v.y, 0, 0x3232);
#else
  (void)stage, (void)panel, (void)step, (void)scale;
#endif
}

#undef GEMM_PANEL_STAGE
#undef GEMM_CHUNKS
