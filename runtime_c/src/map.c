/* map.c: anonymous memory and the files of a plan. */
#define _GNU_SOURCE
#include "map.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory.h"

pds_status pds_map_anon(uint64_t bytes, const char *what, void **out) {
  if (bytes > SIZE_MAX / 2)
    return pds_fail(PDS_ERR_MEMORY, "%s: %llu bytes exceed the address space", what,
                    (unsigned long long)bytes);
  /* Kernels before 6.7 align nothing by themselves: map more, and give back both ends. */
  size_t slack = bytes > PDS_HUGE ? PDS_HUGE : 0;
  unsigned char *base =
      mmap(NULL, (size_t)bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED)
    return pds_fail(PDS_ERR_MEMORY, "%s: the operating system refused %llu bytes: %s", what,
                    (unsigned long long)bytes, strerror(errno));
  if (slack) {
    size_t head = (size_t)(-(uintptr_t)base % PDS_HUGE);
    if (head) munmap(base, head);
    base += head;
    if (slack > head) munmap(base + bytes, slack - head);
  }
  *out = base;
  return PDS_OK;
}

void pds_let_write(void *base, uint64_t bytes, bool may) {
  mprotect(base, (size_t)bytes, may ? PROT_READ | PROT_WRITE : PROT_READ);
}

void pds_advise_huge(void *base, uint64_t bytes) {
#if defined(MADV_HUGEPAGE)
  madvise(base, (size_t)bytes, MADV_HUGEPAGE);
#else
  (void)base;
  (void)bytes;
#endif
}

void pds_unmap(const void *base, uint64_t bytes) {
  if (base) munmap((void *)(uintptr_t)base, (size_t)bytes);
}

pds_status pds_open_file(int dir_fd, const char *path, uint64_t bytes, int *out_fd) {
  int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return pds_fail(PDS_ERR_PLAN_FILE, "%s: %s; compile the plan again", path, strerror(errno));
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    return pds_fail(PDS_ERR_PLAN_FILE, "%s: not a regular file; compile the plan again", path);
  }
  if ((uint64_t)st.st_size != bytes) {
    close(fd);
    return pds_fail(PDS_ERR_PLAN_FILE,
                    "%s: expected %llu bytes, found %llu; compile the plan again", path,
                    (unsigned long long)bytes, (unsigned long long)st.st_size);
  }
  *out_fd = fd;
  return PDS_OK;
}

pds_status pds_file_bytes(int dir_fd, const char *path, uint64_t *out_bytes) {
  struct stat st;
  if (fstatat(dir_fd, path, &st, 0) != 0)
    return pds_fail(PDS_ERR_PLAN_FILE, "%s: %s; compile the plan again", path, strerror(errno));
  *out_bytes = (uint64_t)st.st_size;
  return PDS_OK;
}

pds_status pds_map_file(int dir_fd, const char *path, uint64_t bytes, const void **out) {
  int fd;
  PDS_RETURN_IF_ERROR(pds_open_file(dir_fd, path, bytes, &fd));
  void *base = NULL;
  if (bytes > 0) {
    base = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (base == MAP_FAILED) {
      int error = errno;
      close(fd);
      return pds_fail(PDS_ERR_PLAN_FILE, "%s: cannot map %llu bytes: %s", path,
                      (unsigned long long)bytes, strerror(error));
    }
  }
  close(fd);
  *out = base;
  return PDS_OK;
}

pds_status pds_read_file(int dir_fd, const char *path, void *buffer, uint64_t bytes) {
  int fd;
  PDS_RETURN_IF_ERROR(pds_open_file(dir_fd, path, bytes, &fd));
  uint64_t done = 0;
  while (done < bytes) {
    ssize_t n = read(fd, (char *)buffer + done, (size_t)(bytes - done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      int error = n < 0 ? errno : 0;
      close(fd);
      return pds_fail(PDS_ERR_PLAN_FILE, "%s: cannot read byte %llu: %s", path,
                      (unsigned long long)done,
                      error ? strerror(error) : "the file became shorter");
    }
    done += (uint64_t)n;
  }
  close(fd);
  return PDS_OK;
}
