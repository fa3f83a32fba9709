/* case_base.c: CRC, CPU features and kernel paths, names, counts of times. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "cpu.h"
#include "crc.h"
#include "dispatch.h"
#include "host.h"
#include "memory.h"
#include "pdscope.h"
#include "pds_isa.h"
#include "spans.h"
#include "test.h"

static void crc(void) {
  CHECK_EQ(pds_crc32(0, "123456789", 9), 0xCBF43926); /* the check value of CRC-32/ISO-HDLC */
  CHECK_EQ(pds_crc32(pds_crc32(0, "12345", 5), "6789", 4), 0xCBF43926);
  CHECK_EQ(pds_crc32(0, "", 0), 0);
}

static void features(void) {
  size_t n = 0;
  CHECK(pds_cpu_missing("", &n) == NULL);
  CHECK(pds_cpu_missing("   ", &n) == NULL);
  const char *names = "nosuchfeature avx2", *missing = pds_cpu_missing(names, &n);
  CHECK(missing == names && n == strlen("nosuchfeature"));
#if defined(__x86_64__)
  CHECK(pds_cpu_missing("sse2", &n) == NULL);
  CHECK(!pds_cpu_has("sse", 2)); /* a name is compared whole */
#endif
}

static void host(void) {
  pds_host h;
  pds_host_read("", NULL, &h);
  CHECK(h.cpus >= 1 && h.cores >= 1 && h.cores <= h.cpus && h.nodes >= 1);
  CHECK(pds_host_threads(&h) >= 1 && pds_host_threads(&h) <= h.cores);
  CHECK(pds_host_memory("") > 0);
  pds_cpu_set core;
  pds_host_core(&h, h.cores, &core); /* one more than there are: shares the first one's */
  CHECK(pds_cpu_in(&core, h.first[0]));
}

static void paths(void) {
  const pds_isa_path *path;
  unsetenv("PDSCOPE_ISA");
  CHECK(strstr(pds_isa_built(), "scalar") && strstr(pds_isa_runnable(), "scalar"));
  CHECK_OK(pds_isa_choose(NULL, &path));
  CHECK(strncmp(path->name, pds_isa_runnable(), strlen(path->name)) ==
        0); /* the best comes first */
  CHECK_OK(pds_isa_choose("scalar", &path));
  CHECK(strcmp(path->name, "scalar") == 0 && strcmp(path->kernels()->name, "scalar") == 0);
  CHECK_STATUS(pds_isa_choose("mmx", &path), PDS_ERR_ISA, "possible: ");
  setenv("PDSCOPE_ISA", "vax", 1);
  CHECK_STATUS(pds_isa_choose(NULL, &path), PDS_ERR_ISA, "PDSCOPE_ISA: 'vax'");
  CHECK_OK(pds_isa_choose("scalar", &path)); /* the option goes first */
  setenv("PDSCOPE_ISA", "scalar", 1);
  CHECK_OK(pds_isa_choose(NULL, &path));
  CHECK(strcmp(path->name, "scalar") == 0);
  setenv("PDSCOPE_ISA", "", 1);
  CHECK_OK(pds_isa_choose(NULL, &path));
  unsetenv("PDSCOPE_ISA");
}

static void names(void) {
  CHECK_EQ(pds_abi_version(), PDS_ABI_VERSION);
  CHECK(strcmp(pds_opcode_name(PDS_OP_SHARED_EXPERT), "shared_expert") == 0);
  CHECK(strcmp(pds_opcode_name(200), "unknown opcode") == 0);
  CHECK(strcmp(pds_queue_name(PDS_QUEUE_H2D_DEMAND), "h2d.demand") == 0);
  CHECK(strcmp(pds_status_name(PDS_ERR_KV_FULL), "kv full") == 0);
  CHECK(strcmp(pds_status_name(12345), "unknown status") == 0);
  char big[2 * PDS_ERROR_BYTES];
  memset(big, 'x', sizeof big - 1);
  big[sizeof big - 1] = 0;
  CHECK_EQ(pds_fail(PDS_ERR_TOKEN, "%s", big), PDS_ERR_TOKEN);
  CHECK_EQ(strlen(pds_last_error()), PDS_ERROR_BYTES - 1);
}

/* Short times are counted one by one, longer ones within 1/32, whatever there are. */
static void spans(void) {
  pds_span_counts counts = {0};
  pds_spans found = pds_spans_of(&counts);
  CHECK(!found.n && !found.sum_ns && !found.least_ns && !found.median_ns && !found.most_ns);
  for (uint64_t ns = 1; ns < (uint64_t)1 << 40; ns += 1 + ns / 7) {
    memset(&counts, 0, sizeof counts);
    pds_spans_add(&counts, ns / 2);
    pds_spans_add(&counts, ns);
    pds_spans_add(&counts, ns + ns / 2);
    found = pds_spans_of(&counts);
    CHECK_EQ(found.n, 3);
    CHECK_EQ(found.sum_ns, ns / 2 + ns + ns + ns / 2);
    CHECK_EQ(found.least_ns, ns / 2);
    CHECK_EQ(found.most_ns, ns + ns / 2);
    const uint64_t median = found.median_ns, off = median > ns ? median - ns : ns - median;
    CHECK(ns >> 32 ? median >= (uint64_t)31 << 27 : off <= ns / 32);
  }
}

void case_base(void) {
  spans();
  crc();
  features();
  host();
  paths();
  names();
}
