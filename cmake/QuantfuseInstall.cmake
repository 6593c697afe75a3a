# SPDX-License-Identifier: Apache-2.0
#
# What `cmake --install` puts down: library, headers, command, CMake package, pkg-config file. Every path in them is
# relative to where they lie, so the tree may be moved. The Python binding has a component of its own (src/python).

include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/quantfuse")

install(TARGETS quantfuse EXPORT quantfuse LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(FILES include/quantfuse/quantfuse.h include/quantfuse/quantfuse.hpp
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/quantfuse")

if(QUANTFUSE_CLI)
  file(RELATIVE_PATH bin_to_lib "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(quantfuse_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${bin_to_lib}")
  install(TARGETS quantfuse_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# find_package(quantfuse) gives quantfuse::quantfuse.
install(EXPORT quantfuse NAMESPACE quantfuse:: FILE quantfuseConfig.cmake DESTINATION "${package_dir}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/generated/quantfuseConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/generated/quantfuseConfigVersion.cmake" DESTINATION "${package_dir}")

file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(cmake/quantfuse.pc.in "${CMAKE_BINARY_DIR}/generated/quantfuse.pc" @ONLY)
install(FILES "${CMAKE_BINARY_DIR}/generated/quantfuse.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
