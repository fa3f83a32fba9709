/* gemm_scalar.h: GEMMs in plain fp32: those with fp32 weights, and what no other kernel covers.
 * Weights of integers times their scales are exact in fp32. */

/* A word of weights holds 1 << this k. */
PDS_FN uint32_t gemm_word_shift(const pds_cu_gemm *p) {
  switch (p->w_dtype) {
  case PDS_CU_F32: return 0;
  case PDS_CU_BF16: return 1;
  case PDS_CU_I8: return 2;
  default: return 3;
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

/* What a thread fetches of a stage of the scalar kernel: 4 k of a row of x, one k of 4 columns.
 * NULL: zeros. */
typedef struct gemm_fetch {
  const uint8_t *row, *panel;
  uint32_t x_k, w_k, quad;
} gemm_fetch;

PDS_FN void gemm_fetch_stage(const pds_cu_gemm *p, const gemm_fetch *f, uint32_t base,
                             uint32_t x_end, float *x, float *w) {
  const uint32_t k = base + f->w_k, x_k = base + f->x_k;
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) x[i] = w[i] = 0;
  if (p->w_dtype == PDS_CU_F32 && p->act_dtype == PDS_CU_F32) { /* gates: nothing to decode */
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) {
      if (f->row && x_k + i < x_end) x[i] = ((const float *)f->row)[x_k + i];
    }
    if (!f->panel || k >= p->k_pad) return;
    const pds_u4 v = pds_load16(f->panel + (uint64_t)k * 64 + f->quad * 16);
    w[0] = pds_float(v.x);
    w[1] = pds_float(v.y);
    w[2] = pds_float(v.z);
    w[3] = pds_float(v.w);
    return;
  }
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    if (f->row && x_k + i < x_end) x[i] = gemm_x_value(p, f->row, x_k + i);
  }
  const uint32_t shift = gemm_word_shift(p);
  if (!f->panel || k >= p->k_pad) return;
  const pds_u4 v = pds_load16(f->panel + (uint64_t)(k >> shift) * 64 + f->quad * 16);
  const uint32_t word[4] = {v.x, v.y, v.z, v.w};
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++)
    w[i] = gemm_value(p, word[i], k & ((1u << shift) - 1)) *
           gemm_scale(p, f->panel, k, f->quad * 4 + i);
}

/* 64 rows by 4 panels. A thread has 4 rows, and 2 columns of both panels of a pair; each sum is one
 * chain of multiply-adds over k. */
PDS_KERNEL(pds_cu_gemm_scalar, pds_cu_gemm, GEMM_SCALAR_THREADS) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Z);
  const uint32_t low = PDS_BLOCK_X * GEMM_SCALAR_ROWS;
  if (low >= part.rows) return;
  const uint32_t panels = gemm_panels(p), first = PDS_BLOCK_Y * GEMM_SCALAR_PANELS;
  const uint32_t x_end = gemm_x_end(p), k_end = gemm_min(p->k_pad, x_end);
  float *xs = (float *)PDS_SHARED, *ws = xs + GEMM_SCALAR_K * GEMM_SCALAR_LINE;

  const uint32_t x_row = PDS_TID / 4, w_panel = PDS_TID / 64;
  gemm_fetch fetch;
  fetch.row = low + x_row < part.rows ? gemm_x_row(p, &part, low + x_row) : 0;
  fetch.panel = first + w_panel < panels ? part.w + (first + w_panel) * p->panel_bytes : 0;
  fetch.x_k = PDS_TID % 4 * 4;
  fetch.w_k = PDS_TID / 4 % 16;
  fetch.quad = PDS_TID % 4;
  float *x_to = xs + fetch.x_k * GEMM_SCALAR_LINE + x_row;
  gemm_f4 *w_to =
      (gemm_f4 *)(ws + fetch.w_k * (GEMM_SCALAR_PANELS * 16) + w_panel * 16) + fetch.quad;

  const uint32_t my_rows = PDS_TID / 16 * 4, pair = PDS_TID % 16 / 8, col = PDS_TID % 8 * 2;
  float sum[4][2][2], x_next[4], w_next[4];
  PDS_UNROLL
  for (uint32_t i = 0; i < 16; i++) sum[i / 4][i / 2 % 2][i % 2] = 0;
  gemm_fetch_stage(p, &fetch, 0, x_end, x_next, w_next);
  for (uint32_t base = 0; base < k_end; base += GEMM_SCALAR_K) {
    const gemm_f4 w_now = {w_next[0], w_next[1], w_next[2], w_next[3]};
    pds_sync(); /* all are done with the stage before */
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) x_to[i * GEMM_SCALAR_LINE] = x_next[i];
    *w_to = w_now;
    pds_sync();
    if (base + GEMM_SCALAR_K < k_end)
      gemm_fetch_stage(p, &fetch, base + GEMM_SCALAR_K, x_end, x_next, w_next);
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

/* Four columns of a few rows from one panel: sum[row][column] of the lane's share of k. `panel`:
 * from these columns on. The block's lanes, in pairs, take 64-byte rows of the panel in turn: of fp32
 * weights, a k each. Here x is fp32 too. */
PDS_FN void gemm_few_f32(const pds_cu_gemm *p, const uint8_t *const *row, uint32_t rows,
                         const uint8_t *panel, float (*sum)[4]) {
  const uint32_t x_end = gemm_x_end(p), turns = GEMM_FEW_WARPS * 16;
  for (uint32_t base = PDS_TID / 2; base < x_end; base += turns * GEMM_FEW_AHEAD) {
    pds_u4 word[GEMM_FEW_AHEAD];
    PDS_UNROLL
    for (uint32_t i = 0; i < GEMM_FEW_AHEAD; i++)
      word[i] = pds_load16_stream(panel + (uint64_t)gemm_min(base + i * turns, p->k_pad - 1) * 64);
    PDS_UNROLL
    for (uint32_t r = 0; r < GEMM_FEW_ROWS; r++) {
      if (r >= rows) continue;
      float x[GEMM_FEW_AHEAD];
      PDS_UNROLL
      for (uint32_t i = 0; i < GEMM_FEW_AHEAD; i++)
        x[i] = ((const float *)row[r])[gemm_min(base + i * turns, x_end - 1)];
      PDS_UNROLL
      for (uint32_t i = 0; i < GEMM_FEW_AHEAD; i++) {
        const float v = base + i * turns < x_end ? x[i] : 0;
        sum[r][0] = fmaf(v, pds_float(word[i].x), sum[r][0]);
        sum[r][1] = fmaf(v, pds_float(word[i].y), sum[r][1]);
        sum[r][2] = fmaf(v, pds_float(word[i].z), sum[r][2]);
        sum[r][3] = fmaf(v, pds_float(word[i].w), sum[r][3]);
      }
    }
  }
}

PDS_FN void gemm_few_others(const pds_cu_gemm *p, const uint8_t *const *row, uint32_t rows,
                            const uint8_t *panel, uint32_t quad, float (*sum)[4]) {
  const uint32_t shift = gemm_word_shift(p), x_end = gemm_x_end(p), words = p->k_pad >> shift;
  for (uint32_t at = PDS_TID / 2; at < words; at += GEMM_FEW_WARPS * 16) {
    const uint32_t from = at << shift;
    const pds_u4 v = pds_load16_stream(panel + (uint64_t)at * 64 + quad * 16);
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
    float scale[4];
    PDS_UNROLL
    for (uint32_t c = 0; c < 4; c++) scale[c] = gemm_scale(p, panel, from, quad * 4 + c);
    for (uint32_t k = from; k < gemm_min(from + (1u << shift), x_end); k++) {
      PDS_UNROLL
      for (uint32_t i = 0; i < GEMM_FEW_ROWS * 4; i++) {
        const uint32_t r = i / 4, c = i % 4;
        if (r >= rows) continue;
        const float w = gemm_value(p, word[c], k - from) * scale[c];
        sum[r][c] = fmaf(gemm_x_value(p, row[r], k), w, sum[r][c]);
      }
    }
  }
}

/* 8 columns of a panel, or of a pair in swiglu, times 4 rows: k is split over the lanes and warps,
 * and their sums are added up in an order that does not depend on rows. */
PDS_KERNEL(pds_cu_gemm_few, pds_cu_gemm, GEMM_FEW_WARPS * 32) {
  const gemm_part part = gemm_part_of(p, PDS_BLOCK_Y);
  const uint32_t low = PDS_BLOCK_Z * GEMM_FEW_ROWS;
  if (low >= part.rows) return;
  const uint32_t rows = gemm_min(part.rows - low, GEMM_FEW_ROWS), halves = p->swiglu ? 2 : 1;
  const uint32_t quad = PDS_BLOCK_X % 2 * 2 + PDS_LANE % 2;
  float *parts = (float *)PDS_SHARED; /* [halves][warps][rows][8] */
  const uint8_t *row[GEMM_FEW_ROWS];
  PDS_UNROLL
  for (uint32_t r = 0; r < GEMM_FEW_ROWS; r++)
    row[r] = gemm_x_row(p, &part, low + gemm_min(r, rows - 1));

  for (uint32_t h = 0; h < halves; h++) {
    float sum[GEMM_FEW_ROWS][4];
    const uint8_t *panel = part.w + (PDS_BLOCK_X / 2 * halves + h) * p->panel_bytes;
    PDS_UNROLL
    for (uint32_t i = 0; i < GEMM_FEW_ROWS * 4; i++) sum[i / 4][i % 4] = 0;
    if (p->w_dtype == PDS_CU_F32 && p->act_dtype == PDS_CU_F32) {
      gemm_few_f32(p, row, rows, panel + quad * 16, sum);
    } else {
      gemm_few_others(p, row, rows, panel, quad, sum);
    }
    PDS_UNROLL
    for (uint32_t r = 0; r < GEMM_FEW_ROWS; r++) {
      if (r >= rows) continue;
      PDS_UNROLL
      for (uint32_t i = 0; i < 4; i++) {
        float *s = &sum[r][i];
        PDS_UNROLL
        for (uint32_t far = 2; far < 32; far *= 2) *s += pds_shfl_xor(*s, far);
        if (PDS_LANE < 2)
          parts[((h * GEMM_FEW_WARPS + PDS_WARP) * GEMM_FEW_ROWS + r) * 8 + PDS_LANE * 4 + i] = *s;
      }
    }
  }
  pds_sync();
  if (PDS_TID < rows * 8) {
    float total[2] = {0, 0};
    PDS_UNROLL
    for (uint32_t i = 0; i < 2 * GEMM_FEW_WARPS; i++) {
      if (i / GEMM_FEW_WARPS < halves)
        total[i / GEMM_FEW_WARPS] += parts[i * GEMM_FEW_ROWS * 8 + PDS_TID];
    }
    const uint32_t col = PDS_BLOCK_X * 8 + PDS_TID % 8;
    const uint64_t at = gemm_y_at(p, &part, low + PDS_TID / 8) + col;
    gemm_put(p, part.y, at, col, p->swiglu ? gemm_silu(total[0]) * total[1] : total[0]);
  }
  if (PDS_BLOCK_X * 8 + 8 >= p->cols) gemm_zero_pad(p, &part, low, low + rows);
}
