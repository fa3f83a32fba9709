/* pdscope.h: the public C interface of a PDScope plan library (lib/libpdscope.so inside a plan directory).
 *
 * Rules that hold for every function here:
 *   - Nothing prints, exits or aborts. Each returns a pds_status; results come last, as out_* parameters.
 *   - On failure the out_* parameters are left as they were, unless the comment says otherwise.
 *   - pds_last_error() gives the text of the calling thread's last failure.
 *   - Only the functions marked "blocking" run model code; all the others return in microseconds.
 *
 * The block between the two marker lines is read verbatim by cffi (ABI mode): plain C11 declarations only.
 */
#ifndef PDSCOPE_H
#define PDSCOPE_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PDS_API __attribute__((visibility("default")))
#else
#define PDS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PDS_ABI_VERSION 8

/* clang-format off */
#ifndef PDS_CDEF
#pragma GCC visibility push(default)
#endif
/* pdscope-cdef-begin */

typedef int32_t pds_status;
enum {
  PDS_OK = 0,
  /* 1xx: the caller's arguments */
  PDS_ERR_ARGUMENT = 100,  /* a null pointer, an out-of-range number, an unknown option */
  PDS_ERR_TOKEN = 101,     /* a token id outside the vocabulary */
  PDS_ERR_POSITION = 102,  /* a position that does not continue its sequence */
  PDS_ERR_SEQUENCE = 103,  /* a sequence id out of range, or an empty source sequence */
  PDS_ERR_BATCH = 104,     /* more rows, or more rows with logits, than the plan was compiled for */
  /* 2xx: limits */
  PDS_ERR_CONTEXT = 200,   /* the sequence would exceed the plan's context length */
  PDS_ERR_KV_FULL = 201,   /* no free KV block is left in the session */
  PDS_ERR_MEMORY = 202,    /* the operating system gave no memory */
  PDS_ERR_THREAD = 203,    /* a worker thread could not be started */
  /* 3xx: the plan */
  PDS_ERR_PLAN_FILE = 300, /* a file of the plan is missing, short, or unreadable */
  PDS_ERR_PLAN_FORMAT = 301, /* program.bin or a saved sequence has another format or version */
  PDS_ERR_VERIFY = 302,    /* the verifier refused a program */
  PDS_ERR_CPU = 303,       /* the plan needs a CPU feature that is absent */
  PDS_ERR_ISA = 304,       /* PDSCOPE_ISA names a path that is unknown, not built, or not runnable here */
  PDS_ERR_DRIVER = 305,    /* the CUDA driver is missing, too old, or finds no GPU */
  /* 4xx: execution */
  PDS_ERR_CANCELLED = 400, /* pds_cancel() stopped the step; the KV is at the last committed position */
  PDS_ERR_FORKED = 401,    /* the engine was created before os.fork() and used in the child */
  PDS_ERR_BUSY = 402,      /* another thread is inside pds_step() of the same session */
  PDS_ERR_GPU = 403        /* the CUDA driver reports an error: the GPU's work is lost, load the plan again */
};

typedef struct pds_engine pds_engine;
typedef struct pds_session pds_session;

enum { PDS_PIN_AUTO = 0, PDS_PIN_ON = 1, PDS_PIN_OFF = 2 };
enum { PDS_WEIGHTS_AUTO = 0, PDS_WEIGHTS_MMAP = 1, PDS_WEIGHTS_COPY = 2, PDS_WEIGHTS_DUMMY = 3 };
enum { PDS_CACHE_PREFETCH_AUTO = 0, PDS_CACHE_PREFETCH_ON = 1, PDS_CACHE_PREFETCH_OFF = 2 };
enum { PDS_NET_PREFILL = 0, PDS_NET_DECODE = 1 }; /* decode: steps in which each row is of another sequence */
enum { PDS_LEARN_PREFILL = 128, PDS_LEARN_DECODE = 32 }; /* tokens that a layer keeps of each phase */
enum { PDS_NET_ROUTED = 1, PDS_NET_PREVIOUS = 2, PDS_NET_PREVIOUS_NEXT = 4 };

typedef struct pds_engine_options {
  const char *plan_dir; /* directory that holds program.bin and weights/ */
  const char *isa;      /* force a kernel path by name, or NULL: PDSCOPE_ISA, else the best one */
  int32_t threads;      /* workers, the caller of pds_step included; 0: one per usable physical core */
  int32_t pin;          /* PDS_PIN_ON: each worker stays on one core, and so does the caller of pds_step within it */
  int32_t weights;      /* PDS_WEIGHTS_MMAP: page cache; PDS_WEIGHTS_COPY: huge pages; PDS_WEIGHTS_AUTO: copied if memory allows;
                         * PDS_WEIGHTS_DUMMY: huge pages of random values, for benchmarks: no file is read */
  int32_t cache_prefetch; /* PDS_CACHE_PREFETCH_AUTO: where steps are measured to gain by it */
  int32_t gpu;            /* 0: everything runs on the CPU; n: with GPU n - 1, by the plan's programs for one */
  const char *gpu_driver; /* the CUDA driver's library; NULL: libcuda.so.1 */
  uint64_t gpu_mem;       /* bytes of its memory that may be used, sessions included; 0: all */
  const char *gpu_kernels; /* images of its kernels: paths, one a line; the first that the driver takes is used */
  uint32_t gpu_patience_ms; /* without any progress of the GPU, a step fails after so long; 0: two minutes */
} pds_engine_options;

typedef struct pds_engine_info {
  uint32_t abi_version;
  uint32_t vocab;
  uint32_t max_context;   /* positions a sequence may hold */
  uint32_t max_rows;      /* rows of one pds_step */
  uint32_t max_logits;    /* rows of one pds_step that may want logits */
  uint32_t layers;
  uint32_t threads;
  uint32_t kv_block;      /* tokens in one KV block */
  uint64_t kv_block_bytes;
  uint64_t weight_bytes;  /* of the weight files */
  uint64_t engine_bytes;  /* anonymous memory of the engine, weights and predictors apart */
  uint64_t net_bytes;     /* anonymous memory of the predictors that were set */
  uint64_t learner_bytes; /* and of the tokens kept for the learner */
  uint32_t cores;         /* physical cores that the process may use */
  uint32_t numa_nodes;    /* that these cores belong to */
  int32_t weights;        /* PDS_WEIGHTS_MMAP, PDS_WEIGHTS_COPY or PDS_WEIGHTS_DUMMY: what was done */
  uint32_t weights_nodes; /* NUMA nodes that the copy is interleaved over; 0: left to the operating system */
  uint64_t weights_copy_bytes; /* anonymous memory of the copy, or of the dummy; 0 when mapped */
  uint64_t weights_huge_bytes; /* of it in huge pages, when it was loaded */
  const char *weights_why; /* what decided so; lives as long as the engine, as do cpus and cpus_why */
  const char *cpus;        /* pinned: for each worker the first CPU of its core, "0,2,4,6"; not pinned: "" */
  const char *cpus_why;
  const char *isa;        /* kernel path in use; lives as long as the library */
  const char *plan_hash;
} pds_engine_info;

/* How long something took, of the `n` times that it was done; 0 if there were none. */
typedef struct pds_spans {
  uint64_t n, sum_ns, least_ns, most_ns;
  uint64_t median_ns; /* within 4 % */
} pds_spans;

/* A GPU of an engine. Bytes are of its memory. */
typedef struct pds_gpu_info {
  uint32_t present;       /* 0: everything runs on the CPU; nothing else is set then */
  uint32_t resident;      /* experts that stay there */
  uint32_t ring;          /* slots for those that come and go */
  uint32_t pinned;        /* the weights lie in pinned memory; 0: copies are slow */
  uint64_t cap, used;     /* what may be used, and is */
  uint64_t weight_bytes;  /* of what is used: what is no expert, */
  uint64_t slot_bytes;    /* and the experts' slots; the rest is sessions' */
  uint64_t expert_bytes;  /* one slot */
  pds_spans recompile[3]; /* in decode, batch and prefill, since the schedule was set: recompiling a layer, from
                           * when its routes are known until all is bound and queued; */
  pds_spans recompile_driver[3]; /* of each of these times, the part within the driver's calls */
  const char *name;       /* of the device; lives as long as the engine */
} pds_gpu_info;

/* What crossed the link for one layer. */
typedef struct pds_ledger {
  uint64_t loads, load_bytes;     /* on demand */
  uint64_t drafted, drafted_right; /* experts that drafts for the layer named; of these, activated */
  uint64_t prefetches;            /* of these, those that were nowhere on the GPU and set out */
  uint64_t useful_bytes;          /* prefetched, and then activated; */
  uint64_t late_bytes;            /* of these, expected to come after the layer asked */
  uint64_t wasted_bytes;          /* prefetched and not activated: what was sent of them */
  uint64_t pauses;                /* times that predictions for the layer turned themselves off for a while */
} pds_ledger;

/* Cache prefetch of an engine, in steps of one row [0] and of 2 to 16 [1]. */
typedef struct pds_cache_prefetch_info {
  int32_t asked;       /* PDS_CACHE_PREFETCH_*, of the options */
  int32_t state[2];    /* what steps do; PDS_CACHE_PREFETCH_AUTO: it is being measured, or will be */
  uint32_t trials[2];  /* measurements finished */
  float gain[2];       /* percent more steps a second with it, by the last of them */
  const char *why;     /* what decided so; lives as long as the library */
  /* over all sessions, as in pds_session_stats */
  uint64_t experts_predicted, experts_hit, prefetch_bytes, prefetch_useful_bytes;
} pds_cache_prefetch_info;

/* A predictor of a layer: logits of the experts that the next layer with experts will choose.
 *   u = in a + bias + sum of rows of features       [width + experts, and width more in deep nets]
 *   h = silu(u[0, width));  deep: h += sigmoid(u[width + experts, ..)) * silu(block h + block_bias)
 *   logits = u[width, width + experts) + out h
 * a is the gate's input in bf16. Rows of features: of the layer's own experts, each times its routing
 * weight; of those that the layer chose for the token before; of those that the next one chose for it.
 * Matrices are bf16: `in`, `block` and `out` packed as in weight files, `features` plain. */
typedef struct pds_net_desc {
  uint32_t hidden, experts;
  uint32_t width;           /* at most 1024; 0: neither block nor out */
  uint32_t deep;
  uint32_t blocks;          /* PDS_NET_ROUTED | ...: the parts of features, in that order */
  const void *in;           /* [width + experts (+ width), hidden]; NULL: zeros */
  const float *bias;        /* [width + experts (+ width)] */
  const uint16_t *features; /* [parts * experts, width + experts] */
  const void *block;        /* deep: [width, width] */
  const float *block_bias;  /* deep: [width] */
  const void *out;          /* [experts, width] */
} pds_net_desc;

/* n tokens whose next layer's experts are asked for. */
typedef struct pds_prediction {
  uint32_t layer, phase, n;   /* phase: PDS_NET_* */
  const float *a;             /* [n, hidden], input of the layer's gate */
  const float *w;             /* [n, top_k], what it chose: weights */
  const int32_t *e;           /* [n, top_k], and experts */
  const int32_t *prev;        /* [n, top_k], what it chose for the token before; -1, or NULL: none */
  const int32_t *prev_next;   /* [n, top_k of the next layer], what that one chose for it */
} pds_prediction;

/* The last tokens of a layer with a predictor, oldest first: what pds_prediction asks with, and what
 * the next layer with experts chose. Arrays are the caller's, for as many tokens as the phase keeps. */
typedef struct pds_learned {
  uint32_t layer, phase;  /* phase: PDS_NET_* */
  uint16_t *a;            /* [PDS_LEARN_*, hidden] bf16; NULL: only `total` is asked for */
  float *w;               /* [.., top_k] */
  int32_t *e, *prev;      /* [.., top_k] */
  int32_t *prev_next;     /* [.., top_k of the next layer]; also where prefill does not know it in time */
  int32_t *target;        /* [.., top_k of the next layer] */
  float *scores;          /* [.., experts of the next layer] what it chose by: its gate's scores, bias included, no group masked */
  uint32_t n;             /* out: tokens copied */
  uint64_t total;         /* out: tokens kept since the learner was switched on, replaced ones included */
} pds_learned;

/* --- costs: what plans decide by; all times are ns --- */
enum { PDS_COST_KNOTS = 16 };

/* ns by tokens: linear between knots (floor), the first knot's value below it, the last two knots'
 * slope beyond. tokens and ns ascend. No knot: 0; one: constant. */
typedef struct pds_cost_curve {
  uint32_t n;
  uint32_t tokens[PDS_COST_KNOTS];
  int64_t ns[PDS_COST_KNOTS];
} pds_cost_curve;

typedef struct pds_costs {
  int64_t io_start;    /* before the first byte of an idle link moves */
  int64_t io_expert;   /* one expert over the link, while the CPU computes */
  int64_t cpu_start;   /* of one parallel job of experts on the CPU, whatever is in it */
  int64_t gpu_start;   /* of one submission of experts on the GPU */
  int64_t predict;     /* the predictor's forward */
  int64_t context_row; /* attention: for each (row, 1024 tokens of context) */
  int64_t context_row_prefill; /* the same in prefill, whose rows read their context together */
  pds_cost_curve cpu_expert; /* what one expert of so many tokens adds to the CPU's job */
  pds_cost_curve gpu_expert; /* and to a submission on the GPU */
  pds_cost_curve attention;  /* norm, attention, norm, gate of one layer by rows of the step, at context 0 */
  pds_cost_curve shared;     /* shared expert, by rows; no knot: none */
} pds_costs;

/* How a GPU plan places experts. */
typedef struct pds_schedule {
  const char *policy;         /* "adaptsched", ...; NULL: that one */
  const pds_costs *costs;
  const uint32_t *popularity; /* [layers, experts of the layer that has most]: share of tokens that activate each,
                               * in 1/65536; NULL: all alike */
  const uint32_t *hit_q16;    /* [layers, 3]: hit rate of predictions for the layer, in decode, batch and
                               * prefill, in 1/65536; NULL: not known */
  const uint32_t *sure_q16;   /* [layers, 3]: how sure its predictor must be of an expert for a draft to name it;
                               * NULL: drafts name all that are predicted */
  const uint8_t *first;       /* [layers, experts]: not 0: where slots of the ring are empty, and the policy keeps a
                               * cache, it begins with this expert; NULL: with none */
} pds_schedule;

typedef struct pds_session_options {
  uint32_t max_seqs;  /* sequence ids run from 0 to max_seqs - 1; 0: 1 */
  uint32_t kv_tokens; /* KV capacity over all sequences, rounded up to whole blocks; 0: max_context */
} pds_session_options;

/* Row i of a step: token[i] at position[i] of sequence seq[i]. Rows of one sequence must continue it without
 * a gap, in order. want_logits may be NULL: then the last row alone has logits. */
typedef struct pds_batch {
  uint32_t n;
  const int32_t *token;
  const int32_t *position;
  const int32_t *seq;
  const uint8_t *want_logits;
} pds_batch;

typedef struct pds_logits {
  const float *data; /* [rows, vocab], row-major, valid until the session's next pds_step */
  uint32_t rows;     /* the batch's rows that wanted logits, in order */
  uint32_t vocab;
} pds_logits;

typedef struct pds_session_stats {
  uint64_t steps;
  uint64_t rows;
  uint64_t step_ns;          /* wall time inside pds_step */
  uint64_t expert_rows;      /* (row, expert) pairs computed */
  uint64_t experts_activated;/* distinct experts per layer and step, summed */
  uint64_t weight_bytes;     /* weight bytes the executed instructions read */
  uint32_t kv_blocks;        /* capacity */
  uint32_t kv_blocks_used;
  uint64_t session_bytes;    /* anonymous memory of the session */
  uint64_t experts_predicted;  /* of the layer after, by layers that predict, while cache prefetch was on */
  uint64_t experts_hit;        /* of them, activated */
  uint64_t prefetch_bytes;     /* pulled into the last-level cache */
  uint64_t prefetch_useful_bytes; /* of them, of activated experts */
} pds_session_stats;

/* --- measuring: what the compiler's cost table is made of --- */
enum {
  PDS_MEASURE_EXPERTS = 0,   /* one parallel job of a layer's experts */
  PDS_MEASURE_SHARED = 1,    /* its shared expert, on `rows` rows */
  PDS_MEASURE_ATTENTION = 2, /* norm, attention, norm and gate of `rows` rows */
  PDS_MEASURE_PREDICT = 3,   /* the predictor's logits of `rows` rows, at most 16 */
  PDS_MEASURE_CONTEXT = 4,   /* nothing: the rows join their sequences, as if a step had computed them */
  /* Of an engine with a GPU, which measures these and CONTEXT alone; on the clock of the GPU's driver. The ring's
   * slots lose what they hold. */
  PDS_MEASURE_GPU_EXPERTS = 5,   /* one submission of experts, the weights of each being those in slot `expert` modulo all slots */
  PDS_MEASURE_GPU_SHARED = 6,    /* the shared expert, on `rows` rows */
  PDS_MEASURE_GPU_ATTENTION = 7, /* norm, attention, norm and gate of `rows` rows, from the first launch to the routes on the host */
  PDS_MEASURE_LINK = 8,          /* `load` to the ring's slots, from an idle link to the last byte */
  PDS_MEASURE_LINK_BUSY = 9,     /* the same while the CPU computes `expert`, as often as it takes */
  PDS_MEASURE_LINK_START = 10,   /* the same of a copy of 4 KiB, or of an expert that is smaller */
  PDS_MEASURE_EXPERTS_BUSY = 11  /* one job of `expert` on the CPU, while `load` cross the link again and again; none: while it is idle */
};
typedef struct pds_measurement {
  uint32_t what;           /* PDS_MEASURE_* */
  uint32_t layer;
  uint32_t rows;
  const int32_t *position; /* [rows], (GPU_)ATTENTION and CONTEXT, as in pds_batch: they continue their sequences */
  const int32_t *seq;      /* [rows] */
  uint32_t n;              /* (GPU_)EXPERTS, EXPERTS_BUSY, LINK_BUSY: how many */
  const uint32_t *expert;  /* [n], none twice */
  const uint32_t *tokens;  /* [n] rows of each, at least 1; max_rows x top_k at most in all */
  uint32_t n_loads;        /* LINK, LINK_BUSY: how many, 1 to the layer's experts; EXPERTS_BUSY: or 0 */
  const uint32_t *load;    /* [n_loads] experts; each goes to the ring's slot `load` modulo its slots */
} pds_measurement;

/* One executed instruction. Times are CLOCK_MONOTONIC nanoseconds. Instructions that ran as one
 * parallel job (a layer's shared and routed experts) have the same times. */
typedef struct pds_trace_record {
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes;    /* weight bytes read */
  int32_t layer;     /* -1: prologue or epilogue */
  uint16_t instr;    /* index within its program */
  uint8_t opcode;    /* enum pds_opcode of pds_isa.h; pds_opcode_name() */
  uint8_t queue;     /* enum pds_queue of pds_isa.h; pds_queue_name() */
  uint32_t rows;
  uint32_t experts;  /* distinct experts, for expert instructions */
} pds_trace_record;

/* What an instruction left behind, for debugging and for collecting routing traces. Called on the thread
 * that called pds_step, after each instruction; pointers are valid during the call only. */
typedef struct pds_tap_event {
  int32_t layer;
  uint16_t instr;
  uint8_t opcode;
  uint8_t arg;
  uint32_t rows;
  uint32_t cols;         /* of data; hidden rows are padded with zeros to a multiple of 32 */
  const float *data;     /* norm, attention, mlp, combine, embed: the residual or normed rows [rows, cols]; gate: routing weights [rows, top_k]; predict:
                          * how sure it is of each expert, [rows that predict, top_k] */
  const int32_t *ids;    /* gate: expert ids [rows, top_k]; predict: those of the next layer; else NULL */
  const int32_t *predicted; /* gate that predicts: experts of the next layer [rows, predicted_cols]; else NULL */
  uint32_t predicted_cols;
  uint32_t n_logits;       /* rows of the step that want logits */
  const int32_t *position; /* of the step's rows, */
  const int32_t *seq;      /* and their sequences: embed; else NULL */
} pds_tap_event;
typedef void (*pds_tap_fn)(void *user, const pds_tap_event *event);

typedef struct pds_sampler {
  float temperature;        /* <= 0: greedy (lowest id wins a tie) */
  float top_p;              /* 1: off */
  float min_p;              /* 0: off */
  float repetition_penalty; /* 1: off; applied to every id in `history` as transformers does */
  int32_t top_k;            /* 0: off */
  uint32_t reserved;
  uint64_t seed;
  uint64_t draw;            /* index of the draw in its stream: the caller adds 1 per token */
} pds_sampler;

/* --- engine: immutable once created; safe to use from several threads --- */
pds_status pds_engine_create(const pds_engine_options *options, pds_engine **out_engine); /* maps weights, verifies programs, starts workers */
void pds_engine_destroy(pds_engine *engine); /* every session must be destroyed before */
pds_status pds_engine_get_info(const pds_engine *engine, pds_engine_info *out_info);
pds_status pds_engine_get_cache_prefetch(const pds_engine *engine, pds_cache_prefetch_info *out_info);

/* Copies a predictor, in place of the layer's one before or, for NULL, of none: then the next layer's gate
 * predicts. Waits for a step that is running, so never from a tap; steps run on meanwhile. Results of steps
 * do not depend on predictors. */
pds_status pds_engine_set_net(pds_engine *engine, uint32_t layer, uint32_t phase, const pds_net_desc *net);

/* GPU plans: copies what decisions are made with; before the first step, and whenever it changes. Waits for a
 * step that is running. Results of steps do not depend on it, beyond rounding on a real GPU. */
pds_status pds_engine_set_schedule(pds_engine *engine, const pds_schedule *schedule);
pds_status pds_engine_get_gpu(const pds_engine *engine, pds_gpu_info *out_info);
pds_status pds_engine_get_ledger(pds_engine *engine, pds_ledger *out_layers); /* [layers]; waits for a step that is running */
const char *pds_policies(void); /* comma-separated names, in the order of their numbers */

/* From now on steps keep tokens of the layers where `wanted` [layers] is not 0; NULL: of none, and the memory
 * is freed. Waits for a step that is running, so never from a tap. */
pds_status pds_engine_set_learner(pds_engine *engine, const uint8_t *wanted);
pds_status pds_engine_read_learned(pds_engine *engine, pds_learned *learned); /* PDS_ERR_BUSY: a step is writing them now */

/* --- session: owns KV and scratch; one pds_step at a time, else PDS_ERR_BUSY --- */
pds_status pds_session_create(pds_engine *engine, const pds_session_options *options, pds_session **out_session);
void pds_session_destroy(pds_session *session);
pds_status pds_step(pds_session *session, const pds_batch *batch, pds_logits *out_logits); /* blocking */
pds_status pds_predict(pds_session *session, const pds_prediction *asked, float *out_logits); /* blocking; [n, experts of the next layer]: what steps predict with */
/* Time of a part of a step on made-up rows, with the kernels and workers of a step, which are awake. Results of
 * steps do not depend on it, but those in sequences that CONTEXT has extended. */
pds_status pds_measure(pds_session *session, const pds_measurement *asked, int64_t *out_ns); /* blocking */
/* From now on what steps predict at a position, of whatever sequence, is this, and not what the predictor says;
 * behind the last of the tokens the predictor's own again. ids [tokens][layers][k]: for a layer that predicts the
 * experts of its target, k as many as a layer of this plan chooses at most; the caller keeps them alive. NULL: none.
 * For tests, and for models whose routing nothing can learn. Results of steps do not depend on it. */
pds_status pds_session_set_predictions(pds_session *session, const uint16_t *ids, uint32_t tokens);
/* From now on gates choose these at a position, of whatever sequence, modulo `tokens`, all with the weight 1 / top_k,
 * whatever their input is. ids [tokens][layers][k]: experts of the layer, none twice a token, k as many as a layer of
 * this plan chooses at most; of layers without a gate nothing is read. The caller keeps them alive. NULL: gates
 * choose for themselves. For benchmarks of random weights: this does change the results of steps. */
pds_status pds_session_set_routes(pds_session *session, const uint16_t *ids, uint32_t tokens);
void pds_cancel(pds_session *session); /* from any thread: the running step, or else the next one, returns PDS_ERR_CANCELLED */
pds_status pds_session_get_stats(const pds_session *session, pds_session_stats *out_stats);
pds_status pds_session_set_tap(pds_session *session, pds_tap_fn fn, void *user); /* NULL: none */
pds_status pds_session_trace_start(pds_session *session, pds_trace_record *buffer, uint64_t capacity); /* the caller keeps the buffer alive until stop */
pds_status pds_session_trace_stop(pds_session *session, uint64_t *out_records, uint64_t *out_dropped);

/* --- sequences of a session; not while its pds_step runs --- */
pds_status pds_seq_length(const pds_session *session, int32_t seq, uint32_t *out_tokens);
pds_status pds_seq_truncate(pds_session *session, int32_t seq, uint32_t tokens); /* 0 frees it */
pds_status pds_seq_fork(pds_session *session, int32_t src, int32_t dst); /* dst becomes src's copy; full blocks are shared */
pds_status pds_seq_save_size(const pds_session *session, int32_t seq, uint64_t *out_bytes);
pds_status pds_seq_save(const pds_session *session, int32_t seq, void *buffer, uint64_t bytes);
pds_status pds_seq_restore(pds_session *session, int32_t seq, const void *buffer, uint64_t bytes); /* refuses another plan's KV */

/* --- sampling: stateless and deterministic; scratch is [vocab] floats and [vocab] ints of the caller's --- */
pds_status pds_sample(const float *logits, uint32_t vocab, const pds_sampler *sampler, const int32_t *history, uint32_t n_history,
                      float *scratch_values, int32_t *scratch_ids, int32_t *out_token);

/* --- generation: steps and samples one sequence, with no caller in between ---
 * history[0..n_history) holds the prompt and the tokens so far; its last one is not in the KV yet. New tokens are
 * appended to it, up to max_tokens, and *out_tokens counts them, also when the call fails (a cancelled one is
 * resumed by calling again). Stops behind a token of stop_ids. The sampler's draw is that of the first new token. */
typedef struct pds_generation {
  const pds_sampler *sampler;
  const int32_t *stop_ids;
  uint32_t n_stop_ids;
  uint32_t n_history;
  int32_t *history; /* [n_history + max_tokens] */
  uint32_t max_tokens;
  int32_t seq;
  float *scratch_values; /* [vocab], as for pds_sample */
  int32_t *scratch_ids;  /* [vocab] */
} pds_generation;
pds_status pds_generate(pds_session *session, const pds_generation *generation, uint32_t *out_tokens); /* blocking */

/* --- names and errors --- */
const char *pds_last_error(void);
const char *pds_status_name(pds_status status);
const char *pds_opcode_name(uint8_t opcode);
const char *pds_queue_name(uint8_t queue);
const char *pds_isa_built(void);    /* comma-separated kernel paths in this library, best first */
const char *pds_isa_runnable(void); /* those of them that this CPU and operating system can run */
uint32_t pds_abi_version(void);

/* pdscope-cdef-end */
#ifndef PDS_CDEF
#pragma GCC visibility pop
#endif
/* clang-format on */

#ifdef __cplusplus
}
#endif
#endif
