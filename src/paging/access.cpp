#include "paging/access.h"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace zero {
namespace {

using Names = std::unordered_set<std::string>;

// Some are written by their schema, but they change what the tensor says about its memory and not the memory.
bool is_metadata_only(const std::string& name) {
  static const Names names{"aten::detach_",     "aten::requires_grad_", "aten::transpose_", "aten::t_",
                           "aten::squeeze_",    "aten::unsqueeze_",     "aten::swapaxes_",  "aten::swapdims_",
                           "aten::as_strided_", "aten::set_",           "aten::rename_",    "aten::retain_grad",
                           "aten::set_data"};
  return names.count(name) > 0;
}

// Take a tensor for its shape and type, or pass it on to operators that ask for themselves (to(other), expand_as()).
bool only_looks(const std::string& name) {
  static const Names names{"aten::empty_like",
                           "aten::zeros_like",
                           "aten::ones_like",
                           "aten::full_like",
                           "aten::rand_like",
                           "aten::randn_like",
                           "aten::randint_like",
                           "aten::new_empty",
                           "aten::new_zeros",
                           "aten::new_ones",
                           "aten::new_full",
                           "aten::new_empty_strided",
                           "aten::size",
                           "aten::sym_size",
                           "aten::stride",
                           "aten::sym_stride",
                           "aten::dim",
                           "aten::numel",
                           "aten::sym_numel",
                           "aten::storage_offset",
                           "aten::sym_storage_offset",
                           "aten::is_leaf",
                           "aten::output_nr",
                           "aten::_version",
                           "aten::requires_grad",
                           "aten::is_floating_point",
                           "aten::is_complex",
                           "aten::is_contiguous",
                           "aten::is_same_size",
                           "aten::is_set_to",
                           "aten::result_type",
                           "aten::can_cast",
                           "aten::_has_same_storage_numel",
                           "aten::_shape_as_tensor",
                           "prim::device",
                           "prim::dtype",
                           "aten::_debug_has_internal_overlap",
                           "aten::_backward",
                           "aten::record_stream",
                           "aten::data",
                           "aten::is_conj",
                           "aten::is_neg",
                           "aten::is_signed",
                           "aten::is_pinned",
                           "aten::is_inference",
                           "aten::_is_zerotensor",
                           "aten::retains_grad",
                           "aten::to",
                           "aten::type_as",
                           "aten::view_as",
                           "aten::expand_as",
                           "aten::reshape_as",
                           "aten::broadcast_tensors",
                           "aten::atleast_1d",
                           "aten::atleast_2d",
                           "aten::atleast_3d"};
  return names.count(name) > 0;
}

bool is_overwriting(const std::string& name) { return name == "aten::zero_" || name == "aten::fill_"; }

bool runs_in_parts(const std::string& name) {
  static const Names names{"aten::zero_",       "aten::fill_",  "aten::mul_",    "aten::multiply_",  "aten::div_",
                           "aten::divide_",     "aten::add_",   "aten::sub_",    "aten::neg_",       "aten::negative_",
                           "aten::abs_",        "aten::clamp_", "aten::clip_",   "aten::clamp_min_", "aten::clamp_max_",
                           "aten::nan_to_num_", "aten::sign_",  "aten::square_", "aten::sqrt_",      "aten::true_divide_"};
  return names.count(name) > 0;
}

// Made of other operators and nothing else (linear(), lstm(), matmul()): those ask for what they use, when they use it.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && !op.hasKernelForDispatchKey(c10::DispatchKey::AutogradCPU);
}

OperatorAccess read_schema(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const bool composite = is_composite(op);
  OperatorAccess out;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    auto access = Access::reads;
    if (only_looks(name) || (composite && alias == nullptr) || is_metadata_only(name) ||
        (alias != nullptr && !alias->isWrite())) {
      access = Access::looks;
    } else if (alias != nullptr && alias->isWrite()) {
      access = is_overwriting(name) && !argument.is_out() ? Access::overwrites : Access::writes;
    }
    // set_() asks the memory that it leaves whether the new one is the same, which a released one doesn't answer: torch::load(model).
    if (name == "aten::set_" && alias != nullptr && alias->isWrite()) access = Access::reads;
    out.arguments.push_back(access);
  }
  const bool in_place = !schema.arguments().empty() && schema.arguments()[0].alias_info() != nullptr &&
                        schema.arguments()[0].alias_info()->isWrite() && schema.returns().size() == 1;
  out.in_parts = in_place && runs_in_parts(name);
  return out;
}

}  // namespace

const OperatorAccess& access_of(const c10::OperatorHandle& op) {
  static std::shared_mutex mutex;
  static std::unordered_map<std::string, std::unique_ptr<OperatorAccess>> known;  // by name and overload
  const auto& name = op.operator_name();
  thread_local std::unordered_map<const void*, const OperatorAccess*> seen;  // operators live as long as the process
  const auto* key = &op.schema();
  if (const auto it = seen.find(key); it != seen.end()) return *it->second;
  const auto full = name.name + '.' + name.overload_name;
  const OperatorAccess* found = nullptr;
  {
    const std::shared_lock<std::shared_mutex> lock(mutex);
    if (const auto it = known.find(full); it != known.end()) found = it->second.get();
  }
  if (found == nullptr) {
    auto made = std::make_unique<OperatorAccess>(read_schema(op));
    const std::unique_lock<std::shared_mutex> lock(mutex);
    found = known.try_emplace(full, std::move(made)).first->second.get();
  }
  seen.emplace(key, found);
  return *found;
}

}  // namespace zero
