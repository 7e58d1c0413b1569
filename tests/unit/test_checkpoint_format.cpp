// The files of a checkpoint without tensors and ranks: safetensors, manifests, folders.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>

#include "checkpoint/checksum.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shard_file.h"
#include "support/catch.h"
#include "support/folder.h"
#include "support/training.h"

using namespace zero::checkpoint;
using training::expect_error;

namespace {

Run run_of(const std::string& name, const std::vector<float>& all, std::vector<std::int64_t> shape, std::int64_t begin,
           std::int64_t count) {
  TensorEntry entry{"parameter", name, "", "F32", shape, {}, {}};
  entry.strides.assign(shape.size(), 1);
  for (auto d = static_cast<int>(shape.size()) - 2; d >= 0; --d) entry.strides[d] = entry.strides[d + 1] * shape[d + 1];
  return {entry, begin, count, [&all, begin]() -> std::shared_ptr<const void> {
            return {std::shared_ptr<const void>(), all.data() + begin};
          }};
}
Run run_of(const std::string&, std::vector<float>&&, std::vector<std::int64_t>, std::int64_t, std::int64_t) = delete;

std::vector<float> numbers(int n) {
  std::vector<float> out(n);
  std::iota(out.begin(), out.end(), 0.5F);
  return out;
}

// A checkpoint of two ranks' files with the tensors a [3, 4] (cut at 5) and b [6] (rank 1's).
Manifest make(const std::string& folder, const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<Manifest> parts(2);
  for (int r = 0; r < 2; ++r) {
    std::vector<Run> runs;
    if (r == 0) runs = {run_of("a", a, {3, 4}, 0, 5)};
    if (r == 1) runs = {run_of("a", a, {3, 4}, 5, 7), run_of("b", b, {6}, 0, 6)};
    parts[r] = write_shard(folder, "rank" + std::to_string(r), runs);
    parts[r].step = 7, parts[r].ranks = 2, parts[r].optimizer = "AdamW", parts[r].groups = 1;
    parts[r].states["a"]["step"] = std::int64_t{7};
  }
  return merge(parts);
}

std::string save(const std::string& directory, std::int64_t step, int keep = 0) {
  const auto a = numbers(12), b = numbers(6);
  auto folder = NewFolder::make(directory, step);
  const auto manifest = make(folder.path(), a, b);
  return folder.commit(to_json(manifest), keep);
}

void flip(const std::string& path, std::int64_t at) {
  const auto file = File::open_to_write(path);
  char byte = 0;
  file.read(&byte, 1, at);
  byte = static_cast<char>(byte ^ 16);
  file.write(&byte, 1, at);
}

}  // namespace

TEST_CASE("a manifest says all it was told, numbers to the bit") {
  Manifest m;
  m.step = 12345678901, m.ranks = 3, m.stage = 2, m.optimizer = "AdamW", m.groups = 2;
  m.options["lr of group 0"] = "0.1";
  m.loss_scale["scale"] = 65536.0;
  m.extra = {{"third", 1.0 / 3},
             {"one", 1.0},
             {"n", std::int64_t{-9007199254740993}},
             {"yes", true},
             {"text", std::string("ä \"quoted\"\n")},
             {"inf", std::numeric_limits<double>::infinity()},
             {"nan", std::nan("")}};
  m.states["w"]["step"] = std::int64_t{4};
  m.states["w"]["small"] = Blob{"F64", {1}, std::string("\0\1\xff", 3)};
  m.states["v"];
  m.files = {{"f", 4096}};
  m.tensors = {{"state", "w", "exp_avg", "BF16", {3, 4}, {4, 1}, {{0, 0, 12, 64, 0xfedcba9876543210}}}};
  const auto read = from_json(to_json(m), "here");
  REQUIRE(read.step == m.step);
  REQUIRE(read.ranks == 3);
  REQUIRE((read.options == m.options));
  REQUIRE((read.states == m.states));
  REQUIRE((read.loss_scale == m.loss_scale));
  REQUIRE(std::isnan(std::get<double>(read.extra.at("nan"))));
  auto extra = m.extra, read_extra = read.extra;
  extra.erase("nan"), read_extra.erase("nan");
  REQUIRE((read_extra == extra));  // 1.0 is no integer, and 1/3 has all its bits
  REQUIRE(read.tensors[0].fragments[0].checksum == 0xfedcba9876543210);
  REQUIRE((read.tensors[0].key() == m.tensors[0].key()));
}

TEST_CASE("manifests that aren't any, are damaged or newer are refused in words") {
  Manifest m;
  m.optimizer = "AdamW";
  const auto good = to_json(m);
  expect_error({"M", "damaged"}, [&] { (void)from_json(good.substr(0, good.size() / 2), "M"); });
  expect_error({"M", "no manifest"}, [&] { (void)from_json("{\"a\": 1}", "M"); });
  expect_error({"M", "damaged"}, [&] { (void)from_json("", "M"); });
  auto changed = good;
  changed.replace(changed.find("AdamW"), 5, "AdamX");
  expect_error({"M", "damaged", "checksum"}, [&] { (void)from_json(changed, "M"); });
  auto newer = good;
  newer.replace(newer.find("\"version\":1"), 11, "\"version\":2");
  expect_error({"M", "version 2", "up to 1"}, [&] { (void)from_json(newer, "M"); });
  REQUIRE(is_newer(newer));
  REQUIRE_FALSE(is_newer(good));
  REQUIRE_FALSE(is_newer("no JSON"));
}

TEST_CASE("shard files: every element is where the manifest says, and the file is one of safetensors") {
  const test::Folder folder;
  const auto a = numbers(12), b = numbers(6);
  const auto m = make(folder.path(), a, b);
  check_complete(m, "here");
  const auto* entry = m.find("parameter", "a");
  REQUIRE(entry != nullptr);
  REQUIRE(entry->fragments.size() == 2);
  std::vector<File> files;
  for (const auto& file : m.files) files.push_back(File::open_to_read(folder.path() + "/" + file.name));
  const auto open = [&](int n) -> const File& { return files[n]; };
  for (int begin = 0; begin < 12; ++begin) {
    for (int count = 0; begin + count <= 12; ++count) {
      std::vector<float> got(count, -1);
      read_elements(*entry, begin, count, got.data(), open);
      REQUIRE(std::equal(got.begin(), got.end(), a.begin() + begin));
    }
  }
  for (const auto& f : entry->fragments) REQUIRE(verify(m, *entry, f, files[f.file]).empty());

  const auto stored = read_header(folder.path() + "/rank1");
  REQUIRE(stored.tensors.size() == 2);
  REQUIRE(stored.find("b")->shape == std::vector<std::int64_t>{6});
  REQUIRE(stored.find("a[5:12]")->bytes() == 28);
  REQUIRE(stored.find("b")->begin % 4 == 0);
}

TEST_CASE("files of safetensors that lie are refused") {
  const test::Folder folder;
  const auto path = folder.path() + "/f";
  const auto with = [&](const std::string& json, const std::string& data) {
    std::filesystem::remove(path);
    std::string text(8, '\0');
    text[0] = static_cast<char>(json.size());
    write_whole(path, text + json + data);
  };
  with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  REQUIRE(read_header(path).find("a")->bytes() == 8);
  const auto refused = [&](const std::string& json, const std::string& data, const std::string& word) {
    with(json, data);
    expect_error({path, word}, [&] { (void)read_header(path); });
  };
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "1234567", "damaged");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "123456789", "damaged");
  refused(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "12345678", "shape needs 12");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", "123456789012", "begins at byte");
  refused(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "12345678", "negative");
  refused(R"({"a":{"dtype":"F32","shape":[2]}})", "12345678", "damaged");
  refused(R"({"a":)", "", "damaged");
  std::filesystem::remove(path);
  write_whole(path, "1234");
  expect_error({path, "4 bytes"}, [&] { (void)read_header(path); });
  std::filesystem::remove(path);
  write_whole(path, std::string(8, '\xff') + "{}");
  expect_error({path, "header"}, [&] { (void)read_header(path); });
}

TEST_CASE("a folder is a checkpoint when it is whole, and not before") {
  const test::Folder directory;
  REQUIRE(checkpoints_in(directory.path() + "/none").empty());
  const auto one = save(directory.path(), 1), two = save(directory.path(), 2);
  REQUIRE(checkpoints_in(directory.path()) == std::vector<std::string>{one, two});
  REQUIRE(read_manifest(two).step == 7);
  REQUIRE(names_in(directory.path()).size() == 2);  // nothing else remains

  SECTION("one that was given up leaves nothing") {
    {
      const auto folder = NewFolder::make(directory.path(), 3);
      write_whole(folder.path() + "/x", "x");
    }
    REQUIRE(names_in(directory.path()).size() == 2);
  }
  SECTION("what a killed save has left goes with the next; what is in progress stays") {
    const auto left = directory.path() + "/.tmp-step-3-abcdef";
    make_folder(left);
    write_whole(left + "/rank0", "x");
    const auto in_progress = NewFolder::make(directory.path(), 4);
    REQUIRE_FALSE(is_folder(left));
    (void)save(directory.path(), 5);
    REQUIRE(is_folder(in_progress.path()));
  }
  SECTION("a truncated, missing or longer file, a missing manifest: not the newest") {
    const auto path = two + "/rank1";
    const auto change = GENERATE(0, 1, 2, 3);
    if (change == 0) std::filesystem::resize_file(path, size_of(path) - 1);
    if (change == 1) std::filesystem::remove(path);
    if (change == 2) std::filesystem::resize_file(path, size_of(path) + 1);
    if (change == 3) std::filesystem::remove(two + "/manifest.json");
    REQUIRE(checkpoints_in(directory.path()) == std::vector<std::string>{one});
    expect_error({change == 3 ? "manifest.json" : "rank1"}, [&] { (void)read_manifest(two); });
  }
  SECTION("a flipped bit shows in the checksum") {
    const auto m = read_manifest(two);
    const auto* entry = m.find("parameter", "b");
    flip(two + "/rank1", entry->fragments[0].offset + 3);
    expect_error({"rank1", "damaged", "'b'"}, [&] {
      const auto problem = verify(m, *entry, entry->fragments[0], File::open_to_read(two + "/rank1"));
      if (!problem.empty()) throw c10::Error(problem);
    });
  }
  SECTION("the newest n stay") {
    for (int step = 3; step <= 6; ++step) (void)save(directory.path(), step, 3);
    REQUIRE(names_in(directory.path()) == std::vector<std::string>{"step-00000004", "step-00000005", "step-00000006"});
    // A run that was set back.
    const auto back = save(directory.path(), 2, 2);
    REQUIRE(names_in(directory.path()) == std::vector<std::string>{"step-00000002", "step-00000006"});
  }
  SECTION("the same step once more replaces it") {
    const auto again = save(directory.path(), 2);
    REQUIRE(again == two);
    REQUIRE(names_in(directory.path()).size() == 2);
    REQUIRE(checkpoints_in(directory.path()) == std::vector<std::string>{one, two});
  }
  SECTION("other names are nobody's") {
    make_folder(directory.path() + "/step-x");
    make_folder(directory.path() + "/step-");
    make_folder(directory.path() + "/best");
    REQUIRE(checkpoints_in(directory.path()).back() == two);
  }
}

TEST_CASE("parts that don't make whole tensors are no checkpoint") {
  const test::Folder folder;
  const auto a = numbers(12), b = numbers(6);
  auto m = make(folder.path(), a, b);
  const auto whole = m;
  m.tensors[0].fragments.erase(m.tensors[0].fragments.begin());
  expect_error({"here", "elements 0 to 5", "'a'"}, [&] { check_complete(m, "here"); });
  m = whole;
  m.tensors[0].fragments.pop_back();
  expect_error({"5 of the 12"}, [&] { check_complete(m, "here"); });
  m = whole;
  m.tensors[1].fragments[0].offset += 8;
  expect_error({"rank1", "would end at"}, [&] { check_complete(m, "here"); });
  m = whole;
  m.tensors.push_back(m.tensors[0]);
  expect_error({"twice"}, [&] { check_complete(m, "here"); });
  m = whole;
  m.tensors.push_back({"state", "b", "exp_avg", "F32", {3}, {1}, {{0, 0, 3, m.tensors[0].fragments[0].offset, 0}}});
  expect_error({"exp_avg of 'b'", "another shape"}, [&] { check_complete(m, "here"); });
  m = whole;
  m.tensors[0].fragments[0].file = 9;
  expect_error({"impossible"}, [&] { check_complete(m, "here"); });
}

TEST_CASE("shares of a list are disjoint, whole and even") {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{57}, std::int64_t{1} << 45}) {
    for (int ranks = 1; ranks <= 7; ++ranks) {
      std::int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const auto [from, to] = share(bytes, r, ranks);
        REQUIRE(from == next);
        REQUIRE(to - from <= bytes / ranks + 1);
        next = to;
      }
      REQUIRE(next == bytes);
    }
  }
}
