/* cpu.h: what this CPU and operating system can run.
 * Feature names are those of Linux's /proc/cpuinfo and of archspec: avx2 fma f16c avx512f
 * avx512_bf16 ... */
#ifndef PDS_CPU_H
#define PDS_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* True if the CPU has the feature and the operating system saves the registers that it needs
 * (XCR0). `name` need not end in a zero byte. Unknown names are absent. */
bool pds_cpu_has(const char *name, size_t length);

/* First of the space-separated `features` that is absent, or NULL; *out_length is its length. */
const char *pds_cpu_missing(const char *features, size_t *out_length);

/* The second-level cache of a core, and the third-level one that cores share, in bytes; 0 if nobody
 * says. */
uint32_t pds_cpu_l2_bytes(void);
uint64_t pds_cpu_l3_bytes(void);

/* Results must not depend on the caller's flush-to-zero and rounding modes: the step and every
 * worker run under the default ones. Returns what pds_fp_restore() takes back. */
static inline uint32_t pds_fp_default(void) {
#if defined(__x86_64__)
  uint32_t old = _mm_getcsr();
  _mm_setcsr(0x1F80);
  return old;
#else
  return 0;
#endif
}

static inline void pds_fp_restore(uint32_t old) {
#if defined(__x86_64__)
  _mm_setcsr(old);
#else
  (void)old;
#endif
}

static inline void pds_cpu_relax(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#endif
