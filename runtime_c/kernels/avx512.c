/* avx512.c: the kernels for AVX-512 F, BW, DQ and VL: bf16 pairs are widened to fp32. Built with
 * those -m flags, so nothing but its table may be called before the CPU was asked. */
#include "vec_avx512.h"

#define PATH avx512
#include "template.h"
