/* attend_few.h: GQA of few rows (decode) on tensor cores. No include guard: included once for each NAME,
 * with D the most dimensions of a head.
 *
 * A block takes up to 16 (row, head) pairs of one sequence and KV head, and one part of the context. Each
 * warp walks half blocks of 32 tokens on its own, with STAGES - 1 of them on their way; in
 * the end the warps' outputs are joined. Grid: parts, KV heads times their tiles of 16 heads, rows. */

PDS_KERNEL_OF(NAME, pds_cu_attention, 256) {
  enum {
    STAGES = 3,
    PANELS = D / 16, /* of values; and steps of k = 16 of the keys */
    KEY_ROWS = D / 2,
    KEYS = D * 64, /* bytes of a half block's keys, and of its values */
    STAGE = 2 * KEYS,
    PITCH = D + 4,   /* floats of a pair's output; not all in the same banks */
    OUT = 16 * PITCH /* of a warp's */
  };
  const uint32_t group = pds_group_heads(p), tiles = (group + 15) / 16,
                 kv_head = PDS_BLOCK_Y / tiles, first_head = PDS_BLOCK_Y % tiles * 16,
                 heads = pds_least(group - first_head, 16), together = 16 / heads,
                 row = PDS_BLOCK_Z, g = PDS_LANE / 4, t = PDS_LANE % 4, warps = PDS_THREADS / 32;
  const int32_t seq = p->seq[row];
  /* Rows of a run go together; the first of them does the work. */
  if (pds_rows_before(p, row) % together != 0) return;
  const uint32_t last = pds_run_end(p, row, pds_least(row + together - 1, p->rows - 1));
  uint32_t begin, end;
  if (!pds_keys_of(p, row, last, PDS_BLOCK_X, &begin, &end)) return;

  const uint32_t pairs = (last - row + 1) * heads, key_words = (p->key_dims + 1) / 2,
                 value_panels = pds_up(p->value_dims, 16) / 16;
  const float scale = p->scale * PDS_LOG2_E;
  const uint32_t key_at = pds_thread_keys(), value_at = KEYS + pds_thread_values();
  const uint32_t load_key[2] = {pds_key_at(0, PDS_LANE / 4, PDS_LANE % 4, KEY_ROWS),
                                pds_key_at(0, 8 + PDS_LANE / 4, PDS_LANE % 4, KEY_ROWS)},
                 load_value = KEYS + pds_value_at(0, PDS_LANE / 4, PDS_LANE % 4, 16);
  uint8_t *queries = PDS_SHARED + warps * (STAGES * STAGE); /* one copy */
  uint8_t *ring = PDS_SHARED + PDS_WARP * (STAGES * STAGE);

  pds_query_row q[2];
  float o[PANELS][2][4];
  pds_u4 words[2];
  PDS_UNROLL
  for (uint32_t i = 0; i < 2; i++)
    pds_query_begin(p, &q[i], row + (g + 8 * i) / heads, g + 8 * i < pairs);
  for (uint32_t j = PDS_WARP * 2; j < PANELS; j += warps * 2) {
    PDS_UNROLL
    for (uint32_t i = 0; i < 2; i++) { /* pairs that there are not: those of the first row */
      const uint32_t pair = g + 8 * i < pairs ? g + 8 * i : 0;
      words[i] = pds_query_at(p, row + pair / heads, kv_head * group + first_head + pair % heads,
                              16 * j + 8 * t);
    }
    pds_store_query(queries + j * 512, words[0], words[1], 0);
  }
  PDS_UNROLL
  for (uint32_t j = 0; j < PANELS; j++) {
    PDS_UNROLL
    for (uint32_t n = 0; n < 2; n++) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0;
  }
  pds_sync();

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
      for (uint32_t j = 0; j < KEYS / 512; j++) { /* 8 rows of a panel each */
        const uint32_t panel = j * 8 / KEY_ROWS, r = j * 8 % KEY_ROWS;
        pds_copy16(stage + load_key[j % 2] + (panel * KEY_ROWS + r / 16 * 16) * 64,
                   keys + PDS_LANE * 16 + panel * p->key_panel_bytes + r * 64,
                   r + PDS_LANE / 4 < key_words);
      }
      PDS_UNROLL
      for (uint32_t j = 0; j < KEYS / 512; j++)
        pds_copy16(stage + load_value + j * 512,
                   values + half * 1024 + PDS_LANE * 16 + j / 2 * 2048 + j % 2 * 512,
                   j / 2 < value_panels && j % 2 * 16 + PDS_LANE / 4 * 2 < tokens);
    }
    pds_copy_commit();
    if (n < STAGES - 1) continue;
    const uint32_t used = n - (STAGES - 1), token = (first + used * warps) * 32;
    const uint8_t *stage = ring + used % STAGES * STAGE;
    float s[4][4], factor[2], column[2][2];
    PDS_UNROLL
    for (uint32_t e = 0; e < 4; e++) s[e][0] = s[e][1] = s[e][2] = s[e][3] = 0;
    PDS_UNROLL
    for (uint32_t k = 0; k < PANELS; k++) {
      const pds_u4 a = pds_load16(queries + k * 512 + PDS_LANE * 16);
      PDS_UNROLL
      for (uint32_t e = 0; e < 4; e++) {
        uint32_t b[2];
        pds_key_words(b, stage + e / 2 * KEY_ROWS * 64 + k / 2 * 1024, key_at, k % 2, e % 2);
        pds_mma_bf16(s[e], &a.x, b);
      }
    }
    PDS_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      pds_mask(p, &q[i], i, s, 4, token);
      factor[i] = pds_softmax(&q[i], i, s, 4, scale);
    }
    pds_to_columns(column, factor);
    PDS_UNROLL
    for (uint32_t j = 0; j < PANELS; j++) {
      pds_scale_column(o[j][0], column[0]);
      pds_scale_column(o[j][1], column[1]);
    }
    PDS_UNROLL
    for (uint32_t k = 0; k < 2; k++) { /* 16 tokens */
      uint32_t b[2][2];
      PDS_UNROLL
      for (uint32_t n = 0; n < 2; n++) {
        b[n][0] = pds_pack_bf16(s[2 * k][2 * n], s[2 * k][2 * n + 1]);
        b[n][1] = pds_pack_bf16(s[2 * k + 1][2 * n], s[2 * k + 1][2 * n + 1]);
      }
      PDS_UNROLL
      for (uint32_t j = 0; j < PANELS; j++) {
        uint32_t a[4];
        pds_value_words(a, stage + value_at + j * 1024 + k * 512);
        pds_mma_bf16(o[j][0], a, b[0]);
        pds_mma_bf16(o[j][1], a, b[1]);
      }
    }
  }

  /* Join: outputs [warp][16 pairs][PITCH], then maxima and sums [warp][16]. */
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
  }
  PDS_UNROLL
  for (uint32_t i = 0; i < 4; i++) {
    float *to = joined + (PDS_WARP * 16 + i / 2 * 8 + 2 * t + i % 2) * PITCH + 2 * g;
    PDS_UNROLL
    for (uint32_t j = 0; j < PANELS; j++) {
      pds_store_two(to + 16 * j, o[j][i / 2][i % 2], o[j][i / 2][2 + i % 2]);
    }
  }
  pds_sync();
  for (uint32_t i = PDS_TID; i < pairs * (D / 4); i += PDS_THREADS) {
    const uint32_t pair = i / (D / 4), d = i % (D / 4) * 4, to = row + pair / heads,
                   head = kv_head * group + first_head + pair % heads;
    float top = -PDS_INFINITY, sum = 0, v[4] = {0, 0, 0, 0};
    for (uint32_t w = 0; w < warps; w++) top = fmaxf(top, tops[w * 16 + pair]);
    for (uint32_t w = 0; w < warps; w++) {
      const uint32_t at = w * 16 + pair;
      const float factor = tops[at] == top ? 1 : pds_exp2((tops[at] - top) * scale);
      sum += sums[at] * factor;
      const pds_f4 one = pds_load_f4(joined + at * PITCH + d);
      PDS_UNROLL
      for (uint32_t e = 0; e < 4; e++) v[e] += one.x[e] * factor;
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
      for (uint32_t e = 0; e < 4; e++) v[e] *= r;
      if (d == 0) pds_store_padding(p, to, head);
    }
    pds_store_some(p, to, head, PDS_BLOCK_X, d, 4, v);
  }
}

#undef NAME
#undef D
