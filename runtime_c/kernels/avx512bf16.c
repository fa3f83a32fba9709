/* avx512bf16.c: the kernels for AVX-512 F, BW, DQ, VL, VNNI and BF16: bf16 pairs go through
 * vdpbf16ps, int8 through vpdpbusd.
 * Built with those -m flags, so nothing but its table may be called before the CPU was asked. */
#include "vec_avx512.h"

#define PATH avx512bf16
#include "template.h"
