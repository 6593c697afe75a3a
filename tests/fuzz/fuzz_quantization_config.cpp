// SPDX-License-Identifier: Apache-2.0
#include "readers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  quantfuse::checkpoint::fuzz::quantization_config({data, size});
  return 0;
}
