// Reading text, making it up, and cutting it into batches.
#include "text.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "hash.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

void append_file(const fs::path& path, std::string& text) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file.good(), "--text: can't read ", path.string());
  std::array<char, 1 << 16> piece;
  while (file.read(piece.data(), piece.size()), file.gcount() > 0)
    text.append(piece.data(), static_cast<std::size_t>(file.gcount()));
  TORCH_CHECK(!file.bad(), "--text: can't read ", path.string());
}

void append_folder(const fs::path& path, std::string& text) {
  const std::string inside = fs::canonical(path).string() + "/";
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path)) {
    if (!entry.is_regular_file()) continue;
    // A link to a file of the same folder would have it read twice.
    if (entry.is_symlink() && fs::canonical(entry.path()).string().rfind(inside, 0) == 0) continue;
    files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());  // by bytes: the order a directory lists its entries in differs between machines
  for (const auto& file : files) append_file(file, text);
}

}  // namespace

std::string read_text(const std::vector<std::string>& paths) {
  std::string text;
  for (const auto& path : paths) {
    try {
      TORCH_CHECK(fs::exists(path), "--text: there is no ", path);
      if (fs::is_directory(path)) {
        append_folder(path, text);
      } else {
        append_file(path, text);
      }
    } catch (const fs::filesystem_error& e) {
      TORCH_CHECK(false, "--text: ", e.what());
    }
  }
  std::string names;
  for (const auto& path : paths) names += (names.empty() ? "" : ", ") + path;
  TORCH_CHECK(!text.empty(), "--text: nothing in ", names);
  return text;
}

std::string pseudo_text(std::size_t bytes) {
  std::uint64_t n = 0;
  const auto draw = [&](std::uint64_t below) { return hash64(kPseudoKey, n++) % below; };
  std::vector<std::string> words(200);
  for (auto& word : words) {
    const std::uint64_t syllables = 1 + draw(3);
    for (std::uint64_t i = 0; i < syllables; ++i) {
      word += "bdfghklmnprstvwz"[draw(16)];
      word += "aeiou"[draw(5)];
    }
  }
  std::string text;
  while (text.size() < bytes) {
    const std::uint64_t rank = std::min(draw(words.size()), draw(words.size()));  // the first words are the commonest
    text += words[rank];
    text += draw(12) == 0 ? ".\n" : " ";
  }
  text.resize(bytes);
  return text;
}

Batches::Batches(const std::string& text, std::int64_t context, std::uint64_t seed)
    : text_(text), context_(context), key_(kBatchKey + seed) {
  TORCH_CHECK(static_cast<std::int64_t>(text.size()) > context, "--text: ", text.size(), " bytes are fewer than the ",
              context + 1, " of one window of this model");
}

std::pair<at::Tensor, at::Tensor> Batches::get(const Position& at, std::int64_t rows) const {
  auto inputs = at::empty({rows, context_}, at::kLong);
  auto targets = at::empty({rows, context_}, at::kLong);
  auto* in = inputs.data_ptr<std::int64_t>();
  auto* out = targets.data_ptr<std::int64_t>();
  const auto starts = static_cast<std::uint64_t>(text_.size()) - static_cast<std::uint64_t>(context_);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t sequence = ((at.step * at.micros + at.micro) * at.ranks + at.rank) * rows + row;
    const std::uint64_t start = hash64(key_, static_cast<std::uint64_t>(sequence)) % starts;
    for (std::int64_t i = 0; i < context_; ++i) {
      *in++ = static_cast<unsigned char>(text_[start + static_cast<std::uint64_t>(i)]);
      *out++ = static_cast<unsigned char>(text_[start + static_cast<std::uint64_t>(i) + 1]);
    }
  }
  return {inputs, targets};
}

}  // namespace gpt
