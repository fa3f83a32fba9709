/* inline.h: how the kernel files ask compilers for inlining, unrolling and prefetching. */
#ifndef PDS_INLINE_H
#define PDS_INLINE_H

#include <stdint.h>
#include <string.h>

#define PDS_INLINE static inline __attribute__((always_inline))

/* Tiles are loops over constants that must become straight code, or accumulators stay in memory. */
#ifdef __clang__
#define PDS_UNROLL _Pragma("clang loop unroll(full)")
#define PDS_UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define PDS_UNROLL _Pragma("GCC unroll 16")
#define PDS_UNROLL_4 _Pragma("GCC unroll 4")
#endif

PDS_INLINE int32_t pds_load_word(const void *p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

#endif
