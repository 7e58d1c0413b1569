// The whole model as one file of safetensors: all ranks write their ranges of it.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/contents.h"
#include "checkpoint/file.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_file.h"
#include "checkpoint/together.h"
#include "checkpoint/types.h"
#include "core/check.h"
#include "optimizer/impl.h"
#include "zero/checkpoint.h"

namespace zero {

using namespace checkpoint;

namespace {

class Export {
 public:
  Export(ZeroOptimizer::Impl& impl, Contents contents, at::ScalarType dtype)
      : impl_(impl), contents_(std::move(contents)), dtype_(dtype) {
    for (std::size_t i = 0; i < impl_.parameters.size(); ++i)
      if (contents_.placed(impl_, i)) add(contents_.names[i], impl_.parameters[i].tensor, true);
    for (const auto& loose : contents_.loose) add(loose.name, loose.tensor, loose.kind == "parameter");
    file_.metadata = contents_.also_called;  // as Python's safetensors.torch.save_model says it
    file_.metadata["format"] = "pt";
    header_ = lay_out(file_);
  }

  const std::string& header() const { return header_; }
  std::int64_t bytes() const { return file_.bytes; }

  /// This rank's parts of what lies in rows; between the ends of a Quiet.
  void write_pieces(const File& to) const {
    auto held = held_pieces(impl_, contents_);
    for (auto it = held.pieces.begin(); it != held.pieces.end(); ++it) {
      if (it->tensor.kind != "parameter" || !in_rows(it->tensor)) continue;
      // What this rank writes of what it has: at stage 0 its share.
      auto first = std::int64_t{0}, last = it->count;
      if (impl_.replicated()) std::tie(first, last) = share(it->count, impl_.comm.rank(), impl_.comm.size());
      if (first == last) continue;
      const auto* stored = file_.find(it->tensor.name);
      auto values = it->values();
      const auto next = std::next(it);  // the master, if there is one
      if (next != held.pieces.end() && next->tensor.kind == "master" && type_of(values, true) != values.scalar_type()) {
        const auto master = next->values().clone();
        MasterWeights::take_edits(master, values);
        values = master;
      }
      write(to, *stored, it->begin + first, values.narrow(0, first, last - first), true);
    }
  }

  /// What is written whole, by one rank each. Touches parameters on all ranks in one order.
  void write_whole(const File& to) const {
    int turn = 0;
    for (std::size_t i = 0; i < impl_.parameters.size(); ++i) {
      const auto& p = impl_.parameters[i];
      if (!contents_.placed(impl_, i) || p.tensor.numel() == 0) continue;
      if (in_rows(entry_of("parameter", "", "", p.tensor))) continue;
      const auto values = p.tensor.detach().contiguous();
      if (turn++ % impl_.comm.size() == impl_.comm.rank())
        write(to, *file_.find(contents_.names[i]), 0, storage_order(values), true);
    }
    for (const auto& loose : contents_.loose) {
      const bool buffer = loose.kind == "buffer";  // rank 0's count
      const bool mine = buffer ? impl_.comm.rank() == 0 : turn++ % impl_.comm.size() == impl_.comm.rank();
      if (!mine || loose.tensor.numel() == 0) continue;
      const auto values = loose.tensor.detach().clone(at::MemoryFormat::Contiguous);
      write(to, *file_.find(loose.name), 0, storage_order(values), !buffer);
    }
  }

 private:
  static bool in_rows(const TensorEntry& t) {
    std::int64_t next = 1;
    for (auto d = t.shape.size(); d-- > 0; next *= t.shape[d])
      if (t.shape[d] != 1 && t.strides[d] != next) return false;
    return true;
  }

  at::ScalarType type_of(const at::Tensor& tensor, bool parameter) const {
    return parameter && tensor.is_floating_point() ? dtype_ : tensor.scalar_type();
  }

  void add(const std::string& name, const at::Tensor& tensor, bool parameter) {
    const auto type = stored_type(dtype_name(type_of(tensor, parameter)));
    StoredTensor stored{name, type.dtype, tensor.sizes().vec()};
    if (type.numbers > 1) stored.shape.push_back(type.numbers);
    file_.tensors.push_back(std::move(stored));
  }

  void write(const File& to, const StoredTensor& stored, std::int64_t begin, const at::Tensor& values, bool parameter) const {
    const auto out = values.to(type_of(values, parameter)).cpu().contiguous();
    to.write(out.const_data_ptr(), static_cast<std::int64_t>(out.nbytes()),
             stored.begin + begin * static_cast<std::int64_t>(out.element_size()));
  }

  ZeroOptimizer::Impl& impl_;
  Contents contents_;
  at::ScalarType dtype_;
  StoredFile file_;
  std::string header_;
};

std::string folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace

void export_model(const std::string& path, const ModelTensors& model, ZeroOptimizer& optimizer, at::ScalarType dtype) {
  auto& impl = optimizer.impl();
  const at::NoGradGuard no_grad;
  const Counted counted(impl.comm, impl.pending);
  const bool known = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  impl.meet_between_steps(
      Call::kExport,
      known ? "" : detail::text("zero::export_model(): the type is ", dtype, "; it can be Float, Half or BFloat16"));
  const auto& comm = impl.comm;
  const auto temporary = path + ".tmp";
  std::optional<Export> content;
  auto problem = attempt([&] {
    content.emplace(impl, list_contents(impl, model), dtype);
    if (comm.rank() != 0) return;
    if (size_of(temporary) >= 0) remove_all(temporary);  // of one that was killed
    const auto file = File::create(temporary);
    file.reserve(content->bytes());
    file.write(content->header().data(), static_cast<std::int64_t>(content->header().size()), 0);
  });
  std::optional<File> file;
  const auto end_if = [&](const Outcome& outcome) {
    if (outcome.problem.empty()) return;
    if (comm.rank() == 0) (void)attempt([&] { remove_all(temporary); });
    ZERO_FAIL(outcome.problem);
  };
  end_if(exchange(comm, problem, "", "zero::export_model(): the new file"));
  problem = attempt([&] { file.emplace(File::open_to_write(temporary)); });
  {
    Quiet quiet(impl, "zero::export_model()");
    if (problem.empty()) problem = attempt([&] { content->write_pieces(*file); });
    quiet.end_reading();
  }
  end_if(exchange(comm, problem, "", "zero::export_model(): parts"));
  problem = attempt([&] {
    content->write_whole(*file);
    file->sync();
  });
  end_if(exchange(comm, problem, "", "zero::export_model(): the ranks' ranges"));
  problem = attempt([&] {
    if (comm.rank() != 0) return;
    rename(temporary, path);
    sync_folder(folder_of(path));
  });
  end_if(exchange(comm, problem, "", "zero::export_model(): the end"));
}

}  // namespace zero
