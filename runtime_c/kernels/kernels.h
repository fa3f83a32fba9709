/* kernels.h: the table of inner loops that one instruction-set path offers. Everything above it
 * (ops_*.c) is the same for all paths; everything below it (one file a path) knows no plan, no
 * batch and no thread.
 *
 * Names: "act" is the dtype of GEMM inputs and of the KV cache: fp32, or bf16 as uint16_t bits.
 * Packed panels are those of plan_desc.h: 16 output columns, 64-byte rows, one 32-bit word a
 * column: a bf16 pair (k, k+1), one fp32 k, four int8 or eight int4 k.
 *
 * Numbers, the same on every path up to the rounding of each operation:
 *   - a GEMM output is one chain of multiply-adds over k in ascending order, whatever the number
 *     of rows or columns of the call: so a row's result depends neither on the other rows nor on
 *     how the work was cut. amx alone adds up 32 k at a time (a tile) before they join the chain,
 *     for calls of one row as for those of many, so the same holds;
 *   - fp32 to bf16 rounds to nearest even; NaN stays a (quiet) NaN, overflow becomes Inf;
 *   - NaN and Inf propagate as in the formulas: silu(-Inf) = NaN, silu(Inf) = Inf, softmax over
 *     a row holding NaN or +Inf is NaN. avx512bf16 and amx alone treat denormal bf16 inputs and
 *     denormal sums in GEMMs as zero (vdpbf16ps, tdpbf16ps);
 *   - GEMMs on int8 and int4 weights read rows of int8 with one scale a group of k (quantise): a
 *     group's products are summed exactly, and each group is one fused multiply-add
 *     sum = fma(group sum, weight scale * row scale, sum): the same bits on every path. A group
 *     of x that holds NaN or Inf makes its row NaN. */
#ifndef PDS_KERNELS_H
#define PDS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum {
  PDS_LANES = 16,    /* output columns of a panel */
  PDS_KEYS = 64,     /* tokens of a KV block */
  PDS_I8_GROUP = 64, /* k that share a scale, of int8 weights and of their GEMM inputs */
  PDS_I4_GROUP = 32, /* of int4 weights */
};

/* quantise: a group whose largest value is below this becomes zero. */
#define PDS_QUANT_TINY 1e-30f

typedef enum pds_gemm_out {
  PDS_OUT_F32 = 0, /* y = x W^T (+ bias), fp32 */
  PDS_OUT_ADD = 1, /* y += x W^T (+ bias), fp32 */
  PDS_OUT_ACT = 2, /* y = act(x W^T (+ bias)); columns [cols, pad) become zero */
} pds_gemm_out;

/* y[rows, cols] from x[rows, k] and packed panels. In swiglu the panels alternate gate, up;
 * `cols` counts columns of y = act(silu(gate) * up), `out` is ignored (always PDS_OUT_ACT) and
 * there is no bias. */
typedef struct pds_gemm {
  const void *x;          /* act [*, x_stride]; columns [k, k rounded to even) must be finite */
  size_t x_stride;        /* elements */
  const int32_t *x_index; /* row i reads row x_index[i] / x_div; NULL: row i */
  uint32_t x_div;
  const void *w;       /* first panel, 64-byte aligned */
  size_t panel_stride; /* bytes from one panel to the next */
  void *y;
  size_t y_stride;        /* elements of y's dtype */
  const int32_t *y_index; /* row i writes row y_index[i]; NULL: row i */
  const float *bias;      /* [cols] or NULL */
  uint32_t rows, k, cols; /* bf16: k is even */
  uint32_t pad;           /* PDS_OUT_ACT: columns to zero-fill up to; <= cols: none */
  uint32_t out;           /* pds_gemm_out */
  uint32_t l2_bytes;      /* second-level cache of one worker, for blocking alone; 0: 512 KiB */
  uint32_t stream_y; /* PDS_OUT_F32: y will not be read soon; it may be written past the caches */
} pds_gemm;

/* The kernels that read or write act data. */
typedef struct pds_act_kernels {
  void (*gemm)(const pds_gemm *g);
  void (*swiglu)(const pds_gemm *g);
  /* y = act(x) for n elements. */
  void (*convert)(const float *x, void *y, uint32_t n);
  /* One row of one key block of streaming softmax. s[lo..hi) of s[PDS_KEYS] are scores; m, l:
   * running maximum of scale * s and sum of exponentials (-Inf and 0 at first). Writes
   * p[PDS_KEYS]: act(exp(scale * s - m_new)), zero outside [lo, hi). Updates m and l; returns
   * the factor exp(m_old - m_new) for what was accumulated before. -Inf scores weigh nothing. */
  float (*softmax_block)(const float *s, uint32_t lo, uint32_t hi, float scale, float *m, float *l,
                         void *p);
  /* Transposes keys (panels of 16 tokens, k = dimension, key_stride bytes apart) into values
   * (panels of 16 dimensions, k = token, PDS_KEYS * PDS_LANES elements apart): the first `dims`
   * dimensions of the first `tokens` tokens. Dimensions beyond those are zero, so is the token
   * that pairs with an odd last one; later word rows of a panel are undefined. */
  void (*key_to_value)(const void *keys, size_t key_stride, uint32_t dims, uint32_t tokens,
                       void *values);
} pds_act_kernels;

/* The kernels of one integer weight format. gemm and swiglu are those of pds_act_kernels with act =
 * bf16 in y, but x is rows of quantise, x_stride bytes apart, and k a multiple of 64. A panel is
 * its 64-byte rows (a word of int8: k..k+3; of int4: eight k as q + 8, k..k+3 in the low nibbles,
 * k+4..k+7 in the high ones), then bf16 scales [k / group][16]. */
typedef struct pds_int_kernels {
  void (*gemm)(const pds_gemm *g);
  void (*swiglu)(const pds_gemm *g);
  /* A row of n bf16 values, a multiple of 32, zero from there to k: y = int8 [k], the nearest
   * multiples of the group's scale, max |x| / 127; then fp32 scales [k / group] (NaN where a
   * value is not finite); then int32 [k / group]: the sum of a group's int8, times -128 (int8
   * weights) or -8 (int4), which kernels on unsigned weights start from. y is 4-byte aligned. */
  void (*quantise)(const uint16_t *x, uint32_t n, uint32_t k, void *y);
} pds_int_kernels;

typedef struct pds_kernels {
  const char *name;
  pds_act_kernels f32, bf16;
  pds_int_kernels i8, i4;
  /* y = x * rsqrt(mean(x^2) + eps) * w, fp32 */
  void (*rms_norm)(const float *x, const float *w, uint32_t n, float eps, float *y);
  /* x = exp(x - max(x)) / sum, in place */
  void (*softmax)(float *x, uint32_t n);
  /* x = 1 / (1 + exp(-x)), in place */
  void (*sigmoid)(float *x, uint32_t n);
  /* y += a * x, not fused: the product is rounded first */
  void (*axpy)(float a, const float *x, float *y, uint32_t n);
  /* y *= a */
  void (*scale)(float a, float *y, uint32_t n);
} pds_kernels;

/* Each path is a const table; whether this CPU can run it is for pds_cpu.h to say. */
const pds_kernels *pds_kernels_scalar(void);
const pds_kernels *pds_kernels_avx2(void);       /* AVX2 FMA F16C */
const pds_kernels *pds_kernels_avx512(void);     /* AVX-512 F BW DQ VL */
const pds_kernels *pds_kernels_avx512bf16(void); /* + AVX512-VNNI, AVX512-BF16 */
const pds_kernels *pds_kernels_amx(void);        /* + AMX-TILE AMX-BF16, permitted */

#endif
