/* config.c: the settings, their text form "key=value; key=value", and what work costs. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "mock.h"

#define KIB ((int64_t)1 << 10)
#define GIB ((int64_t)1 << 30)
#define GB 1000000000

void mock_default_settings(settings *set) {
  /* A card of compute capability 8.0 on PCIe 4 x16, roughly; no kernel takes any time. */
  *set = (settings){
      .devices = 1,
      .driver = 12040,
      .compute = 80,
      .sms = 108,
      .memory = 24 * GIB,
      .rate = {25LL * GB, 25LL * GB},
      .start = {10000, 10000},
      .rate_d2d = 1000LL * GB,
      .poison = 1,
      .slow_link = 1,
  };
}

static void free_costs(cost **list) {
  while (*list) {
    cost *first = *list;
    *list = first->next;
    free(first);
  }
}

void mock_free_settings(settings *set) {
  free_costs(&set->kernels);
  free_costs(&set->host);
}

/* --- numbers --- */

typedef struct unit {
  const char *name;
  int64_t factor;
} unit;
static const unit units[] = {
    {"KiB", KIB}, {"MiB", KIB << 10}, {"GiB", GIB},    {"MB/s", 1000000}, {"GB/s", GB},
    {"ns", 1},    {"us", 1000},       {"ms", 1000000}, {"s", GB},
};
enum { UNITS = sizeof units / sizeof *units };

/* A whole number below 2^62, without its unit; false: there is none at *at. */
static bool read_digits(const char **at, int64_t *out) {
  if (**at < '0' || **at > '9') return false;
  int64_t value = 0;
  for (; **at >= '0' && **at <= '9'; (*at)++) {
    if (value > (INT64_MAX / 2 - 9) / 10) return false;
    value = value * 10 + (**at - '0');
  }
  *out = value;
  return true;
}

static bool read_number(const char *text, int64_t *out) {
  int64_t value;
  if (!read_digits(&text, &value)) return false;
  while (*text == ' ') text++;
  int64_t factor = *text ? 0 : 1;
  for (int i = 0; i < UNITS; i++)
    if (strcmp(text, units[i].name) == 0) factor = units[i].factor;
  if (factor == 0 || value > INT64_MAX / 2 / factor) return false;
  *out = value * factor;
  return true;
}

/* --- costs --- */

static cost *cost_of(cost **list, const char *name, size_t length) {
  for (cost *c = *list; c; c = c->next)
    if (strlen(c->name) == length && memcmp(c->name, name, length) == 0) return c;
  cost *made = mock_alloc(sizeof *made);
  memcpy(made->name, name, length);
  made->extra_den = 1;
  made->next = *list;
  *list = made;
  return made;
}

/* "tokens:ns,tokens:ns": tokens ascend. */
static bool read_curve(cost *c, const char *text) {
  cost made = {0};
  do {
    if (made.n == MAX_KNOTS) return false;
    if (!read_digits(&text, &made.tokens[made.n]) || *text++ != ':') return false;
    if (!read_digits(&text, &made.ns[made.n])) return false;
    if (made.n > 0 && (made.tokens[made.n] <= made.tokens[made.n - 1])) return false;
    made.n++;
  } while (*text == ',' && text++);
  if (*text) return false;
  c->n = made.n;
  memcpy(c->tokens, made.tokens, sizeof c->tokens);
  memcpy(c->ns, made.ns, sizeof c->ns);
  return true;
}

/* "NAME.base", "NAME.curve" or "NAME.per_extra"; a name may have points in it. */
static bool set_cost(cost **list, const char *key, const char *value) {
  const char *field = strrchr(key, '.');
  if (!field || field == key || field - key >= MAX_NAME) return false;
  cost *c = cost_of(list, key, (size_t)(field - key));
  if (strcmp(field, ".base") == 0) return read_number(value, &c->base);
  if (strcmp(field, ".curve") == 0) return read_curve(c, value);
  if (strcmp(field, ".per_extra") != 0) return false;
  int64_t num, den = 1;
  if (!read_digits(&value, &num)) return false;
  if (*value == '/' && (value++, !read_digits(&value, &den) || den == 0)) return false;
  if (*value) return false;
  c->extra_num = num;
  c->extra_den = den;
  return true;
}

static int64_t curve_at(const cost *c, int64_t tokens) {
  if (c->n == 0 || tokens == 0) return 0;
  if (c->n == 1 || tokens <= c->tokens[0]) return c->ns[0];
  uint32_t i = 1; /* the segment that ends in knot i; beyond the last knot, the last segment */
  while (i < c->n - 1 && tokens > c->tokens[i]) i++;
  wide rise = c->ns[i] - c->ns[i - 1];
  wide run = c->tokens[i] - c->tokens[i - 1];
  wide product = rise * (tokens - c->tokens[i - 1]);
  wide floored = product >= 0 ? product / run : -((-product + run - 1) / run);
  return (int64_t)(c->ns[i - 1] + floored);
}

int64_t mock_cost(const cost *costs, const char *name, uint32_t n, const uint32_t *tokens,
                  uint64_t extra) {
  const cost *found = NULL;
  for (const cost *c = costs; c; c = c->next)
    if (strcmp(c->name, name) == 0 || (!found && strcmp(c->name, "*") == 0)) found = c;
  if (!found) return 0;
  wide ns = found->base + (wide)extra * found->extra_num / found->extra_den;
  for (uint32_t i = 0; i < n; i++) ns += curve_at(found, tokens[i]);
  const wide most = INT64_MAX / 4;
  return ns < 0 ? 0 : (int64_t)(ns < most ? ns : most);
}

/* --- the text --- */

typedef struct entry {
  const char *name;
  size_t offset;
  int64_t least;
} entry;
#define ENTRY(name, field, least) {name, offsetof(settings, field), least}
static const entry entries[] = {
    ENTRY("devices", devices, 0),
    ENTRY("driver", driver, 0),
    ENTRY("compute", compute, 0),
    ENTRY("sms", sms, 1),
    ENTRY("memory", memory, 0),
    ENTRY("context", context, 0),
    ENTRY("pinned", pinned, 0),
    ENTRY("h2d", rate[0], 1),
    ENTRY("d2h", rate[1], 1),
    ENTRY("h2d_busy", rate_busy[0], 0),
    ENTRY("d2h_busy", rate_busy[1], 0),
    ENTRY("pageable", pageable, 0),
    ENTRY("h2d_latency", latency[0], 0),
    ENTRY("d2h_latency", latency[1], 0),
    ENTRY("h2d_start", start[0], 0),
    ENTRY("d2h_start", start[1], 0),
    ENTRY("d2d", rate_d2d, 1),
    ENTRY("d2d_latency", latency_d2d, 0),
    ENTRY("enqueue", enqueue, 0),
    ENTRY("poison", poison, 0),
    ENTRY("fail_copy", fail_copy, 0),
    ENTRY("refuse_copy", refuse_copy, 0),
    ENTRY("fail_alloc", fail_alloc, 0),
    ENTRY("fail_pin", fail_pin, 0),
    ENTRY("fail_launch", fail_launch, 0),
    ENTRY("refuse_launch", refuse_launch, 0),
    ENTRY("lose_context", lose_context, 0),
    ENTRY("slow_link", slow_link, 1),
    ENTRY("slow_from", slow_from, 0),
    ENTRY("late_events", late_events, 0),
    ENTRY("stop_record", stop_record, 0),
};
enum { ENTRIES = sizeof entries / sizeof *entries };

/* The field is the value's place in `choices`, which end with NULL. */
static bool set_choice(int64_t *field, const char *value, const char *const *choices) {
  for (int64_t i = 0; choices[i]; i++) {
    if (strcmp(value, choices[i]) != 0) continue;
    *field = i;
    return true;
  }
  return false;
}

static bool set_one(settings *set, const char *key, const char *value) {
  static const char *const clocks[] = {"virtual", "wall", NULL};
  static const char *const kernels[] = {
      [KERNELS_END] = "end", [KERNELS_START] = "start", [KERNELS_NONE] = "none", NULL};
  if (strcmp(key, "clock") == 0) return set_choice(&set->wall, value, clocks);
  if (strcmp(key, "kernels") == 0) return set_choice(&set->effects, value, kernels);
  if (strncmp(key, "kernel.", 7) == 0) return set_cost(&set->kernels, key + 7, value);
  if (strncmp(key, "host.", 5) == 0) return set_cost(&set->host, key + 5, value);
  for (int i = 0; i < ENTRIES; i++) {
    if (strcmp(key, entries[i].name) != 0) continue;
    int64_t number;
    if (!read_number(value, &number) || number < entries[i].least) return false;
    memcpy((char *)set + entries[i].offset, &number, sizeof number);
    return true;
  }
  return false;
}

static char *trim(char *text) {
  while (*text == ' ' || *text == '\t' || *text == '\n') text++;
  char *end = text + strlen(text);
  while (end > text && (end[-1] == ' ' || end[-1] == '\t' || end[-1] == '\n')) *--end = 0;
  return text;
}

bool mock_parse(settings *set, const char *text, bool *out_reset) {
  size_t bytes = strlen(text) + 1;
  char *copy = mock_alloc(bytes), *rest = copy;
  memcpy(copy, text, bytes);
  bool good = true;
  *out_reset = false;
  for (char *part; good && (part = strsep(&rest, ";"));) {
    part = trim(part);
    if (!*part) continue;
    if (strcmp(part, "reset") == 0) {
      mock_free_settings(set);
      mock_default_settings(set);
      *out_reset = true;
      continue;
    }
    char *value = strchr(part, '=');
    if (value) *value++ = 0;
    good = value && set_one(set, trim(part), trim(value));
    if (!good)
      mock_error(CUDA_ERROR_INVALID_VALUE, "setting '%.60s=%.60s': no such key, or no such value",
                 part, value ? value : "");
  }
  free(copy);
  return good;
}
