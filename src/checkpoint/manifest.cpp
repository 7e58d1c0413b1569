#include "checkpoint/manifest.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "checkpoint/file.h"
#include "core/check.h"

namespace zero::checkpoint {

int itemsize_of(const std::string& dtype) {
  static const std::map<std::string, int> sizes{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2}, {"U16", 2}, {"F16", 2},  {"BF16", 2},
      {"I32", 4},  {"U32", 4}, {"F32", 4}, {"I64", 8},     {"U64", 8},     {"F64", 8}, {"C64", 8}, {"C128", 16}};
  const auto found = sizes.find(dtype);
  if (found == sizes.end()) ZERO_FAIL("checkpoints have no type '", dtype, "'");
  return found->second;
}

std::int64_t numel_of(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const auto size : shape) n *= size;
  return n;
}

std::int64_t TensorEntry::numel() const { return numel_of(shape); }
int TensorEntry::itemsize() const { return itemsize_of(dtype); }

std::string TensorEntry::title() const {
  if (kind == "parameter" || kind == "buffer") return kind + " '" + name + "'";
  if (kind == "master") return "the master weights of '" + name + "'";
  if (kind == "state") return field + " of '" + name + "'";
  if (kind == "random") return "the " + name + " random state of rank " + field;
  return kind + " '" + name + "'";
}

const TensorEntry* Manifest::find(const std::string& kind, const std::string& name, const std::string& field) const {
  const auto it = std::find_if(tensors.begin(), tensors.end(),
                               [&](const TensorEntry& t) { return t.name == name && t.kind == kind && t.field == field; });
  return it == tensors.end() ? nullptr : &*it;
}

Manifest merge(const std::vector<Manifest>& parts) {
  Manifest out = parts.at(0);
  out.files.clear(), out.tensors.clear(), out.states.clear();
  std::map<TensorEntry::Key, std::size_t> known;
  for (const auto& part : parts) {
    const int first_file = static_cast<int>(out.files.size());
    out.files.insert(out.files.end(), part.files.begin(), part.files.end());
    for (const auto& tensor : part.tensors) {
      const auto [it, is_new] = known.emplace(tensor.key(), out.tensors.size());
      if (is_new) {
        out.tensors.push_back(tensor);
        out.tensors.back().fragments.clear();
      }
      auto& whole = out.tensors[it->second];
      ZERO_CHECK(whole.shape == tensor.shape && whole.strides == tensor.strides && whole.dtype == tensor.dtype, "ranks have ",
                 tensor.title(), " in different shapes or types");
      for (auto fragment : tensor.fragments) {
        fragment.file += first_file;
        whole.fragments.push_back(fragment);
      }
    }
    for (const auto& [name, scalars] : part.states) {
      const auto [it, is_new] = out.states.emplace(name, scalars);
      ZERO_CHECK(is_new || it->second == scalars, "ranks have different optimizer states of '", name,
                 "' (step counts and the like)");
    }
  }
  for (auto& tensor : out.tensors)
    std::sort(tensor.fragments.begin(), tensor.fragments.end(),
              [](const Fragment& a, const Fragment& b) { return a.begin < b.begin; });
  return out;
}

void check_complete(const Manifest& manifest, const std::string& where) {
  std::set<TensorEntry::Key> seen;
  std::map<std::string, const TensorEntry*> parameters;
  for (const auto& tensor : manifest.tensors)
    if (tensor.kind == "parameter") parameters.emplace(tensor.name, &tensor);
  for (const auto& tensor : manifest.tensors) {
    if (tensor.kind == "state" || tensor.kind == "master") {
      const auto parameter = parameters.find(tensor.name);
      if (parameter == parameters.end() || parameter->second->shape != tensor.shape)
        ZERO_FAIL(where, ": ", tensor.title(), " has another shape than its parameter, or that is missing");
    }
    ZERO_CHECK(seen.insert(tensor.key()).second, where, ": ", tensor.title(), " is there twice");
    ZERO_CHECK(tensor.strides.size() == tensor.shape.size(), where, ": ", tensor.title(), " has other strides than dimensions");
    for (const auto size : tensor.shape) ZERO_CHECK(size >= 0, where, ": ", tensor.title(), " has a negative size");
    std::int64_t next = 0;
    for (const auto& f : tensor.fragments) {
      if (f.begin != next) ZERO_FAIL(where, ": elements ", next, " to ", f.begin, " of ", tensor.title(), " are missing");
      ZERO_CHECK(f.count > 0 && f.file >= 0 && f.file < static_cast<int>(manifest.files.size()), where, ": ", tensor.title(),
                 " has an impossible part");
      const auto& file = manifest.files[f.file];
      const auto end = f.offset + f.count * tensor.itemsize();
      if (f.offset < 0 || end > file.bytes)
        ZERO_FAIL(where, ": ", tensor.title(), " would end at byte ", end, " of ", file.name, ", which has ", file.bytes);
      next += f.count;
    }
    if (next != tensor.numel())
      ZERO_FAIL(where, ": ", next, " of the ", tensor.numel(), " elements of ", tensor.title(), " are there");
  }
}

Manifest read_manifest(const std::string& folder) {
  const auto path = folder + "/" + kManifestName;
  if (size_of(path) < 0)
    ZERO_FAIL(folder, " is no checkpoint: it has no ", kManifestName, is_folder(folder) ? "" : " (there is no such folder)");
  auto manifest = from_json(read_whole(path), path);
  check_complete(manifest, path);
  for (const auto& file : manifest.files) {
    const auto there = size_of(folder + "/" + file.name);
    if (there < 0) ZERO_FAIL(folder, ": the file ", file.name, " is missing, a part of the checkpoint");
    if (there != file.bytes)
      ZERO_FAIL(folder, "/", file.name, " is damaged: it has ", there, " bytes, and was written with ", file.bytes);
  }
  return manifest;
}

}  // namespace zero::checkpoint
