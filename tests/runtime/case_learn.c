/* case_learn.c: tokens kept for the learner: what is kept, and a reader beside the steps, for
 * ThreadSanitizer too. */
#define _GNU_SOURCE
#include "learn.h"

#include <pthread.h>
#include <stdlib.h>

#include "dispatch.h"
#include "test.h"

enum {
  HIDDEN = 32,
  K = 2,
  NEXT_K = 3,
  EXPERTS = 256,
  MOST_ROWS = 200,
  AT_ID = 0,
  AT_W = 4 * MOST_ROWS * NEXT_K,
  AT_XN = 2 * AT_W,
  AT_GATE = AT_XN + 4 * MOST_ROWS * HIDDEN,
  SCRATCH = AT_GATE + 4 * MOST_ROWS * EXPERTS
};

/* Layers 0 and 2 have experts; 0 predicts 2. */
static const pds_layer LAYERS[] = {
    {.moe = 1, .gate = {.experts = EXPERTS, .top_k = K}, .predictor = {PDS_PREDICT_CROSS_GATE, 2}},
    {.moe = 0},
    {.moe = 1, .gate = {.experts = EXPERTS, .top_k = NEXT_K}},
};
static const uint8_t WANTED[] = {1, 0, 0};

typedef struct fixture {
  pds_plan plan;
  pds_step_ctx ctx;
  pds_learn *learn;
  void *memory;
  unsigned char *scratch;
  int32_t seq[MOST_ROWS];
  uint32_t length[MOST_ROWS];
} fixture;

static void *zeroed(uint64_t bytes) {
  const uint64_t size = (bytes + 63) / 64 * 64;
  void *memory = aligned_alloc(64, size);
  if (!memory) exit(1);
  return memset(memory, 0, size);
}

static void open_fixture(fixture *f) {
  memset(f, 0, sizeof *f);
  f->plan = (pds_plan){.n_layers = 3, .hidden = HIDDEN, .layers = LAYERS};
  f->plan.buffer_offset[PDS_BUF_ROUTE_ID] = AT_ID;
  f->plan.buffer_offset[PDS_BUF_ROUTE_W] = AT_W;
  f->plan.buffer_offset[PDS_BUF_XN] = AT_XN;
  f->plan.buffer_offset[PDS_BUF_GATE] = AT_GATE;
  f->memory = zeroed(pds_learn_bytes(&f->plan, WANTED));
  f->learn = pds_learn_place(f->memory, &f->plan, WANTED);
  f->scratch = zeroed(SCRATCH);
  const pds_isa_path *path = NULL;
  CHECK_OK(pds_isa_choose("scalar", &path));
  if (!path) exit(1);
  f->ctx = (pds_step_ctx){.plan = &f->plan,
                          .kernels = path->kernels(),
                          .scratch = f->scratch,
                          .seq = f->seq,
                          .length = f->length,
                          .learn = f->learn};
}

static void close_fixture(fixture *f) {
  free(f->memory);
  free(f->scratch);
}

/* The gate of a layer has run: `value` and up in its rows. */
static void routed(fixture *f, uint32_t layer, uint32_t value) {
  const uint32_t k = LAYERS[layer].gate.top_k;
  float *xn = pds_buf(&f->ctx, PDS_BUF_XN), *w = pds_buf(&f->ctx, PDS_BUF_ROUTE_W);
  int32_t *id = pds_buf(&f->ctx, PDS_BUF_ROUTE_ID);
  float *score = pds_buf(&f->ctx, PDS_BUF_GATE);
  for (uint32_t i = 0; i < f->ctx.rows; i++) {
    const uint32_t v = (value + i) % EXPERTS;
    for (uint32_t c = 0; c < HIDDEN; c++) xn[i * HIDDEN + c] = (float)v;
    for (uint32_t e = 0; e < EXPERTS; e++) score[i * EXPERTS + e] = (float)(v + e);
    for (uint32_t r = 0; r < k; r++) w[i * k + r] = (float)v, id[i * k + r] = (int32_t)v;
  }
  pds_learn_routed(&f->ctx, layer);
}

/* A step of rows whose values count on from `value`, all of one sequence or each of its own. */
static void step(fixture *f, uint32_t value, uint32_t rows, uint32_t phase) {
  for (uint32_t i = 0; i < rows; i++) f->seq[i] = phase == PDS_NET_DECODE ? (int32_t)i : 0;
  f->ctx.rows = rows;
  f->ctx.net_phase = phase;
  pds_learn_begin(&f->ctx);
  routed(f, 0, value);
  routed(f, 2, value);
}

typedef struct copy {
  uint16_t a[PDS_LEARN_PREFILL][HIDDEN];
  float w[PDS_LEARN_PREFILL][K], scores[PDS_LEARN_PREFILL][EXPERTS];
  int32_t e[PDS_LEARN_PREFILL][K], prev[PDS_LEARN_PREFILL][K];
  int32_t prev_next[PDS_LEARN_PREFILL][NEXT_K], target[PDS_LEARN_PREFILL][NEXT_K];
} copy;

static pds_learned asked(copy *to, uint32_t phase) {
  return (pds_learned){.layer = 0,
                       .phase = phase,
                       .a = to->a[0],
                       .w = to->w[0],
                       .e = to->e[0],
                       .prev = to->prev[0],
                       .prev_next = to->prev_next[0],
                       .target = to->target[0],
                       .scores = to->scores[0]};
}

/* Each row is of one token. */
static uint32_t value_of(const copy *c, uint32_t row) {
  const uint32_t v = (uint32_t)c->target[row][0];
  const float x = (float)v;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  for (uint32_t i = 0; i < HIDDEN; i++) CHECK_EQ(c->a[row][i], bits >> 16);
  for (uint32_t r = 0; r < K; r++) {
    CHECK_EQ(c->e[row][r], v);
    CHECK(c->w[row][r] == x);
  }
  for (uint32_t r = 0; r < NEXT_K; r++) CHECK_EQ(c->target[row][r], v);
  for (uint32_t e = 0; e < EXPERTS; e++) CHECK(c->scores[row][e] == (float)(v + e));
  return v;
}

static void what_is_kept(void) {
  static fixture f;
  static copy c;
  open_fixture(&f);
  pds_learned out = asked(&c, PDS_NET_PREFILL);
  CHECK_OK(pds_learn_copy(f.learn, &f.plan, &out));
  CHECK_EQ(out.n, 0);
  step(&f, 10, 3, PDS_NET_PREFILL);
  CHECK_OK(pds_learn_copy(f.learn, &f.plan, &out));
  CHECK_EQ(out.n, 3);
  for (uint32_t i = 0; i < 3; i++) {
    CHECK_EQ(value_of(&c, i), 10 + i);
    CHECK_EQ(c.prev[i][0], i ? (int32_t)(9 + i) : -1);
    CHECK_EQ(c.prev_next[i][NEXT_K - 1], i ? (int32_t)(9 + i) : -1);
  }
  step(&f, 20, MOST_ROWS, PDS_NET_PREFILL); /* its last rows alone */
  CHECK_OK(pds_learn_copy(f.learn, &f.plan, &out));
  CHECK_EQ(out.n, PDS_LEARN_PREFILL);
  CHECK_EQ(out.total, 3 + PDS_LEARN_PREFILL);
  for (uint32_t i = 0; i < out.n; i++)
    CHECK_EQ(value_of(&c, i), (20 + MOST_ROWS - PDS_LEARN_PREFILL + i) % EXPERTS);
  CHECK_EQ(c.prev[0][0], (20 + MOST_ROWS - PDS_LEARN_PREFILL - 1) % EXPERTS);
  /* A step that ends before the next layer has chosen leaves nothing. */
  f.ctx.net_phase = PDS_NET_DECODE;
  pds_learn_begin(&f.ctx);
  f.ctx.rows = 1;
  routed(&f, 0, 1);
  step(&f, 7, 1, PDS_NET_DECODE);
  out = asked(&c, PDS_NET_DECODE);
  CHECK_OK(pds_learn_copy(f.learn, &f.plan, &out));
  CHECK_EQ(out.n, 1);
  CHECK_EQ(value_of(&c, 0), 7);
  out.layer = 2;
  CHECK_STATUS(pds_learn_copy(f.learn, &f.plan, &out), PDS_ERR_ARGUMENT, "nothing is kept there");
  /* Whoever comes second goes without. */
  atomic_store(&f.learn->rings[PDS_NET_DECODE].busy, true);
  step(&f, 8, 1, PDS_NET_DECODE);
  CHECK_EQ(f.learn->dropped, 1);
  out.layer = 0;
  CHECK_STATUS(pds_learn_copy(f.learn, &f.plan, &out), PDS_ERR_BUSY, "read them again");
  atomic_store(&f.learn->rings[PDS_NET_DECODE].busy, false);
  close_fixture(&f);
}

enum { STEPS = 4000 };

static void *write_steps(void *arg) {
  for (uint32_t i = 0; i < STEPS; i++) step(arg, i, 1, PDS_NET_DECODE);
  return NULL;
}

/* Steps on one thread, copies on another: every copy is whole, its tokens in order. */
static void reader_beside_steps(void) {
  static fixture f;
  static copy c;
  open_fixture(&f);
  pthread_t writer;
  CHECK_EQ(pthread_create(&writer, NULL, write_steps, &f), 0);
  uint64_t total = 0, dropped = 0;
  while (total + dropped < STEPS) {
    pds_learned out = asked(&c, PDS_NET_DECODE);
    const pds_status status = pds_learn_copy(f.learn, &f.plan, &out);
    dropped = f.learn->dropped;
    if (status == PDS_ERR_BUSY) continue;
    CHECK_OK(status);
    CHECK(out.total >= total);
    total = out.total;
    CHECK_EQ(out.n, total < PDS_LEARN_DECODE ? total : PDS_LEARN_DECODE);
    for (uint32_t i = 0; i < out.n; i++) value_of(&c, i);
  }
  pthread_join(writer, NULL);
  CHECK_EQ(total + f.learn->dropped, STEPS);
  close_fixture(&f);
}

void case_learn(void) {
  what_is_kept();
  reader_beside_steps();
}
