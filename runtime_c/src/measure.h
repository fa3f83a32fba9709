/* measure.h: what measurements of the CPU's parts of a step (measure.c) and of a GPU's (measure_gpu.c)
 * share. */
#ifndef PDS_MEASURE_H
#define PDS_MEASURE_H

#include "engine.h"

/* Whether it can be measured of this engine. */
pds_status pds_measure_check(const pds_engine *engine, const pds_measurement *asked);
/* Rows of made-up numbers in the host's scratch: one buffer; the inputs of experts. */
void pds_measure_fill(pds_step_ctx *ctx, pds_buffer buffer);
void pds_measure_fill_normed(pds_step_ctx *ctx);
/* The CPU's holes and EXPERT_ROWS of the experts asked for; how many. ctx->rows: rows that it takes. */
uint32_t pds_measure_bind(pds_step_ctx *ctx, const pds_measurement *asked);
/* The pool's workers are awake then. */
void pds_measure_wake(pds_step_ctx *ctx);
/* Places for the rows asked for behind their sequences: pds_kv_rollback gives them back. */
pds_status pds_measure_begin_rows(pds_session *session, pds_step_ctx *ctx,
                                  const pds_measurement *asked);
/* PDS_MEASURE_CONTEXT. */
pds_status pds_measure_extend(pds_session *session, pds_step_ctx *ctx,
                              const pds_measurement *asked);

/* Of an engine with a GPU: what pds_measure_check has let through. */
pds_status pds_measure_gpu(pds_session *session, pds_step_ctx *ctx, const pds_measurement *asked,
                           int64_t *out_ns);

#endif
