/* cpu.c: CPU features by CPUID and XGETBV. */
#define _GNU_SOURCE
#include "cpu.h"

#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <pthread.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#if defined(__x86_64__)

enum { EAX, EBX, ECX, EDX };
enum {
  XMM_YMM = 0x6,
  OPMASK_ZMM = 0xE6,
  TILES = 0x60006,
  TILE_DATA = 18
}; /* XCR0 bits (Intel SDM vol. 1, 13.3) */

typedef struct cpu_feature {
  const char *name;
  uint32_t leaf, subleaf, reg, bit, xcr0;
} cpu_feature;

/* Intel SDM vol. 2A, CPUID. */
static const cpu_feature features[] = {
    {"sse", 1, 0, EDX, 25, 0},
    {"sse2", 1, 0, EDX, 26, 0},
    {"pni", 1, 0, ECX, 0, 0},
    {"sse3", 1, 0, ECX, 0, 0}, /* archspec's name of Linux's pni */
    {"ssse3", 1, 0, ECX, 9, 0},
    {"sse4_1", 1, 0, ECX, 19, 0},
    {"sse4_2", 1, 0, ECX, 20, 0},
    {"popcnt", 1, 0, ECX, 23, 0},
    {"movbe", 1, 0, ECX, 22, 0},
    {"avx", 1, 0, ECX, 28, XMM_YMM},
    {"fma", 1, 0, ECX, 12, XMM_YMM},
    {"f16c", 1, 0, ECX, 29, XMM_YMM},
    {"bmi1", 7, 0, EBX, 3, 0},
    {"avx2", 7, 0, EBX, 5, XMM_YMM},
    {"bmi2", 7, 0, EBX, 8, 0},
    {"avx_vnni", 7, 1, EAX, 4, XMM_YMM},
    {"avx512f", 7, 0, EBX, 16, OPMASK_ZMM},
    {"avx512dq", 7, 0, EBX, 17, OPMASK_ZMM},
    {"avx512cd", 7, 0, EBX, 28, OPMASK_ZMM},
    {"avx512bw", 7, 0, EBX, 30, OPMASK_ZMM},
    {"avx512vl", 7, 0, EBX, 31, OPMASK_ZMM},
    {"avx512vbmi", 7, 0, ECX, 1, OPMASK_ZMM},
    {"avx512_vnni", 7, 0, ECX, 11, OPMASK_ZMM},
    {"avx512_bf16", 7, 1, EAX, 5, OPMASK_ZMM},
    {"avx512_fp16", 7, 0, EDX, 23, OPMASK_ZMM},
    {"amx_bf16", 7, 0, EDX, 22, TILES},
    {"amx_tile", 7, 0, EDX, 24, TILES},
    {"amx_int8", 7, 0, EDX, 25, TILES},
};

static uint64_t saved_registers(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0; /* OSXSAVE */
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

/* Linux gives tile registers to processes that ask (Documentation/arch/x86/xstate.rst): for all
 * threads, and not back. Asked once, and only by those who ask for an AMX feature. */
static pthread_once_t tiles_once = PTHREAD_ONCE_INIT;
static bool tiles_permitted;

static void ask_for_tiles(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
  enum { ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023 };
  uint64_t granted = 0;
  tiles_permitted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 &&
                    syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &granted) == 0 &&
                    (granted >> TILE_DATA & 1);
#endif
}

static bool has_registers(const cpu_feature *f) {
  if ((saved_registers() & f->xcr0) != f->xcr0) return false;
  if (f->xcr0 != TILES) return true;
  pthread_once(&tiles_once, ask_for_tiles);
  return tiles_permitted;
}

bool pds_cpu_has(const char *name, size_t length) {
  for (size_t i = 0; i < sizeof features / sizeof *features; i++) {
    const cpu_feature *f = &features[i];
    if (strlen(f->name) != length || memcmp(f->name, name, length) != 0) continue;
    uint32_t r[4];
    if (!__get_cpuid_count(f->leaf, f->subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return false;
    return (r[f->reg] >> f->bit & 1) && has_registers(f);
  }
  return false;
}

#elif defined(__aarch64__) && defined(__linux__)

bool pds_cpu_has(const char *name, size_t length) {
  static const struct {
    const char *name;
    unsigned long bit; /* of AT_HWCAP (arch/arm64/include/uapi/asm/hwcap.h) */
  } features[] = {{"fp", 1ul << 0},       {"asimd", 1ul << 1},    {"fphp", 1ul << 9},
                  {"asimdhp", 1ul << 10}, {"asimddp", 1ul << 20}, {"sve", 1ul << 22}};
  for (size_t i = 0; i < sizeof features / sizeof *features; i++)
    if (strlen(features[i].name) == length && memcmp(features[i].name, name, length) == 0)
      return (getauxval(AT_HWCAP) & features[i].bit) != 0;
  return false;
}

#else

bool pds_cpu_has(const char *name, size_t length) {
  (void)name;
  (void)length;
  return false;
}

#endif

const char *pds_cpu_missing(const char *names, size_t *out_length) {
  while (*names) {
    size_t length = strcspn(names, " ");
    if (length && !pds_cpu_has(names, length)) {
      *out_length = length;
      return names;
    }
    names += length;
    names += strspn(names, " ");
  }
  return NULL;
}

/* Data cache of a level, by CPUID leaf 4 (Intel SDM vol. 2A); 0 if it does not say. */
static uint64_t cpuid_cache_bytes(uint32_t level) {
#if defined(__x86_64__)
  for (uint32_t i = 0; i < 8; i++) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(4, i, &a, &b, &c, &d) || (a & 31) == 0) break;
    if ((a >> 5 & 7) != level || (a & 31) == 2) continue; /* another level, or instructions */
    return ((uint64_t)(b >> 22) + 1) * ((b >> 12 & 1023) + 1) * ((b & 4095) + 1) *
           ((uint64_t)c + 1);
  }
#endif
  (void)level;
  return 0;
}

uint32_t pds_cpu_l2_bytes(void) {
  long bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
  if (bytes <= 0) bytes = (long)cpuid_cache_bytes(2);
  return bytes > 0 && bytes <= 64 * 1024 * 1024 ? (uint32_t)bytes : 0;
}

uint64_t pds_cpu_l3_bytes(void) {
  long bytes = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return bytes > 0 ? (uint64_t)bytes : cpuid_cache_bytes(3);
}
