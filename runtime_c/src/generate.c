/* generate.c: the loop over tokens: step, sample, append. */
#include <stdbool.h>

#include "engine.h"

static bool is_stop(const pds_generation *g, int32_t token) {
  for (uint32_t i = 0; i < g->n_stop_ids; i++)
    if (g->stop_ids[i] == token) return true;
  return false;
}

pds_status pds_generate(pds_session *session, const pds_generation *g, uint32_t *out_tokens) {
  if (!session || !g || !out_tokens || !g->sampler || !g->history ||
      (g->n_stop_ids && !g->stop_ids))
    return pds_fail(PDS_ERR_ARGUMENT, "generate: a null pointer");
  if (g->n_history == 0) return pds_fail(PDS_ERR_ARGUMENT, "generate: the history is empty");
  *out_tokens = 0;
  pds_sampler sampler = *g->sampler;
  for (uint32_t n = g->n_history; *out_tokens < g->max_tokens; n++) {
    const int32_t position = (int32_t)(n - 1);
    const pds_batch batch = {
        .n = 1, .token = &g->history[n - 1], .position = &position, .seq = &g->seq};
    pds_logits logits;
    PDS_RETURN_IF_ERROR(pds_step(session, &batch, &logits));
    PDS_RETURN_IF_ERROR(pds_sample(logits.data, logits.vocab, &sampler, g->history, n,
                                   g->scratch_values, g->scratch_ids, &g->history[n]));
    sampler.draw++;
    ++*out_tokens;
    if (is_stop(g, g->history[n])) break;
  }
  return PDS_OK;
}
