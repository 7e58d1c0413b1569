# ZERO_WITH_CUDA=AUTO|ON|OFF: looks for nvcc and enables the language. Sets ZERO_HAVE_CUDA, and ZERO_CUDA_WHY for the summary.
#
# Found in: CMAKE_CUDA_COMPILER, CUDACXX, ZERO_CUDA_ROOT, PATH, /usr/local/cuda, and the packages that PyPI has of it beside
# LibTorch (nvidia/cu13), which scripts/setup.sh installs where there is no toolkit.

set(ZERO_HAVE_CUDA FALSE)
set(ZERO_CUDA_WHY "off")
if(ZERO_WITH_CUDA STREQUAL "OFF")
  return()
endif()

set(ZERO_CUDA_ROOT "" CACHE PATH "CUDA toolkit: the folder that holds bin/nvcc (empty: looked for)")
set(ZERO_CUDA_ARCHITECTURES "80;90;100" CACHE STRING "CUDA architectures to compile for")
if(NOT CMAKE_CUDA_COMPILER)
  if(DEFINED ENV{CUDACXX})
    set(_zero_nvcc "$ENV{CUDACXX}")
  else()
    file(GLOB _zero_wheels "${ZERO_TORCH_ROOT}/../nvidia/cu*/bin")
    find_program(_zero_nvcc nvcc HINTS "${ZERO_CUDA_ROOT}/bin" "$ENV{CUDA_HOME}/bin" PATHS /usr/local/cuda/bin ${_zero_wheels} NO_CACHE)
  endif()
else()
  set(_zero_nvcc "${CMAKE_CUDA_COMPILER}")
endif()

if(NOT _zero_nvcc)
  set(ZERO_CUDA_WHY "no nvcc found")
else()
  # Must be set before the language is enabled: CMake's own default includes architectures that nvcc 13 rejects.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "${ZERO_CUDA_ARCHITECTURES}")
  endif()
  get_filename_component(_zero_nvcc "${_zero_nvcc}" REALPATH)
  get_filename_component(_zero_cuda_root "${_zero_nvcc}" DIRECTORY)
  get_filename_component(_zero_cuda_root "${_zero_cuda_root}" DIRECTORY)
  set(CMAKE_CUDA_COMPILER "${_zero_nvcc}" CACHE FILEPATH "nvcc")
  if(NOT CUDAToolkit_ROOT)
    set(CUDAToolkit_ROOT "${_zero_cuda_root}")
  endif()
  # nvcc looks for its libraries in lib64; PyPI's packages have them in lib.
  if(NOT EXISTS "${_zero_cuda_root}/lib64" AND EXISTS "${_zero_cuda_root}/lib/libcudart_static.a" AND NOT DEFINED CMAKE_CUDA_FLAGS)
    set(CMAKE_CUDA_FLAGS "-L${_zero_cuda_root}/lib" CACHE STRING "Flags for nvcc")
  endif()
  if(ZERO_WITH_CUDA STREQUAL "AUTO" AND NOT "${ZERO_NVCC_WORKS}" STREQUAL "${_zero_nvcc}")
    # An nvcc that doesn't work with this host compiler is no reason to fail, and enable_language would: try it first.
    file(WRITE "${zero_BINARY_DIR}/nvcc_check.cu" "__global__ void kernel() {}\nint main() { kernel<<<1, 1>>>(); }\n")
    list(GET CMAKE_CUDA_ARCHITECTURES 0 _zero_arch)
    string(REGEX MATCH "^[0-9]+[a-z]*" _zero_arch "${_zero_arch}")
    separate_arguments(_zero_flags UNIX_COMMAND "${CMAKE_CUDA_FLAGS}")
    execute_process(
      COMMAND "${_zero_nvcc}" ${_zero_flags} -std=c++17 -ccbin ${CMAKE_CXX_COMPILER} -arch=sm_${_zero_arch} nvcc_check.cu -o nvcc_check
      WORKING_DIRECTORY "${zero_BINARY_DIR}" RESULT_VARIABLE _zero_rc OUTPUT_VARIABLE _zero_output ERROR_VARIABLE _zero_output)
    if(NOT _zero_rc EQUAL 0)
      file(WRITE "${zero_BINARY_DIR}/nvcc_check.log" "${_zero_output}")
      set(ZERO_CUDA_WHY "off: ${_zero_nvcc} can't compile here, see nvcc_check.log")
      unset(CMAKE_CUDA_COMPILER CACHE)
      unset(CMAKE_CUDA_COMPILER)
      return()
    endif()
    set(ZERO_NVCC_WORKS "${_zero_nvcc}" CACHE INTERNAL "the nvcc that was tried with success")
  endif()
  enable_language(CUDA)
  set(ZERO_HAVE_CUDA TRUE)
  set(ZERO_CUDA_WHY "${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
endif()

if(ZERO_WITH_CUDA STREQUAL "ON" AND NOT ZERO_HAVE_CUDA)
  message(FATAL_ERROR "zero: ZERO_WITH_CUDA=ON but ${ZERO_CUDA_WHY}: pass -DZERO_CUDA_ROOT=<toolkit>, or -DZERO_WITH_CUDA=AUTO")
endif()
