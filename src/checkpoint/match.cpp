#include <algorithm>
#include <map>

#include "checkpoint/load.h"
#include "checkpoint/types.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

// Fits a tensor of the model to the checkpoint's of the same kind and name; says what doesn't.
class Matcher {
 public:
  Matcher(const Manifest& manifest, Match& out) : out_(out) {
    for (const auto& t : manifest.tensors)
      if (t.field.empty()) by_name_.emplace(std::pair(t.kind, t.name), &t);
    for (const auto& t : manifest.tensors)
      if ((t.kind == "parameter" || t.kind == "buffer") && t.field.empty()) unused_.push_back(&t);
  }

  const TensorEntry* find(const std::string& kind, const std::string& name, const at::Tensor& tensor, at::IntArrayRef shape) {
    const auto it = by_name_.find({kind, name});
    if (it == by_name_.end()) {
      missing_.push_back({kind, name, shape.vec()});
      return nullptr;
    }
    const auto* entry = it->second;
    unused_.erase(std::remove(unused_.begin(), unused_.end(), entry), unused_.end());
    if (at::IntArrayRef(entry->shape) != shape) {
      say(entry->title(), " has shape ", at::IntArrayRef(entry->shape), " in the checkpoint and ", shape, " in the model");
      return nullptr;
    }
    const auto type = dtype_name(tensor.scalar_type());
    if (entry->dtype != type) {
      say(entry->title(), " has type ", entry->dtype, " in the checkpoint and ", type, " in the model");
      return nullptr;
    }
    return entry;
  }

  /// Of all that was asked for: what is on one side only. A pair of one shape looks like another name for one thing.
  void finish() {
    for (const auto& m : missing_) {
      const auto like = std::find_if(unused_.begin(), unused_.end(),
                                     [&](const TensorEntry* t) { return t->kind == m.kind && t->shape == m.shape; });
      if (like != unused_.end()) {
        say(m.kind, " '", m.name, "' is missing in the checkpoint, which has '", (*like)->name,
            "' of the same shape instead: was it renamed?");
        unused_.erase(like);
      } else {
        say(m.kind, " '", m.name, "' is missing in the checkpoint");
      }
    }
    for (const auto* t : unused_) say("the checkpoint has a ", t->title(), ", which the model hasn't");
  }

  template <typename... Parts>
  void say(const Parts&... parts) {
    out_.differences.push_back(detail::text(parts...));
  }

 private:
  struct Missing {
    std::string kind, name;
    std::vector<std::int64_t> shape;
  };
  Match& out_;
  std::map<std::pair<std::string, std::string>, const TensorEntry*> by_name_;
  std::vector<const TensorEntry*> unused_;
  std::vector<Missing> missing_;
};

}  // namespace

Match match(const Manifest& manifest, const ZeroOptimizer::Impl& impl, const Contents& contents) {
  Match out;
  Matcher matcher(manifest, out);
  if (manifest.optimizer != impl.wrapped_name) {
    matcher.say("the checkpoint is of the optimizer class ", manifest.optimizer, "; this one is ", impl.wrapped_name);
    out.optimizer = false;
  } else if (manifest.groups != static_cast<int>(impl.groups->size())) {
    matcher.say("the checkpoint has ", manifest.groups, " parameter groups; this optimizer has ", impl.groups->size());
    out.optimizer = false;
  }
  for (std::size_t i = 0; i < impl.parameters.size(); ++i) {
    const auto& p = impl.parameters[i];
    out.parameters.push_back(contents.placed(impl, i) ? matcher.find("parameter", contents.names[i], p.tensor, p.sizes())
                                                      : nullptr);
  }
  for (const auto& loose : contents.loose)
    out.loose.push_back(matcher.find(loose.kind, loose.name, loose.tensor, loose.tensor.sizes()));
  matcher.finish();
  return out;
}

}  // namespace zero::checkpoint
