/* learn.h: the last tokens of each layer with a predictor: what the predictor was given, and what
 * it should have said. Steps write, a thread that trains predictors reads.
 *
 * Steps of an engine take turns, so a ring has one writer at a time. Reader and writer share a
 * flag that nobody waits for: a step that comes while the ring is being copied goes without, and
 * the tokens count as dropped; a reader that comes while it is being written is told so. A
 * sequence counter would need fences that ThreadSanitizer does not see, and a lock would let a
 * thread of lowest priority hold up the step. */
#ifndef PDS_LEARN_H
#define PDS_LEARN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "step.h"

/* The tokens of one layer and phase. A row: a [hidden] bf16, w [k] and scores [experts of the next
 * layer] fp32, e and prev [k], then prev_next and target [next_k] as 16-bit ids, PDS_LEARN_NONE
 * where there is none. */
typedef struct pds_ring {
  _Atomic bool busy; /* being written or copied */
  _Atomic uint64_t total;
  unsigned char *rows;                              /* [capacity]; NULL: this layer keeps none */
  uint32_t capacity, k, next_k, experts, row_bytes; /* experts: of the next layer */
} pds_ring;

enum { PDS_LEARN_NONE = 0xffff };

typedef struct pds_learn {
  uint64_t bytes; /* of its mapping */
  _Atomic uint64_t dropped;
  pds_ring *rings; /* [n_layers][2] */
  /* Of the running step: rows of a layer whose next layer has not chosen yet. */
  unsigned char *staged_rows;
  uint32_t staged, layer;
  int32_t before[PDS_LEARN_PREFILL]; /* of each the row before it in the step; -1: none */
} pds_learn;

/* Bytes for the layers where `wanted` [n_layers] is not 0, each with its two phases. */
uint64_t pds_learn_bytes(const pds_plan *plan, const uint8_t *wanted);
/* Makes one of that many zeroed bytes at a multiple of 64. */
pds_learn *pds_learn_place(void *memory, const pds_plan *plan, const uint8_t *wanted);
/* Of a step, before its first layer. */
void pds_learn_begin(pds_step_ctx *ctx);
/* Behind a layer's gate, before pds_op_remember: XN, ROUTE_ID, ROUTE_W -> the rings. */
void pds_learn_routed(pds_step_ctx *ctx, uint32_t layer);
/* PDS_ERR_BUSY: a step is writing. */
pds_status pds_learn_copy(pds_learn *learn, const pds_plan *plan, pds_learned *out);

#endif
