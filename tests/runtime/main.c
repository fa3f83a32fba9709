/* main.c: the runtime's own test program. `main DIRECTORY [case...]` runs the named cases, or all
 * of them; DIRECTORY is an empty one for files that cases write. It links the runtime's sources
 * with fake operators (fake_ops.c) and a hand-made plan (fake_plan.c), and is meant to be run
 * natively, under sanitizers and on emulated CPUs. */
#include <stdlib.h>

#include "cases.h"
#include "pdscope.h"
#include "test.h"

int test_failures;
const char *test_data_dir;

bool test_check(bool good, const char *file, int line, const char *what) {
  if (good) return true;
  printf("%s:%d: failed: %s\n", file, line, what);
  test_failures++;
  return false;
}

bool test_check_eq(long long a, long long b, const char *file, int line, const char *what) {
  if (a == b) return true;
  printf("%s:%d: failed: %s: %lld, %lld\n", file, line, what, a, b);
  test_failures++;
  return false;
}

bool test_check_status(int32_t got, int32_t want, const char *text, const char *file, int line,
                       const char *what) {
  if (got == want && (got == PDS_OK || strstr(pds_last_error(), text))) return true;
  printf("%s:%d: failed: %s: %s (%s), expected %s (...%s...)\n", file, line, what,
         pds_status_name(got), got == PDS_OK ? "" : pds_last_error(), pds_status_name(want), text);
  test_failures++;
  return false;
}

uint32_t test_random(uint32_t *state) {
  *state ^= *state << 13; /* Marsaglia, "Xorshift RNGs", 2003 */
  *state ^= *state >> 17;
  *state ^= *state << 5;
  return *state;
}

#define DECLARE(name) void case_##name(void);
TEST_CASES(DECLARE)

static const struct {
  const char *name;
  void (*run)(void);
} cases[] = {
#define ENTRY(name) {#name, case_##name},
    TEST_CASES(ENTRY)};
enum { CASES = sizeof cases / sizeof *cases };

static bool selected(const char *name, int argc, char **argv) {
  if (argc <= 2) return true;
  for (int i = 2; i < argc; i++)
    if (strcmp(argv[i], name) == 0) return true;
  return false;
}

int main(int argc, char **argv) {
  if (argc < 2) {
    fprintf(stderr, "usage: %s DIRECTORY [case...]\n", argv[0]);
    return 2;
  }
  test_data_dir = argv[1];
  int ran = 0;
  for (int i = 0; i < CASES; i++) {
    if (!selected(cases[i].name, argc, argv)) continue;
    int before = test_failures;
    cases[i].run();
    printf("%s: %s\n", cases[i].name, test_failures == before ? "ok" : "FAILED");
    fflush(stdout);
    ran++;
  }
  if (ran == 0) printf("no such case\n");
  return ran == 0 || test_failures > 0;
}
