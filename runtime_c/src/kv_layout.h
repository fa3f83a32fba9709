/* kv_layout.h: what one KV block of PDS_KEYS tokens looks like, and how much private scratch
 * attention needs.
 *
 * A block holds, layer after layer and KV head after KV head, the keys and then the values as
 * packed panels (plan_desc.h), so that scores and attention outputs are GEMMs like any other:
 *   - keys: the matrix [PDS_KEYS tokens, key dims], 4 panels of 16 tokens, k = dimension;
 *   - values: the matrix [value dims, PDS_KEYS tokens], panels of 16 dimensions, k = token.
 * In a bf16 value word whose odd token does not exist yet, that half is zero.
 *
 * MLA has one KV head whose key is the normed latent followed by the rotated part, and no stored
 * values: the latent is the value, transposed on the fly. */
#ifndef PDS_KV_LAYOUT_H
#define PDS_KV_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "plan_desc.h"

static inline uint32_t pds_ceil(uint32_t n, uint32_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

static inline uint32_t pds_act_bytes(const pds_plan *plan) {
  return plan->act_dtype == PDS_BF16 ? 2 : 4;
}

static inline uint32_t pds_kv_heads(const pds_attention *a) {
  return a->kind == PDS_MLA ? 1 : a->kv_heads;
}

/* Dimensions of a cached key, and of the value that attention sums. */
static inline uint32_t pds_key_dims(const pds_attention *a) {
  return a->kind == PDS_MLA ? a->kv_lora + a->rope.dim : a->qk_dim;
}
static inline uint32_t pds_value_dims(const pds_attention *a) {
  return a->kind == PDS_MLA ? a->kv_lora : a->v_dim;
}

/* Bytes of one panel of keys (16 tokens) and of values (16 dimensions). */
static inline size_t pds_key_panel_bytes(const pds_plan *plan, const pds_attention *a) {
  return (size_t)pds_ceil(pds_key_dims(a) * pds_act_bytes(plan), 4) / 4 * 64;
}
static inline size_t pds_value_panel_bytes(const pds_plan *plan) {
  return (size_t)PDS_KEYS * PDS_LANES * pds_act_bytes(plan);
}

/* Keys and values of one KV head. */
static inline size_t pds_kv_key_bytes(const pds_plan *plan, const pds_attention *a) {
  return PDS_KEYS / PDS_LANES * pds_key_panel_bytes(plan, a);
}
static inline size_t pds_kv_head_bytes(const pds_plan *plan, const pds_attention *a) {
  const size_t values =
      a->kind == PDS_MLA ? 0
                         : pds_ceil(a->v_dim, PDS_LANES) / PDS_LANES * pds_value_panel_bytes(plan);
  return pds_kv_key_bytes(plan, a) + values;
}

/* Bytes of the layers below `layer` in a block; with layer = n_layers: of the whole block
 * (pds_plan.kv_block_bytes). */
static inline size_t pds_kv_layer_offset(const pds_plan *plan, uint32_t layer) {
  size_t bytes = 0;
  for (uint32_t i = 0; i < layer; i++) {
    const pds_attention *a = &plan->layers[i].attn;
    bytes += pds_kv_heads(a) * pds_kv_head_bytes(plan, a);
  }
  return bytes;
}

/* One worker's scratch. Attention: scores and probabilities of PDS_TILE (row, head) pairs
 * against one block, their running maxima, sums and outputs, and the block's values where they
 * are transposed. The gate and the rows on their way into the cache use the first part. */
enum { PDS_TILE = 64 };
typedef struct pds_attention_scratch {
  float scores[PDS_TILE][PDS_KEYS];
  float probs[PDS_TILE][PDS_KEYS]; /* act */
  float max[PDS_TILE], sum[PDS_TILE];
} pds_attention_scratch;
/* then: fp32 [PDS_TILE, ceil16(value dims)]; MLA: act [ceil16(kv_lora), PDS_KEYS] */

/* What pds_plan.thread_scratch_bytes must be at least for this layer. */
static inline size_t pds_attention_scratch_bytes(const pds_plan *plan, const pds_attention *a) {
  const size_t dims = pds_ceil(pds_value_dims(a), PDS_LANES);
  return sizeof(pds_attention_scratch) + dims * PDS_TILE * 4 +
         (a->kind == PDS_MLA ? dims * PDS_KEYS * pds_act_bytes(plan) : 0);
}

#endif
