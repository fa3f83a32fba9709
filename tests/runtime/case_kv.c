/* case_kv.c: KV blocks against a model of them: each sequence is an array of tokens. A step writes
 * its tokens into the blocks as attention would, and after every call all sequences must read back
 * as the model has them. */
#include <stdlib.h>

#include "kv.h"
#include "map.h"
#include "test.h"

enum { BLOCK = 4, CONTEXT = 30, SEQS = 5, KV_TOKENS = 70, MAX_ROWS = 9 };

static const pds_plan plan = {.plan_hash = "0123456789abcdef",
                              .act_dtype = PDS_F32,
                              .max_context = CONTEXT,
                              .kv_block = BLOCK,
                              .kv_block_bytes = 64,
                              .max_logits = 1};

typedef struct model {
  uint32_t length[SEQS];
  int32_t tokens[SEQS][CONTEXT];
} model;

typedef struct fixture {
  pds_kv kv;
  model model;
  unsigned char *arena;
  uint64_t bytes;
} fixture;

static void open_kv(fixture *f, const pds_plan *of) {
  pds_session_layout at = pds_layout_session(of, SEQS, KV_TOKENS, 1);
  void *arena;
  memset(f, 0, sizeof *f);
  f->bytes = at.total;
  CHECK_OK(pds_map_anon(at.total, "test", &arena));
  f->arena = arena;
  pds_kv_init(&f->kv, of, SEQS, arena, &at);
}

static void close_kv(fixture *f) {
  pds_unmap(f->arena, f->bytes);
}

static int32_t *cell(const pds_kv *kv, int32_t seq, uint32_t position) {
  uint32_t block = kv->table[(size_t)seq * kv->seq_blocks + position / BLOCK];
  return (int32_t *)(kv->data + (uint64_t)block * 64) + position % BLOCK;
}

/* All contents, and the books: every block is free or held, once per holder. */
static void check_all(const fixture *f) {
  const pds_kv *kv = &f->kv;
  uint32_t held[64] = {0}, used = 0;
  for (int32_t s = 0; s < SEQS; s++) {
    CHECK_EQ(kv->length[s], f->model.length[s]);
    CHECK_EQ(kv->pending[s], 0);
    for (uint32_t p = 0; p < kv->length[s]; p++) CHECK_EQ(*cell(kv, s, p), f->model.tokens[s][p]);
    for (uint32_t b = 0; b < kv->seq_blocks; b++) {
      uint32_t block = kv->table[(size_t)s * kv->seq_blocks + b];
      bool expected = b * BLOCK < kv->length[s];
      CHECK_EQ(block != PDS_NO_BLOCK, expected);
      if (block != PDS_NO_BLOCK) held[block]++;
    }
  }
  for (uint32_t b = 0; b < kv->blocks; b++) {
    CHECK_EQ(kv->refs[b], held[b]);
    used += held[b] > 0;
  }
  CHECK_EQ(kv->n_free, kv->blocks - used);
}

/* A step of `rows` rows; commits, or rolls back as a cancelled step does. */
static pds_status step(fixture *f, uint32_t rows, const int32_t *seq, const int32_t *token,
                       bool commit) {
  int32_t position[MAX_ROWS] = {0};
  model next = f->model;
  for (uint32_t i = 0; i < rows; i++) {
    position[i] = (int32_t)next.length[seq[i]];
    if (next.length[seq[i]] < CONTEXT) next.tokens[seq[i]][next.length[seq[i]]] = token[i];
    next.length[seq[i]]++;
  }
  pds_status status = pds_kv_begin(&f->kv, rows, seq, position);
  if (status != PDS_OK) return status;
  for (uint32_t i = 0; i < rows; i++) {
    CHECK_EQ(
        f->kv.refs[f->kv.table[(size_t)seq[i] * f->kv.seq_blocks + (uint32_t)position[i] / BLOCK]],
        1);
    *cell(&f->kv, seq[i], (uint32_t)position[i]) = token[i];
  }
  if (commit) {
    pds_kv_commit(&f->kv, rows, seq);
    f->model = next;
  } else {
    pds_kv_rollback(&f->kv, rows, seq);
  }
  return status;
}

static uint32_t append(fixture *f, int32_t seq, uint32_t n, uint32_t *random) {
  for (uint32_t i = 0; i < n; i++) {
    int32_t token = (int32_t)(test_random(random) % 1000);
    if (step(f, 1, &seq, &token, true) != PDS_OK) return i;
  }
  return n;
}

static void truncate(fixture *f, int32_t seq, uint32_t tokens) {
  CHECK_OK(pds_kv_truncate(&f->kv, seq, tokens));
  f->model.length[seq] = tokens;
}

static void fork_seq(fixture *f, int32_t src, int32_t dst) {
  CHECK_OK(pds_kv_fork(&f->kv, src, dst));
  f->model.length[dst] = f->model.length[src];
  memcpy(f->model.tokens[dst], f->model.tokens[src], sizeof f->model.tokens[src]);
}

static void sharing(void) {
  fixture f;
  uint32_t random = 1;
  open_kv(&f, &plan);
  CHECK_EQ(f.kv.blocks, 18);
  append(&f, 0, 10, &random); /* 3 blocks, the last one half full */
  fork_seq(&f, 0, 1);
  CHECK_EQ(f.kv.blocks - f.kv.n_free, 4); /* two shared, the partial one copied */
  append(&f, 1, 1, &random);
  append(&f, 0, 3, &random);
  check_all(&f);
  /* Appending inside a block that another sequence still reads makes a copy. */
  truncate(&f, 1, 6);
  CHECK_EQ(f.kv.blocks - f.kv.n_free, 4);
  append(&f, 1, 1, &random);
  CHECK_EQ(f.kv.blocks - f.kv.n_free, 5);
  check_all(&f);
  truncate(&f, 0, 0);
  check_all(&f);
  truncate(&f, 1, 0);
  CHECK_EQ(f.kv.n_free, f.kv.blocks);
  close_kv(&f);
}

static void refusals(void) {
  fixture f;
  uint32_t random = 2;
  open_kv(&f, &plan);
  int32_t seq[] = {0, 0, 1, 0}, gap[] = {0, 1, 0, 3}, bad_seq[] = {0, SEQS}, negative[] = {-1};
  CHECK_STATUS(pds_kv_begin(&f.kv, 4, seq, gap), PDS_ERR_POSITION,
               "row 3: position 3 of sequence 0, expected 2");
  check_all(&f);
  CHECK_STATUS(pds_kv_begin(&f.kv, 2, bad_seq, gap), PDS_ERR_SEQUENCE, "sequence 5");
  CHECK_STATUS(pds_kv_begin(&f.kv, 1, negative, gap), PDS_ERR_SEQUENCE, "sequence -1");
  CHECK_STATUS(pds_kv_begin(&f.kv, 1, seq, negative), PDS_ERR_POSITION, "position -1");
  check_all(&f);
  CHECK_EQ(append(&f, 2, CONTEXT + 1, &random), CONTEXT);
  int32_t two = 2, token = 5;
  CHECK_STATUS(step(&f, 1, &two, &token, true), PDS_ERR_CONTEXT, "context of 30");
  check_all(&f);
  CHECK_EQ(append(&f, 3, CONTEXT, &random), CONTEXT); /* 16 of 18 blocks */
  /* The third new block of this step is not there: nothing may remain of the first two. */
  int32_t rows[] = {0, 1, 4}, tokens[] = {7, 8, 9};
  CHECK_STATUS(step(&f, 3, rows, tokens, true), PDS_ERR_KV_FULL, "18 blocks");
  check_all(&f);
  CHECK_OK(step(&f, 2, rows, tokens, true));
  check_all(&f);
  CHECK_STATUS(pds_kv_fork(&f.kv, 2, 4), PDS_ERR_KV_FULL,
               "truncate"); /* partial block, none free */
  check_all(&f);
  fork_seq(&f, 2, 1); /* frees a block of its own first */
  check_all(&f);
  CHECK_STATUS(pds_kv_fork(&f.kv, 4, 1), PDS_ERR_SEQUENCE, "empty");
  CHECK_STATUS(pds_kv_fork(&f.kv, 2, 2), PDS_ERR_ARGUMENT, "itself");
  CHECK_STATUS(pds_kv_fork(&f.kv, 2, 9), PDS_ERR_SEQUENCE, "sequence 9");
  CHECK_STATUS(pds_kv_truncate(&f.kv, 2, 31), PDS_ERR_ARGUMENT, "only 30");
  close_kv(&f);
}

static void saving(void) {
  fixture f, g;
  uint32_t random = 3;
  open_kv(&f, &plan);
  uint64_t bytes = 0;
  CHECK_STATUS(pds_kv_save_size(&f.kv, 0, &bytes), PDS_ERR_SEQUENCE, "empty");
  append(&f, 0, 11, &random);
  CHECK_OK(pds_kv_save_size(&f.kv, 0, &bytes));
  CHECK_EQ(bytes, 128 + 3 * 64);
  unsigned char saved[512], bad[512];
  CHECK_STATUS(pds_kv_save(&f.kv, 0, saved, bytes - 1), PDS_ERR_ARGUMENT, "expected 320");
  CHECK_OK(pds_kv_save(&f.kv, 0, saved, bytes));
  /* Into another session, over what was there, and back into a sequence that shares blocks. */
  open_kv(&g, &plan);
  append(&g, 3, 20, &random);
  CHECK_OK(pds_kv_restore(&g.kv, 3, saved, bytes));
  g.model.length[3] = 11;
  memcpy(g.model.tokens[3], f.model.tokens[0], sizeof g.model.tokens[3]);
  append(&g, 3, 4, &random);
  check_all(&g);
  fork_seq(&f, 0, 1);
  append(&f, 1, 4, &random);
  CHECK_OK(pds_kv_restore(&f.kv, 1, saved, bytes));
  f.model.length[1] = 11;
  memcpy(f.model.tokens[1], f.model.tokens[0], sizeof f.model.tokens[1]);
  check_all(&f);
  /* Any changed byte and any other length is refused, and changes nothing. */
  for (uint64_t i = 0; i < bytes; i++) {
    memcpy(bad, saved, bytes);
    bad[i] ^= 0x10;
    CHECK_STATUS(pds_kv_restore(&f.kv, 0, bad, bytes), PDS_ERR_PLAN_FORMAT, "saved sequence");
  }
  for (uint64_t n = 0; n < bytes; n++)
    CHECK_STATUS(pds_kv_restore(&f.kv, 0, saved, n), PDS_ERR_PLAN_FORMAT, "saved sequence");
  check_all(&f);
  pds_plan other = plan;
  other.plan_hash = "fedcba9876543210";
  fixture h;
  open_kv(&h, &other);
  CHECK_STATUS(pds_kv_restore(&h.kv, 0, saved, bytes), PDS_ERR_PLAN_FORMAT,
               "from plan 0123456789abcdef");
  other.plan_hash = plan.plan_hash;
  other.act_dtype = PDS_BF16;
  CHECK_STATUS(pds_kv_restore(&h.kv, 0, saved, bytes), PDS_ERR_PLAN_FORMAT, "from plan");
  close_kv(&h);
  append(&g, 0, 30, &random);
  append(&g, 1, 30, &random); /* 20 wanted, 18 there */
  CHECK_STATUS(pds_kv_restore(&g.kv, 2, saved, bytes), PDS_ERR_KV_FULL, "");
  check_all(&g);
  close_kv(&g);
  close_kv(&f);
}

/* Random calls of every kind. */
static void random_calls(void) {
  fixture f;
  uint32_t random = 4, refused = 0, done = 0;
  open_kv(&f, &plan);
  for (int i = 0; i < 4000; i++) {
    uint32_t kind = test_random(&random) % 8;
    int32_t a = (int32_t)(test_random(&random) % SEQS), b = (int32_t)(test_random(&random) % SEQS);
    if (kind == 0) {
      truncate(&f, a, f.model.length[a] ? test_random(&random) % (f.model.length[a] + 1) : 0);
    } else if (kind == 1) {
      if (pds_kv_fork(&f.kv, a, b) == PDS_OK) {
        f.model.length[b] = f.model.length[a];
        memcpy(f.model.tokens[b], f.model.tokens[a], sizeof f.model.tokens[a]);
      }
    } else {
      int32_t seq[MAX_ROWS], token[MAX_ROWS];
      uint32_t rows = 1 + test_random(&random) % MAX_ROWS;
      for (uint32_t r = 0; r < rows; r++) {
        seq[r] = (int32_t)(test_random(&random) % SEQS);
        token[r] = (int32_t)(test_random(&random) % 1000);
      }
      *(step(&f, rows, seq, token, kind != 2) == PDS_OK ? &done : &refused) += 1;
    }
    check_all(&f);
  }
  CHECK(done > 500 && refused > 100);
  close_kv(&f);
}

void case_kv(void) {
  sharing();
  refusals();
  saving();
  random_calls();
}
