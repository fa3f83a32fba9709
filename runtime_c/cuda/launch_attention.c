/* launch_attention.c: which kernels of attention.cu serve a layer, and with what grids. */
#include <stddef.h>

#include "launch.h"

enum {
  FEW_ROWS = 16, /* most rows of a step whose context may be cut: `partial` has no more */
  THREADS = 256,
  WARPS = THREADS / 32,
  PLAIN_THREADS = 128,
  FEW_STAGES = 3, /* of attend_few.h */
  FEW_PAIRS = 16,
  MANY_PAIRS = 128, /* of attend_many.h */
  MLA_VALUES = 512  /* of attend_mla.h, at most */
};

/* What a cut costs besides its tokens, in tokens of the context: an estimate. */
enum { BLOCK_COST = 64, MERGE_COST = 256 };

static uint32_t parts(uint32_t n, uint32_t unit) {
  return (n + unit - 1) / unit;
}
static uint32_t up(uint32_t n, uint32_t unit) {
  return parts(n, unit) * unit;
}

/* A kernel for the layer's attention; blocks: of one part of the context, at most. */
typedef struct attend_shape {
  pds_cu_kernel kernel;
  uint32_t blocks, threads, shared;
} attend_shape;

static attend_shape plain_shape(const pds_cu_attention *a) {
  const attend_shape s = {PDS_CU_attend_plain, a->rows * a->heads, PLAIN_THREADS,
                          (a->key_dims + 64 + a->value_dims) * (uint32_t)sizeof(float)};
  return s;
}

/* The first that fits; small tiles where they are no more than the device has processors. */
static attend_shape mla_shape(const pds_cu_device *device, const pds_cu_attention *a) {
  static const struct {
    pds_cu_kernel kernel;
    uint32_t tiles, stages;
  } all[] = {
      {PDS_CU_attend_mla_64, 4, 3}, {PDS_CU_attend_mla_16, 1, 5}, {PDS_CU_attend_mla_small, 1, 3}};
  const int small = parts(a->rows * a->heads, 16) <= device->sms;
  for (uint32_t i = small; i < 3 && a->value_dims <= MLA_VALUES; i++) {
    const uint32_t tiles = all[i].tiles, pairs = 16 * tiles,
                   pair_bytes = a->q_stride * 2 + WARPS / tiles * 32 * 4 + 64 + 4,
                   shared = all[i].stages * a->q_stride * 64 + pairs * pair_bytes;
    const attend_shape s = {all[i].kernel, parts(a->rows * a->heads, pairs), THREADS, shared};
    if (shared <= device->shared_most) return s;
  }
  return plain_shape(a);
}

static attend_shape gqa_shape(const pds_cu_device *device, const pds_cu_attention *a) {
  static const pds_cu_kernel kernels[3][2] = {
      {PDS_CU_attend_few_64, PDS_CU_attend_many_64},
      {PDS_CU_attend_few_128, PDS_CU_attend_many_128},
      {PDS_CU_attend_few_256, PDS_CU_attend_many_256},
  };
  const uint32_t dims = a->key_dims > a->value_dims ? a->key_dims : a->value_dims,
                 group = a->heads / a->kv_heads,
                 most = dims <= 64    ? 64
                        : dims <= 128 ? 128
                                      : 256;
  attend_shape s = {kernels[most / 128][1], parts(a->rows * group, MANY_PAIRS) * a->kv_heads,
                    most == 256 ? 256 : 128, 512 * most + MANY_PAIRS * 2 * most};
  /* Few rows, or not enough for a quarter of the device, whose blocks are slower by about that. */
  if (a->rows <= FEW_ROWS || s.blocks * 4 < device->sms) {
    const uint32_t warp = FEW_STAGES * 128 * most, query = FEW_PAIRS * 2 * most,
                   room = (device->shared_most - query) / warp, warps = room < WARPS ? room : WARPS;
    const attend_shape few = {kernels[most / 128][0],
                              a->rows * a->kv_heads * parts(group, FEW_PAIRS), 32 * warps,
                              warps * warp + query};
    s = few;
  }
  return dims <= 256 && s.threads && s.shared <= device->shared_most ? s : plain_shape(a);
}

static attend_shape shape_of(const pds_cu_device *device, const pds_cu_attention *a) {
  if (a->act_dtype != PDS_CU_BF16) return plain_shape(a);
  return a->mla ? mla_shape(device, a) : gqa_shape(device, a);
}

static pds_cu_launch launch(pds_cu_kernel kernel, uint32_t x, uint32_t y, uint32_t z,
                            uint32_t threads, uint32_t shared) {
  const pds_cu_launch l = {
      .kernel = kernel, .grid = {x, y, z}, .threads = threads, .shared_bytes = shared};
  return l;
}

static pds_cu_launch shape_attend(const pds_cu_device *device, const pds_cu_attention *a) {
  const attend_shape s = shape_of(device, a);
  if (s.kernel == PDS_CU_attend_plain)
    return launch(s.kernel, a->rows, a->heads, a->splits, s.threads, s.shared);
  if (s.kernel == PDS_CU_attend_few_64 || s.kernel == PDS_CU_attend_few_128 ||
      s.kernel == PDS_CU_attend_few_256)
    return launch(s.kernel, a->splits, s.blocks / a->rows, a->rows, s.threads, s.shared);
  return launch(s.kernel, s.blocks, a->splits, 1, s.threads, s.shared);
}

pds_cu_launch pds_cu_shape_attention(const pds_cu_device *device, const pds_cu_attention *a,
                                     pds_cu_stage stage) {
  const uint32_t own_heads = a->mla ? a->heads + 1 : a->heads + 2 * a->kv_heads;
  uint32_t widest = a->key_dims > a->qk_dim ? a->key_dims : a->qk_dim;
  if (a->v_dim > widest) widest = a->v_dim;
  switch (stage) {
  case PDS_CU_STAGE_Q_A:
    return launch(PDS_CU_attention_q_a, a->rows, 1, 1, THREADS, WARPS * sizeof(float));
  case PDS_CU_STAGE_ROWS:
    return launch(PDS_CU_attention_rows, parts(own_heads, WARPS), a->rows, 1, THREADS,
                  (WARPS + WARPS * (widest + 1)) * (uint32_t)sizeof(float));
  case PDS_CU_STAGE_ATTEND: return shape_attend(device, a);
  case PDS_CU_STAGE_MERGE: break;
  }
  return launch(PDS_CU_attention_merge, a->heads, a->rows, 1, PLAIN_THREADS,
                (WARPS + a->splits) * (uint32_t)sizeof(float));
}

/* As many parts as end soonest, if all blocks take as long as their tokens, one a processor. */
void pds_cu_cut_context(const pds_cu_device *device, pds_cu_attention *a, uint32_t far,
                        uint32_t split_least) {
  const uint32_t all = far + 1, tokens = a->window && a->window < all ? a->window : all;
  uint64_t best = UINT64_MAX;
  a->splits = 1;
  a->split_tokens = up(all, 64);
  if (a->rows > FEW_ROWS) return;
  const uint64_t blocks = shape_of(device, a).blocks;
  for (uint32_t n = 1; n <= parts(tokens, 64); n++) {
    const uint32_t each = up(parts(tokens, n), 64);
    if (n > 1 && (each < split_least || parts(all, each) > a->most_splits)) break;
    const uint64_t waves = (blocks * n + device->sms - 1) / device->sms,
                   cost = waves * (each + BLOCK_COST) + (n > 1 ? MERGE_COST : 0);
    if (cost >= best) continue;
    best = cost;
    a->splits = n > 1 ? parts(all, each) : 1;
    a->split_tokens = n > 1 ? each : up(all, 64);
  }
}
