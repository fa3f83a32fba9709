/* key_to_value.h: latent keys as values (pds_act_kernels.key_to_value), in plain C for every path. */
#ifndef PDS_KEY_TO_VALUE_H
#define PDS_KEY_TO_VALUE_H

#include <string.h>

#include "inline.h"
#include "kernels.h"

static void f32_key_to_value(const void *keys, size_t key_stride, uint32_t dims, uint32_t tokens, void *values) {
  for (uint32_t d0 = 0; d0 < dims; d0 += PDS_LANES) {
    float *panel = (float *)values + (size_t)d0 * PDS_KEYS;
    for (uint32_t t = 0; t < tokens; t++) {
      const float *key = (const float *)((const unsigned char *)keys + (t / PDS_LANES) * key_stride) + t % PDS_LANES;
      for (uint32_t j = 0; j < PDS_LANES; j++) panel[t * PDS_LANES + j] = key[(size_t)(d0 + j) * PDS_LANES];
    }
  }
}

/* Key word (row d / 2, lane t) holds dimensions d and d + 1 of token t; value word (row t / 2, lane d) tokens t and
 * t + 1 of dimension d: so two words of neighbouring tokens become two words of neighbouring dimensions. */
static void bf16_key_to_value(const void *keys, size_t key_stride, uint32_t dims, uint32_t tokens, void *values) {
  for (uint32_t d0 = 0; d0 < dims; d0 += PDS_LANES) {
    uint32_t *panel = (uint32_t *)values + (size_t)d0 * (PDS_KEYS / 2);
    for (uint32_t t = 0; t < tokens; t += 2) {
      const uint32_t *key =
          (const uint32_t *)((const unsigned char *)keys + (t / PDS_LANES) * key_stride) + t % PDS_LANES;
      uint32_t *row = panel + (size_t)(t / 2) * PDS_LANES;
      const uint32_t keep = t + 1 < tokens ? 0xffffffffu : 0; /* the odd one out pairs with zero */
      for (uint32_t j = 0; j < PDS_LANES; j += 2) {
        const uint32_t a = key[(size_t)((d0 + j) / 2) * PDS_LANES];
        const uint32_t b = key[(size_t)((d0 + j) / 2) * PDS_LANES + 1] & keep;
        row[j] = (a & 0xffffu) | (b << 16);
        row[j + 1] = (a >> 16) | (b & 0xffff0000u);
      }
    }
  }
}

#endif
