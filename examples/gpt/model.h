// A byte-level GPT: pre-norm, learned positions, erf GELU, untied head, no dropout. Weights start from a hash, so that a run can
// be compared with any other implementation number by number (docs/gpt.md gives the definition).
#pragma once

#include <torch/nn/modules/container/modulelist.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace gpt {

constexpr std::int64_t kVocabulary = 256;  // one token per byte

struct Size {
  std::string name;
  std::int64_t layers, width, heads, context;
};

/// tiny (137 thousand parameters), small (3.3 million), medium (19 million), wide (51 million).
const std::vector<Size>& sizes();
/// @throws c10::Error naming the sizes there are
const Size& size_named(const std::string& name);

/// float32, bfloat16 or float16. @throws c10::Error for another name
at::ScalarType type_named(const std::string& name);

/// Attention and MLP, each with its layer norm before and a residual connection around it.
class Block : public torch::nn::Module {
 public:
  Block(std::int64_t width, std::int64_t heads);
  at::Tensor forward(at::Tensor x) const;  ///< (batch, time, width) → the same

 private:
  std::int64_t heads_;
  at::Tensor ln1_w_, ln1_b_, attn_qkv_w_, attn_qkv_b_, attn_proj_w_, attn_proj_b_;
  at::Tensor ln2_w_, ln2_b_, fc_w_, fc_b_, proj_w_, proj_b_;
};

class Model : public torch::nn::Module {
 public:
  /// With its initial weights.
  explicit Model(const Size& size);

  /// tokens: (batch, time ≤ context) int64 → (batch, time, 256), in the type of the weights.
  at::Tensor logits(const at::Tensor& tokens);
  /// Mean cross entropy, natural logarithm, over all positions, in float32; `targets` is shaped as `tokens`.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);

  const Size& size() const { return size_; }
  std::int64_t parameter_count() const;
  /// Parameters in the order of the weight file: wte, wpe, blocks, lnf_w, lnf_b, head_w. (parameters() has the root's first.)
  std::vector<at::Tensor> in_file_order() const;

 private:
  void init_weights();

  Size size_;
  at::Tensor wte_, wpe_, lnf_w_, lnf_b_, head_w_;
  torch::nn::ModuleList blocks_;
};

/// All weights as raw little-endian float32, no header. @throws c10::Error when the file can't be written
void write_weights(const Model& model, const std::string& path);
/// SHA-256 of what write_weights() writes.
std::string weights_sha256(const Model& model);

}  // namespace gpt
