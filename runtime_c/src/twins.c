/* twins.c: the GPU's kernels as functions of the CPU, for the mock driver: each runs the CPU's own
 * operator on the device's memory, so a GPU plan gives the CPU plan's bits. */
#include "cpu.h"
#include "gpu.h"

/* The mock's threads may have been made under the caller's flush-to-zero and rounding modes. */
#define TWIN(name, call)                                                                           \
  static void name(void *params) {                                                                 \
    pds_kernel_args *a = params;                                                                   \
    const uint32_t fp = pds_fp_default();                                                          \
    call;                                                                                          \
    pds_fp_restore(fp);                                                                            \
  }

TWIN(rope, pds_op_rope_table(&a->ctx))
TWIN(norm, pds_op_norm(&a->ctx, a->layer, (pds_norm_site)a->arg))
TWIN(attention, pds_op_attention(&a->ctx, a->layer))
TWIN(mlp, pds_op_mlp(&a->ctx, a->layer))
TWIN(gate, pds_op_gate(&a->ctx, a->layer))
TWIN(shared, pds_op_shared_expert(&a->ctx, a->layer))
TWIN(combine, pds_op_combine(&a->ctx, a->layer, (int)a->arg))
TWIN(lm_head, pds_op_lm_head(&a->ctx))

/* Some at a time: a GPU's thread has no memory of its own for all. */
static void some_at_a_time(pds_kernel_args *a) {
  enum { SOME = 32 };
  for (uint32_t first = 0; first < a->n_holes; first += SOME) {
    pds_hole holes[SOME];
    const unsigned char *blobs[SOME];
    const uint32_t n = a->n_holes - first < SOME ? a->n_holes - first : SOME;
    for (uint32_t i = 0; i < n; i++) {
      const pds_gpu_hole *h = &a->holes[first + i];
      holes[i] = (pds_hole){.expert = h->expert, .first = h->first, .rows = h->rows};
      blobs[i] = (const unsigned char *)(uintptr_t)h->at;
    }
    a->ctx.blobs = blobs;
    pds_op_expert(&a->ctx, a->layer, holes, n);
  }
}
TWIN(experts, some_at_a_time(a))

static const struct {
  char magic[8];
  uint32_t n;
  pds_twin_entry entries[PDS_KERNELS];
} image = {PDS_TWIN_MAGIC,
           PDS_KERNELS,
           {{.name = "rope", .fn = rope},
            {.name = "norm", .fn = norm},
            {.name = "attention", .fn = attention},
            {.name = "mlp", .fn = mlp},
            {.name = "gate", .fn = gate},
            {.name = "experts", .fn = experts},
            {.name = "shared", .fn = shared},
            {.name = "combine", .fn = combine},
            {.name = "lm_head", .fn = lm_head}}};

const void *pds_twin_image(void) {
  return &image;
}
