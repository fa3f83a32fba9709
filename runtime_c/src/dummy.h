/* dummy.h: weights for benchmarks of models that are not on disk. */
#ifndef PDS_DUMMY_H
#define PDS_DUMMY_H

#include "plan_desc.h"
#include "pool.h"

/* Writes every tensor of the plan to zeroed memory of its files, in parallel: the same bytes whatever the
 * number of threads. Between pds_pool_open and pds_pool_close.
 *
 * Matrices are random and finite: magnitudes of 1/64 to 1/32 (int8, int4: as much on average), and 2^-9 of
 * that where they write to the residual stream, so that what tells tokens apart, their embeddings, stays
 * most of it: else the gates of all tokens would choose the same few experts. Padding is zero. Norm weights
 * are 1, biases 0. */
void pds_dummy_fill(const pds_plan *plan, pds_pool *pool, const unsigned char **files);

#endif
