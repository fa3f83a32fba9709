/* attend_mla.h: MLA, absorbed, on tensor cores. No include guard: included once for each NAME, with MT
 * times 16 (row, head) pairs a block, and STAGES half blocks in shared memory.
 *
 * A block walks the cache by half blocks of 32 tokens. All its warps work on one together: scores, each
 * warp a part of the key's dimensions for 16 pairs; softmax; and outputs, each warp a part of the value's
 * dimensions, for which two key words of neighbouring tokens become two of neighbouring dimensions. Grid:
 * tiles of pairs, parts of the context. */

PDS_KERNEL_OF(NAME, pds_cu_attention, 256) {
  enum {
    WARPS = 8,
    TILE = 16 * MT,
    KEY_PARTS = WARPS / MT,       /* of the key's dimensions, a warp each */
    ROW_THREADS = 256 / TILE,     /* of the softmax of one pair */
    ROW_WORDS = 16 / ROW_THREADS, /* two tokens each, of such a thread */
    OUT_TILES = MT > 1 ? 2 : 1,   /* of 16 pairs, of a warp's outputs */
    OUT_GROUPS = MT / OUT_TILES,
    OUT_PARTS = 512 * OUT_GROUPS / WARPS / 16 /* 16 dimensions each, of a warp's outputs */
  };
  const uint32_t tile = PDS_GRID_X - 1 - PDS_BLOCK_X, split = PDS_BLOCK_Y, g = PDS_LANE / 4,
                 t = PDS_LANE % 4;
  const uint32_t key_rows = p->q_stride / 2, unit = p->q_stride * 64, steps = p->q_stride / 16,
                 key_words = (p->key_dims + 1) / 2;
  const uint32_t last_row = pds_least((tile * TILE + TILE - 1) / p->heads, p->rows - 1);
  const float scale = p->scale * PDS_LOG2_E;
  /* Shared memory: half blocks, queries, scores [KEY_PARTS][TILE][32], weights [TILE][32] bf16,
   * factors (in the end maxima and sums) [TILE]. */
  uint8_t *ring = PDS_SHARED, *queries = ring + STAGES * unit;
  float *scores = (float *)(queries + TILE * p->q_stride * 2);
  uint32_t *weights = (uint32_t *)(scores + KEY_PARTS * TILE * 32);
  float *factors = (float *)(weights + TILE * 16);

  for (uint32_t i = PDS_WARP; i < MT * (p->q_stride / 32); i += WARPS) {
    const uint32_t m = i % MT, k = i / MT;
    pds_u4 query[2];
    PDS_UNROLL
    for (uint32_t n = 0; n < 2; n++) {
      const uint32_t pair = tile * TILE + m * 16 + n * 8 + g;
      const pds_u4 none = {0, 0, 0, 0};
      query[n] = none;
      if (pair / p->heads < p->rows)
        query[n] = pds_query_at(p, pair / p->heads, pair % p->heads, 32 * k + 8 * t);
    }
    pds_store_query(queries + (m * steps + 2 * k) * 512, query[0], query[1], 1);
  }
  const uint32_t load_at[2] = {latent_at(0, PDS_TID / 4, PDS_TID % 4, key_rows),
                               latent_at(1, PDS_TID / 4, PDS_TID % 4, key_rows)};
  /* of the scores: this warp's pairs and part of the key */
  const uint32_t score_tile = PDS_WARP % MT, key_part = PDS_WARP / MT;
  const uint8_t *query = queries + score_tile * steps * 512 + PDS_LANE * 16;
  const uint32_t key_at[2] = {latent_at(0, 4 * t, g / 2, key_rows) + g % 2 * 8,
                              latent_at(1, 4 * t, g / 2, key_rows) + g % 2 * 8};
  /* of the softmax: this thread's pair and tokens */
  const uint32_t soft_row = PDS_TID / ROW_THREADS, soft_word = PDS_TID % ROW_THREADS;
  const uint32_t soft_at = tile * TILE + soft_row;
  /* of the outputs: this warp's pairs and dimensions */
  const uint32_t out_row = PDS_WARP % OUT_GROUPS * OUT_TILES * 16 + g,
                 out_dim = PDS_WARP / OUT_GROUPS * OUT_PARTS * 16;
  const uint32_t value_at[2] = {latent_at(t / 2, g, t % 2 * 2, key_rows),
                                latent_at(t / 2, 8 + g, t % 2 * 2, key_rows)};

  for (uint32_t row = tile * TILE / p->heads, run; row <= last_row; row = run + 1) {
    run = pds_run_end(p, row, last_row);
    uint32_t begin, end;
    if (!pds_keys_of(p, row, run, split, &begin, &end)) continue;
    const int32_t seq = p->seq[row];
    const uint32_t soft_of = soft_at / p->heads; /* its row */
    const int mine = soft_of >= row && soft_of <= run;
    pds_query_row q;
    pds_query_begin(p, &q, soft_of, mine);
    const uint32_t seen = pds_query_first(p, &q);
    float o[OUT_TILES][OUT_PARTS * 2][4];
    PDS_UNROLL
    for (uint32_t m = 0; m < OUT_TILES; m++) {
      PDS_UNROLL
      for (uint32_t j = 0; j < OUT_PARTS * 2; j++)
        o[m][j][0] = o[m][j][1] = o[m][j][2] = o[m][j][3] = 0;
    }

    const uint32_t first = begin / 32, count = (end - 1) / 32 + 1 - first;
    pds_sync(); /* queries are there; the run before is done */
    for (uint32_t n = 0; n < count + STAGES - 1; n++) {
      const uint32_t used = n - (STAGES - 1);
      const uint8_t *stage = ring + used % STAGES * unit;
      const uint32_t tokens = end - (first + used) * 32;
      if (n >= STAGES - 1) {
        if (tokens < 32 && tokens % 4 != 0) { /* beside what is there, others' old keys */
          const uint32_t chunk = tokens / 4 % 4, panel = tokens / 16;
          for (uint32_t r = PDS_TID; r < key_rows; r += 256) {
            uint32_t *word =
                (uint32_t *)(ring + used % STAGES * unit + latent_at(panel, r, chunk, key_rows));
            for (uint32_t i = tokens % 4; i < 4; i++) word[i] = 0;
          }
          pds_sync();
        }
        float s[2][2][4]; /* [16 tokens][8 pairs]: tokens 2g (0, 1) and 2g + 1 (2, 3) */
        PDS_UNROLL
        for (uint32_t i = 0; i < 4; i++) {
          float *one = s[i / 2][i % 2];
          one[0] = one[1] = one[2] = one[3] = 0;
        }
        for (uint32_t k = key_part; k < p->q_stride / 32; k += KEY_PARTS) {
          PDS_UNROLL
          for (uint32_t i = 0; i < 2; i++) {
            const pds_u4 b = pds_load16(query + (2 * k + i) * 512);
            PDS_UNROLL
            for (uint32_t m = 0; m < 2; m++) {
              uint32_t a[4];
              pds_two_words(a, stage + key_at[m] + k * 1024 + i * 128);
              pds_two_words(a + 2, stage + (key_at[m] ^ 64) + k * 1024 + i * 128);
              pds_mma_bf16(s[m][0], a, &b.x);
              pds_mma_bf16(s[m][1], a, &b.z);
            }
          }
        }
        PDS_UNROLL
        for (uint32_t i = 0; i < 8; i++) {
          const uint32_t m = i / 4, n = i / 2 % 2, c = i % 2,
                         pair = score_tile * 16 + 8 * n + 2 * t + c;
          float *to = scores + (key_part * TILE + pair) * 32 + score_word(pair, 8 * m + g);
          to[0] = s[m][n][c];
          to[1] = s[m][n][2 + c];
        }
        pds_sync(); /* scores are there, and all are done with the half block before */
      }
      if (n < count) {
        const uint32_t left = end - (first + n) * 32, half = (first + n) % 2;
        const uint8_t *keys =
            pds_kv_at(p, seq, (first + n) / 2, 0) + half * 2 * p->key_panel_bytes + PDS_TID * 16;
        uint8_t *to = ring + n % STAGES * unit;
        PDS_UNROLL
        for (uint32_t panel = 0; panel < 2; panel++) {
          const int there = panel * 16 + PDS_TID % 4 * 4 < left;
          for (uint32_t r = 0; r + PDS_TID / 4 < key_rows; r += 64)
            pds_copy16(to + load_at[panel] + r * 64, keys + panel * p->key_panel_bytes + r * 64,
                       there && r + PDS_TID / 4 < key_words);
        }
      }
      pds_copy_commit();
      if (n < STAGES - 1) {
        if (n + 2 == STAGES) { /* the first is there */
          pds_copy_wait(STAGES - 2);
          pds_sync();
        }
        continue;
      }

      float s[ROW_WORDS * 2], top = q.max;
      PDS_UNROLL
      for (uint32_t j = 0; j < ROW_WORDS; j++) {
        const uint32_t word = soft_word + j * ROW_THREADS,
                       at = soft_row * 32 + score_word(soft_row, word);
        float low = 0, high = 0;
        PDS_UNROLL
        for (uint32_t k = 0; k < KEY_PARTS; k++) {
          low += scores[k * TILE * 32 + at];
          high += scores[k * TILE * 32 + at + 1];
        }
        const uint32_t token = (first + used) * 32 + word * 2;
        s[2 * j] = token >= seen && token < q.end ? low : -PDS_INFINITY;
        s[2 * j + 1] = token + 1 >= seen && token + 1 < q.end ? high : -PDS_INFINITY;
        top = fmaxf(top, fmaxf(s[2 * j], s[2 * j + 1]));
      }
      PDS_UNROLL
      for (uint32_t m = 1; m < ROW_THREADS; m *= 2) top = fmaxf(top, pds_shfl_xor(top, m));
      const float base = top == -PDS_INFINITY ? 0 : top, factor = pds_exp2((q.max - base) * scale);
      q.sum *= factor;
      q.max = top;
      PDS_UNROLL
      for (uint32_t j = 0; j < ROW_WORDS; j++) {
        const float low = pds_exp2((s[2 * j] - base) * scale),
                    high = pds_exp2((s[2 * j + 1] - base) * scale);
        q.sum += low + high;
        weights[weight_at(soft_row, soft_word + j * ROW_THREADS)] = pds_pack_bf16(low, high);
      }
      if (PDS_TID % ROW_THREADS == 0) factors[soft_row] = factor;
      pds_copy_wait(STAGES - 2); /* the next half block */
      pds_sync();

      pds_u4 a[OUT_TILES][2];
      PDS_UNROLL
      for (uint32_t m = 0; m < OUT_TILES; m++) {
        const uint32_t r = out_row + 16 * m;
        pds_scale_rows(o[m], OUT_PARTS * 2, factors[r], factors[r + 8]);
        PDS_UNROLL
        for (uint32_t i = 0; i < 2; i++)
          a[m][i] = pds_load16(weights + (r / 16 * 2 + i) * 128 + weights_of_thread());
      }
      PDS_UNROLL
      for (uint32_t j = 0; j < OUT_PARTS; j++) {
        /* Dimensions beyond the key's, which nobody stores, are those of its end. */
        const uint32_t part = pds_least(out_dim / 32 + j / 2, key_rows / 16 - 1);
        const uint32_t at = value_at[j % 2];
        const pds_u4 x = pds_load16(stage + at + part * 1024),
                     y = pds_load16(stage + (at ^ 16) + part * 1024);
        const uint32_t b[4][2] = {{low_halves(x.x, x.y), low_halves(x.z, x.w)},
                                  {high_halves(x.x, x.y), high_halves(x.z, x.w)},
                                  {low_halves(y.x, y.y), low_halves(y.z, y.w)},
                                  {high_halves(y.x, y.y), high_halves(y.z, y.w)}};
        PDS_UNROLL
        for (uint32_t m = 0; m < OUT_TILES; m++) {
          pds_mma_bf16(o[m][2 * j], &a[m][0].x, b[0]);
          pds_mma_bf16(o[m][2 * j + 1], &a[m][0].x, b[1]);
          pds_mma_bf16(o[m][2 * j], &a[m][1].x, b[2]);
          pds_mma_bf16(o[m][2 * j + 1], &a[m][1].x, b[3]);
        }
      }
    }

    PDS_UNROLL
    for (uint32_t m = 1; m < ROW_THREADS; m *= 2) q.sum += pds_shfl_xor(q.sum, m);
    pds_copy_wait(0);
    pds_sync(); /* factors have been read */
    if (PDS_TID % ROW_THREADS == 0) {
      factors[soft_row] = p->splits > 1 ? 1 : 1 / q.sum;
      if (p->splits > 1 && mine) {
        float *part = pds_partial_at(p, soft_of, soft_at % p->heads, split);
        part[0] = q.max * p->scale;
        part[1] = q.sum;
      }
      if (p->splits == 1 && mine) pds_store_padding(p, soft_of, soft_at % p->heads);
    }
    pds_sync();
    PDS_UNROLL
    for (uint32_t m = 0; m < OUT_TILES * 2; m++) {
      const uint32_t r = out_row + 8 * m, at = tile * TILE + r, to = at / p->heads;
      if (to < row || to > run) continue;
      const float factor = factors[r];
      PDS_UNROLL
      for (uint32_t j = 0; j < OUT_PARTS; j++) {
        float v[4];
        PDS_UNROLL
        for (uint32_t e = 0; e < 4; e++) v[e] = o[m / 2][2 * j + e % 2][m % 2 * 2 + e / 2] * factor;
        pds_store_some(p, to, at % p->heads, split, out_dim + 16 * j + 4 * t, 4, v);
      }
    }
  }
}

#undef NAME
#undef MT
#undef STAGES
