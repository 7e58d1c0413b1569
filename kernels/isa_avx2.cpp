// The kernels' loops for AVX2 and F16C (kernels/CMakeLists.txt has the flags). Used through dispatch.cpp.
#define ZERO_ISA_TABLE avx2_table
#define ZERO_ISA_NAME "avx2"
#include "isa_table.inc"
