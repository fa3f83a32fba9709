/* plan_desc.h: the constants of one plan, as the compiler emits them (src/plan.c in the plan
 * directory). Everything that is the same for each token of a model is here; what is done with it
 * is in program.bin. */
#ifndef PDS_PLAN_DESC_H
#define PDS_PLAN_DESC_H

#include <stdint.h>

typedef enum pds_dtype {
  PDS_NONE = 0,    /* tensor absent */
  PDS_F32 = 1,     /* packed panels, one k per 32-bit word */
  PDS_BF16 = 2,    /* packed panels, word = (k, k+1), even k low */
  PDS_VEC_F32 = 3, /* plain fp32 vector [n] */
  PDS_I8 = 4, /* packed panels, word = (k .. k+3); scales bf16 [k_pad / 64][16] behind each panel */
  PDS_I4 =
      5, /* word = low nibbles (k .. k+3), high nibbles (k+4 .. k+7), each value + 8; scales [k_pad / 32][16] */
} pds_dtype;

/* A weight in a weight file. Packed: `count` matrices [n, k] one after the other, `stride` bytes
 * apart; each is ceil(n/16) panels of 16 output columns, and a panel is 16 * k_pad elements (k_pad:
 * k rounded up to 32; int8, int4: to 64) in rows of 64 bytes, K-contiguous, then the scales, rounded
 * up to 64 bytes. Zero padded in both directions. See docs/plan-format.md. */
typedef struct pds_tensor {
  uint8_t dtype; /* pds_dtype */
  uint16_t file; /* index into pds_plan.files */
  uint32_t n, k, count;
  uint64_t offset; /* bytes from the start of the file, 64-byte aligned (experts: 4096) */
  uint64_t stride; /* bytes between two of the `count` matrices; 0 if count == 1 */
} pds_tensor;

typedef struct pds_rope {
  const float *inv_freq; /* [dim / 2] */
  float scale;           /* factor on cos and sin (YaRN) */
  /* rotated dimensions; GQA: the leading ones of each head; MLA: the rope part */
  uint32_t dim;
  uint8_t interleaved; /* pairs (2i, 2i+1) instead of (i, i + dim/2) */
  /* of its cos/sin table in PDS_BUF_ROPE, bytes; equal ropes (inv_freq, scale, dim) share one */
  uint64_t table_offset;
} pds_rope;

typedef enum pds_attn_kind { PDS_GQA = 0, PDS_MLA = 1 } pds_attn_kind;
/* per head_dim | over all heads at once (OLMoE) */
typedef enum pds_qk_norm { PDS_QK_NONE = 0, PDS_QK_HEAD = 1, PDS_QK_FULL = 2 } pds_qk_norm;

typedef struct pds_attention {
  uint8_t kind;    /* pds_attn_kind */
  uint8_t qk_norm; /* pds_qk_norm, GQA only */
  uint32_t heads, kv_heads;
  uint32_t qk_dim;          /* GQA: head_dim. MLA: nope + rope */
  uint32_t v_dim;           /* per head */
  uint32_t nope_dim;        /* MLA */
  uint32_t q_lora, kv_lora; /* MLA; q_lora 0: q is projected directly */
  uint32_t window;          /* sliding window: keys j with i - j < window; 0: none */
  float scale;              /* softmax scale */
  float norm_eps;           /* q/k norms (GQA), q_a and kv_a norms (MLA) */
  /* clamp q, k, v to +-clip after the q/k norms, before rope; 0: none (OLMoE clip_qkv) */
  float clip;
  pds_rope rope;
  /* GQA: rows of in_proj are [q | k | v]. MLA: [q or q_a | kv latent | k rope]. */
  pds_tensor in_proj, in_bias;
  pds_tensor q_norm, k_norm; /* GQA q/k norm weights; MLA: q_a norm and kv_a norm weights */
  pds_tensor q_b;            /* MLA with q_lora: [heads * qk_dim, q_lora] */
  /* MLA: `heads` matrices [kv_lora, nope]: absorbs W_UK into the query */
  pds_tensor uk;
  pds_tensor uv; /* MLA: `heads` matrices [v_dim, kv_lora] */
  pds_tensor o_proj, o_bias;
} pds_attention;

typedef enum pds_gate_score { PDS_SOFTMAX = 0, PDS_SIGMOID = 1 } pds_gate_score;
typedef enum pds_group_score {
  PDS_GROUP_NONE = 0,
  PDS_GROUP_MAX = 1,
  PDS_GROUP_TOP2 = 2
} pds_group_score;

typedef struct pds_gate {
  uint32_t experts, top_k;
  uint8_t score;       /* pds_gate_score */
  uint8_t group_score; /* pds_group_score */
  uint8_t normalise;   /* chosen weights divided by (their sum + norm_eps) */
  uint8_t mask_zero;   /* masked groups score 0 (DeepSeek-V2) instead of -inf (DeepSeek-V3) */
  uint32_t groups, top_groups;
  float norm_eps;
  float scaling;     /* routed_scaling_factor, on the final weights */
  pds_tensor weight; /* packed fp32 [experts, hidden] */
  pds_tensor bias;   /* fp32 [experts] added to the scores for the choice only */
} pds_gate;

/* SwiGLU: down(silu(gate(x)) * up(x)). gate_up holds gate and up panels alternating: panel 2p is
 * gate columns 16p..16p+15, panel 2p+1 the same columns of up; n = 2 * ceil16(inter). Routed
 * experts: count = experts, and gate_up and down share one stride (one blob an expert,
 * 4096-aligned: gate_up, then down). */
typedef struct pds_mlp {
  uint32_t inter; /* 0: absent */
  pds_tensor gate_up, down;
} pds_mlp;

/* What `compute predict` does: from the gate's input at this layer, the experts that the next layer
 * with experts will choose. */
typedef enum pds_predictor_kind {
  PDS_PREDICT_NONE = 0,
  PDS_PREDICT_CROSS_GATE = 1, /* the target's gate (weight, bias, rule), on this layer's input */
} pds_predictor_kind;

enum {
  PDS_PREDICT_ROWS = 16, /* rows of the largest step in which each row predicts; on a CPU, of any */
  PDS_NET_WIDTH = 1024   /* hidden units of the widest net (net.h) */
};

typedef struct pds_predictor {
  uint8_t kind;    /* pds_predictor_kind */
  uint32_t target; /* the layer whose experts it predicts: the next one with experts */
} pds_predictor;

typedef struct pds_layer {
  uint8_t moe; /* 0: dense */
  float attn_norm_eps, mlp_norm_eps;
  pds_tensor attn_norm, mlp_norm;
  pds_attention attn;
  pds_gate gate;   /* moe */
  pds_mlp experts; /* moe */
  pds_mlp shared;  /* moe; inter 0: none */
  pds_mlp dense;   /* dense layers */
  pds_predictor predictor;
} pds_layer;

/* Scratch buffers of a session: offsets come from compiler/passes/plan_memory.py, which is the one
 * place that knows their sizes. R = max_rows, L = max_logits; "act" is fp32 in fp32 plans and bf16
 * in all others. */
typedef enum pds_buffer {
  PDS_BUF_HID = 0, /* fp32 [R, ceil32(hidden)]   residual stream */
  PDS_BUF_XN,      /* fp32 [R, ceil32(hidden)]   normed rows (padding zero) */
  PDS_BUF_XACT,    /* act  [R, ceil32(hidden)]   the same as GEMM input */
  /* fp32 [R, 2, rope_dim / 2]  cos, sin of each row's position; one such table, rounded up to 64
   * bytes, for each distinct rope of the plan (pds_rope.table_offset) */
  PDS_BUF_ROPE,
  PDS_BUF_QKV,  /* fp32 [R, ceil16(in_proj.n)]  */
  PDS_BUF_QACT, /* act  [R, ceil32(q_lora)]   MLA normed q_a */
  PDS_BUF_QB,   /* fp32 [R, ceil16(heads * qk_dim)] MLA with q_lora: output of q_b */
  /* act  [R, heads, ceil32(qk)] query as attention reads it; MLA: qk = kv_lora + rope */
  PDS_BUF_Q,
  PDS_BUF_QHEAD,  /* act  [R, heads, ceil32(nope)] MLA: nope part of the query, input of uk */
  PDS_BUF_CTXACT, /* act  [R, heads, ceil32(kv_lora)] MLA: attention output, input of uv */
  /* act  [R, ceil32(heads * v_dim)] attention output (MLA: output of uv), input of o_proj */
  PDS_BUF_OACT,
  /* fp32 [min(R, 16), heads, splits, ceil16(v) + 16] split-KV partials (max, sum, output at 16);
   * splits = ceil(max_context / kv_split); MLA: v = kv_lora */
  PDS_BUF_PARTIAL,
  PDS_BUF_GATE,        /* fp32 [R, ceil16(max experts)] */
  PDS_BUF_ROUTE_ID,    /* i32  [R, top_k] */
  PDS_BUF_ROUTE_W,     /* fp32 [R, top_k] */
  PDS_BUF_EXPERT_ROWS, /* i32  [R * top_k] (row * top_k + rank) sorted by expert, stable */
  PDS_BUF_HOLES,       /* pds_hole [max experts] (step.h): ?c of the running layer */
  /* act  [R * max(top_k, 1) , ceil32(max inter)] SwiGLU intermediate, also dense and shared */
  PDS_BUF_MID,
  PDS_BUF_MID_SHARED, /* act  [R, ceil32(shared inter)] */
  PDS_BUF_EXPERT_OUT, /* fp32 [R * top_k, ceil32(hidden)] per (row, rank) */
  PDS_BUF_SHARED_OUT, /* fp32 [R, ceil32(hidden)] */
  PDS_BUF_LOGITS,     /* fp32 [L, vocab] */
  /* int8 and int4 plans: the rows that a GEMM reads, quantised; row bytes: pds_quant_bytes */
  PDS_BUF_XQ,
  /* Plans with a predictor; P = min(R, predict_rows).
   * fp32 [P, ceil16(max experts)] logits of the target's experts, then scores */
  PDS_BUF_PREDICT,
  PDS_BUF_PREDICT_ID, /* i32  [P, max top_k] the target's experts that each row is to choose */
  PDS_BUF_PREDICT_W,  /* fp32 [P, max top_k] and their weights */
  PDS_BUF_LLC_HOLES,  /* i32  [max experts] ?p of the running layer, likeliest first */
  /* Nets (net.h); W = PDS_NET_WIDTH, E = max experts.
   * bf16 [P, ceil32(hidden)] their input, in fp32 plans; that of others is XACT */
  PDS_BUF_NET_X,
  PDS_BUF_NET_U, /* fp32 [P, ceil16(2 W + E)] */
  PDS_BUF_NET_H, /* bf16 [2 P, W] hidden units, each row in two that add up to it */
  PDS_BUF_NET_V, /* fp32 [2 P, max(W, ceil16(E))] what matrices made of those */
  /* i32  [P, max top_k] what this layer and the next one chose for the token before; -1: unknown */
  PDS_BUF_NET_PREV,
  PDS_BUF_NET_NEXT,
  PDS_BUF_COUNT
} pds_buffer;

typedef struct pds_file {
  const char *path; /* relative to the plan directory */
  uint64_t bytes;
} pds_file;

typedef struct pds_plan {
  const char *plan_hash;
  uint32_t format_version;
  uint8_t act_dtype; /* PDS_F32 or PDS_BF16: GEMM inputs and KV cache */
  uint32_t hidden, vocab, n_layers;
  uint32_t max_context, max_rows, max_logits, kv_block;
  uint32_t kv_split;     /* context tokens per split of decode attention */
  uint32_t predict_rows; /* rows that predict, at most: of larger steps a sample */
  /* experts a layer that are remembered of a sequence's last token: max top_k; 0: no predictor */
  uint32_t last_top_k;
  const pds_file *files;
  uint32_t n_files;
  pds_tensor embed; /* packed [vocab, hidden]; the same tensor as lm_head when tied */
  pds_tensor final_norm;
  float final_norm_eps;
  pds_tensor lm_head;
  const pds_layer *layers;
  /* from the memory plan */
  /* within the session arena's scratch part, 64-byte aligned */
  uint64_t buffer_offset[PDS_BUF_COUNT];
  uint64_t buffer_bytes[PDS_BUF_COUNT];
  uint64_t scratch_bytes;        /* scratch part of a session arena */
  uint64_t thread_scratch_bytes; /* one worker's private scratch, in the engine arena */
  uint64_t kv_block_bytes;       /* one KV block, all layers */
  uint64_t program_bytes;        /* size of program.bin */
  const char *required_features; /* space-separated CPU features (pds_cpu.h names) */
} pds_plan;

extern const pds_plan pds_the_plan;

#endif
