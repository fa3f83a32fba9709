/* twin_kernels.c: kernels for the driver's tests, as a module of the mock driver. The same ones as
 * PTX for a GPU are in support/cuda.py. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "cuda/driver.h"

typedef struct params {
  pds_twin_work work;
  uint32_t *to;
  uint32_t value, count;
} params;

/* to[i] = to[i] * 3 + value: the order of two of them shows. */
static void mix(void *argument) {
  params *p = argument;
  for (uint32_t i = 0; i < p->count; i++) p->to[i] = p->to[i] * 3 + p->value;
}

/* Appends `value` to a list whose length comes first. */
static void append(void *argument) {
  params *p = argument;
  uint32_t at = ++p->to[0];
  p->to[at] = p->value;
}

/* Meets `count` kernels at to[0]: to[value] is 1 if they all came within a minute. */
static void meet(void *argument) {
  params *p = argument;
  _Atomic uint32_t *arrived = (_Atomic uint32_t *)p->to;
  atomic_fetch_add(arrived, 1);
  struct timespec pause = {0, 100000};
  for (int i = 0; i < 600000 && atomic_load(arrived) < p->count; i++) nanosleep(&pause, NULL);
  p->to[p->value] = atomic_load(arrived) >= p->count;
}

/* What the module's parameter struct says of its work: to[0] = n, then the tokens. */
static void tokens(void *argument) {
  params *p = argument;
  p->to[0] = p->work.n;
  for (uint32_t i = 0; i < p->work.n; i++) p->to[1 + i] = p->work.tokens[i];
}

static const struct {
  char magic[8];
  uint32_t n;
  pds_twin_entry entries[4];
} module = {PDS_TWIN_MAGIC,
            4,
            {{.name = "mix", .fn = mix},
             {.name = "append", .fn = append},
             {.name = "meet", .fn = meet},
             {.name = "tokens", .fn = tokens}}};
_Static_assert(offsetof(pds_twin_module, entries) == offsetof(__typeof__(module), entries),
               "a twin module");

__attribute__((visibility("default"))) const void *test_module(void) {
  return &module;
}
