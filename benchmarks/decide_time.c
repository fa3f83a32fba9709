/* decide_time: microseconds of one decision, the best of five runs, for layers of Qwen3's cost on an
 * H200, by policy and size. See decisions.py. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <time.h>

#include "decide.h"

static pds_due cur[PDS_MAX_EXPERTS], res[PDS_MAX_EXPERTS], next[PDS_MAX_EXPERTS];
static pds_load on[PDS_MAX_EXPERTS], pre[PDS_MAX_EXPERTS];

static const char *const names[PDS_POLICIES] = {
    "adaptsched", "pdscope-paper", "static", "ondemand", "fate",
    "fiddler",    "hybrimoe",      "lru",    "apex",
};

static double us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void fill(pds_due *dues, uint32_t n, uint32_t most, uint32_t first) {
  for (uint32_t i = 0; i < n; i++) dues[i] = (pds_due){first + i, 1 + (most - 1) * i / n, i, 1000};
}

static double one(const pds_decision_in *given, pds_decision *out) {
  pds_decision_in in = *given;
  double best = 1e9;
  for (int run = 0; run < 5; run++) {
    double start = us();
    int n = 0;
    for (; us() - start < 2000; n++) {
      in.backlog = given->backlog + n;
      pds_decide(&in, out);
    }
    double each = (us() - start) / n;
    if (each < best) best = each;
  }
  return best;
}

int main(void) {
  pds_costs costs = {.io_start = 10000, .io_expert = 185000, .cpu_start = 15000, .gpu_start = 6000};
  costs.cpu_expert.n = costs.gpu_expert.n = 13;
  for (uint32_t i = 0; i < 13; i++) {
    uint32_t tokens = 1u << i;
    costs.cpu_expert.tokens[i] = costs.gpu_expert.tokens[i] = tokens;
    costs.cpu_expert.ns[i] = 89000 + 720 * (int64_t)tokens;
    costs.gpu_expert.ns[i] = 2600 + 24 * (int64_t)tokens;
  }
  static const struct {
    uint32_t experts, tokens;
    pds_phase phase;
  } sizes[] = {{8, 1, PDS_PHASE_DECODE}, {64, 16, PDS_PHASE_BATCH}, {128, 1000, PDS_PHASE_PREFILL}};
  printf("us of one decision, loads and prefetches in it\n");
  for (int s = 0; s < 3; s++)
    for (uint32_t policy = 0; policy < PDS_POLICIES; policy++) {
      uint32_t n = sizes[s].experts;
      fill(cur, n, sizes[s].tokens, 0);
      fill(next, n, sizes[s].tokens, 0);
      fill(res, n / 4, sizes[s].tokens, n);
      pds_decision_in in = {.costs = &costs,
                            .cur = cur,
                            .res = res,
                            .next = next,
                            .n_cur = n,
                            .n_res = n / 4,
                            .n_late = 1,
                            .n_next = n,
                            .policy = policy,
                            .phase = sizes[s].phase,
                            .top_k = 8,
                            .hit_q16 = 60000,
                            .free_slots = 64,
                            .stream = s == 2,
                            .attention = 600000,
                            .backlog = 100000};
      pds_decision out = {.on = on, .pre = pre};
      double time = one(&in, &out);
      printf("%4u + %u experts  %-14s %8.2f  %u + %u\n", n, n, names[policy], time, out.n_on,
             out.n_pre);
    }
  return 0;
}
