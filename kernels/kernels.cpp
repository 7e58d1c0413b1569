// The public functions of kernels.h: argument checks, threads, and calls into the instruction set's loops.
#include "kernels.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "table.h"

namespace zero::kernels {
namespace {

/// From this size on an output is written past the caches: half of it wouldn't survive there until it is read.
constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

void require_state(Span param, Span state, const char* what) {
  require(param.dtype == DType::f64 ? state.dtype == DType::f64 : state.dtype == DType::f32 || state.dtype == DType::bf16,
          what);
}

void require_master(Span param, Span master) {
  require(master.data == nullptr || (master.dtype == DType::f32 && size_of(param.dtype) == 2),
          "a master is f32, of a 16-bit parameter");
}

/// Calls body(begin, end) for ranges that cover [0, n), cut at multiples of kBlock, on up to `threads` threads.
template <class Body>
void for_ranges(std::int64_t n, int threads, const Body& body) {
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const int wanted = static_cast<int>(std::min<std::int64_t>(threads, blocks));
  if (wanted <= 1) {
    if (n > 0) body(std::int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(wanted)
  {
    // The runtime may give fewer threads than asked for.
    const std::int64_t count = omp_get_num_threads();
    const std::int64_t index = omp_get_thread_num();
    const std::int64_t begin = blocks * index / count * kBlock;
    const std::int64_t end = std::min(n, blocks * (index + 1) / count * kBlock);
    if (begin < end) body(begin, end);
  }
}

/// Index of the first inf or NaN in [begin, begin + count), -1 if there is none.
std::int64_t find_nonfinite(Span x, std::int64_t begin, std::int64_t count) {
  for (std::int64_t i = begin; i < begin + count; ++i) {
    bool finite = true;
    switch (x.dtype) {
      case DType::f32:
        finite = std::isfinite(static_cast<const float*>(x.data)[i]);
        break;
      case DType::f64:
        finite = std::isfinite(static_cast<const double*>(x.data)[i]);
        break;
      case DType::f16:
        finite = (static_cast<const std::uint16_t*>(x.data)[i] & 0x7c00u) != 0x7c00u;
        break;
      case DType::bf16:
        finite = (static_cast<const std::uint16_t*>(x.data)[i] & 0x7f80u) != 0x7f80u;
        break;
    }
    if (!finite) return i;
  }
  return -1;
}

SumArgs sum_args(void* out, const void* const* in, int ranks, std::int64_t n, DType dtype) {
  require(ranks >= 1, "sum_ranks: ranks < 1");
  SumArgs a;
  a.out = out;
  a.in = in;
  a.ranks = ranks;
  a.n = n;
  a.dtype = dtype;
  return a;
}

void run_sum(SumArgs a) {
  const std::int64_t element = !a.wide ? size_of(a.dtype) : a.dtype == DType::f64 ? 8 : 4;
  a.stream = a.n * element >= kStreamBytes && std::find(a.in, a.in + a.ranks, a.out) == a.in + a.ranks;
  table().sum(a);
}

}  // namespace

void adam(const AdamSpans& spans, std::int64_t n, const AdamArgs& args, int threads) {
  require_state(spans.param, spans.exp_avg, "adam: moments are f32 or bf16, and f64 exactly where the parameters are");
  require(spans.exp_avg_sq.dtype == spans.exp_avg.dtype, "adam: exp_avg and exp_avg_sq differ in type");
  require(spans.max_exp_avg_sq.data == nullptr || spans.max_exp_avg_sq.dtype == spans.exp_avg.dtype,
          "adam: exp_avg and max_exp_avg_sq differ in type");
  require_master(spans.param, spans.master);
  const Table& t = table();
  for_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) { t.adam({spans, begin, end}, args); });
}

void sgd(const SgdSpans& spans, std::int64_t n, const SgdArgs& args, int threads) {
  if (args.momentum != 0) {
    require(spans.momentum_buffer.data != nullptr || n == 0, "sgd: momentum without a momentum buffer");
    require_state(spans.param, spans.momentum_buffer,
                  "sgd: the momentum buffer is f32 or bf16, and f64 exactly where the parameters are");
  }
  require_master(spans.param, spans.master);
  const Table& t = table();
  for_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) { t.sgd({spans, begin, end}, args); });
}

NormResult squared_norm(Span values, std::int64_t n, int threads) {
  // One partial per block, added in order afterwards: the same sum whoever computed which.
  std::vector<double> partials(static_cast<std::size_t>((n + kBlock - 1) / kBlock));
  const Table& t = table();
  for_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; i += kBlock) {
      partials[static_cast<std::size_t>(i / kBlock)] = t.squares_of_block(values, i, std::min(kBlock, end - i));
    }
  });
  NormResult result;
  for (std::size_t b = 0; b < partials.size(); ++b) {
    result.sum_of_squares += partials[b];
    // A finite partial has finite elements only, so the search costs nothing while all is well. (The reverse isn't true in f64.)
    if (result.first_nonfinite < 0 && !std::isfinite(partials[b])) {
      const std::int64_t begin = static_cast<std::int64_t>(b) * kBlock;
      result.first_nonfinite = find_nonfinite(values, begin, std::min(kBlock, n - begin));
    }
  }
  return result;
}

void sum_ranks(void* out, const void* const* in, int ranks, std::int64_t n, DType dtype, double divisor) {
  SumArgs a = sum_args(out, in, ranks, n, dtype);
  a.divisor = divisor;
  run_sum(a);
}

void sum_ranks_wide(void* out, const void* const* in, int ranks, std::int64_t n, DType dtype) {
  SumArgs a = sum_args(out, in, ranks, n, dtype);
  a.wide = true;
  run_sum(a);
}

void scale(Span x, std::int64_t n, double factor, int threads) {
  const Table& t = table();
  for_ranges(n, threads, [&](std::int64_t begin, std::int64_t end) { t.scale(x, begin, end, factor); });
}

void bulk_copy(void* to, const void* from, std::int64_t bytes) {
  if (bytes >= kStreamBytes) {
    table().stream_copy(to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace zero::kernels
