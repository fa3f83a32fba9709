/* control.c: what tests and the runtime ask of the mock beyond the CUDA driver's functions. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mock.h"

/* --- settings --- */

static cost *copy_costs(const cost *list) {
  cost *first = NULL, **end = &first;
  for (; list; list = list->next) {
    *end = mock_alloc(sizeof **end);
    **end = *list;
    end = &(*end)->next;
    *end = NULL;
  }
  return first;
}

/* Why these settings cannot replace the present ones; NULL: they can. */
static const char *refuse(const settings *now) {
  if (mock.retained == 0) return NULL;
  if (now->wall != mock.set.wall) return "clock: cannot change while a context is there";
  if (now->memory < now->context || now->memory - now->context < mock.count.device_live)
    return "memory: less than what is allocated";
  return NULL;
}

static int configure(const char *text) {
  settings changed = mock.set;
  changed.kernels = copy_costs(mock.set.kernels);
  changed.host = copy_costs(mock.set.host);
  bool reset;
  bool good = mock_parse(&changed, text, &reset);
  if (good && !reset) {
    const char *why = refuse(&changed);
    if (why) mock_error(CUDA_ERROR_INVALID_VALUE, "%s", why);
    good = !why;
  }
  if (!good) {
    mock_free_settings(&changed);
    return -1;
  }
  if (reset) {
    if (mock.retained > 0) mock_destroy_context();
    mock.retained = 0;
    mock.initialised = false;
    mock.generation++;
    mock.count = (counters){0};
    mock.now = mock.busy_until = 0;
    mock.next_seq = 0;
    mock.epoch = 0;
    mock.epoch = mock_wall_now();
  }
  mock_rates_change(mock.now);
  mock_free_settings(&mock.set);
  mock.set = changed;
  mock.settings_bad = false;
  return 0;
}

int pds_mock_configure(const char *text) {
  mock_enter_any("pds_mock_configure");
  int result = text ? configure(text) : -1;
  mock_leave(CUDA_SUCCESS);
  return result;
}

/* --- time --- */

int64_t mock_now(void) {
  return mock.set.wall ? mock_wall_now() : mock.now;
}

int64_t pds_mock_now(void) {
  mock_enter_any("pds_mock_now");
  int64_t now = mock_now();
  mock_leave(CUDA_SUCCESS);
  return now;
}

int64_t pds_mock_host_begin(const char *name, uint32_t n, const uint32_t *tokens) {
  mock_enter_any("pds_mock_host_begin");
  const int64_t until =
      mock_now() + (mock.set.wall ? 0 : mock_cost(mock.set.host, name, n, tokens, 0));
  if (!mock.set.wall && until > mock.busy_until) {
    mock_rates_change(mock.now);
    mock.busy_until = until;
  }
  mock_leave(CUDA_SUCCESS);
  return until;
}

int64_t pds_mock_next(void) {
  mock_enter_any("pds_mock_next");
  int64_t next = mock.set.wall ? -1 : mock_virtual_next();
  mock_leave(CUDA_SUCCESS);
  return next;
}

void pds_mock_advance(int64_t to_ns) {
  mock_enter_any("pds_mock_advance");
  if (!mock.set.wall) mock_virtual_advance(to_ns);
  mock_leave(CUDA_SUCCESS);
}

/* --- counters --- */

static int64_t launches_of(const char *name) {
  int64_t launches = -1;
  for (CUmodule m = mock.modules; m; m = m->next)
    for (uint32_t i = 0; i < m->n; i++)
      if (strcmp(m->functions[i].name, name) == 0)
        launches = (launches < 0 ? 0 : launches) + m->functions[i].launches;
  return launches;
}

static int64_t counter(const char *name) {
#define COUNTER(field)                                                                             \
  if (strcmp(name, #field) == 0) return mock.count.field;
  COUNTER(calls)
  COUNTER(launches)
  COUNTER(h2d_copies)
  COUNTER(d2h_copies)
  COUNTER(d2d_copies)
  COUNTER(h2d_bytes)
  COUNTER(d2h_bytes)
  COUNTER(d2d_bytes)
  COUNTER(device_live)
  COUNTER(device_peak)
  COUNTER(device_allocations)
  COUNTER(pinned_live)
  COUNTER(pinned_peak)
  COUNTER(streams)
  COUNTER(events)
  COUNTER(modules)
  COUNTER(implicit_waits)
#undef COUNTER
  if (strcmp(name, "virtual") == 0) return !mock.set.wall;
  return strncmp(name, "launches.", 9) == 0 ? launches_of(name + 9) : -1;
}

int64_t pds_mock_counter(const char *name) {
  mock_enter_any("pds_mock_counter");
  int64_t value = name ? counter(name) : -1;
  mock_leave(CUDA_SUCCESS);
  return value;
}
