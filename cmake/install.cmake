# What `cmake --install` puts where: header, libraries, CMake package (find_package(smoe) gives smoe::smoe and
# smoe::static), pkg-config file.
include(CMakePackageConfigHelpers)

install(FILES ${PROJECT_SOURCE_DIR}/include/smoe.h ${PROJECT_SOURCE_DIR}/include/smoe_ep.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(smoe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/smoe)
foreach(kind shared static) # two sets, because only smoe::static needs other packages
  install(TARGETS smoe_${kind} EXPORT smoe_${kind})
  install(EXPORT smoe_${kind} NAMESPACE smoe:: FILE smoe-${kind}.cmake DESTINATION ${smoe_package_dir})
endforeach()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/smoeConfig.cmake.in ${PROJECT_BINARY_DIR}/smoeConfig.cmake
  INSTALL_DESTINATION ${smoe_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/smoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/smoeConfig.cmake ${PROJECT_BINARY_DIR}/smoeConfigVersion.cmake
  DESTINATION ${smoe_package_dir})

file(RELATIVE_PATH SMOE_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
# What libsmoe.a needs. As Requires.private, OpenBLAS would have to be installed for programs with libsmoe.so too.
list(JOIN OPENBLAS_LDFLAGS " " openblas_flags)
set(SMOE_PRIVATE_LIBS "${openblas_flags} ${OpenMP_C_FLAGS} -lm")
# A program finds libsmoe.so where it was linked, without ldconfig or LD_LIBRARY_PATH.
set(SMOE_RPATH " -Wl,-rpath,\${libdir}")
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr") # a distribution's package: the loader looks there
  set(SMOE_RPATH "")
endif()
if(SMOE_HAVE_CUDA)
  string(APPEND SMOE_PRIVATE_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl -lpthread")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/smoe.pc.in ${PROJECT_BINARY_DIR}/smoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/smoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
