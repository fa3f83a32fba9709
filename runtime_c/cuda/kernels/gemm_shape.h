/* gemm_shape.h: sizes that the GEMM kernels and their launcher agree on. */
#ifndef PDS_CUDA_GEMM_SHAPE_H
#define PDS_CUDA_GEMM_SHAPE_H

/* Of the stream kernels; benchmarks/gpu_gemm.py --define compares others. */
#ifndef GEMM_DENSE_WARPS
#define GEMM_DENSE_WARPS 8 /* of a block, for one matrix, or heads */
#endif
#ifndef GEMM_EXPERT_WARPS
#define GEMM_EXPERT_WARPS 4 /* and for experts, which have more blocks; both are even */
#endif
#ifndef GEMM_STREAM_AHEAD
#define GEMM_STREAM_AHEAD 4 /* steps of a warp, one of them at work, the others under way */
#endif

enum {
  GEMM_FEW = 16, /* rows of a matrix that the stream kernels take */

  GEMM_STREAM_WARPS = 16, /* at most, of the stream kernels' blocks: where there are few */

  GEMM_TILE_PANELS = 16, /* of a block of the tile kernels: 256 columns of weights */
  GEMM_TILE_K = 64,      /* of a stage of their pipeline */
  GEMM_TILE_THREADS = 256,
  GEMM_TILE_STAGES = 4,                        /* at most; at least 2 */
  GEMM_TILE_LINE = GEMM_TILE_PANELS * 16 + 16, /* floats from a row of sums to the next */

  GEMM_GROUP_ROWS = 128, /* of a block of Hopper's tile kernels, with as many panels and threads */
  GEMM_GROUP_STAGES = 4, /* one at work, one whose last products may still be, two under way */
  GEMM_GROUP_PLACES = 4, /* tiles, at least one more than whose stages are under way */

  GEMM_SCALAR_ROWS = 64, /* of a block of the scalar kernel, which takes 4 panels */
  GEMM_SCALAR_PANELS = 4,
  GEMM_SCALAR_K = 16,
  GEMM_SCALAR_THREADS = 256,
  GEMM_SCALAR_LINE = GEMM_SCALAR_ROWS + 4, /* floats; a k's rows of x in shared memory */
  GEMM_SCALAR_SHARED = GEMM_SCALAR_K * (GEMM_SCALAR_LINE + GEMM_SCALAR_PANELS * 16) * 4,

  /* of a block of the scalar kernel for few rows, which takes 8 columns of y */
  GEMM_FEW_COLS = 8,
  GEMM_FEW_ROWS = 4,
  GEMM_FEW_WARPS = 16,
  GEMM_FEW_AHEAD = 8, /* loads of a thread under way together */
  GEMM_FEW_SHARED = 2 * GEMM_FEW_WARPS * GEMM_FEW_ROWS * GEMM_FEW_COLS * 4,

  /* pds_cu_gemm.free */
  GEMM_STAGES_MASK = 7, /* of the tile kernels' pipeline */
  GEMM_Y_ALIGNED = 8,   /* four columns of y, from a multiple of 4, are one aligned store */
  GEMM_KEEP_X = 16,     /* the stream kernels keep x in shared memory from pair to pair */
  /* from here on: pairs of panels of a block of the stream kernels; tiles of Hopper's */
  GEMM_TURNS_SHIFT = 8
};

/* The stream kernels' shared memory. A step of a warp: 32 k of bf16 weights, 64 of others. */
#define GEMM_STREAM_STEP(bits) ((bits) == 16 ? 32u : 64u)
/* Bytes of a step: of a pair of panels, its scales, and x, 8 rows or 16. */
#define GEMM_STREAM_WEIGHTS(bits) (GEMM_STREAM_STEP(bits) * (bits) * 4)
#define GEMM_STREAM_SCALES(bits) ((bits) == 16 ? 0u : (bits) == 8 ? 64u : 128u)
#define GEMM_STREAM_X(bits, rows) (GEMM_STREAM_STEP(bits) * ((rows) > 8 ? 32u : 16u))
/* And of a warp that has room for x of `slots` steps. */
#define GEMM_STREAM_WARP(bits, rows, slots)                                                        \
  (GEMM_STREAM_AHEAD * (GEMM_STREAM_WEIGHTS(bits) + GEMM_STREAM_SCALES(bits)) +                    \
   (slots) * GEMM_STREAM_X(bits, rows))
/* And with its sums. */
#define GEMM_STREAM_BYTES(bits, rows, slots) (GEMM_STREAM_WARP(bits, rows, slots) + 32 * 16 * 4)
/* Bytes of a stage: x, weights and scales, for `rows` rows of x and weights of `bits` bits. */
#define GEMM_TILE_SCALES(bits) ((bits) == 16 ? 0 : (bits) == 8 ? 32 : 64)
#define GEMM_TILE_STAGE(rows, bits)                                                                \
  ((rows) * GEMM_TILE_K * 2 +                                                                      \
   GEMM_TILE_PANELS * (GEMM_TILE_K * 2 * (bits) + GEMM_TILE_SCALES(bits)))

/* Hopper's tile kernels: stages that begin at multiples of 1024 bytes, then where each row of some
 * tiles goes, then 16 rows of sums. */
#define GEMM_GROUP_STAGE(bits) ((GEMM_TILE_STAGE(GEMM_GROUP_ROWS, bits) + 1023) / 1024 * 1024)
#define GEMM_GROUP_SHARED(bits)                                                                    \
  (GEMM_GROUP_STAGES * GEMM_GROUP_STAGE(bits) + GEMM_GROUP_PLACES * GEMM_GROUP_ROWS * 8 +          \
   16 * GEMM_TILE_LINE * 4)

/* And of what is written last: 16 rows of a warp, or of two, then where each row goes. */
#define GEMM_TILE_END(rows) (((rows) > 32 ? 32 : 16) * GEMM_TILE_LINE * 4 + (rows) * 8)

#endif
