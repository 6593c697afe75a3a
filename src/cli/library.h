// SPDX-License-Identifier: Apache-2.0
//
// What the library says about itself, as JSON values.
#pragma once

#include <string>

#include "commands.h"
#include "output.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::cli {

template <class TextFunction>
Json library_json(TextFunction function) {
  std::string text(function(nullptr, 0) + 1, '\0');
  text.resize(function(text.data(), text.size()));
  // No text is an error that the library has put into words, such as a QUANTFUSE_ISA that it does not know.
  if (text.empty()) throw UsageError(qf_last_error());
  return Json::parse(text);
}

inline Json library_info() { return library_json(qf_info); }
inline Json library_kernels() { return library_json(qf_kernels); }

// "cpu", or "cuda:0 NVIDIA H200".
inline std::string device_text(qf_device device) {
  if (device.type == QF_CPU) return "cpu";
  const Json gpus = library_info()["cuda"]["devices"];
  const std::string id = "cuda:" + std::to_string(device.id);
  return device.id < static_cast<int>(gpus.size()) ? id + " " + gpus[device.id]["name"].get<std::string>()
                                                   : id;
}

}  // namespace quantfuse::cli
