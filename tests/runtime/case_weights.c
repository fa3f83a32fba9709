/* case_weights.c: weight files copied to memory, through the page cache and past it, whatever their
 * sizes; files that are cut short are refused; weights made up without any file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "map.h"
#include "memory.h"
#include "panels.h"
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

/* --- made up --- */

enum { HIDDEN = 70, INTER = 40, EXPERTS = 3 };

/* A layer of each kind of matrix, in a file of its own. */
typedef struct dummy {
  pds_plan plan;
  pds_layer layers[4];
  pds_file files[4];
  uint64_t end;
} dummy;

static pds_tensor put(dummy *d, uint16_t file, uint8_t dtype, uint32_t n, uint32_t k) {
  pds_tensor t = {.dtype = dtype, .file = file, .n = n, .k = k, .count = 1, .offset = d->end};
  d->end += pds_round_up(dtype == PDS_VEC_F32 ? 4 * n : (n + 15) / 16 * pds_panel_bytes(&t), 64);
  return t;
}

static void put_layer(dummy *d, uint16_t f, uint8_t dtype) {
  pds_layer *l = &d->layers[f];
  d->end = 0;
  *l = (pds_layer){.moe = 1, .experts = {.inter = INTER}};
  l->attn_norm = put(d, f, PDS_VEC_F32, HIDDEN, 1);
  l->attn.in_bias = put(d, f, PDS_VEC_F32, HIDDEN, 1);
  l->attn.in_proj = put(d, f, dtype, 96, HIDDEN);
  l->attn.o_proj = put(d, f, dtype, HIDDEN, 96);
  l->gate.weight = put(d, f, PDS_F32, EXPERTS, HIDDEN);
  d->end = pds_round_up(d->end, PDS_FILE_GRAIN);
  const uint64_t first = d->end;
  l->experts.gate_up = put(d, f, dtype, 2 * 48, HIDDEN);
  l->experts.down = put(d, f, dtype, HIDDEN, INTER);
  const uint64_t stride = pds_round_up(d->end - first, PDS_FILE_GRAIN);
  l->experts.gate_up.count = l->experts.down.count = EXPERTS;
  l->experts.gate_up.stride = l->experts.down.stride = stride;
  d->files[f] = (pds_file){.path = "no such file", .bytes = first + EXPERTS * stride};
}

static float of_bf16(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &word, sizeof f);
  return f;
}

/* W[column, input] of matrix `index`. */
static float value(const pds_tensor *t, const unsigned char *file, uint32_t index, uint32_t column,
                   uint32_t input) {
  const size_t bytes = pds_panel_bytes(t), j = column % 16;
  const unsigned char *panel = file + t->offset + index * t->stride + column / 16 * bytes;
  if (t->dtype == PDS_F32) return ((const float *)(const void *)panel)[(size_t)input * 16 + j];
  const uint16_t *bf16 = (const uint16_t *)(const void *)panel;
  if (t->dtype == PDS_BF16) return of_bf16(bf16[(input / 2 * 16 + j) * 2 + input % 2]);
  const uint32_t k_pad = pds_k_pad(t), group = pds_group(t->dtype);
  const size_t elements = t->dtype == PDS_I8 ? (size_t)k_pad * 16 : (size_t)k_pad * 8;
  const float scale = of_bf16(bf16[elements / 2 + input / group * 16 + j]);
  if (t->dtype == PDS_I8)
    return scale * (float)((const signed char *)panel)[(input / 4 * 16 + j) * 4 + input % 4];
  const unsigned char both = panel[(input / 8 * 16 + j) * 4 + input % 4];
  return scale * (float)((input % 8 < 4 ? both & 15 : both >> 4) - 8);
}

/* A matrix's mean magnitude; padding must be zero, its last inputs may be. */
static double magnitude(const pds_tensor *t, const unsigned char *file, uint32_t cols, bool pairs) {
  double sum = 0, signs = 0;
  uint32_t n = 0;
  for (uint32_t m = 0; m < t->count; m++)
    for (uint32_t c = 0; c < pds_round_up(t->n, 16); c++)
      for (uint32_t i = 0; i < pds_k_pad(t); i++) {
        const float v = value(t, file, m, c, i);
        const uint32_t real = pairs ? c / 32 * 16 + c % 16 : c;
        if (real >= cols || i >= t->k) {
          CHECK(v == 0);
          continue;
        }
        if (i >= t->k - t->k % 8) continue;
        CHECK(v != 0);
        sum += v < 0 ? -v : v;
        signs += v < 0 ? -1 : 1;
        n++;
      }
  CHECK(signs / n < 0.3 && signs / n > -0.3);
  return sum / n;
}

static void check_magnitude(const pds_tensor *t, const unsigned char *file, uint32_t cols,
                            bool pairs, double wanted) {
  const double found = magnitude(t, file, cols, pairs);
  CHECK(found > 0.7 * wanted && found < 1.3 * wanted);
}

static void check_layer(const pds_layer *l, const unsigned char *file) {
  const double usual = 0.02, residual = usual / 512;
  check_magnitude(&l->attn.in_proj, file, 96, false, usual);
  check_magnitude(&l->attn.o_proj, file, HIDDEN, false, residual);
  check_magnitude(&l->gate.weight, file, EXPERTS, false, usual);
  check_magnitude(&l->experts.gate_up, file, INTER, true, usual);
  check_magnitude(&l->experts.down, file, HIDDEN, false, residual);
  for (uint32_t i = 0; i < HIDDEN; i++) {
    CHECK(((const float *)(const void *)(file + l->attn_norm.offset))[i] == 1);
    CHECK(((const float *)(const void *)(file + l->attn.in_bias.offset))[i] == 0);
  }
  /* No two experts are alike. */
  CHECK(memcmp(file + l->experts.down.offset,
               file + l->experts.down.offset + l->experts.down.stride, 256) != 0);
}

static void make(const dummy *d, const pds_host *host, pds_pool *pool, pds_weights *weights,
                 const unsigned char *files[4]) {
  CHECK_OK(pds_weights_load(&d->plan, -1, PDS_WEIGHTS_DUMMY, host, pool, files, weights));
  CHECK_EQ(weights->mode, PDS_WEIGHTS_DUMMY);
  CHECK_EQ(weights->copy_bytes, pds_layout_weights(&d->plan));
}

static void made_up(fixture *f) {
  static dummy d;
  const uint8_t dtypes[] = {PDS_BF16, PDS_F32, PDS_I8, PDS_I4};
  for (uint16_t i = 0; i < 4; i++) put_layer(&d, i, dtypes[i]);
  d.plan = (pds_plan){.files = d.files, .n_files = 4, .layers = d.layers, .n_layers = 4};
  pds_weights weights = {0}, again = {0};
  const unsigned char *files[4], *others[4];
  make(&d, &f->host, f->pool, &weights, files);
  for (int i = 0; i < 4; i++) check_layer(&d.layers[i], files[i]);

  /* One thread gives the same. */
  pds_engine_layout at = pds_layout_engine(&d.plan, 1);
  void *memory;
  CHECK_OK(pds_map_anon(at.total, "test", &memory));
  unsigned char *arena = memory;
  CHECK_OK(pds_pool_create(arena + at.pool, arena + at.workers, arena + at.stacks, 1));
  make(&d, &f->host, (pds_pool *)(arena + at.pool), &again, others);
  CHECK(memcmp(weights.copy, again.copy, weights.copy_bytes) == 0);
  pds_weights_unload(&d.plan, files, &weights);
  pds_weights_unload(&d.plan, others, &again);
  pds_pool_destroy((pds_pool *)(arena + at.pool));
  pds_unmap(memory, at.total);

  /* More than there is, is refused before the system kills the process for it. */
  d.files[0].bytes = (uint64_t)1 << 46;
  if (pds_host_memory("") != UINT64_MAX)
    CHECK_STATUS(pds_weights_load(&d.plan, -1, PDS_WEIGHTS_DUMMY, &f->host, f->pool, files, &again),
                 PDS_ERR_MEMORY, "dummy weights: 6710886");
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
  made_up(&f);
  cut_short(&f);
  for (uint32_t i = 0; i < FILES; i++) unlinkat(f.dir_fd, paths[i], 0);
  pds_pool_destroy(f.pool);
  pds_unmap(f.memory, f.bytes);
  close(f.dir_fd);
}
