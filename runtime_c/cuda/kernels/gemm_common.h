/* gemm_common.h: what the GEMM kernels share: where a block works, rows of x and y, and what
 * becomes of a sum. */
#ifndef PDS_CUDA_GEMM_COMMON_H
#define PDS_CUDA_GEMM_COMMON_H

#include "gemm_shape.h"

typedef struct __attribute__((aligned(8))) gemm_u2 {
  uint32_t x, y;
} gemm_u2;
typedef struct __attribute__((aligned(16))) gemm_f4 {
  float x, y, z, w;
} gemm_f4;

/* One matrix, and the rows that it is for: numbers first .. first + rows of the list. */
typedef struct gemm_part {
  const uint8_t *w, *x;
  uint8_t *y;
  uint32_t first, rows;
} gemm_part;

PDS_FN uint32_t gemm_ceil(uint32_t n, uint32_t to) {
  return (n + to - 1) / to * to;
}
PDS_FN uint32_t gemm_min(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
PDS_FN int gemm_y_is_act(const pds_cu_gemm *p) {
  return p->swiglu || p->out == PDS_CU_OUT_ACT;
}
PDS_FN uint32_t gemm_act_bytes(const pds_cu_gemm *p) {
  return p->act_dtype == PDS_CU_BF16 ? 2 : 4;
}
PDS_FN uint32_t gemm_y_bytes(const pds_cu_gemm *p) {
  return gemm_y_is_act(p) ? gemm_act_bytes(p) : 4;
}
PDS_FN uint32_t gemm_panels(const pds_cu_gemm *p) {
  return (p->cols + 15) / 16 * (p->swiglu ? 2 : 1);
}
/* Columns of x that may be read: the rest counts as zero, as the weights there do. */
PDS_FN uint32_t gemm_x_end(const pds_cu_gemm *p) {
  const uint32_t end = gemm_min(gemm_ceil(p->k, 32), p->x_stride);
  return p->count > 1 && !p->n_holes ? gemm_min(end, (uint32_t)p->x_step) : end;
}
PDS_FN const uint8_t *gemm_scales(const pds_cu_gemm *p, const uint8_t *panel) {
  return panel + p->k_pad * (p->w_dtype == PDS_CU_I8 ? 16u : 8u);
}

PDS_FN gemm_part gemm_part_of(const pds_cu_gemm *p, uint32_t i) {
  gemm_part part;
  part.x = (const uint8_t *)p->x;
  part.y = (uint8_t *)p->y;
  if (p->n_holes) {
    part.w = p->holes[i].at + p->w_offset;
    part.first = p->holes[i].first;
    part.rows = p->holes[i].rows;
  } else {
    part.w = p->w + i * p->w_step;
    part.x += i * p->x_step * gemm_act_bytes(p);
    part.y += i * p->y_step * gemm_y_bytes(p);
    part.first = 0;
    part.rows = p->rows;
  }
  return part;
}

/* The hole that block `tile` works on: the last that begins at or before it. */
PDS_FN uint32_t gemm_hole_of(const pds_cu_gemm *p, uint32_t tile) {
  uint32_t low = 0, n = p->n_holes;
  while (n > 1) {
    const uint32_t half = n / 2;
    if (p->holes[low + half].tile <= tile) {
      low += half;
      n -= half;
    } else {
      n = half;
    }
  }
  return low;
}

/* Elements from x, or y, to row r of a part. */
PDS_FN uint64_t gemm_x_at(const pds_cu_gemm *p, const gemm_part *part, uint32_t r) {
  uint32_t row = part->first + r;
  if (p->x_index) row = (uint32_t)p->x_index[row] / p->x_div;
  return (uint64_t)row * p->x_stride;
}
PDS_FN uint64_t gemm_y_at(const pds_cu_gemm *p, const gemm_part *part, uint32_t r) {
  uint32_t row = part->first + r;
  if (p->y_index) row = (uint32_t)p->y_index[row];
  return (uint64_t)row * p->y_stride;
}

PDS_FN float gemm_silu(float x) {
  return x / (1.0f + pds_exp(-x));
}

/* The same for what becomes bf16. */
PDS_FN float gemm_silu_fast(float x) {
  return pds_div_fast(x, 1.0f + pds_exp_fast(-x));
}

/* A finished sum becomes element `at` of y, in column col. */
PDS_FN void gemm_put(const pds_cu_gemm *p, uint8_t *y, uint64_t at, uint32_t col, float v) {
  if (col >= p->cols) return;
  if (p->bias && !p->swiglu) v += p->bias[col];
  if (!gemm_y_is_act(p)) {
    float *to = (float *)y + at;
    *to = p->out == PDS_CU_OUT_ADD ? *to + v : v;
  } else if (p->act_dtype == PDS_CU_BF16) {
    ((uint16_t *)y)[at] = pds_bf16(v);
  } else {
    ((float *)y)[at] = v;
  }
}

/* Four columns from col, a multiple of 4; at: element of column col. */
PDS_FN void gemm_put4(const pds_cu_gemm *p, uint8_t *y, uint64_t at, uint32_t col, const float *v) {
  if (!(p->free & GEMM_Y_ALIGNED) || col + 4 > p->cols) {
    PDS_UNROLL
    for (uint32_t i = 0; i < 4; i++) gemm_put(p, y, at + i, col + i, v[i]);
    return;
  }
  gemm_f4 s = {v[0], v[1], v[2], v[3]};
  if (p->bias && !p->swiglu) {
    s.x += p->bias[col];
    s.y += p->bias[col + 1];
    s.z += p->bias[col + 2];
    s.w += p->bias[col + 3];
  }
  if (gemm_y_is_act(p) && p->act_dtype == PDS_CU_BF16) {
    const gemm_u2 packed = {pds_pack_bf16(s.x, s.y), pds_pack_bf16(s.z, s.w)};
    *(gemm_u2 *)(y + at * 2) = packed;
    return;
  }
  gemm_f4 *to = (gemm_f4 *)(y + at * 4);
  if (!gemm_y_is_act(p) && p->out == PDS_CU_OUT_ADD) {
    const gemm_f4 old = *to;
    s.x += old.x;
    s.y += old.y;
    s.z += old.z;
    s.w += old.w;
  }
  *to = s;
}

/* Columns [cols, pad) of rows [low, high) of a part, by the whole block. */
PDS_FN void gemm_zero_pad(const pds_cu_gemm *p, const gemm_part *part, uint32_t low,
                          uint32_t high) {
  if (!gemm_y_is_act(p) || p->pad <= p->cols) return;
  const uint32_t n = p->pad - p->cols;
  for (uint32_t i = PDS_TID; i < (high - low) * n; i += PDS_THREADS) {
    const uint64_t at = gemm_y_at(p, part, low + i / n) + p->cols + i % n;
    if (p->act_dtype == PDS_CU_BF16) {
      ((uint16_t *)part->y)[at] = 0;
    } else {
      ((float *)part->y)[at] = 0;
    }
  }
}

#endif
