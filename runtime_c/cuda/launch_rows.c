/* launch_rows.c: grids of the kernels of rows.cu. */
#include "launch.h"

enum { THREADS = 256, MOST_BLOCKS = 1024, PLAIN_SHARED = 48 * 1024 };

static uint32_t parts(uint32_t n, uint32_t unit) {
  return (n + unit - 1) / unit;
}

static pds_cu_launch launch(pds_cu_kernel kernel, uint32_t x, uint32_t y, uint32_t threads,
                            uint32_t shared) {
  const pds_cu_launch l = {
      .kernel = kernel, .grid = {x, y, 1}, .threads = threads, .shared_bytes = shared};
  return l;
}

pds_cu_launch pds_cu_shape_rope(const pds_cu_rope *p) {
  const uint32_t blocks = parts(p->rows * (p->dim / 2), THREADS);
  return launch(PDS_CU_rope_rows, blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS, 1, THREADS, 0);
}

pds_cu_launch pds_cu_shape_norm(const pds_cu_norm *p) {
  return launch(PDS_CU_norm_rows, p->rows, 1, THREADS, THREADS / 32 * 4);
}

/* A warp a row, with three words an expert; few warps a block where the rows are few, too. */
pds_cu_launch pds_cu_shape_route(const pds_cu_route *p) {
  const uint32_t bytes = p->experts * 12;
  uint32_t warps = 4;
  while (warps > 1 && (warps * bytes > PLAIN_SHARED || p->rows < warps * 64)) warps /= 2;
  return launch(PDS_CU_route_rows, parts(p->rows, warps), 1, warps * 32, warps * bytes);
}

pds_cu_launch pds_cu_shape_combine(const pds_cu_combine *p) {
  return launch(PDS_CU_combine_rows, parts(p->n, THREADS * 4), p->rows, THREADS, p->top_k * 16);
}
