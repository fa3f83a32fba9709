/* attend_many.h: GQA of many rows on tensor cores. No include guard: included once for each NAME, with D
 * the most dimensions of a head and HALVES how many half blocks of scores are in registers together.
 *
 * A block takes 128 (row, head) pairs of one KV head, 16 a warp, and walks the cache a block of 64 tokens
 * at a time, the next one on its way while one is used. Where its rows belong to several sequences, it
 * does so for each. */

PDS_KERNEL_OF(NAME, pds_cu_attention, 256) {
  enum {
    WARPS = 8,
    TILE = 16 * WARPS,
    PARTS = D / 32,
    KEY_ROWS = D / 2,
    KEYS = D * 128, /* bytes of a block's keys, and of its values */
    STAGE = 2 * KEYS
  };
  const uint32_t tile = (PDS_GRID_X - 1 - PDS_BLOCK_X) / p->kv_heads, /* the longest first */
      kv_head = PDS_BLOCK_X % p->kv_heads, group = pds_group_heads(p), g = PDS_LANE / 4,
                 t = PDS_LANE % 4;
  const uint32_t last_row = pds_least((tile * TILE + TILE - 1) / group, p->rows - 1);
  const float scale = p->scale * PDS_LOG2_E;
  const uint32_t key_words = (p->key_dims + 1) / 2, value_panels = pds_up(p->value_dims, 16) / 16;
  const uint32_t key_at = pds_tile_at(g / 4, 4 * t, g % 4, KEY_ROWS),
                 value_at = KEYS + pds_tile_at(g / 4, 4 * t, g % 4, 32);
  uint8_t *shared = PDS_SHARED;

  pds_query_row q[2];
  uint32_t a[PARTS][8];
  PDS_UNROLL
  for (uint32_t i = 0; i < 2; i++) {
    const uint32_t pair = tile * TILE + PDS_WARP * 16 + 8 * i + g;
    q[i].row = pds_least(pair / group, p->rows - 1);
    q[i].valid = pair / group < p->rows;
    q[i].head = kv_head * group + pair % group;
  }
  PDS_UNROLL
  for (uint32_t j = 0; j < PARTS; j++)
    pds_rows_as_a(a[j], pds_query_at(p, q[0].row, q[0].head, 32 * j + 8 * t),
                  pds_query_at(p, q[1].row, q[1].head, 32 * j + 8 * t));

  for (uint32_t row = tile * TILE / group, run; row <= last_row; row = run + 1) {
    run = pds_run_end(p, row, last_row);
    const uint32_t begin = pds_first_key(p, (uint32_t)p->position[row]),
                   end = (uint32_t)p->position[run] + 1;
    const int32_t seq = p->seq[row];
    float o[PARTS * 4][4];
    PDS_UNROLL
    for (uint32_t j = 0; j < PARTS * 4; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0;
    PDS_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      const uint32_t position = (uint32_t)p->position[q[i].row];
      const int mine = q[i].valid && q[i].row >= row && q[i].row <= run;
      q[i].seen = pds_first_key(p, position);
      q[i].end = mine ? position + 1 : 0;
      q[i].max = -PDS_INFINITY;
      q[i].sum = 0;
    }

    const uint32_t first = begin / PDS_CU_KEYS, blocks = (end - 1) / PDS_CU_KEYS + 1 - first;
    pds_sync(); /* the run before has read its last block */
    for (uint32_t n = 0; n <= blocks; n++) {
      if (n > 0) {
        pds_copy_wait(0);
        pds_sync();
      }
      if (n < blocks) { /* block n on its way, while n - 1 is used */
        const uint8_t *keys = pds_kv_at(p, seq, first + n, kv_head), *values = keys + p->key_bytes;
        const uint32_t tokens = end - (first + n) * PDS_CU_KEYS;
        uint8_t *stage = shared + n % 2 * STAGE;
        PDS_UNROLL
        for (uint32_t j = 0; j < KEYS / 16 / 256; j++) {
          const uint32_t i = j * 256 + PDS_TID, panel = i / (KEY_ROWS * 4), r = i / 4 % KEY_ROWS;
          pds_copy16(stage + pds_tile_at(panel, r, i % 4, KEY_ROWS),
                     keys + panel * p->key_panel_bytes + i % (KEY_ROWS * 4) * 16, r < key_words);
        }
        PDS_UNROLL
        for (uint32_t j = 0; j < KEYS / 16 / 256; j++) {
          const uint32_t i = j * 256 + PDS_TID, panel = i / 128, r = i / 4 % 32;
          const int valid = panel < value_panels && 2 * r < tokens;
          pds_copy16(stage + KEYS + pds_tile_at(panel, r, i % 4, 32), values + i * 16, valid);
        }
        pds_copy_commit();
      }
      if (n == 0) continue;
      const uint8_t *stage = shared + (n - 1) % 2 * STAGE;
      const uint32_t token = (first + n - 1) * PDS_CU_KEYS;
      PDS_UNROLL
      for (uint32_t half = 0; half < 2; half += HALVES) {
        float s[4 * HALVES][4], factor[2];
        PDS_UNROLL
        for (uint32_t h = 0; h < HALVES; h++) {
          PDS_UNROLL
          for (uint32_t i = 0; i < 4; i++)
            s[4 * h + i][0] = s[4 * h + i][1] = s[4 * h + i][2] = s[4 * h + i][3] = 0;
          const uint8_t *even = stage + key_at + (half + h) * 2 * KEY_ROWS * 64,
                        *odd = stage + (key_at ^ 64) + (half + h) * 2 * KEY_ROWS * 64;
          PDS_UNROLL
          for (uint32_t j = 0; j < PARTS; j++)
            pds_mma_panel(s + 4 * h, a[j], even + j * 1024, odd + j * 1024);
        }
        PDS_UNROLL
        for (uint32_t i = 0; i < 2; i++) {
          pds_mask(&q[i], i, s, HALVES, token + 32 * half);
          factor[i] = pds_softmax(&q[i], i, s, HALVES, scale);
        }
        pds_rescale(o, PARTS * 4, factor);
        PDS_UNROLL
        for (uint32_t h = 0; h < HALVES; h++) {
          uint32_t weights[8];
          pds_products_as_a(weights, s + 4 * h);
          const uint8_t *even = stage + value_at + (half + h) * 1024,
                        *odd = stage + (value_at ^ 64) + (half + h) * 1024;
          PDS_UNROLL
          for (uint32_t j = 0; j < PARTS; j++)
            pds_mma_panel(o + 4 * j, weights, even + j * 4096, odd + j * 4096);
        }
      }
    }

    PDS_UNROLL
    for (uint32_t i = 0; i < 2; i++) {
      float sum = q[i].sum;
      sum += pds_shfl_xor(sum, 1);
      sum += pds_shfl_xor(sum, 2);
      if (q[i].end == 0) continue;
      const float r = 1 / sum;
      PDS_UNROLL
      for (uint32_t j = 0; j < PARTS; j++) {
        float v[8];
        PDS_UNROLL
        for (uint32_t e = 0; e < 8; e++) v[e] = o[4 * j + e % 4][2 * i + e / 4] * r;
        pds_store_some(p, q[i].row, q[i].head, 0, 32 * j + 8 * t, 8, v);
      }
      if (t == 0) pds_store_padding(p, q[i].row, q[i].head);
    }
  }
}

#undef NAME
#undef D
#undef HALVES
