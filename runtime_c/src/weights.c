/* weights.c: mapping or copying weight files.
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
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

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

/* --- copying --- */

typedef struct copy_job {
  int fd;
  unsigned char *to;
  uint64_t bytes, ahead; /* ahead: how far before a read the kernel is told of it */
  bool drop;             /* take what was read out of the page cache */
  _Atomic int error;     /* errno of a read that failed; -1: the file ended early */
} copy_job;

static void copy_chunk(void *context, uint32_t item, uint32_t worker) {
  copy_job *job = context;
  (void)worker;
  uint64_t at = item * CHUNK, end = at + CHUNK < job->bytes ? at + CHUNK : job->bytes;
#if defined(POSIX_FADV_WILLNEED)
  if (at + job->ahead < job->bytes)
    posix_fadvise(job->fd, (off_t)(at + job->ahead), (off_t)CHUNK, POSIX_FADV_WILLNEED);
#endif
  for (uint64_t done = at; done < end;) {
    if (atomic_load_explicit(&job->error, memory_order_relaxed)) return;
    ssize_t n = pread(job->fd, job->to + done, (size_t)(end - done), (off_t)done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      atomic_store_explicit(&job->error, n < 0 ? errno : -1, memory_order_relaxed);
      return;
    }
    done += (uint64_t)n;
  }
#if defined(POSIX_FADV_DONTNEED)
  if (job->drop) posix_fadvise(job->fd, (off_t)at, (off_t)(end - at), POSIX_FADV_DONTNEED);
#endif
}

static pds_status copy_file(const pds_plan *plan, uint32_t index, int dir_fd, pds_pool *pool,
                            bool drop, unsigned char *to) {
  const pds_file *file = &plan->files[index];
  copy_job job = {.to = to, .bytes = file->bytes, .drop = drop};
  job.ahead = CHUNK * pds_pool_threads(pool);
  PDS_RETURN_IF_ERROR(pds_open_file(dir_fd, file->path, file->bytes, &job.fd));
  pds_pool_run(pool, copy_chunk, &job, (uint32_t)((file->bytes + CHUNK - 1) / CHUNK));
  close(job.fd);
  int error = atomic_load_explicit(&job.error, memory_order_relaxed);
  if (!error) return PDS_OK;
  return pds_fail(PDS_ERR_PLAN_FILE, "%s: cannot be read: %s", file->path,
                  error > 0 ? strerror(error) : "the file became shorter");
}

static pds_status copy_files(const pds_plan *plan, int dir_fd, const pds_host *host, pds_pool *pool,
                             bool drop, const unsigned char **files, pds_weights *out) {
  void *base;
  uint64_t total = pds_layout_weights(plan);
  PDS_RETURN_IF_ERROR(pds_map_anon(total, "weights", &base));
  out->copy = base;
  out->copy_bytes = total;
  out->nodes = interleave(base, total, host);
  pds_advise_huge(base, total);
  pds_status status = PDS_OK;
  unsigned char *to = base;
  pds_pool_open(pool);
  for (uint32_t i = 0; i < plan->n_files && status == PDS_OK; i++) {
    status = copy_file(plan, i, dir_fd, pool, drop, to);
    files[i] = to;
    out->bytes += plan->files[i].bytes;
    to += pds_round_up(plan->files[i].bytes, PDS_FILE_GRAIN);
  }
  pds_pool_close(pool);
  PDS_RETURN_IF_ERROR(status);
  mprotect(base, (size_t)total, PROT_READ); /* a refusal only costs a safeguard */
  out->huge_bytes = pds_host_huge_bytes(base, total);
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
  if (out->mode == PDS_WEIGHTS_COPY && need > 0) {
    /* What stays in the page cache makes the next load faster, but is memory in use twice: only
     * where there is plenty. */
    bool drop = need > available / 4;
    pds_status status = copy_files(plan, dir_fd, host, pool, drop, files, out);
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
