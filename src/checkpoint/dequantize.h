// SPDX-License-Identifier: Apache-2.0
//
// The way back out of any format: a safetensors file with every quantized weight as floating-point numbers
// and everything else as it is.
#pragma once

#include <functional>
#include <string>

#include "checkpoint/import.h"
#include "checkpoint/new_file.h"

namespace quantfuse::checkpoint {

// Streams tensor by tensor: beyond the mapped input, the memory is that of one weight, its codes and its
// numbers. `type` is f32 or bf16; `on_tensor` is told each name before its turn.
void write_dequantized(const Import& import, NewFile& file, Type type,
                       const std::function<void(const std::string& name)>& on_tensor);

}  // namespace quantfuse::checkpoint
