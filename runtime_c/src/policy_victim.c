/* policy_victim.c: which cached expert gives up its slot. compiler/policies.py says the same. */
#include "decide_parts.h"

enum { APEX_WINDOW = 256 }; /* steps after which an expert counts as long unused */

/* What is left of a score: half of it after each half-life, and a straight line between. */
static inline uint32_t halved(uint32_t score, uint32_t age, uint32_t half_life) {
  const uint32_t times = age / half_life;
  if (times > 31) return 0;
  const uint32_t left = score >> times;
  return left - (uint32_t)((uint64_t)left * (age % half_life) / (2 * half_life));
}

/* For a part of 1/2^k added at each activation, a half-life is ln 2 / -ln(1 - 1/2^k) steps: 5 for 1/8, 22
 * for 1/32. */
static uint32_t left_of(uint32_t policy, uint32_t score, uint32_t age) {
  return policy == PDS_POLICY_HYBRIMOE ? halved(score, age, 5) : halved(score, age, 22);
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

uint64_t pds_worth(const pds_asked *asked, const pds_cached *slot) {
  const uint32_t age = asked->now - slot->used; /* modulo 2^32, as steps are counted */
  switch (asked->policy) {
  case PDS_POLICY_ADAPTSCHED: /* of late, and as a rule */
    return (uint64_t)left_of(PDS_POLICY_ADAPTSCHED, slot->score, age) + often(slot);
  case PDS_POLICY_HYBRIMOE: return left_of(PDS_POLICY_HYBRIMOE, slot->score, age);
  case PDS_POLICY_APEX: {
    const uint32_t left = APEX_WINDOW - (age < APEX_WINDOW ? age : APEX_WINDOW);
    return (uint64_t)left * (65536 / APEX_WINDOW) + often(slot);
  }
  default: return 0; /* least recently used */
  }
}

/* How soon a layer runs: from `most` for the one that asks down to a part of it. */
static uint64_t soon(const pds_asked *asked, uint32_t layer, uint32_t most) {
  const uint32_t n = asked->n_layers;
  const uint32_t ahead = layer >= asked->layer ? layer - asked->layer : layer + n - asked->layer;
  return (n - ahead) * most / n;
}

uint64_t pds_worth_of_layer(const pds_asked *asked, uint32_t layer) {
  switch (asked->policy) {
  case PDS_POLICY_ADAPTSCHED: { /* in prefill nearly all of a layer is needed: those to come stay */
    const bool to_come = asked->phase == PDS_PHASE_PREFILL && layer > asked->layer;
    return soon(asked, layer, 65536 >> 3) + ((uint64_t)to_come << 32);
  }
  case PDS_POLICY_FATE: /* shallow layers are predicted worst, and keep their experts longest */
    return asked->n_layers - layer;
  case PDS_POLICY_APEX: return soon(asked, layer, 65536);
  default: return 0;
  }
}

int32_t pds_victim(const pds_asked *asked, const pds_cached *slots, uint32_t n) {
  int32_t victim = -1;
  uint64_t least = 0;
  uint32_t oldest = 0;
  for (uint32_t i = 0; i < n; i++) {
    const pds_cached *slot = slots + i;
    if (slot->layer < 0) return (int32_t)i;
    if (slot->kept) continue;
    const uint64_t worth =
        pds_worth(asked, slot) + pds_worth_of_layer(asked, (uint32_t)slot->layer);
    const uint32_t age = asked->now - slot->used;
    if (victim >= 0 && (worth > least || (worth == least && age <= oldest))) continue;
    victim = (int32_t)i;
    least = worth;
    oldest = age;
  }
  return victim;
}
