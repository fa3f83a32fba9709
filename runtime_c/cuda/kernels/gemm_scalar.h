/* gemm_scalar.h: GEMMs in plain fp32: those with fp32 weights, and what no other kernel covers. Weights
 * of integers times their scales are exact in fp32. */

/* The k that a word of weights holds. */
PDS_FN uint32_t gemm_word_k(const pds_cu_gemm *p) {
  switch (p->w_dtype) {
  case PDS_CU_F32: return 1;
  case PDS_CU_BF16: return 2;
  case PDS_CU_I8: return 4;
  default: return 8;
  }
}
/* Number i of a word's values, without scale. */
PDS_FN float gemm_value(const pds_cu_gemm *p, uint32_t word, uint32_t i) {
  switch (p->w_dtype) {
  case PDS_CU_F32: return pds_float(word);
  case PDS_CU_BF16: return pds_widen(word >> (16 * i) & 0xffff);
  case PDS_CU_I8: return (float)((int32_t)(word << (24 - 8 * i)) >> 24);
  default: return (float)((int32_t)(word >> (i % 4 * 8 + i / 4 * 4) & 15) - 8);
  }
}
/* The scale of column j of a panel at k. */
PDS_FN float gemm_scale(const pds_cu_gemm *p, const uint8_t *panel, uint32_t k, uint32_t j) {
  if (p->w_dtype < PDS_CU_I8) return 1;
  const uint32_t group = p->w_dtype == PDS_CU_I8 ? 64 : 32;
  return pds_widen(((const uint16_t *)gemm_scales(p, panel))[k / group * 16 + j]);
}
PDS_FN float gemm_x_value(const pds_cu_gemm *p, const uint8_t *row, uint32_t k) {
  if (p->act_dtype == PDS_CU_BF16) return pds_widen(((const uint16_t *)row)[k]);
  return ((const float *)row)[k];
}
PDS_FN const uint8_t *gemm_x_row(const pds_cu_gemm *p, const gemm_part *part, uint32_t r) {
  return part->x + gemm_x_at(p, part, r) * gemm_act_bytes(p);
}

/* 64 rows by 4 panels. A thread has 4 rows, and 2 columns of both panels of a pair; each sum is one
 * chain of multiply-adds over k. */
PDS_KERNEL(pds_cu_gemm_scalar, pds_cu_gemm, GEMM_SCALAR_THREADS) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Z);
  const uint32_t low = PDS_BLOCK_X * GEMM_SCALAR_ROWS;
  if (low >= part.rows) return;
  const uint32_t panels = gemm_panels(p), first = PDS_BLOCK_Y * GEMM_SCALAR_PANELS;
  const uint32_t word_k = gemm_word_k(p), x_end = gemm_x_end(p);
  const uint32_t k_end = gemm_min(p->k_pad, x_end);
  float *xs = (float *)PDS_SHARED, *ws = xs + GEMM_SCALAR_K * GEMM_SCALAR_LINE;

  /* what a thread fetches: 4 k of one row of x, 4 k of one column */
  const uint32_t x_row = PDS_TID / 4, fetch_k = PDS_TID % 4 * 4, w_col = PDS_TID / 4;
  const uint8_t *row = low + x_row < part.rows ? gemm_x_row(p, &part, low + x_row) : 0;
  const uint32_t w_panel = first + w_col / 16;
  const uint8_t *panel = w_panel < panels ? part.w + w_panel * p->panel_bytes : 0;

  const uint32_t my_rows = PDS_TID / 16 * 4, pair = PDS_TID % 16 / 8, col = PDS_TID % 8 * 2;
  float sum[4][2][2];
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) sum[i / 4][i / 2 % 2][i % 2] = 0;

  for (uint32_t base = 0; base < k_end; base += GEMM_SCALAR_K) {
    float x_value[4], w_value[4];
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t k = base + fetch_k + i;
      x_value[i] = row && k < x_end ? gemm_x_value(p, row, k) : 0;
      w_value[i] = 0;
      if (panel && k < p->k_pad) {
        const uint32_t word = ((const uint32_t *)panel)[(uint64_t)(k / word_k) * 16 + w_col % 16];
        w_value[i] = gemm_value(p, word, k % word_k) * gemm_scale(p, panel, k, w_col % 16);
      }
    }
    pds_sync();
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      xs[(fetch_k + i) * GEMM_SCALAR_LINE + x_row] = x_value[i];
      ws[(fetch_k + i) * (GEMM_SCALAR_PANELS * 16) + w_col] = w_value[i];
    }
    pds_sync();
    PDS_UNROLL
    for (uint32_t k = 0; k < GEMM_SCALAR_K; k++) {
      const gemm_f4 x = *(const gemm_f4 *)(xs + k * GEMM_SCALAR_LINE + my_rows);
      const float *w = ws + k * (GEMM_SCALAR_PANELS * 16) + pair * 32 + col;
      const float xv[4] = {x.x, x.y, x.z, x.w}, wv[2][2] = {{w[0], w[1]}, {w[16], w[17]}};
      PDS_UNROLL
      for (uint32_t i = 0; i < 16; i++) {
        float *s = &sum[i / 4][i / 2 % 2][i % 2];
        *s = fmaf(xv[i / 4], wv[i / 2 % 2][i % 2], *s);
      }
    }
  }

  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    if (low + my_rows + i >= part.rows) continue;
    const uint64_t at = gemm_y_at(p, &part, low + my_rows + i);
    PDS_UNROLL
    for (uint32_t j = 0; j < 2; j++) {
      if (p->swiglu) {
        const uint32_t c = (first / 2 + pair) * 16 + col + j;
        gemm_put(p, part.y, at + c, c, gemm_silu(sum[i][0][j]) * sum[i][1][j]);
      } else {
        const uint32_t c = (first + pair * 2) * 16 + col + j;
        gemm_put(p, part.y, at + c, c, sum[i][0][j]);
        gemm_put(p, part.y, at + c + 16, c + 16, sum[i][1][j]);
      }
    }
  }
  if (first + GEMM_SCALAR_PANELS >= panels)
    gemm_zero_pad(p, &part, low, gemm_min(low + GEMM_SCALAR_ROWS, part.rows));
}

/* Four columns of a few rows from one panel: sum[row][column] of the lane's share of k. The block's
 * lanes, in fours, take 64-byte rows of the panel in turn. */
PDS_FN void gemm_few_panel(const pds_cu_gemm *p, const uint8_t *const *row, uint32_t rows,
                           const uint8_t *panel, float (*sum)[4]) {
  const uint32_t quad = PDS_LANE % 4, word_k = gemm_word_k(p);
  const uint32_t x_end = gemm_x_end(p), words = p->k_pad / word_k;
  const uint32_t turns = GEMM_FEW_WARPS * 8;
  PDS_UNROLL
  for (uint32_t i = 0; i < GEMM_FEW_ROWS * 4; i++) sum[i / 4][i % 4] = 0;
  for (uint32_t base = PDS_WARP * 8 + PDS_LANE / 4; base < words; base += turns * 4) {
    pds_u4 word[4];
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t at = base + i * turns;
      const pds_u4 none = {0, 0, 0, 0};
      word[i] = at < words ? pds_load16_stream(panel + (uint64_t)at * 64 + quad * 16) : none;
    }
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t from = (base + i * turns) * word_k;
      float scale[4];
      if (from >= x_end) continue;
      PDS_UNROLL
      for (uint32_t c = 0; c < 4; c++) scale[c] = gemm_scale(p, panel, from, quad * 4 + c);
      for (uint32_t k = from; k < gemm_min(from + word_k, x_end); k++) {
        const float w[4] = {gemm_value(p, word[i].x, k - from) * scale[0],
                            gemm_value(p, word[i].y, k - from) * scale[1],
                            gemm_value(p, word[i].z, k - from) * scale[2],
                            gemm_value(p, word[i].w, k - from) * scale[3]};
        PDS_UNROLL
        for (uint32_t r = 0; r < GEMM_FEW_ROWS; r++) {
          if (r >= rows) continue;
          const float x = gemm_x_value(p, row[r], k);
          PDS_UNROLL
          for (uint32_t c = 0; c < 4; c++) sum[r][c] = fmaf(x, w[c], sum[r][c]);
        }
      }
    }
  }
}

/* A panel, or a pair in swiglu, times 4 rows: k is split over the lanes and warps, and their sums are
 * added up in an order that does not depend on rows. */
PDS_KERNEL(pds_cu_gemm_few, pds_cu_gemm, GEMM_FEW_WARPS * 32) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Y);
  const uint32_t low = PDS_BLOCK_Z * GEMM_FEW_ROWS;
  if (low >= part.rows) return;
  const uint32_t rows = gemm_min(part.rows - low, GEMM_FEW_ROWS), halves = p->swiglu ? 2 : 1;
  float *parts = (float *)PDS_SHARED; /* [halves][warps][rows][16] */
  const uint8_t *row[GEMM_FEW_ROWS];
  PDS_UNROLL
  for (uint32_t r = 0; r < GEMM_FEW_ROWS; r++)
    row[r] = gemm_x_row(p, &part, low + gemm_min(r, rows - 1));

  for (uint32_t h = 0; h < halves; h++) {
    float sum[GEMM_FEW_ROWS][4];
    gemm_few_panel(p, row, rows, part.w + (PDS_BLOCK_X * halves + h) * p->panel_bytes, sum);
    PDS_UNROLL
    for (uint32_t i = 0; i < GEMM_FEW_ROWS * 4; i++) {
      float *s = &sum[i / 4][i % 4];
      PDS_UNROLL
      for (uint32_t far = 4; far < 32; far *= 2) *s += pds_shfl_xor(*s, far);
      if (PDS_LANE < 4)
        parts[((h * GEMM_FEW_WARPS + PDS_WARP) * GEMM_FEW_ROWS + i / 4) * 16 + PDS_LANE * 4 +
              i % 4] = *s;
    }
  }
  pds_sync();
  if (PDS_TID < rows * 16) {
    float total[2] = {0, 0};
    for (uint32_t h = 0; h < halves; h++) {
      for (uint32_t w = 0; w < GEMM_FEW_WARPS; w++)
        total[h] += parts[(h * GEMM_FEW_WARPS + w) * GEMM_FEW_ROWS * 16 + PDS_TID];
    }
    const uint32_t col = PDS_BLOCK_X * 16 + PDS_TID % 16;
    const uint64_t at = gemm_y_at(p, &part, low + PDS_TID / 16) + col;
    gemm_put(p, part.y, at, col, p->swiglu ? gemm_silu(total[0]) * total[1] : total[0]);
  }
  if (PDS_BLOCK_X * 16 + 16 >= p->cols) gemm_zero_pad(p, &part, low, low + rows);
}
