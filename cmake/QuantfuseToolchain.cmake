# SPDX-License-Identifier: Apache-2.0
# Compilers and flags, in one place.

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(QUANTFUSE_CCACHE ccache)
if(QUANTFUSE_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${QUANTFUSE_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${QUANTFUSE_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${QUANTFUSE_CCACHE})
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
find_package(Threads REQUIRED)

# CUDA where nvcc is found, unless asked otherwise.
set(QUANTFUSE_HAS_CUDA OFF)
if(NOT QUANTFUSE_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  find_program(QUANTFUSE_NVCC nvcc HINTS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin)
  if(QUANTFUSE_NVCC AND NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER "${QUANTFUSE_NVCC}")
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES 80-virtual)  # of host-only .cu files; kernels have theirs by target
    set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # quantfuse_cuda_runtime, below
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it for nvcc 13
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(QUANTFUSE_HAS_CUDA ON)
    # The runtime is a part of whatever uses it, so that a machine needs none; or an emulated GPU.
    add_library(quantfuse_cuda_runtime INTERFACE)
    if(QUANTFUSE_EMULATE)
      target_link_libraries(quantfuse_cuda_runtime INTERFACE quantfuse_emulator)
      add_compile_definitions($<$<COMPILE_LANGUAGE:CUDA>:QF_WITHOUT_CUBLASLT>)  # it has no PTX to read
    else()
      find_package(CUDAToolkit REQUIRED)
      target_link_libraries(quantfuse_cuda_runtime INTERFACE CUDA::cudart_static)
    endif()
  elseif(QUANTFUSE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QUANTFUSE_CUDA is ON and no nvcc was found")
  endif()
endif()

# Floating-point contraction is off: an fma stands where the source says fma, so every compiler gives the same bits.
add_library(quantfuse_build_flags INTERFACE)
target_compile_options(quantfuse_build_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-ignored-attributes;-ffp-contract=off>"
  "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>"
  "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Wno-deprecated-gpu-targets;--expt-relaxed-constexpr;--fmad=false;-Xcompiler=-Wall>"
  "$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>")
if(QUANTFUSE_SANITIZE OR QUANTFUSE_FUZZ)
  target_compile_options(quantfuse_build_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=address,undefined;-fno-sanitize=null,object-size;-fno-sanitize-recover=all;-fno-omit-frame-pointer;-g1;-O1>")
  target_link_options(quantfuse_build_flags INTERFACE -fsanitize=address,undefined)
endif()
if(QUANTFUSE_FUZZ)
  target_compile_options(quantfuse_build_flags INTERFACE "$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=fuzzer-no-link>")
endif()
