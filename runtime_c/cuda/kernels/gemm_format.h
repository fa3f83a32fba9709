/* gemm_format.h: the tensor-core kernels on one format of weights. No include guard: gemm.cu
 * includes it for each, with GEMM_BITS, and the kernels' names in GEMM_STREAM, GEMM_GROUP_TILE and
 * GEMM_TILE(rows of a block). */
#include "gemm_stream.h"

#include "gemm_tile_parts.h"

#include "gemm_group.h"

#define GEMM_ROWS 128
#define GEMM_WARP_ROWS 2
#define GEMM_SUBTILES 4
#define GEMM_PAIRS 2
#include "gemm_tile.h"
#define GEMM_ROWS 64
#define GEMM_WARP_ROWS 2
#define GEMM_SUBTILES 2
#define GEMM_PAIRS 2
#include "gemm_tile.h"
#define GEMM_ROWS 32
#define GEMM_WARP_ROWS 1
#define GEMM_SUBTILES 2
#define GEMM_PAIRS 1
#include "gemm_tile.h"

#undef GEMM_BITS
#undef GEMM_STREAM
#undef GEMM_GROUP_TILE
#undef GEMM_TILE
