/* host.c: topology from sysfs, quotas and limits from cgroups of both versions. No stdio streams,
 * which would allocate. */
#define _GNU_SOURCE
#include "host.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__linux__)
#include <sched.h>
#endif

enum { PATH_BYTES = 2048, LIST_BYTES = 8192 };

/* Reads a small text file of the machine below `root`. False if it cannot be read. */
static bool read_text(const char *root, const char *path, char *buffer, size_t size) {
  char full[PATH_BYTES];
  int length = snprintf(full, sizeof full, "%s%s", root, path);
  if (length < 0 || (size_t)length >= sizeof full) return false;
  int fd = open(full, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  size_t done = 0;
  for (ssize_t n; done < size - 1 && (n = read(fd, buffer + done, size - 1 - done)) > 0;)
    done += (size_t)n;
  close(fd);
  buffer[done] = 0;
  return done > 0;
}

/* --- lists of CPUs and nodes: "0-3,8,10-11" --- */

static void add(pds_cpu_set *set, uint32_t cpu) {
  if (cpu < PDS_MAX_CPUS) set->bits[cpu / 64] |= (uint64_t)1 << cpu % 64;
}

static void parse_list(const char *text, pds_cpu_set *out) {
  memset(out, 0, sizeof *out);
  for (char *rest; *text; text = *rest == ',' ? rest + 1 : "") {
    unsigned long first = strtoul(text, &rest, 10), last = first;
    if (rest == text) return;
    if (*rest == '-') last = strtoul(rest + 1, &rest, 10);
    for (; first <= last && first < PDS_MAX_CPUS; first++) add(out, (uint32_t)first);
  }
}

/* False if the file is absent or names nothing. */
static bool read_list(const char *root, const char *path, pds_cpu_set *out) {
  char text[LIST_BYTES];
  if (!read_text(root, path, text, sizeof text)) return false;
  parse_list(text, out);
  for (uint32_t i = 0; i < PDS_MAX_CPUS / 64; i++)
    if (out->bits[i]) return true;
  return false;
}

/* --- cgroups --- */

/* What a cgroup directory limits; 0: nothing. */
typedef uint64_t (*limit_fn)(const char *root, const char *directory);

/* The tightest limit from the group `path` of a hierarchy up to its root. */
static uint64_t tightest_in(const char *root, const char *mount, const char *path, limit_fn fn) {
  char directory[PATH_BYTES];
  int length = snprintf(directory, sizeof directory, "%s%s", mount, path);
  if (length < 0 || (size_t)length >= sizeof directory) return 0;
  size_t top = strlen(mount), n = (size_t)length;
  uint64_t tightest = 0;
  for (;;) {
    while (n > top && directory[n - 1] == '/') directory[--n] = 0;
    uint64_t limit = fn(root, directory);
    if (limit && (!tightest || limit < tightest)) tightest = limit;
    if (n <= top) return tightest;
    while (n > top && directory[n - 1] != '/') directory[--n] = 0;
  }
}

static bool names_controller(const char *list, size_t length, const char *controller) {
  size_t n = strlen(controller);
  for (const char *at = list; at + n <= list + length; at++)
    if (memcmp(at, controller, n) == 0 && (at == list || at[-1] == ',') &&
        (at + n == list + length || at[n] == ','))
      return true;
  return false;
}

/* The tightest limit over this process's cgroups of both versions; 0: unlimited. */
static uint64_t tightest(const char *root, const char *controller, limit_fn v1, limit_fn v2) {
  char text[LIST_BYTES], mount[64];
  if (!read_text(root, "/proc/self/cgroup", text, sizeof text)) return 0;
  uint64_t tightest = 0;
  char *end;
  for (char *line = text; *line; line = end) { /* "id:controllers:path" */
    end = line + strcspn(line, "\n");
    if (*end) *end++ = 0;
    char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL;
    if (!path) continue;
    size_t length = (size_t)(path - list) - 1;
    bool unified = length == 0;
    if (!unified && !names_controller(list + 1, length, controller)) continue;
    snprintf(mount, sizeof mount, unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/%s", controller);
    uint64_t limit = tightest_in(root, mount, path + 1, unified ? v2 : v1);
    if (limit && (!tightest || limit < tightest)) tightest = limit;
  }
  return tightest;
}

static bool read_of(const char *root, const char *directory, const char *name, char *text,
                    size_t size) {
  char path[PATH_BYTES];
  int length = snprintf(path, sizeof path, "%s/%s", directory, name);
  return length > 0 && (size_t)length < sizeof path && read_text(root, path, text, size);
}

static uint64_t cpus_of(long long quota, long long period) {
  return quota > 0 && period > 0 ? (uint64_t)((quota + period - 1) / period) : 0;
}

static uint64_t cpu_v2(const char *root, const char *directory) {
  char text[64], *rest; /* "max 100000", "150000 100000" */
  if (!read_of(root, directory, "cpu.max", text, sizeof text)) return 0;
  long long quota = strtoll(text, &rest, 10);
  return rest == text ? 0 : cpus_of(quota, strtoll(rest, NULL, 10));
}

static uint64_t cpu_v1(const char *root, const char *directory) {
  char quota[64], period[64]; /* "-1": none */
  if (!read_of(root, directory, "cpu.cfs_quota_us", quota, sizeof quota) ||
      !read_of(root, directory, "cpu.cfs_period_us", period, sizeof period))
    return 0;
  return cpus_of(strtoll(quota, NULL, 10), strtoll(period, NULL, 10));
}

/* The number behind `key` at the start of a line; 0 if there is none. */
static uint64_t number_of(const char *text, const char *key) {
  size_t n = strlen(key);
  for (const char *line = text; line; line = strchr(line, '\n')) {
    if (*line == '\n') line++;
    if (strncmp(line, key, n) == 0) return strtoull(line + n, NULL, 10);
  }
  return 0;
}

/* Bytes left below a memory limit: page cache in the group's use can be given up. */
static uint64_t memory_left(const char *root, const char *directory, const char *const names[5]) {
  char limit[64], usage[64], stat[LIST_BYTES], *rest;
  if (!read_of(root, directory, names[0], limit, sizeof limit) ||
      !read_of(root, directory, names[1], usage, sizeof usage))
    return 0;
  uint64_t most = strtoull(limit, &rest, 10);
  if (rest == limit || most >= (uint64_t)1 << 62) return 0; /* "max"; v1: a huge number */
  uint64_t used = strtoull(usage, NULL, 10), cache = 0;
  if (read_of(root, directory, names[2], stat, sizeof stat))
    cache = number_of(stat, names[3]) + number_of(stat, names[4]);
  used -= cache < used ? cache : used;
  return used < most ? most - used : 1;
}

static uint64_t memory_v2(const char *root, const char *directory) {
  static const char *const names[5] = {"memory.max", "memory.current", "memory.stat",
                                       "inactive_file ", "active_file "};
  return memory_left(root, directory, names);
}

static uint64_t memory_v1(const char *root, const char *directory) {
  static const char *const names[5] = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                                       "memory.stat", "total_inactive_file ", "total_active_file "};
  return memory_left(root, directory, names);
}

uint64_t pds_host_memory(const char *root) {
  char text[LIST_BYTES];
  uint64_t bytes = UINT64_MAX;
  if (read_text(root, "/proc/meminfo", text, sizeof text)) {
    uint64_t kib = number_of(text, "MemAvailable:");
    if (kib) bytes = kib * 1024;
  }
  uint64_t left = tightest(root, "memory", memory_v1, memory_v2);
  return left && left < bytes ? left : bytes;
}

/* --- cores --- */

static void usable_cpus(const char *root, const pds_cpu_set *affinity, pds_host *out) {
  pds_cpu_set online;
  memset(&online, 0, sizeof online);
  bool known = read_list(root, "/sys/devices/system/cpu/online", &online);
#if defined(__linux__)
  cpu_set_t mine;
  if (!affinity && sched_getaffinity(0, sizeof mine, &mine) == 0) {
    for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS && cpu < CPU_SETSIZE; cpu++)
      if (CPU_ISSET(cpu, &mine)) add(&out->usable, cpu);
    affinity = &out->usable;
  }
#endif
  if (affinity) {
    out->usable = *affinity;
  } else if (known) {
    out->usable = online;
  } else {
    long count = sysconf(_SC_NPROCESSORS_ONLN);
    for (long cpu = 0; cpu < count && cpu < PDS_MAX_CPUS; cpu++) add(&out->usable, (uint32_t)cpu);
  }
  out->whole = true;
  for (uint32_t i = 0; i < PDS_MAX_CPUS / 64 && known; i++) {
    if (online.bits[i] & ~out->usable.bits[i]) out->whole = false;
    out->usable.bits[i] &= online.bits[i];
  }
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++) out->cpus += pds_cpu_in(&out->usable, cpu);
  if (out->cpus == 0) {
    add(&out->usable, 0);
    out->cpus = 1;
  }
}

/* The lowest CPU of the core that `cpu` belongs to. */
static uint32_t leader(const char *root, uint32_t cpu) {
  char path[96];
  pds_cpu_set siblings;
  /* The second is the older name of the first. */
  static const char *const names[] = {"core_cpus_list", "thread_siblings_list"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%u/topology/%s", cpu, names[i]);
    if (!read_list(root, path, &siblings) || !pds_cpu_in(&siblings, cpu)) continue;
    for (uint32_t first = 0;; first++)
      if (pds_cpu_in(&siblings, first)) return first;
  }
  return cpu;
}

/* Node of each CPU, 0 where it is not said. */
static void read_nodes(const char *root, uint16_t node_of[PDS_MAX_CPUS]) {
  pds_cpu_set nodes, cpus;
  char path[96];
  memset(node_of, 0, PDS_MAX_CPUS * sizeof *node_of);
  if (!read_list(root, "/sys/devices/system/node/online", &nodes)) return;
  for (uint32_t node = 0; node < PDS_MAX_CPUS; node++) {
    if (!pds_cpu_in(&nodes, node)) continue;
    snprintf(path, sizeof path, "/sys/devices/system/node/node%u/cpulist", node);
    if (!read_list(root, path, &cpus)) continue; /* a node of memory alone */
    for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++)
      if (pds_cpu_in(&cpus, cpu)) node_of[cpu] = (uint16_t)node;
  }
}

/* Orders the cores: round by round, the next one of each node. */
static void place(pds_host *out, const uint16_t node_of[PDS_MAX_CPUS]) {
  pds_cpu_set seen, left;
  memset(&seen, 0, sizeof seen);
  memset(&left, 0, sizeof left);
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++) {
    if (!pds_cpu_in(&out->usable, cpu) || pds_cpu_in(&seen, out->core_of[cpu])) continue;
    add(&seen, out->core_of[cpu]);
    add(&left, cpu); /* the core's lowest usable CPU */
  }
  pds_cpu_set nodes;
  memset(&nodes, 0, sizeof nodes);
  for (bool more = true; more;) {
    pds_cpu_set taken; /* nodes that have had their turn in this round */
    memset(&taken, 0, sizeof taken);
    more = false;
    for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++) {
      if (!pds_cpu_in(&left, cpu) || pds_cpu_in(&taken, node_of[cpu])) continue;
      add(&taken, node_of[cpu]);
      left.bits[cpu / 64] &= ~((uint64_t)1 << cpu % 64);
      out->first[out->cores++] = (uint16_t)cpu;
      if (!pds_cpu_in(&nodes, node_of[cpu])) out->nodes++;
      add(&nodes, node_of[cpu]);
      more = true;
    }
  }
  out->node_mask = nodes.bits[0];
  for (uint32_t i = 1; i < PDS_MAX_CPUS / 64; i++)
    if (nodes.bits[i]) out->node_mask = 0;
}

void pds_host_read(const char *root, const pds_cpu_set *affinity, pds_host *out) {
  uint16_t node_of[PDS_MAX_CPUS];
  memset(out, 0, sizeof *out);
  usable_cpus(root, affinity, out);
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++)
    out->core_of[cpu] = (uint16_t)(pds_cpu_in(&out->usable, cpu) ? leader(root, cpu) : cpu);
  read_nodes(root, node_of);
  place(out, node_of);
  out->quota = (uint32_t)tightest(root, "cpu", cpu_v1, cpu_v2);
}

uint32_t pds_host_threads(const pds_host *host) {
  return host->quota && host->quota < host->cores ? host->quota : host->cores;
}

void pds_host_core(const pds_host *host, uint32_t index, pds_cpu_set *out) {
  uint32_t core = host->core_of[host->first[index % host->cores]];
  memset(out, 0, sizeof *out);
  for (uint32_t cpu = 0; cpu < PDS_MAX_CPUS; cpu++)
    if (pds_cpu_in(&host->usable, cpu) && host->core_of[cpu] == core) add(out, cpu);
}

/* --- huge pages --- */

/* One line of /proc/self/smaps: "begin-end perms ..." opens a mapping, "AnonHugePages: n kB" tells
 * of it. */
typedef struct smaps {
  uintptr_t begin, end; /* what is asked for */
  bool inside;
  uint64_t bytes;
} smaps;

static void smaps_line(smaps *s, const char *line) {
  char *rest;
  uint64_t first = strtoull(line, &rest, 16);
  if (rest != line && *rest == '-') {
    uint64_t last = strtoull(rest + 1, &rest, 16);
    if (*rest == ' ') {
      s->inside = first < s->end && last > s->begin;
      return;
    }
  }
  if (!s->inside) return;
  static const char *const keys[] = {"AnonHugePages:", "FilePmdMapped:", "Private_Hugetlb:"};
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
    if (strncmp(line, keys[i], strlen(keys[i])) == 0)
      s->bytes += strtoull(line + strlen(keys[i]), NULL, 10) * 1024;
}

uint64_t pds_host_huge_bytes(const void *base, uint64_t bytes) {
  if (!base || !bytes) return 0;
  smaps s = {.begin = (uintptr_t)base, .end = (uintptr_t)base + bytes};
  int fd = open("/proc/self/smaps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[LIST_BYTES];
  size_t have = 0;
  for (ssize_t n; (n = read(fd, text + have, sizeof text - 1 - have)) > 0;) {
    have += (size_t)n;
    text[have] = 0;
    char *line = text;
    for (char *end; (end = strchr(line, '\n')); line = end + 1) {
      *end = 0;
      smaps_line(&s, line);
    }
    have -= (size_t)(line - text);
    if (have >= sizeof text - 1) have = 0; /* no line of smaps is that long */
    memmove(text, line, have);
  }
  close(fd);
  return s.bytes < bytes ? s.bytes : bytes;
}
