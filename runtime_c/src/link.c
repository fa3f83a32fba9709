/* link.c: experts on their way to the GPU. */
#include "gpu.h"

static pds_transfer *front(pds_transfers *q) {
  return q->count ? &q->at[q->first] : NULL;
}

static void pop(pds_transfers *q) {
  q->first = (q->first + 1) % q->room;
  q->count--;
}

static void push(pds_transfers *q, const pds_transfer *t) {
  q->at[(q->first + q->count) % q->room] = *t;
  q->count++;
}

static uint32_t ring_of(const pds_gpu *gpu, int32_t slot) {
  return (uint32_t)slot - gpu->residency.hot;
}

void pds_link_load(pds_gpu *gpu, const pds_transfer *t) {
  push(&gpu->link.demand, t);
}

void pds_link_prefetch(pds_gpu *gpu, const pds_transfer *t) {
  push(&gpu->link.spec, t);
}

uint32_t pds_link_recall(pds_gpu *gpu, pds_transfer *out) {
  uint32_t n = 0;
  for (pds_transfer *t; (t = front(&gpu->link.spec)); pop(&gpu->link.spec)) out[n++] = *t;
  return n;
}

/* Forgets the chunks that have arrived. */
static pds_status retire(pds_gpu *gpu) {
  pds_link *link = &gpu->link;
  while (link->in_flight) {
    const CUresult result = gpu->cuda.cuEventQuery(link->chunk[link->oldest]);
    if (result == CUDA_ERROR_NOT_READY) return PDS_OK;
    PDS_RETURN_IF_ERROR(pds_gpu_check(gpu, result, "copying an expert"));
    link->oldest = (link->oldest + 1) % PDS_LINK_DEPTH;
    link->in_flight--;
  }
  return PDS_OK;
}

static pds_status send_chunk(pds_gpu *gpu, pds_transfers *queue) {
  pds_link *link = &gpu->link;
  pds_transfer *t = front(queue);
  const uint32_t ring = ring_of(gpu, t->slot);
  const uint64_t bytes = gpu->plan->layers[t->layer].experts.gate_up.stride;
  const uint64_t left = bytes - t->issued;
  const bool whole = gpu->real && queue == &link->demand; /* nothing on demand is cancelled */
  const uint64_t n = whole || left < PDS_LINK_CHUNK ? left : PDS_LINK_CHUNK;
  if (!t->issued)
    PDS_CUDA_CALL(gpu, "copying an expert", cuStreamWaitEvent, gpu->copies, link->freed[ring], 0);
  PDS_CUDA_CALL(gpu, "copying an expert", cuMemcpyHtoDAsync,
                gpu->slots + (uint64_t)t->slot * gpu->expert_bytes + t->issued,
                pds_expert_host(gpu->plan, gpu->host_files, t->layer, t->expert) + t->issued, n,
                gpu->copies);
  const uint32_t last = (link->oldest + link->in_flight) % PDS_LINK_DEPTH;
  PDS_CUDA_CALL(gpu, "copying an expert", cuEventRecord, link->chunk[last], gpu->copies);
  link->in_flight++;
  t->issued += n;
  if (t->issued < bytes) return PDS_OK;
  PDS_CUDA_CALL(gpu, "copying an expert", cuEventRecord, link->ready[ring], gpu->copies);
  const pds_gpu_hole *hole = t->hole;
  pop(queue);
  return hole ? pds_gpu_sent(gpu, hole) : PDS_OK;
}

/* Whether the slot may be written: what was in it has been launched, so that the copy can wait for
 * it. From pageable memory the driver copies at once, and who waits in the driver watches nothing:
 * there it, and whatever is before the copy, must have ended. */
static pds_status may_send(pds_gpu *gpu, const pds_transfer *t, bool *out_may) {
  *out_may = !(t->again && !gpu->step->launches);
  if (gpu->pinned || !*out_may) return PDS_OK;
  CUresult result = gpu->cuda.cuStreamQuery(gpu->copies);
  if (result == CUDA_SUCCESS)
    result = gpu->cuda.cuEventQuery(gpu->link.freed[ring_of(gpu, t->slot)]);
  *out_may = result == CUDA_SUCCESS;
  return result == CUDA_ERROR_NOT_READY ? PDS_OK : pds_gpu_check(gpu, result, "copying an expert");
}

pds_status pds_link_pump(pds_gpu *gpu) {
  pds_link *link = &gpu->link;
  PDS_RETURN_IF_ERROR(retire(gpu));
  while (link->demand.count || link->spec.count) {
    pds_transfers *queue = link->demand.count ? &link->demand : &link->spec;
    if (link->in_flight >= (link->demand.count ? link->depth : PDS_LINK_IN_FLIGHT)) return PDS_OK;
    bool may;
    PDS_RETURN_IF_ERROR(may_send(gpu, front(queue), &may));
    if (!may) return PDS_OK;
    PDS_RETURN_IF_ERROR(send_chunk(gpu, queue));
  }
  return PDS_OK;
}

pds_status pds_link_flush(pds_gpu *gpu) {
  for (;;) {
    PDS_RETURN_IF_ERROR(pds_link_pump(gpu));
    const pds_transfer *next = front(&gpu->link.demand);
    if (!next) return PDS_OK;
    if (gpu->link.in_flight) {
      PDS_RETURN_IF_ERROR(pds_gpu_wait(gpu, gpu->link.chunk[gpu->link.oldest]));
      continue;
    }
    PDS_RETURN_IF_ERROR(pds_gpu_wait_stream(gpu, gpu->copies));
    PDS_RETURN_IF_ERROR(pds_gpu_wait(gpu, gpu->link.freed[ring_of(gpu, next->slot)]));
  }
}

pds_status pds_link_arrived(pds_gpu *gpu, int32_t slot, bool *out_arrived) {
  *out_arrived = true;
  if (slot < (int32_t)gpu->residency.hot) return PDS_OK;
  const CUresult result = gpu->cuda.cuEventQuery(gpu->link.ready[ring_of(gpu, slot)]);
  if (result == CUDA_ERROR_NOT_READY) {
    *out_arrived = false;
    return PDS_OK;
  }
  return pds_gpu_check(gpu, result, "copying an expert");
}
