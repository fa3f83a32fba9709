/* schedule.c: what decisions are made with, set from outside, and what came of them, for others to
 * read. */
#include <string.h>

#include "engine.h"

static const char names[] =
    "adaptsched,pdscope-paper,static,ondemand,fate,fiddler,hybrimoe,lru,apex";

const char *pds_policies(void) {
  return names;
}

/* The number of a policy; PDS_POLICIES: there is none of that name. */
static uint32_t policy_of(const char *name) {
  const size_t length = strlen(name);
  uint32_t number = 0;
  for (const char *at = names; at; number++) {
    const char *end = strchr(at, ',');
    const size_t n = end ? (size_t)(end - at) : strlen(at);
    if (n == length && !memcmp(at, name, n)) return number;
    at = end ? end + 1 : NULL;
  }
  return PDS_POLICIES;
}

static pds_status check_curve(const pds_cost_curve *c, const char *name) {
  if (c->n > PDS_COST_KNOTS)
    return pds_fail(PDS_ERR_ARGUMENT, "costs: %s has %u knots, expected at most %d", name, c->n,
                    PDS_COST_KNOTS);
  for (uint32_t i = 0; i < c->n; i++)
    if (c->ns[i] < 0 || c->ns[i] > PDS_TIME_MAX || (i && c->ns[i] < c->ns[i - 1]) ||
        (i && c->tokens[i] <= c->tokens[i - 1]))
      return pds_fail(PDS_ERR_ARGUMENT,
                      "costs: %s: knot %u: expected ascending tokens, and times that ascend from 0 "
                      "to 2^40 ns",
                      name, i);
  return PDS_OK;
}

static pds_status check_costs(const pds_costs *c) {
  const int64_t times[] = {c->io_start, c->io_expert,   c->cpu_start,          c->gpu_start,
                           c->predict,  c->context_row, c->context_row_prefill};
  for (size_t i = 0; i < sizeof times / sizeof *times; i++)
    if (times[i] < 0 || times[i] > PDS_TIME_MAX)
      return pds_fail(PDS_ERR_ARGUMENT, "costs: a time of %lld ns, expected 0 to 2^40",
                      (long long)times[i]);
  PDS_RETURN_IF_ERROR(check_curve(&c->cpu_expert, "cpu_expert"));
  PDS_RETURN_IF_ERROR(check_curve(&c->gpu_expert, "gpu_expert"));
  PDS_RETURN_IF_ERROR(check_curve(&c->attention, "attention"));
  return check_curve(&c->shared, "shared");
}

static pds_status no_gpu(const pds_engine *engine) {
  if (engine && engine->gpu) return PDS_OK;
  return pds_fail(PDS_ERR_ARGUMENT, "schedule: the engine has no GPU");
}

pds_status pds_engine_set_schedule(pds_engine *engine, const pds_schedule *schedule) {
  PDS_RETURN_IF_ERROR(no_gpu(engine));
  if (!schedule || !schedule->costs) return pds_fail(PDS_ERR_ARGUMENT, "schedule: a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(engine));
  const uint32_t policy = policy_of(schedule->policy ? schedule->policy : "adaptsched");
  if (policy == PDS_POLICIES)
    return pds_fail(PDS_ERR_ARGUMENT, "policy '%.40s': expected one of %s", schedule->policy,
                    names);
  PDS_RETURN_IF_ERROR(check_costs(schedule->costs));
  const pds_residency *r = &engine->gpu->residency;
  pds_gpu_policy *p = &engine->gpu->policy;
  pds_pool_open(engine->pool);
  p->policy = policy;
  p->costs = *schedule->costs;
  for (size_t i = 0; i < (size_t)r->layers * r->experts; i++)
    p->score[i] = p->popularity[i] = schedule->popularity ? schedule->popularity[i] : 0;
  for (size_t i = 0; i < (size_t)r->layers * r->experts; i++) p->seen[i] = p->now;
  for (uint32_t i = 0; i < 3 * r->layers; i++) {
    const uint32_t hit = schedule->hit_q16 ? schedule->hit_q16[i] : 65536 / 2;
    p->hit_q16[i] = hit < 65536 ? hit : 65536;
    p->gain[i] = 2 * p->costs.predict; /* it has yet to show what it saves */
    p->sure_q16[i] = schedule->sure_q16 ? schedule->sure_q16[i] : 0;
  }
  memset(p->ledger, 0, r->layers * sizeof *p->ledger);
  memset(p->recompile, 0, sizeof p->recompile);
  memset(p->recompile_driver, 0, sizeof p->recompile_driver);
  memset(p->paused, 0, 3 * r->layers * sizeof *p->paused);
  p->set = true;
  const bool fills = schedule->first && pds_policy_keeps(policy) && !engine->gpu->stopped;
  const pds_status status = fills ? pds_gpu_fill_ring(engine->gpu, schedule->first) : PDS_OK;
  pds_pool_close(engine->pool);
  return status;
}

pds_status pds_engine_get_ledger(pds_engine *engine, pds_ledger *out_layers) {
  PDS_RETURN_IF_ERROR(no_gpu(engine));
  if (!out_layers) return pds_fail(PDS_ERR_ARGUMENT, "ledger: a null pointer");
  PDS_RETURN_IF_ERROR(pds_engine_check_fork(engine));
  pds_pool_open(engine->pool);
  memcpy(out_layers, engine->gpu->policy.ledger,
         engine->gpu->residency.layers * sizeof *out_layers);
  pds_pool_close(engine->pool);
  return PDS_OK;
}

pds_status pds_engine_get_gpu(const pds_engine *engine, pds_gpu_info *out_info) {
  if (!engine || !out_info) return pds_fail(PDS_ERR_ARGUMENT, "GPU: a null pointer");
  *out_info = (pds_gpu_info){0};
  const pds_gpu *gpu = engine->gpu;
  if (!gpu) return PDS_OK;
  *out_info = (pds_gpu_info){.present = 1,
                             .resident = gpu->residency.hot,
                             .ring = gpu->residency.ring,
                             .pinned = gpu->pinned != NULL,
                             .cap = gpu->cap,
                             .used = gpu->used,
                             .weight_bytes = gpu->weight_bytes,
                             .slot_bytes = (uint64_t)(gpu->residency.hot + gpu->residency.ring) *
                                           gpu->expert_bytes,
                             .expert_bytes = gpu->expert_bytes,
                             .name = gpu->name};
  for (int phase = 0; phase < 3; phase++) {
    out_info->recompile[phase] = pds_spans_of(&gpu->policy.recompile[phase]);
    out_info->recompile_driver[phase] = pds_spans_of(&gpu->policy.recompile_driver[phase]);
  }
  return PDS_OK;
}
