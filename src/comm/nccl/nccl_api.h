// The calls of NCCL that are used, as a table of function pointers. It is filled from the libnccl that LibTorch has loaded, so that
// there is one copy in the process and libzero can be loaded where there is none. The tests fill it with a double.
#pragma once

#include <nccl.h>

#include <functional>
#include <string>
#include <vector>

namespace zero {

struct NcclApi {
  decltype(&ncclGetVersion) GetVersion = nullptr;
  decltype(&ncclGetUniqueId) GetUniqueId = nullptr;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig = nullptr;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError = nullptr;
  decltype(&ncclCommFinalize) CommFinalize = nullptr;
  decltype(&ncclCommDestroy) CommDestroy = nullptr;
  decltype(&ncclCommAbort) CommAbort = nullptr;
  decltype(&ncclReduceScatter) ReduceScatter = nullptr;
  decltype(&ncclAllGather) AllGather = nullptr;
  decltype(&ncclAllReduce) AllReduce = nullptr;
  decltype(&ncclBroadcast) Broadcast = nullptr;
  decltype(&ncclGroupStart) GroupStart = nullptr;
  decltype(&ncclGroupEnd) GroupEnd = nullptr;
  decltype(&ncclGetErrorString) GetErrorString = nullptr;
  decltype(&ncclGetLastError) GetLastError = nullptr;

  // May be missing.
  decltype(&ncclRedOpCreatePreMulSum) RedOpCreatePreMulSum = nullptr;
  decltype(&ncclCommRegister) CommRegister = nullptr;
  decltype(&ncclCommDeregister) CommDeregister = nullptr;
  decltype(&ncclMemAlloc) MemAlloc = nullptr;
  decltype(&ncclMemFree) MemFree = nullptr;

  int version = 0;      ///< as NCCL_VERSION_CODE
  std::string library;  ///< where it is, for messages

  bool allocates() const { return MemAlloc != nullptr && MemFree != nullptr; }
  bool registers() const { return CommRegister != nullptr && CommDeregister != nullptr; }
};

/// The address of a symbol; null: there is none.
using SymbolLookup = std::function<void*(const char* name)>;

/// Throws if a symbol that is needed is missing, or if the library is older than the header or of another major version: NCCL
/// keeps its interface within a major version, and a library of an earlier minor one doesn't know what this code may pass it.
NcclApi nccl_from(const SymbolLookup& lookup, const std::string& library);

/// The first of `names` that is loaded already, else the first that can be loaded. Stays loaded.
NcclApi load_nccl(const std::vector<std::string>& names);

/// load_nccl({"libnccl.so.2"}), once in a process.
const NcclApi& nccl();

/// "2.28.9"
std::string nccl_version_text(int version);

}  // namespace zero
