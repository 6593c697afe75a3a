// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace quantfuse {

// A position in a circle of buffers, and the parity of the round, which their barriers are waited for with.
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ void advance(int size) {
    if (++at == size) at = 0, parity ^= 1;
  }
};

}  // namespace quantfuse
