// Conversion, scaling, accumulation and zeroing of flat memory.
#include "bind.h"
#include "cuda_kernels.h"
#include "launch.h"

namespace zero::kernels::cuda {

void convert(Span out, Span in, std::int64_t n, const ConvertArgs& args, Stream stream, int blocks) {
  bind_convert(out, in, n, args, [&](const auto& body) { launch(body, body.work(), blocks, stream, "the conversion kernel"); });
}

void scale(Span x, std::int64_t n, double factor, Stream stream) {
  ConvertArgs args;
  args.factor = factor;
  convert(x, x, n, args, stream);
}

void zero(Span x, std::int64_t n, Stream stream) {
  if (n > 0)
    check(cudaMemsetAsync(x.data, 0, static_cast<std::size_t>(n) * static_cast<std::size_t>(size_of(x.dtype)),
                          static_cast<cudaStream_t>(stream)),
          "zeroing memory");
}

}  // namespace zero::kernels::cuda
