// The one place that knows JSON: manifests, and the headers of safetensors files.
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "checkpoint/checksum.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "core/check.h"

namespace zero::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr const char* kFormat = "zero checkpoint";

std::string hex(std::uint64_t x) {
  char text[17];
  (void)std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(x));
  return text;
}

std::string hex(const std::string& bytes) {
  static const char* digits = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += digits[static_cast<unsigned char>(c) >> 4];
    out += digits[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

std::string bytes_of_hex(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2) out += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return out;
}

// JSON has no infinity and no NaN.
Json number(double x) { return std::isfinite(x) ? Json(x) : Json{{"double", std::isnan(x) ? "nan" : x > 0 ? "inf" : "-inf"}}; }

Json to(const Scalar& scalar) {
  struct Visitor {
    Json operator()(bool x) const { return x; }
    Json operator()(std::int64_t x) const { return x; }
    Json operator()(double x) const { return number(x); }
    Json operator()(const std::string& x) const { return x; }
    Json operator()(const Blob& x) const { return {{"dtype", x.dtype}, {"shape", x.shape}, {"hex", hex(x.bytes)}}; }
  };
  return std::visit(Visitor{}, scalar);
}

Scalar scalar_of(const Json& json) {
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number()) return json.get<double>();
  if (json.is_string()) return json.get<std::string>();
  if (json.contains("double")) {
    const auto text = json["double"].get<std::string>();
    return text == "nan" ? std::nan("") : text == "inf" ? HUGE_VAL : -HUGE_VAL;
  }
  return Blob{json.at("dtype"), json.at("shape").get<std::vector<std::int64_t>>(), bytes_of_hex(json.at("hex"))};
}

Json to(const Scalars& scalars) {
  auto out = Json::object();
  for (const auto& [name, scalar] : scalars) out[name] = to(scalar);
  return out;
}

Scalars scalars_of(const Json& json) {
  Scalars out;
  for (const auto& [name, value] : json.items()) out.emplace(name, scalar_of(value));
  return out;
}

Json to(const TensorEntry& t) {
  Json out{{"kind", t.kind}, {"name", t.name}, {"dtype", t.dtype}, {"shape", t.shape}, {"strides", t.strides}};
  if (!t.field.empty()) out["field"] = t.field;
  auto& fragments = out["fragments"] = Json::array();
  for (const auto& f : t.fragments)
    fragments.push_back(
        {{"file", f.file}, {"begin", f.begin}, {"count", f.count}, {"offset", f.offset}, {"xxh3", hex(f.checksum)}});
  return out;
}

TensorEntry tensor_of(const Json& json) {
  TensorEntry t;
  t.kind = json.at("kind"), t.name = json.at("name"), t.dtype = json.at("dtype");
  t.field = json.value("field", "");
  t.shape = json.at("shape").get<std::vector<std::int64_t>>();
  t.strides = json.at("strides").get<std::vector<std::int64_t>>();
  for (const auto& f : json.at("fragments"))
    t.fragments.push_back({f.at("file"), f.at("begin"), f.at("count"), f.at("offset"),
                           std::stoull(f.at("xxh3").get<std::string>(), nullptr, 16)});
  return t;
}

// Runs `body`; what JSON's library throws becomes an error of ours.
template <typename Body>
auto guarded(const std::string& where, Body body) {
  try {
    return body();
  } catch (const Json::exception& e) {
    ZERO_FAIL(where, " is damaged: ", e.what());
  } catch (const std::logic_error& e) {  // std::stoull
    ZERO_FAIL(where, " is damaged: ", e.what(), ": not a number");
  }
}

}  // namespace

std::string to_json(const Manifest& m) {
  Json body{{"step", m.step},
            {"ranks", m.ranks},
            {"stage", m.stage},
            {"optimizer", m.optimizer},
            {"groups", m.groups},
            {"options", m.options},
            {"loss_scale", to(m.loss_scale)},
            {"extra", to(m.extra)}};
  auto& states = body["states"] = Json::object();
  for (const auto& [name, scalars] : m.states) states[name] = to(scalars);
  auto& files = body["files"] = Json::array();
  for (const auto& file : m.files) files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  auto& tensors = body["tensors"] = Json::array();
  for (const auto& t : m.tensors) tensors.push_back(to(t));
  std::string text;
  try {
    text = body.dump();
  } catch (const Json::exception& e) {
    ZERO_FAIL("a name or value of the checkpoint is no text in UTF-8: ", e.what());
  }
  // By hand, so that the body isn't written twice to be hashed.
  return "{\"format\":\"" + std::string(kFormat) + "\",\"version\":" + std::to_string(kVersion) + ",\"xxh3\":\"" +
         hex(checksum_of(text.data(), static_cast<std::int64_t>(text.size()))) + "\",\"body\":" + text + "}\n";
}

bool is_newer(const std::string& text) {
  const auto json = Json::parse(text, nullptr, false);
  return json.is_object() && json.contains("format") && json["format"] == kFormat && json.contains("version") &&
         json["version"].is_number() && json["version"] > kVersion;
}

Manifest from_json(const std::string& text, const std::string& where) {
  return guarded(where, [&] {
    const auto json = Json::parse(text);
    if (!json.is_object() || json.value("format", "") != kFormat) ZERO_FAIL(where, " is no manifest of a checkpoint");
    const int version = json.at("version");
    if (version > kVersion)
      ZERO_FAIL(where, " is of version ", version, " of the format; this library reads versions up to ", kVersion,
                ": load it with a newer one");
    const auto& body = json.at("body");
    const auto dumped = body.dump();
    if (json.at("xxh3") != hex(checksum_of(dumped.data(), static_cast<std::int64_t>(dumped.size()))))
      ZERO_FAIL(where, " is damaged: its checksum is another");
    Manifest m;
    m.step = body.at("step"), m.ranks = body.at("ranks"), m.stage = body.at("stage");
    m.optimizer = body.at("optimizer"), m.groups = body.at("groups");
    m.options = body.at("options").get<std::map<std::string, std::string>>();
    m.loss_scale = scalars_of(body.at("loss_scale"));
    m.extra = scalars_of(body.at("extra"));
    for (const auto& [name, scalars] : body.at("states").items()) m.states.emplace(name, scalars_of(scalars));
    for (const auto& file : body.at("files")) m.files.push_back({file.at("name"), file.at("bytes")});
    for (const auto& t : body.at("tensors")) m.tensors.push_back(tensor_of(t));
    return m;
  });
}

std::string header_to_json(const StoredFile& file, std::int64_t data_begin) {
  auto out = Json::object();
  if (!file.metadata.empty()) out["__metadata__"] = file.metadata;
  for (const auto& t : file.tensors)
    out[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {t.begin - data_begin, t.end - data_begin}}};
  try {
    return out.dump();
  } catch (const Json::exception& e) {
    ZERO_FAIL("the name of a tensor is no text in UTF-8: ", e.what());
  }
}

StoredFile header_from_json(const std::string& text, std::int64_t data_begin, const std::string& where) {
  return guarded("the header of " + where, [&] {
    StoredFile file;
    const auto json = Json::parse(text);
    for (const auto& [name, value] : json.items()) {
      if (name == "__metadata__") {
        file.metadata = value.get<std::map<std::string, std::string>>();
        continue;
      }
      const auto range = value.at("data_offsets").get<std::vector<std::int64_t>>();
      if (range.size() != 2) ZERO_FAIL("the header of ", where, " is damaged: '", name, "' has no byte range");
      file.tensors.push_back({name, value.at("dtype"), value.at("shape").get<std::vector<std::int64_t>>(),
                              range[0] + data_begin, range[1] + data_begin});
    }
    return file;
  });
}

}  // namespace zero::checkpoint
