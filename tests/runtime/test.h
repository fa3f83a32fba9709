/* test.h: what the cases of the C test program share. A failed check is printed and counted; the
 * case goes on. */
#ifndef PDS_TEST_H
#define PDS_TEST_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

extern int test_failures;
extern const char
    *test_data_dir; /* an empty directory that a case may write to, or one with vectors */

#define CHECK(condition) test_check((condition), __FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b)                                                                             \
  test_check_eq((long long)(a), (long long)(b), __FILE__, __LINE__, #a " == " #b)
/* The call returns `status`, and for an error its text contains `text`. */
#define CHECK_STATUS(call, status, text)                                                           \
  test_check_status((call), (status), (text), __FILE__, __LINE__, #call)
#define CHECK_OK(call) CHECK_STATUS(call, 0, "")

bool test_check(bool good, const char *file, int line, const char *what);
bool test_check_eq(long long a, long long b, const char *file, int line, const char *what);
bool test_check_status(int32_t got, int32_t want, const char *text, const char *file, int line,
                       const char *what);

/* A pseudo-random number; the same sequence in every run. */
uint32_t test_random(uint32_t *state);

#endif
