# What the library itself needs: OpenMP and OpenBLAS. smoe_missing: what is not there, with the Debian packages in brackets.
find_package(OpenMP QUIET COMPONENTS C)
set(smoe_missing "")
if(NOT OpenMP_C_FOUND)
  list(APPEND smoe_missing "OpenMP for ${CMAKE_C_COMPILER_ID} (gcc brings it; clang: libomp-dev)")
endif()

find_package(PkgConfig QUIET) # for other packages too
if(SMOE_OPENBLAS STREQUAL "scipy")
  # The OpenBLAS that SciPy's wheels have, from the Python package scipy-openblas32. Its symbols have a prefix.
  find_package(Python REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import importlib.metadata as m, scipy_openblas32 as b
licences = [f.locate() for f in m.files('scipy-openblas32') if f.name.startswith('LICENSE')]
print(b.get_include_dir(), b.get_lib_dir(), licences[0], sep=';')"
    OUTPUT_VARIABLE scipy_openblas OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "SMOE_OPENBLAS is scipy, but ${Python_EXECUTABLE} has no package scipy-openblas32")
  endif()
  list(POP_BACK scipy_openblas OPENBLAS_LICENCE libraries)
  set(OPENBLAS_FILE ${PROJECT_BINARY_DIR}/src/libscipy_openblas.so) # beside libsmoe.so, as in the wheel
  configure_file(${libraries}/libscipy_openblas.so ${OPENBLAS_FILE} COPYONLY)
  add_library(PkgConfig::OPENBLAS SHARED IMPORTED GLOBAL)
  set_target_properties(PkgConfig::OPENBLAS PROPERTIES
    IMPORTED_LOCATION ${OPENBLAS_FILE} INTERFACE_INCLUDE_DIRECTORIES ${scipy_openblas})
  foreach(name cblas_sgemm openblas_get_config openblas_get_corename openblas_get_num_threads openblas_set_num_threads)
    target_compile_definitions(PkgConfig::OPENBLAS INTERFACE ${name}=scipy_${name})
  endforeach()
elseif(NOT PkgConfig_FOUND)
  list(APPEND smoe_missing "pkg-config (pkg-config), which finds OpenBLAS (libopenblas-dev)")
else()
  pkg_check_modules(OPENBLAS QUIET IMPORTED_TARGET openblas)
  if(NOT OPENBLAS_FOUND)
    list(APPEND smoe_missing "OpenBLAS (libopenblas-dev)")
  endif()
endif()
list(JOIN smoe_missing ", " smoe_missing)
