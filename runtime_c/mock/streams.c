/* streams.c: queues of work, each in its order, and the calls that submit copies and wait. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>

#include "mock.h"

/* --- pieces of work --- */

void *mock_alloc(size_t bytes) {
  void *memory = calloc(1, bytes);
  if (!memory) { /* some hundred bytes: nothing sensible is possible any more */
    fputs("mock CUDA driver: the system has no memory left for its records\n", stderr);
    abort();
  }
  return memory;
}

op *mock_new_op(op_kind kind) {
  op *o = mock_alloc(sizeof *o);
  o->kind = kind;
  o->refs = 1;
  return o;
}

void mock_hold(op *o) {
  o->refs++;
}

void mock_drop(op *o) {
  if (--o->refs > 0) return;
  if (o->awaited) mock_drop(o->awaited);
  free(o->params);
  free(o->tokens);
  free(o);
}

/* --- streams --- */

CUstream mock_new_stream(bool blocking) {
  CUstream stream = mock_alloc(sizeof *stream);
  stream->live = true;
  stream->blocking = blocking;
  stream->reached = mock_now();
  if (mock.set.wall && !mock_wall_thread(stream)) {
    free(stream);
    return NULL;
  }
  stream->next = mock.streams;
  mock.streams = stream;
  return stream;
}

/* Takes it off the list; its work, if any is left, is dropped. */
void mock_free_stream(CUstream stream) {
  CUstream *at = &mock.streams;
  while (*at != stream) at = &(*at)->next;
  *at = stream->next;
  for (op *o = stream->head, *next; o; o = next) {
    next = o->next;
    mock_drop(o);
  }
  free(stream);
}

bool mock_pop(CUstream stream) {
  op *o = stream->head;
  stream->head = o->next;
  if (!stream->head) stream->tail = NULL;
  mock_drop(o);
  /* On the wall clock the stream's thread frees it. */
  if (stream->live || stream->head || mock.set.wall) return false;
  mock_free_stream(stream);
  return true;
}

CUstream mock_stream(CUstream handle) {
  if (handle == NULL || (uintptr_t)handle == 1) return mock.null_stream; /* 1: CU_STREAM_LEGACY */
  for (CUstream s = mock.streams; s; s = s->next)
    if (s == handle && s->live && s != mock.null_stream) return s;
  mock_error(CUDA_ERROR_INVALID_HANDLE, "no such stream: never created, or destroyed");
  return NULL;
}

static void append(CUstream stream, op *o) {
  o->seq = mock.next_seq++;
  o->ready = mock_now();
  if (stream->tail)
    stream->tail->next = o;
  else
    stream->head = o;
  stream->tail = o;
}

static void append_wait(CUstream stream, op *awaited) {
  op *wait = mock_new_op(OP_WAIT);
  wait->awaited = awaited;
  mock_hold(awaited);
  append(stream, wait);
}

void mock_submit(CUstream stream, op *o) {
  if (stream == mock.null_stream) {
    for (CUstream s = mock.streams; s; s = s->next)
      if (s->blocking && s != stream && s->tail) append_wait(stream, s->tail);
  } else if (stream->blocking && mock.null_stream->tail) {
    append_wait(stream, mock.null_stream->tail);
  }
  append(stream, o);
  if (mock.set.wall)
    pthread_cond_broadcast(&mock.changed);
  else
    mock_virtual_advance(mock.now + mock.set.enqueue);
}

CUresult mock_wait(op *o) {
  mock_hold(o);
  CUresult result = mock.set.wall ? mock_wall_wait(o) : mock_virtual_wait(o);
  mock_drop(o);
  return result;
}

CUresult mock_wait_all(void) {
  for (;;) {
    CUstream s = mock.streams;
    while (s && !s->tail) s = s->next;
    if (!s) return CUDA_SUCCESS;
    CUresult result = mock_wait(s->tail);
    if (result != CUDA_SUCCESS) return result;
  }
}

CUresult cuStreamCreateWithPriority(CUstream *out_stream, unsigned flags, int priority) {
  (void)priority; /* out of range is brought into it; the mock runs all at once anyway */
  CUresult result = mock_enter("cuStreamCreateWithPriority");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (!out_stream || flags > CU_STREAM_NON_BLOCKING)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "flags %u, or no place for it", flags));
  CUstream stream = mock_new_stream(flags == CU_STREAM_DEFAULT);
  if (!stream) return mock_leave(mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the system gave no thread"));
  mock.count.streams++;
  *out_stream = stream;
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
  CUresult result = mock_enter("cuStreamDestroy");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUstream stream = mock_stream(handle);
  if (stream == mock.null_stream && stream)
    mock_error(CUDA_ERROR_INVALID_HANDLE, "the NULL stream cannot be destroyed");
  if (!stream || stream == mock.null_stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  stream->live = false; /* what it was given is still done */
  mock.count.streams--;
  if (mock.set.wall)
    pthread_cond_broadcast(&mock.changed);
  else if (!stream->head)
    mock_free_stream(stream);
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream handle) {
  CUresult result = mock_enter("cuStreamSynchronize");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUstream stream = mock_stream(handle);
  if (!stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (stream->tail) result = mock_wait(stream->tail);
  return mock_leave(result);
}

CUresult cuStreamQuery(CUstream handle) {
  CUresult result = mock_enter("cuStreamQuery");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUstream stream = mock_stream(handle);
  if (!stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  return mock_leave(stream->head ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

/* --- copies --- */

/* Device memory of one allocation, or an error. */
static CUresult check_device(CUdeviceptr address, size_t bytes, const char *side) {
  void *at = (void *)(uintptr_t)address;
  const block *b = mock_find_block(at, true);
  if (!b)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%s %p lies in no device allocation", side, at);
  size_t offset = (size_t)((unsigned char *)at - b->base);
  if (bytes > b->bytes - offset)
    return mock_error(CUDA_ERROR_INVALID_VALUE,
                      "%s: %zu bytes at offset %zu of a device allocation of %zu", side, bytes,
                      offset, b->bytes);
  return CUDA_SUCCESS;
}

/* Host memory: within one pinned block, or pageable. */
static CUresult check_host(const void *at, size_t bytes, const char *side, bool *out_pageable) {
  if (!at) return mock_error(CUDA_ERROR_INVALID_VALUE, "%s is NULL", side);
  if (mock_find_block(at, true))
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%s %p is device memory, expected the host's", side,
                      at);
  const block *b = mock_find_block(at, false);
  *out_pageable = !b;
  if (!b) return CUDA_SUCCESS;
  if (b->kind == BLOCK_FREED)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "%s %p is pinned memory that was freed", side, at);
  size_t offset = (size_t)((const unsigned char *)at - b->base);
  if (bytes > b->bytes - offset)
    return mock_error(CUDA_ERROR_INVALID_VALUE,
                      "%s: %zu bytes at offset %zu of pinned memory of %zu", side, bytes, offset,
                      b->bytes);
  return CUDA_SUCCESS;
}

static CUresult copy(op_kind kind, CUstream handle, void *to, const void *from, size_t bytes) {
  CUstream stream = mock_stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (bytes == 0) return CUDA_SUCCESS;
  bool pageable = false;
  CUresult result = kind == OP_H2D ? check_host(from, bytes, "source", &pageable)
                                   : check_device((uintptr_t)from, bytes, "source");
  if (result == CUDA_SUCCESS)
    result = kind == OP_D2H ? check_host(to, bytes, "destination", &pageable)
                            : check_device((uintptr_t)to, bytes, "destination");
  if (result != CUDA_SUCCESS) return result;
  if (mock_strikes(&mock.set.refuse_copy))
    return mock_error(CUDA_ERROR_OPERATING_SYSTEM, "fault refuse_copy");
  op *o = mock_new_op(kind);
  o->to = to;
  o->from = from;
  o->bytes = bytes;
  o->pageable = pageable;
  if (mock_strikes(&mock.set.fail_copy))
    mock_fault(o, CUDA_ERROR_ECC_UNCORRECTABLE, "fault fail_copy");
  int64_t *const counts[] = {&mock.count.h2d_copies, &mock.count.d2h_copies, &mock.count.d2d_copies,
                             &mock.count.h2d_bytes,  &mock.count.d2h_bytes,  &mock.count.d2d_bytes};
  *counts[kind] += 1;
  *counts[kind + 3] += (int64_t)bytes;
  if (pageable) mock_hold(o);
  mock_submit(stream, o);
  if (!pageable) return CUDA_SUCCESS;
  result = mock_wait(o); /* CUDA returns once such memory is no longer needed */
  mock_drop(o);
  return result;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  CUresult result = mock_enter("cuMemcpyHtoDAsync");
  if (result == CUDA_SUCCESS) result = copy(OP_H2D, stream, (void *)(uintptr_t)to, from, bytes);
  return mock_leave(result);
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CUresult result = mock_enter("cuMemcpyDtoHAsync");
  if (result == CUDA_SUCCESS)
    result = copy(OP_D2H, stream, to, (const void *)(uintptr_t)from, bytes);
  return mock_leave(result);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  CUresult result = mock_enter("cuMemcpyDtoDAsync");
  if (result == CUDA_SUCCESS)
    result = copy(OP_D2D, stream, (void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
  return mock_leave(result);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream handle) {
  CUresult result = mock_enter("cuMemsetD8Async");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  CUstream stream = mock_stream(handle);
  if (!stream) return mock_leave(CUDA_ERROR_INVALID_HANDLE);
  if (bytes == 0) return mock_leave(CUDA_SUCCESS);
  result = check_device(to, bytes, "destination");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  op *o = mock_new_op(OP_MEMSET);
  o->to = (void *)(uintptr_t)to;
  o->bytes = bytes;
  o->value = value;
  mock_submit(stream, o);
  return mock_leave(CUDA_SUCCESS);
}
