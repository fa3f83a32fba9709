/* attend_many.h: GQA of many rows on tensor cores. No include guard: included once for each NAME, with D
 * the most dimensions of a head, WARPS, MT tiles of 16 (row, head) pairs a warp, and HALVES how many half
 * blocks of scores are in registers together.
 *
 * A block takes 16 WARPS MT pairs of one KV head and walks the cache a block of 64 tokens at a time, the
 * next one on its way while one is used. Where its rows belong to several sequences, it does so for
 * each. */

PDS_KERNEL_OF(NAME, pds_cu_attention, 32 * WARPS) {
  enum {
    THREADS = 32 * WARPS,
    PAIRS = 16 * MT,      /* of a warp */
    TILE = WARPS * PAIRS, /* of a block */
    PANELS = D / 16,      /* of values; and steps of k = 16 of the keys */
    OCTETS = 4 * HALVES,  /* tokens of a step of the softmax, by 8 */
    KEY_ROWS = D / 2,
    KEYS = D * 128, /* bytes of a block's keys, and of its values */
    STAGE = 2 * KEYS,
    PASS = THREADS / 4 /* rows of panels that a load by all threads takes */
  };
  const uint32_t tile = (PDS_GRID_X - 1 - PDS_BLOCK_X) / p->kv_heads, /* the longest first */
      kv_head = PDS_BLOCK_X % p->kv_heads, group = pds_group_heads(p), g = PDS_LANE / 4,
                 t = PDS_LANE % 4, first_pair = tile * TILE + PDS_WARP * PAIRS;
  const uint32_t last_row = pds_least((tile * TILE + TILE - 1) / group, p->rows - 1);
  const float scale = p->scale * PDS_LOG2_E;
  const uint32_t key_words = (p->key_dims + 1) / 2, value_panels = pds_up(p->value_dims, 16) / 16;
  const uint32_t key_at = pds_thread_keys(), value_at = KEYS + pds_thread_values();
  const uint32_t load_key = pds_key_at(0, PDS_TID / 4, PDS_TID % 4, KEY_ROWS),
                 load_value = KEYS + pds_value_at(PDS_TID / 128, PDS_TID / 4 % 32, PDS_TID % 4, 32);
  uint8_t *queries = PDS_SHARED + 2 * STAGE + PDS_WARP * (PAIRS * D * 2); /* this warp's */

  PDS_UNROLL
  for (uint32_t m = 0; m < MT; m++) {
    const uint32_t low = first_pair + 16 * m + g, high = low + 8, last = p->rows - 1;
    for (uint32_t j = 0; j < PANELS; j += 2)
      pds_store_query(queries + (m * PANELS + j) * 512,
                      pds_query_at(p, pds_least(low / group, last), kv_head * group + low % group,
                                   16 * j + 8 * t),
                      pds_query_at(p, pds_least(high / group, last), kv_head * group + high % group,
                                   16 * j + 8 * t),
                      0);
  }

  for (uint32_t row = tile * TILE / group, run; row <= last_row; row = run + 1) {
    run = pds_run_end(p, row, last_row);
    const uint32_t begin = pds_first_key(p, (uint32_t)p->position[row]),
                   end = (uint32_t)p->position[run] + 1;
    const int32_t seq = p->seq[row];
    float o[PANELS][2 * MT][4];
    PDS_UNROLL
    for (uint32_t j = 0; j < PANELS; j++) {
      PDS_UNROLL
      for (uint32_t n = 0; n < 2 * MT; n++) o[j][n][0] = o[j][n][1] = o[j][n][2] = o[j][n][3] = 0;
    }
    pds_query_row q[MT][2];
    PDS_UNROLL
    for (uint32_t m = 0; m < 2 * MT; m++) {
      const uint32_t of = (first_pair + 8 * m + g) / group;
      pds_query_begin(p, &q[m / 2][m % 2], of, of >= row && of <= run);
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
        uint8_t *stage = PDS_SHARED + n % 2 * STAGE;
        PDS_UNROLL
        for (uint32_t j = 0; j < KEYS / 16 / THREADS; j++) {
          const uint32_t panel = j * PASS / KEY_ROWS, r = j * PASS % KEY_ROWS;
          pds_copy16(stage + load_key + (panel * KEY_ROWS + r) * 64,
                     keys + PDS_TID * 16 + panel * p->key_panel_bytes + r * 64,
                     r + PDS_TID / 4 < key_words);
        }
        const int there = PDS_TID / 4 % 32 * 2 < tokens;
        PDS_UNROLL
        for (uint32_t j = 0; j < KEYS / 16 / THREADS; j++)
          pds_copy16(stage + load_value + j * (THREADS * 16),
                     values + PDS_TID * 16 + j * (THREADS * 16),
                     there && j * (THREADS / 128) + PDS_TID / 128 < value_panels);
        pds_copy_commit();
      }
      if (n == 0) continue;
      const uint8_t *stage = PDS_SHARED + (n - 1) % 2 * STAGE;
      const uint32_t token = (first + n - 1) * PDS_CU_KEYS;
      /* Not unrolled: the outputs take most registers. */
      for (uint32_t half = 0; half < 2; half += HALVES) {
        float s[MT][OCTETS][4];
        PDS_UNROLL
        for (uint32_t m = 0; m < MT; m++) {
          PDS_UNROLL
          for (uint32_t e = 0; e < OCTETS; e++)
            s[m][e][0] = s[m][e][1] = s[m][e][2] = s[m][e][3] = 0;
        }
        PDS_UNROLL
        for (uint32_t k = 0; k < PANELS; k++) {
          pds_u4 a[MT];
          PDS_UNROLL
          for (uint32_t m = 0; m < MT; m++)
            a[m] = pds_load16(queries + (m * PANELS + k) * 512 + PDS_LANE * 16);
          PDS_UNROLL
          for (uint32_t e = 0; e < OCTETS; e++) {
            uint32_t b[2];
            pds_key_words(b, stage + (2 * half + e / 2) * KEY_ROWS * 64 + k / 2 * 1024, key_at,
                          k % 2, e % 2);
            PDS_UNROLL
            for (uint32_t m = 0; m < MT; m++) pds_mma_bf16(s[m][e], &a[m].x, b);
          }
        }
        PDS_UNROLL
        for (uint32_t m = 0; m < MT; m++) {
          float factor[2], column[2][2];
          PDS_UNROLL
          for (uint32_t i = 0; i < 2; i++) {
            pds_mask(p, &q[m][i], i, s[m], OCTETS, token + 32 * half);
            factor[i] = pds_softmax(&q[m][i], i, s[m], OCTETS, scale);
          }
          pds_to_columns(column, factor);
          if (column[0][0] == 1 && column[0][1] == 1 && column[1][0] == 1 && column[1][1] == 1)
            continue;
          PDS_UNROLL
          for (uint32_t j = 0; j < PANELS; j++) {
            pds_scale_column(o[j][2 * m], column[0]);
            pds_scale_column(o[j][2 * m + 1], column[1]);
          }
        }
        PDS_UNROLL
        for (uint32_t k = 0; k < 2 * HALVES; k++) { /* 16 tokens */
          uint32_t b[2 * MT][2];
          PDS_UNROLL
          for (uint32_t m = 0; m < 2 * MT; m++) {
            PDS_UNROLL
            for (uint32_t i = 0; i < 2; i++) {
              const float *e = s[m / 2][2 * k + i] + m % 2 * 2;
              b[m][i] = pds_pack_bf16(e[0], e[1]);
            }
          }
          PDS_UNROLL
          for (uint32_t j = 0; j < PANELS; j++) {
            uint32_t a[4];
            pds_value_words(a, stage + value_at + j * 2048 + (2 * half + k) * 512);
            PDS_UNROLL
            for (uint32_t m = 0; m < 2 * MT; m++) pds_mma_bf16(o[j][m], a, b[m]);
          }
        }
      }
    }

    PDS_UNROLL
    for (uint32_t m = 0; m < MT; m++) {
      float inverse[2], column[2][2];
      PDS_UNROLL
      for (uint32_t i = 0; i < 2; i++) {
        float sum = q[m][i].sum;
        sum += pds_shfl_xor(sum, 1);
        sum += pds_shfl_xor(sum, 2);
        inverse[i] = 1 / sum;
      }
      pds_to_columns(column, inverse);
      PDS_UNROLL
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t pair = first_pair + 16 * m + i / 2 * 8 + 2 * t + i % 2, to = pair / group,
                       head = kv_head * group + pair % group;
        if (to < row || to > run) continue;
        PDS_UNROLL
        for (uint32_t j = 0; j < PANELS; j++) {
          const float *from = o[j][2 * m + i / 2] + i % 2, r = column[i / 2][i % 2];
          const float v[2] = {from[0] * r, from[2] * r};
          pds_store_some(p, to, head, 0, 16 * j + 2 * g, 2, v);
        }
        if (g == 0) pds_store_padding(p, to, head);
      }
    }
  }
}

#undef NAME
#undef D
#undef WARPS
#undef MT
#undef HALVES
