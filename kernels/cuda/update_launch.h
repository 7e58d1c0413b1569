// One translation unit per parameter type and optimizer, so that processors compile them side by side: each defines its functions by
// these templates, and update.cpp chooses between them.
#pragma once

#include "bind.h"
#include "cuda_kernels.h"

#if defined(__CUDACC__)
#include "launch.h"
#endif

namespace zero::kernels::cuda {

template <class P>
void launch_adam(const AdamSpans& spans, const AdamTables& tables, Stream stream, int blocks);
template <class P>
void launch_sgd(const SgdSpans& spans, const SgdTables& tables, Stream stream, int blocks);

#if defined(__CUDACC__)
template <class P>
void launch_adam(const AdamSpans& spans, const AdamTables& tables, Stream stream, int blocks) {
  bind_adam<P>(spans, tables, [&](const auto& body) {
    launch(body, tiles_of(body.table.elements, body.alignment.origin), blocks, stream, "the Adam kernel");
  });
}
template <class P>
void launch_sgd(const SgdSpans& spans, const SgdTables& tables, Stream stream, int blocks) {
  bind_sgd<P>(spans, tables, [&](const auto& body) {
    launch(body, tiles_of(body.table.elements, body.alignment.origin), blocks, stream, "the SGD kernel");
  });
}
#endif

}  // namespace zero::kernels::cuda
