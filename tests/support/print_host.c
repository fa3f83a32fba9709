/* print_host.c: what pds_host_read says of the machine below a directory, as JSON, for tests with
 * fake ones. `print_host ROOT [CPU...]`: the CPUs are the affinity mask; none: the real one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host.h"

static void print_set(const pds_cpu_set *set) {
  const char *comma = "";
  putchar('[');
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++) {
    if (!pds_cpu_in(set, cpu)) continue;
    printf("%s%u", comma, cpu);
    comma = ",";
  }
  putchar(']');
}

int main(int argc, char **argv) {
  pds_host host;
  pds_cpu_set affinity;
  memset(&affinity, 0, sizeof affinity);
  for (int i = 2; i < argc; i++) {
    unsigned cpu = (unsigned)atoi(argv[i]);
    affinity.bits[cpu / 64] |= (uint64_t)1 << cpu % 64;
  }
  pds_host_read(argv[1], argc > 2 ? &affinity : NULL, &host);
  printf("{\"cpus\":%u,\"cores\":%u,\"nodes\":%u,\"quota\":%u,\"whole\":%s,\"node_mask\":%llu,",
         host.cpus, host.cores, host.nodes, host.quota, host.whole ? "true" : "false",
         (unsigned long long)host.node_mask);
  printf("\"threads\":%u,\"memory\":%llu,\"first\":[", pds_host_threads(&host),
         (unsigned long long)pds_host_memory(argv[1]));
  for (uint32_t i = 0; i < host.cores; i++) printf("%s%u", i ? "," : "", host.first[i]);
  printf("],\"sets\":[");
  for (uint32_t i = 0; i <= host.cores; i++) {
    pds_cpu_set core;
    pds_host_core(&host, i, &core);
    if (i) putchar(',');
    print_set(&core);
  }
  puts("]}");
  return 0;
}
