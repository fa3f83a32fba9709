/* amx.c: the kernels for AMX tiles (AMX-TILE, AMX-BF16) beside AVX-512 F, BW, DQ, VL and BF16.
 * Built with those -m flags, so nothing but its table may be called before the CPU and the
 * operating system were asked (cpu.c). */
#include "vec_avx512.h"

#define PATH amx
#define BF16_GEMMS "amx_gemm.h"
#include "template.h"
