// See fake_nccl.h.
#include "fake_nccl.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

// A communicator of one rank; what its ranks share is the World.
struct ncclComm {
  struct World {
    std::mutex mutex;
    std::condition_variable changed;
    int size = 0;
    int joined = 0;
    bool stays_unconnected = false;
    struct Round {
      std::vector<const void*> inputs;
      int arrived = 0;
      int computed = 0;
      int aborted = 0;
    };
    std::map<std::int64_t, Round> rounds;
  };
  std::shared_ptr<World> world;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  int rank = 0;
  std::int64_t round = 0;
  int polls_left = 0;  ///< of ncclInProgress
  std::vector<double> factors;
};

namespace fake {
namespace {

using World = ncclComm::World;

std::mutex worlds_mutex;
std::map<std::int64_t, std::shared_ptr<World>> worlds;
std::int64_t next_id = 0;
thread_local int group_depth = 0;
thread_local std::vector<std::function<void()>> grouped;
std::atomic<int> told_version{0};

struct Collective {
  enum Kind { scatter, gather, reduce, bcast } kind;
  const void* input;
  void* output;
  std::size_t count;  // as NCCL counts for this kind
  ncclDataType_t type;
  double factor;
  int root;
};

std::size_t size_of(ncclDataType_t type) {
  return type == ncclFloat64 ? 8 : type == ncclFloat32 ? 4 : type == ncclUint8 ? 1 : 2;
}

template <typename T>
void sum(const std::vector<const void*>& inputs, std::size_t begin, std::size_t count, double factor, std::vector<char>& out) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  for (std::size_t i = 0; i < count; ++i) {
    Wide total = 0;
    for (const void* input : inputs) {
      const T summand = static_cast<const T*>(input)[begin + i];
      // As NCCL does, in the type that travels.
      total +=
          static_cast<Wide>(factor == 1 ? summand : static_cast<T>(static_cast<Wide>(summand) * static_cast<Wide>(factor)));
    }
    const T value = static_cast<T>(total);
    std::memcpy(out.data() + i * sizeof(T), &value, sizeof(T));
  }
}

std::vector<char> result_of(const Collective& call, const std::vector<const void*>& inputs, int rank) {
  const std::size_t item = size_of(call.type);
  std::vector<char> out(call.count * item * (call.kind == Collective::gather ? inputs.size() : 1));
  if (call.kind == Collective::gather) {
    for (std::size_t r = 0; r < inputs.size(); ++r)
      std::memcpy(out.data() + r * call.count * item, inputs[r], call.count * item);
    return out;
  }
  if (call.kind == Collective::bcast) {
    std::memcpy(out.data(), inputs[static_cast<std::size_t>(call.root)], out.size());
    return out;
  }
  const std::size_t begin = call.kind == Collective::scatter ? static_cast<std::size_t>(rank) * call.count : 0;
  if (call.type == ncclFloat64) sum<double>(inputs, begin, call.count, call.factor, out);
  if (call.type == ncclFloat32) sum<float>(inputs, begin, call.count, call.factor, out);
  if (call.type == ncclFloat16) sum<c10::Half>(inputs, begin, call.count, call.factor, out);
  if (call.type == ncclBfloat16) sum<c10::BFloat16>(inputs, begin, call.count, call.factor, out);
  return out;
}

// On the stream's thread: waits for the others, computes from their inputs, waits until all have, writes.
void execute(const std::shared_ptr<World>& world, const std::shared_ptr<std::atomic<bool>>& aborted, int rank,
             std::int64_t number, const Collective& call) {
  std::unique_lock<std::mutex> lock(world->mutex);
  auto& round = world->rounds[number];
  round.inputs.resize(static_cast<std::size_t>(world->size));
  round.inputs[static_cast<std::size_t>(rank)] = call.input;
  ++round.arrived;
  world->changed.notify_all();
  const auto began = std::chrono::steady_clock::now();
  const auto wait_until = [&](const std::function<bool()>& there) {
    while (!there()) {
      if (aborted->load() || std::chrono::steady_clock::now() - began > kPatience) return false;
      world->changed.wait_for(lock, std::chrono::milliseconds(1));
    }
    return true;
  };
  if (!wait_until([&] { return round.arrived == world->size && !nccl_state().stuck.load(); })) return;
  const auto inputs = round.inputs;
  lock.unlock();
  const auto result = result_of(call, inputs, rank);
  lock.lock();
  ++round.computed;
  world->changed.notify_all();
  if (!wait_until([&] { return round.computed == world->size; })) return;
  if (!result.empty()) std::memcpy(call.output, result.data(), result.size());
}

ncclResult_t start(ncclComm_t comm, cudaStream_t stream, const Collective& call, const char* name) {
  auto& state = nccl_state();
  if (group_depth > 0) ++state.in_groups;
  const auto number = comm->round++;
  auto task = [world = comm->world, aborted = comm->aborted, rank = comm->rank, number, call] {
    execute(world, aborted, rank, number, call);
  };
  auto& queue = *reinterpret_cast<Stream*>(stream);
  (void)name;
  if (group_depth > 0) {
    grouped.push_back([&queue, task] { queue.push(task); });
    return ncclSuccess;
  }
  queue.push(task);
  if (state.never_starts.load()) {
    comm->polls_left = 1 << 30;
    return ncclInProgress;
  }
  if (state.slow_start.load()) {
    comm->polls_left = 60;
    return ncclInProgress;
  }
  return ncclSuccess;
}

double factor_of(ncclComm_t comm, ncclRedOp_t op) {
  auto& state = nccl_state();
  if (op == ncclAvg) {
    ++state.averages;
    return 1.0 / comm->world->size;
  }
  if (op == ncclSum) {
    ++state.sums;
    return 1;
  }
  ++state.scaled;
  return comm->factors.at(static_cast<std::size_t>(op) - ncclNumOps);
}

// --- the library's functions ----------------------------------------------------------------------------------------------------

ncclResult_t get_version(int* version) {
  *version = told_version.load();
  return ncclSuccess;
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  const std::lock_guard<std::mutex> lock(worlds_mutex);
  const std::int64_t number = ++next_id;
  worlds[number] = std::make_shared<World>();
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t init(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  auto& state = nccl_state();
  if (config->blocking != 0) return ncclInvalidArgument;  // nobody could end the wait
  ++state.inits;
  if (state.init_fails_on.load() == rank) return ncclSystemError;
  std::int64_t number = 0;
  std::memcpy(&number, &id, sizeof number);
  auto made = std::make_unique<ncclComm>();
  {
    const std::lock_guard<std::mutex> lock(worlds_mutex);
    made->world = worlds.at(number);
  }
  made->rank = rank;
  {
    const std::lock_guard<std::mutex> lock(made->world->mutex);
    made->world->size = size;
    if (state.never_initialised.load() == rank)
      made->world->stays_unconnected = true;
    else
      ++made->world->joined;
  }
  ++state.live;
  *comm = made.release();
  return ncclInProgress;
}

ncclResult_t get_async_error(ncclComm_t comm, ncclResult_t* result) {
  auto& state = nccl_state();
  *result = ncclSuccess;
  if (state.async_error_on.load() == comm->rank) {
    *result = ncclRemoteError;
    return ncclSuccess;
  }
  if (comm->polls_left > 0) {
    --comm->polls_left;
    *result = ncclInProgress;
    return ncclSuccess;
  }
  const std::lock_guard<std::mutex> lock(comm->world->mutex);
  if (comm->world->joined < comm->world->size) *result = ncclInProgress;
  return ncclSuccess;
}

ncclResult_t finalize(ncclComm_t /*comm*/) {
  ++nccl_state().finalizes;
  return ncclSuccess;
}

ncclResult_t destroy(ncclComm_t comm) {
  ++nccl_state().destroys;
  --nccl_state().live;
  delete comm;
  return ncclSuccess;
}

ncclResult_t abort_comm(ncclComm_t comm) {
  ++nccl_state().aborts;
  --nccl_state().live;
  comm->aborted->store(true);
  comm->world->changed.notify_all();
  delete comm;
  return ncclSuccess;
}

ncclResult_t reduce_scatter(const void* input, void* output, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                            ncclComm_t comm, cudaStream_t stream) {
  return start(comm, stream, {Collective::scatter, input, output, count, type, factor_of(comm, op), 0}, "reduce_scatter");
}

ncclResult_t all_reduce(const void* input, void* output, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                        ncclComm_t comm, cudaStream_t stream) {
  return start(comm, stream, {Collective::reduce, input, output, count, type, factor_of(comm, op), 0}, "all_reduce");
}

ncclResult_t all_gather(const void* input, void* output, std::size_t count, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream) {
  return start(comm, stream, {Collective::gather, input, output, count, type, 1, 0}, "all_gather");
}

ncclResult_t broadcast(const void* input, void* output, std::size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return start(comm, stream, {Collective::bcast, input, output, count, type, 1, root}, "broadcast");
}

ncclResult_t group_start() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t group_end() {
  if (--group_depth > 0) return ncclSuccess;
  ++nccl_state().groups;
  for (const auto& push : std::exchange(grouped, {})) push();
  return ncclSuccess;
}

const char* error_string(ncclResult_t result) {
  return result == ncclSystemError   ? "unhandled system error"
         : result == ncclRemoteError ? "remote process exited"
                                     : "some error";
}

const char* last_error(ncclComm_t /*comm*/) { return "the double says so"; }

ncclResult_t premultiply(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t comm) {
  double factor = 0;
  if (type == ncclFloat16) factor = static_cast<double>(static_cast<float>(*static_cast<c10::Half*>(scalar)));
  if (type == ncclBfloat16) factor = static_cast<double>(static_cast<float>(*static_cast<c10::BFloat16*>(scalar)));
  if (type == ncclFloat32) factor = static_cast<double>(*static_cast<float*>(scalar));
  if (type == ncclFloat64) factor = *static_cast<double*>(scalar);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(comm->factors.size()));
  comm->factors.push_back(factor);
  return ncclSuccess;
}

ncclResult_t register_memory(const ncclComm_t, void* data, std::size_t, void** handle) {
  if (nccl_state().register_fails.load()) return ncclInvalidUsage;
  ++nccl_state().registered;
  *handle = data;
  return ncclSuccess;
}

ncclResult_t deregister_memory(const ncclComm_t, void* /*handle*/) {
  ++nccl_state().deregistered;
  return ncclSuccess;
}

ncclResult_t allocate_memory(void** data, std::size_t bytes) {
  if (nccl_state().memory_fails.load()) return ncclUnhandledCudaError;
  ++nccl_state().allocated;
  *data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(*data, 0x5a, bytes);
  return ncclSuccess;
}

// At once, unlike the device's allocator: who uses it after that has a problem that sanitizers see.
ncclResult_t free_memory(void* data) {
  ++nccl_state().freed;
  std::free(data);
  return ncclSuccess;
}

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

Nccl& nccl_state() {
  static Nccl state;
  return state;
}

void reset_nccl() {
  auto& s = nccl_state();
  for (auto* rank : {&s.never_initialised, &s.init_fails_on, &s.async_error_on}) rank->store(-1);
  for (auto* fault : {&s.stuck, &s.slow_start, &s.never_starts, &s.register_fails, &s.memory_fails}) fault->store(false);
  for (auto* count : {&s.inits, &s.aborts, &s.finalizes, &s.destroys, &s.live, &s.registered, &s.deregistered, &s.allocated,
                      &s.freed, &s.groups, &s.averages, &s.scaled, &s.sums, &s.in_groups})
    count->store(0);
}

zero::SymbolLookup nccl_symbols(const std::vector<std::string>& missing, int version) {
  told_version.store(version != 0 ? version : NCCL_VERSION_CODE);
  const std::map<std::string, void*> all{
      {"ncclGetVersion", address(get_version)},       {"ncclGetUniqueId", address(get_unique_id)},
      {"ncclCommInitRankConfig", address(init)},      {"ncclCommGetAsyncError", address(get_async_error)},
      {"ncclCommFinalize", address(finalize)},        {"ncclCommDestroy", address(destroy)},
      {"ncclCommAbort", address(abort_comm)},         {"ncclReduceScatter", address(reduce_scatter)},
      {"ncclAllGather", address(all_gather)},         {"ncclAllReduce", address(all_reduce)},
      {"ncclBroadcast", address(broadcast)},          {"ncclGroupStart", address(group_start)},
      {"ncclGroupEnd", address(group_end)},           {"ncclGetErrorString", address(error_string)},
      {"ncclGetLastError", address(last_error)},      {"ncclRedOpCreatePreMulSum", address(premultiply)},
      {"ncclCommRegister", address(register_memory)}, {"ncclCommDeregister", address(deregister_memory)},
      {"ncclMemAlloc", address(allocate_memory)},     {"ncclMemFree", address(free_memory)}};
  return [all, missing](const char* name) -> void* {
    if (std::find(missing.begin(), missing.end(), name) != missing.end()) return nullptr;
    const auto it = all.find(name);
    return it != all.end() ? it->second : nullptr;
  };
}

zero::NcclApi nccl_api(const std::vector<std::string>& missing, int version) {
  return zero::nccl_from(nccl_symbols(missing, version), "a double");
}

}  // namespace fake
