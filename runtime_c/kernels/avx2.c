/* avx2.c: the kernels for AVX2, FMA and F16C. Built with those -m flags, so nothing but
 * its table may be called before the CPU was asked. */
#include "vec_avx2.h"

#define PATH avx2
#include "template.h"
