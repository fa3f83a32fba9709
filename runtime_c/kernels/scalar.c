/* scalar.c: the kernels in plain C11, written for reading: the path of every CPU, and the twin
 * that the other paths are tested against. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "key_to_value.h"

/* Rows of x that share one pass over a panel. */
enum { ROWS = 4 };

static float widen(uint32_t bf16) {
  bf16 <<= 16;
  float x;
  memcpy(&x, &bf16, sizeof x);
  return x;
}

static uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return (uint16_t)((bits | 0x400000u) >> 16);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static float silu(float x) {
  return x / (1.0f + expf(-x));
}

/* sum[rows][16] = x W^T for one panel. */
static void f32_panel(const float *const *x, uint32_t rows, uint32_t k_end, const void *panel,
                      float sum[ROWS][PDS_LANES]) {
  const float *w = panel;
  memset(sum, 0, ROWS * sizeof *sum);
  for (uint32_t k = 0; k < k_end; k++, w += PDS_LANES) {
    for (uint32_t i = 0; i < rows; i++) {
      for (uint32_t j = 0; j < PDS_LANES; j++) sum[i][j] += w[j] * x[i][k];
    }
  }
}

static void bf16_panel(const uint16_t *const *x, uint32_t rows, uint32_t k_end, const void *panel,
                       float sum[ROWS][PDS_LANES]) {
  const uint32_t *w = panel;
  memset(sum, 0, ROWS * sizeof *sum);
  for (uint32_t k = 0; k < k_end; k += 2, w += PDS_LANES) {
    float even[PDS_LANES], odd[PDS_LANES];
    for (uint32_t j = 0; j < PDS_LANES; j++) {
      even[j] = widen(w[j]);
      odd[j] = widen(w[j] >> 16);
    }
    for (uint32_t i = 0; i < rows; i++) {
      const float x0 = widen(x[i][k]), x1 = widen(x[i][k + 1]);
      for (uint32_t j = 0; j < PDS_LANES; j++) sum[i][j] = (sum[i][j] + even[j] * x0) + odd[j] * x1;
    }
  }
}

typedef float f32_elt;
typedef uint16_t bf16_elt;
static float f32_round(float x) {
  return x;
}
static uint16_t bf16_round(float x) {
  return narrow(x);
}

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define T(name) CAT(CAT(ACT, _), name)

#define ACT f32
#include "scalar_act.h"
#undef ACT
#define ACT bf16
#include "scalar_act.h"
#undef ACT

#include "scalar_int.h"

static void rms_norm(const float *x, const float *w, uint32_t n, float eps, float *y) {
  float lanes[PDS_LANES] = {0}, sum = 0;
  for (uint32_t i = 0; i < n; i++) lanes[i % PDS_LANES] += x[i] * x[i];
  for (uint32_t j = 0; j < PDS_LANES; j++) sum += lanes[j];
  const float r = 1.0f / sqrtf(sum / (float)n + eps);
  for (uint32_t i = 0; i < n; i++) y[i] = x[i] * r * w[i];
}

static void softmax(float *x, uint32_t n) {
  float top = -INFINITY, sum = 0;
  for (uint32_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
  for (uint32_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - top);
  for (uint32_t i = 0; i < n; i++) x[i] /= sum;
}

static void sigmoid(float *x, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) x[i] = 1.0f / (1.0f + expf(-x[i]));
}

static void axpy(float a, const float *x, float *y, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) y[i] += a * x[i];
}

static void scale(float a, float *y, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) y[i] *= a;
}

const pds_kernels *pds_kernels_scalar(void) {
  static const pds_kernels table = {
      .name = "scalar",
      .f32 = {f32_gemm, f32_swiglu, f32_convert, f32_softmax_block, f32_key_to_value},
      .bf16 = {bf16_gemm, bf16_swiglu, bf16_convert, bf16_softmax_block, bf16_key_to_value},
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
