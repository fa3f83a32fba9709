/* ceilings THREADS [GIB]: what this machine's cores can do at most, one measurement for each line
 * "MODE SECONDS" on the standard input, so that other work can run between them.
 *
 *   read   memory reads, GB/s: each thread reads its own part of one anonymous region, larger than
 *          the caches (GIB, 2 by default), again and again, with the widest loads that the CPU has.
 *          Seconds 0: once, which leaves nothing else in the caches
 *   fma    fp32 multiply-adds, GFLOP/s        bf16   vdpbf16ps, GFLOP/s
 *   vnni   vpdpbusd on int8, Gop/s            amx    tdpbf16ps, GFLOP/s       amx8   tdpbusd, Gop/s
 *   tiles  tdpbf16ps, GFLOP/s, with three tiles loaded for two products, from the first-level
 *          cache, and few tile registers: about what a GEMM can have of amx at most. More registers
 *          save loads, but are slower where another thread shares the core
 *
 * All but read and tiles on registers alone. Answers one number, the sum over threads, or "absent" where the
 * CPU or the operating system lacks the instruction. Between measurements the threads sleep.
 * Build: cc -O3 -pthread. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
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
/* The CPU has a feature (CPUID leaf, sub-leaf, register a-d as 0-3, bit) and the operating system
 * saves the registers of these XCR0 bits. */
static int has(unsigned leaf, unsigned subleaf, int reg, int bit, unsigned xcr0) {
  unsigned r[4], low, high;
  if (!__get_cpuid(1, &r[0], &r[1], &r[2], &r[3]) || !(r[2] >> 27 & 1)) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3])) return 0;
  return (r[reg] >> bit & 1) && (low & xcr0) == xcr0;
}

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

/* Compute: `rounds` rounds of 16 operations on 16 accumulators (tiles: 4 on 4 or 2 on 2, which hide
 * the latency as well). Each returns the operations done: a multiply-add is two. */
typedef double (*compute_fn)(int rounds, float *sink);

/* What the compiler makes of it: on 64-bit Arm, fused multiply-adds on vectors of four. */
static double fma_portable(int rounds, float *sink) {
  float sum[64] = {0}, a = *sink, b = 0.5f;
  for (int r = 0; r < rounds; r++)
    for (int i = 0; i < 64; i++) sum[i] += a * b;
  for (int i = 0; i < 64; i++) *sink += sum[i];
  return rounds * 64.0 * 2;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static double fma_avx512(int rounds, float *sink) {
  __m512 sum[16], a = _mm512_set1_ps(*sink), b = _mm512_set1_ps(0.5f);
  for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
  for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_fmadd_ps(a, b, sum[i]);
  }
  for (int i = 0; i < 16; i++) *sink += _mm512_reduce_add_ps(sum[i]);
  return rounds * 16.0 * 32;
}

__attribute__((target("avx2,fma"))) static double fma_avx2(int rounds, float *sink) {
  __m256 sum[12], a = _mm256_set1_ps(*sink), b = _mm256_set1_ps(0.5f);
  for (int i = 0; i < 12; i++) sum[i] = _mm256_setzero_ps();
  for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) sum[i] = _mm256_fmadd_ps(a, b, sum[i]);
  }
  for (int i = 0; i < 12; i++) *sink += _mm256_cvtss_f32(sum[i]);
  return rounds * 12.0 * 16;
}

__attribute__((target("avx512f,avx512bf16"))) static double dot_bf16(int rounds, float *sink) {
  __m512 sum[16];
  __m512bh a, b;
  memset(&a, *sink != 0, sizeof a);
  memset(&b, 0, sizeof b);
  for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
  for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
  }
  for (int i = 0; i < 16; i++) *sink += _mm512_reduce_add_ps(sum[i]);
  return rounds * 16.0 * 64;
}

__attribute__((target("avx512f,avx512vnni"))) static double dot_int8(int rounds, float *sink) {
  __m512i sum[16], a = _mm512_set1_epi8((char)*sink), b = _mm512_setzero_si512();
  for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_si512();
  for (int r = 0; r < rounds; r++) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], a, b);
  }
  for (int i = 0; i < 16; i++) *sink += (float)_mm512_reduce_add_epi32(sum[i]);
  return rounds * 16.0 * 128;
}

/* Intel SDM, LDTILECFG, palette 1: eight tiles of 16 rows of 64 bytes. */
#define TILES_8x16                                                                                 \
  struct {                                                                                         \
    uint8_t palette, start_row, reserved[14];                                                      \
    uint16_t row_bytes[16];                                                                        \
    uint8_t rows[16];                                                                              \
  } config = {.palette = 1};                                                                       \
  for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = 16;                       \
  __asm__ volatile("" ::"m"(config)); /* gcc takes ldtilecfg to read 8 bytes of it */              \
  _tile_loadconfig(&config);                                                                       \
  _tile_zero(0);                                                                                   \
  _tile_zero(1);                                                                                   \
  _tile_zero(2);                                                                                   \
  _tile_zero(3);                                                                                   \
  _tile_zero(4);                                                                                   \
  _tile_zero(5);                                                                                   \
  _tile_zero(6);                                                                                   \
  _tile_zero(7)

__attribute__((target("amx-tile,amx-bf16"))) static double tile_bf16(int rounds, float *sink) {
  (void)sink;
  TILES_8x16;
  for (int r = 0; r < rounds; r++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4.0 * 2 * 16 * 16 * 32;
}

__attribute__((target("amx-tile,amx-int8"))) static double tile_int8(int rounds, float *sink) {
  (void)sink;
  TILES_8x16;
  for (int r = 0; r < rounds; r++) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
  return rounds * 4.0 * 2 * 16 * 16 * 64;
}

__attribute__((target("amx-tile,amx-bf16"))) static double tile_loads(int rounds, float *sink) {
  unsigned char operands[3][1024] __attribute__((aligned(64)));
  memset(operands, *sink != 0, sizeof operands);
  TILES_8x16;
  for (int r = 0; r < rounds; r++) {
    _tile_loadd(4, operands[0], 64);
    _tile_loadd(6, operands[1], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, operands[2], 64);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_release();
  return rounds * 2.0 * 2 * 16 * 16 * 32;
}

/* Linux's leave to use tile registers. */
static int tiles_permitted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
#else
  return 0;
#endif
}

static compute_fn compute_of(const char *mode) {
  const int wide = has(7, 0, 1, 16, 0xE6), tiles = has(7, 0, 3, 24, 0x60006);
  if (!strcmp(mode, "fma") && wide) return fma_avx512;
  if (!strcmp(mode, "fma") && has(7, 0, 1, 5, 6) && has(1, 0, 2, 12, 6)) return fma_avx2;
  if (!strcmp(mode, "fma")) return fma_portable;
  if (!strcmp(mode, "bf16") && wide && has(7, 1, 0, 5, 0xE6)) return dot_bf16;
  if (!strcmp(mode, "vnni") && wide && has(7, 0, 2, 11, 0xE6)) return dot_int8;
  if (!strcmp(mode, "amx") && tiles && has(7, 0, 3, 22, 0) && tiles_permitted()) return tile_bf16;
  if (!strcmp(mode, "tiles") && tiles && has(7, 0, 3, 22, 0) && tiles_permitted())
    return tile_loads;
  if (!strcmp(mode, "amx8") && tiles && has(7, 0, 3, 25, 0) && tiles_permitted()) return tile_int8;
  return NULL;
}
#else
static compute_fn compute_of(const char *mode) {
  return strcmp(mode, "fma") ? NULL : fma_portable;
}
#endif

static read_fn widest(void) {
#if defined(__x86_64__)
  if (has(7, 0, 1, 16, 0xE6)) return read_avx512;
  if (has(7, 0, 1, 5, 6)) return read_avx2;
#endif
  return read_portable;
}

/* What the threads do next; written between two meetings at the barrier. */
static struct {
  compute_fn compute; /* NULL: read */
  double seconds;
  int done;
  pthread_barrier_t barrier;
} task;

typedef struct worker {
  unsigned char *part;
  size_t bytes;
  double rate;
  uint64_t sink;
} worker;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *work(void *argument) {
  worker *w = argument;
  read_fn read_all = widest();
  float zero = 0;
  memset(w->part, 1, w->bytes); /* touched by the thread that reads it */
  for (;;) {
    pthread_barrier_wait(&task.barrier);
    if (task.done) return NULL;
    double begin = now(), end, total = 0;
    do {
      if (task.compute) {
        total += task.compute(20000, &zero);
      } else {
        w->sink ^= read_all(w->part, w->bytes);
        total += (double)w->bytes;
      }
      end = now();
    } while (end - begin < task.seconds);
    w->sink ^= zero != 0;
    w->rate = total / (end - begin);
    pthread_barrier_wait(&task.barrier);
  }
}

static void answer(const char *mode, double seconds, const worker *workers, int threads) {
  task.compute = compute_of(mode);
  task.seconds = seconds;
  if (!task.compute && strcmp(mode, "read") != 0) {
    puts("absent");
  } else {
    pthread_barrier_wait(&task.barrier);
    pthread_barrier_wait(&task.barrier);
    double rate = 0;
    uint64_t sink = 0;
    for (int i = 0; i < threads; i++) rate += workers[i].rate, sink ^= workers[i].sink;
    printf("%.2f\n", rate / 1e9 + (sink == 12345 ? 1e-9 : 0)); /* the sink keeps the loads alive */
  }
  fflush(stdout);
}

int main(int argc, char **argv) {
  const int threads = argc > 1 ? atoi(argv[1]) : 0;
  const double gib = argc > 2 ? atof(argv[2]) : 2;
  if (threads < 1 || threads > 1024 || gib <= 0) {
    fprintf(stderr,
            "usage: ceilings THREADS [GIB] <lines of: read|fma|bf16|vnni|amx|tiles|amx8 SECONDS\n");
    return 2;
  }
  size_t part = (size_t)(gib * (double)(1u << 30)) / (size_t)threads / 4096 * 4096;
  unsigned char *region = mmap(NULL, part * (size_t)threads + 8192, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  worker *workers = calloc((size_t)threads, sizeof *workers);
  pthread_t *handles = calloc((size_t)threads, sizeof *handles);
  if (region == MAP_FAILED || !workers || !handles) {
    fprintf(stderr, "ceilings: no memory for %.1f GiB\n", gib);
    return 1;
  }
  madvise(region, part * (size_t)threads, MADV_HUGEPAGE);
  pthread_barrier_init(&task.barrier, NULL, (unsigned)threads + 1);
  compute_of("amx"); /* asks for the tile registers before there are threads */
  for (int i = 0; i < threads; i++) {
    workers[i] = (worker){region + part * (size_t)i, part, 0, 0};
    if (pthread_create(&handles[i], NULL, work, &workers[i])) return 1;
  }
  char line[64], mode[16];
  double seconds;
  while (fgets(line, sizeof line, stdin) && sscanf(line, "%15s %lf", mode, &seconds) == 2)
    answer(mode, seconds, workers, threads);
  task.done = 1;
  pthread_barrier_wait(&task.barrier);
  for (int i = 0; i < threads; i++) pthread_join(handles[i], NULL);
  return 0;
}
