/* dummy.c: pseudo-random weights at the speed of memory. */
#include "dummy.h"

#include <string.h>

#include "panels.h"

enum { SEED = 0x5eed, PANEL = 16, ROW = 64 };

/* One item of a parallel job: long enough to be worth handing out, short enough that a file of one
 * layer keeps all workers busy. */
#define ITEM ((uint64_t)1 << 20)

/* splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014): word n of
 * a stream, without those before it. */
static inline uint64_t word(uint64_t n) {
  uint64_t z = SEED + (n + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

/* What becomes of 8 random bytes, and the scales behind a panel's elements.
 *
 * Floats keep sign and mantissa, their exponent says 2^-6 or 2^-15. Of integers the lowest bit is set:
 * int8 are odd numbers from -127 to 127, never -128, of 73 on average (root mean square), int4 (value +
 * 8) odd ones from -7 to 7, of 4.6; scales make 0.018 of both. */
typedef struct shape {
  uint64_t keep, set;
  uint16_t scale; /* bf16 */
  uint8_t zero;   /* bytes of padding */
} shape;

static shape shape_of(const pds_tensor *t, bool residual) {
  switch (t->dtype) {
  case PDS_F32:
    return (shape){.keep = 0x807fffff807fffffull,
                   .set = residual ? 0x3800000038000000ull : 0x3c8000003c800000ull};
  case PDS_BF16:
    return (shape){.keep = 0x807f807f807f807full,
                   .set = residual ? 0x3800380038003800ull : 0x3c803c803c803c80ull};
  case PDS_I8:
    return (shape){.keep = ~0ull,
                   .set = 0x0101010101010101ull,
                   .scale = residual ? 0x3500 : 0x3980}; /* 2^-21, 2^-12 */
  default:
    return (shape){.keep = ~0ull,
                   .set = 0x1111111111111111ull,
                   .scale = residual ? 0x3700 : 0x3b80, /* 2^-17, 2^-8 */
                   .zero = 0x88};
  }
}

typedef struct fill_job {
  const pds_tensor *t;
  unsigned char *base; /* of its file */
  shape shape;
  uint64_t panel_bytes, panels, per_item; /* of one matrix; panels an item fills */
  uint32_t cols;                          /* that are no padding, */
  bool pairs; /* in panels of the gate's columns, and of the up projection's, in turn */
} fill_job;

/* Inputs beyond k, by whole rows, and columns beyond the last. */
static void clear_padding(const fill_job *job, unsigned char *panel, uint64_t rows,
                          uint64_t first) {
  const uint64_t used = rows * job->t->k / pds_k_pad(job->t);
  memset(panel + used * ROW, job->shape.zero, (rows - used) * ROW);
  if (first + PANEL <= job->cols) return;
  const uint64_t from = job->cols > first ? 4 * (job->cols - first) : 0;
  for (uint64_t r = 0; r < used; r++) memset(panel + r * ROW + from, job->shape.zero, ROW - from);
}

static void fill_panel(const fill_job *job, uint64_t matrix, uint64_t index) {
  const pds_tensor *t = job->t;
  const uint64_t at = t->offset + matrix * t->stride + index * job->panel_bytes;
  const uint32_t group = pds_group(t->dtype);
  const uint64_t scales = group ? pds_k_pad(t) / group * PANEL : 0;
  /* Their bytes are rounded up to a row. */
  const uint64_t rows = (job->panel_bytes - (2 * scales + ROW - 1) / ROW * ROW) / ROW;
  const uint64_t stream = ((uint64_t)t->file << 48) + at / 8;
  uint64_t *to = (uint64_t *)(void *)(job->base + at);
  for (uint64_t i = 0; i < rows * ROW / 8; i++)
    to[i] = (word(stream + i) & job->shape.keep) | job->shape.set;
  uint16_t *scale = (uint16_t *)(void *)(job->base + at + rows * ROW);
  for (uint64_t i = 0; i < scales; i++) scale[i] = job->shape.scale;
  clear_padding(job, job->base + at, rows, PANEL * (job->pairs ? index / 2 : index));
}

static void fill_item(void *context, uint32_t item, uint32_t worker) {
  const fill_job *job = context;
  (void)worker;
  const uint64_t all = job->panels * (job->t->count > 1 ? job->t->count : 1);
  const uint64_t first = item * job->per_item;
  const uint64_t end = first + job->per_item < all ? first + job->per_item : all;
  for (uint64_t p = first; p < end; p++) fill_panel(job, p / job->panels, p % job->panels);
}

typedef struct filler {
  pds_pool *pool;
  const unsigned char **files;
} filler;

static unsigned char *base_of(const filler *f, const pds_tensor *t) {
  return (unsigned char *)(uintptr_t)f->files[t->file]; /* still writable */
}

static void fill(const filler *f, const pds_tensor *t, bool residual, uint32_t cols, bool pairs) {
  if (!pds_panel_bytes(t)) return; /* absent */
  fill_job job = {.t = t,
                  .base = base_of(f, t),
                  .shape = shape_of(t, residual),
                  .panel_bytes = pds_panel_bytes(t),
                  .panels = ((uint64_t)t->n + PANEL - 1) / PANEL,
                  .cols = cols,
                  .pairs = pairs};
  job.per_item = ITEM / job.panel_bytes ? ITEM / job.panel_bytes : 1;
  const uint64_t all = job.panels * (t->count > 1 ? t->count : 1);
  pds_pool_run(f->pool, fill_item, &job, (uint32_t)((all + job.per_item - 1) / job.per_item));
}

static void matrix(const filler *f, const pds_tensor *t) {
  fill(f, t, false, t->n, false);
}

static void residual(const filler *f, const pds_tensor *t) {
  fill(f, t, true, t->n, false);
}

static void mlp(const filler *f, const pds_mlp *mlp) {
  if (!mlp->inter) return;
  fill(f, &mlp->gate_up, false, mlp->inter, true);
  residual(f, &mlp->down);
}

static void norm(const filler *f, const pds_tensor *t) {
  if (t->dtype == PDS_NONE) return;
  float *to = (float *)(void *)(base_of(f, t) + t->offset);
  for (uint32_t i = 0; i < t->n; i++) to[i] = 1;
}

static void layer(const filler *f, const pds_layer *l) {
  const pds_attention *a = &l->attn;
  norm(f, &l->attn_norm);
  norm(f, &l->mlp_norm);
  norm(f, &a->q_norm);
  norm(f, &a->k_norm);
  matrix(f, &a->in_proj);
  matrix(f, &a->q_b);
  matrix(f, &a->uk);
  matrix(f, &a->uv);
  residual(f, &a->o_proj);
  matrix(f, &l->gate.weight);
  mlp(f, &l->experts);
  mlp(f, &l->shared);
  mlp(f, &l->dense);
}

void pds_dummy_fill(const pds_plan *plan, pds_pool *pool, const unsigned char **files) {
  const filler f = {.pool = pool, .files = files};
  matrix(&f, &plan->embed); /* tied: once more, the same */
  matrix(&f, &plan->lm_head);
  norm(&f, &plan->final_norm);
  for (uint32_t i = 0; i < plan->n_layers; i++) layer(&f, &plan->layers[i]);
}
