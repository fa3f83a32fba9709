/* key_to_value.h: latent keys as values (pds_act_kernels.key_to_value), in plain C for every
 * path. */
#ifndef PDS_KEY_TO_VALUE_H
#define PDS_KEY_TO_VALUE_H

#include <string.h>

#include "inline.h"
#include "kernels.h"

static void f32_key_to_value(const void *keys, size_t key_stride, uint32_t dims, uint32_t tokens,
                             void *values) {
  for (uint32_t d0 = 0; d0 < dims; d0 += PDS_LANES) {
    const uint32_t n = dims - d0 < PDS_LANES ? dims - d0 : PDS_LANES;
    float *panel = (float *)values + (size_t)d0 * PDS_KEYS;
    for (uint32_t t = 0; t < tokens; t++, panel += PDS_LANES) {
      const unsigned char *key = (const unsigned char *)keys + t / PDS_LANES * key_stride +
                                 (size_t)d0 * 64 + t % PDS_LANES * 4;
      for (uint32_t j = 0; j < n; j++) memcpy(&panel[j], key + (size_t)j * 64, sizeof *panel);
      for (uint32_t j = n; j < PDS_LANES; j++) panel[j] = 0;
    }
  }
}

/* Key word (row d / 2, lane t) holds dimensions d and d + 1 of token t; value word (row t / 2,
 * lane d) tokens t and t + 1 of dimension d: so two words of neighbouring tokens become two words
 * of neighbouring dimensions. */
static void bf16_key_to_value(const void *keys, size_t key_stride, uint32_t dims, uint32_t tokens,
                              void *values) {
  for (uint32_t d0 = 0; d0 < dims; d0 += PDS_LANES) {
    const uint32_t n = dims - d0 < PDS_LANES ? dims - d0 : PDS_LANES;
    uint32_t *panel = (uint32_t *)values + (size_t)d0 * (PDS_KEYS / 2);
    for (uint32_t t = 0; t < tokens; t += 2, panel += PDS_LANES) {
      const unsigned char *key = (const unsigned char *)keys + t / PDS_LANES * key_stride +
                                 (size_t)(d0 / 2) * 64 + t % PDS_LANES * 4;
      const uint32_t keep = t + 1 < tokens ? 0xffffffffu : 0; /* the odd one out pairs with zero */
      for (uint32_t j = 0; j < PDS_LANES; j += 2) {
        uint32_t pair[2] = {0, 0}; /* of tokens t and t + 1 */
        if (j < n) memcpy(pair, key + (size_t)(j / 2) * 64, sizeof pair);
        pair[1] &= keep;
        panel[j] = (pair[0] & 0xffffu) | (pair[1] << 16);
        panel[j + 1] = j + 1 < n ? (pair[0] >> 16) | (pair[1] & 0xffff0000u) : 0;
      }
    }
  }
}

#endif
