/* case_weights.c: weight files copied to memory, through the page cache and past it, whatever their
 * sizes; files that are cut short are refused. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "map.h"
#include "memory.h"
#include "test.h"
#include "weights.h"

enum { FILES = 6, MOST = (9 << 20) + 17 };
static const uint64_t sizes[FILES] = {1, 4095, 4096, (4 << 20) + 5, MOST, 512};

static unsigned char byte_of(uint32_t file, uint64_t at) {
  return (unsigned char)((at * 2654435761u >> 13) + at + file * 37);
}

static void path_of(uint32_t file, char path[16]) {
  memcpy(path, "copy-0.bin", sizeof "copy-0.bin");
  path[5] = (char)('0' + file);
}

static void write_files(int dir_fd) {
  unsigned char *bytes = malloc(MOST);
  for (uint32_t i = 0; bytes && i < FILES; i++) {
    char path[16];
    path_of(i, path);
    for (uint64_t at = 0; at < sizes[i]; at++) bytes[at] = byte_of(i, at);
    int fd = openat(dir_fd, path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, bytes, (size_t)sizes[i]) == (ssize_t)sizes[i]);
    close(fd);
  }
  free(bytes);
}

/* The files leave the page cache, but for the middle of one. */
static void forget_files(int dir_fd) {
#if defined(__linux__)
  for (uint32_t i = 0; i < FILES; i++) {
    char path[16], some[8192];
    path_of(i, path);
    int fd = openat(dir_fd, path, O_RDWR);
    fdatasync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    if (i == 4) CHECK(pread(fd, some, sizeof some, 5 << 20) == (ssize_t)sizeof some);
    close(fd);
  }
#else
  (void)dir_fd;
#endif
}

static void same(const unsigned char *const *files) {
  for (uint32_t i = 0; i < FILES; i++) {
    uint64_t bad = 0;
    for (uint64_t at = 0; at < sizes[i]; at++) bad += files[i][at] != byte_of(i, at);
    CHECK_EQ(bad, 0);
    CHECK_EQ((uintptr_t)files[i] % PDS_FILE_GRAIN, 0);
  }
}

typedef struct fixture {
  pds_plan plan;
  pds_host host;
  void *memory;
  uint64_t bytes;
  pds_pool *pool;
  int dir_fd;
} fixture;

static void copy(fixture *f, bool past_cache) {
  const unsigned char *files[FILES] = {0};
  pds_weights weights = {0};
  CHECK_OK(pds_weights_copy(&f->plan, f->dir_fd, &f->host, f->pool, past_cache, files, &weights));
  CHECK_EQ(weights.copy_bytes, pds_layout_weights(&f->plan));
  CHECK_EQ((uintptr_t)weights.copy % PDS_HUGE, 0);
  CHECK(weights.huge_bytes <= weights.copy_bytes);
  same(files);
  pds_weights_unload(&f->plan, files, &weights);
}

static void each_way(fixture *f) {
  copy(f, false);
  copy(f, true); /* all of it cached */
  forget_files(f->dir_fd);
  copy(f, true); /* next to nothing cached */
  forget_files(f->dir_fd);
  copy(f, false);
}

static void cut_short(fixture *f) {
  const unsigned char *files[FILES] = {0};
  pds_weights weights = {0};
  int fd = openat(f->dir_fd, "copy-3.bin", O_WRONLY);
  CHECK(ftruncate(fd, (off_t)sizes[3] - 1) == 0);
  close(fd);
  CHECK_STATUS(pds_weights_copy(&f->plan, f->dir_fd, &f->host, f->pool, true, files, &weights),
               PDS_ERR_PLAN_FILE, "copy-3.bin");
  pds_weights_unload(&f->plan, files, &weights);
}

void case_weights(void) {
  static char paths[FILES][16];
  static pds_file list[FILES];
  fixture f = {.plan = {.files = list, .n_files = FILES}};
  for (uint32_t i = 0; i < FILES; i++) {
    path_of(i, paths[i]);
    list[i] = (pds_file){.path = paths[i], .bytes = sizes[i]};
  }
  f.dir_fd = open(test_data_dir, O_RDONLY | O_DIRECTORY);
  CHECK(f.dir_fd >= 0);
  pds_host_read("", NULL, &f.host);
  pds_engine_layout at = pds_layout_engine(&f.plan, 3);
  CHECK_OK(pds_map_anon(at.total, "test", &f.memory));
  f.bytes = at.total;
  unsigned char *arena = f.memory;
  CHECK_OK(pds_pool_create(arena + at.pool, arena + at.workers, arena + at.stacks, 3));
  f.pool = (pds_pool *)(arena + at.pool);
  write_files(f.dir_fd);
  each_way(&f);
  cut_short(&f);
  for (uint32_t i = 0; i < FILES; i++) unlinkat(f.dir_fd, paths[i], 0);
  pds_pool_destroy(f.pool);
  pds_unmap(f.memory, f.bytes);
  close(f.dir_fd);
}
