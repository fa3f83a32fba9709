/* events.c: marks in streams, and waiting for them. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "mock.h"

/* Where an event of this address would be: there may be thousands. */
static CUevent *list_of(CUevent handle) {
  return &mock.events[((uintptr_t)handle >> 4) * 0x9e3779b97f4a7c15u >> (64 - EVENT_BITS)];
}

static CUevent find(CUevent handle) {
  for (CUevent e = *list_of(handle); e; e = e->next)
    if (e == handle) return e;
  mock_error(CUDA_ERROR_INVALID_HANDLE, "no such event: never created, or destroyed");
  return NULL;
}

CUresult cuEventCreate(CUevent *out_event, unsigned flags) {
  CUresult result = mock_enter("cuEventCreate");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (!out_event || flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "flags %u, or no place for it", flags));
  CUevent event = mock_alloc(sizeof *event);
  event->timing = !(flags & CU_EVENT_DISABLE_TIMING);
  CUevent *list = list_of(event);
  event->next = *list;
  *list = event;
  mock.count.events++;
  *out_event = event;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent handle) {
  CUresult result = mock_enter("cuEventDestroy");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent event = find(handle);
  if (!event) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  CUevent *at = list_of(event);
  while (*at != event) at = &(*at)->next;
  *at = event->next;
  if (event->record) mock_drop(event->record); /* those who wait for it hold it themselves */
  free(event);
  mock.count.events--;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  CUresult result = mock_enter("cuEventRecord");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent event = find(handle);
  CUstream stream = event ? mock_stream(stream_handle) : NULL;
  if (!stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (event->record) mock_drop(event->record);
  event->record = mock_new_op(OP_RECORD);
  if (mock_strikes(&mock.set.stop_record)) mock.stopped = event->record->never = true;
  mock_hold(event->record);
  mock_submit(stream, event->record);
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuEventQuery(CUevent handle) {
  CUresult result = mock_enter("cuEventQuery");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent event = find(handle);
  if (!event) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  return mock_leave(event->record && !event->record->done ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuEventSynchronize(CUevent handle) {
  CUresult result = mock_enter("cuEventSynchronize");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent event = find(handle);
  if (!event) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (event->record) result = mock_wait(event->record);
  return mock_leave(result);
}

/* The record at the time of the call counts: a later one changes nothing. */
CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned flags) {
  CUresult result = mock_enter("cuStreamWaitEvent");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent event = find(handle);
  CUstream stream = event ? mock_stream(stream_handle) : NULL;
  if (!stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (flags != 0)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "flags %u, expected 0", flags));
  if (!event->record || event->record->done) return mock_leave(CUDA_SUCCESS);
  op *wait = mock_new_op(OP_WAIT);
  wait->awaited = event->record;
  mock_hold(event->record);
  mock_submit(stream, wait);
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuEventElapsedTime(float *out_ms, CUevent start_handle, CUevent end_handle) {
  CUresult result = mock_enter("cuEventElapsedTime");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUevent start = find(start_handle), end = start ? find(end_handle) : NULL;
  if (!end) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (!out_ms) return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "no place for it"));
  if (!start->timing || !end->timing || !start->record || !end->record)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_HANDLE,
                                 "an event without times, or one that was never recorded"));
  if (!start->record->done || !end->record->done) return mock_leave(CUDA_ERROR_NOT_READY);
  *out_ms = (float)((double)(end->record->end - start->record->end) / 1e6);
  return mock_leave(CUDA_SUCCESS);
}

int64_t pds_mock_event_time(CUevent handle) {
  mock_enter_any("pds_mock_event_time");
  CUevent event = find(handle);
  int64_t at = event && event->record && event->record->done ? event->record->end : -1;
  mock_leave(CUDA_SUCCESS);
  return at;
}
