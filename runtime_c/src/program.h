/* program.h: program.bin as the runtime sees it. The records lie in the bytes themselves:
 * nothing is copied or allocated, so the bytes must outlive every pointer taken from here.
 *
 *   header | pds_program[] | pds_instr[] | pds_slot[] | pds_expert_list[]
 *
 * Every record is 64 bytes, little-endian; unused fields are zero. Programs are ordered by
 * phase, and within a phase: prologue, layers 0.., epilogue. A program's instructions, slots
 * and lists follow those of the program before it. ir/encode.py writes this; ir/isa.py numbers
 * the enums (pds_isa.h). */
#ifndef PDS_PROGRAM_H
#define PDS_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>

#include "pds_isa.h"
#include "plan_desc.h"
#include "status.h"

typedef struct pds_program_header {
  char magic[8];    /* "PDSPROG\0" */
  uint32_t version; /* PDS_PROGRAM_FORMAT */
  uint32_t isa;     /* PDS_ISA_HASH of the compiler that wrote it */
  uint64_t bytes;   /* whole file */
  uint32_t n_programs, n_instrs, n_slots, n_lists;
  uint32_t reserved[5];
  uint32_t crc32; /* of every byte but these four (zlib's polynomial) */
} pds_program_header;

typedef struct pds_program {
  int32_t layer; /* -1: prologue, epilogue */
  uint8_t kind;  /* pds_kind */
  uint8_t phase; /* pds_phase */
  uint8_t shared;
  uint8_t streams;
  uint16_t n_instrs, n_slots;
  uint16_t experts, top_k; /* 0: no MoE layer */
  uint32_t rows_min, rows_max;
  uint32_t first_instr, first_slot;
  uint16_t budget; /* expert slots of each GPU, over all layers */
  uint8_t n_ins, n_outs;
  uint8_t ins[PDS_MAX_EVENTS];        /* pds_event_name */
  uint8_t outs[PDS_MAX_EVENTS];       /* pds_event_name */
  uint16_t out_event[PDS_MAX_EVENTS]; /* instruction that signals it */
  uint32_t tickets_in, tickets_out;   /* bit s: the tickets of slot s */
  uint32_t reserved;
} pds_program;

enum { PDS_INSTR_STREAM = 1, PDS_INSTR_LLC = 2, PDS_INSTR_TOKENS = 4, PDS_INSTR_PREDICT = 8 };

typedef struct pds_instr {
  uint8_t opcode; /* pds_opcode */
  uint8_t queue;  /* pds_queue */
  uint8_t hole;   /* pds_hole_kind of the operand; 0: none */
  uint8_t n_waits;
  uint8_t arg; /* norm: pds_norm_arg, the same numbers as pds_norm_site */
  uint8_t fmt; /* weight format: dtype | scale << 3 | group << 5; 0: the plan's own */
  uint8_t n_slots;
  uint8_t flags;                         /* PDS_INSTR_* */
  uint16_t waits[PDS_MAX_WAITS];         /* instruction index, or PDS_WAIT_IMPORT | import index */
  uint16_t slots[PDS_MAX_SLOT_OPERANDS]; /* index into the program's slots */
  uint16_t hole_cap[8];                  /* recompile: capacity by pds_hole_kind; 0: not bound */
  uint16_t index;                        /* entry of the hole, or PDS_INDEX_ALL; 0 without a hole */
  uint16_t adapter;                      /* 0: none; else adapter id + 1 */
  uint8_t tier;                          /* pds_tier */
  uint8_t device;
  uint16_t reserved;
} pds_instr;

typedef struct pds_slot {
  char name[PDS_SLOT_NAME_BYTES]; /* NUL padded */
  uint8_t kind;                   /* pds_slot_kind */
  uint8_t device;
  uint8_t fmt; /* as pds_instr.fmt */
  uint8_t reserved0;
  uint16_t count; /* expert slots: of resident, the length of its expert list */
  uint16_t reserved1;
  uint32_t first_list; /* resident: its first pds_expert_list; else 0 */
  uint32_t reserved[9];
} pds_slot;

typedef struct pds_expert_list {
  uint16_t experts[32]; /* ids; the last record is padded with 0xffff */
} pds_expert_list;

/* A checked view of program.bin. phase_first[p], phase_count[p]: the programs of phase p. */
typedef struct pds_programs {
  const pds_program *programs;
  const pds_instr *instrs;
  const pds_slot *slots;
  const pds_expert_list *lists;
  uint32_t n_programs;
  uint32_t phase_first[3], phase_count[3];
} pds_programs;

/* Checks the structure of `n` bytes and fills *out_programs. `bytes` must be 8-byte aligned.
 * Anything but a well-formed file is PDS_ERR_PLAN_FORMAT; out_programs is then left as it was. */
pds_status pds_programs_open(const void *bytes, uint64_t n, pds_programs *out_programs);

/* Applies the verifier's rules (ir/verify.py holds their prose) to every program and phase,
 * then checks that the programs are those of `plan` (layers, experts, row counts) and need
 * nothing but what this runtime executes: without a GPU, or with one. PDS_ERR_VERIFY, with
 * "program:line: Vn: message". */
pds_status pds_programs_verify(const pds_programs *programs, const pds_plan *plan, bool with_gpu);

/* The parts of pds_programs_verify: one program (all rules but V12), and how the programs fit
 * together (V12). */
pds_status pds_program_verify_one(const pds_programs *programs, uint32_t index);
pds_status pds_programs_verify_sequence(const pds_programs *programs);

/* The phase whose programs run `rows` rows, or -1 if none does. */
int32_t pds_programs_phase(const pds_programs *programs, uint32_t rows);

/* Of a verified set whose phase p has programs: layer l of 0 .. phase_count[p] - 3. */
static inline const pds_program *pds_programs_prologue(const pds_programs *s, uint32_t phase) {
  return s->programs + s->phase_first[phase];
}
static inline const pds_program *pds_programs_layer(const pds_programs *s, uint32_t phase,
                                                    uint32_t layer) {
  return s->programs + s->phase_first[phase] + 1 + layer;
}
static inline const pds_program *pds_programs_epilogue(const pds_programs *s, uint32_t phase) {
  return s->programs + s->phase_first[phase] + s->phase_count[phase] - 1;
}
static inline const pds_instr *pds_program_instrs(const pds_programs *s, const pds_program *p) {
  return s->instrs + p->first_instr;
}

/* "l7.decode": writes at most 32 bytes, NUL included. */
void pds_program_name(const pds_program *program, char out_name[32]);

#endif
