/* panels.h: how many bytes the packed weights of plan_desc.h take, and the rows of int8 that GEMMs
 * on int8 and int4 weights read. compiler/lowered.py has the same formulas. */
#ifndef PDS_PANELS_H
#define PDS_PANELS_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "plan_desc.h"

/* k that share a scale; 0: the format has none. */
static inline uint32_t pds_group(uint8_t dtype) {
  return dtype == PDS_I8 ? PDS_I8_GROUP : dtype == PDS_I4 ? PDS_I4_GROUP : 0;
}

static inline uint32_t pds_k_pad(const pds_tensor *t) {
  const uint32_t to = pds_group(t->dtype) ? 64 : 32;
  return (t->k + to - 1) / to * to;
}

static inline size_t pds_panel_bytes(const pds_tensor *t) {
  const size_t k = pds_k_pad(t), group = pds_group(t->dtype);
  switch (t->dtype) {
  case PDS_F32: return k * 64;
  case PDS_BF16: return k * 32;
  case PDS_I8: return k * 16 + (k / group * 32 + 63) / 64 * 64;
  case PDS_I4: return k * 8 + (k / group * 32 + 63) / 64 * 64;
  default: return 0;
  }
}

/* One row of pds_int_kernels.quantise, rounded up to a cache line. */
static inline size_t pds_quant_bytes(const pds_tensor *t) {
  const size_t k = pds_k_pad(t);
  return (k + k / pds_group(t->dtype) * 8 + 63) / 64 * 64;
}

#endif
