/* template.h: all kernels of one path, written once over the names of vec_*.h. A path's .c file
 * includes its vec header, defines PATH (the path's name) and includes this file, which defines
 * pds_kernels_<PATH>(). */
#include "kernels.h"
#include "key_to_value.h"

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define STR_(a) #a
#define STR(a) STR_(a)
#define T(name) CAT(CAT(TILE_ACT, _), name)

/* e^x within 2 ulp, denormal results included: x = n ln 2 + r, |r| <= ln 2 / 2, and e^r by its
 * Taylor series to r^7, whose remainder is below 2^-27. NaN stays NaN. */
PDS_INLINE v16 v16_exp(v16 x) {
  x = v16_min(v16_set1(89.0f), x);   /* e^89 > FLT_MAX */
  x = v16_max(v16_set1(-105.0f), x); /* e^-105 rounds to 0 */
  v16 n = v16_round(v16_mul(x, v16_set1(1.44269504f)));
  v16 r = v16_fma(n, v16_set1(-0.693145752f),
                  x); /* ln 2 in two parts, the first with zeros for n's bits */
  r = v16_fma(n, v16_set1(-1.42860677e-6f), r);
  v16 p = v16_set1(1.0f / 5040);
  p = v16_fma(p, r, v16_set1(1.0f / 720));
  p = v16_fma(p, r, v16_set1(1.0f / 120));
  p = v16_fma(p, r, v16_set1(1.0f / 24));
  p = v16_fma(p, r, v16_set1(1.0f / 6));
  p = v16_fma(p, r, v16_set1(0.5f));
  p = v16_fma(p, r, v16_set1(1.0f));
  p = v16_fma(p, r, v16_set1(1.0f));
  return v16_scale2(p, n);
}

PDS_INLINE v16 v16_sigmoid(v16 x) {
  return v16_div(v16_set1(1), v16_add(v16_set1(1), v16_exp(v16_sub(v16_set1(0), x))));
}
PDS_INLINE v16 v16_silu(v16 x) {
  return v16_div(x, v16_add(v16_set1(1), v16_exp(v16_sub(v16_set1(0), x))));
}

/* How many of the n elements from i on lie in one vector. */
PDS_INLINE uint32_t lanes_at(uint32_t i, uint32_t n) {
  return n - i < PDS_LANES ? n - i : PDS_LANES;
}

typedef float f32_elt;
typedef uint16_t bf16_elt;
PDS_INLINE void f32_store_n(float *p, v16 v, uint32_t n) {
  v16_store_n(p, v, n);
}
PDS_INLINE void bf16_store_n(uint16_t *p, v16 v, uint32_t n) {
  v16_store_bf16_n(p, v, n);
}

#define TILE_ACT f32
#include "tile.h"

#include "gemm.h"
#undef TILE_ACT
#define TILE_ACT bf16
/* A path with matrix units names a file with its own bf16_gemm and bf16_swiglu. */
#ifdef BF16_GEMMS
#define TILE_NO_GEMM
#include "gemm.h"
#include BF16_GEMMS
#else
#include "tile.h"

#include "gemm.h"
#endif
#undef TILE_ACT
#include "int.h"

/* As bf16_key_to_value, 16 dimensions of 16 tokens at a time. */
static void bf16_key_to_value_fast(const void *keys, size_t key_stride, uint32_t dims,
                                   uint32_t tokens, void *values) {
  const unsigned char *from = keys;
  unsigned char *to = values;
  const uint32_t whole = dims / PDS_LANES * PDS_LANES; /* a panel of values is 2 KiB */
  for (uint32_t d = 0; d < whole; d += PDS_LANES) {
    unsigned char *panel = to + (size_t)d * PDS_KEYS * 2;
    for (uint32_t t = 0; t < tokens; t += PDS_LANES) {
      v16_transpose_bf16(from + t / PDS_LANES * key_stride + (size_t)d * 32,
                         panel + (size_t)t * 32);
    }
    if (tokens % 2) { /* the odd one out pairs with zero */
      uint32_t *row = (uint32_t *)(panel + (size_t)tokens / 2 * 64);
      for (uint32_t j = 0; j < PDS_LANES; j++) row[j] &= 0xffffu;
    }
  }
  if (whole < dims) {
    bf16_key_to_value(from + (size_t)whole * 32, key_stride, dims - whole, tokens,
                      to + (size_t)whole * PDS_KEYS * 2);
  }
}

static void rms_norm(const float *x, const float *w, uint32_t n, float eps, float *y) {
  v16 sum[2] = {v16_set1(0), v16_set1(0)};
  for (uint32_t i = 0, odd = 0; i < n; i += PDS_LANES, odd ^= 1) {
    v16 v = v16_load_n(x + i, lanes_at(i, n));
    sum[odd] = v16_fma(v, v, sum[odd]);
  }
  const float mean = v16_reduce_add(v16_add(sum[0], sum[1])) / (float)n;
  const v16 r = v16_set1(1.0f / __builtin_sqrtf(mean + eps));
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16_store_n(y + i, v16_mul(v16_mul(v16_load_n(x + i, k), r), v16_load_n(w + i, k)), k);
  }
}

static void softmax(float *x, uint32_t n) {
  const float ninf = -__builtin_inff();
  v16 top = v16_set1(ninf), sum = v16_set1(0);
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    top = v16_max(top, v16_range(v16_load_n(x + i, k), 0, k, ninf));
  }
  const v16 m = v16_set1(v16_reduce_max(top));
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16 e = v16_exp(v16_sub(v16_load_n(x + i, k), m));
    sum = v16_add(sum, v16_range(e, 0, k, 0));
    v16_store_n(x + i, e, k);
  }
  const v16 total = v16_set1(v16_reduce_add(sum));
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16_store_n(x + i, v16_div(v16_load_n(x + i, k), total), k);
  }
}

static void sigmoid(float *x, uint32_t n) {
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16_store_n(x + i, v16_sigmoid(v16_load_n(x + i, k)), k);
  }
}

static void axpy(float a, const float *x, float *y, uint32_t n) {
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16_store_n(y + i, v16_add(v16_load_n(y + i, k), v16_mul(v16_set1(a), v16_load_n(x + i, k))),
                k);
  }
}

static void scale(float a, float *y, uint32_t n) {
  for (uint32_t i = 0; i < n; i += PDS_LANES) {
    const uint32_t k = lanes_at(i, n);
    v16_store_n(y + i, v16_mul(v16_set1(a), v16_load_n(y + i, k)), k);
  }
}

const pds_kernels *CAT(pds_kernels_, PATH)(void) {
  static const pds_kernels table = {
      .name = STR(PATH),
      .f32 = {f32_gemm, f32_swiglu, f32_convert, f32_softmax_block, f32_key_to_value},
      .bf16 = {bf16_gemm, bf16_swiglu, bf16_convert, bf16_softmax_block, bf16_key_to_value_fast},
      .i8 = {i8_gemm, i8_swiglu, i8_quantise},
      .i4 = {i4_gemm, i4_swiglu, i4_quantise},
      .rms_norm = rms_norm,
      .softmax = softmax,
      .sigmoid = sigmoid,
      .axpy = axpy,
      .scale = scale,
  };
  return &table;
}
