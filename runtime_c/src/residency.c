/* residency.c: the table of what is on the GPU. */
#include "residency.h"

#include <string.h>

pds_status pds_residency_count(const pds_programs *programs, uint32_t *out_hot,
                               uint32_t *out_ring) {
  uint32_t hot = 0, ring = 0;
  /* One phase's programs: the verifier has compared the others with it. */
  uint32_t phase = 0;
  while (phase < 2 && !programs->phase_count[phase]) phase++;
  for (uint32_t i = 0; i < programs->phase_count[phase]; i++) {
    const pds_program *p = programs->programs + programs->phase_first[phase] + i;
    uint32_t of_kind[2] = {0};
    for (uint32_t k = 0; k < p->n_slots; k++) {
      const pds_slot *s = programs->slots + p->first_slot + k;
      if (s->device != 0 || s->fmt != 0 || of_kind[s->kind]++) {
        char name[32];
        pds_program_name(p, name);
        return pds_fail(
            PDS_ERR_VERIFY,
            "%s: slot %%%s: this library runs one resident slot and one ring, on GPU 0, "
            "in the plan's own format",
            name, s->name);
      }
      if (s->kind == PDS_SLOT_RESIDENT)
        hot += s->count;
      else
        ring = s->count;
    }
  }
  *out_hot = hot;
  *out_ring = ring;
  return PDS_OK;
}

static uint64_t round64(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

static uint64_t table_bytes(const pds_residency *r) {
  return round64((uint64_t)r->layers * r->experts * sizeof *r->slot_of);
}

uint64_t pds_residency_bytes(const pds_residency *r) {
  return table_bytes(r) + round64(r->ring * sizeof *r->cached);
}

void pds_residency_init(pds_residency *r, void *memory, const pds_programs *programs) {
  r->slot_of = memory;
  r->cached = (pds_cached *)((unsigned char *)memory + table_bytes(r));
  for (size_t i = 0; i < (size_t)r->layers * r->experts; i++) r->slot_of[i] = PDS_NO_SLOT;
  for (uint32_t i = 0; i < r->ring; i++) r->cached[i].layer = -1;
  uint32_t phase = 0, next = 0;
  while (phase < 2 && !programs->phase_count[phase]) phase++;
  for (uint32_t i = 0; i < programs->phase_count[phase]; i++) {
    const pds_program *p = programs->programs + programs->phase_first[phase] + i;
    for (uint32_t k = 0; k < p->n_slots; k++) {
      const pds_slot *s = programs->slots + p->first_slot + k;
      if (s->kind != PDS_SLOT_RESIDENT) continue;
      for (uint32_t e = 0; e < s->count; e++) {
        const uint32_t expert = programs->lists[s->first_list + e / 32].experts[e % 32];
        r->slot_of[(size_t)p->layer * r->experts + expert] = (int32_t)next++;
      }
    }
  }
}

uint32_t pds_slots_free(const pds_residency *r) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < r->ring; i++) n += r->cached[i].kept == 0;
  return n;
}

void pds_slot_drop(pds_residency *r, int32_t slot) {
  pds_cached *c = pds_cached_of(r, slot);
  if (!c || c->layer < 0) return;
  r->slot_of[(size_t)c->layer * r->experts + c->expert] = PDS_NO_SLOT;
  *c = (pds_cached){.layer = -1};
}

void pds_slot_assign(pds_residency *r, int32_t slot, uint32_t layer, uint32_t expert,
                     uint32_t popularity, uint32_t now) {
  pds_slot_drop(r, slot);
  *pds_cached_of(r, slot) = (pds_cached){.layer = (int32_t)layer,
                                         .expert = expert,
                                         .popularity = popularity,
                                         .used = now,
                                         .kept = PDS_KEPT_IN_USE};
  r->slot_of[(size_t)layer * r->experts + expert] = slot;
}

int32_t pds_slot_take(pds_residency *r, uint32_t policy, uint32_t layer, uint32_t expert,
                      uint32_t popularity, uint32_t kept, uint32_t now) {
  const int32_t victim = pds_victim(policy, r->cached, r->ring, (int32_t)layer, r->layers, now);
  if (victim < 0) return PDS_NO_SLOT;
  const int32_t slot = (int32_t)r->hot + victim;
  pds_slot_assign(r, slot, layer, expert, popularity, now);
  r->cached[victim].kept = kept;
  return slot;
}
