/* params.h: what the GPU's kernels are launched with. C for the launcher, CUDA C for the kernels; all
 * pointers are the device's own, or pinned host memory's. Layouts of weights, buffers and the KV cache are
 * those of plan_desc.h and kv_layout.h: they are the same on the CPU. */
#ifndef PDS_CUDA_PARAMS_H
#define PDS_CUDA_PARAMS_H

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

/* How each begins: pds_twin_work (driver.h), which the GPU's kernels skip. */
typedef struct pds_cu_head {
  uint32_t bytes, n;
  const uint32_t *tokens;
  uint64_t extra;
} pds_cu_head;

enum {
  PDS_CU_EXPERTS = 1024, /* of a layer */
  PDS_CU_HOLES = 128,    /* experts of one launch; what is more goes to another */
  PDS_CU_ROPE = 256      /* pairs of a rope */
};
/* Weights (pds_dtype) and GEMM inputs. */
enum { PDS_CU_F32 = 1, PDS_CU_BF16 = 2, PDS_CU_I8 = 4, PDS_CU_I4 = 5 };
/* pds_gemm_out */
enum { PDS_CU_OUT_F32 = 0, PDS_CU_OUT_ADD = 1, PDS_CU_OUT_ACT = 2 };

typedef struct pds_cu_hole {
  const uint8_t *at; /* the expert's blob */
  uint32_t first, rows;
  uint32_t tile; /* the first block that works on it; the launcher's and the kernel's own affair */
  uint32_t pad;
} pds_cu_hole;

/* y[rows, cols] = x[rows, k] W^T, as pds_gemm (kernels.h) has it, with weight-only int8 and int4: x is
 * act in all cases. Three kinds:
 *   - one matrix: count 1, n_holes 0;
 *   - `count` matrices, w_step bytes, x_step and y_step elements apart (MLA's heads), n_holes 0;
 *   - experts: hole i's matrix is at holes[i].at + w_offset, and its row r is number first + r of a list:
 *     it reads row x_index[first + r] / x_div of x, or row first + r without x_index, and writes row
 *     y_index[first + r] of y, or row first + r without y_index. w and rows mean nothing.
 * swiglu: panels alternate gate and up, `cols` counts columns of y = act(silu(gate) * up), no bias.
 * Columns [cols, pad) of y become zero where y is act. x may be read to x_stride, never beyond; columns
 * from k to there are finite. k_pad: k rounded up to 32, int8 and int4 to 64. */
typedef struct pds_cu_gemm {
  pds_cu_head head;
  const void *x;
  const uint8_t *w;
  void *y;
  const int32_t *x_index, *y_index;
  const float *bias;
  uint64_t panel_bytes, w_step, x_step, y_step, w_offset;
  uint32_t x_stride, y_stride; /* elements */
  uint32_t rows, k, k_pad, cols, pad, x_div;
  uint32_t count, n_holes;
  uint8_t w_dtype, act_dtype, out, swiglu;
  uint32_t free; /* the launcher's and the kernel's own affair */
  pds_cu_hole holes[PDS_CU_HOLES];
} pds_cu_gemm;

/* cos and sin of each row's position: table [rows][2][dim / 2], rounded like transformers: the angle is
 * fp32 before cos and sin. */
typedef struct pds_cu_rope {
  pds_cu_head head;
  const int32_t *position;
  float *table;
  uint32_t rows, dim;
  float scale;
  float inv_freq[PDS_CU_ROPE];
} pds_cu_rope;

/* RMSNorm of rows of x: xn fp32, and xact, the same as act; both [rows, stride], zero from n on. */
typedef struct pds_cu_norm {
  pds_cu_head head;
  const float *x, *weight;
  const uint32_t *index; /* row i reads row index[i] of x; NULL: row i */
  float *xn;
  void *xact;
  float *host_xn; /* pinned, where the host reads the same; NULL: it does not */
  void *host_xact;
  uint32_t rows, n, stride;
  float eps;
  uint8_t act_dtype;
} pds_cu_norm;

/* All of attention but its GEMMs. Fields as in pds_attention and plan_desc.h's buffers; strides are
 * elements. */
typedef struct pds_cu_attention {
  pds_cu_head head;
  /* the batch */
  const int32_t *position, *seq;
  const uint32_t *table; /* block b of sequence s: kv + table[s * table_stride + b] * block_bytes */
  uint8_t *kv;           /* of this layer: the layer's offset in a block is added */
  uint64_t block_bytes;
  uint32_t rows, table_stride;
  /* the layer */
  uint8_t mla, qk_norm, interleaved, act_dtype;
  uint32_t heads, kv_heads, qk_dim, v_dim, nope_dim, q_lora, kv_lora, rope_dim, window;
  uint32_t key_dims, value_dims;                   /* pds_key_dims, pds_value_dims */
  uint64_t key_panel_bytes, key_bytes, head_bytes; /* pds_kv_* of kv_layout.h */
  float scale, norm_eps, clip;
  const float *q_norm, *k_norm, *rope; /* rope: [rows][2][rope_dim / 2] */
  /* buffers */
  float *qkv, *qb;
  void *qact, *q, *qhead, *ctx, *oact;
  float *partial; /* [rows][heads][most_splits][ceil16(value_dims) + 16]: max, sum, output at 16 */
  uint32_t qkv_stride, qb_stride, qact_stride, q_stride, qhead_stride, ctx_stride, oact_stride;
  uint32_t split_tokens, splits, most_splits; /* splits 1: the context is not cut */
} pds_cu_attention;

/* pds_route: scores [rows, stride] of a gate's GEMM to ids and weights [rows, top_k]. */
typedef struct pds_cu_route {
  pds_cu_head head;
  float *scores;
  const float *bias; /* or NULL */
  int32_t *id;
  float *weight;
  int32_t *host_id; /* pinned, where the host reads the same; NULL: it does not */
  float *host_weight;
  uint32_t rows, stride, experts, top_k, groups, top_groups;
  uint8_t score, group_score, normalise, mask_zero; /* pds_gate */
  float norm_eps, scaling;
} pds_cu_route;

/* HID += sum over ranks in order of weight * output (+ shared). */
typedef struct pds_cu_combine {
  pds_cu_head head;
  float *hid;
  const float *out;             /* [rows * top_k, stride] */
  const void *cpu_out;          /* the same of the CPU's experts: pinned; bf16 if cpu_bf16 */
  const float *weight, *shared; /* shared: or NULL */
  const int32_t *id;
  uint32_t rows, top_k, n, stride;
  uint32_t
      on_gpu[PDS_CU_EXPERTS / 32]; /* bit e % 32 of word e / 32: expert e's output is in `out` */
  uint8_t cpu_bf16;
} pds_cu_combine;

#endif
