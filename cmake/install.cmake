# What `cmake --install` puts where: header, libraries, CMake package (find_package(smoe) gives smoe::smoe and
# smoe::static), pkg-config file.
include(CMakePackageConfigHelpers)

install(FILES ${PROJECT_SOURCE_DIR}/include/smoe.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(TARGETS smoe_shared smoe_static EXPORT smoe_targets)
set(smoe_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/smoe)
install(EXPORT smoe_targets NAMESPACE smoe:: FILE smoeTargets.cmake DESTINATION ${smoe_package_dir})

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/smoeConfig.cmake.in ${PROJECT_BINARY_DIR}/smoeConfig.cmake
  INSTALL_DESTINATION ${smoe_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/smoeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/smoeConfig.cmake ${PROJECT_BINARY_DIR}/smoeConfigVersion.cmake
  DESTINATION ${smoe_package_dir})

file(RELATIVE_PATH SMOE_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(SMOE_PRIVATE_LIBS "${OpenMP_C_FLAGS} -lm") # what libsmoe.a needs besides OpenBLAS
if(SMOE_HAVE_CUDA)
  string(APPEND SMOE_PRIVATE_LIBS " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl -lpthread")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/smoe.pc.in ${PROJECT_BINARY_DIR}/smoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/smoe.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
