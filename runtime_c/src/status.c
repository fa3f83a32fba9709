/* status.c: the calling thread's last error text, and the names of the status codes. */
#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[PDS_ERROR_BYTES];

pds_status pds_fail(pds_status code, const char *fmt, ...) {
  va_list args;
  va_start(args, fmt);
  vsnprintf(last_error, sizeof last_error, fmt, args);
  va_end(args);
  return code;
}

const char *pds_last_error(void) {
  return last_error;
}

uint32_t pds_abi_version(void) {
  return PDS_ABI_VERSION;
}

const char *pds_status_name(pds_status status) {
  switch (status) {
  case PDS_OK: return "ok";
  case PDS_ERR_ARGUMENT: return "argument";
  case PDS_ERR_TOKEN: return "token";
  case PDS_ERR_POSITION: return "position";
  case PDS_ERR_SEQUENCE: return "sequence";
  case PDS_ERR_BATCH: return "batch";
  case PDS_ERR_CONTEXT: return "context";
  case PDS_ERR_KV_FULL: return "kv full";
  case PDS_ERR_MEMORY: return "memory";
  case PDS_ERR_THREAD: return "thread";
  case PDS_ERR_PLAN_FILE: return "plan file";
  case PDS_ERR_PLAN_FORMAT: return "plan format";
  case PDS_ERR_VERIFY: return "verify";
  case PDS_ERR_CPU: return "cpu";
  case PDS_ERR_ISA: return "isa";
  case PDS_ERR_DRIVER: return "driver";
  case PDS_ERR_CANCELLED: return "cancelled";
  case PDS_ERR_FORKED: return "forked";
  case PDS_ERR_BUSY: return "busy";
  case PDS_ERR_GPU: return "gpu";
  default: return "unknown status";
  }
}
