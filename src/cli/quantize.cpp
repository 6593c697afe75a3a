// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse quantize`: a checkpoint of floating-point weights as a folder of quantized ones.
#include "checkpoint/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/error.h"
#include "checkpoint_options.h"
#include "commands.h"
#include "output.h"

namespace quantfuse::cli {
namespace {

using namespace checkpoint;
namespace fs = std::filesystem;

// ---- What the user typed ----

// "5GB", "500MB", "1000000"
int64_t bytes_from(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(end, text.data() + text.size());
  const std::map<std::string, int64_t> units = {
      {"", 1}, {"KB", 1'000}, {"MB", 1'000'000}, {"GB", 1'000'000'000}};
  const auto found = units.find(unit);
  if (error != std::errc() || number <= 0 || number > 1'000'000'000 || found == units.end()) {
    throw UsageError("--shard-size: expected a size such as 5GB or 500MB, not '" + text + "'");
  }
  return number * found->second;
}

Scheme scheme_of(const QuantizeOptions& options) {
  SchemeOptions named{options.scheme, std::nullopt, options.is_asymmetric};
  if (!options.group.empty()) named.group = options.group;
  return scheme_from(named);
}

std::unique_ptr<WeightLayout> layout_of(const QuantizeOptions& options) try {
  const Scheme scheme = scheme_of(options);
  return options.format == "quantfuse" ? quantfuse_layout(scheme) : compressed_tensors_layout(scheme);
} catch (const std::invalid_argument& e) {
  throw UsageError(e.what());
}

Selection selection_of(const QuantizeOptions& options) try {
  Selection selection;
  for (const std::string& pattern : options.exclude) selection.exclude.emplace_back(pattern, "--exclude");
  if (!options.include.empty()) selection.include.emplace(options.include, "--include");
  return selection;
} catch (const CheckpointError& e) {
  throw UsageError(e.what());
}

// All options that change the result.
checkpoint::Json options_json(const QuantizeOptions& options) {
  return {{"scheme", options.scheme},   {"group", options.group},
          {"method", options.method},   {"asymmetric", options.is_asymmetric},
          {"exclude", options.exclude}, {"include", options.include},
          {"format", options.format},   {"shard size", options.shard_size},
          {"version", qf_version()}};
}

void expect_float_input(const Checkpoint& checkpoint, const std::string& in) {
  if (checkpoint.container() != Container::safetensors) {
    throw UsageError(in + ": expected safetensors: dequantize the GGUF first");
  }
  const auto& config = checkpoint.quantization_config();
  if (config.is_null()) return;
  fail(fmt::format("{} is quantized already ({}): dequantize it first", in,
                   config.value("quant_method", checkpoint::Json("unknown")).dump()));
}

void expect_not_the_input(const Checkpoint& checkpoint, const std::string& out) {
  for (const auto& file : checkpoint.files()) {
    std::error_code error;
    const fs::path folder = file->path().has_parent_path() ? file->path().parent_path() : fs::path(".");
    if (fs::equivalent(folder, out, error))
      throw UsageError(out + " is the folder of the checkpoint that is read");
  }
}

// ---- What is said about it ----

// The most memory that this process ever had, mapped files included; 0 where the system does not say.
int64_t peak_memory_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::atoll(line.c_str() + 6) * 1024;
  }
  return 0;
}

void print_layers(const std::vector<QuantizedLayer>& layers) {
  Table table({{"weight", Table::Align::left}, {"shape"}, {"before"}, {"after"}, {"relative error"}});
  std::vector<std::vector<std::string>> rows;
  for (const QuantizedLayer& layer : layers) {
    rows.push_back({layer.name, fmt::format("{}x{}", layer.shape[0], layer.shape[1]),
                    human_bytes(static_cast<double>(layer.bytes_before)),
                    human_bytes(static_cast<double>(layer.bytes)), fmt::format("{:.5f}", layer.error)});
    table.fit(rows.back());
  }
  table.print_titles();
  for (const auto& row : rows) table.print_row(row);
}

void print_left_alone(const std::vector<LeftAlone>& left_alone) {
  struct Group {
    int64_t count = 0, bytes = 0;
    std::string first;
  };
  std::map<std::string, Group> groups;
  for (const LeftAlone& left : left_alone) {
    Group& group = groups[left.why];
    if (group.count++ == 0) group.first = left.tensor->name;
    group.bytes += static_cast<int64_t>(left.tensor->bytes.size());
  }
  if (groups.empty()) return;
  Table table({{"left alone", Table::Align::left}, {"tensors"}, {"size"}, {"the first", Table::Align::left}});
  std::vector<std::vector<std::string>> rows;
  for (const auto& [why, group] : groups) {
    rows.push_back(
        {why, std::to_string(group.count), human_bytes(static_cast<double>(group.bytes)), group.first});
    table.fit(rows.back());
  }
  fmt::print("\n");
  table.print_titles();
  for (const auto& row : rows) table.print_row(row);
}

Json result_json(const QuantizeOptions& options, const Scheme& scheme, const QuantizePlan& plan,
                 const QuantizeResult& result) {
  Json layers = Json::array(), left_alone = Json::array(), files = Json::array();
  for (const QuantizedLayer& layer : result.layers) {
    layers.push_back({{"name", layer.name},
                      {"shape", layer.shape},
                      {"bytes_before", layer.bytes_before},
                      {"bytes", layer.bytes},
                      {"relative_error", layer.error}});
  }
  for (const LeftAlone& left : plan.left_alone) {
    left_alone.push_back(
        {{"name", left.tensor->name}, {"why", left.why}, {"bytes", left.tensor->bytes.size()}});
  }
  for (const auto& shard : plan.shards) files.push_back(shard.file);
  return {{"in", options.in},
          {"out", options.out},
          {"scheme", scheme.name},
          {"block", {scheme.block.rows, scheme.block.cols}},
          {"symmetric", !scheme.is_asymmetric},
          {"method", options.method},
          {"format", options.format},
          {"layers", std::move(layers)},
          {"left_alone", std::move(left_alone)},
          {"files", std::move(files)},
          {"copied", result.copied},
          {"resumed_files", result.num_resumed}};
}

}  // namespace

int run_quantize(const QuantizeOptions& options) {
  expect_exists(options.in);
  const int64_t shard_bytes = bytes_from(options.shard_size);
  const auto layout = layout_of(options);
  const Selection selection = selection_of(options);
  JsonFile json_file(options.json_path);
  const Checkpoint checkpoint(options.in);
  expect_float_input(checkpoint, options.in);
  expect_not_the_input(checkpoint, options.out);
  const QuantizePlan plan = plan_quantization(checkpoint, selection, *layout, shard_bytes);

  const auto start = std::chrono::steady_clock::now();
  QuantizeResult result;
  try {
    WorkFolder folder(options.out, describe_job(checkpoint, options_json(options)));
    ByteProgress progress(checkpoint.file_bytes());
    const Method method = options.method == "mse" ? Method::mse : Method::rtn;
    result = quantize_checkpoint({checkpoint, *layout, plan, method, options.in}, folder,
                                 [&](const std::string& name, int64_t done) { progress.step(name, done); });
  } catch (const FolderError& e) {
    throw UsageError(e.what());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  print_layers(result.layers);
  print_left_alone(plan.left_alone);
  const auto worst = std::max_element(result.layers.begin(), result.layers.end(),
                                      [](const auto& a, const auto& b) { return a.error < b.error; });
  const auto before = static_cast<double>(checkpoint.file_bytes()), after = static_cast<double>(result.bytes);
  fmt::print("\n{}: {} weights quantized to {}, {} tensors copied, {} -> {} in {:.1f} s ({}/s)\n",
             options.out, result.layers.size(), options.scheme, plan.left_alone.size(), human_bytes(before),
             human_bytes(after), seconds, human_bytes(before / seconds));
  fmt::print("The largest relative error is {:.5f}, of {}\n", worst->error, worst->name);
  if (result.num_resumed > 0)
    fmt::print("{} of {} files were there already\n", result.num_resumed, plan.shards.size());

  Json json = result_json(options, layout->scheme(), plan, result);
  json["bytes_before"] = checkpoint.file_bytes();
  json["bytes"] = result.bytes;
  json["seconds"] = seconds;
  json["peak_memory_bytes"] = peak_memory_bytes();
  json_file.write(json);
  return kSuccess;
}

}  // namespace quantfuse::cli
