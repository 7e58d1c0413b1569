# Properties of every target of ours, and of nobody else's: zero_own_target(<target>).

function(zero_own_target target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Werror>)
  # LibTorch's release headers assert on internals that its release libraries don't keep up, unless NDEBUG is defined: so it is
  # defined in every build type.
  target_compile_definitions(${target} PRIVATE NDEBUG)
endfunction()

# For tests and benchmarks that look inside: compiles `target` with the private include folders and links the library's own
# objects instead of libzero.so, whose internal symbols are hidden. One copy of the library is in the program either way.
function(zero_use_internals target)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:zero> $<TARGET_OBJECTS:zero_kernels>)
  target_include_directories(${target} PRIVATE ${zero_SOURCE_DIR}/include ${zero_SOURCE_DIR}/src ${zero_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE zero_private_dependencies)
endfunction()
