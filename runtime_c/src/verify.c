/* verify.c: the rules of ir/verify.py, whose docstring has their prose, applied to program.bin
 * when a plan is loaded. Same order of rules, same line numbers; only what cannot be encoded at
 * all is checked there alone. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "program.h"

enum { WORDS = PDS_MAX_INSTRS / 64, HOLES = PDS_HOLE_U + 1, NO_INSTR = -1 };
#define BIT(n) (1u << (n))

typedef struct op_info {
  uint32_t kinds, queues, holes, reads, writes;
} op_info;

static const op_info ops[] = {
#define X(name, text, kinds, queues, holes, reads, writes)                                         \
  [PDS_OP_##name] = {kinds, queues, holes, reads, writes},
    PDS_ISA_OPS(X)
#undef X
};
static const char *const buffer_names[] = {
#define X(name, text) [PDS_RES_##name] = text,
    PDS_ISA_BUFFERS(X)
#undef X
};
static const uint32_t phase_rows[][2] = {
#define X(name, text, low, high) [PDS_PHASE_##name] = {low, high},
    PDS_ISA_PHASES(X)
#undef X
};
static const char hole_letters[] = " rlcnpu";

/* One program under check. */
typedef struct checker {
  const pds_programs *set;
  const pds_program *p;
  const pds_instr *instrs;
  const pds_slot *slots;
  uint64_t before[PDS_MAX_INSTRS][WORDS]; /* those before it along waits */
  uint32_t cap[HOLES];                    /* of the first recompile that binds the hole */
  int32_t binder[HOLES];                  /* that recompile, or NO_INSTR */
} checker;

/* Line of instruction `index` in the printed text. */
static int32_t line_of(const checker *c, int32_t index) {
  return index == NO_INSTR ? 1 : 2 + (c->p->n_ins || c->p->tickets_in) + c->p->n_slots + index;
}

static int32_t slot_line(const checker *c, uint32_t slot) {
  return line_of(c, 0) - c->p->n_slots + (int32_t)slot;
}

__attribute__((format(printf, 4, 5))) static pds_status
fail_line(const pds_program *p, int rule, int32_t line, const char *fmt, ...) {
  char name[32], message[256];
  va_list args;
  va_start(args, fmt);
  vsnprintf(message, sizeof message, fmt, args);
  va_end(args);
  pds_program_name(p, name);
  return pds_fail(PDS_ERR_VERIFY, "%s:%d: V%d: %s", name, (int)line, rule, message);
}
#define FAIL(c, rule, index, ...) fail_line((c)->p, rule, line_of(c, index), __VA_ARGS__)

static int is_before(const checker *c, uint32_t a, uint32_t b) {
  return c->before[b][a / 64] >> a % 64 & 1;
}

static int names_slot(const pds_instr *i, uint32_t slot) {
  for (uint32_t k = 0; k < i->n_slots; k++)
    if (i->slots[k] == slot) return 1;
  return 0;
}

static int share_slot(const pds_instr *a, const pds_instr *b) {
  for (uint32_t k = 0; k < a->n_slots; k++)
    if (names_slot(b, a->slots[k])) return 1;
  return 0;
}

static int is_transfer(const pds_instr *i) {
  return i->opcode == PDS_OP_LOAD || i->opcode == PDS_OP_PREFETCH || i->opcode == PDS_OP_UNLOAD;
}

static int is_gpu(uint8_t queue) {
  return queue >= PDS_QUEUE_GPU0;
}

static uint16_t resident_expert(const pds_programs *set, const pds_slot *s, uint32_t k) {
  return set->lists[s->first_list + k / 32].experts[k % 32];
}

static uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

static uint32_t worst_case(uint32_t experts, const pds_program *p) {
  uint64_t routes = (uint64_t)p->top_k * p->rows_max;
  return routes < experts ? (uint32_t)routes : experts;
}

/* --- V1 --- */

static int format_ok(uint8_t fmt) {
  uint8_t dtype = fmt & 7, scale = fmt >> 3 & 3, group = fmt >> 5;
  if (fmt == 0) return 1;
  return dtype == PDS_WEIGHT_FP32 || dtype == PDS_WEIGHT_BF16 ? scale == 0 && group == 0
                                                              : scale != 0;
}

static pds_status v1_slot(const checker *c, uint32_t n) {
  const pds_slot *s = c->slots + n;
  int32_t line = slot_line(c, n);
  for (uint32_t k = 0; k < n; k++)
    if (!strcmp(c->slots[k].name, s->name))
      return fail_line(c->p, 1, line, "slot name %%%s is malformed or used twice", s->name);
  if (s->device >= PDS_MAX_DEVICES || !format_ok(s->fmt))
    return fail_line(c->p, 1, line, "slot %%%s has an unknown device or weight format", s->name);
  if (s->kind == PDS_SLOT_CACHE) return PDS_OK;
  int32_t last = -1;
  for (uint32_t k = 0; k < s->count; k++) {
    int32_t e = resident_expert(c->set, s, k);
    if (e <= last || e >= c->p->experts)
      last = INT32_MAX;
    else
      last = e;
  }
  if (s->count == 0 || last == INT32_MAX)
    return fail_line(c->p, 1, line, "resident experts must ascend and lie below %u", c->p->experts);
  return PDS_OK;
}

static pds_status v1_program(const checker *c) {
  const pds_program *p = c->p;
  int layered = p->kind == PDS_KIND_DENSE || p->kind == PDS_KIND_MOE;
  if (layered ? p->layer < 0 : p->layer != -1)
    return FAIL(c, 1, NO_INSTR, "layer is %d, expected %s", (int)p->layer,
                layered ? "0 or more" : "-1");
  const uint32_t *rows = phase_rows[p->phase];
  if (p->rows_min < rows[0] || p->rows_max < p->rows_min || p->rows_max > rows[1])
    return FAIL(c, 1, NO_INSTR, "rows are %u to %u, expected within %u to %u in this phase",
                p->rows_min, p->rows_max, rows[0], rows[1]);
  if (p->kind == PDS_KIND_MOE) {
    if (p->experts < 1 || p->experts > PDS_MAX_EXPERTS)
      return FAIL(c, 1, NO_INSTR, "experts is %u, expected 1 to %u", p->experts, PDS_MAX_EXPERTS);
    uint32_t most = least(p->experts, PDS_MAX_TOP_K);
    if (p->top_k < 1 || p->top_k > most)
      return FAIL(c, 1, NO_INSTR, "top_k is %u, expected 1 to %u", p->top_k, most);
  } else if (p->experts || p->top_k || p->shared || p->n_slots || p->budget) {
    return FAIL(c, 1, NO_INSTR, "only a MoE layer has experts, slots and a budget");
  }
  if (p->streams < 1 || p->streams > PDS_MAX_STREAMS)
    return FAIL(c, 1, NO_INSTR, "streams is %u, expected 1 to %u", p->streams, PDS_MAX_STREAMS);
  if (p->n_instrs < 1) return FAIL(c, 1, NO_INSTR, "there is no instruction");
  int imports_hid = p->n_ins == 1 && p->ins[0] == PDS_EVENT_HID;
  if (p->kind == PDS_KIND_PROLOGUE ? p->n_ins != 0 : !imports_hid)
    return FAIL(c, 1, NO_INSTR,
                "a prologue imports no event, every other program imports @hid alone");
  for (uint32_t n = 0; n < p->n_slots; n++) PDS_RETURN_IF_ERROR(v1_slot(c, n));
  for (uint32_t n = 0; n < p->n_slots; n++)
    if (c->slots[n].kind == PDS_SLOT_RESIDENT && (p->tickets_in | p->tickets_out) & BIT(n))
      return FAIL(c, 1, NO_INSTR, "a resident slot has no tickets");
  return PDS_OK;
}

static pds_status v1_operands(const checker *c, int32_t n) {
  const pds_instr *i = c->instrs + n;
  int whole = i->hole && i->index == PDS_INDEX_ALL;
  uint32_t fewest = 0, most = 0;
  uint8_t moving = 0; /* stream and llc flags it must have */
  if (i->opcode == PDS_OP_EXPERT) {
    if ((i->hole == PDS_HOLE_C) != (i->queue == PDS_QUEUE_CPU))
      return FAIL(c, 1, n, "?c runs on queue cpu, ?r and ?l on a GPU's queue");
    if (i->hole != PDS_HOLE_C) fewest = 1, most = PDS_MAX_SLOT_OPERANDS;
  } else if (i->opcode == PDS_OP_LOAD || i->hole == PDS_HOLE_N) {
    fewest = most = 1;
    moving = whole ? PDS_INSTR_STREAM : 0;
  } else if (i->hole == PDS_HOLE_P) {
    moving = PDS_INSTR_LLC;
  } else if (i->opcode == PDS_OP_UNLOAD) {
    fewest = 1, most = PDS_MAX_SLOT_OPERANDS;
  }
  if (i->opcode == PDS_OP_PREFETCH && (i->hole == PDS_HOLE_N) != (i->queue == PDS_QUEUE_H2D_SPEC))
    return FAIL(c, 1, n, "?n goes to a slot on queue h2d.spec, ?p to llc on queue aux");
  if (i->n_slots < fewest || i->n_slots > most)
    return FAIL(c, 1, n, "%u slots named, expected %u to %u", i->n_slots, fewest, most);
  if ((i->flags & (PDS_INSTR_STREAM | PDS_INSTR_LLC)) != moving)
    return FAIL(
        c, 1, n,
        "a transfer of [*] to a slot is a stream, of one entry is not; only ?p goes to llc");
  uint32_t device = is_gpu(i->queue) ? (uint32_t)i->queue - PDS_QUEUE_GPU0 : i->device;
  if (i->device && (!is_transfer(i) || !i->n_slots))
    return FAIL(c, 1, n, "only a transfer to or from slots has a device attribute");
  for (uint32_t k = 0; k < i->n_slots; k++) {
    const pds_slot *s = c->slots + i->slots[k];
    for (uint32_t j = 0; j < k; j++)
      if (i->slots[j] == i->slots[k]) return FAIL(c, 1, n, "slot %%%s is named twice", s->name);
    if (s->device != device)
      return FAIL(c, 1, n, "slot %%%s is on device %u, not %u", s->name, s->device, device);
    if (i->opcode != PDS_OP_UNLOAD && s->fmt != i->fmt)
      return FAIL(c, 1, n, "the weight format is not that of slot %%%s", s->name);
  }
  int moves = i->opcode == PDS_OP_LOAD || i->opcode == PDS_OP_PREFETCH;
  if (i->tier != PDS_TIER_HOST && !moves)
    return FAIL(c, 1, n, "only a load or prefetch has a tier attribute");
  if ((i->fmt && !moves && i->opcode != PDS_OP_EXPERT) || !format_ok(i->fmt))
    return FAIL(c, 1, n, "a weight format must be known, and belongs to experts and transfers");
  if (i->adapter)
    return FAIL(c, 1, n, "adapter %u is set, but adapters are not supported", i->adapter - 1u);
  return PDS_OK;
}

static pds_status v1_instr(const checker *c, int32_t n) {
  const pds_instr *i = c->instrs + n;
  const op_info *info = ops + i->opcode;
  const char *name = pds_opcode_name(i->opcode);
  if (!(info->kinds & BIT(c->p->kind)))
    return FAIL(c, 1, n, "%s does not belong in this kind of program", name);
  if (!(info->queues & BIT(i->queue)))
    return FAIL(c, 1, n, "%s cannot run on queue %s", name, pds_queue_name(i->queue));
  if (i->opcode == PDS_OP_NORM &&
      (i->arg == PDS_ARG_NORM_FINAL) != (c->p->kind == PDS_KIND_EPILOGUE))
    return FAIL(c, 1, n, "norm must be attn or mlp in a layer, final in an epilogue");
  if (info->holes ? !i->hole || !(info->holes & BIT(i->hole)) : i->hole)
    return FAIL(c, 1, n, "%s has the wrong hole operand", name);
  uint32_t binds = 0;
  for (uint32_t k = 0; k < HOLES; k++) binds += i->hole_cap[k] != 0;
  if ((binds != 0) != (i->opcode == PDS_OP_RECOMPILE))
    return FAIL(c, 1, n, "recompile, and nothing else, binds holes");
  return v1_operands(c, n);
}

/* --- V2: also fills `before` --- */

static pds_status v2(checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    for (uint32_t k = 0; k < i->n_waits; k++)
      for (uint32_t j = 0; j < k; j++)
        if (i->waits[j] == i->waits[k]) return FAIL(c, 2, n, "waits must name each event once");
    for (uint32_t k = 0; k < i->n_waits; k++) {
      uint32_t w = i->waits[k];
      if (w & PDS_WAIT_IMPORT) continue; /* in range: pds_programs_open */
      if (w >= (uint32_t)n) return FAIL(c, 2, n, "waits for @%u, which is not an earlier event", w);
      for (uint32_t x = 0; x < WORDS; x++) c->before[n][x] |= c->before[w][x];
      c->before[n][w / 64] |= (uint64_t)1 << w % 64;
    }
  }
  return PDS_OK;
}

/* --- V3 to V6: slots --- */

/* Is every entry of ?hole, of those bound to `slot` (of all, if NO_INSTR), an operand of
 * exactly one `opcode`? */
static int entries_once(const checker *c, uint8_t opcode, uint8_t hole, int32_t slot) {
  uint32_t users = 0, stars = 0;
  for (uint32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (i->opcode != opcode || i->hole != hole) continue;
    if (slot != NO_INSTR && !names_slot(i, (uint32_t)slot)) continue;
    users++;
    stars += i->index == PDS_INDEX_ALL;
    for (uint32_t m = 0; m < n; m++) {
      const pds_instr *j = c->instrs + m;
      if (j->opcode == opcode && j->hole == hole && j->index == i->index &&
          (slot == NO_INSTR || names_slot(j, (uint32_t)slot)))
        return 0;
    }
  }
  return stars ? users == 1 : users == c->cap[hole];
}

/* The loads to `slot` of the entries that `reader` reads exist, and all of them come before it. */
static int filled(const checker *c, uint32_t reader, uint32_t slot) {
  uint16_t index = c->instrs[reader].index;
  uint32_t distinct = 0; /* entries below the capacity that single loads fill */
  int whole = 0, own = 0;
  if (c->slots[slot].kind == PDS_SLOT_RESIDENT) return 0;
  for (uint32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (i->opcode != PDS_OP_LOAD || i->hole != PDS_HOLE_L || !names_slot(i, slot)) continue;
    if (index != PDS_INDEX_ALL && i->index != PDS_INDEX_ALL && i->index != index) continue;
    if (!is_before(c, n, reader)) return 0;
    whole |= i->index == PDS_INDEX_ALL;
    own |= i->index == index;
    int seen = 0;
    for (uint32_t m = 0; m < n; m++)
      seen |= c->instrs[m].opcode == PDS_OP_LOAD && c->instrs[m].hole == PDS_HOLE_L &&
              c->instrs[m].index == i->index && names_slot(c->instrs + m, slot);
    distinct += !seen && i->index < c->cap[PDS_HOLE_L];
  }
  if (whole || (index != PDS_INDEX_ALL && own)) return 1;
  return index == PDS_INDEX_ALL && c->cap[PDS_HOLE_L] > 0 && distinct == c->cap[PDS_HOLE_L];
}

static pds_status v3(const checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (i->opcode != PDS_OP_EXPERT) continue;
    for (uint32_t k = 0; k < i->n_slots; k++) {
      uint32_t s = i->slots[k];
      if (i->hole == PDS_HOLE_R) {
        if (c->slots[s].kind == PDS_SLOT_CACHE && !(c->p->tickets_in & BIT(s)))
          return FAIL(c, 3, n, "reads %%%s, whose tickets are not imported", c->slots[s].name);
      } else if (!filled(c, (uint32_t)n, s)) {
        return FAIL(c, 3, n, "reads ?l from %%%s without waiting for the loads that fill it",
                    c->slots[s].name);
      }
    }
  }
  return PDS_OK;
}

static pds_status v4_v5(const checker *c, int rule) {
  uint8_t kind = rule == 4 ? PDS_SLOT_CACHE : PDS_SLOT_RESIDENT;
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    for (uint32_t k = 0; is_transfer(i) && k < i->n_slots; k++) {
      const pds_slot *s = c->slots + i->slots[k];
      if (s->kind != kind) continue;
      if (rule == 5)
        return FAIL(c, 5, n, "%s of the resident slot %%%s", pds_opcode_name(i->opcode), s->name);
      if (!(c->p->tickets_in & BIT(i->slots[k])))
        return FAIL(c, 4, n, "%s of %%%s, whose tickets are not imported",
                    pds_opcode_name(i->opcode), s->name);
    }
  }
  return PDS_OK;
}

static pds_status v6(const checker *c) {
  uint64_t seen[PDS_MAX_EXPERTS / 64] = {0};
  for (uint32_t n = 0; n < c->p->n_slots; n++) {
    const pds_slot *s = c->slots + n;
    int32_t line = slot_line(c, n);
    if (s->count < 1) return fail_line(c->p, 6, line, "cache %%%s has no slot", s->name);
    for (uint32_t k = 0; s->kind == PDS_SLOT_RESIDENT && k < s->count; k++) {
      uint32_t e = resident_expert(c->set, s, k);
      if (seen[e / 64] >> e % 64 & 1) return fail_line(c->p, 6, line, "e%u is resident twice", e);
      seen[e / 64] |= (uint64_t)1 << e % 64;
    }
  }
  uint32_t fed = 0, used[PDS_MAX_DEVICES] = {0}, room[HOLES] = {0};
  for (uint32_t n = 0; n < c->p->n_instrs; n++)
    if (c->instrs[n].opcode == PDS_OP_PREFETCH && c->instrs[n].hole == PDS_HOLE_N)
      for (uint32_t k = 0; k < c->instrs[n].n_slots; k++) fed |= BIT(c->instrs[n].slots[k]);
  for (uint32_t n = 0; n < c->p->n_slots; n++) {
    const pds_slot *s = c->slots + n;
    used[s->device] += s->count;
    if (s->kind != PDS_SLOT_CACHE) continue;
    room[PDS_HOLE_U] += s->count;
    if (fed & BIT(n)) room[PDS_HOLE_N] += s->count;
  }
  for (uint32_t d = 0; d < PDS_MAX_DEVICES; d++)
    if (used[d] > c->p->budget)
      return FAIL(c, 6, NO_INSTR, "%u slots on device %u, the budget is %u", used[d], d,
                  c->p->budget);
  for (uint32_t h = PDS_HOLE_N; h <= PDS_HOLE_U; h++)
    if (h != PDS_HOLE_P && c->cap[h] > room[h])
      return FAIL(c, 6, c->binder[h], "?%c[%u] exceeds %u cache slots", hole_letters[h], c->cap[h],
                  room[h]);
  return PDS_OK;
}

/* --- V7 to V9: holes --- */

static pds_status v7_uses(const checker *c, uint8_t hole) {
  static const uint8_t users[HOLES][2] = {
      [PDS_HOLE_R] = {PDS_OP_EXPERT, PDS_OP_EXPERT},
      [PDS_HOLE_L] = {PDS_OP_LOAD, PDS_OP_EXPERT},
      [PDS_HOLE_C] = {PDS_OP_EXPERT, PDS_OP_EXPERT},
      [PDS_HOLE_N] = {PDS_OP_PREFETCH, PDS_OP_PREFETCH},
      [PDS_HOLE_P] = {PDS_OP_PREFETCH, PDS_OP_PREFETCH},
      [PDS_HOLE_U] = {PDS_OP_UNLOAD, PDS_OP_UNLOAD},
  };
  uint32_t named = 0, used = 0;
  for (uint32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (i->hole != hole) continue; /* V1: then its opcode is one of `users` */
    used++;
    for (uint32_t k = 0; k < i->n_slots; k++) named |= BIT(i->slots[k]);
  }
  for (uint32_t s = 0; hole == PDS_HOLE_R && s < c->p->n_slots; s++)
    if (c->slots[s].kind == PDS_SLOT_RESIDENT) named |= BIT(s);
  int by_slot = hole != PDS_HOLE_C && hole != PDS_HOLE_P;
  for (uint32_t k = 0; k < 2; k++) {
    if (!by_slot && !entries_once(c, users[hole][k], hole, NO_INSTR))
      return FAIL(c, 7, c->binder[hole], "not every entry of ?%c is used by exactly one %s",
                  hole_letters[hole], pds_opcode_name(users[hole][k]));
    for (int32_t s = 0; by_slot && s < c->p->n_slots; s++)
      if (named & BIT(s) && !entries_once(c, users[hole][k], hole, s))
        return FAIL(c, 7, c->binder[hole],
                    "not every entry of ?%c of %%%s is used by exactly one %s", hole_letters[hole],
                    c->slots[s].name, pds_opcode_name(users[hole][k]));
  }
  if (!used) return FAIL(c, 7, c->binder[hole], "?%c is bound but never used", hole_letters[hole]);
  return PDS_OK;
}

static pds_status v7(const checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    for (uint32_t h = 1; h < HOLES; h++) {
      uint32_t cap = c->instrs[n].hole_cap[h];
      uint32_t most = h <= PDS_HOLE_C ? c->p->experts : PDS_MAX_EXPERTS;
      if (cap > most)
        return FAIL(c, 7, n, "capacity of ?%c is %u, expected 1 to %u", hole_letters[h], cap, most);
      if (cap && c->binder[h] != n) return FAIL(c, 7, n, "?%c is bound twice", hole_letters[h]);
    }
  }
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (!i->hole) continue;
    int32_t binder = c->binder[i->hole];
    if (binder == NO_INSTR || !is_before(c, (uint32_t)binder, (uint32_t)n))
      return FAIL(c, 7, n, "?%c is not bound before this use", hole_letters[i->hole]);
    if (i->index != PDS_INDEX_ALL && i->index >= c->cap[i->hole])
      return FAIL(c, 7, n, "?%c[%u] is beyond its capacity %u", hole_letters[i->hole], i->index,
                  c->cap[i->hole]);
  }
  for (uint8_t h = 1; h < HOLES; h++)
    if (c->binder[h] != NO_INSTR) PDS_RETURN_IF_ERROR(v7_uses(c, h));
  return PDS_OK;
}

static pds_status v8(const checker *c) {
  uint32_t resident = 0;
  if (c->p->kind != PDS_KIND_MOE) return PDS_OK;
  for (uint32_t s = 0; s < c->p->n_slots; s++)
    if (c->slots[s].kind == PDS_SLOT_RESIDENT) resident += c->slots[s].count;
  const uint32_t need[HOLES] = {[PDS_HOLE_C] = worst_case(c->p->experts - resident, c->p),
                                [PDS_HOLE_R] = worst_case(resident, c->p)};
  static const uint8_t kinds[] = {PDS_HOLE_C, PDS_HOLE_R};
  for (uint32_t k = 0; k < 2; k++) {
    uint8_t h = kinds[k];
    if (c->cap[h] < need[h])
      return FAIL(c, 8, c->binder[h], "capacity of ?%c is %u, the worst case needs %u",
                  hole_letters[h], c->cap[h], need[h]);
  }
  return PDS_OK;
}

static pds_status v9(const checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++)
    for (uint32_t e = 0; c->instrs[n].opcode == PDS_OP_COMBINE && e < c->p->n_instrs; e++)
      if (c->instrs[e].opcode == PDS_OP_EXPERT && !is_before(c, e, (uint32_t)n))
        return FAIL(c, 9, n, "combine does not wait for the experts of @%u", e);
  return PDS_OK;
}

/* --- V10, V11, V13 to V16: order --- */

static pds_status v10(const checker *c) {
  const pds_program *p = c->p;
  int32_t end = line_of(c, p->n_instrs);
  uint8_t name = p->kind == PDS_KIND_EPILOGUE ? PDS_EVENT_LOGITS : PDS_EVENT_HID;
  if (p->n_outs != 1 || p->outs[0] != name)
    return fail_line(p, 10, end, "expected one event in `out`: @%s",
                     name == PDS_EVENT_HID ? "hid" : "logits");
  uint32_t out = p->out_event[0];
  if (out >= p->n_instrs || c->instrs[out].opcode == PDS_OP_SYNC)
    return fail_line(p, 10, end, "exports @%u: no such event, or a sync's", out);
  for (int32_t n = 0; n < p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    if (is_transfer(i)) {
      for (uint32_t k = 0; k < i->n_slots; k++)
        if (!(p->tickets_out & BIT(i->slots[k])))
          return FAIL(c, 10, n, "the tickets of %%%s do not reach `out`",
                      c->slots[i->slots[k]].name);
    } else if ((uint32_t)n != out && !is_before(c, (uint32_t)n, out)) {
      return FAIL(c, 10, n, "@%d does not reach the exported @%u", (int)n, out);
    }
  }
  if (p->tickets_in & ~p->tickets_out)
    return fail_line(p, 10, end, "imported tickets do not reach `out`");
  return PDS_OK;
}

static pds_status v11(const checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    if (c->instrs[n].opcode != PDS_OP_UNLOAD) continue;
    for (uint32_t m = 0; m < c->p->n_instrs; m++) {
      const pds_instr *i = c->instrs + m;
      int uses = i->opcode == PDS_OP_EXPERT || i->opcode == PDS_OP_LOAD;
      if (uses && share_slot(i, c->instrs + n) && !is_before(c, m, (uint32_t)n))
        return FAIL(c, 11, n, "unload does not wait for @%u, which uses the slots", m);
    }
  }
  return PDS_OK;
}

/* Buffers that an instruction reads and writes: `effects` of ir/verify.py. */
static void effects(const checker *c, const pds_instr *i, uint32_t *reads, uint32_t *writes) {
  *reads = ops[i->opcode].reads;
  *writes = ops[i->opcode].writes;
  if (i->flags & PDS_INSTR_PREDICT) {
    *reads |= ops[PDS_OP_PREDICT].reads;
    *writes |= ops[PDS_OP_PREDICT].writes;
  }
  if (i->opcode == PDS_OP_RECOMPILE && (i->hole_cap[PDS_HOLE_N] || i->hole_cap[PDS_HOLE_P]))
    *reads |= BIT(PDS_RES_PREDICTION);
  if (i->opcode == PDS_OP_COMBINE && c->p->shared) *reads |= BIT(PDS_RES_SHARED_OUT);
}

static const char *first_buffer(uint32_t bits) {
  uint32_t b = 0;
  while (!(bits >> b & 1)) b++;
  return buffer_names[b];
}

static pds_status v13(const checker *c) {
  uint64_t after_import[WORDS] = {0};
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    uint32_t reads, writes, r, w;
    int after = 0;
    for (uint32_t k = 0; k < i->n_waits; k++)
      if (i->waits[k] & PDS_WAIT_IMPORT) after = 1;
    for (uint32_t x = 0; x < WORDS; x++) after |= (c->before[n][x] & after_import[x]) != 0;
    if (after) after_import[n / 64] |= (uint64_t)1 << n % 64;
    if (c->p->n_ins && !after) return FAIL(c, 13, n, "nothing makes it wait for @hid");
    effects(c, i, &reads, &writes);
    for (uint32_t m = 0; m < (uint32_t)n; m++) {
      effects(c, c->instrs + m, &r, &w);
      uint32_t clash = (w & (reads | writes)) | (r & writes);
      if (i->opcode == PDS_OP_EXPERT && c->instrs[m].opcode == PDS_OP_EXPERT)
        clash &= ~BIT(PDS_RES_EXPERT_OUT);
      if (clash && !is_before(c, m, (uint32_t)n))
        return FAIL(c, 13, n, "uses %s as @%u does, without waiting for it", first_buffer(clash),
                    m);
    }
  }
  return PDS_OK;
}

static pds_status v14(const checker *c) {
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    uint32_t written = PDS_PERSISTENT_BUFFERS | (c->p->n_ins ? BIT(PDS_RES_HID) : 0);
    uint32_t reads, writes, r, w;
    for (uint32_t m = 0; m < (uint32_t)n; m++) {
      effects(c, c->instrs + m, &r, &w);
      if (is_before(c, m, (uint32_t)n)) written |= w;
    }
    effects(c, c->instrs + n, &reads, &writes);
    if (reads & ~written)
      return FAIL(c, 14, n, "reads %s, which nothing before it writes",
                  first_buffer(reads & ~written));
  }
  return PDS_OK;
}

/* What V15 counts: an opcode, norms by their place, and the fused predict as a predict. */
typedef struct part {
  uint8_t opcode, arg;
} part;

static int is_part(const pds_instr *i, part what) {
  if (what.opcode == PDS_OP_PREDICT && i->flags & PDS_INSTR_PREDICT) return 1;
  return i->opcode == what.opcode && i->arg == what.arg;
}

static int32_t find_part(const checker *c, part what) {
  for (int32_t n = 0; n < c->p->n_instrs; n++)
    if (is_part(c->instrs + n, what)) return n;
  return NO_INSTR;
}

static pds_status v15_count(const checker *c, part what, uint32_t fewest, uint32_t most) {
  static const char *const sites[] = {" attn", " mlp", " final"};
  const char *site = what.opcode == PDS_OP_NORM ? sites[what.arg] : "";
  const char *name = pds_opcode_name(what.opcode);
  uint32_t count = 0;
  int32_t extra = NO_INSTR; /* the first one too many */
  for (int32_t n = 0; n < c->p->n_instrs; n++)
    if (is_part(c->instrs + n, what) && ++count > most && extra == NO_INSTR) extra = n;
  if (count < fewest) return FAIL(c, 15, NO_INSTR, "%s%s is missing", name, site);
  if (count > most)
    return FAIL(c, 15, extra, "%s%s appears %u times, expected %u", name, site, count, most);
  return PDS_OK;
}

static pds_status v15(const checker *c) {
  static const part norm_attn = {PDS_OP_NORM, PDS_ARG_NORM_ATTN};
  static const part norm_mlp = {PDS_OP_NORM, PDS_ARG_NORM_MLP};
  static const part attention = {PDS_OP_ATTENTION, 0};
  static const part once[4][6] = {
      [PDS_KIND_PROLOGUE] = {{PDS_OP_EMBED, 0}},
      [PDS_KIND_DENSE] = {{PDS_OP_NORM, PDS_ARG_NORM_ATTN},
                          {PDS_OP_ATTENTION, 0},
                          {PDS_OP_NORM, PDS_ARG_NORM_MLP},
                          {PDS_OP_MLP, 0}},
      [PDS_KIND_MOE] = {{PDS_OP_NORM, PDS_ARG_NORM_ATTN},
                        {PDS_OP_ATTENTION, 0},
                        {PDS_OP_NORM, PDS_ARG_NORM_MLP},
                        {PDS_OP_GATE, 0},
                        {PDS_OP_RECOMPILE, 0},
                        {PDS_OP_COMBINE, 0}},
      [PDS_KIND_EPILOGUE] = {{PDS_OP_NORM, PDS_ARG_NORM_FINAL}, {PDS_OP_LM_HEAD, 0}},
  };
  static const uint8_t n_once[4] = {1, 4, 6, 2};
  static const uint8_t after_norm_mlp[] = {PDS_OP_MLP, PDS_OP_GATE, PDS_OP_PREDICT,
                                           PDS_OP_SHARED_EXPERT};
  uint8_t kind = c->p->kind;
  for (uint32_t k = 0; k < n_once[kind]; k++)
    PDS_RETURN_IF_ERROR(v15_count(c, once[kind][k], 1, 1));
  PDS_RETURN_IF_ERROR(v15_count(c, (part){PDS_OP_SHARED_EXPERT, 0}, c->p->shared, c->p->shared));
  PDS_RETURN_IF_ERROR(v15_count(c, (part){PDS_OP_PREDICT, 0}, 0, 1));
  part chain[6][2] = {{norm_attn, attention}, {attention, norm_mlp}};
  for (uint32_t k = 0; k < 4; k++) {
    chain[2 + k][0] = norm_mlp;
    chain[2 + k][1] = (part){after_norm_mlp[k], 0};
  }
  for (uint32_t k = 0; k < 6; k++) {
    int32_t a = find_part(c, chain[k][0]), b = find_part(c, chain[k][1]);
    if (a != NO_INSTR && b != NO_INSTR && !is_before(c, (uint32_t)a, (uint32_t)b))
      return FAIL(c, 15, b, "%s must come after %s (@%d)", pds_opcode_name(chain[k][1].opcode),
                  pds_opcode_name(chain[k][0].opcode), (int)a);
  }
  return PDS_OK;
}

/* `before` along waits and queues, for V16. */
static void order_with_queues(const checker *c, uint64_t behind[PDS_MAX_INSTRS][WORDS]) {
  int32_t last[16];
  for (uint32_t q = 0; q < 16; q++) last[q] = NO_INSTR;
  for (int32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *i = c->instrs + n;
    for (uint32_t k = 0; k <= i->n_waits; k++) { /* the last turn is the queue's */
      int32_t w = k < i->n_waits ? i->waits[k] : last[i->queue];
      if (w == NO_INSTR || w & (int32_t)PDS_WAIT_IMPORT) continue;
      for (uint32_t x = 0; x < WORDS; x++) behind[n][x] |= behind[w][x];
      behind[n][w / 64] |= (uint64_t)1 << w % 64;
    }
    last[i->queue] = n;
  }
}

static pds_status v16(const checker *c) {
  uint64_t behind[PDS_MAX_INSTRS][WORDS];
  memset(behind, 0, sizeof behind[0] * c->p->n_instrs);
  order_with_queues(c, behind);
  for (uint32_t n = 0; n < c->p->n_instrs; n++) {
    const pds_instr *load = c->instrs + n;
    if (load->opcode != PDS_OP_LOAD || !(load->flags & PDS_INSTR_STREAM)) continue;
    for (int32_t m = 0; m < c->p->n_instrs; m++) {
      const pds_instr *i = c->instrs + m;
      if (i->opcode != PDS_OP_EXPERT || i->hole != PDS_HOLE_L || !share_slot(load, i)) continue;
      if (i->index != PDS_INDEX_ALL)
        return FAIL(c, 16, m, "entries of the stream @%u must be read as ?l[*]", n);
      for (uint32_t x = n + 1; x < (uint32_t)m; x++)
        if (c->instrs[x].queue == load->queue && behind[m][x / 64] >> x % 64 & 1)
          return FAIL(c, 16, m, "waits for @%u, which stands behind the stream @%u in its queue", x,
                      n);
    }
  }
  return PDS_OK;
}

static void start(checker *c, const pds_programs *set, const pds_program *p) {
  c->set = set;
  c->p = p;
  c->instrs = set->instrs + p->first_instr;
  c->slots = set->slots + p->first_slot;
  memset(c->before, 0, sizeof c->before[0] * p->n_instrs);
  memset(c->cap, 0, sizeof c->cap);
  for (uint32_t h = 0; h < HOLES; h++) c->binder[h] = NO_INSTR;
  for (int32_t n = 0; n < p->n_instrs; n++)
    for (uint32_t h = 1; h < HOLES; h++)
      if (c->instrs[n].hole_cap[h] && c->binder[h] == NO_INSTR) {
        c->cap[h] = c->instrs[n].hole_cap[h];
        c->binder[h] = n;
      }
}

pds_status pds_program_verify_one(const pds_programs *programs, uint32_t index) {
  if (!programs || index >= programs->n_programs)
    return pds_fail(PDS_ERR_ARGUMENT, "pds_program_verify_one: no program %u", index);
  checker c;
  start(&c, programs, programs->programs + index);
  PDS_RETURN_IF_ERROR(v1_program(&c));
  for (int32_t n = 0; n < c.p->n_instrs; n++) PDS_RETURN_IF_ERROR(v1_instr(&c, n));
  PDS_RETURN_IF_ERROR(v2(&c));
  PDS_RETURN_IF_ERROR(v3(&c));
  PDS_RETURN_IF_ERROR(v4_v5(&c, 4));
  PDS_RETURN_IF_ERROR(v4_v5(&c, 5));
  PDS_RETURN_IF_ERROR(v6(&c));
  PDS_RETURN_IF_ERROR(v7(&c));
  PDS_RETURN_IF_ERROR(v8(&c));
  PDS_RETURN_IF_ERROR(v9(&c));
  PDS_RETURN_IF_ERROR(v10(&c));
  PDS_RETURN_IF_ERROR(v11(&c));
  PDS_RETURN_IF_ERROR(v13(&c));
  PDS_RETURN_IF_ERROR(v14(&c));
  PDS_RETURN_IF_ERROR(v15(&c));
  return v16(&c);
}

/* --- V12: how programs fit together --- */

#define FAIL12(p, ...) fail_line(p, 12, 1, __VA_ARGS__)

static uint32_t capacity(const pds_programs *set, const pds_program *p, uint8_t hole) {
  uint32_t most = 0;
  for (uint32_t n = 0; n < p->n_instrs; n++) {
    uint32_t cap = set->instrs[p->first_instr + n].hole_cap[hole];
    if (cap > most) most = cap;
  }
  return most;
}

/* Does q read ?r from the slot called `name`? */
static int reads_cached(const pds_programs *set, const pds_program *q, const char *name) {
  const pds_slot *slots = set->slots + q->first_slot;
  for (uint32_t n = 0; n < q->n_instrs; n++) {
    const pds_instr *i = set->instrs + q->first_instr + n;
    if (i->opcode != PDS_OP_EXPERT || i->hole != PDS_HOLE_R) continue;
    for (uint32_t k = 0; k < i->n_slots; k++)
      if (!strcmp(slots[i->slots[k]].name, name)) return 1;
  }
  return 0;
}

/* q comes right after p, in a phase that ends before `end`. */
static pds_status v12_follows(const pds_programs *set, const pds_program *p, const pds_program *q,
                              const pds_program *end) {
  for (uint32_t k = 0; k < q->n_ins; k++) {
    int found = 0;
    for (uint32_t j = 0; j < p->n_outs; j++) found |= p->outs[j] == q->ins[k];
    if (!found) return FAIL12(q, "imports an event that the program before does not export");
  }
  if (q->rows_min != p->rows_min || q->rows_max != p->rows_max || q->streams != p->streams)
    return FAIL12(q, "rows or streams differ from those of the program before");
  for (uint8_t h = PDS_HOLE_N; h <= PDS_HOLE_P; h++) {
    const uint32_t cap = capacity(set, p, h);
    const pds_program *to = q;
    while (h == PDS_HOLE_P && to->kind == PDS_KIND_DENSE && to + 1 < end) to++;
    if (cap && (to->kind != PDS_KIND_MOE || cap > to->experts))
      return FAIL12(p, "binds ?%c[%u], but the layer they are for has %u experts", hole_letters[h],
                    cap, to->experts);
  }
  for (uint32_t n = 0; n < p->n_instrs; n++) {
    const pds_instr *i = set->instrs + p->first_instr + n;
    if (i->opcode != PDS_OP_PREFETCH || !i->n_slots) continue;
    const char *name = set->slots[p->first_slot + i->slots[0]].name;
    if (!reads_cached(set, q, name))
      return FAIL12(p, "prefetches into %%%s, which the next program does not read as ?r", name);
  }
  return PDS_OK;
}

static int same_cache(const pds_slot *a, const pds_slot *b) {
  uint32_t sizes[2] = {a->kind == PDS_SLOT_CACHE ? a->count : 0,
                       b->kind == PDS_SLOT_CACHE ? b->count : 0};
  return a->kind == b->kind && sizes[0] == sizes[1] && a->device == b->device && a->fmt == b->fmt;
}

/* The first cache called `name` in programs first .. last - 1, or NULL. */
static const pds_slot *find_cache(const pds_programs *set, uint32_t first, uint32_t last,
                                  const char *name) {
  for (uint32_t k = first; k < last; k++) {
    const pds_program *p = set->programs + k;
    for (uint32_t n = 0; n < p->n_slots; n++) {
      const pds_slot *s = set->slots + p->first_slot + n;
      if (s->kind == PDS_SLOT_CACHE && !strcmp(s->name, name)) return s;
    }
  }
  return NULL;
}

static pds_status v12_phase(const pds_programs *set, uint32_t first, uint32_t count) {
  uint32_t used[PDS_MAX_DEVICES] = {0};
  int32_t budget = -1;
  for (uint32_t n = 0; n < count; n++) {
    const pds_program *p = set->programs + first + n;
    int edge = n == 0 || n == count - 1;
    int kind_ok = n == 0           ? p->kind == PDS_KIND_PROLOGUE
                  : n == count - 1 ? p->kind == PDS_KIND_EPILOGUE
                                   : p->kind == PDS_KIND_DENSE || p->kind == PDS_KIND_MOE;
    if (!kind_ok || (!edge && p->layer != (int32_t)n - 1))
      return FAIL12(p, "out of order: expected prologue, layers from 0, epilogue of one phase");
    if (n) PDS_RETURN_IF_ERROR(v12_follows(set, p - 1, p, set->programs + first + count));
    for (uint32_t k = 0; k < p->n_slots; k++) {
      const pds_slot *s = set->slots + p->first_slot + k;
      if (s->kind == PDS_SLOT_RESIDENT) {
        used[s->device] += s->count;
        continue;
      }
      const pds_slot *known = find_cache(set, first, first + n, s->name);
      if (!known)
        used[s->device] += s->count;
      else if (!same_cache(known, s))
        return FAIL12(p, "cache %%%s differs from that of an earlier layer", s->name);
    }
    if (p->kind == PDS_KIND_MOE) {
      if (budget >= 0 && budget != p->budget)
        return FAIL12(p, "the budget is %u, that of earlier layers %d", p->budget, (int)budget);
      budget = p->budget;
    }
    for (uint32_t d = 0; d < PDS_MAX_DEVICES; d++)
      if (used[d] > (budget > 0 ? (uint32_t)budget : 0))
        return fail_line(p, 6, 1, "%u slots up to this layer, the budget is %d", used[d],
                         budget > 0 ? (int)budget : 0);
  }
  return PDS_OK;
}

/* Every resident expert of p is resident in q, in the same place. */
static int residents_within(const pds_programs *set, const pds_program *p, const pds_program *q) {
  for (uint32_t a = 0; a < p->n_slots; a++) {
    const pds_slot *s = set->slots + p->first_slot + a;
    for (uint32_t k = 0; s->kind == PDS_SLOT_RESIDENT && k < s->count; k++) {
      int found = 0;
      for (uint32_t b = 0; b < q->n_slots && !found; b++) {
        const pds_slot *t = set->slots + q->first_slot + b;
        if (t->kind != PDS_SLOT_RESIDENT || t->device != s->device || t->fmt != s->fmt) continue;
        uint16_t e = resident_expert(set, s, k);
        for (uint32_t j = 0; j < t->count && !found; j++) found = resident_expert(set, t, j) == e;
      }
      if (!found) return 0;
    }
  }
  return 1;
}

/* p and q are the same layer in two phases. */
static pds_status v12_same_layer(const pds_programs *set, const pds_program *p,
                                 const pds_program *q) {
  if (p->kind != q->kind || p->layer != q->layer || p->experts != q->experts ||
      p->top_k != q->top_k || p->shared != q->shared || p->streams != q->streams ||
      p->budget != q->budget)
    return FAIL12(q, "is of another layer than that of the first phase");
  if (!residents_within(set, p, q) || !residents_within(set, q, p))
    return FAIL12(q, "has other resident experts than the first phase");
  for (uint32_t k = 0; k < q->n_slots; k++)
    for (uint32_t j = 0; j < p->n_slots; j++) {
      const pds_slot *s = set->slots + q->first_slot + k, *t = set->slots + p->first_slot + j;
      if (s->kind == PDS_SLOT_CACHE && !strcmp(s->name, t->name) && !same_cache(s, t))
        return FAIL12(q, "cache %%%s differs from that of the first phase", s->name);
    }
  return PDS_OK;
}

pds_status pds_programs_verify_sequence(const pds_programs *s) {
  uint32_t rows = 1, layers = 0;
  int32_t base = -1; /* first program of the first phase that has any */
  if (!s->n_programs) return pds_fail(PDS_ERR_VERIFY, "program:1: V12: there is no program");
  for (uint32_t phase = 0; phase < 3; phase++) {
    uint32_t first = s->phase_first[phase], count = s->phase_count[phase];
    if (!count) continue;
    if (count < 2)
      return pds_fail(PDS_ERR_VERIFY, "program:1: V12: a phase needs a prologue and an epilogue");
    PDS_RETURN_IF_ERROR(v12_phase(s, first, count));
    const pds_program *p = s->programs + first;
    if (p->rows_min != rows) return FAIL12(p, "rows begin at %u, expected %u", p->rows_min, rows);
    rows = p->rows_max + 1;
    if (base < 0) base = (int32_t)first, layers = count;
    if (count != layers) return FAIL12(p, "the phases have different numbers of layers");
    for (uint32_t n = 0; n < count; n++)
      PDS_RETURN_IF_ERROR(v12_same_layer(s, s->programs + base + n, p + n));
  }
  return PDS_OK;
}

/* --- the programs against the plan's constants, and against what this runtime can do --- */

static pds_status matches_plan(const pds_programs *s, const pds_plan *plan) {
  uint32_t rows = 0;
  for (uint32_t k = 0; k < s->n_programs; k++) {
    const pds_program *p = s->programs + k;
    if (p->rows_max > rows) rows = p->rows_max;
    if (p->kind != PDS_KIND_DENSE && p->kind != PDS_KIND_MOE) continue;
    if ((uint32_t)p->layer >= plan->n_layers)
      return FAIL12(p, "the plan has %u layers", plan->n_layers);
    const pds_layer *l = plan->layers + p->layer;
    int moe = p->kind == PDS_KIND_MOE;
    if (moe != (l->moe != 0) ||
        (moe && (p->experts != l->gate.experts || p->top_k != l->gate.top_k ||
                 p->shared != (l->shared.inter != 0))))
      return FAIL12(p, "experts, top_k or shared expert differ from the plan's layer %d",
                    (int)p->layer);
  }
  for (uint32_t phase = 0; phase < 3; phase++)
    if (s->phase_count[phase] && s->phase_count[phase] != plan->n_layers + 2)
      return FAIL12(s->programs + s->phase_first[phase], "expected programs of %u layers",
                    plan->n_layers);
  if (rows != plan->max_rows)
    return FAIL12(s->programs, "programs run up to %u rows, the plan has %u", rows, plan->max_rows);
  return PDS_OK;
}

/* --- what this runtime executes --- */

__attribute__((format(printf, 3, 4))) static pds_status refuse(const pds_program *p, uint32_t n,
                                                               const char *format, ...) {
  char name[32], text[256];
  pds_program_name(p, name);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return pds_fail(PDS_ERR_VERIFY, "%s: @%u: %s", name, n, text);
}

/* Without a GPU: queues host and cpu, and prefetches to the last-level cache. */
static pds_status runs_on_cpu(const pds_program *p, const pds_instr *i, uint32_t n) {
  const int llc = i->opcode == PDS_OP_PREFETCH && i->flags & PDS_INSTR_LLC;
  if (i->queue != PDS_QUEUE_HOST && i->queue != PDS_QUEUE_CPU && !llc)
    return refuse(p, n, "queue %s needs a GPU; these programs are to run on the CPU alone",
                  pds_queue_name(i->queue));
  if (llc && (i->index != PDS_INDEX_ALL || i->tier != PDS_TIER_HOST))
    return refuse(p, n,
                  "prefetch -> llc of one entry or from another tier than host memory is not "
                  "supported by this library; expected ?p[*]");
  return PDS_OK;
}

/* With one: the CPU embeds, predicts and computes ?c; GPU 0 computes all else; entries of holes are
 * taken together. */
static pds_status runs_with_gpu(const pds_program *p, const pds_instr *i, uint32_t n) {
  const bool expert = i->opcode == PDS_OP_EXPERT;
  const bool for_cpu =
      i->opcode == PDS_OP_EMBED || i->opcode == PDS_OP_PREDICT || (expert && i->hole == PDS_HOLE_C);
  if (i->queue == PDS_QUEUE_AUX || i->queue > PDS_QUEUE_GPU0 || i->device != 0)
    return refuse(p, n, "queue %s is not supported by this library; expected GPU 0 alone",
                  pds_queue_name(i->queue));
  if (i->queue == PDS_QUEUE_CPU && !for_cpu)
    return refuse(p, n, "%s on queue cpu is not supported with a GPU; expected gpu0",
                  pds_opcode_name(i->opcode));
  if (i->queue == PDS_QUEUE_GPU0 && for_cpu)
    return refuse(p, n, "%s on queue gpu0 is not supported by this library; expected cpu",
                  pds_opcode_name(i->opcode));
  if (i->hole && i->hole != PDS_HOLE_C && i->index != PDS_INDEX_ALL)
    return refuse(p, n, "one entry of a hole is not supported by this library; expected [*]");
  if (i->tier != PDS_TIER_HOST)
    return refuse(p, n, "transfers from another tier than host memory are not supported");
  if (i->flags & PDS_INSTR_PREDICT)
    return refuse(p, n, "a gate that predicts is not supported with a GPU; expected predict");
  return PDS_OK;
}

static pds_status runs_predict(const pds_plan *plan, const pds_program *p, const pds_instr *i,
                               uint32_t n, bool with_gpu) {
  if (i->opcode != PDS_OP_PREDICT && !(i->flags & PDS_INSTR_PREDICT)) return PDS_OK;
  if (plan->layers[p->layer].predictor.kind == PDS_PREDICT_NONE)
    return refuse(p, n, "predict: the plan has no predictor for layer %d; compile it again",
                  (int)p->layer);
  if (!with_gpu && p->rows_max > PDS_PREDICT_ROWS)
    return refuse(p, n,
                  "predict in steps of up to %u rows is not supported by this library; expected at "
                  "most %d",
                  p->rows_max, PDS_PREDICT_ROWS);
  return PDS_OK;
}

static pds_status runnable(const pds_programs *s, const pds_plan *plan, bool with_gpu) {
  for (uint32_t k = 0; k < s->n_programs; k++) {
    const pds_program *p = s->programs + k;
    for (uint32_t n = 0; n < p->n_instrs; n++) {
      const pds_instr *i = s->instrs + p->first_instr + n;
      PDS_RETURN_IF_ERROR(with_gpu ? runs_with_gpu(p, i, n) : runs_on_cpu(p, i, n));
      if (i->flags & PDS_INSTR_TOKENS || i->fmt)
        return refuse(p, n,
                      "%s with token ids or a weight format of its own is not supported by this "
                      "library",
                      pds_opcode_name(i->opcode));
      PDS_RETURN_IF_ERROR(runs_predict(plan, p, i, n, with_gpu));
    }
    if (p->streams != 1)
      return refuse(p, 0, "%u streams are not supported by this library", p->streams);
  }
  return PDS_OK;
}

pds_status pds_programs_verify(const pds_programs *programs, const pds_plan *plan, bool with_gpu) {
  if (!programs || !plan) return pds_fail(PDS_ERR_ARGUMENT, "pds_programs_verify: null pointer");
  for (uint32_t k = 0; k < programs->n_programs; k++)
    PDS_RETURN_IF_ERROR(pds_program_verify_one(programs, k));
  PDS_RETURN_IF_ERROR(pds_programs_verify_sequence(programs));
  PDS_RETURN_IF_ERROR(matches_plan(programs, plan));
  return runnable(programs, plan, with_gpu);
}
