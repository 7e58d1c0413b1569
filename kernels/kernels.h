// The arithmetic on flat memory that everything else stands on: the fused optimizer update, the sum over ranks, the squared
// norm, and a bulk copy. Called by src/update (the step on a shard), src/reduce (norms) and src/comm (collectives).
//
// No LibTorch here: plain pointers, so the files compile in seconds, with several instruction sets, and (update_rule.h) for
// CUDA devices. Every function is deterministic: each element's result depends only on its own inputs and on the arguments,
// never on its position, the instruction set or the number of threads (no FMA contraction, fixed summation trees).
#pragma once

#include <cstdint>

namespace zero::kernels {

/// Element types a flat buffer can have. f16 is IEEE binary16, bf16 is bfloat16.
enum class DType : std::uint8_t { f32, f64, f16, bf16 };

/// Bytes per element.
constexpr int size_of(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

/// A typed pointer into flat memory. No alignment beyond the element's own is assumed.
struct Span {
  void* data = nullptr;
  DType dtype = DType::f32;
};

/// What Adam and AdamW need for one call; as torch::optim::Adam / AdamW name them.
struct AdamArgs {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool decoupled = false;  ///< true: AdamW (decay multiplies the parameter); false: Adam (decay is added to the gradient)
  std::int64_t step = 1;   ///< the 1-based number of this step, for the bias corrections
  double grad_scale = 1;   ///< multiplies every gradient first (clip factor, unscaling)
};

/// What SGD needs for one call; as torch::optim::SGD names them.
struct SgdArgs {
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false;
  bool first = false;  ///< the momentum buffer is being initialised: it becomes the gradient itself
  double grad_scale = 1;
};

/// The memory that one pass of Adam or AdamW works on: n elements each.
struct AdamSpans {
  Span param;  ///< f32 | f64 | f16 | bf16, read and written
  Span grad;   ///< any type, read only
  /// Moments: f32 or bf16, both alike; f64 exactly when param is f64.
  Span exp_avg, exp_avg_sq;
  Span max_exp_avg_sq{};  ///< amsgrad's running maximum, of the moments' type; data == nullptr: no amsgrad
  /// The f32 value that a 16-bit parameter is the rounding of, read and written; data == nullptr: none, the step starts from the
  /// parameter. Where the parameter isn't the rounding of its master, somebody has edited it: the step starts from the edited value
  /// (so a master may begin as zeros).
  Span master{};
};

/// One fused pass of Adam/AdamW, in place. The result equals torch::optim's formulas evaluated in float (f64: double), rounded
/// once to the types that are written.
/// @param threads    how many threads may work on it (1: the caller alone)
///
/// Moves 28 bytes per element for f32 everything (read p, g, m, v; write p, m, v), 30 for 16-bit parameters and gradients with f32
/// masters and moments.
void adam(const AdamSpans& spans, std::int64_t n, const AdamArgs& args, int threads);

/// The same for SGD.
struct SgdSpans {
  Span param, grad;
  Span momentum_buffer{};  ///< may be null when args.momentum == 0; f32 or bf16, f64 exactly when param is f64
  Span master{};           ///< as in AdamSpans
};

/// One fused pass of SGD over n elements, in place.
void sgd(const SgdSpans& spans, std::int64_t n, const SgdArgs& args, int threads);

/// What one pass over gradients finds out.
struct NormResult {
  double sum_of_squares = 0;          ///< accumulated in double
  std::int64_t first_nonfinite = -1;  ///< index of the first inf or NaN, -1 if there is none
};

/// Sum of squares of n elements in double, in a fixed order, with the index of the first non-finite element.
NormResult squared_norm(Span values, std::int64_t n, int threads);

/// out[i] = round((in[0][i] + in[1][i] + … + in[ranks-1][i]) / divisor), added in that order in float (f64: in double).
/// out may be the same memory as any in[k]. Large outputs are written past the caches.
void sum_ranks(void* out, const void* const* in, int ranks, std::int64_t n, DType dtype, double divisor);

/// The same without the final rounding: out is float (f64: double). Used for partial sums that travel between nodes.
void sum_ranks_wide(void* out, const void* const* in, int ranks, std::int64_t n, DType dtype);

/// x[i] *= factor, in float (f64: in double).
void scale(Span x, std::int64_t n, double factor, int threads);

/// memcpy for large blocks: writes past the caches where that is faster. The blocks don't overlap.
void bulk_copy(void* to, const void* from, std::int64_t bytes);

/// The instruction set in use: "avx512", "avx2" or "baseline". Chosen once from the processor; the environment variable ZERO_ISA
/// (same words) asks for a lower one.
const char* instruction_set();

}  // namespace zero::kernels
