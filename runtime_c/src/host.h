/* host.h: what the machine gives this process: which cores of which NUMA nodes, how much processor
 * time, how much memory. Read from /proc, /sys and the cgroups when an engine is created. */
#ifndef PDS_HOST_H
#define PDS_HOST_H

#include <stdbool.h>
#include <stdint.h>

enum { PDS_MAX_CPUS = 1024, PDS_MAX_NODES = 64 };

/* Bit c of word c / 64: logical CPU c. */
typedef struct pds_cpu_set {
  uint64_t bits[PDS_MAX_CPUS / 64];
} pds_cpu_set;

static inline bool pds_cpu_in(const pds_cpu_set *set, uint32_t cpu) {
  return cpu < PDS_MAX_CPUS && (set->bits[cpu / 64] >> cpu % 64 & 1);
}

/* The cores that this process may use, in the order in which workers take them: one of each NUMA
 * node in turn, so that any number of workers has the memory channels of all nodes. */
typedef struct pds_host {
  uint32_t cpus;      /* logical CPUs: those of the affinity mask that are online; at least 1 */
  uint32_t cores;     /* physical cores that they belong to */
  uint32_t nodes;     /* NUMA nodes that these cores belong to */
  uint32_t quota;     /* CPUs' worth of the tightest cgroup quota, rounded up; 0: unlimited */
  bool whole;         /* the affinity mask leaves out no online CPU */
  uint64_t node_mask; /* bit n: node n is one of `nodes`; 0 where n exceeds 63 */
  pds_cpu_set usable; /* the logical CPUs */
  uint16_t first[PDS_MAX_CPUS];   /* [cores] lowest usable CPU of each core, in placement order */
  uint16_t core_of[PDS_MAX_CPUS]; /* [logical CPU] lowest CPU of its core, usable or not */
} pds_host;

/* Looks at the machine below the directory `root` ("": the real one). `affinity`: the mask to work
 * with; NULL: the calling thread's. What cannot be read counts as absent: no siblings, one node. */
void pds_host_read(const char *root, const pds_cpu_set *affinity, pds_host *out);

/* Workers to use where nobody says how many: one a physical core, within the quota. */
uint32_t pds_host_threads(const pds_host *host);

/* The CPUs of the core that worker `index` goes to; with more workers than cores they share. */
void pds_host_core(const pds_host *host, uint32_t index, pds_cpu_set *out);

/* Bytes that can be allocated without swapping: MemAvailable, cut to what the memory cgroups leave;
 * page cache counts as available. UINT64_MAX: unknown. */
uint64_t pds_host_memory(const char *root);

/* Bytes of huge pages in this process's mappings within [base, base + bytes), as the kernel tells;
 * 0 where it does not. Takes milliseconds. */
uint64_t pds_host_huge_bytes(const void *base, uint64_t bytes);

#endif
