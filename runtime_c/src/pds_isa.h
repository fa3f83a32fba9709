/* pds_isa.h: the instruction table. Generated from ir/isa.py by
 * `python -m pdscope.ir.isa --write`: do not edit. */
#ifndef PDS_ISA_H
#define PDS_ISA_H

/* clang-format off */
#define PDS_PROGRAM_FORMAT 1u
#define PDS_ISA_HASH 0x5c7acfbfu /* of the rest of this table: plans carry it */
#define PDS_MAX_INSTRS 256u
#define PDS_MAX_WAITS 12u
#define PDS_MAX_SLOT_OPERANDS 4u
#define PDS_MAX_SLOTS 32u
#define PDS_MAX_EVENTS 4u
#define PDS_MAX_EXPERTS 1024u
#define PDS_MAX_TOP_K 64u
#define PDS_MAX_ROWS 1048576u
#define PDS_MAX_DEVICES 8u
#define PDS_MAX_STREAMS 16u
#define PDS_SLOT_NAME_BYTES 16u
#define PDS_WAIT_IMPORT 32768u
#define PDS_INDEX_ALL 65535u
#define PDS_PERSISTENT_BUFFERS 36u

typedef enum pds_kind {
  PDS_KIND_PROLOGUE = 0,
  PDS_KIND_DENSE = 1,
  PDS_KIND_MOE = 2,
  PDS_KIND_EPILOGUE = 3,
} pds_kind;
typedef enum pds_phase {
  PDS_PHASE_DECODE = 0,
  PDS_PHASE_BATCH = 1,
  PDS_PHASE_PREFILL = 2,
} pds_phase;
typedef enum pds_queue {
  PDS_QUEUE_HOST = 0,
  PDS_QUEUE_CPU = 1,
  PDS_QUEUE_H2D_DEMAND = 2,
  PDS_QUEUE_H2D_SPEC = 3,
  PDS_QUEUE_AUX = 4,
  PDS_QUEUE_GPU0 = 8,
  PDS_QUEUE_GPU1 = 9,
  PDS_QUEUE_GPU2 = 10,
  PDS_QUEUE_GPU3 = 11,
  PDS_QUEUE_GPU4 = 12,
  PDS_QUEUE_GPU5 = 13,
  PDS_QUEUE_GPU6 = 14,
  PDS_QUEUE_GPU7 = 15,
} pds_queue;
typedef enum pds_hole_kind {
  PDS_HOLE_R = 1,
  PDS_HOLE_L = 2,
  PDS_HOLE_C = 3,
  PDS_HOLE_N = 4,
  PDS_HOLE_P = 5,
  PDS_HOLE_U = 6,
} pds_hole_kind;
typedef enum pds_norm_arg {
  PDS_ARG_NORM_ATTN = 0,
  PDS_ARG_NORM_MLP = 1,
  PDS_ARG_NORM_FINAL = 2,
} pds_norm_arg;
typedef enum pds_tier {
  PDS_TIER_HOST = 0,
  PDS_TIER_DISK = 1,
  PDS_TIER_DEVICE = 2,
} pds_tier;
typedef enum pds_slot_kind {
  PDS_SLOT_RESIDENT = 0,
  PDS_SLOT_CACHE = 1,
} pds_slot_kind;
typedef enum pds_weight_dtype {
  PDS_WEIGHT_FP32 = 1,
  PDS_WEIGHT_BF16 = 2,
  PDS_WEIGHT_INT8 = 3,
  PDS_WEIGHT_INT4 = 4,
} pds_weight_dtype;
typedef enum pds_scale_dtype {
  PDS_SCALE_NONE = 0,
  PDS_SCALE_BF16 = 1,
  PDS_SCALE_FP32 = 2,
} pds_scale_dtype;
typedef enum pds_event_name {
  PDS_EVENT_HID = 0,
  PDS_EVENT_LOGITS = 1,
} pds_event_name;
typedef enum pds_res {
  PDS_RES_HID = 0,
  PDS_RES_XN = 1,
  PDS_RES_KV = 2,
  PDS_RES_ROUTE = 3,
  PDS_RES_PREDICTION = 4,
  PDS_RES_DRAFT = 5,
  PDS_RES_HOLES = 6,
  PDS_RES_EXPERT_OUT = 7,
  PDS_RES_SHARED_OUT = 8,
  PDS_RES_LOGITS = 9,
} pds_res;
typedef enum pds_opcode {
  PDS_OP_EMBED = 0,
  PDS_OP_NORM = 1,
  PDS_OP_ATTENTION = 2,
  PDS_OP_GATE = 3,
  PDS_OP_PREDICT = 4,
  PDS_OP_EXPERT = 5,
  PDS_OP_SHARED_EXPERT = 6,
  PDS_OP_MLP = 7,
  PDS_OP_COMBINE = 8,
  PDS_OP_LM_HEAD = 9,
  PDS_OP_LOAD = 10,
  PDS_OP_PREFETCH = 11,
  PDS_OP_UNLOAD = 12,
  PDS_OP_SYNC = 13,
  PDS_OP_RECOMPILE = 14,
} pds_opcode;

/* X(name, text, programs, queues, holes, reads, writes): one bit per enum value */
#define PDS_ISA_OPS(X) \
  X(EMBED, "embed", 0x1, 0xff02, 0x0, 0x0, 0x1) \
  X(NORM, "norm", 0xe, 0xff02, 0x0, 0x1, 0x2) \
  X(ATTENTION, "attention", 0x6, 0xff02, 0x0, 0x7, 0x5) \
  X(GATE, "gate", 0x4, 0xff02, 0x0, 0x2, 0x8) \
  X(PREDICT, "predict", 0x4, 0xff02, 0x0, 0x2, 0x10) \
  X(EXPERT, "expert", 0x4, 0xff02, 0xe, 0x42, 0x80) \
  X(SHARED_EXPERT, "shared_expert", 0x4, 0xff02, 0x0, 0x2, 0x100) \
  X(MLP, "mlp", 0x2, 0xff02, 0x0, 0x3, 0x1) \
  X(COMBINE, "combine", 0x4, 0xff02, 0x0, 0x89, 0x1) \
  X(LM_HEAD, "lm_head", 0x8, 0xff02, 0x0, 0x2, 0x200) \
  X(LOAD, "load", 0x4, 0x4, 0x4, 0x40, 0x0) \
  X(PREFETCH, "prefetch", 0x4, 0x18, 0x30, 0x40, 0x0) \
  X(UNLOAD, "unload", 0x4, 0x1, 0x40, 0x40, 0x0) \
  X(SYNC, "sync", 0xf, 0x1, 0x0, 0x0, 0x0) \
  X(RECOMPILE, "recompile", 0x4, 0x1, 0x0, 0x28, 0x60)
#define PDS_ISA_QUEUES(X) \
  X(HOST, "host") \
  X(CPU, "cpu") \
  X(H2D_DEMAND, "h2d.demand") \
  X(H2D_SPEC, "h2d.spec") \
  X(AUX, "aux") \
  X(GPU0, "gpu0") \
  X(GPU1, "gpu1") \
  X(GPU2, "gpu2") \
  X(GPU3, "gpu3") \
  X(GPU4, "gpu4") \
  X(GPU5, "gpu5") \
  X(GPU6, "gpu6") \
  X(GPU7, "gpu7")
#define PDS_ISA_BUFFERS(X) \
  X(HID, "hid") \
  X(XN, "xn") \
  X(KV, "kv") \
  X(ROUTE, "route") \
  X(PREDICTION, "prediction") \
  X(DRAFT, "draft") \
  X(HOLES, "holes") \
  X(EXPERT_OUT, "expert_out") \
  X(SHARED_OUT, "shared_out") \
  X(LOGITS, "logits")
/* X(name, text, fewest rows, most rows) */
#define PDS_ISA_PHASES(X) \
  X(DECODE, "decode", 1u, 1u) \
  X(BATCH, "batch", 2u, 16u) \
  X(PREFILL, "prefill", 17u, 1048576u)
/* clang-format on */

#endif
