// SPDX-License-Identifier: Apache-2.0
//
// The table of operations and kernels, as built. Filled by code that the build generates from the
// kernels.list files.
#pragma once

#include <span>
#include <vector>

#include "core/kernel.h"

namespace quantfuse {

struct KernelInfo {
  const char* name;
  Target target;
  bool is_compiled;
};

struct OperationInfo {
  const char* name;
  std::vector<KernelInfo> (*kernels)();
};

std::span<const OperationInfo> operations();

}  // namespace quantfuse
