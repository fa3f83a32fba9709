/* latent_tiles.h: where things lie in attend_mla.h's shared memory. */
#ifndef PDS_CUDA_LATENT_TILES_H
#define PDS_CUDA_LATENT_TILES_H

#include "tensor_tiles.h"

/* Latent keys are read by rows 4t + i, 8 bytes a thread, and as values by rows g, 16 bytes of panel t / 2
 * each: see pds_key_at. */
PDS_FN uint32_t latent_at(uint32_t panel, uint32_t row, uint32_t chunk, uint32_t rows) {
  const uint32_t slot = (row % 2 * 4 + chunk) ^ (row / 4 % 4 * 2) ^ panel % 2;
  return (panel * rows + row / 2 * 2) * 64 + slot * 16;
}

/* Of a pair's 32 scores, where those of tokens 2 word and 2 word + 1 are: pairs 2t, and four neighbouring
 * ones, in different banks. */
PDS_FN uint32_t score_word(uint32_t pair, uint32_t word) {
  return (word / 2 ^ (pair / 2 + pair % 2 * 2) % 4 * 2) * 4 + word % 2 * 2;
}

/* Where the word of weights of tokens 2 word and 2 word + 1 is, among the words of A that threads read
 * together: rows are 16 pairs, k = 32 tokens in two halves, and a thread has tokens 8t..8t+7. */
PDS_FN uint32_t weight_at(uint32_t pair, uint32_t word) {
  const uint32_t half = word / 2 % 2, lane = pair % 8 * 4 + word / 4;
  return ((pair / 16 * 2 + half) * 32 + (lane ^ lane / 8)) * 4 + pair / 8 % 2 + word % 2 * 2;
}
/* Where a thread's four words begin, in those of 16 pairs and half of k. */
PDS_FN uint32_t weights_of_thread(void) {
  return (PDS_LANE ^ PDS_LANE / 8) * 4;
}

/* The lower halves of two words, and the upper ones: a's in the lower half. */
PDS_FN uint32_t low_halves(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xffffu) | b << 16;
#endif
}
PDS_FN uint32_t high_halves(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  return __byte_perm(a, b, 0x7632);
#else
  return a >> 16 | (b & 0xffff0000u);
#endif
}

/* Rows g and g + 8 of n products times a factor each. */
PDS_FN void pds_scale_rows(float (*o)[4], uint32_t n, float low, float high) {
  if (low == 1 && high == 1) return;
  PDS_UNROLL
  for (uint32_t j = 0; j < n; j++) {
    o[j][0] *= low;
    o[j][1] *= low;
    o[j][2] *= high;
    o[j][3] *= high;
  }
}

#endif
