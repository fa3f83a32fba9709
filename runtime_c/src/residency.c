/* residency.c: the table of what is on the GPU. */
#include "residency.h"

#include <stdbool.h>
#include <string.h>

enum { FEW = 32 }; /* slots */

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
  return table_bytes(r) + round64(r->ring * sizeof *r->cached) +
         round64(r->layers * sizeof *r->coldest);
}

void pds_residency_init(pds_residency *r, void *memory, const pds_programs *programs) {
  r->slot_of = memory;
  unsigned char *cached = (unsigned char *)memory + table_bytes(r);
  r->cached = (pds_cached *)cached;
  r->coldest = (pds_coldest *)(cached + round64(r->ring * sizeof *r->cached));
  r->full = 0;
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

static pds_cached *cached_at(const pds_residency *r, uint32_t layer, uint32_t expert) {
  const int32_t slot = pds_slot_of(r, layer, expert);
  return slot == PDS_NO_SLOT ? NULL : pds_cached_of(r, slot);
}

uint32_t pds_slots_free(const pds_residency *r, uint32_t layer) {
  uint32_t kept = 0;
  for (uint32_t l = layer; l < r->layers && l <= layer + 1; l++)
    for (uint32_t e = 0; e < r->experts; e++) {
      const pds_cached *c = cached_at(r, l, e);
      kept += c && c->kept;
    }
  return r->ring - kept;
}

static void not_a_candidate(pds_residency *r, const pds_cached *slot) {
  pds_coldest *found = &r->coldest[slot->layer];
  uint32_t n = 0;
  for (uint32_t i = 0; i < found->n; i++)
    if (found->at[i].slot != (int32_t)(slot - r->cached)) found->at[n++] = found->at[i];
  found->n = n;
}

void pds_slot_keep(pds_residency *r, pds_cached *slot, uint32_t kept) {
  slot->kept = kept;
  if (slot->layer < 0) return;
  if (kept)
    not_a_candidate(r, slot);
  else
    r->coldest[slot->layer].stamp = 0; /* it may be colder than those that were found */
}

void pds_slot_drop(pds_residency *r, int32_t slot) {
  pds_cached *c = pds_cached_of(r, slot);
  if (!c || c->layer < 0) return;
  r->slot_of[(size_t)c->layer * r->experts + c->expert] = PDS_NO_SLOT;
  const uint32_t index = (uint32_t)slot - r->hot;
  not_a_candidate(r, c);
  if (index < r->full) r->full = index;
  *c = (pds_cached){.layer = -1};
}

void pds_slot_assign(pds_residency *r, int32_t slot, uint32_t layer, uint32_t expert,
                     uint32_t popularity, uint32_t now) {
  const uint32_t full = r->full;
  pds_slot_drop(r, slot);
  r->full = full; /* it stays so */
  *pds_cached_of(r, slot) = (pds_cached){.layer = (int32_t)layer,
                                         .expert = expert,
                                         .popularity = popularity,
                                         .used = now,
                                         .kept = PDS_KEPT_IN_USE};
  r->slot_of[(size_t)layer * r->experts + expert] = slot;
}

/* Of equally little worth the one unused for longest, then the lowest. */
static bool goes_first(const pds_candidate *a, const pds_candidate *b) {
  if (a->worth != b->worth) return a->worth < b->worth;
  return a->age != b->age ? a->age > b->age : a->slot < b->slot;
}

/* The coldest are at the end. */
static void look_for_coldest(pds_residency *r, const pds_asked *asked, uint32_t layer) {
  pds_coldest *found = &r->coldest[layer];
  *found = (pds_coldest){.stamp = asked->now, .all = 1};
  for (uint32_t e = 0; e < r->experts; e++) {
    const pds_cached *c = cached_at(r, layer, e);
    if (!c || c->kept) continue;
    const pds_candidate its = {.worth = pds_worth(asked, c),
                               .slot = (int32_t)(c - r->cached),
                               .age = asked->now - c->used};
    uint32_t at = found->n;
    if (at == PDS_COLDEST) {
      found->all = 0;
      if (!goes_first(&its, &found->at[0])) continue;
      for (at = 0; at + 1 < found->n && goes_first(&its, &found->at[at + 1]); at++)
        found->at[at] = found->at[at + 1];
    } else {
      found->n++;
      for (; at && goes_first(&found->at[at - 1], &its); at--) found->at[at] = found->at[at - 1];
    }
    found->at[at] = its;
  }
}

/* pds_victim of the ring. */
static int32_t victim_of(pds_residency *r, const pds_asked *asked) {
  while (r->full < r->ring && r->cached[r->full].layer >= 0) r->full++;
  if (r->full < r->ring) return (int32_t)r->full;
  pds_candidate victim = {.slot = -1};
  for (uint32_t l = 0; l < r->layers; l++) {
    const pds_coldest *found = &r->coldest[l];
    if (!asked->now || found->stamp != asked->now || (!found->n && !found->all))
      look_for_coldest(r, asked, l);
    if (!found->n) continue;
    pds_candidate its = found->at[found->n - 1];
    if (victim.slot >= 0 && its.worth > victim.worth) continue;
    its.worth += pds_worth_of_layer(asked, l);
    if (victim.slot < 0 || goes_first(&its, &victim)) victim = its;
  }
  return victim.slot;
}

int32_t pds_slot_take(pds_residency *r, const pds_asked *asked, uint32_t expert,
                      uint32_t popularity, uint32_t kept) {
  /* A few are looked at faster one by one. */
  const int32_t victim =
      r->ring <= FEW ? pds_victim(asked, r->cached, r->ring) : victim_of(r, asked);
  if (victim < 0) return PDS_NO_SLOT;
  const int32_t slot = (int32_t)r->hot + victim;
  pds_slot_assign(r, slot, asked->layer, expert, popularity, asked->now);
  r->cached[victim].kept = kept;
  return slot;
}
