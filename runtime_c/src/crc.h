/* crc.h: CRC-32 (ISO-HDLC, as in zlib and gzip) of saved sequences. */
#ifndef PDS_CRC_H
#define PDS_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 to begin) over n bytes; equals zlib's crc32(). */
uint32_t pds_crc32(uint32_t crc, const void *bytes, size_t n);

#endif
