// How a sum over the ranks, divided by a number, is put to NCCL: what is done to the summands before and to the sum after.
//
// The backends on the CPU add in float and divide the sum, rounding once. NCCL adds in the tensor's own type, and its ncclAvg
// multiplies every summand by 1/N in that type first. So here:
//   - a sum is divided afterwards, which rounds once more and no more than that;
//   - ncclAvg is used where the divisor is N and N a power of two: its multiplications are exact then (but for subnormals), so it
//     gives what dividing afterwards gives, without the extra pass;
//   - float16, whose sums of large gradients would pass 65504: the summands are multiplied by a power of two (exactly, again) that
//     makes the sum no larger than the average, and the rest of the division is done afterwards. Where the library can't
//     (no ncclRedOpCreatePreMulSum) such sums may overflow.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"

namespace zero {

struct Averaging {
  bool by_nccl = false;  ///< ncclAvg, and nothing else
  double before = 1;     ///< multiplies each summand: a power of two
  double after = 1;      ///< divides the sum
};

/// @param premultiplies the library has ncclRedOpCreatePreMulSum
inline Averaging averaging(kernels::DType dtype, double divisor, int ranks, bool premultiplies) {
  const bool power_of_two = (ranks & (ranks - 1)) == 0;
  Averaging how;
  if (divisor == ranks && power_of_two && ranks > 1) {
    how.by_nccl = true;
  } else if (dtype == kernels::DType::f16 && premultiplies && std::isfinite(divisor) && std::abs(divisor) > 1) {
    int exponent = 0;
    const double fraction =
        std::frexp(std::abs(divisor), &exponent);  // |divisor| = fraction × 2^exponent, fraction in [0.5, 1)
    if (fraction == 0.5) --exponent;
    // 2^-24 is the smallest float16. Divisors beyond that are nobody's number of ranks.
    exponent = std::min(exponent, 24);
    how.before = std::ldexp(1.0, -exponent);
    how.after = divisor * how.before;
  } else {
    how.after = divisor;
  }
  return how;
}

}  // namespace zero
