/* fuzz_programs.c: reads program.bin files, changes bytes, mends the CRC, and runs the reader
 * and the verifier on them. Meant for sanitizers: an exact-sized heap copy of each input shows
 * every read beyond it. usage: fuzz_programs ITERATIONS FILE... ; prints how many inputs were
 * malformed, refused and accepted. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "crc.h"
#include "program.h"

static uint64_t state = 88172645463325252u;

static uint32_t draw(uint32_t n) { /* xorshift64 */
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 32) % n;
}

static void mend(unsigned char *bytes, size_t n) {
  pds_program_header *h = (pds_program_header *)bytes;
  h->crc32 = pds_crc32(pds_crc32(0, bytes, 60), bytes + 64, n - 64);
}

static unsigned char *load(const char *path, size_t *out_bytes) {
  FILE *f = fopen(path, "rb");
  if (!f || fseek(f, 0, SEEK_END)) exit(2);
  *out_bytes = (size_t)ftell(f);
  rewind(f);
  unsigned char *bytes = malloc(*out_bytes);
  if (!bytes || fread(bytes, 1, *out_bytes, f) != *out_bytes) exit(2);
  fclose(f);
  return bytes;
}

int main(int argc, char **argv) {
  long counts[3] = {0};
  long iterations = argc > 2 ? atol(argv[1]) : 0;
  for (int a = 2; a < argc; a++) {
    size_t n;
    unsigned char *base = load(argv[a], &n);
    for (long k = 0; k < iterations; k++) {
      size_t size = draw(16) ? n : draw((uint32_t)n + 1);
      unsigned char *input = malloc(size ? size : 1);
      if (!input) return 2;
      memcpy(input, base, size);
      for (uint32_t times = draw(4); size && times-- > 0;) {
        static const unsigned char odd[] = {0, 1, 2, 3, 16, 127, 128, 254, 255};
        size_t at = draw(4) ? draw((uint32_t)size) : draw(64) % size;
        input[at] = draw(2) ? odd[draw(sizeof odd)] : input[at] ^ 1u << draw(8);
      }
      if (size >= 64 && draw(8)) {
        if (size != n) memcpy(input + 16, &(uint64_t){size}, 8); /* the header's own size */
        mend(input, size);
      }
      pds_programs programs;
      pds_status status = pds_programs_open(input, size, &programs);
      if (status == PDS_OK) {
        for (uint32_t i = 0; i < programs.n_programs && !status; i++)
          status = pds_program_verify_one(&programs, i);
        if (!status) status = pds_programs_verify_sequence(&programs);
        (void)pds_programs_phase(&programs, draw(64));
      }
      if (status != PDS_OK && status != PDS_ERR_PLAN_FORMAT && status != PDS_ERR_VERIFY) return 3;
      counts[status == PDS_OK ? 2 : status == PDS_ERR_VERIFY]++;
      free(input);
    }
    free(base);
  }
  printf("malformed %ld, refused %ld, accepted %ld\n", counts[0], counts[1], counts[2]);
  return 0;
}
