// The kernels' loops for AVX-512 F, BW, DQ and VL (kernels/CMakeLists.txt has the flags). Used through dispatch.cpp.
#define ZERO_ISA_TABLE avx512_table
#define ZERO_ISA_NAME "avx512"
#include "isa_table.inc"
