/* trace.h: the record of executed instructions, in a buffer of the caller's. */
#ifndef PDS_TRACE_H
#define PDS_TRACE_H

#include <stdint.h>

#include "pdscope.h"

typedef struct pds_trace {
  pds_trace_record *records; /* NULL: off */
  uint64_t capacity, count, dropped;
} pds_trace;

/* CLOCK_MONOTONIC nanoseconds. */
uint64_t pds_now_ns(void);

/* Counts a record that no longer fits as dropped. */
void pds_trace_add(pds_trace *trace, const pds_trace_record *record);

#endif
