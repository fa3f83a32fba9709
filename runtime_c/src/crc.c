/* crc.c: CRC-32 by slices of 8 bytes (Kounavis and Berry, 2005): about 2 GB/s. */
#include "crc.h"

#include <pthread.h>

static uint32_t table[8][256];
static pthread_once_t table_once = PTHREAD_ONCE_INIT;

static void fill_table(void) {
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
    table[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; i++)
    for (int slice = 1; slice < 8; slice++)
      table[slice][i] = table[0][table[slice - 1][i] & 0xFF] ^ table[slice - 1][i] >> 8;
}

uint32_t pds_crc32(uint32_t crc, const void *bytes, size_t n) {
  pthread_once(&table_once, fill_table);
  const unsigned char *p = bytes;
  uint32_t c = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    uint32_t low =
        c ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    c = table[7][low & 0xFF] ^ table[6][low >> 8 & 0xFF] ^ table[5][low >> 16 & 0xFF] ^
        table[4][low >> 24] ^ table[3][p[4]] ^ table[2][p[5]] ^ table[1][p[6]] ^ table[0][p[7]];
  }
  for (; n > 0; n--, p++) c = table[0][(c ^ *p) & 0xFF] ^ c >> 8;
  return ~c;
}
