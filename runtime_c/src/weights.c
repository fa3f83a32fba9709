/* weights.c: mapping or copying weight files, or making weights up.
 *
 * Why copy: a decode step reads gigabytes at a stride of gigabytes, so with the page cache's 4 KiB
 * pages much of its time goes to page walks, and hardware prefetch stops at each page's end. */
#define _GNU_SOURCE
#include "weights.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "dummy.h"
#include "map.h"
#include "memory.h"

/* One read: large enough for disks, small enough to spread one file over all workers. */
#define CHUNK ((uint64_t)4 << 20)

/* --- placement --- */

/* Interleaves the pages over the nodes whose cores work, as any worker may read any weight. Keeps
 * its hands off when the process has a policy of its own (numactl). Returns the nodes, or 0. */
static uint32_t interleave(void *base, uint64_t bytes, const pds_host *host) {
#if defined(SYS_mbind) && defined(SYS_get_mempolicy)
  enum { DEFAULT = 0, INTERLEAVE = 3 }; /* MPOL_* of linux/mempolicy.h */
  unsigned long nodes = (unsigned long)host->node_mask;
  int policy = DEFAULT;
  if (host->nodes < 2 || nodes == 0) return 0;
  if (syscall(SYS_get_mempolicy, &policy, NULL, 0ul, NULL, 0ul) != 0 || policy != DEFAULT) return 0;
  if (syscall(SYS_mbind, base, (unsigned long)bytes, INTERLEAVE, &nodes, 8ul * sizeof nodes, 0u))
    return 0;
  return host->nodes;
#else
  (void)base;
  (void)bytes;
  (void)host;
  return 0;
#endif
}

/* One mapping with a place for each file. */
static pds_status take_memory(const pds_plan *plan, const pds_host *host,
                              const unsigned char **files, pds_weights *out) {
  void *base;
  uint64_t total = pds_layout_weights(plan);
  PDS_RETURN_IF_ERROR(pds_map_anon(total, "weights", &base));
  out->copy = base;
  out->copy_bytes = total;
  out->nodes = interleave(base, total, host);
  pds_advise_huge(base, total);
  unsigned char *to = base;
  for (uint32_t i = 0; i < plan->n_files; i++) {
    files[i] = to;
    out->bytes += plan->files[i].bytes;
    to += pds_round_up(plan->files[i].bytes, PDS_FILE_GRAIN);
  }
  return PDS_OK;
}

static void is_filled(pds_weights *out) {
  pds_let_write(out->copy, out->copy_bytes, false); /* a refusal only costs a safeguard */
  out->huge_bytes = pds_host_huge_bytes(out->copy, out->copy_bytes);
}

/* --- copying --- */

/* Where the page cache is not to fill up with what is copied anyway, chunks that are not in it are
 * read past it, and those that are leave it afterwards. */
typedef struct copy_job {
  int fd, direct; /* direct: the same file past the page cache; -1: through it, and kept there */
  unsigned char *to;
  uint64_t bytes;
  _Atomic int error; /* errno of a read that failed; -1: the file ended early */
} copy_job;

/* Whether the page cache seems to hold the bytes from `at` to `end` of a file. */
static bool cached(int fd, uint64_t at, uint64_t end) {
#if defined(RWF_NOWAIT)
  char byte;
  struct iovec to = {.iov_base = &byte, .iov_len = 1};
  return preadv2(fd, &to, 1, (off_t)at, RWF_NOWAIT) == 1 &&
         preadv2(fd, &to, 1, (off_t)(end - 1), RWF_NOWAIT) == 1;
#else
  (void)fd;
  (void)at;
  (void)end;
  return true;
#endif
}

/* 0, an errno, or -1: the file ended early. */
static int read_range(int fd, unsigned char *to, uint64_t at, uint64_t end, uint64_t grain) {
  while (at < end) {
    size_t want = (size_t)pds_round_up(end - at, grain);
    ssize_t n = pread(fd, to + at, want, (off_t)at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : -1;
    uint64_t next = at + (uint64_t)n;
    if (next < end) next -= next % grain; /* a direct read begins at a block */
    if (next == at) return -1;
    at = next;
  }
  return 0;
}

static void copy_chunk(void *context, uint32_t item, uint32_t worker) {
  copy_job *job = context;
  (void)worker;
  if (atomic_load_explicit(&job->error, memory_order_relaxed)) return;
  uint64_t at = item * CHUNK, end = at + CHUNK < job->bytes ? at + CHUNK : job->bytes;
  int error = EINVAL;
  if (job->direct >= 0 && !cached(job->fd, at, end)) /* the copy has room for the last block */
    error = read_range(job->direct, job->to, at, end, PDS_FILE_GRAIN);
  if (error == EINVAL) { /* or the file system cannot read directly at such offsets */
#if defined(POSIX_FADV_WILLNEED)
    posix_fadvise(job->fd, (off_t)at, (off_t)(end - at), POSIX_FADV_WILLNEED);
#endif
    error = read_range(job->fd, job->to, at, end, 1);
#if defined(POSIX_FADV_DONTNEED)
    if (job->direct >= 0) posix_fadvise(job->fd, (off_t)at, (off_t)(end - at), POSIX_FADV_DONTNEED);
#endif
  }
  if (error) atomic_store_explicit(&job->error, error, memory_order_relaxed);
}

static pds_status copy_file(const pds_plan *plan, uint32_t index, int dir_fd, pds_pool *pool,
                            bool past_cache, unsigned char *to) {
  const pds_file *file = &plan->files[index];
  copy_job job = {.direct = -1, .to = to, .bytes = file->bytes};
  PDS_RETURN_IF_ERROR(pds_open_file(dir_fd, file->path, file->bytes, &job.fd));
#if defined(O_DIRECT) && defined(POSIX_FADV_RANDOM)
  if (past_cache) {
    job.direct = openat(dir_fd, file->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    posix_fadvise(job.fd, 0, 0, POSIX_FADV_RANDOM); /* looking whether it is cached reads nothing */
  }
#else
  (void)past_cache;
#endif
  pds_pool_run(pool, copy_chunk, &job, (uint32_t)((file->bytes + CHUNK - 1) / CHUNK));
  close(job.fd);
  if (job.direct >= 0) close(job.direct);
  int error = atomic_load_explicit(&job.error, memory_order_relaxed);
  if (!error) return PDS_OK;
  return pds_fail(PDS_ERR_PLAN_FILE, "%s: cannot be read: %s", file->path,
                  error > 0 ? strerror(error) : "the file became shorter");
}

pds_status pds_weights_copy(const pds_plan *plan, int dir_fd, const pds_host *host, pds_pool *pool,
                            bool past_cache, const unsigned char **files, pds_weights *out) {
  PDS_RETURN_IF_ERROR(take_memory(plan, host, files, out));
  pds_status status = PDS_OK;
  pds_pool_open(pool);
  for (uint32_t i = 0; i < plan->n_files && status == PDS_OK; i++)
    status = copy_file(plan, i, dir_fd, pool, past_cache, (unsigned char *)(uintptr_t)files[i]);
  pds_pool_close(pool);
  PDS_RETURN_IF_ERROR(status);
  is_filled(out);
  return PDS_OK;
}

/* --- making up --- */

static pds_status make_up(const pds_plan *plan, const pds_host *host, pds_pool *pool,
                          const unsigned char **files, pds_weights *out) {
  const uint64_t need = pds_layout_weights(plan), available = pds_host_memory("");
  if (need > available) /* the system would give it, and kill the process while it is filled */
    return pds_fail(PDS_ERR_MEMORY,
                    "dummy weights: %llu MiB, but %llu MiB of memory are available; compile the "
                    "model with fewer layers, or for int8 or int4",
                    (unsigned long long)need >> 20, (unsigned long long)available >> 20);
  PDS_RETURN_IF_ERROR(take_memory(plan, host, files, out));
  pds_pool_open(pool);
  pds_dummy_fill(plan, pool, files);
  pds_pool_close(pool);
  is_filled(out);
  return PDS_OK;
}

/* --- mapping --- */

static pds_status map_files(const pds_plan *plan, int dir_fd, bool soon,
                            const unsigned char **files, pds_weights *out) {
  for (uint32_t i = 0; i < plan->n_files; i++) {
    const void *base;
    PDS_RETURN_IF_ERROR(pds_map_file(dir_fd, plan->files[i].path, plan->files[i].bytes, &base));
    files[i] = base;
    out->bytes += plan->files[i].bytes;
#if defined(MADV_WILLNEED)
    if (soon && base) madvise((void *)(uintptr_t)base, plan->files[i].bytes, MADV_WILLNEED);
#else
    (void)soon;
#endif
  }
  return PDS_OK;
}

/* --- choosing --- */

static uint64_t file_bytes(const pds_plan *plan) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < plan->n_files; i++) bytes += plan->files[i].bytes;
  return bytes;
}

/* With room to spare: a quarter more than the weights, for KV and for what else the machine does,
 * and 256 MiB. */
static bool fits(uint64_t need, uint64_t available) {
  return need + need / 4 + ((uint64_t)256 << 20) <= available;
}

pds_status pds_weights_load(const pds_plan *plan, int dir_fd, int32_t asked, const pds_host *host,
                            pds_pool *pool, const unsigned char **files, pds_weights *out) {
  uint64_t need = pds_layout_weights(plan), available = pds_host_memory("");
  unsigned long long mib = need >> 20, left = available >> 20;
  out->mode = asked;
  if (asked == PDS_WEIGHTS_AUTO) {
    bool known = available != UINT64_MAX;
    out->mode = known && fits(need, available) ? PDS_WEIGHTS_COPY : PDS_WEIGHTS_MMAP;
    if (!known)
      snprintf(out->why, sizeof out->why, "how much memory is available is not known");
    else
      snprintf(out->why, sizeof out->why, "%llu MiB of weights, %llu MiB of memory available", mib,
               left);
  } else {
    snprintf(out->why, sizeof out->why, "asked for");
  }
  if (out->mode == PDS_WEIGHTS_DUMMY) return make_up(plan, host, pool, files, out);
  if (out->mode == PDS_WEIGHTS_COPY && need > 0) {
    /* What stays in the page cache makes the next load faster, but is memory in use twice: only
     * where there is plenty. */
    bool past_cache = need > available / 4;
    pds_status status = pds_weights_copy(plan, dir_fd, host, pool, past_cache, files, out);
    if (status != PDS_ERR_MEMORY || asked == PDS_WEIGHTS_COPY) return status;
    out->mode = PDS_WEIGHTS_MMAP;
    snprintf(out->why, sizeof out->why, "the operating system refused %llu MiB", mib);
  }
  return map_files(plan, dir_fd, fits(file_bytes(plan), available), files, out);
}

void pds_weights_unload(const pds_plan *plan, const unsigned char **files, pds_weights *weights) {
  if (weights->copy)
    pds_unmap(weights->copy, weights->copy_bytes);
  else
    for (uint32_t i = 0; i < plan->n_files; i++) pds_unmap(files[i], plan->files[i].bytes);
  weights->copy = NULL;
}
