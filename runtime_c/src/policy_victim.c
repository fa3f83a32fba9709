/* policy_victim.c: which cached expert gives up its slot. compiler/policies.py says the same. */
#include "decide_parts.h"

enum { APEX_WINDOW = 256 }; /* steps after which an expert counts as long unused */

/* What is left of a score: half of it after each HALF_LIFE steps, and a straight line between. For a part
 * of 1/2^k added at each activation, ln 2 / -ln(1 - 1/2^k) steps: 5 for 1/8, 22 for 1/32. */
static uint32_t left_of(uint32_t policy, uint32_t score, uint32_t age) {
  uint32_t half_life = policy == PDS_POLICY_HYBRIMOE ? 5 : 22, halved = age / half_life;
  if (halved > 31) return 0;
  uint32_t left = score >> halved;
  return left - (uint32_t)((uint64_t)left * (age % half_life) / (2 * half_life));
}

uint32_t pds_score(uint32_t policy, uint32_t score, uint32_t weight, uint32_t age) {
  uint64_t part = policy == PDS_POLICY_HYBRIMOE ? weight >> 3 : 65536 >> 5;
  uint64_t sum = left_of(policy, score, age) + part;
  return sum < UINT32_MAX ? (uint32_t)sum : UINT32_MAX;
}

int32_t pds_policy_keeps(uint32_t policy) {
  return policy != PDS_POLICY_STATIC && policy != PDS_POLICY_ONDEMAND &&
         policy != PDS_POLICY_FIDDLER;
}

int32_t pds_policy_predicts(uint32_t policy) {
  return pds_policy_keeps(policy) && policy != PDS_POLICY_LRU;
}

int32_t pds_policy_has_nets(uint32_t policy) {
  return policy == PDS_POLICY_ADAPTSCHED || policy == PDS_POLICY_PAPER;
}

int32_t pds_policy_weighs(uint32_t policy) {
  return policy == PDS_POLICY_HYBRIMOE || policy == PDS_POLICY_APEX;
}

static uint32_t often(const pds_cached *slot) {
  return slot->popularity < 65536 ? slot->popularity : 65536;
}

/* How soon its layer runs: from `most` for the one that asks down to a part of it. */
static uint32_t soon(const pds_cached *slot, uint32_t layer, uint32_t n_layers, uint32_t most) {
  const uint32_t ahead = ((uint32_t)slot->layer + n_layers - layer) % n_layers;
  return (uint32_t)((uint64_t)(n_layers - ahead) * most / n_layers);
}

/* Used of late and as a rule, and soon. In prefill nearly all experts of a layer are needed: those of
 * layers to come stay. */
static uint64_t ours(uint32_t phase, const pds_cached *slot, uint32_t layer, uint32_t n_layers,
                     uint32_t age) {
  uint64_t sum = left_of(PDS_POLICY_ADAPTSCHED, slot->score, age);
  sum += often(slot) + soon(slot, layer, n_layers, 65536 >> 3);
  if (phase == PDS_PHASE_PREFILL && (uint32_t)slot->layer > layer) sum += (uint64_t)1 << 32;
  return sum;
}

/* Recently used, often used, soon used: each in 1/65536. */
static uint32_t apex_worth(const pds_cached *slot, uint32_t layer, uint32_t n_layers,
                           uint32_t age) {
  uint32_t recent = (APEX_WINDOW - (age < APEX_WINDOW ? age : APEX_WINDOW)) * (65536 / APEX_WINDOW);
  return recent + often(slot) + soon(slot, layer, n_layers, 65536);
}

/* What of it depends on the layer that asks is the same for all slots of a layer. */
static uint64_t worth(uint32_t policy, uint32_t phase, const pds_cached *slot, uint32_t layer,
                      uint32_t n_layers, uint32_t age) {
  switch (policy) {
  case PDS_POLICY_ADAPTSCHED: return ours(phase, slot, layer, n_layers, age);
  case PDS_POLICY_HYBRIMOE: return left_of(policy, slot->score, age);
  case PDS_POLICY_FATE: /* shallow layers are predicted worst, and keep their experts longest */
    return n_layers - (uint32_t)slot->layer;
  case PDS_POLICY_APEX: return apex_worth(slot, layer, n_layers, age);
  default: return 0; /* least recently used */
  }
}

int32_t pds_goes_first(const pds_asked *asked, const pds_cached *slot, const pds_cached *other) {
  const uint32_t age = asked->now - slot->used, its = asked->now - other->used; /* modulo 2^32 */
  const uint64_t mine =
      worth(asked->policy, asked->phase, slot, asked->layer, asked->n_layers, age);
  const uint64_t theirs =
      worth(asked->policy, asked->phase, other, asked->layer, asked->n_layers, its);
  return mine != theirs ? mine < theirs : age > its;
}

int32_t pds_victim(const pds_asked *asked, const pds_cached *slots, uint32_t n) {
  int32_t victim = -1;
  for (uint32_t i = 0; i < n; i++) {
    if (slots[i].layer < 0) return (int32_t)i;
    if (slots[i].kept) continue;
    if (victim < 0 || pds_goes_first(asked, slots + i, slots + victim)) victim = (int32_t)i;
  }
  return victim;
}
