/* case_kernels.c: the kernels of every path that this CPU, real or emulated, can run, against plain
 * loops in double precision, at sizes around the vector and tile edges. */
#include <math.h>
#include <stdlib.h>

#include "dispatch.h"
#include "kernels/kernels.h"
#include "pdscope.h"
#include "test.h"

enum { MAX_ROWS = 20, MAX_K = 96, MAX_COLS = 48, STRIDE = 128 };

static const pds_kernels *kernels;
static const pds_act_kernels *act;
static bool bf16;
static uint32_t seed = 77;

/* Says which path and type a failed check belongs to. */
static bool holds(bool good, const char *what, uint32_t a, uint32_t b, uint32_t c) {
  if (good) return true;
  printf("%s %s: %s, sizes %u %u %u\n", kernels->name, bf16 ? "bf16" : "fp32", what, a, b, c);
  return CHECK(!"a kernel is wrong");
}

static float random_float(void) {
  return (float)(int32_t)(test_random(&seed) & 0xffff) / 32768.0f - 1.0f;
}

static uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

static float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

/* Nearest-even, by arithmetic on the bits; no NaN. */
static uint16_t to_bf16(float x) {
  uint32_t u = bits_of(x);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float rounded(float x) {
  return bf16 ? float_of((uint32_t)to_bf16(x) << 16) : x;
}

static size_t act_size(void) {
  return bf16 ? 2 : 4;
}

static void put(void *array, size_t i, float x) {
  if (bf16)
    ((uint16_t *)array)[i] = to_bf16(x);
  else
    ((float *)array)[i] = x;
}

static float get(const void *array, size_t i) {
  return bf16 ? float_of((uint32_t)((const uint16_t *)array)[i] << 16) : ((const float *)array)[i];
}

/* Element (column, k) of packed panels of `k_pad` rows. */
static size_t packed_at(uint32_t column, uint32_t k, uint32_t k_pad) {
  size_t panel = (size_t)(column / 16) * k_pad * 16;
  if (bf16) return panel + (size_t)(k / 2) * 32 + column % 16 * 2 + k % 2;
  return panel + (size_t)k * 16 + column % 16;
}

typedef struct problem {
  _Alignas(64) unsigned char w[2 * MAX_COLS * MAX_K * 4];
  _Alignas(64) unsigned char x[MAX_ROWS * STRIDE * 4], y[MAX_ROWS * STRIDE * 4];
  float xf[MAX_ROWS][MAX_K], wf[2 * MAX_COLS][MAX_K], bias[MAX_COLS], before[MAX_ROWS][STRIDE];
  uint32_t rows, k, cols, k_pad;
} problem;

static problem p;

/* `panels` is how many columns W has: cols, or for swiglu the gate and up panels together. */
static void fill(uint32_t rows, uint32_t k, uint32_t cols, uint32_t w_cols) {
  memset(&p, 0, sizeof p);
  p.rows = rows;
  p.k = k;
  p.cols = cols;
  p.k_pad = (k + 31) / 32 * 32;
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t i = 0; i < k; i++) {
      p.xf[r][i] = rounded(random_float());
      put(p.x, (size_t)r * STRIDE + i, p.xf[r][i]);
    }
  for (uint32_t c = 0; c < w_cols; c++)
    for (uint32_t i = 0; i < k; i++) {
      p.wf[c][i] = rounded(random_float());
      put(p.w, packed_at(c, i, p.k_pad), p.wf[c][i]);
    }
  for (uint32_t c = 0; c < cols; c++) p.bias[c] = random_float();
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = 0; c < STRIDE; c++) p.before[r][c] = 3.0f;
}

static pds_gemm gemm_of(pds_gemm_out out) {
  return (pds_gemm){.x = p.x,
                    .x_stride = STRIDE,
                    .x_div = 1,
                    .w = p.w,
                    .panel_stride = p.k_pad * 16 * act_size(),
                    .y = p.y,
                    .y_stride = STRIDE,
                    .rows = p.rows,
                    .k = p.k,
                    .cols = p.cols,
                    .out = (uint32_t)out};
}

static void reset_y(pds_gemm_out out) {
  for (uint32_t r = 0; r < p.rows; r++)
    for (uint32_t c = 0; c < STRIDE; c++) {
      if (out == PDS_OUT_ACT)
        put(p.y, (size_t)r * STRIDE + c, 3.0f);
      else
        ((float *)p.y)[(size_t)r * STRIDE + c] = 3.0f;
    }
}

static double dot(uint32_t row, uint32_t column, double *out_size) {
  double sum = 0, size = 0;
  for (uint32_t i = 0; i < p.k; i++) {
    double product = (double)p.xf[row][i] * (double)p.wf[column][i];
    sum += product;
    size += fabs(product);
  }
  *out_size = size;
  return sum;
}

static float result(pds_gemm_out out, size_t i) {
  return out == PDS_OUT_ACT ? get(p.y, i) : ((const float *)p.y)[i];
}

/* Of a value that was rounded to act last. */
static double rounding(pds_gemm_out out, double value) {
  return out == PDS_OUT_ACT && bf16 ? fabs(value) / 256 : 0;
}

static void check_gemm(pds_gemm_out out, bool with_bias, bool with_index) {
  int32_t x_index[MAX_ROWS], y_index[MAX_ROWS];
  for (uint32_t r = 0; r < p.rows; r++) {
    x_index[r] = (int32_t)(2 * ((r * 7 + 3) % p.rows));
    y_index[r] = (int32_t)(p.rows - 1 - r);
  }
  pds_gemm g = gemm_of(out);
  if (with_bias) g.bias = p.bias;
  if (with_index) {
    g.x_index = x_index;
    g.x_div = 2;
    g.y_index = y_index;
  }
  if (out == PDS_OUT_ACT) g.pad = (p.cols + 31) / 32 * 32;
  reset_y(out);
  act->gemm(&g);
  for (uint32_t r = 0; r < p.rows; r++) {
    uint32_t from = with_index ? (uint32_t)x_index[r] / 2 : r;
    size_t to = (size_t)(with_index ? (uint32_t)y_index[r] : r) * STRIDE;
    for (uint32_t c = 0; c < STRIDE; c++) {
      float got = result(out, to + c);
      if (c >= p.cols) {
        float kept = out == PDS_OUT_ACT && c < g.pad ? 0.0f : 3.0f;
        if (!holds(got == kept, "gemm wrote beyond its columns", p.rows, p.k, p.cols)) return;
        continue;
      }
      double size, want = dot(from, c, &size);
      if (with_bias) want += (double)p.bias[c];
      if (out == PDS_OUT_ADD) want += 3;
      double slack = 1e-6 * (size + 4) + rounding(out, want);
      if (!holds(fabs(got - want) <= slack, "gemm", p.rows, p.k, p.cols)) return;
    }
  }
}

/* A row's result depends neither on the other rows nor on how the columns are cut. */
static void check_cuts(void) {
  static float whole[MAX_ROWS * STRIDE];
  pds_gemm g = gemm_of(PDS_OUT_F32);
  reset_y(PDS_OUT_F32);
  act->gemm(&g);
  memcpy(whole, p.y, sizeof whole);
  for (uint32_t r = 0; r < p.rows; r++) {
    g = gemm_of(PDS_OUT_F32);
    g.rows = 1;
    g.x = p.x + (size_t)r * STRIDE * act_size();
    for (uint32_t c = 0; c < p.cols; c += 16) {
      g.w = p.w + (size_t)(c / 16) * g.panel_stride;
      g.cols = p.cols - c < 16 ? p.cols - c : 16;
      g.y = p.y + ((size_t)r * STRIDE + c) * 4;
      act->gemm(&g);
    }
  }
  holds(memcmp(whole, p.y, (size_t)p.rows * STRIDE * 4) == 0, "gemm depends on its cut", p.rows,
        p.k, p.cols);
}

static void check_swiglu(uint32_t rows, uint32_t k, uint32_t cols) {
  fill(rows, k, cols, (cols + 15) / 16 * 32);
  pds_gemm g = gemm_of(PDS_OUT_ACT);
  g.pad = (cols + 31) / 32 * 32;
  reset_y(PDS_OUT_ACT);
  act->swiglu(&g);
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = 0; c < g.pad; c++) {
      float got = get(p.y, (size_t)r * STRIDE + c);
      double size_g, size_u, want = 0, slack = 0;
      if (c < cols) {
        uint32_t column = c / 16 * 32 + c % 16;
        double gate = dot(r, column, &size_g), up = dot(r, column + 16, &size_u);
        want = gate / (1 + exp(-gate)) * up;
        slack = 2e-6 * (size_g + 1) * (size_u + 1) + rounding(PDS_OUT_ACT, want);
      }
      if (!holds(fabs(got - want) <= slack, "swiglu", rows, k, cols)) return;
    }
}

/* All sizes with each other; with TEST_PAIRS set, each two of rows, k and columns: most of
 * the time goes into the expected values, where an emulator computes them or sanitizers watch. */
static void gemms(void) {
  const bool pairs = getenv("TEST_PAIRS") != NULL;
  static const uint32_t rows[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 17};
  static const uint32_t ks[] = {2, 16, 30, 32, 34, 64, 96}, cols[] = {1, 15, 16, 17, 31, 32, 48};
  for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
    for (size_t k = 0; k < sizeof ks / sizeof *ks; k++)
      for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        if (pairs && (r + k + c) % 3 != 0) continue;
        fill(rows[r], ks[k], cols[c], cols[c]);
        check_gemm((pds_gemm_out)((r + k + (pairs ? k : c)) % 3), (r + k) % 2,
                   (k + c) % 2 && rows[r] > 0);
        check_cuts();
        check_swiglu(rows[r], ks[k], cols[c]);
      }
}

static void conversions(void) {
  static float x[67];
  static unsigned char y[67 * 4];
  for (uint32_t n = 0; n <= 67; n++) {
    for (uint32_t i = 0; i < n; i++) x[i] = float_of(test_random(&seed) & 0xbfffffff); /* finite */
    x[0] = INFINITY;
    if (n > 1) x[1] = 3.4e38f;              /* bf16: overflows to Inf */
    if (n > 2) x[2] = float_of(0x3f808000); /* bf16: a tie, to even */
    if (n > 3) x[3] = float_of(0x3f818000); /* the same upwards */
    memset(y, 0xa5, sizeof y);
    act->convert(x, y, n);
    for (uint32_t i = 0; i < n; i++) {
      bool good = bf16 ? ((const uint16_t *)y)[i] == to_bf16(x[i])
                       : bits_of(((const float *)y)[i]) == bits_of(x[i]);
      if (!holds(good, "convert", n, i, 0)) return;
    }
    for (size_t i = n * act_size(); i < sizeof y; i++)
      if (!holds(y[i] == 0xa5, "convert wrote too far", n, 0, 0)) return;
  }
  float nan = NAN;
  act->convert(&nan, y, 1);
  holds(isnan(get(y, 0)), "convert of NaN", 1, 0, 0);
}

static void softmax_blocks(void) {
  static float s[PDS_KEYS];
  static unsigned char out[PDS_KEYS * 4];
  for (uint32_t lo = 0; lo < PDS_KEYS; lo += 5)
    for (uint32_t hi = lo + 1; hi <= PDS_KEYS; hi += 3) {
      for (int i = 0; i < PDS_KEYS; i++) s[i] = random_float() * 20;
      const float scale = 0.3f;
      float m = hi % 2 ? -INFINITY : 1.5f, l = hi % 2 ? 0.0f : 2.0f, old_m = m, old_l = l;
      double max = (double)m, sum = 0;
      for (uint32_t i = lo; i < hi; i++) max = fmax(max, (double)(scale * s[i]));
      float factor = act->softmax_block(s, lo, hi, scale, &m, &l, out);
      double want = exp((double)old_m - max);
      holds(fabs((double)factor - want) <= 1e-5, "softmax factor", lo, hi, 0);
      for (uint32_t i = 0; i < PDS_KEYS; i++) {
        double e = i >= lo && i < hi ? exp((double)scale * (double)s[i] - max) : 0;
        sum += e;
        double slack = 1e-5 * e + rounding(PDS_OUT_ACT, e);
        if (!holds(fabs((double)get(out, i) - e) <= slack, "softmax_block", lo, hi, i)) return;
      }
      sum += (double)old_l * want;
      /* The sum may be of the exponentials before or after their rounding to act. */
      double slack = (bf16 ? 1.0 / 256 : 1e-5) * sum;
      holds(fabs((double)m - max) <= 1e-5 && fabs((double)l - sum) <= slack, "softmax sums", lo, hi,
            0);
    }
}

/* Keys [tokens, dims] in panels of 16 tokens; values [dims, tokens] in panels of 16 dimensions. */
static void transposes(void) {
  enum { DIMS = 40, KEY_PAD = 64 };
  static _Alignas(64) unsigned char keys[PDS_KEYS * KEY_PAD * 4], values[48 * PDS_KEYS * 4];
  for (uint32_t dims = 1; dims <= DIMS; dims += dims < 18 ? 1 : 5)
    for (uint32_t tokens = 1; tokens <= PDS_KEYS; tokens += 3) {
      for (uint32_t t = 0; t < PDS_KEYS; t++)
        for (uint32_t d = 0; d < KEY_PAD; d++)
          put(keys, packed_at(t, d, KEY_PAD), rounded(random_float()));
      memset(values, 0xff, sizeof values);
      act->key_to_value(keys, KEY_PAD * 16 * act_size(), dims, tokens, values);
      for (uint32_t d = 0; d < (dims + 15) / 16 * 16; d++)
        for (uint32_t t = 0; t < tokens + (bf16 && tokens % 2); t++) {
          float got = get(values, packed_at(d, t, PDS_KEYS));
          bool there = d < dims && t < tokens;
          float want = there ? get(keys, packed_at(t, d, KEY_PAD)) : 0.0f;
          if (!holds(got == want, "key_to_value", dims, tokens, d)) return;
        }
    }
}

static void rows_of_floats(void) {
  static float x[131], w[131], y[131], z[131];
  for (uint32_t n = 1; n <= 131; n += n < 40 ? 1 : 13) {
    double squares = 0, sum = 0, max = -1e9;
    for (uint32_t i = 0; i < n; i++) {
      x[i] = random_float() * 4;
      w[i] = random_float();
      squares += (double)x[i] * (double)x[i];
      max = fmax(max, (double)x[i]);
    }
    for (uint32_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
    double scale = 1 / sqrt(squares / n + 1e-6);
    kernels->rms_norm(x, w, n, 1e-6f, y);
    for (uint32_t i = 0; i < n; i++)
      if (!holds(fabs((double)y[i] - (double)x[i] * scale * (double)w[i]) < 1e-5, "rms_norm", n, i,
                 0))
        return;
    memcpy(y, x, sizeof y);
    kernels->softmax(y, n);
    memcpy(z, x, sizeof z);
    kernels->sigmoid(z, n);
    for (uint32_t i = 0; i < n; i++) {
      double e = exp((double)x[i] - max) / sum, s = 1 / (1 + exp(-(double)x[i]));
      if (!holds(fabs((double)y[i] - e) < 2e-6, "softmax", n, i, 0)) return;
      if (!holds(fabs((double)z[i] - s) < 1e-6, "sigmoid", n, i, 0)) return;
    }
    memcpy(y, w, sizeof y);
    kernels->axpy(0.7f, x, y, n);
    memcpy(z, w, sizeof z);
    kernels->scale(0.7f, z, n);
    for (uint32_t i = 0; i < n; i++) {
      float product = 0.7f * x[i];
      if (!holds(y[i] == w[i] + product, "axpy", n, i, 0)) return;
      if (!holds(z[i] == 0.7f * w[i], "scale", n, i, 0)) return;
    }
  }
}

void case_kernels(void) {
  static const char *const names[] = {"scalar", "avx2", "avx512", "avx512bf16"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    const pds_isa_path *path;
    if (pds_isa_choose(names[i], &path) != PDS_OK) {
      printf("kernels: skipped %s: %s\n", names[i], pds_last_error());
      continue;
    }
    kernels = path->kernels();
    printf("kernels: %s\n", names[i]);
    rows_of_floats();
    for (int type = 0; type < 2; type++) {
      bf16 = type;
      act = bf16 ? &kernels->bf16 : &kernels->f32;
      gemms();
      conversions();
      softmax_blocks();
      transposes();
    }
  }
}
