/* read_ceiling THREADS SECONDS [GIB]: how fast this machine's cores read memory, in GB/s.
 *
 * Each thread reads its own part of one anonymous region, larger than the caches, again and again, with the widest
 * loads that the CPU has. Prints one number: the sum over threads. Build: cc -O3 -pthread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef uint64_t (*read_fn)(const unsigned char *p, size_t bytes);

static uint64_t read_portable(const unsigned char *p, size_t bytes) {
  const uint64_t *words = (const uint64_t *)p;
  uint64_t x[16] = {0};
  for (size_t i = 0; i < bytes / 8; i += 16)
    for (int j = 0; j < 16; j++) x[j] ^= words[i + j];
  for (int j = 1; j < 16; j++) x[0] ^= x[j];
  return x[0];
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static uint64_t read_avx512(const unsigned char *p, size_t n) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  for (const unsigned char *end = p + n; p < end; p += 256) {
    for (int line = 0; line < 256; line += 64)
      _mm_prefetch((const char *)p + 4096 + line, _MM_HINT_T0);
    a = _mm512_xor_si512(a, _mm512_load_si512(p));
    b = _mm512_xor_si512(b, _mm512_load_si512(p + 64));
    c = _mm512_xor_si512(c, _mm512_load_si512(p + 128));
    d = _mm512_xor_si512(d, _mm512_load_si512(p + 192));
  }
  a = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
  return (uint64_t)_mm512_reduce_add_epi64(a);
}

__attribute__((target("avx2"))) static uint64_t read_avx2(const unsigned char *p, size_t bytes) {
  __m256i x[8];
  for (int i = 0; i < 8; i++) x[i] = _mm256_setzero_si256();
  for (const unsigned char *end = p + bytes; p < end; p += 256) {
    for (int line = 0; line < 256; line += 64)
      _mm_prefetch((const char *)p + 4096 + line, _MM_HINT_T0);
    for (int i = 0; i < 8; i++)
      x[i] = _mm256_xor_si256(x[i], _mm256_load_si256((const __m256i *)p + i));
  }
  for (int i = 1; i < 8; i++) x[0] = _mm256_xor_si256(x[0], x[i]);
  uint64_t out[4];
  memcpy(out, &x[0], sizeof out);
  return out[0] ^ out[1] ^ out[2] ^ out[3];
}
#endif

static read_fn widest(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return read_avx512;
  if (__builtin_cpu_supports("avx2")) return read_avx2;
#endif
  return read_portable;
}

typedef struct worker {
  unsigned char *part;
  size_t bytes;
  double seconds, rate;
  uint64_t sink;
  pthread_barrier_t *start;
} worker;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *argument) {
  worker *w = argument;
  read_fn read_all = widest();
  memset(w->part, 1, w->bytes); /* touched by the thread that reads it */
  pthread_barrier_wait(w->start);
  double begin = now(), end = begin, total = 0;
  while (end - begin < w->seconds) {
    w->sink ^= read_all(w->part, w->bytes);
    total += (double)w->bytes;
    end = now();
  }
  w->rate = total / (end - begin);
  return NULL;
}

int main(int argc, char **argv) {
  int threads = argc > 1 ? atoi(argv[1]) : 0;
  double seconds = argc > 2 ? atof(argv[2]) : 0, gib = argc > 3 ? atof(argv[3]) : 2;
  if (threads < 1 || threads > 1024 || seconds <= 0 || gib <= 0) {
    fprintf(stderr, "usage: read_ceiling THREADS SECONDS [GIB]\n");
    return 2;
  }
  size_t part = (size_t)(gib * (double)(1u << 30)) / (size_t)threads / 4096 * 4096;
  unsigned char *region = mmap(NULL, part * (size_t)threads + 8192, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  worker *workers = calloc((size_t)threads, sizeof *workers);
  pthread_t *handles = calloc((size_t)threads, sizeof *handles);
  pthread_barrier_t start;
  if (region == MAP_FAILED || !workers || !handles) {
    fprintf(stderr, "read_ceiling: no memory for %.1f GiB\n", gib);
    return 1;
  }
  madvise(region, part * (size_t)threads, MADV_HUGEPAGE);
  pthread_barrier_init(&start, NULL, (unsigned)threads);
  for (int i = 0; i < threads; i++) {
    workers[i] = (worker){region + part * (size_t)i, part, seconds, 0, 0, &start};
    if (pthread_create(&handles[i], NULL, work, &workers[i])) return 1;
  }
  double rate = 0;
  uint64_t sink = 0;
  for (int i = 0; i < threads; i++) {
    pthread_join(handles[i], NULL);
    rate += workers[i].rate;
    sink ^= workers[i].sink;
  }
  printf("%.2f\n", rate / 1e9 + (sink == 12345 ? 1e-9 : 0)); /* the sink keeps the loads alive */
  return 0;
}
