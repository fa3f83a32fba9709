/* case_nets.c: nets are replaced while steps read them: a step sees one that is whole, and keeps
 * it to its end; what is refused. */
#define _GNU_SOURCE
#include "net.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "map.h"
#include "test.h"

enum { EXPERTS = 6, HIDDEN = 4, SWAPS = 300, STEPS = 10 };

static const pds_layer layers[] = {
    {.moe = 1, .gate = {.experts = EXPERTS, .top_k = 2}, .predictor = {PDS_PREDICT_CROSS_GATE, 1}},
    {.moe = 1, .gate = {.experts = EXPERTS, .top_k = 2}},
};
static const pds_plan plan = {.n_layers = 2, .hidden = HIDDEN, .layers = layers};

static float bias[EXPERTS];
static uint16_t features[3 * EXPERTS * EXPERTS];

/* Without hidden units; every number of it is `value`. */
static pds_net_desc net_of(uint32_t value, uint32_t blocks) {
  for (uint32_t i = 0; i < EXPERTS; i++) bias[i] = (float)value;
  for (uint32_t i = 0; i < 3 * EXPERTS * EXPERTS; i++) features[i] = (uint16_t)value;
  return (pds_net_desc){
      .hidden = HIDDEN, .experts = EXPERTS, .blocks = blocks, .bias = bias, .features = features};
}

typedef struct reader {
  pds_engine *engine;
  _Atomic bool stop;
  _Atomic uint32_t steps;
  uint32_t wrong;
} reader;

static void *read_nets(void *arg) {
  reader *r = arg;
  while (!atomic_load(&r->stop)) {
    pds_pool_open(r->engine->pool);
    pds_net_slot *slots = atomic_load_explicit(&r->engine->nets, memory_order_acquire);
    const pds_net *net =
        slots ? atomic_load_explicit(&slots[PDS_NET_DECODE].active, memory_order_acquire) : NULL;
    for (int again = 0; net && again < 20; again++) {
      const uint16_t value = (uint16_t)net->bias[0];
      for (uint32_t i = 0; i < EXPERTS; i++) r->wrong += (uint16_t)net->bias[i] != value;
      for (uint32_t i = 0; i < EXPERTS * EXPERTS; i++) r->wrong += net->features[i] != value;
    }
    pds_pool_close(r->engine->pool);
    r->steps++;
  }
  return NULL;
}

static void replaced(pds_engine *engine) {
  reader r = {.engine = engine};
  pthread_t thread;
  CHECK_EQ(pthread_create(&thread, NULL, read_nets, &r), 0);
  for (uint32_t i = 0; i < SWAPS || atomic_load(&r.steps) < STEPS; i++) {
    /* one and three parts of features in turn, now and then none at all */
    pds_net_desc desc = net_of(i, i % 2 ? PDS_NET_ROUTED : 7);
    CHECK_OK(pds_engine_set_net(engine, 0, PDS_NET_DECODE, i % 50 == 49 ? NULL : &desc));
  }
  atomic_store(&r.stop, true);
  CHECK_EQ(pthread_join(thread, NULL), 0);
  CHECK_EQ(r.wrong, 0);
  CHECK(engine->net_bytes <= 3 * PDS_GRAIN); /* the table and two nets */
}

/* A replacement does not wait for the step that is running. */
static void replaced_within_a_step(pds_engine *engine) {
  pds_net_slot *slots = atomic_load_explicit(&engine->nets, memory_order_acquire);
  pds_net_desc desc = net_of(1, 7);
  CHECK_OK(pds_engine_set_net(engine, 0, PDS_NET_DECODE, &desc));
  pds_pool_open(engine->pool);
  const pds_net *before = atomic_load(&slots[PDS_NET_DECODE].active);
  desc = net_of(2, 7);
  CHECK_OK(pds_engine_set_net(engine, 0, PDS_NET_DECODE, &desc));
  CHECK_EQ(before->bias[0], 1);
  CHECK_EQ(atomic_load(&slots[PDS_NET_DECODE].active)->bias[0], 2);
  CHECK(!pds_pool_past(engine->pool, slots[PDS_NET_DECODE].mark));
  pds_pool_close(engine->pool);
  CHECK(pds_pool_past(engine->pool, slots[PDS_NET_DECODE].mark));
}

static void refused(pds_engine *engine) {
  pds_net_desc desc = net_of(1, PDS_NET_ROUTED);
  CHECK_STATUS(pds_engine_set_net(engine, 1, 0, &desc), PDS_ERR_ARGUMENT, "layer 1");
  CHECK_STATUS(pds_engine_set_net(engine, 2, 0, NULL), PDS_ERR_ARGUMENT, "layer 2");
  CHECK_STATUS(pds_engine_set_net(engine, 0, 2, &desc), PDS_ERR_ARGUMENT, "phase 2");
  desc.hidden++;
  CHECK_STATUS(pds_engine_set_net(engine, 0, 0, &desc), PDS_ERR_PLAN_FORMAT, "5 inputs");
  desc = net_of(1, PDS_NET_ROUTED);
  desc.width = PDS_NET_WIDTH + 1;
  CHECK_STATUS(pds_engine_set_net(engine, 0, 0, &desc), PDS_ERR_PLAN_FORMAT, "at most 1024");
  desc.width = 1;
  CHECK_STATUS(pds_engine_set_net(engine, 0, 0, &desc), PDS_ERR_ARGUMENT, "null pointer");
  engine->net_busy = true;
  CHECK_STATUS(pds_engine_set_net(engine, 0, 0, NULL), PDS_ERR_BUSY, "another thread");
  engine->net_busy = false;
}

void case_nets(void) {
  pds_engine_layout at = pds_layout_engine(&plan, 2);
  void *base;
  CHECK_OK(pds_map_anon(at.total, "test", &base));
  unsigned char *arena = base;
  pds_engine *engine = base;
  engine->plan = &plan;
  engine->pid = getpid();
  engine->pool = (pds_pool *)(arena + at.pool);
  CHECK_OK(pds_pool_create(engine->pool, arena + at.workers, arena + at.stacks, 2));
  refused(engine);
  CHECK_EQ(engine->net_bytes, 0);
  replaced(engine);
  replaced_within_a_step(engine);
  pds_pool_destroy(engine->pool);
  pds_nets_free(engine);
  CHECK_EQ(engine->net_bytes, PDS_GRAIN); /* the table's, which goes last */
  pds_unmap(base, at.total);
}
