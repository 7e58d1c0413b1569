// The kernels' loops for every processor of the target architecture. Used through dispatch.cpp.
#define ZERO_ISA_TABLE baseline_table
#define ZERO_ISA_NAME "baseline"
#include "isa_table.inc"
