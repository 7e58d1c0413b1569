// Adam and AdamW of f16 parameters.
#include "update_launch.h"

namespace zero::kernels::cuda {

template void launch_adam<Half>(const AdamSpans&, const AdamTables&, Stream, int);

}  // namespace zero::kernels::cuda
