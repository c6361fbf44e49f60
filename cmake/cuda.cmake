# SMOE_HAVE_CUDA: the Hopper backend is built. AUTO: when a CUDA compiler and the toolkit are found.
set(SMOE_HAVE_CUDA OFF)
if(NOT SMOE_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a-real) # wgmma and setmaxnreg exist there alone
    endif()
    enable_language(CUDA)
    find_package(CUDAToolkit 12.5 QUIET) # cudaGetDriverEntryPointByVersion
    set(SMOE_HAVE_CUDA ${CUDAToolkit_FOUND})
  endif()
  if(SMOE_CUDA STREQUAL "ON" AND NOT SMOE_HAVE_CUDA)
    message(FATAL_ERROR "SMOE_CUDA is ON, but no CUDA compiler and toolkit (12.5 or later) were found")
  endif()
endif()
message(STATUS "cuda backend: ${SMOE_HAVE_CUDA}")
