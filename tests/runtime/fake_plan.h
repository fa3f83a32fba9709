/* fake_plan.h: the sizes of the hand-made plan that the test program links: a dense layer and a MoE
 * layer. */
#ifndef PDS_FAKE_PLAN_H
#define PDS_FAKE_PLAN_H

enum {
  FAKE_HIDDEN = 64,
  FAKE_VOCAB = 97,
  FAKE_LAYERS = 2,
  FAKE_EXPERTS = 4,
  FAKE_TOP_K = 2,
  FAKE_CONTEXT = 200,
  FAKE_ROWS = 40,
  FAKE_LOGITS = 8,
  FAKE_KV_BLOCK = 64,
  FAKE_WEIGHT_BYTES = 131072,
};

#endif
