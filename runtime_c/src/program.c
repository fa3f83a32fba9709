/* program.c: the structure of program.bin. pds_programs_open accepts exactly the bytes that
 * ir/encode.py decodes; whether the programs make sense is for verify.c. */
#include "program.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "crc.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "program.bin is read in place and is little-endian"
#endif

#define RECORD 64u
_Static_assert(sizeof(pds_program_header) == RECORD, "header record");
_Static_assert(sizeof(pds_program) == RECORD, "program record");
_Static_assert(sizeof(pds_instr) == RECORD, "instruction record");
_Static_assert(sizeof(pds_slot) == RECORD, "slot record");
_Static_assert(sizeof(pds_expert_list) == RECORD, "expert list record");

enum { PER_LIST = sizeof(pds_expert_list) / sizeof(uint16_t) };

static const char *const phase_names[] = {
#define X(name, text, low, high) [PDS_PHASE_##name] = text,
    PDS_ISA_PHASES(X)
#undef X
};
enum { N_PHASES = sizeof phase_names / sizeof *phase_names };

#define X(name, ...) +1
enum { N_OPS = 0 PDS_ISA_OPS(X) }; /* numbered from 0 without a gap */
#undef X
#define X(name, ...) | 1u << PDS_QUEUE_##name
static const uint32_t queues = 0 PDS_ISA_QUEUES(X);
#undef X

void pds_program_name(const pds_program *p, char out_name[32]) {
  const char *phase = p->phase < N_PHASES ? phase_names[p->phase] : "?";
  if (p->kind == PDS_KIND_PROLOGUE || p->kind == PDS_KIND_EPILOGUE)
    snprintf(out_name, 32, "%s.%s", p->kind == PDS_KIND_PROLOGUE ? "prologue" : "epilogue", phase);
  else
    snprintf(out_name, 32, "l%d.%s", (int)p->layer, phase);
}

static pds_status malformed(const char *record, uint32_t index, const char *what) {
  return pds_fail(PDS_ERR_PLAN_FORMAT, "program.bin: %s %u: %s; compile the plan again", record,
                  index, what);
}

static int zero(const void *bytes, size_t n) {
  const unsigned char *p = bytes;
  for (size_t i = 0; i < n; i++)
    if (p[i]) return 0;
  return 1;
}

static int format_known(uint8_t fmt) {
  uint8_t dtype = fmt & 7, scale = fmt >> 3 & 3, group = fmt >> 5;
  return fmt == 0 ||
         (dtype >= 1 && dtype <= PDS_WEIGHT_INT4 && scale <= PDS_SCALE_FP32 && group <= 4);
}

static uint8_t flags_allowed(uint8_t opcode) {
  switch (opcode) {
  case PDS_OP_GATE: return PDS_INSTR_TOKENS | PDS_INSTR_PREDICT;
  case PDS_OP_LOAD: return PDS_INSTR_STREAM;
  case PDS_OP_PREFETCH: return PDS_INSTR_STREAM | PDS_INSTR_LLC;
  default: return 0;
  }
}

static pds_status check_instr(const pds_program *p, const pds_instr *i, uint32_t index) {
  const char *const what = "instruction";
  if (i->opcode >= N_OPS) return malformed(what, index, "unknown opcode");
  if (i->queue >= 32 || !(queues >> i->queue & 1)) return malformed(what, index, "unknown queue");
  if (i->hole > PDS_HOLE_U) return malformed(what, index, "unknown hole");
  if (i->tier > PDS_TIER_DEVICE) return malformed(what, index, "unknown tier");
  if (!format_known(i->fmt)) return malformed(what, index, "unknown weight format");
  if (i->n_waits > PDS_MAX_WAITS || i->n_slots > PDS_MAX_SLOT_OPERANDS)
    return malformed(what, index, "too many operands");
  if (!zero(i->waits + i->n_waits, sizeof *i->waits * (PDS_MAX_WAITS - i->n_waits)) ||
      !zero(i->slots + i->n_slots, sizeof *i->slots * (PDS_MAX_SLOT_OPERANDS - i->n_slots)))
    return malformed(what, index, "unused operands are not zero");
  for (uint32_t k = 0; k < i->n_slots; k++)
    if (i->slots[k] >= p->n_slots) return malformed(what, index, "slot operand out of range");
  for (uint32_t k = 0; k < i->n_waits; k++)
    if ((i->waits[k] & PDS_WAIT_IMPORT) && (i->waits[k] & ~PDS_WAIT_IMPORT) >= p->n_ins)
      return malformed(what, index, "imported event out of range");
  if (i->flags & ~flags_allowed(i->opcode))
    return malformed(what, index, "flags do not fit the opcode");
  if (i->opcode == PDS_OP_NORM ? i->arg > PDS_ARG_NORM_FINAL : i->arg != 0)
    return malformed(what, index, "argument out of range");
  if (i->hole == 0 && i->index != 0) return malformed(what, index, "hole index without a hole");
  if (i->hole_cap[0] != 0 || i->hole_cap[7] != 0)
    return malformed(what, index, "unknown hole bound");
  if (i->reserved != 0) return malformed(what, index, "reserved bytes are not zero");
  return PDS_OK;
}

/* `[a-z][a-z0-9_]*`, then at least one NUL, and nothing but NULs. */
static int slot_name_ok(const char *name) {
  size_t n = 0;
  for (; n < PDS_SLOT_NAME_BYTES && name[n]; n++) {
    char c = name[n];
    int letter = c >= 'a' && c <= 'z';
    if (!letter && (n == 0 || !((c >= '0' && c <= '9') || c == '_'))) return 0;
  }
  return n > 0 && n < PDS_SLOT_NAME_BYTES && zero(name + n, PDS_SLOT_NAME_BYTES - n);
}

static pds_status check_slot(const pds_slot *s, uint32_t index, const pds_expert_list *lists,
                             uint32_t n_lists, uint32_t *next_list) {
  const char *const what = "slot";
  if (!slot_name_ok(s->name)) return malformed(what, index, "malformed name");
  if (s->kind > PDS_SLOT_CACHE) return malformed(what, index, "unknown kind");
  if (!format_known(s->fmt)) return malformed(what, index, "unknown weight format");
  if (s->reserved0 || s->reserved1 || !zero(s->reserved, sizeof s->reserved))
    return malformed(what, index, "reserved bytes are not zero");
  if (s->kind == PDS_SLOT_CACHE)
    return s->first_list == 0 ? PDS_OK : malformed(what, index, "a cache has no expert list");
  uint32_t n = (s->count + (uint32_t)PER_LIST - 1) / PER_LIST;
  if (s->first_list != *next_list || n > n_lists - s->first_list)
    return malformed(what, index, "expert list out of place");
  for (uint32_t k = s->count; k < n * PER_LIST; k++)
    if (lists[s->first_list + k / PER_LIST].experts[k % PER_LIST] != 0xFFFF)
      return malformed(what, index, "expert list badly padded");
  *next_list += n;
  return PDS_OK;
}

static pds_status check_program(const pds_program *p, uint32_t index) {
  const char *const what = "program";
  if (p->kind > PDS_KIND_EPILOGUE || p->phase >= N_PHASES)
    return malformed(what, index, "unknown kind or phase");
  if (p->shared > 1 || p->reserved != 0)
    return malformed(what, index, "reserved bytes are not zero");
  if (p->n_ins > PDS_MAX_EVENTS || p->n_outs > PDS_MAX_EVENTS)
    return malformed(what, index, "too many events");
  for (uint32_t k = 0; k < PDS_MAX_EVENTS; k++) {
    if (p->ins[k] > (k < p->n_ins ? PDS_EVENT_LOGITS : 0) ||
        p->outs[k] > (k < p->n_outs ? PDS_EVENT_LOGITS : 0) || (k >= p->n_outs && p->out_event[k]))
      return malformed(what, index, "unknown events, or unused ones that are not zero");
  }
  if (p->n_instrs > PDS_MAX_INSTRS || p->n_slots > PDS_MAX_SLOTS)
    return malformed(what, index, "too many records");
  if ((uint64_t)(p->tickets_in | p->tickets_out) >> p->n_slots)
    return malformed(what, index, "tickets of a slot out of range");
  return PDS_OK;
}

static int place(const pds_program *p) {
  return p->kind == PDS_KIND_PROLOGUE ? 0 : p->kind == PDS_KIND_EPILOGUE ? 2 : 1;
}

/* Phase, then prologue, layers, epilogue, then layer. */
static int ordered(const pds_program *a, const pds_program *b) {
  if (a->phase != b->phase) return a->phase < b->phase;
  if (place(a) != place(b)) return place(a) < place(b);
  return a->layer <= b->layer;
}

static pds_status check_header(const pds_program_header *h, uint64_t n) {
  if (n < RECORD) return malformed("header", 0, "the file is shorter than its header");
  if (memcmp(h->magic, "PDSPROG", 8) != 0) return malformed("header", 0, "not a program file");
  if (h->version != PDS_PROGRAM_FORMAT)
    return pds_fail(
        PDS_ERR_PLAN_FORMAT,
        "program.bin: format version is %u, this library reads %u; compile the plan again",
        h->version, PDS_PROGRAM_FORMAT);
  if (h->isa != PDS_ISA_HASH)
    return malformed("header", 0, "written for another instruction table");
  uint64_t records = 1 + (uint64_t)h->n_programs + h->n_instrs + h->n_slots + h->n_lists;
  if (h->bytes != n || records * RECORD != n)
    return malformed("header", 0, "the size differs from that in the header");
  if (!zero(h->reserved, sizeof h->reserved))
    return malformed("header", 0, "reserved bytes are not zero");
  const unsigned char *bytes = (const unsigned char *)h;
  uint32_t crc = pds_crc32(0, bytes, offsetof(pds_program_header, crc32));
  if (pds_crc32(crc, bytes + RECORD, (size_t)(n - RECORD)) != h->crc32)
    return malformed("header", 0, "CRC is wrong");
  return PDS_OK;
}

pds_status pds_programs_open(const void *bytes, uint64_t n, pds_programs *out_programs) {
  if (!bytes || !out_programs) return pds_fail(PDS_ERR_ARGUMENT, "pds_programs_open: null pointer");
  if ((uintptr_t)bytes % _Alignof(pds_program_header))
    return pds_fail(PDS_ERR_ARGUMENT, "pds_programs_open: bytes must be 8-byte aligned");
  const pds_program_header *h = bytes;
  PDS_RETURN_IF_ERROR(check_header(h, n));
  pds_programs s = {.programs = (const pds_program *)(h + 1), .n_programs = h->n_programs};
  s.instrs = (const pds_instr *)(s.programs + h->n_programs);
  s.slots = (const pds_slot *)(s.instrs + h->n_instrs);
  s.lists = (const pds_expert_list *)(s.slots + h->n_slots);
  uint32_t instr = 0, slot = 0, list = 0; /* records consumed */
  for (uint32_t k = 0; k < s.n_programs; k++) {
    const pds_program *p = s.programs + k;
    PDS_RETURN_IF_ERROR(check_program(p, k));
    if (p->first_instr != instr || p->n_instrs > h->n_instrs - instr || p->first_slot != slot ||
        p->n_slots > h->n_slots - slot)
      return malformed("program", k, "its records are out of place");
    if (k > 0 && !ordered(p - 1, p)) return malformed("program", k, "out of order");
    for (uint32_t j = 0; j < p->n_slots; j++, slot++)
      PDS_RETURN_IF_ERROR(check_slot(s.slots + slot, slot, s.lists, h->n_lists, &list));
    for (uint32_t j = 0; j < p->n_instrs; j++, instr++)
      PDS_RETURN_IF_ERROR(check_instr(p, s.instrs + instr, instr));
    if (s.phase_count[p->phase]++ == 0) s.phase_first[p->phase] = k;
  }
  if (instr != h->n_instrs || slot != h->n_slots || list != h->n_lists)
    return malformed("header", 0, "records that no program uses");
  *out_programs = s;
  return PDS_OK;
}

int32_t pds_programs_phase(const pds_programs *s, uint32_t rows) {
  for (int32_t phase = 0; phase < N_PHASES; phase++) {
    if (!s->phase_count[phase]) continue;
    const pds_program *p = s->programs + s->phase_first[phase];
    if (rows >= p->rows_min && rows <= p->rows_max) return phase;
  }
  return -1;
}
