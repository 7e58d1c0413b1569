// Adam and AdamW of f32 parameters.
#include "update_launch.h"

namespace zero::kernels::cuda {

template void launch_adam<float>(const AdamSpans&, const AdamTables&, Stream, int);

}  // namespace zero::kernels::cuda
