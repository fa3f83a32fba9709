/* kv.h: the KV blocks of a session, and which blocks each sequence holds. What a block contains is
 * kv_layout.h's matter; here it is kv_block_bytes of bytes for kv_block tokens of all layers.
 *
 * A block may belong to several sequences (pds_kv_fork); it is written only while it belongs to
 * one: a sequence about to append to a shared, partly filled block gets its own copy first. */
#ifndef PDS_KV_H
#define PDS_KV_H

#include "memory.h"
#include "plan_desc.h"
#include "status.h"

#define PDS_NO_BLOCK UINT32_MAX

typedef enum pds_kv_way { PDS_KV_WITHIN, PDS_KV_OUT, PDS_KV_IN } pds_kv_way;

typedef struct pds_kv {
  const pds_plan *plan;
  uint32_t max_seqs, seq_blocks;
  uint32_t blocks, n_free;
  uint32_t *table;     /* [max_seqs][seq_blocks] block indices or PDS_NO_BLOCK */
  uint32_t *length;    /* [max_seqs] committed tokens */
  uint32_t *pending;   /* [max_seqs] tokens of the running step; 0 between steps */
  uint32_t *refs;      /* [blocks] sequences that hold the block */
  uint32_t *free_list; /* [n_free] stack */
  unsigned char *data;
  /* How blocks are copied: NULL: memcpy; else `data` is an address that only this can use. */
  pds_status (*copy)(void *user, void *to, const void *from, uint64_t bytes, pds_kv_way way);
  void *user;
} pds_kv;

void pds_kv_init(pds_kv *kv, const pds_plan *plan, uint32_t max_seqs, unsigned char *arena,
                 const pds_session_layout *at);

/* Checks that every row continues its sequence within the context, and gives each sequence the
 * blocks for its new rows. On failure no sequence has changed. Must be followed by commit or
 * rollback of the same rows. */
pds_status pds_kv_begin(pds_kv *kv, uint32_t rows, const int32_t *seq, const int32_t *position);
void pds_kv_commit(pds_kv *kv, uint32_t rows, const int32_t *seq);
void pds_kv_rollback(pds_kv *kv, uint32_t rows, const int32_t *seq);

pds_status pds_kv_check_seq(const pds_kv *kv, int32_t seq);
pds_status pds_kv_truncate(pds_kv *kv, int32_t seq, uint32_t tokens);
pds_status pds_kv_fork(pds_kv *kv, int32_t src, int32_t dst);

/* One sequence as bytes: a header (magic, version, plan, dtype, counts, CRCs), then its blocks. */
pds_status pds_kv_save_size(const pds_kv *kv, int32_t seq, uint64_t *out_bytes);
pds_status pds_kv_save(const pds_kv *kv, int32_t seq, void *buffer, uint64_t bytes);
pds_status pds_kv_restore(pds_kv *kv, int32_t seq, const void *buffer, uint64_t bytes);

#endif
