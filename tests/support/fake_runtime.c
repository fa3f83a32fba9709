/* fake_runtime.c: a stand-in for a plan's library, for quick tests of the Python side alone.
 *
 * The model: the likeliest next token is the last one + 1 (mod vocab), with logit 10; every logit
 * also gets a small part that depends on all tokens of the sequence, so that a wrong KV shows.
 * Sizes come from -D options. FAKE_STEP_MS (environment, read at engine creation) makes steps slow;
 * they poll for cancellation meanwhile.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "pdscope.h"

#ifndef FAKE_ABI
#define FAKE_ABI PDS_ABI_VERSION
#endif

struct pds_engine {
  long step_ms;
  uint32_t threads;
  int32_t weights;
  int pinned;
  int32_t cache_prefetch;
  int sessions;
  char plan_hash[65];
};

typedef struct sequence {
  uint32_t n;
  int32_t token[MAX_CONTEXT];
} sequence;

struct pds_session {
  pds_engine *engine;
  uint32_t max_seqs;
  int cancel;
  int busy;
  pds_session_stats stats;
  pds_tap_fn tap;
  void *tap_user;
  pds_trace_record *trace;
  uint64_t trace_capacity, trace_n, trace_dropped;
  float logits[MAX_LOGITS * VOCAB];
  sequence seq[];
};

static _Thread_local const char *last_error = "";
static pds_status fail(pds_status code, const char *text) {
  last_error = text;
  return code;
}

uint32_t pds_abi_version(void) {
  return FAKE_ABI;
}
const char *pds_last_error(void) {
  return last_error;
}
const char *pds_status_name(pds_status s) {
  return s == PDS_OK ? "ok" : "error";
}
const char *pds_opcode_name(uint8_t op) {
  return op == 0 ? "embed" : op == 1 ? "expert" : "unknown";
}
const char *pds_queue_name(uint8_t q) {
  return q == 0 ? "host" : q == 1 ? "cpu" : "unknown";
}
const char *pds_isa_built(void) {
  return "fake,scalar";
}
const char *pds_isa_runnable(void) {
  return "fake,scalar";
}

/* The hash that plan.json says, or that of a build with -DPLAN_HASH. */
static void read_hash(const char *dir, char hash[65]) {
#ifdef PLAN_HASH
  (void)dir;
  strcpy(hash, PLAN_HASH);
#else
  char path[4096], text[256] = {0};
  snprintf(path, sizeof path, "%s/plan.json", dir);
  FILE *file = fopen(path, "r");
  if (!file) return;
  const size_t n = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  const char *key = n ? strstr(text, "\"plan_hash\": \"") : NULL;
  if (key) memcpy(hash, key + 14, 64);
#endif
}

pds_status pds_engine_create(const pds_engine_options *o, pds_engine **out) {
  if (!o || !o->plan_dir) return fail(PDS_ERR_ARGUMENT, "plan_dir is NULL");
  const char *isa = o->isa ? o->isa : getenv("PDSCOPE_ISA");
  if (isa && *isa && strcmp(isa, "fake") && strcmp(isa, "scalar"))
    return fail(PDS_ERR_ISA, "isa: unknown kernel path: expected fake or scalar");
  if (o->gpu) { /* which it has not; says what it was to load */
    static char kernels[4096];
    snprintf(kernels, sizeof kernels, "gpu kernels:");
    for (const char *c = o->gpu_kernels; c && *c && strlen(kernels) + 2 < sizeof kernels; c++)
      strncat(kernels, *c == '\n' ? "|" : (const char[]){*c, 0}, 1);
    return fail(PDS_ERR_GPU, kernels);
  }
  pds_engine *e = calloc(1, sizeof *e);
  if (!e) return fail(PDS_ERR_MEMORY, "no memory");
  const char *ms = getenv("FAKE_STEP_MS");
  e->step_ms = ms ? atol(ms) : 0;
  read_hash(o->plan_dir, e->plan_hash);
  e->threads = o->threads ? (uint32_t)o->threads : 1;
  e->weights = o->weights ? o->weights : PDS_WEIGHTS_MMAP;
  e->pinned = o->pin == PDS_PIN_ON;
  e->cache_prefetch = o->cache_prefetch;
  *out = e;
  return PDS_OK;
}

void pds_engine_destroy(pds_engine *e) {
  if (e && e->sessions)
    abort(); /* a session outlived its engine: the Python side broke the contract */
  free(e);
}

pds_status pds_engine_get_info(const pds_engine *e, pds_engine_info *out) {
  *out = (pds_engine_info){.abi_version = FAKE_ABI,
                           .vocab = VOCAB,
                           .max_context = MAX_CONTEXT,
                           .max_rows = MAX_ROWS,
                           .max_logits = MAX_LOGITS,
                           .layers = LAYERS,
                           .threads = e->threads,
                           .kv_block = 64,
                           .kv_block_bytes = 256,
                           .weight_bytes = 1000,
                           .cores = 1,
                           .numa_nodes = 1,
                           .weights = e->weights,
                           .weights_why = "fake",
                           .cpus = e->pinned ? "0" : "",
                           .cpus_why = "fake",
                           .engine_bytes = sizeof *e,
                           .isa = "fake",
                           .plan_hash = e->plan_hash};
  return PDS_OK;
}

pds_status pds_engine_get_cache_prefetch(const pds_engine *e, pds_cache_prefetch_info *out) {
  *out = (pds_cache_prefetch_info){.asked = e->cache_prefetch,
                                   .state = {PDS_CACHE_PREFETCH_ON, PDS_CACHE_PREFETCH_AUTO},
                                   .trials = {2, 0},
                                   .gain = {1.25f, 0},
                                   .why = "fake",
                                   .experts_predicted = 10,
                                   .experts_hit = 7,
                                   .prefetch_bytes = 8192,
                                   .prefetch_useful_bytes = 4096};
  return PDS_OK;
}

pds_status pds_engine_get_gpu(const pds_engine *e, pds_gpu_info *out) {
  (void)e;
  *out = (pds_gpu_info){0}; /* everything runs on the CPU */
  return PDS_OK;
}

pds_status pds_session_create(pds_engine *e, const pds_session_options *o, pds_session **out) {
  uint32_t seqs = o && o->max_seqs ? o->max_seqs : 1;
  pds_session *s = calloc(1, sizeof *s + seqs * sizeof(sequence));
  if (!s) return fail(PDS_ERR_MEMORY, "no memory for the session");
  s->engine = e;
  s->max_seqs = seqs;
  s->stats.kv_blocks = seqs * ((MAX_CONTEXT + 63) / 64);
  s->stats.session_bytes = sizeof *s;
  __atomic_fetch_add(&e->sessions, 1, __ATOMIC_SEQ_CST);
  *out = s;
  return PDS_OK;
}

void pds_session_destroy(pds_session *s) {
  if (!s) return;
  if (s->busy) abort(); /* destroyed inside a step */
  __atomic_fetch_sub(&s->engine->sessions, 1, __ATOMIC_SEQ_CST);
  memset(s->logits, 0xff, sizeof s->logits); /* NaN: a view that outlives its memory shows */
  free(s);
}

static uint64_t mix(uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdull;
  return h ^ (h >> 29);
}

static void logits_of(const sequence *q, uint32_t n, float *out) {
  uint64_t h = 17;
  for (uint32_t i = 0; i < n; i++) h = mix(h * 31 + (uint64_t)q->token[i] + 1);
  for (uint32_t v = 0; v < VOCAB; v++) out[v] = (float)(mix(h + v) % 1000) * 1e-4f;
  out[(uint32_t)(q->token[n - 1] + 1) % VOCAB] += 10.0f;
}

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void record(pds_session *s, pds_trace_record r) {
  if (!s->trace) return;
  if (s->trace_n < s->trace_capacity)
    s->trace[s->trace_n++] = r;
  else
    s->trace_dropped++;
}

static pds_status check(pds_session *s, const pds_batch *b, uint32_t *wanted) {
  if (!b->n) return fail(PDS_ERR_BATCH, "the batch has no rows");
  if (b->n > MAX_ROWS) return fail(PDS_ERR_BATCH, "more rows than max_rows");
  uint32_t *length = malloc(s->max_seqs * sizeof *length);
  for (uint32_t i = 0; i < s->max_seqs; i++) length[i] = s->seq[i].n;
  pds_status status = PDS_OK;
  for (uint32_t i = 0; i < b->n && !status; i++) {
    if (b->token[i] < 0 || b->token[i] >= VOCAB)
      status = fail(PDS_ERR_TOKEN, "token outside the vocabulary");
    else if (b->seq[i] < 0 || b->seq[i] >= (int32_t)s->max_seqs)
      status = fail(PDS_ERR_SEQUENCE, "no such sequence");
    else if (b->position[i] != (int32_t)length[b->seq[i]])
      status = fail(PDS_ERR_POSITION, "position does not continue");
    else if (length[b->seq[i]] >= MAX_CONTEXT)
      status = fail(PDS_ERR_CONTEXT, "the context is full");
    else
      length[b->seq[i]]++;
    *wanted += b->want_logits ? b->want_logits[i] != 0 : i + 1 == b->n;
  }
  free(length);
  if (!status && *wanted > MAX_LOGITS) status = fail(PDS_ERR_BATCH, "more logits than max_logits");
  return status;
}

pds_status pds_step(pds_session *s, const pds_batch *b, pds_logits *out) {
  if (__atomic_exchange_n(&s->busy, 1, __ATOMIC_SEQ_CST))
    return fail(PDS_ERR_BUSY, "another step runs");
  uint32_t wanted = 0;
  uint64_t begin = now();
  pds_status status = check(s, b, &wanted);
  for (long ms = 0; !status && ms <= s->engine->step_ms; ms++) {
    if (__atomic_exchange_n(&s->cancel, 0, __ATOMIC_SEQ_CST))
      status = fail(PDS_ERR_CANCELLED, "cancelled");
    else if (s->engine->step_ms)
      usleep(1000);
  }
  if (status) {
    __atomic_store_n(&s->busy, 0, __ATOMIC_SEQ_CST);
    return status;
  }
  uint32_t row = 0;
  for (uint32_t i = 0; i < b->n; i++) {
    sequence *q = &s->seq[b->seq[i]];
    q->token[q->n++] = b->token[i];
    if (b->want_logits ? b->want_logits[i] : i + 1 == b->n)
      logits_of(q, q->n, s->logits + (size_t)row++ * VOCAB);
  }
  for (int32_t layer = -1; layer < LAYERS; layer++) {
    uint64_t t = now();
    record(s, (pds_trace_record){begin, t, layer < 0 ? 0 : 1000, layer, 0, layer >= 0, 1, b->n,
                                 layer < 0 ? 0 : 2});
    if (s->tap) {
      int32_t ids[2] = {0, 1};
      float data[2] = {0.25f, 0.75f};
      pds_tap_event e = {.layer = layer,
                         .opcode = layer >= 0,
                         .rows = 1,
                         .cols = 2,
                         .data = data,
                         .ids = layer < 0 ? NULL : ids};
      s->tap(s->tap_user, &e);
    }
  }
  s->stats.steps++;
  s->stats.rows += b->n;
  s->stats.step_ns += now() - begin;
  *out = (pds_logits){s->logits, wanted, VOCAB};
  __atomic_store_n(&s->busy, 0, __ATOMIC_SEQ_CST);
  return PDS_OK;
}

void pds_cancel(pds_session *s) {
  __atomic_store_n(&s->cancel, 1, __ATOMIC_SEQ_CST);
}

pds_status pds_session_get_stats(const pds_session *s, pds_session_stats *out) {
  *out = s->stats;
  return PDS_OK;
}

pds_status pds_session_set_tap(pds_session *s, pds_tap_fn fn, void *user) {
  s->tap = fn;
  s->tap_user = user;
  return PDS_OK;
}

pds_status pds_session_trace_start(pds_session *s, pds_trace_record *buffer, uint64_t capacity) {
  s->trace = buffer;
  s->trace_capacity = capacity;
  s->trace_n = s->trace_dropped = 0;
  return PDS_OK;
}

pds_status pds_session_trace_stop(pds_session *s, uint64_t *out_records, uint64_t *out_dropped) {
  s->trace = NULL;
  *out_records = s->trace_n;
  *out_dropped = s->trace_dropped;
  return PDS_OK;
}

static int bad(const pds_session *s, int32_t seq) {
  return seq < 0 || seq >= (int32_t)s->max_seqs;
}

pds_status pds_seq_length(const pds_session *s, int32_t seq, uint32_t *out) {
  if (bad(s, seq)) return fail(PDS_ERR_SEQUENCE, "sequence id out of range");
  *out = s->seq[seq].n;
  return PDS_OK;
}

pds_status pds_seq_truncate(pds_session *s, int32_t seq, uint32_t tokens) {
  if (bad(s, seq)) return fail(PDS_ERR_SEQUENCE, "sequence id out of range");
  if (tokens < s->seq[seq].n) s->seq[seq].n = tokens;
  return PDS_OK;
}

pds_status pds_seq_fork(pds_session *s, int32_t src, int32_t dst) {
  if (bad(s, src) || bad(s, dst)) return fail(PDS_ERR_SEQUENCE, "sequence id out of range");
  if (!s->seq[src].n) return fail(PDS_ERR_SEQUENCE, "the source sequence is empty");
  s->seq[dst] = s->seq[src];
  return PDS_OK;
}

static const char magic[8] = "FAKESEQ";

pds_status pds_seq_save_size(const pds_session *s, int32_t seq, uint64_t *out) {
  if (bad(s, seq)) return fail(PDS_ERR_SEQUENCE, "sequence id out of range");
  *out = sizeof magic + sizeof(sequence);
  return PDS_OK;
}

pds_status pds_seq_save(const pds_session *s, int32_t seq, void *buffer, uint64_t bytes) {
  if (bytes < sizeof magic + sizeof(sequence)) return fail(PDS_ERR_ARGUMENT, "buffer too small");
  memcpy(buffer, magic, sizeof magic);
  memcpy((char *)buffer + sizeof magic, &s->seq[seq], sizeof(sequence));
  return PDS_OK;
}

pds_status pds_seq_restore(pds_session *s, int32_t seq, const void *buffer, uint64_t bytes) {
  if (bad(s, seq)) return fail(PDS_ERR_SEQUENCE, "sequence id out of range");
  if (bytes != sizeof magic + sizeof(sequence) || memcmp(buffer, magic, sizeof magic))
    return fail(PDS_ERR_PLAN_FORMAT, "saved sequence: not of this plan");
  memcpy(&s->seq[seq], (const char *)buffer + sizeof magic, sizeof(sequence));
  return PDS_OK;
}

/* Greedy; with a temperature, a token that depends on seed and draw. */
pds_status pds_sample(const float *logits, uint32_t vocab, const pds_sampler *p,
                      const int32_t *history, uint32_t n, float *values, int32_t *ids,
                      int32_t *out) {
  (void)ids;
  memcpy(values, logits, vocab * sizeof *values);
  for (uint32_t i = 0; p->repetition_penalty != 1.0f && i < n; i++)
    values[history[i]] = logits[history[i]] / p->repetition_penalty;
  uint32_t best = 0;
  for (uint32_t v = 1; v < vocab; v++)
    if (values[v] > values[best]) best = v;
  *out = p->temperature > 0 ? (int32_t)(mix(p->seed * 1000003 + p->draw) % vocab) : (int32_t)best;
  return PDS_OK;
}

pds_status pds_generate(pds_session *s, const pds_generation *g, uint32_t *out) {
  pds_sampler sampler = *g->sampler;
  *out = 0;
  for (uint32_t n = g->n_history; *out < g->max_tokens; n++) {
    int32_t position = (int32_t)(n - 1);
    pds_batch batch = {.n = 1, .token = &g->history[n - 1], .position = &position, .seq = &g->seq};
    pds_logits logits;
    pds_status status = pds_step(s, &batch, &logits);
    if (status) return status;
    status = pds_sample(logits.data, logits.vocab, &sampler, g->history, n, g->scratch_values,
                        g->scratch_ids, &g->history[n]);
    if (status) return status;
    sampler.draw++;
    ++*out;
    for (uint32_t i = 0; i < g->n_stop_ids; i++)
      if (g->stop_ids[i] == g->history[n]) return PDS_OK;
  }
  return PDS_OK;
}
