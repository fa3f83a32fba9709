/* exec.h: runs the verified programs of one step. */
#ifndef PDS_EXEC_H
#define PDS_EXEC_H

#include "engine.h"
#include "step.h"

/* Runs prologue, layers and (if some row wants logits) epilogue of the phase for ctx->rows. Between
 * instructions it obeys session->cancel with PDS_ERR_CANCELLED. The pool is open. */
pds_status pds_exec_step(pds_session *session, pds_step_ctx *ctx);

/* Bytes of one of the tensor's `count` matrices or vectors; 0 if it is absent. */
uint64_t pds_tensor_bytes(const pds_tensor *tensor);

#endif
