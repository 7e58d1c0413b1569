# Finds LibTorch's libraries and headers and makes the imported target zero::torch. Used by this build and, installed beside
# zeroConfig.cmake, by every project that says find_package(zero).
#
# Why not find_package(Torch): on a CUDA-built wheel it is a fatal error without a CUDA toolkit, takes ten seconds with one, and
# would link the CUDA libraries into programs that use the CPU only. All it gives is two include folders and two libraries. A
# project may call find_package(Torch) as well, before or after: no target or variable of its is touched, and if it came first
# the same LibTorch is used.
#
# Looked for, in this order (the first hit wins; ZERO_TORCH_ROOT in the cache remembers it):
#   ZERO_TORCH_ROOT (variable, then environment)    the folder that holds include/ and lib/libtorch_cpu.so
#   TORCH_INSTALL_PREFIX                            set where the project has called find_package(Torch)
#   Torch_DIR (variable, then environment)          <root>/share/cmake/Torch, or <root>
#   CMAKE_PREFIX_PATH (variable, then environment)  <root>, <root>/share/cmake, or a Python environment that has torch
#   ZERO_TORCH_HINTS                                what zero was built with (set by zeroConfig.cmake)
#   python3                                         the torch package of the Python on PATH
#   the cache folder                                what scripts/quickstart.sh or scripts/test.sh have downloaded
#
# Sets ZERO_TORCH_ROOT, ZERO_TORCH_LIBRARY_DIR, ZERO_TORCH_VERSION and ZERO_TORCH_HAS_CUDA (the library carries libtorch_cuda.so).

if(TARGET zero::torch)
  return()
endif()

set(ZERO_TORCH_ROOT "" CACHE PATH "LibTorch: the folder that holds include/ and lib/ (empty: looked for)")
set(ZERO_TORCH_MINIMUM 2.4)  # set_post_acc_grad_hooks and Storage::set_data_ptr_noswap as they are used here
set(ZERO_TORCH_TESTED 2.11)

# The LibTorch root that `path` stands for in any of the usual forms, or nothing.
function(zero_torch_root_of path result)
  set(${result} "" PARENT_SCOPE)
  if(path STREQUAL "")
    return()
  endif()
  file(TO_CMAKE_PATH "${path}" path)
  file(GLOB environments "${path}/lib/python3*/site-packages/torch")  # a virtual environment's prefix
  foreach(candidate "${path}" "${path}/../.." "${path}/../../.." "${path}/torch" ${environments})
    get_filename_component(candidate "${candidate}" ABSOLUTE)
    if(EXISTS "${candidate}/lib/libtorch_cpu.so" AND EXISTS "${candidate}/include/ATen/ATen.h")
      set(${result} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(zero_find_torch_root result)
  # What somebody has set by name must be right: falling through to another LibTorch would be a surprise.
  foreach(name ZERO_TORCH_ROOT TORCH_INSTALL_PREFIX Torch_DIR)
    set(value "${${name}}")
    if(NOT value AND NOT name STREQUAL "TORCH_INSTALL_PREFIX")
      set(value "$ENV{${name}}")
    endif()
    if(value AND NOT value MATCHES "-NOTFOUND$")
      zero_torch_root_of("${value}" root)
      if(NOT root)
        message(FATAL_ERROR "zero: no LibTorch at ${name}=${value} (no lib/libtorch_cpu.so with include/ATen beside it); "
                            "correct it, or unset it and run scripts/quickstart.sh")
      endif()
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  set(places ${CMAKE_PREFIX_PATH})
  if(DEFINED ENV{CMAKE_PREFIX_PATH})
    file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" more)
    list(APPEND places ${more})
  endif()
  list(APPEND places ${ZERO_TORCH_HINTS})
  foreach(place IN LISTS places)
    zero_torch_root_of("${place}" root)
    if(root)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  # find_spec doesn't import torch, which would take seconds.
  find_program(ZERO_PYTHON NAMES python3 python)
  mark_as_advanced(ZERO_PYTHON)
  if(ZERO_PYTHON)
    execute_process(
      COMMAND "${ZERO_PYTHON}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE place OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    zero_torch_root_of("${place}" root)
    if(root)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endif()

  set(cache "$ENV{ZERO_CACHE_DIR}")
  if(NOT cache AND DEFINED ENV{XDG_CACHE_HOME})
    set(cache "$ENV{XDG_CACHE_HOME}/zero")
  elseif(NOT cache)
    set(cache "$ENV{HOME}/.cache/zero")
  endif()
  file(GLOB markers "${cache}/torch-*/.complete")
  list(SORT markers COMPARE NATURAL ORDER DESCENDING)
  foreach(marker IN LISTS markers)
    get_filename_component(place "${marker}" DIRECTORY)
    zero_torch_root_of("${place}" root)
    if(root)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

zero_find_torch_root(_zero_root)
if(NOT _zero_root)
  if(zero_FIND_QUIETLY OR (CMAKE_FIND_PACKAGE_NAME STREQUAL "zero" AND NOT zero_FIND_REQUIRED))
    set(zero_FOUND FALSE)
    set(zero_NOT_FOUND_MESSAGE "LibTorch not found: pass -DTorch_DIR=<root>/share/cmake/Torch")
    return()
  endif()
  message(FATAL_ERROR "zero: LibTorch not found: run scripts/quickstart.sh, or pass -DTorch_DIR=<root>/share/cmake/Torch")
endif()
set(ZERO_TORCH_ROOT "${_zero_root}" CACHE PATH "LibTorch: the folder that holds include/ and lib/ (empty: looked for)" FORCE)
set(ZERO_TORCH_LIBRARY_DIR "${_zero_root}/lib")

set(ZERO_TORCH_VERSION "")
foreach(_zero_file torch/headeronly/version.h torch/csrc/api/include/torch/version.h)  # the first one since 2.9
  if(NOT ZERO_TORCH_VERSION AND EXISTS "${_zero_root}/include/${_zero_file}")
    file(STRINGS "${_zero_root}/include/${_zero_file}" _zero_line REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    if(_zero_line MATCHES "MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+)")
      set(ZERO_TORCH_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
    endif()
  endif()
endforeach()
if(NOT ZERO_TORCH_VERSION)
  message(FATAL_ERROR "zero: no version number in the headers at ${_zero_root}; pass another LibTorch with -DTorch_DIR=...")
elseif(ZERO_TORCH_VERSION VERSION_LESS ZERO_TORCH_MINIMUM)
  message(FATAL_ERROR "zero: LibTorch ${ZERO_TORCH_VERSION} at ${_zero_root} is too old, ${ZERO_TORCH_MINIMUM} or newer is needed; "
                      "pass another with -DTorch_DIR=..., or run scripts/quickstart.sh")
elseif(NOT ZERO_TORCH_VERSION MATCHES "^${ZERO_TORCH_TESTED}(\\.|$)")
  message(WARNING "zero: LibTorch ${ZERO_TORCH_VERSION} is untested (tested: ${ZERO_TORCH_TESTED})")
endif()

if(EXISTS "${ZERO_TORCH_LIBRARY_DIR}/libtorch_cuda.so")
  set(ZERO_TORCH_HAS_CUDA TRUE)
else()
  set(ZERO_TORCH_HAS_CUDA FALSE)
endif()

# Only what CPU code needs. libtorch_cuda.so is left out on purpose: it would be loaded (seconds, a gigabyte) by every program.
# When code of ours calls into it, it goes into a target of its own (zero::torch_cuda), linked with --no-as-needed because its
# operators register themselves and no symbol asks for them.
add_library(zero::torch INTERFACE IMPORTED GLOBAL)
set_target_properties(zero::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES "${_zero_root}/include;${_zero_root}/include/torch/csrc/api/include"
  INTERFACE_LINK_LIBRARIES "${ZERO_TORCH_LIBRARY_DIR}/libtorch_cpu.so;${ZERO_TORCH_LIBRARY_DIR}/libc10.so"
  INTERFACE_COMPILE_FEATURES cxx_std_17)

# Wheels up to 2.6 were built with libstdc++'s old string ABI and say so; later ones say nothing and use the compiler's default.
set(_zero_abi "")
if(EXISTS "${_zero_root}/share/cmake/Torch/TorchConfig.cmake")
  file(STRINGS "${_zero_root}/share/cmake/Torch/TorchConfig.cmake" _zero_line REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
  if(_zero_line MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
    set(_zero_abi "${CMAKE_MATCH_1}")
    set_property(TARGET zero::torch PROPERTY INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${_zero_abi}")
  endif()
endif()
unset(_zero_root)
unset(_zero_line)
unset(_zero_file)
