/* net.h: predictors that were trained: small nets, one a layer and phase, in memory of the engine,
 * and what each sequence's last token chose, which they read. compiler/phaseper/nets.py has the
 * formulas, pds_net_desc of pdscope.h repeats them. */
#ifndef PDS_NET_H
#define PDS_NET_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "memory.h"
#include "step.h"

/* A net begins its memory; what its tensors' offsets count from is the net itself. */
typedef struct pds_net {
  uint32_t experts, width, deep, blocks;
  pds_tensor in, block, out; /* bf16; PDS_NONE: absent */
  const float *bias, *block_bias;
  const uint16_t *features;
  uint64_t bytes;  /* of its mapping */
  uint64_t matrix; /* bytes of in, block and out */
} pds_net;

/* The net of a layer and phase. Steps read `active`, each operator once; `spare` is the one before,
 * whose memory the next one takes: once the pool is past `mark` no step reads it any more. */
typedef struct pds_net_slot {
  pds_net *_Atomic active;
  pds_net *spare;
  uint64_t mark;
} pds_net_slot;

/* That of a layer in a step; NULL: the target's gate predicts. */
static inline const pds_net *pds_net_of(const pds_step_ctx *ctx, uint32_t layer) {
  if (!ctx->nets) return NULL;
  return atomic_load_explicit(&ctx->nets[2 * layer + ctx->net_phase].active, memory_order_acquire);
}

static inline const unsigned char *pds_net_data(const pds_net *net, const pds_tensor *t) {
  return (const unsigned char *)net + t->offset;
}

/* Columns of u. */
static inline uint32_t pds_net_columns(const pds_net *net) {
  return net->width + net->experts + (net->deep ? net->width : 0);
}

/* Bytes that a net takes, which has been checked. */
uint64_t pds_net_bytes(const pds_net_desc *desc);
/* Copies it into that many zeroed bytes at a multiple of 64. */
pds_net *pds_net_place(void *memory, const pds_net_desc *desc);

/* The experts that the sequence's last token chose in a layer. */
static inline uint16_t *pds_last_ids(const pds_step_ctx *ctx, int32_t seq, uint32_t layer) {
  unsigned char *last = ctx->last + (size_t)seq * pds_last_bytes(ctx->plan);
  return (uint16_t *)(last + 4) + (size_t)layer * ctx->plan->last_top_k;
}

static inline uint32_t *pds_last_length(unsigned char *last, const pds_plan *plan, int32_t seq) {
  return (uint32_t *)(last + (size_t)seq * pds_last_bytes(plan));
}

#endif
