/* fake_plan.c: the constants of a hand-made plan. The driver writes its program.bin and w.bin, and
 * says how long program.bin is. */
#include "fake_plan.h"
#include "plan_desc.h"

#ifndef TEST_PROGRAM_BYTES
#error "the driver passes -DTEST_PROGRAM_BYTES=<size of program.bin>"
#endif
#ifndef TEST_FEATURES
#define TEST_FEATURES ""
#endif

static const pds_file weight_files[] = {{"w.bin", FAKE_WEIGHT_BYTES}};

static const pds_layer layers[FAKE_LAYERS] = {
    {.moe = 0, .dense = {.inter = 32}},
    {.moe = 1,
     .gate = {.experts = FAKE_EXPERTS, .top_k = FAKE_TOP_K},
     .experts = {.inter = 32,
                 .gate_up = {PDS_F32, 0, 64, FAKE_HIDDEN, FAKE_EXPERTS, 32768, 24576},
                 .down = {PDS_F32, 0, FAKE_HIDDEN, 32, FAKE_EXPERTS, 32768 + 16384, 24576}},
     .shared = {.inter = 32}},
};

enum { /* bytes */
       HID = FAKE_ROWS * FAKE_HIDDEN * 4,
       ROUTE = FAKE_ROWS * FAKE_TOP_K * 4,
       OUT = FAKE_ROWS * FAKE_TOP_K * FAKE_HIDDEN * 4,
       LOGITS = FAKE_LOGITS * FAKE_VOCAB * 4,
};

const pds_plan pds_the_plan = {
    .plan_hash = "5eed0123456789abcdef5eed0123456789abcdef5eed0123456789abcdef5eed",
    .format_version = 1,
    .act_dtype = PDS_F32,
    .hidden = FAKE_HIDDEN,
    .vocab = FAKE_VOCAB,
    .n_layers = FAKE_LAYERS,
    .max_context = FAKE_CONTEXT,
    .max_rows = FAKE_ROWS,
    .max_logits = FAKE_LOGITS,
    .kv_block = FAKE_KV_BLOCK,
    .predict_rows = 16,
    .files = weight_files,
    .n_files = 1,
    .embed = {PDS_F32, 0, FAKE_VOCAB, FAKE_HIDDEN, 1, 0, 0},
    .layers = layers,
    .buffer_offset = {[PDS_BUF_HID] = 0,
                      [PDS_BUF_XN] = HID,
                      [PDS_BUF_ROUTE_ID] = 2 * HID,
                      [PDS_BUF_ROUTE_W] = 2 * HID + ROUTE,
                      [PDS_BUF_EXPERT_ROWS] = 2 * HID + 2 * ROUTE,
                      [PDS_BUF_HOLES] = 2 * HID + 3 * ROUTE,
                      [PDS_BUF_SHARED_OUT] = 2 * HID + 4 * ROUTE,
                      [PDS_BUF_EXPERT_OUT] = 3 * HID + 4 * ROUTE,
                      [PDS_BUF_LOGITS] = 3 * HID + 4 * ROUTE + OUT},
    .buffer_bytes = {[PDS_BUF_HID] = HID,
                     [PDS_BUF_XN] = HID,
                     [PDS_BUF_ROUTE_ID] = ROUTE,
                     [PDS_BUF_ROUTE_W] = ROUTE,
                     [PDS_BUF_EXPERT_ROWS] = ROUTE,
                     [PDS_BUF_HOLES] = FAKE_EXPERTS * 16,
                     [PDS_BUF_SHARED_OUT] = HID,
                     [PDS_BUF_EXPERT_OUT] = OUT,
                     [PDS_BUF_LOGITS] = LOGITS},
    .scratch_bytes = 3 * HID + 4 * ROUTE + OUT + (LOGITS + 63) / 64 * 64,
    .thread_scratch_bytes = 128,
    .kv_block_bytes = FAKE_LAYERS * FAKE_KV_BLOCK * 4,
    .program_bytes = TEST_PROGRAM_BYTES,
    .required_features = TEST_FEATURES,
};
