// SGD of parameters of up to 32 bits.
#include "update_launch.h"

namespace zero::kernels::cuda {

template void launch_sgd<float>(const SgdSpans&, const SgdTables&, Stream, int);
template void launch_sgd<Half>(const SgdSpans&, const SgdTables&, Stream, int);
template void launch_sgd<BFloat16>(const SgdSpans&, const SgdTables&, Stream, int);

}  // namespace zero::kernels::cuda
