/* attention.cu: attention but its GEMMs, as ops_attention.c has it: rows to queries and cache; attention
 * over the block cache; the merge of the context's parts. The launcher chooses by act and dimensions. */
#include "attention_rows.h"
#include "attend_plain.h"
#include "latent_tiles.h"

#define NAME pds_cu_attend_few_64
#define D 64
#include "attend_few.h"
#define NAME pds_cu_attend_few_128
#define D 128
#include "attend_few.h"
#define NAME pds_cu_attend_few_256
#define D 256
#include "attend_few.h"

#define NAME pds_cu_attend_many_64
#define D 64
#define WARPS 4
#define MT 2
#define HALVES 2
#include "attend_many.h"
#define NAME pds_cu_attend_many_128
#define D 128
#define WARPS 4
#define MT 2
#define HALVES 1
#include "attend_many.h"
#define NAME pds_cu_attend_many_256
#define D 256
#define WARPS 8
#define MT 1
#define HALVES 1
#include "attend_many.h"

#define NAME pds_cu_attend_mla_16
#define MT 1
#define STAGES 5
#include "attend_mla.h"
#define NAME pds_cu_attend_mla_small /* in 163 KiB of shared memory */
#define MT 1
#define STAGES 3
#include "attend_mla.h"
#define NAME pds_cu_attend_mla_64
#define MT 4
#define STAGES 3
#include "attend_mla.h"
