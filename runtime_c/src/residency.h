/* residency.h: which experts have a slot on the GPU, and which slot. Residency is logical: an expert
 * is there from the moment that its transfer is queued, so what is decided from it never depends on
 * how fast the link was. Slots are numbered: first the resident ones, by (layer, expert), then the
 * ring's. */
#ifndef PDS_RESIDENCY_H
#define PDS_RESIDENCY_H

#include <stdbool.h>
#include <stdint.h>

#include "bits.h"
#include "decide.h"
#include "program.h"

#define PDS_NO_SLOT (-1)

enum { PDS_KEPT_IN_USE = 1, PDS_KEPT_AHEAD = 2 }; /* pds_cached.kept */

enum { PDS_COLDEST = 8 };

/* A slot of the ring, and what is lost with it. */
typedef struct pds_candidate {
  uint64_t worth; /* pds_worth */
  int32_t slot;
  uint32_t age; /* steps since it was used */
} pds_candidate;

/* Of a layer's slots in the ring that may be taken, those that go first, the last of them last: as they
 * were found in a step. So a slot is taken without a look at all others. */
typedef struct pds_coldest {
  pds_candidate at[PDS_COLDEST];
  uint32_t n;
  bool all; /* the layer has no others */
} pds_coldest;

typedef struct pds_residency {
  uint32_t layers, experts; /* experts: of the layer that has most */
  uint32_t hot, ring;       /* slots */
  int32_t *slot_of;         /* [layers][experts]: a slot or PDS_NO_SLOT */
  pds_cached *cached;       /* [ring] */
  uint32_t words;           /* of a layer's set of experts */
  uint64_t *ringed;         /* [layers][words]: experts that have a slot of the ring; */
  uint64_t *keeping;        /* [layers][words]: those of them whose slot is kept, */
  uint32_t *n_kept;         /* [layers] and their number */
  pds_coldest *coldest;     /* [layers] */
  uint64_t *least;          /* [layers] 1 + worth of the one that goes first; NONE; 0: not known */
  uint32_t now;             /* the step that `least` is of */
  uint32_t full;            /* slots of the ring before the first one that may be empty */
} pds_residency;

/* The slots that programs declare. PDS_ERR_VERIFY where they are not the ones this runtime knows: at
 * most one resident slot a layer, and one ring. */
pds_status pds_residency_count(const pds_programs *programs, uint32_t *out_hot, uint32_t *out_ring);

/* Bytes of both tables, and their set-up in that many zeroed bytes at a multiple of 64: the resident
 * experts are there, the ring is empty. `layers`, `experts`, `hot` and `ring` are given. */
uint64_t pds_residency_bytes(const pds_residency *r);
void pds_residency_init(pds_residency *r, void *memory, const pds_programs *programs);

static inline int32_t pds_slot_of(const pds_residency *r, uint32_t layer, uint32_t expert) {
  return r->slot_of[(size_t)layer * r->experts + expert];
}
/* The ring's entry of a slot; NULL: a resident one. */
static inline pds_cached *pds_cached_of(const pds_residency *r, int32_t slot) {
  return slot < (int32_t)r->hot ? NULL : r->cached + ((uint32_t)slot - r->hot);
}

/* A layer's experts whose slot of the ring is kept: [words]. */
static inline const uint64_t *pds_kept_of(const pds_residency *r, uint32_t layer) {
  return r->keeping + (size_t)layer * r->words;
}

/* Slots of the ring that may be taken while this layer runs: the others are kept for it and for the next
 * one. */
uint32_t pds_slots_free(const pds_residency *r, uint32_t layer);

/* Whether a slot of the ring may be taken. */
void pds_slot_keep(pds_residency *r, pds_cached *slot, uint32_t kept);

/* Gives the expert of the layer that asks the slot that the policy takes first, as in use or ahead;
 * PDS_NO_SLOT: all are kept. Who had it is gone. */
int32_t pds_slot_take(pds_residency *r, const pds_asked *asked, uint32_t expert,
                      uint32_t popularity, uint32_t kept);
/* Gives (layer, expert) this slot of the ring, as in use. */
void pds_slot_assign(pds_residency *r, int32_t slot, uint32_t layer, uint32_t expert,
                     uint32_t popularity, uint32_t now);
/* Empties a slot of the ring. */
void pds_slot_drop(pds_residency *r, int32_t slot);
/* The layer's slots that are kept like this, or in any way (0), are so no longer, and emptied as well if
 * `empties`. Returns their number. */
uint32_t pds_slots_release(pds_residency *r, uint32_t layer, uint32_t kept, bool empties);

#endif
