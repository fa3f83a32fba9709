/* case_engine.c: engines and sessions through the public interface, with fake operators whose
 * logits say exactly what the KV cache holds. DIRECTORY has program.bin and w.bin of the fake
 * plan. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake_plan.h"
#include "memory.h"
#include "pdscope.h"
#include "pds_isa.h"
#include "test.h"

enum { SEQS = 4, MAX_STEP = FAKE_ROWS };

/* --- a model of a session: the tokens of its sequences --- */

typedef struct fixture {
  pds_session *session;
  uint32_t length[SEQS];
  int32_t tokens[SEQS][FAKE_CONTEXT];
} fixture;

typedef struct rows {
  uint32_t n;
  int32_t token[MAX_STEP + 1], position[MAX_STEP + 1], seq[MAX_STEP + 1];
  uint8_t want[MAX_STEP + 1];
} rows;

static pds_engine *create(int32_t threads) {
  pds_engine_options options = {.plan_dir = test_data_dir, .isa = "scalar", .threads = threads};
  pds_engine *engine = NULL;
  CHECK_OK(pds_engine_create(&options, &engine));
  if (!engine) exit(1);
  return engine;
}

static void open_session(fixture *f, pds_engine *engine) {
  memset(f, 0, sizeof *f);
  pds_session_options options = {.max_seqs = SEQS, .kv_tokens = 3 * FAKE_CONTEXT};
  CHECK_OK(pds_session_create(engine, &options, &f->session));
  if (!f->session) exit(1);
}

static void add_row(rows *r, const fixture *f, int32_t seq, int32_t token, bool want) {
  uint32_t position = f->length[seq];
  for (uint32_t i = 0; i < r->n; i++) position += r->seq[i] == seq;
  r->token[r->n] = token;
  r->seq[r->n] = seq;
  r->want[r->n] = want;
  r->position[r->n++] = (int32_t)position;
}

static pds_status run(fixture *f, const rows *r, pds_logits *out) {
  pds_batch batch = {r->n, r->token, r->position, r->seq, r->want};
  return pds_step(f->session, &batch, out);
}

static void adopt(fixture *f, const rows *r) {
  for (uint32_t i = 0; i < r->n; i++) f->tokens[r->seq[i]][f->length[r->seq[i]]++] = r->token[i];
}

static float expected_sum(const fixture *f, int32_t seq, int32_t position, int layer) {
  float sum = 0;
  for (int32_t p = 0; p <= position; p++)
    sum += (float)(p + 1) * ((float)(f->tokens[seq][p] + 1) + 1000 * (float)layer);
  return sum;
}

static void check_logits(const fixture *f, const rows *r, const pds_logits *logits) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < r->n; i++) {
    if (!r->want[i]) continue;
    const float *row = logits->data + (size_t)n++ * logits->vocab;
    CHECK_EQ(row[0], r->token[i]);
    for (int layer = 0; layer < 2; layer++)
      CHECK(row[1 + layer] == expected_sum(f, r->seq[i], r->position[i], layer));
    CHECK_EQ(row[3], 100 + r->token[i] % 4 + 1 + (r->token[i] + 1) % 4 + 1);
    CHECK_EQ(row[4], 1);
  }
  CHECK_EQ(logits->rows, n);
  CHECK_EQ(logits->vocab, FAKE_VOCAB);
}

/* A step that must succeed, with its logits checked. */
static void good_step(fixture *f, const rows *r) {
  pds_logits logits = {0};
  if (!CHECK_OK(run(f, r, &logits))) return;
  adopt(f, r);
  check_logits(f, r, &logits);
}

static void good_token(fixture *f, int32_t seq, int32_t token) {
  rows r = {0};
  add_row(&r, f, seq, token, true);
  good_step(f, &r);
}

static void check_lengths(const fixture *f) {
  for (int32_t s = 0; s < SEQS; s++) {
    uint32_t length = 99999;
    CHECK_OK(pds_seq_length(f->session, s, &length));
    CHECK_EQ(length, f->length[s]);
  }
}

/* --- creation --- */

static void write_file(const char *dir, const char *name, const void *bytes, size_t n) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  FILE *file = fopen(path, "wb");
  CHECK(file && fwrite(bytes, 1, n, file) == n && fclose(file) == 0);
}

static size_t read_file(const char *dir, const char *name, void *bytes, size_t n) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", dir, name);
  FILE *file = fopen(path, "rb");
  CHECK(file != NULL);
  if (!file) return 0;
  size_t got = fread(bytes, 1, n, file);
  fclose(file);
  return got;
}

static void creation(void) {
  pds_engine *engine = NULL;
  pds_engine_options options = {.plan_dir = test_data_dir, .isa = "scalar", .threads = 1};
  CHECK_STATUS(pds_engine_create(NULL, &engine), PDS_ERR_ARGUMENT, "null");
  CHECK_STATUS(pds_engine_create(&options, NULL), PDS_ERR_ARGUMENT, "null");
  options.threads = -1;
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_ARGUMENT, "threads -1");
  options.threads = 1;
  options.isa = "mmx";
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_ISA, "scalar");
  options.isa = "scalar";
  options.plan_dir = "/nonexistent/plan";
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FILE, "/nonexistent/plan");

  char bad[1024];
  snprintf(bad, sizeof bad, "%s/bad", test_data_dir);
  mkdir(bad, 0777);
  options.plan_dir = bad;
  static unsigned char program[65536], weights[FAKE_WEIGHT_BYTES];
  size_t n = read_file(test_data_dir, "program.bin", program, sizeof program);
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FILE, "program.bin");
  write_file(bad, "program.bin", program, n - 1);
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FILE, "expected");
  write_file(bad, "program.bin", program, n);
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FILE, "w.bin");
  write_file(bad, "w.bin", weights, sizeof weights - 1);
  CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FILE, "131071");
  write_file(bad, "w.bin", weights, sizeof weights);
  for (size_t i = 0; i < n; i += 13) {
    program[i] ^= 4;
    write_file(bad, "program.bin", program, n);
    CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_PLAN_FORMAT, "");
    program[i] ^= 4;
  }
  CHECK(engine == NULL);
  snprintf(bad, sizeof bad, "%s/bad/w.bin", test_data_dir);
  unlink(bad);
  snprintf(bad, sizeof bad, "%s/bad/program.bin", test_data_dir);
  unlink(bad);
  snprintf(bad, sizeof bad, "%s/bad", test_data_dir);
  rmdir(bad);
}

static void sizes(void) {
  for (int32_t threads = 1; threads <= 5; threads += 2) {
    pds_engine *engine = create(threads);
    pds_engine_info info = {0};
    CHECK_OK(pds_engine_get_info(engine, &info));
    CHECK_EQ(info.threads, threads);
    CHECK_EQ(info.engine_bytes, pds_layout_engine(&pds_the_plan, (uint32_t)threads).total);
    CHECK_EQ(info.weight_bytes, FAKE_WEIGHT_BYTES);
    CHECK_EQ(info.max_context, FAKE_CONTEXT);
    CHECK(strcmp(info.isa, "scalar") == 0);
    pds_session *session = NULL;
    pds_session_stats stats = {0};
    CHECK_OK(pds_session_create(engine, NULL, &session));
    CHECK_OK(pds_session_get_stats(session, &stats));
    CHECK_EQ(stats.kv_blocks, 4); /* 200 tokens */
    CHECK_EQ(stats.session_bytes, pds_layout_session(&pds_the_plan, 1, FAKE_CONTEXT, 1).total);
    pds_engine_destroy(engine); /* lives on until its session ends */
    pds_session_destroy(session);
  }
  pds_engine *engine = create(0);
  pds_session *session = NULL;
  pds_session_options options = {.max_seqs = 1u << 30};
  CHECK_STATUS(pds_session_create(engine, &options, &session), PDS_ERR_ARGUMENT, "max_seqs");
  CHECK_STATUS(pds_session_create(NULL, NULL, &session), PDS_ERR_ARGUMENT, "null");
  CHECK_STATUS(pds_session_create(engine, NULL, NULL), PDS_ERR_ARGUMENT, "null");
  pds_engine_destroy(engine);
  pds_engine_destroy(NULL);
  pds_session_destroy(NULL);
}

/* --- steps --- */

static void steps(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  uint32_t random = 11;
  for (int round = 0; round < 200; round++) {
    rows r = {0};
    uint32_t n = 1 + test_random(&random) % (round % 3 == 0 ? 3 : FAKE_ROWS), wanted = 0;
    uint32_t room[SEQS];
    for (int s = 0; s < SEQS; s++) room[s] = FAKE_CONTEXT - f.length[s];
    for (uint32_t i = 0; i < n; i++) {
      int32_t seq = (int32_t)(test_random(&random) % SEQS);
      if (room[seq] == 0) continue;
      room[seq]--;
      bool want = wanted < FAKE_LOGITS && test_random(&random) % 3 == 0;
      wanted += want;
      add_row(&r, &f, seq, (int32_t)(test_random(&random) % FAKE_VOCAB), want);
    }
    pds_logits logits;
    if (r.n == 0 || run(&f, &r, &logits) == PDS_ERR_KV_FULL) {
      int32_t seq = (int32_t)(test_random(&random) % SEQS);
      uint32_t keep = test_random(&random) % (f.length[seq] + 1);
      CHECK_OK(pds_seq_truncate(f.session, seq, keep));
      f.length[seq] = keep;
      continue;
    }
    adopt(&f, &r);
    check_logits(&f, &r, &logits);
    if (round % 7 == 0) check_lengths(&f);
  }
  pds_session_destroy(f.session);
}

static void refused_steps(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  for (int32_t i = 0; i < 3; i++) good_token(&f, 1, i);
  pds_logits logits = {.rows = 77};
  rows r = {0};
  pds_batch batch = {0, r.token, r.position, r.seq, NULL};
  CHECK_STATUS(pds_step(f.session, &batch, &logits), PDS_ERR_BATCH, "no rows");
  CHECK_STATUS(pds_step(f.session, NULL, &logits), PDS_ERR_ARGUMENT, "null");
  CHECK_STATUS(pds_step(f.session, &batch, NULL), PDS_ERR_ARGUMENT, "null");
  batch.n = FAKE_ROWS + 1;
  CHECK_STATUS(pds_step(f.session, &batch, &logits), PDS_ERR_BATCH, "at most 40");
  batch.n = 1;
  batch.seq = NULL;
  CHECK_STATUS(pds_step(f.session, &batch, &logits), PDS_ERR_ARGUMENT, "null");
  for (uint32_t i = 0; i < FAKE_LOGITS + 1; i++) add_row(&r, &f, 0, 1, true);
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_BATCH, "more than 8");
  r.want[0] = 0;
  r.token[4] = FAKE_VOCAB;
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_TOKEN, "row 4: token 97, expected 0 to 96");
  r.token[4] = -1;
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_TOKEN, "token -1");
  r.token[4] = 1;
  r.seq[4] = SEQS;
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_SEQUENCE, "sequence 4");
  r.seq[4] = 0;
  r.position[8] = 7; /* a duplicate */
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_POSITION,
               "row 8: position 7 of sequence 0, expected 8");
  CHECK_EQ(logits.rows, 77);
  check_lengths(&f);
  r.position[8] = 8;
  good_step(&f, &r);
  /* The context's last position is there; the next one is not. */
  while (f.length[2] < FAKE_CONTEXT) good_token(&f, 2, 5);
  r = (rows){0};
  add_row(&r, &f, 2, 5, true);
  CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_CONTEXT, "200 tokens");
  check_lengths(&f);
  /* Without want_logits the last row alone has logits. */
  r = (rows){0};
  add_row(&r, &f, 3, 10, false);
  add_row(&r, &f, 3, 11, true);
  batch = (pds_batch){r.n, r.token, r.position, r.seq, NULL};
  CHECK_OK(pds_step(f.session, &batch, &logits));
  adopt(&f, &r);
  check_logits(&f, &r, &logits);
  pds_session_destroy(f.session);
}

static void sequences(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  for (int32_t i = 0; i < 70; i++) good_token(&f, 0, i % FAKE_VOCAB);
  CHECK_OK(pds_seq_fork(f.session, 0, 1));
  f.length[1] = f.length[0];
  memcpy(f.tokens[1], f.tokens[0], sizeof f.tokens[0]);
  good_token(&f, 1, 90);
  good_token(&f, 0, 91);
  CHECK_OK(pds_seq_truncate(f.session, 1, 30)); /* inside the shared block */
  f.length[1] = 30;
  good_token(&f, 1, 92);
  good_token(&f, 0, 93);
  uint64_t bytes = 0;
  CHECK_OK(pds_seq_save_size(f.session, 0, &bytes));
  unsigned char *saved = malloc(bytes);
  CHECK_OK(pds_seq_save(f.session, 0, saved, bytes));
  fixture g;
  open_session(&g, engine);
  CHECK_OK(pds_seq_restore(g.session, 3, saved, bytes));
  g.length[3] = f.length[0];
  memcpy(g.tokens[3], f.tokens[0], sizeof g.tokens[3]);
  good_token(&g, 3, 50);
  check_lengths(&g);
  check_lengths(&f);
  saved[bytes - 1] ^= 1;
  CHECK_STATUS(pds_seq_restore(g.session, 0, saved, bytes), PDS_ERR_PLAN_FORMAT, "damaged");
  CHECK_STATUS(pds_seq_restore(g.session, 0, NULL, bytes), PDS_ERR_ARGUMENT, "null");
  free(saved);
  pds_session_destroy(g.session);
  pds_session_destroy(f.session);
}

/* --- tap, cancel, trace --- */

typedef struct watcher {
  fixture *f;
  uint32_t events, cancel_at;
  uint32_t opcodes[16];
} watcher;

static void watch(void *user, const pds_tap_event *event) {
  watcher *w = user;
  w->opcodes[event->opcode]++;
  if (event->opcode == PDS_OP_GATE) {
    CHECK_EQ(event->cols, FAKE_TOP_K);
    CHECK_EQ(event->layer, 1);
    CHECK(event->ids[0] >= 0 && event->ids[0] < FAKE_EXPERTS && event->data[0] == 1);
  }
  if (event->opcode == PDS_OP_LM_HEAD) CHECK_EQ(event->cols, FAKE_VOCAB);
  if (event->opcode == PDS_OP_NORM) CHECK(event->data && event->cols == FAKE_HIDDEN);
  uint32_t length;
  CHECK_STATUS(pds_seq_length(w->f->session, 0, &length), PDS_ERR_BUSY, "another thread");
  if (++w->events == w->cancel_at) pds_cancel(w->f->session);
}

enum {
  INSTRS = 1 + 4 + 8 + 2, /* prologue, dense, MoE with a shared expert, epilogue */
  SHARED = 1 + 4 + 6,     /* the shared expert, which runs as one job with the routed experts */
};

static void cancelling(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  for (int32_t i = 0; i < 63; i++) good_token(&f, 0, i);
  for (uint32_t at = 1; at <= INSTRS; at++) {
    watcher w = {.f = &f, .cancel_at = at};
    CHECK_OK(pds_session_set_tap(f.session, watch, &w));
    rows r = {0};
    pds_logits logits;
    for (int i = 0; i < 5; i++) add_row(&r, &f, 0, 60, i == 4); /* crosses a block border */
    for (int i = 0; i < 5; i++) add_row(&r, &f, 1, 61, i == 4);
    if (at < INSTRS) {
      CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_CANCELLED, "cancelled");
      CHECK_EQ(w.events, at == SHARED ? at + 1 : at);
    } else { /* after the last instruction it is the next step that obeys */
      good_step(&f, &r);
      CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_POSITION, "");
      r = (rows){0};
      add_row(&r, &f, 0, 60, true);
      CHECK_STATUS(run(&f, &r, &logits), PDS_ERR_CANCELLED, "cancelled");
    }
    CHECK_OK(pds_session_set_tap(f.session, NULL, NULL));
    check_lengths(&f);
    pds_session_stats stats;
    CHECK_OK(pds_session_get_stats(f.session, &stats));
    CHECK_EQ(stats.kv_blocks_used, at < INSTRS ? 1 : 3);
  }
  good_token(&f, 0, 1);
  pds_session_destroy(f.session);
}

static void tracing(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  pds_trace_record records[INSTRS + 3];
  uint64_t n = 0, dropped = 0;
  CHECK_STATUS(pds_session_trace_start(f.session, NULL, 3), PDS_ERR_ARGUMENT, "null");
  CHECK_OK(pds_session_trace_start(f.session, records, INSTRS + 3));
  good_token(&f, 0, 1);
  good_token(&f, 0, 2);
  CHECK_OK(pds_session_trace_stop(f.session, &n, &dropped));
  CHECK_EQ(n, INSTRS + 3);
  CHECK_EQ(dropped, INSTRS - 3);
  for (uint64_t i = 0; i < n; i++) {
    CHECK(records[i].end_ns >= records[i].begin_ns);
    if (i > 0 && records[i].opcode == PDS_OP_EXPERT)
      CHECK_EQ(records[i].begin_ns, records[i - 1].begin_ns); /* one job with the shared expert */
    else
      CHECK(i == 0 || records[i].begin_ns >= records[i - 1].end_ns);
    CHECK_EQ(records[i].rows, 1);
    if (records[i].opcode == PDS_OP_EXPERT) {
      CHECK_EQ(records[i].experts, 2);
      CHECK_EQ(records[i].bytes, 2 * (16384 + 8192));
    }
    if (records[i].opcode == PDS_OP_RECOMPILE) CHECK_EQ(records[i].queue, PDS_QUEUE_HOST);
  }
  pds_session_stats stats;
  CHECK_OK(pds_session_get_stats(f.session, &stats));
  CHECK_EQ(stats.steps, 2);
  CHECK_EQ(stats.rows, 2);
  CHECK_EQ(stats.expert_rows, 4);
  CHECK_EQ(stats.experts_activated, 4);
  CHECK(stats.step_ns > 0 && stats.weight_bytes > 4 * (16384 + 8192));
  CHECK_OK(pds_session_trace_stop(f.session, &n, &dropped)); /* none runs: nothing recorded */
  CHECK_EQ(n, 0);
  /* No row wants logits: no epilogue. */
  rows r = {0};
  add_row(&r, &f, 0, 3, false);
  watcher w = {.f = &f};
  CHECK_OK(pds_session_set_tap(f.session, watch, &w));
  good_step(&f, &r);
  CHECK_EQ(w.events, INSTRS - 2);
  CHECK_EQ(w.opcodes[PDS_OP_COMBINE], 1);
  pds_session_destroy(f.session);
}

/* --- threads and processes --- */

typedef struct crowd {
  pds_engine *engine;
  uint32_t seed;
} crowd;

/* --- routes of the caller's --- */

static float experts_of(fixture *f, int32_t seq) {
  rows r = {0};
  add_row(&r, f, seq, 5, true);
  pds_logits logits = {0};
  if (!CHECK_OK(run(f, &r, &logits))) return 0;
  adopt(f, &r);
  return logits.data[3] - 100;
}

static void routes(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  /* Of the dense layer nothing is read. */
  uint16_t ids[2][FAKE_LAYERS][FAKE_TOP_K] = {{{99, 99}, {3, 1}}, {{99, 99}, {2, 3}}};
  CHECK_OK(pds_session_set_routes(f.session, &ids[0][0][0], 2));
  for (int turn = 0; turn < 2; turn++) {
    CHECK_EQ(experts_of(&f, 0), 4 + 2);
    CHECK_EQ(experts_of(&f, 0), 3 + 4);
  }
  CHECK_EQ(experts_of(&f, 1), 4 + 2); /* by position, of whatever sequence */
  ids[1][1][0] = 3;
  CHECK_STATUS(pds_session_set_routes(f.session, &ids[0][0][0], 2), PDS_ERR_ARGUMENT,
               "routes: token 1, layer 1: expert 3 twice, expected 2 different ones of 0 to 3");
  ids[1][1][0] = FAKE_EXPERTS;
  CHECK_STATUS(pds_session_set_routes(f.session, &ids[0][0][0], 2), PDS_ERR_ARGUMENT,
               "expert 4, expected 2 different ones");
  CHECK_STATUS(pds_session_set_routes(f.session, &ids[0][0][0], 0), PDS_ERR_ARGUMENT, "no token");
  ids[1][1][0] = 2;
  CHECK_EQ(experts_of(&f, 1), 3 + 4); /* as before */
  CHECK_OK(pds_session_set_routes(f.session, NULL, 0));
  CHECK_EQ(experts_of(&f, 1), 2 + 3); /* token 5's own */
  CHECK_STATUS(pds_session_set_routes(NULL, NULL, 0), PDS_ERR_ARGUMENT, "null");
  pds_session_destroy(f.session);
}

static void *crowd_main(void *argument) {
  crowd *c = argument;
  fixture f;
  open_session(&f, c->engine);
  uint32_t random = c->seed;
  for (int i = 0; i < 60; i++) {
    rows r = {0};
    for (uint32_t n = 1 + test_random(&random) % 5; n > 0 && f.length[0] + r.n < FAKE_CONTEXT; n--)
      add_row(&r, &f, 0, (int32_t)(test_random(&random) % FAKE_VOCAB), n == 1);
    if (r.n) good_step(&f, &r);
  }
  pds_session_destroy(f.session);
  return NULL;
}

static void crowded(pds_engine *engine) {
  enum { THREADS = 4 };
  pthread_t threads[THREADS];
  crowd crowds[THREADS];
  for (uint32_t i = 0; i < THREADS; i++) {
    crowds[i] = (crowd){engine, 100 + i};
    CHECK_EQ(pthread_create(&threads[i], NULL, crowd_main, &crowds[i]), 0);
  }
  for (uint32_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
}

/* Cancels from another thread until told to stop; every step either runs to its end or leaves no
 * trace. */
typedef struct canceller {
  pds_session *session;
  _Atomic bool stop;
} canceller;

static void *cancel_main(void *argument) {
  canceller *c = argument;
  while (!c->stop) {
    pds_cancel(c->session);
    usleep(50);
  }
  return NULL;
}

static void cancelled_from_aside(pds_engine *engine) {
  fixture f;
  open_session(&f, engine);
  canceller c = {.session = f.session};
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, cancel_main, &c), 0);
  uint32_t random = 5;
  for (int i = 0; i < 400 && f.length[0] < FAKE_CONTEXT - 1; i++) {
    rows r = {0};
    add_row(&r, &f, 0, (int32_t)(test_random(&random) % FAKE_VOCAB), true);
    pds_logits logits;
    pds_status status = run(&f, &r, &logits);
    CHECK(status == PDS_OK || status == PDS_ERR_CANCELLED);
    if (status != PDS_OK) continue;
    adopt(&f, &r);
    check_logits(&f, &r, &logits);
  }
  c.stop = true;
  pthread_join(thread, NULL);
  check_lengths(&f);
  pds_session_destroy(f.session);
}

#if !defined(__SANITIZE_THREAD__)
static int child(fixture *f, pds_engine *engine) {
  int before = test_failures;
  rows r = {0};
  pds_logits logits;
  pds_session *session = NULL;
  add_row(&r, f, 0, 1, true);
  CHECK_STATUS(run(f, &r, &logits), PDS_ERR_FORKED, "load the plan again");
  CHECK_STATUS(pds_seq_truncate(f->session, 0, 0), PDS_ERR_FORKED, "fork");
  CHECK_STATUS(pds_session_create(engine, NULL, &session), PDS_ERR_FORKED, "fork");
  pds_session_destroy(f->session);
  pds_engine_destroy(engine);
  fixture own; /* a new engine works here */
  engine = create(3);
  open_session(&own, engine);
  good_token(&own, 0, 1);
  pds_session_destroy(own.session);
  pds_engine_destroy(engine);
  return test_failures > before;
}
#endif

/* A case of its own: an emulator may not survive the fork of a program with threads. */
void case_fork(void) {
#if defined(__SANITIZE_THREAD__)
  printf("fork: skipped under ThreadSanitizer\n");
#else
  pds_engine *engine = create(3);
  fixture f;
  open_session(&f, engine);
  good_token(&f, 0, 7);
  fflush(stdout);
  pid_t pid = fork();
  if (pid == 0) {
    int failed = child(&f, engine);
    fflush(stdout);
    _exit(failed);
  }
  int status = -1;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  good_token(&f, 0, 8);
  pds_session_destroy(f.session);
  pds_engine_destroy(engine);
#endif
}

void case_engine(void) {
  if (*pds_the_plan.required_features) { /* this build stands for a plan of another machine */
    pds_engine_options options = {.plan_dir = test_data_dir};
    pds_engine *engine = NULL;
    CHECK_STATUS(pds_engine_create(&options, &engine), PDS_ERR_CPU, pds_the_plan.required_features);
    return;
  }
  creation();
  sizes();
  for (int32_t threads = 1; threads <= 3; threads++) {
    pds_engine *engine = create(threads);
    steps(engine);
    refused_steps(engine);
    sequences(engine);
    cancelling(engine);
    tracing(engine);
    routes(engine);
    crowded(engine);
    cancelled_from_aside(engine);
    pds_engine_destroy(engine);
  }
}
