/* memory.h: how much memory an engine and a session take, to the byte.
 *
 * The runtime takes anonymous memory by mmap alone, through pds_map_anon(), in exactly these
 * pieces; compiler/passes/plan_memory.py mirrors the formulas, and a test with an interposed
 * allocator compares them.
 *
 *   r64(x) = x rounded up to 64      grain(x) = x rounded up to PDS_GRAIN
 *
 *   engine(threads), one mmap:
 *     grain( PDS_ENGINE_HEADER + PDS_POOL_BYTES + threads * PDS_WORKER_BYTES + r64(8 * n_files)
 *            + r64(program_bytes) + threads * thread_scratch_bytes )
 *     + (threads - 1) * PDS_STACK_BYTES
 *
 *   session(max_seqs, kv_tokens), one mmap:
 *     grain( PDS_SESSION_HEADER + r64(scratch_bytes) + tables + kv_blocks * kv_block_bytes )
 *     seq_blocks = ceil(max_context / kv_block)           kv_blocks = ceil(kv_tokens / kv_block)
 *     tables     = r64(4 * max_seqs * seq_blocks) + 2 * r64(4 * max_seqs) + 2 * r64(4 * kv_blocks)
 *                  + r64(4 * max_logits) + max_seqs * last
 *     last       = r64(4 + 2 * n_layers * last_top_k) in plans with a predictor, else 0
 *
 *   on a GPU plan without the KV blocks, which lie on the GPU; gpu.c says what else it takes
 *
 *   predictors, each in one mmap of its own, as they are set (nets.c)
 *   tokens for the learner, one mmap, when it is switched on (learn.h)
 *
 *   weights, mapped: the bytes of each weight file (read-only file mappings, one a file)
 *   weights, copied or made up, one mmap: the sum of the files, each rounded up to PDS_FILE_GRAIN, rounded up
 *     to PDS_HUGE
 *
 * A mapping larger than PDS_HUGE begins at a multiple of it.
 */
#ifndef PDS_MEMORY_H
#define PDS_MEMORY_H

#include <stdint.h>

#include "plan_desc.h"

#define PDS_GRAIN 65536u         /* a multiple of every page size that Linux uses */
#define PDS_HUGE 2097152u        /* a huge page of x86-64, and of aarch64 with 4 KiB pages */
#define PDS_FILE_GRAIN 4096u     /* alignment of experts within a file */
#define PDS_ENGINE_HEADER 16384u /* struct pds_engine, checked by a static assertion */
#define PDS_SESSION_HEADER 8192u /* struct pds_session */
#define PDS_POOL_BYTES 2048u     /* struct pds_pool */
#define PDS_WORKER_BYTES 256u    /* one worker's control block */
#define PDS_STACK_GUARD 65536u   /* without access, at a stack's low end */
#if defined(__SANITIZE_THREAD__)
#define PDS_STACK_BYTES 2686976u /* ThreadSanitizer keeps 900 KB of its own there */
#else
#define PDS_STACK_BYTES 1114112u /* one worker's stack: the guard, then 1 MiB */
#endif
#define PDS_MAX_THREADS 1024u
#define PDS_MAX_SEQS 65536u

static inline uint64_t pds_round_up(uint64_t x, uint64_t to) {
  return (x + to - 1) / to * to;
}

/* Offsets within an engine's arena. */
typedef struct pds_engine_layout {
  uint64_t pool, workers, files, program, scratch, stacks, total;
} pds_engine_layout;

static inline pds_engine_layout pds_layout_engine(const pds_plan *plan, uint32_t threads) {
  pds_engine_layout at;
  at.pool = PDS_ENGINE_HEADER;
  at.workers = at.pool + PDS_POOL_BYTES;
  at.files = at.workers + (uint64_t)threads * PDS_WORKER_BYTES;
  at.program = at.files + pds_round_up(8 * (uint64_t)plan->n_files, 64);
  at.scratch = at.program + pds_round_up(plan->program_bytes, 64);
  at.stacks = pds_round_up(at.scratch + threads * plan->thread_scratch_bytes, PDS_GRAIN);
  at.total = at.stacks + (uint64_t)(threads - 1) * PDS_STACK_BYTES;
  return at;
}

/* Bytes of the copy of all weight files. */
static inline uint64_t pds_layout_weights(const pds_plan *plan) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < plan->n_files; i++)
    bytes += pds_round_up(plan->files[i].bytes, PDS_FILE_GRAIN);
  return pds_round_up(bytes, PDS_HUGE);
}

/* What a sequence's last token chose: the sequence's length behind it, then the experts of each
 * layer. */
static inline uint64_t pds_last_bytes(const pds_plan *plan) {
  if (!plan->last_top_k) return 0;
  return pds_round_up(4 + 2 * (uint64_t)plan->n_layers * plan->last_top_k, 64);
}

/* Offsets within a session's arena. */
typedef struct pds_session_layout {
  uint32_t seq_blocks, kv_blocks;
  uint64_t scratch, table, length, pending, refs, free_list, logit_rows, last, kv, total;
} pds_session_layout;

static inline pds_session_layout pds_layout_session(const pds_plan *plan, uint32_t max_seqs,
                                                    uint32_t kv_tokens, int kv_on_host) {
  pds_session_layout at;
  at.seq_blocks = (uint32_t)(pds_round_up(plan->max_context, plan->kv_block) / plan->kv_block);
  at.kv_blocks = (uint32_t)(pds_round_up(kv_tokens, plan->kv_block) / plan->kv_block);
  at.scratch = PDS_SESSION_HEADER;
  at.table = at.scratch + pds_round_up(plan->scratch_bytes, 64);
  at.length = at.table + pds_round_up(4 * (uint64_t)max_seqs * at.seq_blocks, 64);
  at.pending = at.length + pds_round_up(4 * (uint64_t)max_seqs, 64);
  at.refs = at.pending + pds_round_up(4 * (uint64_t)max_seqs, 64);
  at.free_list = at.refs + pds_round_up(4 * (uint64_t)at.kv_blocks, 64);
  at.logit_rows = at.free_list + pds_round_up(4 * (uint64_t)at.kv_blocks, 64);
  at.last = at.logit_rows + pds_round_up(4 * (uint64_t)plan->max_logits, 64);
  at.kv = at.last + max_seqs * pds_last_bytes(plan);
  at.total =
      pds_round_up(at.kv + (kv_on_host ? at.kv_blocks * plan->kv_block_bytes : 0), PDS_GRAIN);
  return at;
}

#endif
