# SMOE_HAVE_CUDNN: the trainer's attention on the GPU goes through cuDNN. It needs cuDNN's headers and those of its
# C++ frontend; the library itself is loaded at run time. The frontend's headers come from SMOE_CUDNN_FRONTEND_DIR or
# from their wheel on PyPI, unpacked into the build folder.
set(SMOE_CUDNN AUTO CACHE STRING "Attention of the GPU trainer through cuDNN: AUTO (when its headers can be had), ON, OFF")
set(SMOE_CUDNN_FRONTEND_DIR "" CACHE PATH "Folder of cudnn_frontend.h; empty: fetched from PyPI")
set(SMOE_CUDNN_FRONTEND_VERSION 1.32.0)

function(fetch_cudnn_frontend folder)
  if(EXISTS ${folder}/include/cudnn_frontend.h)
    return()
  endif()
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(NOT Python3_FOUND)
    return()
  endif()
  message(STATUS "cudnn frontend: fetching its wheel")
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all:
      --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
      -d ${folder} nvidia-cudnn-frontend==${SMOE_CUDNN_FRONTEND_VERSION}
    TIMEOUT 120 OUTPUT_QUIET ERROR_QUIET)
  file(GLOB wheel ${folder}/nvidia_cudnn_frontend-*.whl)
  if(wheel)
    execute_process(COMMAND ${CMAKE_COMMAND} -E tar xf ${wheel} WORKING_DIRECTORY ${folder} OUTPUT_QUIET ERROR_QUIET)
  endif()
endfunction()

set(SMOE_HAVE_CUDNN OFF)
if(SMOE_HAVE_CUDA AND NOT SMOE_CUDNN STREQUAL "OFF")
  find_path(SMOE_CUDNN_INCLUDE_DIR cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  set(frontend ${SMOE_CUDNN_FRONTEND_DIR})
  if(NOT frontend AND SMOE_CUDNN_INCLUDE_DIR)
    fetch_cudnn_frontend(${PROJECT_BINARY_DIR}/cudnn_frontend)
    set(frontend ${PROJECT_BINARY_DIR}/cudnn_frontend/include)
  endif()
  if(SMOE_CUDNN_INCLUDE_DIR AND EXISTS ${frontend}/cudnn_frontend.h)
    set(SMOE_HAVE_CUDNN ON)
    enable_language(CXX)
  elseif(SMOE_CUDNN STREQUAL "ON")
    message(FATAL_ERROR "SMOE_CUDNN is ON, but cudnn.h or cudnn_frontend.h was not found")
  endif()
  message(STATUS "cudnn attention: ${SMOE_HAVE_CUDNN}")
endif()
