/* gpu_graph.c: what a layer does up to its gate, as one static CUDA graph a layer: in steps of few rows
 * nothing of it changes from token to token but data in the device's memory. Larger steps have work enough
 * to hide their launches behind. */
#include "gpu_kernels.h"

static pds_graph *graph_of(const pds_gpu_step *step) {
  return &step->session->graphs[step->layer];
}

static void drop(pds_gpu *gpu, pds_graph *graph) {
  if (graph->exec) gpu->cuda.cuGraphExecDestroy(graph->exec);
  *graph = (pds_graph){0};
}

void pds_gpu_drop_graphs(pds_gpu *gpu, pds_gpu_session *session) {
  for (uint32_t i = 0; session->graphs && i < gpu->residency.layers; i++)
    drop(gpu, &session->graphs[i]);
}

pds_status pds_gpu_graph_begin(pds_gpu_step *step) {
  pds_gpu *gpu = step->gpu;
  step->graph = PDS_GRAPH_NONE;
  if (!gpu->real || step->tapped || step->host->rows > PDS_GPU_FEW_ROWS) return PDS_OK;
  const uint64_t key = pds_gpu_shape_key(step, step->layer);
  pds_graph *graph = graph_of(step);
  if (graph->exec && graph->key == key) {
    step->graph = PDS_GRAPH_REPLAYED;
    PDS_CUDA_CALL(gpu, "launching a layer's graph", cuGraphLaunch, graph->exec, gpu->compute);
    return PDS_OK;
  }
  drop(gpu, graph);
  graph->key = key;
  PDS_CUDA_CALL(gpu, "capturing a layer's graph", cuStreamBeginCapture, gpu->compute,
                CU_STREAM_CAPTURE_MODE_RELAXED);
  step->graph = PDS_GRAPH_CAPTURED;
  return PDS_OK;
}

pds_status pds_gpu_graph_end(pds_gpu_step *step) {
  pds_gpu *gpu = step->gpu;
  pds_graph *graph = graph_of(step);
  CUgraph captured = NULL;
  if (step->graph != PDS_GRAPH_CAPTURED) return PDS_OK;
  step->graph = PDS_GRAPH_NONE;
  PDS_CUDA_CALL(gpu, "capturing a layer's graph", cuStreamEndCapture, gpu->compute, &captured);
  const CUresult result = gpu->cuda.cuGraphInstantiate(&graph->exec, captured, 0);
  gpu->cuda.cuGraphDestroy(captured);
  PDS_RETURN_IF_ERROR(pds_gpu_check(gpu, result, "making a layer's graph"));
  PDS_CUDA_CALL(gpu, "launching a layer's graph", cuGraphLaunch, graph->exec, gpu->compute);
  return PDS_OK;
}

void pds_gpu_graph_abandon(pds_gpu_step *step) {
  CUgraph captured = NULL;
  if (step->graph != PDS_GRAPH_CAPTURED) return;
  step->graph = PDS_GRAPH_NONE;
  step->gpu->cuda.cuStreamEndCapture(step->gpu->compute, &captured);
  if (captured) step->gpu->cuda.cuGraphDestroy(captured);
}
