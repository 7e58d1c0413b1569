// Sampling from the model.
#include "generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>

#include <algorithm>

#include "hash.h"
#include "model.h"

namespace gpt {

std::string generate(Model& model, const std::string& prompt, std::int64_t bytes, double temperature) {
  const at::NoGradGuard no_grad;
  const auto device = model.parameters().front().device();
  std::string text = prompt.empty() ? "\n" : prompt;
  for (std::int64_t n = 0; n < bytes; ++n) {
    const auto time = std::min(static_cast<std::int64_t>(text.size()), model.size().context);
    auto tokens = at::empty({1, time}, at::kLong);
    std::transform(text.end() - time, text.end(), tokens.data_ptr<std::int64_t>(),
                   [](char c) { return static_cast<unsigned char>(c); });
    const auto chances = at::softmax(model.logits(tokens.to(device))[0][time - 1].to(at::kCPU, at::kDouble) / temperature, 0);

    // The first byte at which the running sum of chances passes a uniform number in [0, 1).
    const double* chance = chances.data_ptr<double>();
    double left = static_cast<double>(hash64(kGenerateKey, static_cast<std::uint64_t>(n)) >> 11) * 0x1p-53;
    int byte = 0;
    while (byte < kVocabulary - 1 && left >= chance[byte]) left -= chance[byte++];
    text += static_cast<char>(byte);
  }
  for (char& c : text)
    if ((c < ' ' || c > '~') && c != '\n' && c != '\t') c = '?';
  return text;
}

}  // namespace gpt
