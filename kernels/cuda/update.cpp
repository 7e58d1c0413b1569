// The public update functions: the parameters' type chooses the translation unit.
#include "update_launch.h"

namespace zero::kernels::cuda {

void adam(const AdamSpans& spans, const AdamTables& tables, Stream stream, int blocks) {
  with_any_type(spans.param.dtype, [&](auto p) { launch_adam<decltype(p)>(spans, tables, stream, blocks); });
}

void sgd(const SgdSpans& spans, const SgdTables& tables, Stream stream, int blocks) {
  with_any_type(spans.param.dtype, [&](auto p) { launch_sgd<decltype(p)>(spans, tables, stream, blocks); });
}

}  // namespace zero::kernels::cuda
