/* case_sample.c: greedy, penalty, filters and the draw. The comparison with transformers is
 * Python's. */
#include <math.h>

#include "pdscope.h"
#include "test.h"

enum { VOCAB = 8 };

static pds_sampler sampler(float temperature) {
  return (pds_sampler){.temperature = temperature, .top_p = 1, .repetition_penalty = 1, .seed = 5};
}

static int32_t sample(const float *logits, const pds_sampler *s, const int32_t *history,
                      uint32_t n) {
  float values[VOCAB];
  int32_t ids[VOCAB], token = -1;
  CHECK_OK(pds_sample(logits, VOCAB, s, history, n, values, ids, &token));
  return token;
}

/* Which tokens 4000 draws give, as a bit mask. */
static uint32_t reached(const float *logits, pds_sampler s) {
  uint32_t mask = 0;
  for (s.draw = 0; s.draw < 4000; s.draw++) mask |= 1u << sample(logits, &s, NULL, 0);
  return mask;
}

static void greedy(void) {
  float ties[VOCAB] = {0, 3, 1, 3, 3, -1, 2, 0};
  pds_sampler s = sampler(0);
  CHECK_EQ(sample(ties, &s, NULL, 0), 1);
  /* Positive scores are divided by the penalty, negative ones multiplied; a repeated id is
   * penalised once. */
  int32_t history[] = {1, 3, 4, 1, 1};
  s.repetition_penalty = 1.4f;
  CHECK_EQ(sample(ties, &s, history, 5), 1); /* 3 / 1.4 = 2.14 > 2 */
  s.repetition_penalty = 1.6f;
  CHECK_EQ(sample(ties, &s, history, 5), 6); /* 3 / 1.6 = 1.88 < 2 */
  float negative[VOCAB] = {-1, -1.5f, -9, -9, -9, -9, -9, -9};
  int32_t zero[] = {0};
  CHECK_EQ(sample(negative, &s, zero, 1), 1);
  float masked[VOCAB] = {-INFINITY, -INFINITY, -2, -INFINITY, -3, -4, -5, -6};
  CHECK_EQ(sample(masked, &s, zero, 1), 2);
}

static void filters(void) {
  /* Probabilities .4 .3 .2 .1 of ids 6, 2, 0, 3; the others have none. */
  float logits[VOCAB];
  for (int i = 0; i < VOCAB; i++) logits[i] = -INFINITY;
  logits[6] = logf(.4f);
  logits[2] = logf(.3f);
  logits[0] = logf(.2f);
  logits[3] = logf(.1f);
  uint32_t b6 = 1 << 6, b2 = 1 << 2, b0 = 1 << 0, b3 = 1 << 3;
  pds_sampler s = sampler(1);
  CHECK_EQ(reached(logits, s), b6 | b2 | b0 | b3);
  s.top_k = 2;
  CHECK_EQ(reached(logits, s), b6 | b2);
  s.top_k = 100;
  CHECK_EQ(reached(logits, s), b6 | b2 | b0 | b3);
  s = sampler(1);
  s.top_p = 0.69f;
  CHECK_EQ(reached(logits, s), b6 | b2);
  s.top_p = 0.71f;
  CHECK_EQ(reached(logits, s), b6 | b2 | b0);
  s.top_p = 0;
  CHECK_EQ(reached(logits, s), b6);
  s = sampler(1);
  s.min_p = 0.6f; /* of the highest: .24 */
  CHECK_EQ(reached(logits, s), b6 | b2);
  s.min_p = 1;
  CHECK_EQ(reached(logits, s), b6);
  float equal[VOCAB] = {1, 1, 1, 1, 0, 0, 0, 0};
  s = sampler(1);
  s.top_k = 2; /* the equals of the k-th stay */
  CHECK_EQ(reached(equal, s), 15);
}

static void frequencies(void) {
  float logits[VOCAB] = {0};
  logits[7] = logf(3); /* 0.3, the others 0.1 each */
  pds_sampler s = sampler(1);
  uint32_t seen[VOCAB] = {0};
  enum { DRAWS = 20000 };
  for (s.draw = 0; s.draw < DRAWS; s.draw++) seen[sample(logits, &s, NULL, 0)]++;
  for (int i = 0; i < VOCAB; i++) {
    double p = i == 7 ? 0.3 : 0.1, sd = sqrt(DRAWS * p * (1 - p));
    CHECK(fabs(seen[i] - DRAWS * p) < 5 * sd);
  }
  /* Stateless: the same (seed, draw) is the same token; another seed is another stream. */
  int differ = 0;
  for (uint64_t draw = 0; draw < 50; draw++) {
    pds_sampler a = s, b = s;
    a.draw = b.draw = draw;
    CHECK_EQ(sample(logits, &a, NULL, 0), sample(logits, &b, NULL, 0));
    b.seed ^= (uint64_t)1 << 40;
    differ += sample(logits, &a, NULL, 0) != sample(logits, &b, NULL, 0);
  }
  CHECK(differ > 10);
}

static void refusals(void) {
  float logits[VOCAB] = {0}, values[VOCAB];
  int32_t ids[VOCAB], token = -7, history[] = {VOCAB};
  pds_sampler s = sampler(1);
#define TRY(...) pds_sample(__VA_ARGS__, values, ids, &token)
  logits[3] = NAN;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "token 3 is NaN");
  logits[3] = INFINITY;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "infinite");
  for (int i = 0; i < VOCAB; i++) logits[i] = -INFINITY;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "infinite");
  memset(logits, 0, sizeof logits);
  s.repetition_penalty = 0;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "repetition_penalty");
  s.repetition_penalty = 2;
  CHECK_STATUS(TRY(logits, VOCAB, &s, history, 1), PDS_ERR_TOKEN, "history");
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 1), PDS_ERR_ARGUMENT, "null");
  CHECK_STATUS(TRY(logits, 0, &s, NULL, 0), PDS_ERR_ARGUMENT, "vocab");
  s = sampler(NAN);
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "temperature");
  s = sampler(1);
  s.top_p = 1.5f;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "top_p");
  s.top_p = NAN;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "top_p");
  s = sampler(1);
  s.min_p = -1;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "min_p");
  s = sampler(1);
  s.top_k = -1;
  CHECK_STATUS(TRY(logits, VOCAB, &s, NULL, 0), PDS_ERR_ARGUMENT, "top_k");
  CHECK_EQ(token, -7); /* left alone */
#undef TRY
}

/* Philox4x32-10 of an all-zero key and counter gives 6627e8d5 e169c58d ... (Random123's
 * kat_vectors): over equal logits the token is the number's leading bits. */
static void known_answer(void) {
  static float logits[65536], values[65536];
  static int32_t ids[65536];
  pds_sampler s = sampler(1);
  s.seed = 0;
  int32_t token = -1;
  CHECK_OK(pds_sample(logits, 65536, &s, NULL, 0, values, ids, &token));
  CHECK_EQ(token, 0xe169);
}

void case_sample(void) {
  known_answer();
  greedy();
  filters();
  frequencies();
  refusals();
}
