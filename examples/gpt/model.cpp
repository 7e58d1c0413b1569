// The GPT's arithmetic, its initial weights and its weight file.
#include "model.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include <algorithm>
#include <fstream>

#include "hash.h"
#include "sha256.h"

namespace gpt {
namespace {

at::Tensor norm(const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
  return at::layer_norm(x, {x.size(-1)}, w, b, 1e-5);
}

/// Half-width of the uniform distribution that a weight matrix starts from; 0 for a vector. What writes into the residual stream
/// starts smaller.
float spread(const std::string& name) {
  const auto ends_with = [&](const std::string& s) {
    return name.size() >= s.size() && name.compare(name.size() - s.size(), s.size(), s) == 0;
  };
  if (ends_with("_b") || ends_with("ln1_w") || ends_with("ln2_w") || ends_with("lnf_w")) return 0;
  return ends_with("proj_w") ? 0x1p-7F : 0x1p-5F;  // attn_proj_w, proj_w
}

/// Element n of tensor t. The hash's upper 24 bits are an integer that float32 holds exactly and the factor is a power of two:
/// nothing is rounded, so every implementation gets these bits.
void fill(const at::Tensor& tensor, std::uint64_t t, const std::string& name) {
  float* out = tensor.data_ptr<float>();
  const std::int64_t n = tensor.numel();
  if (const float a = spread(name); a > 0) {
    for (std::int64_t i = 0; i < n; ++i) {
      const auto u = static_cast<std::int32_t>(hash64(kWeightKey + t, static_cast<std::uint64_t>(i)) >> 40) - (1 << 23);
      out[i] = static_cast<float>(u) * (a * 0x1p-23F);
    }
  } else {
    std::fill_n(out, n, name.back() == 'w' ? 1.F : 0.F);  // layer norms start as the identity, biases at zero
  }
}

}  // namespace

const std::vector<Size>& sizes() {
  static const std::vector<Size> all = {
      {"tiny", 2, 64, 2, 64}, {"small", 4, 256, 4, 128}, {"medium", 6, 512, 8, 128}, {"wide", 4, 1024, 8, 32}};
  return all;
}

const Size& size_named(const std::string& name) {
  for (const Size& size : sizes())
    if (size.name == name) return size;
  TORCH_CHECK(false, "there is no model '", name, "': choose tiny, small, medium or wide");
}

at::ScalarType type_named(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  TORCH_CHECK(name == "float16", "there is no type '", name, "': choose float32, bfloat16 or float16");
  return at::kHalf;
}

Block::Block(std::int64_t width, std::int64_t heads) : heads_(heads) {
  const std::int64_t d = width;
  ln1_w_ = register_parameter("ln1_w", at::empty({d}));
  ln1_b_ = register_parameter("ln1_b", at::empty({d}));
  attn_qkv_w_ = register_parameter("attn_qkv_w", at::empty({3 * d, d}));
  attn_qkv_b_ = register_parameter("attn_qkv_b", at::empty({3 * d}));
  attn_proj_w_ = register_parameter("attn_proj_w", at::empty({d, d}));
  attn_proj_b_ = register_parameter("attn_proj_b", at::empty({d}));
  ln2_w_ = register_parameter("ln2_w", at::empty({d}));
  ln2_b_ = register_parameter("ln2_b", at::empty({d}));
  fc_w_ = register_parameter("fc_w", at::empty({4 * d, d}));
  fc_b_ = register_parameter("fc_b", at::empty({4 * d}));
  proj_w_ = register_parameter("proj_w", at::empty({d, 4 * d}));
  proj_b_ = register_parameter("proj_b", at::empty({d}));
}

at::Tensor Block::forward(at::Tensor x) const {
  const std::int64_t batch = x.size(0);
  const std::int64_t time = x.size(1);
  const std::int64_t width = x.size(2);

  const auto qkv = at::linear(norm(x, ln1_w_, ln1_b_), attn_qkv_w_, attn_qkv_b_).split(width, 2);
  const auto by_head = [&](const at::Tensor& y) { return y.view({batch, time, heads_, width / heads_}).transpose(1, 2); };
  const auto attention =
      at::scaled_dot_product_attention(by_head(qkv[0]), by_head(qkv[1]), by_head(qkv[2]), {}, 0.0, /*is_causal=*/true);
  x = x + at::linear(attention.transpose(1, 2).reshape({batch, time, width}), attn_proj_w_, attn_proj_b_);

  const auto hidden = at::gelu(at::linear(norm(x, ln2_w_, ln2_b_), fc_w_, fc_b_));
  return x + at::linear(hidden, proj_w_, proj_b_);
}

Model::Model(const Size& size) : size_(size) {
  const std::int64_t d = size_.width;
  wte_ = register_parameter("wte", at::empty({kVocabulary, d}));
  wpe_ = register_parameter("wpe", at::empty({size_.context, d}));
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < size_.layers; ++i) blocks_->push_back(std::make_shared<Block>(d, size_.heads));
  lnf_w_ = register_parameter("lnf_w", at::empty({d}));
  lnf_b_ = register_parameter("lnf_b", at::empty({d}));
  head_w_ = register_parameter("head_w", at::empty({kVocabulary, d}));
  init_weights();
}

at::Tensor Model::logits(const at::Tensor& tokens) {
  auto x = at::embedding(wte_, tokens) + wpe_.slice(0, 0, tokens.size(1));
  for (const auto& block : *blocks_) x = block->as<Block>()->forward(x);
  return at::linear(norm(x, lnf_w_, lnf_b_), head_w_);
}

at::Tensor Model::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  // In float32 whatever the model is in: a loss of 16 bits says little.
  return at::cross_entropy_loss(logits(tokens).view({-1, kVocabulary}).to(at::kFloat), targets.reshape({-1}));
}

std::int64_t Model::parameter_count() const {
  std::int64_t n = 0;
  for (const auto& p : parameters()) n += p.numel();
  return n;
}

std::vector<at::Tensor> Model::in_file_order() const {
  std::vector<at::Tensor> out = {wte_, wpe_};
  for (const auto& p : blocks_->parameters()) out.push_back(p);
  out.insert(out.end(), {lnf_w_, lnf_b_, head_w_});
  return out;
}

void Model::init_weights() {
  std::vector<std::string> names = {"wte", "wpe"};
  for (const auto& p : blocks_->named_parameters()) names.push_back(p.key());
  names.insert(names.end(), {"lnf_w", "lnf_b", "head_w"});
  const auto tensors = in_file_order();
  for (std::size_t t = 0; t < tensors.size(); ++t) fill(tensors[t], t, names[t]);
}

void write_weights(const Model& model, const std::string& path) {
  std::ofstream file(path, std::ios::binary);
  for (const auto& p : model.in_file_order())
    file.write(reinterpret_cast<const char*>(p.data_ptr<float>()), static_cast<std::streamsize>(p.nbytes()));
  file.close();
  TORCH_CHECK(file.good(), "can't write the weights to ", path);
}

std::string weights_sha256(const Model& model) {
  Sha256 sha;
  for (const auto& p : model.in_file_order()) sha.update(p.data_ptr<float>(), p.nbytes());
  return sha.hex();
}

}  // namespace gpt
