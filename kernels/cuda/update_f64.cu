// Adam, AdamW and SGD of f64 parameters.
#include "update_launch.h"

namespace zero::kernels::cuda {

template void launch_adam<double>(const AdamSpans&, const AdamTables&, Stream, int);
template void launch_sgd<double>(const SgdSpans&, const SgdTables&, Stream, int);

}  // namespace zero::kernels::cuda
