# cmake -DBUILD=<zero's build folder> -DSOURCE=<this folder> -DWORK=<scratch> -DCXX=<compiler> -DCCACHE=<ccache, if there is one> -P run.cmake
# Installs zero into a scratch prefix, then configures, builds and runs the project in this folder against it.
function(run what)
  message(STATUS "${what}")
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE rc)
  if(NOT rc EQUAL 0)
    message(FATAL_ERROR "consumer: ${what} failed (${rc})")
  endif()
endfunction()

set(launcher)
if(CCACHE)
  set(launcher -DCMAKE_CXX_COMPILER_LAUNCHER=${CCACHE})
  get_filename_component(root ${SOURCE}/../.. ABSOLUTE)
  set(ENV{CCACHE_BASEDIR} ${root})
  set(ENV{CCACHE_NOHASHDIR} 1)
endif()

file(REMOVE_RECURSE ${WORK})
run("installing" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix)
# Nothing but the prefix is told: LibTorch must be found from what was installed. Headers that are missing from the installation
# must not be found in the source tree, and are not, since no path leads there.
run("configuring" ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G Ninja -DCMAKE_PREFIX_PATH=${WORK}/prefix
    -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX} ${launcher})
run("building" ${CMAKE_COMMAND} --build ${WORK}/build)
run("running" ${WORK}/build/consumer)
