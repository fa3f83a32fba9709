/* status.h: error codes with a text. Every other file of the runtime may include it; it includes
 * none of them. */
#ifndef PDS_STATUS_H
#define PDS_STATUS_H

#include "pdscope.h"

/* Sets the calling thread's error text (cut at PDS_ERROR_BYTES - 1) and returns `code`. */
#define PDS_ERROR_BYTES 512
pds_status pds_fail(pds_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define PDS_RETURN_IF_ERROR(expr)                                                                  \
  do {                                                                                             \
    pds_status pds_status_ = (expr);                                                               \
    if (pds_status_ != PDS_OK) return pds_status_;                                                 \
  } while (0)

#endif
