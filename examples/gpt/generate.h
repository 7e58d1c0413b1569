// Text from a trained model, byte by byte.
#pragma once

#include <cstdint>
#include <string>

namespace gpt {

class Model;

/// `prompt` and `bytes` more, drawn at `temperature` by a generator of its own: the same weights give the same text.
/// Only this process takes part. What isn't printable ASCII or a line break is shown as '?'.
std::string generate(Model& model, const std::string& prompt, std::int64_t bytes, double temperature = 0.8);

}  // namespace gpt
