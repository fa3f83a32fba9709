/* net.c: a net in memory: what lies where. */
#include "net.h"

#include <string.h>

#include "panels.h"

static uint64_t panels_bytes(const pds_tensor *t) {
  return ((uint64_t)t->n + PDS_LANES - 1) / PDS_LANES * pds_panel_bytes(t);
}

static pds_tensor matrix(uint32_t n, uint32_t k) {
  return (pds_tensor){.dtype = n && k ? PDS_BF16 : PDS_NONE, .n = n, .k = k, .count = 1};
}

/* Where everything lies, and in bias, block_bias and features how many elements those have. */
typedef struct net_layout {
  pds_tensor in, block, out;
  uint64_t bias, block_bias, features;
  uint64_t at_bias, at_block_bias, at_features, total;
} net_layout;

static uint64_t take(uint64_t *end, uint64_t bytes) {
  const uint64_t at = *end;
  *end += pds_round_up(bytes, 64);
  return at;
}

static net_layout lay_out(const pds_net_desc *d) {
  const uint32_t deep = d->deep ? d->width : 0, first = d->width + d->experts;
  uint64_t parts = 0, end = 0;
  for (uint32_t bits = d->blocks; bits; bits &= bits - 1) parts++;
  net_layout at = {.in = matrix(d->in ? first + deep : 0, d->hidden),
                   .block = matrix(deep, d->width),
                   .out = matrix(d->width ? d->experts : 0, d->width),
                   .bias = first + deep,
                   .block_bias = deep,
                   .features = parts * d->experts * first};
  take(&end, sizeof(pds_net));
  at.in.offset = take(&end, panels_bytes(&at.in));
  at.block.offset = take(&end, panels_bytes(&at.block));
  at.out.offset = take(&end, panels_bytes(&at.out));
  at.at_bias = take(&end, at.bias * sizeof *d->bias);
  at.at_block_bias = take(&end, at.block_bias * sizeof *d->block_bias);
  at.at_features = take(&end, at.features * sizeof *d->features);
  at.total = end;
  return at;
}

uint64_t pds_net_bytes(const pds_net_desc *desc) {
  return lay_out(desc).total;
}

static void copy(void *to, const void *from, uint64_t bytes) {
  if (bytes) memcpy(to, from, bytes);
}

pds_net *pds_net_place(void *memory, const pds_net_desc *d) {
  const net_layout at = lay_out(d);
  unsigned char *base = memory;
  pds_net *net = memory;
  *net =
      (pds_net){.experts = d->experts,
                .width = d->width,
                .deep = d->deep != 0,
                .blocks = d->blocks,
                .in = at.in,
                .block = at.block,
                .out = at.out,
                .bias = (const float *)(base + at.at_bias),
                .block_bias = (const float *)(base + at.at_block_bias),
                .features = (const uint16_t *)(base + at.at_features),
                .bytes = net->bytes,
                .matrix = panels_bytes(&at.in) + panels_bytes(&at.block) + panels_bytes(&at.out)};
  copy(base + at.in.offset, d->in, panels_bytes(&at.in));
  copy(base + at.block.offset, d->block, panels_bytes(&at.block));
  copy(base + at.out.offset, d->out, panels_bytes(&at.out));
  copy(base + at.at_bias, d->bias, at.bias * sizeof *d->bias);
  copy(base + at.at_block_bias, d->block_bias, at.block_bias * sizeof *d->block_bias);
  copy(base + at.at_features, d->features, at.features * sizeof *d->features);
  return net;
}
