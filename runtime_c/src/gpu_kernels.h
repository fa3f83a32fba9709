/* gpu_kernels.h: a GPU's operators made of its kernels (cuda/kernels/), as ops_*.c make the CPU's. */
#ifndef PDS_GPU_KERNELS_H
#define PDS_GPU_KERNELS_H

#include "gpu.h"

enum { PDS_GPU_FEW_ROWS = 16 };

/* Launches what operator `op` takes, on the device's buffers, behind what `compute` was given. `arg`:
 * pds_norm_site of PDS_KERNEL_NORM; whether there is a shared expert, of PDS_KERNEL_COMBINE. `holes`:
 * those of PDS_KERNEL_EXPERTS. */
pds_status pds_gpu_run(pds_gpu_step *step, pds_kernel op, uint32_t layer, uint32_t arg,
                       const pds_gpu_hole *holes, uint32_t n_holes);

/* Loads the first of the files (pds_gpu_options.kernels) that the device takes, and finds the kernels in
 * it, with all the shared memory that a block can have. No module: there is none for the mock. */
pds_status pds_gpu_load_images(pds_gpu *gpu, const char *files);

/* Whether the kernels of a step leave on the host what recompile and the CPU's experts read: for few rows
 * that is faster than copies of their own. */
static inline bool pds_gpu_tells_host(const pds_gpu_step *step) {
  return !step->gpu->twins && step->host->rows <= PDS_GPU_FEW_ROWS;
}

/* gpu_graph.c: around the launches of a MoE layer up to its gate. After begin, step->graph says whether
 * they are still to be launched. */
pds_status pds_gpu_graph_begin(pds_gpu_step *step);
pds_status pds_gpu_graph_end(pds_gpu_step *step);
/* Of a step that failed meanwhile. */
void pds_gpu_graph_abandon(pds_gpu_step *step);
void pds_gpu_drop_graphs(pds_gpu *gpu, pds_gpu_session *session);

/* What the launches of a layer up to its gate depend on, beyond the plan and the session. */
uint64_t pds_gpu_shape_key(const pds_gpu_step *step, uint32_t layer);

/* Whether the kernels take the plan's sizes, else PDS_ERR_PLAN_FORMAT. */
pds_status pds_gpu_check_plan(const pds_plan *plan);

#endif
