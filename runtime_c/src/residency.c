/* residency.c: the table of what is on the GPU. */
#include "residency.h"

#include <string.h>

enum { FEW = 16 }; /* slots */
#define NONE UINT64_MAX

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

static uint64_t sets_bytes(const pds_residency *r) {
  return round64((uint64_t)r->layers * pds_words(r->experts) * sizeof *r->ringed);
}

uint64_t pds_residency_bytes(const pds_residency *r) {
  return table_bytes(r) + round64(r->ring * sizeof *r->cached) + 2 * sets_bytes(r) +
         round64(r->layers * sizeof *r->n_kept) + round64(r->layers * sizeof *r->coldest) +
         round64(r->layers * sizeof *r->least);
}

void pds_residency_init(pds_residency *r, void *memory, const pds_programs *programs) {
  unsigned char *at = memory;
  r->slot_of = (int32_t *)at;
  r->cached = (pds_cached *)(at += table_bytes(r));
  r->ringed = (uint64_t *)(at += round64(r->ring * sizeof *r->cached));
  r->keeping = (uint64_t *)(at += sets_bytes(r));
  r->n_kept = (uint32_t *)(at += sets_bytes(r));
  r->coldest = (pds_coldest *)(at += round64(r->layers * sizeof *r->n_kept));
  r->least = (uint64_t *)(at + round64(r->layers * sizeof *r->coldest));
  r->words = pds_words(r->experts);
  r->now = r->full = 0;
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

uint32_t pds_slots_free(const pds_residency *r, uint32_t layer) {
  return r->ring - r->n_kept[layer] - (layer + 1 < r->layers ? r->n_kept[layer + 1] : 0);
}

/* What `least` says of a layer's candidates. */
static uint64_t least_of(const pds_coldest *found) {
  if (found->n) return 1 + found->at[found->n - 1].worth;
  return found->all ? NONE : 0;
}

static void not_a_candidate(pds_residency *r, const pds_cached *slot) {
  if (!r->least[slot->layer]) return; /* they are not known anyway */
  pds_coldest *found = &r->coldest[slot->layer];
  uint32_t n = 0;
  for (uint32_t i = 0; i < found->n; i++)
    if (found->at[i].slot != (int32_t)(slot - r->cached)) found->at[n++] = found->at[i];
  found->n = n;
  r->least[slot->layer] = least_of(found);
}

void pds_slot_keep(pds_residency *r, pds_cached *slot, uint32_t kept) {
  const bool was = slot->kept != 0;
  slot->kept = kept;
  if (slot->layer < 0) return;
  uint64_t *keeping = r->keeping + (size_t)slot->layer * r->words;
  if (kept) {
    pds_put(keeping, slot->expert);
    r->n_kept[slot->layer] += !was;
    not_a_candidate(r, slot);
  } else {
    pds_take_out(keeping, slot->expert);
    r->n_kept[slot->layer] -= was;
    r->least[slot->layer] = 0; /* it may be colder than those that were found */
  }
}

void pds_slot_drop(pds_residency *r, int32_t slot) {
  pds_cached *c = pds_cached_of(r, slot);
  if (!c || c->layer < 0) return;
  const size_t sets = (size_t)c->layer * r->words;
  r->slot_of[(size_t)c->layer * r->experts + c->expert] = PDS_NO_SLOT;
  pds_take_out(r->ringed + sets, c->expert);
  pds_take_out(r->keeping + sets, c->expert);
  r->n_kept[c->layer] -= c->kept != 0;
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
  pds_put(r->ringed + (size_t)layer * r->words, expert);
  pds_put(r->keeping + (size_t)layer * r->words, expert);
  r->n_kept[layer]++;
}

uint32_t pds_slots_release(pds_residency *r, uint32_t layer, uint32_t kept, bool empties) {
  uint32_t n = 0;
  for (uint32_t w = 0; w < r->words && r->n_kept[layer]; w++)
    for (uint64_t left = pds_kept_of(r, layer)[w]; left; left &= left - 1) {
      const int32_t slot = pds_slot_of(r, layer, 64 * w + pds_lowest(left));
      pds_cached *c = pds_cached_of(r, slot);
      if (kept && c->kept != kept) continue;
      pds_slot_keep(r, c, 0);
      if (empties) pds_slot_drop(r, slot);
      n++;
    }
  return n;
}

/* Of equally little worth the one unused for longest, then the lowest. */
static bool goes_first(const pds_candidate *a, const pds_candidate *b) {
  if (a->worth != b->worth) return a->worth < b->worth;
  return a->age != b->age ? a->age > b->age : a->slot < b->slot;
}

/* One more that may be taken: the coldest are at the end. */
static void add_candidate(pds_coldest *found, const pds_candidate *its) {
  uint32_t at = found->n;
  if (at < PDS_COLDEST) {
    found->n++;
    for (; at && goes_first(&found->at[at - 1], its); at--) found->at[at] = found->at[at - 1];
  } else {
    found->all = false;
    if (!goes_first(its, &found->at[0])) return;
    for (at = 0; at + 1 < found->n && goes_first(its, &found->at[at + 1]); at++)
      found->at[at] = found->at[at + 1];
  }
  found->at[at] = *its;
}

static void look_for_coldest(pds_residency *r, const pds_asked *asked, uint32_t layer) {
  pds_coldest *found = &r->coldest[layer];
  const uint64_t *ringed = r->ringed + (size_t)layer * r->words, *kept = pds_kept_of(r, layer);
  found->n = 0;
  found->all = true;
  for (uint32_t w = 0; w < r->words; w++)
    for (uint64_t left = ringed[w] & ~kept[w]; left; left &= left - 1) {
      const pds_cached *c = pds_cached_of(r, pds_slot_of(r, layer, 64 * w + pds_lowest(left)));
      const pds_candidate its = {.worth = pds_worth(asked, c),
                                 .slot = (int32_t)(c - r->cached),
                                 .age = asked->now - c->used};
      add_candidate(found, &its);
    }
  r->least[layer] = least_of(found);
}

/* pds_victim of the ring. */
static int32_t victim_of(pds_residency *r, const pds_asked *asked) {
  while (r->full < r->ring && r->cached[r->full].layer >= 0) r->full++;
  if (r->full < r->ring) return (int32_t)r->full;
  if (r->now != asked->now || !asked->now) memset(r->least, 0, r->layers * sizeof *r->least);
  r->now = asked->now;
  pds_candidate victim = {.worth = NONE - 1, .slot = -1};
  for (uint32_t l = 0; l < r->layers; l++) {
    if (!r->least[l]) look_for_coldest(r, asked, l);
    if (r->least[l] > victim.worth + 1 || r->least[l] == NONE) continue;
    pds_candidate its = r->coldest[l].at[r->coldest[l].n - 1];
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
  r->cached[victim].kept = kept; /* kept it is already */
  return slot;
}
