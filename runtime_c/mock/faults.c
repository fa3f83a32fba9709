/* faults.c: when a configured fault strikes. */
#include "mock.h"

bool mock_strikes(int64_t *fault) {
  return *fault > 0 && --*fault == 0;
}
