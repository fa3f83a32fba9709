/* memory.c: device memory, which is mapped memory of this process, and pinned host memory; both
 * counted to the byte that was asked for. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "mock.h"

enum { FRESH = 64 << 20, FREED = 256 };

block *mock_find_block(const void *address, bool device) {
  for (block *b = mock.blocks; b; b = b->next)
    if ((b->kind == BLOCK_DEVICE) == device && (const unsigned char *)address >= b->base &&
        (const unsigned char *)address < b->base + b->bytes)
      return b;
  return NULL;
}

static block *find_base(const void *address, block_kind kind) {
  block *b = mock.blocks;
  while (b && !(b->base == address && b->kind == kind)) b = b->next;
  return b;
}

/* Memory is there from the first touch on. Behind it is a page that nobody may touch. */
static block *map(block_kind kind, size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  if (bytes > SIZE_MAX / 2) return NULL;
  size_t mapped = (bytes + page - 1) / page * page + page;
  unsigned char *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return NULL;
  mprotect(base + mapped - page, page, PROT_NONE);
  block *b = mock_alloc(sizeof *b);
  *b = (block){mock.blocks, kind, base, bytes, mapped};
  mock.blocks = b;
  return b;
}

static void unlink_block(block *b) {
  block **at = &mock.blocks;
  while (*at != b) at = &(*at)->next;
  *at = b->next;
  if (b->mapped) munmap(b->base, b->mapped);
  free(b);
}

void mock_free_blocks(void) {
  while (mock.blocks) unlink_block(mock.blocks);
  mock.count.device_live = mock.count.pinned_live = mock.count.device_allocations = 0;
}

/* Work may use what is being freed: as the driver does, wait for all of it. */
static CUresult finish_work(void) {
  for (CUstream s = mock.streams; s; s = s->next)
    if (s->head) {
      mock.count.implicit_waits++;
      return mock_wait_all();
    }
  return CUDA_SUCCESS;
}

/* --- device --- */

CUresult cuMemGetInfo_v2(size_t *out_free, size_t *out_total) {
  CUresult result = mock_enter("cuMemGetInfo");
  if (result == CUDA_SUCCESS && (!out_free || !out_total))
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "no place for them");
  if (result == CUDA_SUCCESS) {
    *out_total = (size_t)mock.set.memory;
    *out_free = (size_t)(mock.set.memory - mock.set.context - mock.count.device_live);
  }
  return mock_leave(result);
}

static CUresult allocate(CUdeviceptr *out_address, size_t bytes) {
  if (!out_address || bytes == 0)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "0 bytes, or no place for the address");
  if (mock_strikes(&mock.set.fail_alloc))
    return mock_error(CUDA_ERROR_OUT_OF_MEMORY, "fault fail_alloc");
  size_t left = (size_t)(mock.set.memory - mock.set.context - mock.count.device_live);
  if (bytes > left)
    return mock_error(CUDA_ERROR_OUT_OF_MEMORY, "%zu bytes wanted, %zu free", bytes, left);
  block *b = map(BLOCK_DEVICE, bytes);
  if (!b) return mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the system gave no %zu bytes", bytes);
  /* What nobody has written reads as NaN. Large blocks are left to the system, which gives zeros,
   * so that they take no memory before they are used. */
  if (mock.set.poison && !mock.set.wall && bytes <= FRESH) memset(b->base, 0xff, bytes);
  counters *c = &mock.count;
  c->device_allocations++;
  c->device_live += (int64_t)bytes;
  if (c->device_peak < c->device_live) c->device_peak = c->device_live;
  *out_address = (uintptr_t)b->base;
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *out_address, size_t bytes) {
  CUresult result = mock_enter("cuMemAlloc");
  if (result == CUDA_SUCCESS) result = allocate(out_address, bytes);
  return mock_leave(result);
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  CUresult result = mock_enter("cuMemFree");
  if (result != CUDA_SUCCESS || address == 0) return mock_leave(result);
  block *b = find_base((void *)(uintptr_t)address, BLOCK_DEVICE);
  if (!b)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE, "%p is no allocation, or was freed",
                                 (void *)(uintptr_t)address));
  result = finish_work();
  /* Another thread may have freed it meanwhile. */
  if (result == CUDA_SUCCESS && !(b = find_base((void *)(uintptr_t)address, BLOCK_DEVICE)))
    result = mock_error(CUDA_ERROR_INVALID_VALUE, "freed by two threads at once");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  mock.count.device_live -= (int64_t)b->bytes;
  mock.count.device_allocations--;
  unlink_block(b);
  return mock_leave(CUDA_SUCCESS);
}

/* --- pinned host memory --- */

static CUresult pin(size_t bytes) {
  if (mock_strikes(&mock.set.fail_pin))
    return mock_error(CUDA_ERROR_OUT_OF_MEMORY, "fault fail_pin");
  int64_t limit = mock.set.pinned;
  if (limit > 0 && bytes > (size_t)(limit - mock.count.pinned_live))
    return mock_error(CUDA_ERROR_OUT_OF_MEMORY,
                      "%zu bytes wanted, %lld of %lld may still be pinned", bytes,
                      (long long)(limit - mock.count.pinned_live), (long long)limit);
  return CUDA_SUCCESS;
}

static void count_pinned(size_t bytes) {
  counters *c = &mock.count;
  c->pinned_live += (int64_t)bytes;
  if (c->pinned_peak < c->pinned_live) c->pinned_peak = c->pinned_live;
}

static CUresult host_allocate(void **out_address, size_t bytes, unsigned flags) {
  if (!out_address || bytes == 0 || flags > 7)
    return mock_error(CUDA_ERROR_INVALID_VALUE, "0 bytes, flags %u, or no place for the address",
                      flags);
  CUresult result = pin(bytes);
  if (result != CUDA_SUCCESS) return result;
  block *b = map(BLOCK_PINNED, bytes);
  if (!b) return mock_error(CUDA_ERROR_OUT_OF_MEMORY, "the system gave no %zu bytes", bytes);
  count_pinned(bytes);
  *out_address = b->base;
  return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **out_address, size_t bytes, unsigned flags) {
  CUresult result = mock_enter("cuMemHostAlloc");
  if (result == CUDA_SUCCESS) result = host_allocate(out_address, bytes, flags);
  return mock_leave(result);
}

/* The addresses of the last freed blocks stay taken, so that their use is noticed. */
static void entomb(block *b) {
  mmap(b->base, b->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  b->kind = BLOCK_FREED;
  block *oldest = NULL;
  int freed = 0;
  for (block *at = mock.blocks; at; at = at->next)
    if (at->kind == BLOCK_FREED) {
      oldest = at;
      freed++;
    }
  if (freed > FREED) unlink_block(oldest);
}

CUresult cuMemFreeHost(void *address) {
  CUresult result = mock_enter("cuMemFreeHost");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (find_base(address, BLOCK_PINNED)) result = finish_work();
  if (result != CUDA_SUCCESS) return mock_leave(result);
  block *b = find_base(address, BLOCK_PINNED);
  if (!b)
    return mock_leave(mock_error(CUDA_ERROR_INVALID_VALUE,
                                 "%p is no memory of cuMemHostAlloc, or was freed", address));
  mock.count.pinned_live -= (int64_t)b->bytes;
  entomb(b);
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
  CUresult result = mock_enter("cuMemHostRegister");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  unsigned char *base = address;
  if (!base || bytes == 0 || flags > 15)
    return mock_leave(
        mock_error(CUDA_ERROR_INVALID_VALUE, "%p, %zu bytes, flags %u", address, bytes, flags));
  for (block *b = mock.blocks; b; b = b->next)
    if (b->kind != BLOCK_FREED && base < b->base + b->bytes && b->base < base + bytes)
      return mock_leave(mock_error(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                                   "%p, %zu bytes: overlaps %p, %zu bytes", address, bytes,
                                   (void *)b->base, b->bytes));
  result = pin(bytes);
  if (result != CUDA_SUCCESS) return mock_leave(result);
  block *b = mock_alloc(sizeof *b);
  *b = (block){mock.blocks, BLOCK_REGISTERED, base, bytes, 0};
  mock.blocks = b;
  count_pinned(bytes);
  return mock_leave(CUDA_SUCCESS);
}

CUresult cuMemHostUnregister(void *address) {
  CUresult result = mock_enter("cuMemHostUnregister");
  if (result != CUDA_SUCCESS) return mock_leave(result);
  if (find_base(address, BLOCK_REGISTERED)) result = finish_work();
  if (result != CUDA_SUCCESS) return mock_leave(result);
  block *b = find_base(address, BLOCK_REGISTERED);
  if (!b)
    return mock_leave(mock_error(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
                                 "%p is not the start of registered memory", address));
  mock.count.pinned_live -= (int64_t)b->bytes;
  unlink_block(b);
  return mock_leave(CUDA_SUCCESS);
}
