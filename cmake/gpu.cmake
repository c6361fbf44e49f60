# The component `gpu`, for tools/gpu.sh on a machine that may have no compilers: the programs that need a GPU, as far as they are
# built, the libraries that such a machine may lack, and scripts and texts.
foreach(target smoe_cli cuda_check_route cuda_check_limits cuda_check_sms cuda_check_ep cuda_check_ep_failures example_ep_cuda_layer cuda_lora
    cuda_check_f8 cuda_check_f8_dh cuda_check_f8_dw cuda_check_f8_layer cuda_time_f8 cuda_time_f8_backward cuda_check_train_ops cuda_check_train_model
    cuda_variants cuda_time_ep)
  if(TARGET ${target})
    install(PROGRAMS $<TARGET_FILE:${target}> DESTINATION bin COMPONENT gpu EXCLUDE_FROM_ALL OPTIONAL)
  endif()
endforeach()
install(PROGRAMS $<TARGET_FILE:smoe_shared> DESTINATION lib RENAME $<TARGET_SONAME_FILE_NAME:smoe_shared> COMPONENT gpu
  EXCLUDE_FROM_ALL OPTIONAL)
install(PROGRAMS $<TARGET_FILE:smoe_shared> DESTINATION lib RENAME libsmoe.so COMPONENT gpu EXCLUDE_FROM_ALL OPTIONAL)
if(TARGET smoe_xla)
  install(PROGRAMS $<TARGET_FILE:smoe_xla> DESTINATION lib COMPONENT gpu EXCLUDE_FROM_ALL OPTIONAL)
endif()
install(CODE [[
  set(place "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}")
  file(GLOB programs "${place}/bin/*")
  file(GLOB libraries "${place}/lib/*.so*")
  file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${programs} LIBRARIES ${libraries} RESOLVED_DEPENDENCIES_VAR found
    UNRESOLVED_DEPENDENCIES_VAR lacking PRE_INCLUDE_REGEXES "openblas|gomp|gfortran|quadmath|jansson|libz\\.|cmocka"
    PRE_EXCLUDE_REGEXES ".*")
  foreach(library ${found})
    file(INSTALL "${library}" DESTINATION "${place}/lib" FOLLOW_SYMLINK_CHAIN)
  endforeach()]] COMPONENT gpu EXCLUDE_FROM_ALL)
install(DIRECTORY python bench examples tools DESTINATION . COMPONENT gpu EXCLUDE_FROM_ALL USE_SOURCE_PERMISSIONS
  PATTERN __pycache__ EXCLUDE)
install(DIRECTORY tests/python tests/cuda DESTINATION tests COMPONENT gpu EXCLUDE_FROM_ALL USE_SOURCE_PERMISSIONS
  FILES_MATCHING PATTERN "*.py" PATTERN "*.sh" PATTERN emulator EXCLUDE PATTERN __pycache__ EXCLUDE)
install(DIRECTORY docs src train DESTINATION . COMPONENT gpu EXCLUDE_FROM_ALL FILES_MATCHING PATTERN "*.md" PATTERN "*.[ch]"
  PATTERN shapes.csv)
