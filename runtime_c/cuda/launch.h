/* launch.h: which kernel a parameter struct is launched as, and with what grid. No driver, no memory: the
 * same functions serve a GPU and the mock driver. */
#ifndef PDS_CUDA_LAUNCH_H
#define PDS_CUDA_LAUNCH_H

#include "kernels/list.h"

typedef struct pds_cu_device {
  uint32_t sms;
  uint32_t shared_most; /* bytes of shared memory that a block may have, opted in */
  uint32_t compute;     /* capability times ten */
} pds_cu_device;

typedef struct pds_cu_launch {
  pds_cu_kernel kernel;
  uint32_t grid[3], threads, shared_bytes;
} pds_cu_launch;

/* launch_gemm.c. Sets holes[].tile and `free`. rows or n_holes, and cols, are not 0. */
pds_cu_launch pds_cu_shape_gemm(const pds_cu_device *device, pds_cu_gemm *g);

/* launch_attention.c: the stages of attention between its GEMMs, in order. */
typedef enum pds_cu_stage {
  PDS_CU_STAGE_Q_A,  /* MLA with q_lora: qkv -> qact, the normed input of q_b */
  PDS_CU_STAGE_ROWS, /* norms, clip, rope; -> q (MLA: qhead, and the rotated part of q), KV append */
  PDS_CU_STAGE_ATTEND, /* q, KV -> oact (MLA: ctx), or partial where splits > 1 */
  PDS_CU_STAGE_MERGE   /* partial -> oact (MLA: ctx) */
} pds_cu_stage;
pds_cu_launch pds_cu_shape_attention(const pds_cu_device *device, const pds_cu_attention *a,
                                     pds_cu_stage stage);
/* In how many parts, of what multiple of 64 tokens, the context is cut: sets split_tokens and splits.
 * `far`: the greatest position of a row. partial has room for most_splits parts a row; no part but a
 * context's only one has fewer than split_least tokens. In a buffer for 16 rows with pds_plan.kv_split,
 * a step of n rows has room for 16 / n times as many parts: then the launcher may set most_splits to as
 * much, and split_least to as much less, 64 or more. Decode at short contexts gains by that. */
void pds_cu_cut_context(const pds_cu_device *device, pds_cu_attention *a, uint32_t far,
                        uint32_t split_least);

/* launch_rows.c */
pds_cu_launch pds_cu_shape_rope(const pds_cu_rope *p);
pds_cu_launch pds_cu_shape_norm(const pds_cu_norm *p);
pds_cu_launch pds_cu_shape_route(const pds_cu_route *p);
pds_cu_launch pds_cu_shape_combine(const pds_cu_combine *p);

#endif
