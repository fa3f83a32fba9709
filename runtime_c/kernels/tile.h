/* tile.h: the one inner loop of every GEMM, instantiated by template.h. No include guard:
 * TILE_ACT is f32 or bf16, T(x) is TILE_ACT_x. A tile is `rows` rows of x times `panels`
 * neighbouring panels of W; both are constants after inlining. */
/* acc[rows][acc_stride] = x W^T. x[i]: `words` 32-bit words of row i. `ahead`: how far behind
 * the current 64-byte row of each panel to prefetch, in bytes, until the panel ends; then `jump`
 * further on (the next group's panels). That is for few rows, which stream W; with many, each row
 * of a panel prefetches what lies `next` bytes behind it, for the last rows to bring what comes
 * after. */
PDS_INLINE void T(tile)(const unsigned char *const *x, const unsigned char *w, size_t panel_stride,
                        uint32_t words, size_t jump, size_t next, float *acc, size_t acc_stride,
                        const int rows, const int panels) {
  enum { AHEAD_ROWS = 32 };
  v16 sum[TILE_ROWS][4];
  PDS_UNROLL
  for (int i = 0; i < rows; i++) {
    PDS_UNROLL
    for (int p = 0; p < panels; p++) sum[i][p] = v16_set1(0);
  }
  size_t ahead = AHEAD_ROWS * 64;
  uint32_t begin = 0, end = words > AHEAD_ROWS ? words - AHEAD_ROWS : 0;
  for (int part = 0; part < 2; part++) {
    for (uint32_t r = begin; r < end; r++) {
      if (rows <= 2) { /* few rows: each row of W is used at once, x stays in registers */
        CAT(x_, TILE_ACT) xr[2];
        PDS_UNROLL
        for (int i = 0; i < rows; i++) xr[i] = CAT(CAT(x_, TILE_ACT), _load)(x[i] + (size_t)r * 4);
        PDS_UNROLL
        for (int p = 0; p < panels; p++) {
          const unsigned char *row = w + (size_t)p * panel_stride + (size_t)r * 64;
          CAT(w_, TILE_ACT) wr = CAT(CAT(w_, TILE_ACT), _load)(row);
          __builtin_prefetch(row + ahead, 0, 3);
          PDS_UNROLL
          for (int i = 0; i < rows; i++) sum[i][p] = CAT(v16_dot_, TILE_ACT)(sum[i][p], wr, xr[i]);
        }
      } else { /* many rows: W stays in registers */
        CAT(w_, TILE_ACT) wr[2];
        PDS_UNROLL
        for (int p = 0; p < panels; p++) {
          const unsigned char *row = w + (size_t)p * panel_stride + (size_t)r * 64;
          wr[p] = CAT(CAT(w_, TILE_ACT), _load)(row);
          __builtin_prefetch(row + next, 0, 2);
        }
        PDS_UNROLL
        for (int i = 0; i < rows; i++) {
          CAT(x_, TILE_ACT) xr = CAT(CAT(x_, TILE_ACT), _load)(x[i] + (size_t)r * 4);
          PDS_UNROLL
          for (int p = 0; p < panels; p++)
            sum[i][p] = CAT(v16_dot_, TILE_ACT)(sum[i][p], wr[p], xr);
        }
      }
    }
    begin = end;
    end = words;
    ahead += jump;
  }
  PDS_UNROLL
  for (int i = 0; i < rows; i++) {
    PDS_UNROLL
    for (int p = 0; p < panels; p++)
      v16_store(acc + (size_t)i * acc_stride + p * PDS_LANES, sum[i][p]);
  }
}
