# Looks for what the NCCL communicator is compiled with; nothing of it is linked but CUDA's runtime and libc10_cuda.
#
#   ZERO_HAVE_DEVICES      communicators can work on GPUs: nvcc's toolkit, and a LibTorch with CUDA
#   ZERO_NCCL_INCLUDES     folders of nccl.h and of the CUDA headers that it includes; empty: not found
#   ZERO_CUDA_OPTIONS      for the compiler: CUDA's headers, as a system's (they aren't ours to mend)
#   ZERO_NCCL_OPTIONS      the same for nccl.h
#   ZERO_NCCL_SOURCES      the communicator but for what makes one: tests drive it without CUDA
#   ZERO_HAVE_NCCL         both: make_nccl_communicator() works. ZERO_NCCL_WHY says why not, for the summary
#   ZERO_DEVICE_LIBRARIES  to link with
#
# The library itself, libnccl, is the one that LibTorch has loaded, found when a communicator is made (src/comm/nccl/nccl_api.h).

set(ZERO_HAVE_DEVICES FALSE)
set(ZERO_DEVICE_LIBRARIES "")
set(_zero_cuda_includes "")
if(ZERO_HAVE_CUDA AND ZERO_TORCH_HAS_CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(ZERO_HAVE_DEVICES TRUE)
  set(_zero_cuda_includes ${CUDAToolkit_INCLUDE_DIRS})
  # The static runtime: nothing more has to be found at run time, its symbols are hidden, and its streams and events are the
  # driver's own, as those of LibTorch's copy are.
  # By its path and not as CUDA::cudart_static, so that who links an installed static libzero needn't look for CUDA.
  set(ZERO_DEVICE_LIBRARIES "${ZERO_TORCH_LIBRARY_DIR}/libc10_cuda.so" "${CUDA_cudart_static_LIBRARY}" Threads::Threads
      ${CMAKE_DL_LIBS} rt)
endif()

# PyPI's packages lie beside LibTorch.
find_path(ZERO_NCCL_INCLUDE nccl.h HINTS "${ZERO_TORCH_ROOT}/../nvidia/nccl/include" DOC "Folder of nccl.h")
if(NOT _zero_cuda_includes)
  file(GLOB _zero_wheels "${ZERO_TORCH_ROOT}/../nvidia/cu*/include")
  find_path(ZERO_CUDA_INCLUDE cuda_runtime.h HINTS ${_zero_wheels} PATHS /usr/local/cuda/include DOC "Folder of CUDA's headers")
  mark_as_advanced(ZERO_CUDA_INCLUDE)
  set(_zero_cuda_includes ${ZERO_CUDA_INCLUDE})
endif()
mark_as_advanced(ZERO_NCCL_INCLUDE)

set(ZERO_NCCL_INCLUDES "")
if(ZERO_NCCL_INCLUDE AND _zero_cuda_includes)
  set(ZERO_NCCL_INCLUDES "${ZERO_NCCL_INCLUDE}" ${_zero_cuda_includes})
endif()

set(ZERO_CUDA_OPTIONS ${_zero_cuda_includes})
list(TRANSFORM ZERO_CUDA_OPTIONS PREPEND "-isystem")
set(ZERO_NCCL_OPTIONS "-isystem${ZERO_NCCL_INCLUDE}")
set(ZERO_NCCL_SOURCES nccl_api nccl_bringup nccl_comm nccl_impl nccl_memory nccl_queue)
list(TRANSFORM ZERO_NCCL_SOURCES REPLACE "(.+)" "${zero_SOURCE_DIR}/src/comm/nccl/\\1.cpp")

set(ZERO_HAVE_NCCL FALSE)
if(NOT ZERO_HAVE_CUDA)
  set(ZERO_NCCL_WHY "off: no CUDA")
elseif(NOT ZERO_HAVE_DEVICES)
  set(ZERO_NCCL_WHY "off: this LibTorch has no CUDA")
elseif(NOT ZERO_NCCL_INCLUDES)
  set(ZERO_NCCL_WHY "off: no nccl.h found (pass -DZERO_NCCL_INCLUDE=<its folder>)")
else()
  set(ZERO_HAVE_NCCL TRUE)
  file(STRINGS "${ZERO_NCCL_INCLUDE}/nccl.h" _zero_lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]+" "" _zero_lines "${_zero_lines}")
  string(REPLACE ";" "." _zero_lines "${_zero_lines}")
  set(ZERO_NCCL_WHY "${ZERO_NCCL_INCLUDE}/nccl.h ${_zero_lines}")
endif()
unset(_zero_cuda_includes)
unset(_zero_lines)
