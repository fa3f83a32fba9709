/* spans.c: counts of times by their length. */
#include "spans.h"

/* Below 32 ns each has its own; above, the four bits behind the first one say which of its power. */
static uint32_t bucket_of(uint64_t ns) {
  if (ns < 2 * PDS_SPAN_PARTS) return (uint32_t)ns;
  uint32_t shift = 0;
  while (ns >> shift >= 2 * PDS_SPAN_PARTS) shift++;
  const uint64_t at = PDS_SPAN_PARTS * (uint64_t)shift + (ns >> shift);
  return at < PDS_SPAN_BUCKETS ? (uint32_t)at : PDS_SPAN_BUCKETS - 1;
}

/* The middle of a bucket. */
static uint64_t middle_of(uint32_t bucket) {
  if (bucket < 2 * PDS_SPAN_PARTS) return bucket;
  const uint32_t shift = bucket / PDS_SPAN_PARTS - 1;
  const uint64_t first = (uint64_t)(bucket % PDS_SPAN_PARTS + PDS_SPAN_PARTS) << shift;
  return first + (((uint64_t)1 << shift) - 1) / 2;
}

void pds_spans_add(pds_span_counts *counts, uint64_t ns) {
  if (!counts->n || ns < counts->least) counts->least = ns;
  if (ns > counts->most) counts->most = ns;
  counts->n++;
  counts->sum += ns;
  counts->bucket[bucket_of(ns)]++;
}

pds_spans pds_spans_of(const pds_span_counts *counts) {
  pds_spans out = {
      .n = counts->n, .sum_ns = counts->sum, .least_ns = counts->least, .most_ns = counts->most};
  uint64_t before = 0;
  for (uint32_t i = 0; i < PDS_SPAN_BUCKETS && counts->n; i++) {
    before += counts->bucket[i];
    if (2 * before < counts->n) continue;
    const uint64_t ns = middle_of(i);
    out.median_ns = ns < out.least_ns ? out.least_ns : ns > out.most_ns ? out.most_ns : ns;
    break;
  }
  return out;
}
