// A program that isn't linked with LibTorch's CUDA half is given it.
#include <ATen/detail/CUDAHooksInterface.h>

#include "comm/nccl/device_api.h"
#include "support/catch.h"

TEST_CASE("LibTorch's CUDA library is loaded when it is asked for", "[cuda]") {
  REQUIRE_FALSE(at::CUDAHooksRegistry()->Has("CUDAHooks"));
  zero::load_torch_cuda();
  REQUIRE(at::CUDAHooksRegistry()->Has("CUDAHooks"));
  REQUIRE_NOTHROW(zero::load_torch_cuda());
}
