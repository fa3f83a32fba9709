/* attend_few.h: GQA of few rows (decode) on tensor cores. No include guard: included once for each NAME,
 * with D the most dimensions of a head.
 *
 * A block takes up to 16 (row, head) pairs of one sequence and KV head, and one part of the context. Each
 * warp walks half blocks of 32 tokens on its own, with STAGES - 1 of them on their way; in
 * the end the warps' outputs are joined. Grid: parts, KV heads times their tiles of 16 heads, rows. */

PDS_KERNEL_OF(NAME, pds_cu_attention, 256) {
  enum {
    STAGES = 3,
    PARTS = D / 32,
    KEY_ROWS = D / 2,
    KEYS = D * 64, /* bytes of a half block's keys, and of its values */
    STAGE = 2 * KEYS,
    OUT = 16 * D /* floats of a warp's output */
  };
  const uint32_t group = pds_group_heads(p), tiles = (group + 15) / 16,
                 kv_head = PDS_BLOCK_Y / tiles, first_head = PDS_BLOCK_Y % tiles * 16,
                 heads = pds_least(group - first_head, 16), together = 16 / heads,
                 row = PDS_BLOCK_Z, g = PDS_LANE / 4, t = PDS_LANE % 4, warps = PDS_THREADS / 32;
  const int32_t seq = p->seq[row];
  /* Rows of a run go together; the first of them does the work. */
  uint32_t before = 0;
  while (before < row && p->seq[row - before - 1] == seq) before++;
  if (before % together != 0) return;
  const uint32_t last = pds_run_end(p, row, pds_least(row + together - 1, p->rows - 1));
  uint32_t begin, end;
  if (!pds_keys_of(p, row, last, PDS_BLOCK_X, &begin, &end)) return;

  const uint32_t pairs = (last - row + 1) * heads, key_words = (p->key_dims + 1) / 2,
                 value_panels = pds_up(p->value_dims, 16) / 16;
  const float scale = p->scale * PDS_LOG2_E;
  const uint32_t key_at = pds_tile_at(g / 4, 4 * t, g % 4, KEY_ROWS),
                 value_at = KEYS + pds_tile_at(g / 4, 4 * t, g % 4, 16);
  uint8_t *ring = PDS_SHARED + PDS_WARP * (STAGES * STAGE);

  pds_query_row q[2];
  uint32_t a[PARTS][8];
  float o[PARTS * 4][4];
  PDS_UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    const uint32_t pair = g + 8 * i;
    q[i].valid = pair < pairs;
    q[i].row = q[i].valid ? row + pair / heads : row;
    q[i].head = kv_head * group + first_head + pair % heads;
    const uint32_t position = (uint32_t)p->position[q[i].row];
    q[i].seen = pds_first_key(p, position);
    q[i].end = q[i].valid ? position + 1 : 0;
    q[i].max = -PDS_INFINITY;
    q[i].sum = 0;
  }
  PDS_UNROLL
  for (uint32_t j = 0; j < PARTS; j++)
    pds_rows_as_a(a[j], pds_query_at(p, q[0].row, q[0].head, 32 * j + 8 * t),
                  pds_query_at(p, q[1].row, q[1].head, 32 * j + 8 * t));
  PDS_UNROLL
  for (uint32_t j = 0; j < PARTS * 4; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;

  const uint32_t first = begin / 32 + PDS_WARP, stop = (end - 1) / 32 + 1,
                 count = first < stop ? (stop - first + warps - 1) / warps : 0;
  /* Step n loads this warp's half block n, and uses the one of STAGES - 1 steps before. */
  for (uint32_t n = 0; n < count + STAGES - 1; n++) {
    if (n >= STAGES - 1) {
      pds_copy_wait(STAGES - 2);
      pds_warp_sync();
    }
    const uint32_t load = first + n * warps;
    if (n < count) {
      const uint8_t *keys = pds_kv_at(p, seq, load / 2, kv_head), *values = keys + p->key_bytes;
      const uint32_t half = load % 2, tokens = end - load * 32;
      uint8_t *stage = ring + n % STAGES * STAGE;
      keys += 2 * half * p->key_panel_bytes;
      PDS_UNROLL
      for (uint32_t j = 0; j < KEYS / 512; j++) {
        const uint32_t i = j * 32 + PDS_LANE, panel = i / (KEY_ROWS * 4), r = i / 4 % KEY_ROWS;
        pds_copy16(stage + pds_tile_at(panel, r, i % 4, KEY_ROWS),
                   keys + panel * p->key_panel_bytes + i % (KEY_ROWS * 4) * 16, r < key_words);
      }
      PDS_UNROLL
      for (uint32_t j = 0; j < KEYS / 512; j++) {
        const uint32_t i = j * 32 + PDS_LANE, panel = i / 64, r = i / 4 % 16;
        pds_copy16(stage + KEYS + pds_tile_at(panel, r, i % 4, 16),
                   values + panel * 2048 + half * 1024 + i % 64 * 16,
                   panel < value_panels && 2 * r < tokens);
      }
    }
    pds_copy_commit();
    if (n < STAGES - 1) continue;
    const uint32_t used = n - (STAGES - 1), token = (first + used * warps) * 32;
    const uint8_t *stage = ring + used % STAGES * STAGE;
    float s[4][4], factor[2];
    uint32_t weights[8];
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0;
    PDS_UNROLL
    for (uint32_t j = 0; j < PARTS; j++)
      pds_mma_panel(s, a[j], stage + key_at + j * 1024, stage + (key_at ^ 64) + j * 1024);
    PDS_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      pds_mask(&q[i], i, s, 1, token);
      factor[i] = pds_softmax(&q[i], i, s, 1, scale);
    }
    pds_rescale(o, PARTS * 4, factor);
    pds_products_as_a(weights, s);
    PDS_UNROLL
    for (uint32_t j = 0; j < PARTS; j++)
      pds_mma_panel(o + 4 * j, weights, stage + value_at + j * 2048,
                    stage + (value_at ^ 64) + j * 2048);
  }

  /* Join: outputs [warp][16 pairs][D], then maxima and sums [warp][16]. */
  float *joined = (float *)PDS_SHARED, *tops = joined + warps * OUT, *sums = tops + warps * 16;
  pds_copy_wait(0);
  pds_sync();
  PDS_UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    float sum = q[i].sum;
    sum += pds_shfl_xor(sum, 1);
    sum += pds_shfl_xor(sum, 2);
    const uint32_t at = PDS_WARP * 16 + g + 8 * i;
    if (t == 0) {
      tops[at] = q[i].max;
      sums[at] = sum;
    }
    PDS_UNROLL
    for (uint32_t j = 0; j < PARTS; j++) {
      PDS_UNROLL
      for (uint32_t c = 0; c < 2; c++) {
        pds_f4 v;
        PDS_UNROLL
        for (uint32_t e = 0; e < 4; e++) v.x[e] = o[4 * j + e][2 * i + c];
        pds_store_f4(joined + at * D + 32 * j + 8 * t + 4 * c, v);
      }
    }
  }
  pds_sync();
  for (uint32_t i = PDS_TID; i < pairs * (D / 8); i += PDS_THREADS) {
    const uint32_t pair = i / (D / 8), d = i % (D / 8) * 8, to = row + pair / heads,
                   head = kv_head * group + first_head + pair % heads;
    float top = -PDS_INFINITY, sum = 0, v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (uint32_t w = 0; w < warps; w++) top = fmaxf(top, tops[w * 16 + pair]);
    for (uint32_t w = 0; w < warps; w++) {
      const uint32_t at = w * 16 + pair;
      const float factor = tops[at] == top ? 1 : pds_exp2((tops[at] - top) * scale);
      sum += sums[at] * factor;
      PDS_UNROLL
      for (uint32_t e = 0; e < 8; e++) v[e] += joined[at * D + d + e] * factor;
    }
    if (p->splits > 1) {
      float *part = pds_partial_at(p, to, head, PDS_BLOCK_X);
      if (d == 0) {
        part[0] = top * p->scale;
        part[1] = sum;
      }
    } else {
      const float r = 1 / sum;
      PDS_UNROLL
      for (uint32_t e = 0; e < 8; e++) v[e] *= r;
      if (d == 0) pds_store_padding(p, to, head);
    }
    pds_store_some(p, to, head, PDS_BLOCK_X, d, 8, v);
  }
}

#undef NAME
#undef D
