/* list.h: all kernels of a GPU. X(name, parameter struct, most threads of a block): the function is
 * pds_cu_<name>, and never named as a struct: C++ has one space for both. */
#ifndef PDS_CUDA_LIST_H
#define PDS_CUDA_LIST_H

#include "params.h"

/* rows.cu */
#define PDS_CU_ROW_KERNELS(X)                                                                      \
  X(rope_rows, pds_cu_rope, 256)                                                                   \
  X(norm_rows, pds_cu_norm, 256)                                                                   \
  X(route_rows, pds_cu_route, 256)                                                                 \
  X(combine_rows, pds_cu_combine, 256)

/* attention.cu */
#define PDS_CU_ATTENTION_KERNELS(X)                                                                \
  X(attention_q_a, pds_cu_attention, 256)                                                          \
  X(attention_rows, pds_cu_attention, 256)                                                         \
  X(attention_merge, pds_cu_attention, 128)                                                        \
  X(attend_plain, pds_cu_attention, 128)                                                           \
  X(attend_few_64, pds_cu_attention, 256)                                                          \
  X(attend_few_128, pds_cu_attention, 256)                                                         \
  X(attend_few_256, pds_cu_attention, 256)                                                         \
  X(attend_many_64, pds_cu_attention, 128)                                                         \
  X(attend_many_128, pds_cu_attention, 128)                                                        \
  X(attend_many_256, pds_cu_attention, 256)                                                        \
  X(attend_mla_16, pds_cu_attention, 256)                                                          \
  X(attend_mla_small, pds_cu_attention, 256)                                                       \
  X(attend_mla_64, pds_cu_attention, 256)

/* gemm.cu */
#define PDS_CU_GEMM_KERNELS(X)                                                                     \
  X(gemm_scalar, pds_cu_gemm, 256)                                                                 \
  X(gemm_few, pds_cu_gemm, 512)                                                                    \
  X(gemm_stream_bf16, pds_cu_gemm, 512)                                                            \
  X(gemm_stream_i8, pds_cu_gemm, 512)                                                              \
  X(gemm_stream_i4, pds_cu_gemm, 512)                                                              \
  X(gemm_group_bf16_128, pds_cu_gemm, 256)                                                         \
  X(gemm_group_i8_128, pds_cu_gemm, 256)                                                           \
  X(gemm_group_i4_128, pds_cu_gemm, 256)                                                           \
  X(gemm_bf16_128, pds_cu_gemm, 256)                                                               \
  X(gemm_bf16_64, pds_cu_gemm, 256)                                                                \
  X(gemm_bf16_32, pds_cu_gemm, 256)                                                                \
  X(gemm_i8_128, pds_cu_gemm, 256)                                                                 \
  X(gemm_i8_64, pds_cu_gemm, 256)                                                                  \
  X(gemm_i8_32, pds_cu_gemm, 256)                                                                  \
  X(gemm_i4_128, pds_cu_gemm, 256)                                                                 \
  X(gemm_i4_64, pds_cu_gemm, 256)                                                                  \
  X(gemm_i4_32, pds_cu_gemm, 256)

#define PDS_CU_KERNELS(X)                                                                          \
  PDS_CU_ROW_KERNELS(X)                                                                            \
  PDS_CU_ATTENTION_KERNELS(X)                                                                      \
  PDS_CU_GEMM_KERNELS(X)

typedef enum pds_cu_kernel {
#define PDS_CU_ENUM(name, params, threads) PDS_CU_##name,
  PDS_CU_KERNELS(PDS_CU_ENUM)
#undef PDS_CU_ENUM
      PDS_CU_COUNT
} pds_cu_kernel;

#endif
