// Finding and filling the table, see nccl_api.h.
#include "comm/nccl/nccl_api.h"

#include <dlfcn.h>

#include "core/check.h"

namespace zero {
namespace {

// Since 2.9: major × 10000 + minor × 100 + patch.
int major_of(int version) { return version / 10000; }
int minor_of(int version) { return version / 100 % 100; }

// Which file it is, by the address of one of its functions.
std::string path_of(void* symbol, const std::string& otherwise) {
  Dl_info info{};
  if (symbol == nullptr || dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return otherwise;
  return info.dli_fname;
}

}  // namespace

std::string nccl_version_text(int version) {
  return detail::text(major_of(version), '.', minor_of(version), '.', version % 100);
}

NcclApi nccl_from(const SymbolLookup& lookup, const std::string& library) {
  NcclApi api;
  api.library = library;
  const auto optional = [&](auto& pointer, const char* name) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(lookup(name));
  };
  const auto required = [&](auto& pointer, const char* name) {
    optional(pointer, name);
    ZERO_CHECK(pointer != nullptr, "zero: ", library, " has no ", name, ": it is no NCCL, or one before ", NCCL_MAJOR, '.',
               NCCL_MINOR, "; use the NCCL that came with LibTorch");
  };
  required(api.GetVersion, "ncclGetVersion");
  required(api.GetErrorString, "ncclGetErrorString");
  const ncclResult_t result = api.GetVersion(&api.version);
  ZERO_CHECK(result == ncclSuccess, "zero: ncclGetVersion of ", library, ": ", api.GetErrorString(result));
  const bool fits = major_of(api.version) == NCCL_MAJOR && minor_of(api.version) >= NCCL_MINOR;
  ZERO_CHECK(fits, "zero: NCCL ", nccl_version_text(api.version), " is loaded (", library, "), but this build needs ",
             NCCL_MAJOR, '.', NCCL_MINOR, " or a later ", NCCL_MAJOR,
             ".x: run with the LibTorch that zero was built with, or build zero with the nccl.h of this library "
             "(-DZERO_NCCL_INCLUDE=<its folder>)");
  required(api.GetUniqueId, "ncclGetUniqueId");
  required(api.CommInitRankConfig, "ncclCommInitRankConfig");
  required(api.CommGetAsyncError, "ncclCommGetAsyncError");
  required(api.CommFinalize, "ncclCommFinalize");
  required(api.CommDestroy, "ncclCommDestroy");
  required(api.CommAbort, "ncclCommAbort");
  required(api.ReduceScatter, "ncclReduceScatter");
  required(api.AllGather, "ncclAllGather");
  required(api.AllReduce, "ncclAllReduce");
  required(api.Broadcast, "ncclBroadcast");
  required(api.GroupStart, "ncclGroupStart");
  required(api.GroupEnd, "ncclGroupEnd");
  required(api.GetLastError, "ncclGetLastError");
  optional(api.RedOpCreatePreMulSum, "ncclRedOpCreatePreMulSum");
  optional(api.CommRegister, "ncclCommRegister");
  optional(api.CommDeregister, "ncclCommDeregister");
  optional(api.MemAlloc, "ncclMemAlloc");
  optional(api.MemFree, "ncclMemFree");
  return api;
}

NcclApi load_nccl(const std::vector<std::string>& names) {
  void* handle = nullptr;
  std::string tried;
  std::string why;
  for (const int loaded : {RTLD_NOLOAD, 0}) {
    for (const auto& name : names) {
      if (handle != nullptr) break;
      handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | loaded);
      if (handle != nullptr || loaded != 0) continue;
      const char* error = dlerror();
      why = error != nullptr ? error : "unknown error";
      tried += (tried.empty() ? "" : ", ") + name;
    }
  }
  ZERO_CHECK(
      handle != nullptr, "zero: NCCL was not found (", tried, ": ", why,
      "): link the program with LibTorch's CUDA libraries (libtorch_cuda.so, with -Wl,--no-as-needed), which bring it, or put "
      "the folder of libnccl.so.2 into LD_LIBRARY_PATH");
  return nccl_from([handle](const char* name) { return dlsym(handle, name); },
                   path_of(dlsym(handle, "ncclGetVersion"), names.empty() ? std::string() : names.front()));
}

const NcclApi& nccl() {
  static const NcclApi api = load_nccl({"libnccl.so.2"});
  return api;
}

}  // namespace zero
