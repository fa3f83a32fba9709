/* ops_rope.h: rotary position embedding. The table of a rope is [rows][cos, sin][dim / 2] in
 * PDS_BUF_ROPE. */
#ifndef PDS_OPS_ROPE_H
#define PDS_OPS_ROPE_H

#include "ops.h"

static inline const float *pds_rope_row(const pds_step_ctx *ctx, const pds_rope *rope,
                                        uint32_t row) {
  return (const float *)((const unsigned char *)pds_buf(ctx, PDS_BUF_ROPE) + rope->table_offset) +
         (size_t)row * rope->dim;
}

/* Rotates x[0..dim) in place: pairs (i, i + dim / 2), or (2i, 2i + 1) if interleaved. */
static inline void pds_rope_apply(const pds_rope *rope, const float *table, float *x) {
  const uint32_t half = rope->dim / 2;
  const uint32_t step = rope->interleaved ? 2 : 1, apart = rope->interleaved ? 1 : half;
  for (uint32_t i = 0; i < half; i++) {
    const float c = table[i], s = table[half + i];
    const float a = x[i * step], b = x[i * step + apart];
    x[i * step] = a * c - b * s;
    x[i * step + apart] = b * c + a * s;
  }
}

#endif
