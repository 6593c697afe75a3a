// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse dequantize`: a quantized checkpoint back as floating-point safetensors.
#include "checkpoint/dequantize.h"

#include <fmt/format.h>

#include <filesystem>

#include "checkpoint_options.h"
#include "commands.h"
#include "output.h"

namespace quantfuse::cli {
namespace {

using namespace checkpoint;

void expect_not_an_input(const Checkpoint& checkpoint, const std::string& out) {
  for (const auto& file : checkpoint.files()) {
    std::error_code error;
    if (std::filesystem::equivalent(file->path(), out, error)) {
      throw UsageError(out + " is a file of the checkpoint that is read");
    }
  }
}

}  // namespace

int run_dequantize(const DequantizeOptions& options) {
  expect_exists(options.in);
  JsonFile json(options.json_path);
  const Checkpoint checkpoint(options.in);
  expect_not_an_input(checkpoint, options.out);
  const Import import = import_checkpoint(checkpoint, stated_fields(options.stated));

  NewFile file(options.out);
  Progress progress(import.layers.size() + import.plain.size());
  write_dequantized(import, file, options.dtype == "bf16" ? Type::bf16 : Type::f32,
                    [&](const std::string& name) { progress.step(name); });
  progress.clear();

  Json names = Json::array();
  for (const auto& layer : import.layers) names.push_back(layer->info().name);
  json.write({{"format", import.format},
              {"dtype", options.dtype},
              {"dequantized", std::move(names)},
              {"copied", import.plain.size()}});
  fmt::print("{}: {} weights of {} dequantized to {}, {} tensors copied\n", options.out, import.layers.size(),
             import.format.empty() ? "no format" : import.format, options.dtype, import.plain.size());
  return kSuccess;
}

}  // namespace quantfuse::cli
