/* faults.c: when a configured fault strikes, and what work that failed does. */
#include <stdarg.h>
#include <stdio.h>

#include "mock.h"

bool mock_strikes(int64_t *fault) {
  return *fault > 0 && --*fault == 0;
}

void mock_fault(op *o, CUresult result, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  vsnprintf(o->why, sizeof o->why, fmt, args);
  va_end(args);
  o->fault = result;
}
