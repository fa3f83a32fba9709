/* map.h: the only place that takes memory from the operating system (see memory.h) or opens
 * files. */
#ifndef PDS_MAP_H
#define PDS_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* Zeroed anonymous memory; `bytes` is a multiple of PDS_GRAIN. Begins at a multiple of PDS_HUGE if
 * it is larger than that. `what` names it in the error text. */
pds_status pds_map_anon(uint64_t bytes, const char *what, void **out);

/* Whether anonymous memory may be written; a refusal only costs a safeguard. */
void pds_let_write(void *base, uint64_t bytes, bool may);

/* Asks for transparent huge pages; a refusal only costs speed. */
void pds_advise_huge(void *base, uint64_t bytes);

/* Opens the regular file `path`, relative to the directory `dir_fd`. Its size must be `bytes`. */
pds_status pds_open_file(int dir_fd, const char *path, uint64_t bytes, int *out_fd);

/* Size of the regular file `path`, relative to the directory `dir_fd`. */
pds_status pds_file_bytes(int dir_fd, const char *path, uint64_t *out_bytes);

/* Maps all of the regular file `path`, relative to the directory `dir_fd`, read-only. Its size must
 * be `bytes`. */
pds_status pds_map_file(int dir_fd, const char *path, uint64_t bytes, const void **out);

/* Reads all of the regular file `path`, which must hold exactly `bytes`, into `buffer`. */
pds_status pds_read_file(int dir_fd, const char *path, void *buffer, uint64_t bytes);

/* NULL is allowed. */
void pds_unmap(const void *base, uint64_t bytes);

#endif
