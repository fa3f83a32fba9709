/* sample.c: one token from one row of logits, with the processors of transformers in its order:
 * repetition penalty, temperature, top-k, top-p, min-p. Scores and probabilities compare as there;
 * the draw is our own.
 *
 * The random number is a function of (seed, draw) alone: Philox4x32-10 (Salmon et al., "Parallel
 * Random Numbers: As Easy as 1, 2, 3", SC 2011), so a stream can be resumed anywhere and needs no
 * state. */
#include <math.h>
#include <stdbool.h>

#include "status.h"

/* 53 random bits of the draw as a number in [0, 1). */
static double uniform(uint64_t seed, uint64_t draw) {
  uint32_t c[4] = {(uint32_t)draw, (uint32_t)(draw >> 32), 0, 0};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b,
                        (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
    for (int i = 0; i < 4; i++) c[i] = next[i];
  }
  uint64_t bits = (uint64_t)c[1] << 32 | c[0];
  return (double)(bits >> 11) * 0x1p-53;
}

static pds_status check(const pds_sampler *s) {
  if (!(s->repetition_penalty > 0) || isinf(s->repetition_penalty))
    return pds_fail(PDS_ERR_ARGUMENT, "repetition_penalty %g: expected above 0",
                    (double)s->repetition_penalty);
  if (isnan(s->temperature) || isinf(s->temperature))
    return pds_fail(PDS_ERR_ARGUMENT, "temperature: expected a finite number");
  if (!(s->top_p >= 0 && s->top_p <= 1))
    return pds_fail(PDS_ERR_ARGUMENT, "top_p %g: expected 0 to 1", (double)s->top_p);
  if (!(s->min_p >= 0 && s->min_p <= 1))
    return pds_fail(PDS_ERR_ARGUMENT, "min_p %g: expected 0 to 1", (double)s->min_p);
  if (s->top_k < 0)
    return pds_fail(PDS_ERR_ARGUMENT, "top_k %d: expected 0 (off) or more", s->top_k);
  return PDS_OK;
}

/* Copies the logits and applies the repetition penalty: once per distinct id, as it is computed
 * from `logits`. */
static pds_status penalise(const float *logits, uint32_t vocab, const pds_sampler *s,
                           const int32_t *history, uint32_t n_history, float *scores) {
  for (uint32_t i = 0; i < vocab; i++) {
    if (isnan(logits[i]))
      return pds_fail(PDS_ERR_ARGUMENT,
                      "logit of token %u is NaN: the model's weights or its input are damaged", i);
    scores[i] = logits[i];
  }
  if (s->repetition_penalty == 1) return PDS_OK;
  for (uint32_t i = 0; i < n_history; i++) {
    int32_t id = history[i];
    if (id < 0 || (uint32_t)id >= vocab)
      return pds_fail(PDS_ERR_TOKEN, "history: token %d, expected 0 to %u", id, vocab - 1);
    float x = logits[id];
    scores[id] = x < 0 ? x * s->repetition_penalty : x / s->repetition_penalty;
  }
  return PDS_OK;
}

/* Higher scores first; of equal ones the lower id. */
static bool before(const float *scores, int32_t a, int32_t b) {
  return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
}

static void sift(const float *scores, int32_t *heap, uint32_t n, uint32_t at) {
  for (;;) {
    uint32_t child = 2 * at + 1;
    if (child >= n) return;
    if (child + 1 < n && before(scores, heap[child + 1], heap[child])) child++;
    if (!before(scores, heap[child], heap[at])) return;
    int32_t swap = heap[at];
    heap[at] = heap[child];
    heap[child] = swap;
    at = child;
  }
}

/* All ids with a finite score as a heap, best first. Returns their number. */
static uint32_t make_heap(const float *scores, uint32_t vocab, int32_t *heap) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < vocab; i++)
    if (scores[i] > -INFINITY) heap[n++] = (int32_t)i;
  for (uint32_t i = n / 2; i-- > 0;) sift(scores, heap, n, i);
  return n;
}

static int32_t pop(const float *scores, int32_t *heap, uint32_t *n) {
  int32_t top = heap[0];
  heap[0] = heap[--*n];
  sift(scores, heap, *n, 0);
  return top;
}

static double weight(float score, float max) {
  return exp((double)score - (double)max);
}

static double total_weight(const float *scores, uint32_t vocab, float max) {
  double total = 0;
  for (uint32_t i = 0; i < vocab; i++)
    if (scores[i] > -INFINITY) total += weight(scores[i], max);
  return total;
}

/* Drops what lies below the k-th highest score; its equals stay, as in transformers. */
static void keep_top_k(float *scores, uint32_t vocab, uint32_t k, int32_t *heap) {
  uint32_t n = make_heap(scores, vocab, heap);
  if (k >= n) return;
  int32_t last = heap[0];
  for (uint32_t i = 0; i < k; i++) last = pop(scores, heap, &n);
  float lowest = scores[last];
  for (uint32_t i = 0; i < vocab; i++)
    if (scores[i] < lowest) scores[i] = -INFINITY;
}

/* Keeps the fewest best ids whose probabilities sum to at least p, and at least one. */
static void keep_top_p(float *scores, uint32_t vocab, double p, float max, int32_t *heap) {
  double goal = p * total_weight(scores, vocab, max), sum = 0;
  uint32_t n = make_heap(scores, vocab, heap);
  int32_t last = heap[0];
  do {
    last = pop(scores, heap, &n);
    sum += weight(scores[last], max);
  } while (n > 0 && sum < goal);
  float lowest = scores[last];
  for (uint32_t i = 0; i < vocab; i++)
    if (scores[i] < lowest || (scores[i] == lowest && (int32_t)i > last)) scores[i] = -INFINITY;
}

/* Inverse of the cumulative distribution over ascending ids. */
static int32_t draw(const float *scores, uint32_t vocab, float max, double u) {
  double goal = u * total_weight(scores, vocab, max), sum = 0;
  int32_t last = 0;
  for (uint32_t i = 0; i < vocab; i++) {
    if (!(scores[i] > -INFINITY)) continue;
    last = (int32_t)i;
    sum += weight(scores[i], max);
    if (sum > goal) break;
  }
  return last;
}

pds_status pds_sample(const float *logits, uint32_t vocab, const pds_sampler *sampler,
                      const int32_t *history, uint32_t n_history, float *scratch_values,
                      int32_t *scratch_ids, int32_t *out_token) {
  if (!logits || !sampler || !scratch_values || !scratch_ids || !out_token ||
      (n_history > 0 && !history))
    return pds_fail(PDS_ERR_ARGUMENT, "sample: a null pointer");
  if (vocab == 0 || vocab > INT32_MAX) return pds_fail(PDS_ERR_ARGUMENT, "sample: vocab %u", vocab);
  PDS_RETURN_IF_ERROR(check(sampler));
  float *scores = scratch_values;
  PDS_RETURN_IF_ERROR(penalise(logits, vocab, sampler, history, n_history, scores));
  uint32_t best = 0;
  for (uint32_t i = 1; i < vocab; i++)
    if (scores[i] > scores[best]) best = i;
  if (sampler->temperature <= 0) {
    *out_token = (int32_t)best;
    return PDS_OK;
  }
  for (uint32_t i = 0; i < vocab; i++) scores[i] /= sampler->temperature;
  float max = scores[best];
  if (isinf(max))
    return pds_fail(PDS_ERR_ARGUMENT,
                    "the highest logit over temperature is infinite: no distribution");
  if (sampler->top_k > 0) keep_top_k(scores, vocab, (uint32_t)sampler->top_k, scratch_ids);
  if (sampler->top_p < 1) keep_top_p(scores, vocab, (double)sampler->top_p, max, scratch_ids);
  if (sampler->min_p > 0)
    for (uint32_t i = 0; i < vocab; i++)
      if (weight(scores[i], max) < (double)sampler->min_p) scores[i] = -INFINITY;
  *out_token = draw(scores, vocab, max, uniform(sampler->seed, sampler->draw));
  return PDS_OK;
}
