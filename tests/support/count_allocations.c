/* An allocator and mmap that count, for LD_PRELOAD: what one library allocates, seen from outside it.
 *
 * Calls whose return address lies in the watched library are counted; all others pass through. Python starts
 * and reads the counters through ctypes. Linux and glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_MAPS 4096

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

typedef struct count_totals {
  uint64_t mallocs;      /* calls of malloc, calloc, realloc, aligned_alloc, posix_memalign */
  uint64_t malloc_bytes; /* bytes they asked for */
  uint64_t anon_maps;    /* live anonymous mappings */
  uint64_t anon_bytes;   /* their bytes */
  uint64_t file_maps;    /* live file mappings */
  uint64_t file_bytes;
  uint64_t map_calls; /* calls of mmap and munmap */
  uint64_t io_calls;  /* calls of open, read, pread, write, close and their kin */
} count_totals;

static uintptr_t watched_begin, watched_end;
static _Atomic uint64_t mallocs, malloc_bytes, map_calls, io_calls;
static struct {
  uintptr_t at;
  size_t bytes;
  int anonymous;
} maps[MAX_MAPS];
static atomic_flag maps_lock = ATOMIC_FLAG_INIT;

static int watched(const void *caller) {
  return (uintptr_t)caller >= watched_begin && (uintptr_t)caller < watched_end;
}
#define CALLER_WATCHED() watched(__builtin_return_address(0))

static void count_malloc(size_t bytes) {
  mallocs++;
  malloc_bytes += bytes;
}

EXPORT void *malloc(size_t bytes) {
  if (CALLER_WATCHED()) count_malloc(bytes);
  return __libc_malloc(bytes);
}

EXPORT void *calloc(size_t n, size_t bytes) {
  if (CALLER_WATCHED()) count_malloc(n * bytes);
  return __libc_calloc(n, bytes);
}

EXPORT void *realloc(void *p, size_t bytes) {
  if (CALLER_WATCHED()) count_malloc(bytes);
  return __libc_realloc(p, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
  if (CALLER_WATCHED()) count_malloc(bytes);
  return __libc_memalign(alignment, bytes);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes) {
  if (CALLER_WATCHED()) count_malloc(bytes);
  void *p = __libc_memalign(alignment, bytes);
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}

static void remember(uintptr_t at, size_t bytes, int anonymous) {
  while (atomic_flag_test_and_set(&maps_lock)) {
  }
  for (int i = 0; i < MAX_MAPS; i++)
    if (!maps[i].bytes) {
      maps[i].at = at;
      maps[i].bytes = bytes;
      maps[i].anonymous = anonymous;
      break;
    }
  atomic_flag_clear(&maps_lock);
}

/* A mapping may lose its begin, its end or all of it; nobody punches holes. */
static void forget(uintptr_t at, size_t bytes) {
  uintptr_t end = at + bytes;
  while (atomic_flag_test_and_set(&maps_lock)) {
  }
  for (int i = 0; i < MAX_MAPS; i++) {
    uintptr_t first = maps[i].at, last = first + maps[i].bytes;
    if (!maps[i].bytes || first >= end || last <= at) continue;
    if (first >= at) maps[i].at = end < last ? end : last;
    if (last <= end) last = at > first ? at : first;
    maps[i].bytes = last > maps[i].at ? last - maps[i].at : 0;
  }
  atomic_flag_clear(&maps_lock);
}

EXPORT void *mmap(void *hint, size_t bytes, int prot, int flags, int fd, off_t offset) {
  void *p = (void *)syscall(SYS_mmap, hint, bytes, prot, flags, fd, offset);
  if (CALLER_WATCHED()) {
    map_calls++;
    if (p != MAP_FAILED) remember((uintptr_t)p, bytes, (flags & MAP_ANONYMOUS) != 0);
  }
  return p;
}

EXPORT void *mmap64(void *hint, size_t bytes, int prot, int flags, int fd, off_t offset)
    __attribute__((alias("mmap")));

EXPORT int munmap(void *at, size_t bytes) {
  if (CALLER_WATCHED()) map_calls++;
  forget((uintptr_t)at, bytes); /* whoever asks: a tail call shows the caller's caller */
  return (int)syscall(SYS_munmap, at, bytes);
}

#define COUNT_IO(result, name, parameters, arguments)                                              \
  EXPORT result name parameters {                                                                  \
    static result(*real) parameters;                                                               \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);                                          \
    if (CALLER_WATCHED()) io_calls++;                                                              \
    return real arguments;                                                                         \
  }
COUNT_IO(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n))
COUNT_IO(ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
COUNT_IO(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n))
COUNT_IO(int, close, (int fd), (fd))

EXPORT int open(const char *path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, int) : 0;
  va_end(list);
  if (CALLER_WATCHED()) io_calls++;
  return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

EXPORT int openat(int dir, const char *path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  int mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, int) : 0;
  va_end(list);
  if (CALLER_WATCHED()) io_calls++;
  return (int)syscall(SYS_openat, dir, path, flags, mode);
}

static int find_library(struct dl_phdr_info *info, size_t size, void *name) {
  (void)size;
  if (!strstr(info->dlpi_name, name)) return 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
    uintptr_t begin = info->dlpi_addr + segment->p_vaddr;
    if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_X)) continue;
    watched_begin = begin;
    watched_end = begin + segment->p_memsz;
  }
  return 1;
}

/* Watch the loaded library whose path contains `name`; 1 if there is one. */
EXPORT int count_watch(const char *name) {
  return dl_iterate_phdr(find_library, (void *)name);
}

EXPORT void count_read(count_totals *out) {
  memset(out, 0, sizeof *out);
  out->mallocs = mallocs;
  out->malloc_bytes = malloc_bytes;
  out->map_calls = map_calls;
  out->io_calls = io_calls;
  for (int i = 0; i < MAX_MAPS; i++) {
    if (!maps[i].bytes) continue;
    *(maps[i].anonymous ? &out->anon_maps : &out->file_maps) += 1;
    *(maps[i].anonymous ? &out->anon_bytes : &out->file_bytes) += maps[i].bytes;
  }
}
