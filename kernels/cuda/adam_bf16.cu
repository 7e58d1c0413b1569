// Adam and AdamW of bf16 parameters.
#include "update_launch.h"

namespace zero::kernels::cuda {

template void launch_adam<BFloat16>(const AdamSpans&, const AdamTables&, Stream, int);

}  // namespace zero::kernels::cuda
