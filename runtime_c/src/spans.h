/* spans.h: how long something that is done often takes: the least, the middle, the mean and the most, kept
 * without keeping each time. */
#ifndef PDS_SPANS_H
#define PDS_SPANS_H

#include <stdint.h>

#include "pdscope.h"

/* Counts by length: 16 buckets for each power of two, the first of 1 ns each, the last up to 2^32 ns. */
enum { PDS_SPAN_PARTS = 16, PDS_SPAN_BUCKETS = PDS_SPAN_PARTS * (32 - 3) };

typedef struct pds_span_counts {
  uint64_t n, sum, least, most; /* ns */
  uint32_t bucket[PDS_SPAN_BUCKETS];
} pds_span_counts;

void pds_spans_add(pds_span_counts *counts, uint64_t ns);
/* All 0 where there were none. */
pds_spans pds_spans_of(const pds_span_counts *counts);

#endif
