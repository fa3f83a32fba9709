/* kv.c: block tables with reference counts. */
#include "kv.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "crc.h"

#define SAVE_VERSION 1u
static const char save_magic[8] = {'P', 'D', 'S', 'K', 'V', 0, 0, 0};

typedef struct save_header {
  char magic[8];
  uint32_t version, dtype, tokens, kv_block;
  uint64_t kv_block_bytes, payload_bytes;
  uint32_t payload_crc;
  uint32_t header_crc; /* of the header with this field 0 */
  char plan_hash[80];
} save_header;
_Static_assert(sizeof(save_header) == 128, "layout of a saved sequence");

void pds_kv_init(pds_kv *kv, const pds_plan *plan, uint32_t max_seqs, unsigned char *arena,
                 const pds_session_layout *at) {
  kv->plan = plan;
  kv->max_seqs = max_seqs;
  kv->seq_blocks = at->seq_blocks;
  kv->blocks = kv->n_free = at->kv_blocks;
  kv->table = (uint32_t *)(arena + at->table);
  kv->length = (uint32_t *)(arena + at->length);
  kv->pending = (uint32_t *)(arena + at->pending);
  kv->refs = (uint32_t *)(arena + at->refs);
  kv->free_list = (uint32_t *)(arena + at->free_list);
  kv->data = arena + at->kv;
  for (uint64_t i = 0; i < (uint64_t)max_seqs * kv->seq_blocks; i++) kv->table[i] = PDS_NO_BLOCK;
  for (uint32_t i = 0; i < kv->blocks; i++) kv->free_list[i] = kv->blocks - 1 - i;
}

static uint32_t *row_of(const pds_kv *kv, int32_t seq) {
  return kv->table + (size_t)seq * kv->seq_blocks;
}

static unsigned char *block_at(const pds_kv *kv, uint32_t block) {
  return kv->data + block * kv->plan->kv_block_bytes;
}

static pds_status copy_block(const pds_kv *kv, void *to, const void *from, pds_kv_way way) {
  if (kv->copy) return kv->copy(kv->user, to, from, kv->plan->kv_block_bytes, way);
  memcpy(to, from, kv->plan->kv_block_bytes);
  return PDS_OK;
}

static uint32_t blocks_for(const pds_kv *kv, uint32_t tokens) {
  return tokens / kv->plan->kv_block + (tokens % kv->plan->kv_block != 0);
}

/* A free block with one holder, or PDS_NO_BLOCK. */
static uint32_t take(pds_kv *kv) {
  if (kv->n_free == 0) return PDS_NO_BLOCK;
  uint32_t block = kv->free_list[--kv->n_free];
  kv->refs[block] = 1;
  return block;
}

static void release(pds_kv *kv, uint32_t *entry) {
  if (--kv->refs[*entry] == 0) kv->free_list[kv->n_free++] = *entry;
  *entry = PDS_NO_BLOCK;
}

/* Blocks that would be free if `seq` gave up all of its own. */
static uint32_t free_without(const pds_kv *kv, int32_t seq) {
  uint32_t n = kv->n_free, held = blocks_for(kv, kv->length[seq]);
  for (uint32_t b = 0; b < held; b++) n += kv->refs[row_of(kv, seq)[b]] == 1;
  return n;
}

static void drop(pds_kv *kv, int32_t seq, uint32_t tokens) {
  uint32_t held = blocks_for(kv, kv->length[seq]);
  for (uint32_t b = blocks_for(kv, tokens); b < held; b++) release(kv, &row_of(kv, seq)[b]);
  kv->length[seq] = tokens;
}

static bool in_range(const pds_kv *kv, int32_t seq) {
  return seq >= 0 && (uint32_t)seq < kv->max_seqs;
}

pds_status pds_kv_check_seq(const pds_kv *kv, int32_t seq) {
  if (in_range(kv, seq)) return PDS_OK;
  return pds_fail(PDS_ERR_SEQUENCE, "sequence %d: expected 0 to %u, as the session was created for",
                  seq, kv->max_seqs - 1);
}

static pds_status full(const pds_kv *kv) {
  return pds_fail(PDS_ERR_KV_FULL,
                  "KV cache: all %u blocks of %u tokens are in use; truncate a sequence, or create "
                  "the session with more kv_tokens",
                  kv->blocks, kv->plan->kv_block);
}

/* Counts each sequence's new rows into `pending`; undone by the caller on failure. */
static pds_status check_rows(pds_kv *kv, uint32_t rows, const int32_t *seq,
                             const int32_t *position) {
  for (uint32_t i = 0; i < rows; i++) {
    PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, seq[i]));
    uint32_t next = kv->length[seq[i]] + kv->pending[seq[i]];
    if (position[i] < 0 || (uint32_t)position[i] != next)
      return pds_fail(PDS_ERR_POSITION, "row %u: position %d of sequence %d, expected %u", i,
                      position[i], seq[i], next);
    if (next >= kv->plan->max_context)
      return pds_fail(PDS_ERR_CONTEXT,
                      "row %u: sequence %d would exceed the plan's context of %u tokens; compile "
                      "with a larger --max-context",
                      i, seq[i], kv->plan->max_context);
    kv->pending[seq[i]]++;
  }
  return PDS_OK;
}

/* Gives `seq` sole use of the block that its next token goes to, and blocks for all its pending
 * tokens. */
static pds_status extend(pds_kv *kv, int32_t seq) {
  uint32_t *row = row_of(kv, seq), length = kv->length[seq];
  uint32_t held = blocks_for(kv, length), want = blocks_for(kv, length + kv->pending[seq]);
  if (length % kv->plan->kv_block != 0 && kv->refs[row[held - 1]] > 1) {
    uint32_t copy = take(kv);
    if (copy == PDS_NO_BLOCK) return full(kv);
    const pds_status status =
        copy_block(kv, block_at(kv, copy), block_at(kv, row[held - 1]), PDS_KV_WITHIN);
    if (status != PDS_OK) {
      release(kv, &copy);
      return status;
    }
    release(kv, &row[held - 1]);
    row[held - 1] = copy;
  }
  for (uint32_t b = held; b < want; b++)
    if ((row[b] = take(kv)) == PDS_NO_BLOCK) return full(kv);
  return PDS_OK;
}

pds_status pds_kv_begin(pds_kv *kv, uint32_t rows, const int32_t *seq, const int32_t *position) {
  pds_status status = check_rows(kv, rows, seq, position);
  /* Each sequence of the step has exactly one row at its committed length: its first. */
  for (uint32_t i = 0; i < rows && status == PDS_OK; i++)
    if ((uint32_t)position[i] == kv->length[seq[i]]) status = extend(kv, seq[i]);
  if (status != PDS_OK) pds_kv_rollback(kv, rows, seq);
  return status;
}

void pds_kv_commit(pds_kv *kv, uint32_t rows, const int32_t *seq) {
  for (uint32_t i = 0; i < rows; i++) {
    kv->length[seq[i]] += kv->pending[seq[i]];
    kv->pending[seq[i]] = 0;
  }
}

void pds_kv_rollback(pds_kv *kv, uint32_t rows, const int32_t *seq) {
  for (uint32_t i = 0; i < rows; i++) {
    /* Also called for rows that failed the checks; must leave their error text alone. */
    if (!in_range(kv, seq[i]) || kv->pending[seq[i]] == 0) continue;
    uint32_t *row = row_of(kv, seq[i]), length = kv->length[seq[i]];
    uint32_t want = blocks_for(kv, length + kv->pending[seq[i]]);
    for (uint32_t b = blocks_for(kv, length); b < want; b++)
      if (row[b] != PDS_NO_BLOCK) release(kv, &row[b]);
    kv->pending[seq[i]] = 0;
  }
}

pds_status pds_kv_truncate(pds_kv *kv, int32_t seq, uint32_t tokens) {
  PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, seq));
  if (tokens > kv->length[seq])
    return pds_fail(PDS_ERR_ARGUMENT, "truncate sequence %d to %u tokens: it has only %u", seq,
                    tokens, kv->length[seq]);
  drop(kv, seq, tokens);
  return PDS_OK;
}

pds_status pds_kv_fork(pds_kv *kv, int32_t src, int32_t dst) {
  PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, src));
  PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, dst));
  uint32_t length = kv->length[src], block = kv->plan->kv_block, whole = length / block;
  if (length == 0) return pds_fail(PDS_ERR_SEQUENCE, "fork of sequence %d: it is empty", src);
  if (src == dst) return pds_fail(PDS_ERR_ARGUMENT, "fork of sequence %d onto itself", src);
  bool partial = length % block != 0;
  if (partial && free_without(kv, dst) == 0) return full(kv);
  drop(kv, dst, 0);
  const uint32_t *from = row_of(kv, src);
  uint32_t *to = row_of(kv, dst);
  for (uint32_t b = 0; b < whole; b++) {
    to[b] = from[b];
    kv->refs[from[b]]++;
  }
  kv->length[dst] = length;
  if (!partial) return PDS_OK;
  to[whole] = take(kv);
  const pds_status status =
      copy_block(kv, block_at(kv, to[whole]), block_at(kv, from[whole]), PDS_KV_WITHIN);
  if (status != PDS_OK) drop(kv, dst, 0);
  return status;
}

/* --- save and restore --- */

static uint32_t header_crc(const save_header *header) {
  save_header copy = *header;
  copy.header_crc = 0;
  return pds_crc32(0, &copy, sizeof copy);
}

pds_status pds_kv_save_size(const pds_kv *kv, int32_t seq, uint64_t *out_bytes) {
  PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, seq));
  if (kv->length[seq] == 0)
    return pds_fail(PDS_ERR_SEQUENCE, "save of sequence %d: it is empty", seq);
  *out_bytes = sizeof(save_header) + blocks_for(kv, kv->length[seq]) * kv->plan->kv_block_bytes;
  return PDS_OK;
}

pds_status pds_kv_save(const pds_kv *kv, int32_t seq, void *buffer, uint64_t bytes) {
  uint64_t need;
  PDS_RETURN_IF_ERROR(pds_kv_save_size(kv, seq, &need));
  if (bytes != need)
    return pds_fail(PDS_ERR_ARGUMENT, "save of sequence %d: a buffer of %llu bytes, expected %llu",
                    seq, (unsigned long long)bytes, (unsigned long long)need);
  const pds_plan *plan = kv->plan;
  save_header header = {.version = SAVE_VERSION,
                        .dtype = plan->act_dtype,
                        .tokens = kv->length[seq],
                        .kv_block = plan->kv_block,
                        .kv_block_bytes = plan->kv_block_bytes,
                        .payload_bytes = need - sizeof header};
  memcpy(header.magic, save_magic, sizeof save_magic);
  strncpy(header.plan_hash, plan->plan_hash, sizeof header.plan_hash - 1);
  unsigned char *to = (unsigned char *)buffer + sizeof header;
  for (uint32_t b = 0; b < blocks_for(kv, kv->length[seq]); b++, to += plan->kv_block_bytes) {
    PDS_RETURN_IF_ERROR(copy_block(kv, to, block_at(kv, row_of(kv, seq)[b]), PDS_KV_OUT));
    header.payload_crc = pds_crc32(header.payload_crc, to, plan->kv_block_bytes);
  }
  header.header_crc = header_crc(&header);
  memcpy(buffer, &header, sizeof header);
  return PDS_OK;
}

static pds_status check_saved(const pds_kv *kv, const save_header *header, const void *payload,
                              uint64_t bytes) {
  const pds_plan *plan = kv->plan;
  if (memcmp(header->magic, save_magic, sizeof save_magic) != 0)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: these bytes are not one");
  if (header->version != SAVE_VERSION)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: format version %u, expected %u",
                    header->version, SAVE_VERSION);
  if (header->header_crc != header_crc(header))
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: its header is damaged");
  char hash[sizeof header->plan_hash] = {0};
  strncpy(hash, plan->plan_hash, sizeof hash - 1);
  if (memcmp(header->plan_hash, hash, sizeof hash) != 0 || header->dtype != plan->act_dtype ||
      header->kv_block != plan->kv_block || header->kv_block_bytes != plan->kv_block_bytes)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: from plan %.16s, but this is plan %.16s",
                    header->plan_hash, hash);
  if (header->tokens == 0 || header->tokens > plan->max_context ||
      header->payload_bytes != blocks_for(kv, header->tokens) * plan->kv_block_bytes)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: %u tokens in %llu bytes", header->tokens,
                    (unsigned long long)header->payload_bytes);
  if (bytes != sizeof *header + header->payload_bytes)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: %llu bytes, expected %llu",
                    (unsigned long long)bytes,
                    (unsigned long long)(sizeof *header + header->payload_bytes));
  if (header->payload_crc != pds_crc32(0, payload, header->payload_bytes))
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: its contents are damaged");
  return PDS_OK;
}

pds_status pds_kv_restore(pds_kv *kv, int32_t seq, const void *buffer, uint64_t bytes) {
  PDS_RETURN_IF_ERROR(pds_kv_check_seq(kv, seq));
  save_header header;
  if (bytes < sizeof header)
    return pds_fail(PDS_ERR_PLAN_FORMAT, "saved sequence: %llu bytes, expected at least %zu",
                    (unsigned long long)bytes, sizeof header);
  memcpy(&header, buffer, sizeof header);
  const unsigned char *payload = (const unsigned char *)buffer + sizeof header;
  PDS_RETURN_IF_ERROR(check_saved(kv, &header, payload, bytes));
  uint32_t blocks = blocks_for(kv, header.tokens);
  if (free_without(kv, seq) < blocks) return full(kv);
  drop(kv, seq, 0);
  for (uint32_t b = 0; b < blocks; b++) row_of(kv, seq)[b] = take(kv);
  kv->length[seq] = header.tokens;
  for (uint32_t b = 0; b < blocks; b++, payload += kv->plan->kv_block_bytes) {
    const pds_status status = copy_block(kv, block_at(kv, row_of(kv, seq)[b]), payload, PDS_KV_IN);
    if (status != PDS_OK) {
      drop(kv, seq, 0);
      return status;
    }
  }
  return PDS_OK;
}
