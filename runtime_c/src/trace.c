/* trace.c: trace records, and the names of opcodes and queues that readers of a trace need. */
#define _GNU_SOURCE
#include "trace.h"

#include <time.h>

#include "pds_isa.h"

uint64_t pds_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void pds_trace_add(pds_trace *trace, const pds_trace_record *record) {
  if (trace->count < trace->capacity)
    trace->records[trace->count++] = *record;
  else
    trace->dropped++;
}

const char *pds_opcode_name(uint8_t opcode) {
#define NAME(name, text, ...)                                                                      \
  case PDS_OP_##name: return text;
  switch (opcode) {
    PDS_ISA_OPS(NAME)
  default: return "unknown opcode";
  }
#undef NAME
}

const char *pds_queue_name(uint8_t queue) {
#define NAME(name, text)                                                                           \
  case PDS_QUEUE_##name: return text;
  switch (queue) {
    PDS_ISA_QUEUES(NAME)
  default: return "unknown queue";
  }
#undef NAME
}
