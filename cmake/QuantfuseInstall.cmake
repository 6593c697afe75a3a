# SPDX-License-Identifier: Apache-2.0
#
# What `cmake --install` puts down: library, headers, CMake package, pkg-config file (and the command, by src/cli). Every
# path in them is relative to where they lie, so the tree may be moved.

include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/quantfuse")

install(TARGETS quantfuse EXPORT quantfuse LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(FILES include/quantfuse/quantfuse.h include/quantfuse/quantfuse.hpp
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/quantfuse")

# find_package(quantfuse) gives quantfuse::quantfuse.
install(EXPORT quantfuse NAMESPACE quantfuse:: FILE quantfuseConfig.cmake DESTINATION "${package_dir}")
write_basic_package_version_file("${CMAKE_BINARY_DIR}/generated/quantfuseConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/generated/quantfuseConfigVersion.cmake" DESTINATION "${package_dir}")

file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
configure_file(cmake/quantfuse.pc.in "${CMAKE_BINARY_DIR}/generated/quantfuse.pc" @ONLY)
install(FILES "${CMAKE_BINARY_DIR}/generated/quantfuse.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
