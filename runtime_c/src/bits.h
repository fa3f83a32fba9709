/* bits.h: sets of small numbers, experts of a layer, as words of 64 bits. */
#ifndef PDS_BITS_H
#define PDS_BITS_H

#include <stdbool.h>
#include <stdint.h>

static inline uint32_t pds_words(uint32_t n) {
  return (n + 63) / 64;
}

static inline bool pds_has(const uint64_t *set, uint32_t i) {
  return set[i / 64] >> i % 64 & 1;
}

static inline void pds_put(uint64_t *set, uint32_t i) {
  set[i / 64] |= (uint64_t)1 << i % 64;
}

static inline void pds_take_out(uint64_t *set, uint32_t i) {
  set[i / 64] &= ~((uint64_t)1 << i % 64);
}

/* The lowest of a word that is not 0. */
static inline uint32_t pds_lowest(uint64_t word) {
  return (uint32_t)__builtin_ctzll(word);
}

static inline uint32_t pds_count(uint64_t word) {
  return (uint32_t)__builtin_popcountll(word);
}

#endif
