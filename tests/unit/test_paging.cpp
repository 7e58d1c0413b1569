// Storages that come and go, what operators do with their arguments, and the fault: with an owner that only keeps account.
#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <thread>

#include "paging/access.h"
#include "paging/fault.h"
#include "paging/page_table.h"
#include "paging/storage.h"
#include "support/catch.h"

using zero::Access;

namespace {

// Pages filled with page + 1; resident while an operator uses them.
class FakeOwner : public zero::PageOwner, public std::enable_shared_from_this<FakeOwner> {
 public:
  at::Tensor page(at::IntArrayRef sizes) {
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t next = 1;
    for (auto d = sizes.size(); d-- > 0; next *= sizes[d]) strides[d] = next;
    const int number = static_cast<int>(tensors_.size());
    auto t = zero::make_paged_tensor(sizes, strides, at::kFloat, "page " + std::to_string(number) + " is elsewhere");
    memory_.push_back(at::full(sizes, number + 1.0F));
    tensors_.push_back(t);
    zero::PageTable::global().add(t.storage().getWeakStorageImpl().lock(), weak_from_this(), number);
    return t;
  }
  ~FakeOwner() override {
    for (const auto& t : tensors_) zero::PageTable::global().remove(t.storage().unsafeGetStorageImpl());
  }
  // Operators that consist of others come here several times; what counts is the outermost.
  void begin(const std::vector<zero::Touch>& touches, const std::string&) override {
    const bool outermost = depth == 0;
    if (outermost) log += "(";
    for (const auto& touch : touches) {
      if (outermost) log += std::to_string(touch.page) + "lrwo"[static_cast<int>(touch.access)];
      if (fails) throw std::runtime_error("the owner's own");
      zero::place_storage(*storage(touch.page), memory_[touch.page].data_ptr(),
                          std::make_shared<at::Tensor>(memory_[touch.page]));
    }
    ++depth;
  }
  void end(const std::vector<zero::Touch>& touches) noexcept override {
    if (--depth > 0) return;
    log += ")";
    for (const auto& touch : touches) zero::release_storage(*storage(touch.page), "page is elsewhere");
  }
  bool edit_in_parts(const zero::Touch& touch, const std::function<void(const at::Tensor&)>& run) override {
    if (depth > 0) return false;
    log += "p" + std::to_string(touch.page) + "lrwo"[static_cast<int>(touch.access)];
    if (!in_parts) return false;
    auto flat = memory_[touch.page].view({-1});
    run(flat.narrow(0, 0, 1)), run(flat.narrow(0, 1, flat.numel() - 1));
    return true;
  }
  c10::StorageImpl* storage(int page) { return tensors_[page].storage().unsafeGetStorageImpl(); }
  std::string taken() { return std::exchange(log, {}); }

  std::string log;
  bool in_parts = true, fails = false;
  int depth = 0;
  std::vector<at::Tensor> memory_, tensors_;
};

Access first_access(const char* name, const char* overload = "") {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  return zero::access_of(op).arguments.at(0);
}

}  // namespace

TEST_CASE("a released storage refuses raw pointers with our words, for every alias") {
  auto t = zero::make_paged_tensor({2, 3}, {3, 1}, at::kFloat, "ask for it first");
  const auto view = t.view({6});
  const auto alias = t.detach();
  REQUIRE(zero::is_released(*t.storage().unsafeGetStorageImpl()));
  REQUIRE_THROWS_WITH(t.data_ptr<float>(), Catch::Contains("ask for it first"));
  REQUIRE_THROWS_WITH(view.const_data_ptr(), Catch::Contains("ask for it first"));
  float memory[6] = {1, 2, 3, 4, 5, 6};
  for (int cycle = 0; cycle < 3; ++cycle) {
    const auto keep = std::make_shared<int>(7);
    zero::place_storage(*t.storage().unsafeGetStorageImpl(), memory, keep);
    REQUIRE(keep.use_count() == 2);
    REQUIRE((t.data_ptr<float>() == memory && view.data_ptr<float>() == memory && alias.data_ptr<float>() == memory));
    zero::release_storage(*t.storage().unsafeGetStorageImpl(), "gone");
    REQUIRE(keep.use_count() == 1);
    REQUIRE_THROWS_WITH(alias.data_ptr<float>(), Catch::Contains("gone"));
  }
  zero::place_storage(*t.storage().unsafeGetStorageImpl(), memory, nullptr);
  zero::detach_storage(*t.storage().unsafeGetStorageImpl());
  memory[0] = 99;
  REQUIRE((t.data_ptr<float>() != memory && t.data_ptr<float>()[0] == 1 && view.data_ptr<float>()[5] == 6));
}

TEST_CASE("paged tensors of any shape") {
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{}, {0, 4}, {5}, {2, 3, 4}}) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<std::int64_t>(1, shape[d]);
    const auto t = zero::make_paged_tensor(shape, strides, at::kDouble, "x");
    REQUIRE(t.sizes() == at::IntArrayRef(shape));
    REQUIRE(t.nbytes() == t.storage().nbytes());
    REQUIRE((!t.requires_grad() && t.is_leaf() && !t.is_view()));
  }
}

TEST_CASE("what operators do with memory, from their schemas") {
  REQUIRE(first_access("aten::add", "Tensor") == Access::reads);
  REQUIRE(first_access("aten::linalg_vector_norm") == Access::reads);
  REQUIRE(first_access("aten::_foreach_norm", "Scalar") == Access::reads);
  REQUIRE(first_access("aten::view") == Access::looks);
  REQUIRE(first_access("aten::detach_") == Access::looks);
  REQUIRE(first_access("aten::as_strided") == Access::looks);
  REQUIRE(first_access("aten::empty_like") == Access::looks);
  REQUIRE(first_access("aten::resize_") == Access::writes);
  REQUIRE(first_access("aten::_foreach_zero_") == Access::writes);  // some of its pages would do: not worth a case of its own
  const auto all_look = [](const char* name, const char* overload) {
    const auto all = zero::access_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)).arguments;
    return all[0] == Access::looks && all[1] == Access::looks;
  };
  REQUIRE((all_look("aten::to", "other") && all_look("aten::view_as", "")));
  const auto set = zero::access_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::set_", "source_Tensor")).arguments;
  REQUIRE((set[0] == Access::reads && set[1] == Access::looks));  // LibTorch compares the two memories
  REQUIRE(first_access("aten::add_", "Tensor") == Access::writes);
  REQUIRE(first_access("aten::copy_") == Access::writes);
  REQUIRE(first_access("aten::zero_") == Access::overwrites);
  REQUIRE(first_access("aten::fill_", "Scalar") == Access::overwrites);
  const auto in_parts = [](const char* name, const char* overload) {
    return zero::access_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)).in_parts;
  };
  REQUIRE((in_parts("aten::mul_", "Tensor") && in_parts("aten::clamp_", "") && in_parts("aten::zero_", "")));
  REQUIRE((!in_parts("aten::mul", "Tensor") && !in_parts("aten::cumsum_", "") && !in_parts("aten::copy_", "")));
}

TEST_CASE("the table forgets owners that are gone, and serves many threads") {
  auto& table = zero::PageTable::global();
  const auto before = table.size();
  auto owner = std::make_shared<FakeOwner>();
  const auto t = owner->page({4});
  const auto* key = t.storage().unsafeGetStorageImpl();
  REQUIRE((table.find(key).has_value() && table.find(key)->page == 0 && table.size() == before + 1));
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int n = 0; n < 4; ++n)
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const auto mine = std::make_shared<FakeOwner>();
        const auto other = mine->page({3});
        if (!table.find(other.storage().unsafeGetStorageImpl()) || !table.find(key)) ++wrong;
      }
    });
  for (auto& thread : threads) thread.join();
  REQUIRE(wrong == 0);
  owner.reset();
  REQUIRE((!table.find(key).has_value() && table.size() == before));
  REQUIRE_THROWS_WITH(t.sum(), Catch::Contains("elsewhere"));
}

TEST_CASE("an operator that reads has its pages there; one that looks doesn't ask") {
  const auto owner = std::make_shared<FakeOwner>();
  const auto a = owner->page({2, 3}), b = owner->page({2, 3});
  REQUIRE(a.sum().item<float>() == 6);
  REQUIRE(owner->taken() == "(0r)");
  REQUIRE(at::stack({a, b}).sum().item<float>() == 18);
  REQUIRE(owner->taken() == "(0r1r)");
  REQUIRE(at::_foreach_norm({a, b})[1].item<float>() > 4.8);
  REQUIRE(owner->taken() == "(0r1r)");
  REQUIRE(at::cat({a, at::ones({1, 3}), b}).sum().item<float>() == 21);
  REQUIRE(owner->taken() == "(0r1r)");
  REQUIRE(b.view({6})[2].item<float>() == 2);
  REQUIRE(owner->taken() == "(1r)");
  REQUIRE(at::equal(a.clone() * 2, b.clone()));
  owner->taken();
  (void)a.view({6}), (void)a.t(), (void)a.detach(), (void)a[1], (void)at::zeros_like(a), (void)a.data();
  REQUIRE(owner->taken().empty());
  REQUIRE(a.view({6})[5].item<float>() == 1);
  REQUIRE(owner->taken() == "(0r)");
  auto out = at::empty({2, 3});
  at::add_out(out, a, b);
  REQUIRE((owner->taken() == "(0r1r)" && out.sum().item<float>() == 18));
  REQUIRE(!a.clone().key_set().has(zero::kPagedKey));
  REQUIRE(a.reshape({3, 2}).key_set().has(zero::kPagedKey));
  REQUIRE(at::equal(a.t().reshape({6}), at::ones({6})));  // a copy, made by an operator within
}

TEST_CASE("in-place operators are told as writes, or run on the parts that are here") {
  const auto owner = std::make_shared<FakeOwner>();
  auto a = owner->page({2, 3}), b = owner->page({2, 3});
  a.add_(b);
  REQUIRE(owner->taken() == "(0w1r)");
  const auto version = a._version();
  a.mul_(2).data().mul_(at::full({}, 0.5, at::kDouble));
  REQUIRE(owner->taken() == "p0wp0w");
  REQUIRE(a._version() == version + 1);  // the one through .data() has a counter of its own, as in LibTorch
  REQUIRE(a.sum().item<float>() == 18);
  owner->taken();
  a.zero_();
  a.fill_(4);
  REQUIRE((owner->taken() == "p0op0o" && owner->memory_[0].sum().item<float>() == 24));
  a[0].mul_(3);  // a part of the page
  REQUIRE((owner->taken() == "(0w)" && owner->memory_[0].sum().item<float>() == 48));
  a[0].zero_();  // the rest is still wanted
  REQUIRE((owner->taken() == "(0w)" && owner->memory_[0].sum().item<float>() == 12));
  a.view({6}).zero_(), a.t().fill_(4);  // views of the whole
  REQUIRE((owner->taken() == "p0op0o" && owner->memory_[0].sum().item<float>() == 24));
  a.fill_(b.view({6})[0]);  // a value that is elsewhere
  REQUIRE((owner->taken() == "(0o1r)" && owner->memory_[0].sum().item<float>() == 12));
  a.mul_(at::ones({3}));
  a.copy_(at::ones({2, 3}));
  REQUIRE(owner->taken() == "(0w)(0w)");
  a.detach().mul_(at::ones({}).requires_grad_(true));  // a graph
  REQUIRE(owner->taken() == "(0w)");
  auto scalar = owner->page({});
  scalar.mul_(at::full({}, 2.0, at::kDouble));  // computed in double, which its one element in a row would not be
  scalar.mul_(at::full({}, 2.0));
  REQUIRE((owner->taken() == "(2w)p2w" && owner->memory_[2].item<float>() == 12));
  REQUIRE_THROWS(a.mul_(c10::complex<double>(0, 1)));  // LibTorch's own
  REQUIRE(owner->taken() == "p0w");
  owner->in_parts = false;
  a.mul_(2);
  REQUIRE((owner->taken() == "p0w(0w)" && owner->memory_[0].sum().item<float>() == 12));
  at::_foreach_mul_({a, b}, 2.0);
  REQUIRE((owner->taken() == "(0w1w)" && owner->memory_[1].sum().item<float>() == 24));
}

TEST_CASE("an owner's exception reaches the caller, and every use that began ends") {
  const auto one = std::make_shared<FakeOwner>(), two = std::make_shared<FakeOwner>();
  const auto a = one->page({3}), b = two->page({3});
  two->fails = true;
  REQUIRE_THROWS_WITH(a + b, "the owner's own");
  REQUIRE((one->taken() == "(0r)" && two->taken() == "(0r"));
  two->fails = false;
  REQUIRE_THROWS(at::add(a, at::ones({5})));  // the operator's own
  REQUIRE(one->taken() == "(0r)");
  REQUIRE((a + b).sum().item<float>() == 6);
}

TEST_CASE("the fault works in every mode, and other operators don't pass it") {
  const auto owner = std::make_shared<FakeOwner>();
  const auto a = owner->page({3});
  {
    const at::NoGradGuard no_grad;
    REQUIRE(a.sum().item<float>() == 3);
  }
  {
    const c10::InferenceMode inference;
    REQUIRE(a.sum().item<float>() == 3);
  }
  {
    const at::RecordFunctionGuard off(false);
    REQUIRE(a.sum().item<float>() == 3);
  }
  auto p = at::zeros({3}).requires_grad_(true);
  p.mutable_grad() = a;
  REQUIRE(p.grad().data().norm().item<float>() > 1.7);
  p.grad().data().mul_(at::full({}, 2.0, at::kDouble));
  REQUIRE(owner->memory_[0].sum().item<float>() == 6);
  const auto x = at::ones({3});
  const auto seen = zero::faults_seen();
  (void)(x + x).mul_(2).sum().item<float>();
  REQUIRE(zero::faults_seen() == seen);
}
