# What the Python package holds besides its sources (pyproject.toml installs the component "python" alone): the shared
# library under its soname, without links, and how it was built; OpenBLAS, if it comes from a Python package; the tool.
set(SMOE_CUDA_VERSION "")
if(SMOE_HAVE_CUDA)
  set(SMOE_CUDA_VERSION ${CUDAToolkit_VERSION})
endif()
set(build_info ${CMAKE_CURRENT_BINARY_DIR}/build_info.json)
configure_file(${PROJECT_SOURCE_DIR}/cmake/build_info.json.in ${build_info} @ONLY)
install(PROGRAMS $<TARGET_FILE:smoe_shared> DESTINATION smoe/lib RENAME $<TARGET_SONAME_FILE_NAME:smoe_shared>
  COMPONENT python EXCLUDE_FROM_ALL)
install(FILES ${build_info} DESTINATION smoe/lib COMPONENT python EXCLUDE_FROM_ALL)
add_custom_target(python_package DEPENDS smoe_shared smoe_xla)
if(SMOE_OPENBLAS STREQUAL "scipy")
  set_target_properties(smoe_shared PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH $ORIGIN)
  install(PROGRAMS ${OPENBLAS_FILE} DESTINATION smoe/lib COMPONENT python EXCLUDE_FROM_ALL)
  install(FILES ${OPENBLAS_LICENCE} DESTINATION smoe/lib RENAME libscipy_openblas.LICENSE.txt COMPONENT python EXCLUDE_FROM_ALL)
endif()
