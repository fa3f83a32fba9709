/* serial_pool.h: see serial_pool.c. */
#ifndef SERIAL_POOL_H
#define SERIAL_POOL_H

#include "pool.h"

struct pds_pool {
  uint32_t threads;
  uint32_t backwards;
};

#endif
