// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse inspect`: what a checkpoint holds. Headers alone, so that a folder of 100 GB takes seconds; the
// data where asked for, or where there is so little that it takes no time.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "checkpoint/import.h"
#include "checkpoint_options.h"
#include "commands.h"
#include "output.h"

namespace quantfuse::cli {
namespace {

using namespace checkpoint;

constexpr int64_t kSmallBytes = 64'000'000;  // read in a tenth of a second

std::string shape_words(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t dim : shape) text += (text.empty() ? "" : "x") + std::to_string(dim);
  return text.empty() ? "scalar" : text;
}

// "g128", "row", "tensor", "128x128"
std::string block_words(const qf_block& block) {
  if (block.rows == 1) return block.cols == 0 ? "row" : fmt::format("g{}", block.cols);
  return block.rows == 0 && block.cols == 0 ? "tensor" : fmt::format("{}x{}", block.rows, block.cols);
}

std::string format_words(const LayerInfo& info) {
  return info.format + (info.is_asymmetric ? " asym" : "") + (info.has_g_idx ? " act-order" : "");
}

Json layer_json(const LayerInfo& info, const std::optional<LayerValues>& values) {
  Json json = {{"name", info.name},
               {"shape", info.shape},
               {"format", info.format},
               {"bits", info.bits},
               {"group", info.block.cols},
               {"block", {info.block.rows, info.block.cols}},
               {"symmetric", !info.is_asymmetric},
               {"act_order", info.has_g_idx},
               {"bytes", info.bytes()}};
  for (const Tensor* tensor : info.tensors) json["tensors"].push_back(tensor->name);
  if (values) {
    json["scale_min"] = values->scale_min;
    json["scale_max"] = values->scale_max;
    json["saturated"] = values->num_codes ? static_cast<double>(values->num_saturated) /
                                                static_cast<double>(values->num_codes)
                                          : 0.0;
  }
  return json;
}

Json tensor_json(const Tensor& tensor) {
  return {{"name", tensor.name},
          {"dtype", type_name(tensor.type)},
          {"shape", tensor.shape},
          {"bytes", tensor.bytes.size()}};
}

// One value where all layers agree, a list where they do not, null where there are none.
Json common(const std::set<int64_t>& values) {
  if (values.empty()) return nullptr;
  if (values.size() == 1) return *values.begin();
  return values;
}

struct Total {
  int64_t count = 0, numbers = 0, bytes = 0;
  void add(int64_t more_numbers, int64_t more_bytes) {
    ++count;
    numbers += more_numbers;
    bytes += more_bytes;
  }
  Json json() const { return {{"count", count}, {"numbers", numbers}, {"bytes", bytes}}; }
};

std::string bits_per_number(const Total& total) {
  return total.numbers ? fmt::format("{:.2f}", 8.0 * static_cast<double>(total.bytes) /
                                                   static_cast<double>(total.numbers))
                       : "-";
}

using Row = std::vector<std::string>;

void print_table(std::vector<Table::Column> columns, const std::vector<Row>& rows) {
  Table table(std::move(columns));
  for (const Row& row : rows) table.fit(row);
  table.print_titles();
  for (const Row& row : rows) table.print_row(row);
}

}  // namespace

int run_inspect(const InspectOptions& options) {
  expect_exists(options.path);
  JsonFile file(options.json_path);
  const Checkpoint checkpoint(options.path);
  const Import import = import_checkpoint(checkpoint, stated_fields(options.stated));
  const bool reads_data = options.reads_data || checkpoint.file_bytes() < kSmallBytes;

  Json layers = Json::array(), tensors = Json::array();
  std::vector<Row> rows;
  std::map<std::string, Total> by_format;
  Total all;
  std::set<int64_t> bits, groups;
  Progress progress(import.layers.size());
  for (const auto& layer : import.layers) {
    const LayerInfo& info = layer->info();
    std::optional<LayerValues> values;
    if (reads_data) {
      progress.step(info.name);
      values = layer->values();
    }
    layers.push_back(layer_json(info, values));
    rows.push_back({info.name, shape_words(info.shape), format_words(info), block_words(info.block),
                    human_bytes(static_cast<double>(info.bytes()))});
    if (values) {
      rows.back().push_back(fmt::format("{:.3g} .. {:.3g}", values->scale_min, values->scale_max));
      rows.back().push_back(fmt::format("{:.2f}%", 100.0 * layers.back()["saturated"].get<double>()));
    }
    by_format[format_words(info) + " " + block_words(info.block)].add(info.numel(), info.bytes());
    all.add(info.numel(), info.bytes());
    bits.insert(info.bits);
    groups.insert(info.block.cols);
  }
  progress.clear();
  for (const Tensor* tensor : import.plain) {
    const auto bytes = static_cast<int64_t>(tensor->bytes.size());
    tensors.push_back(tensor_json(*tensor));
    rows.push_back({tensor->name, shape_words(tensor->shape), type_name(tensor->type), "",
                    human_bytes(static_cast<double>(bytes))});
    if (reads_data) rows.back().insert(rows.back().end(), {"", ""});
    by_format[type_name(tensor->type)].add(tensor->numel(), bytes);
    all.add(tensor->numel(), bytes);
  }

  const bool is_gguf = checkpoint.container() == Container::gguf;
  const std::string architecture = checkpoint.architecture();
  fmt::print("{}  {}\n", styled(Style::bold, "architecture"),
             architecture.empty() ? "unknown" : architecture);
  fmt::print("{}        {}, {} {} file{}, {}\n", styled(Style::bold, "format"),
             import.format.empty() ? "not quantized" : import.format, checkpoint.files().size(),
             is_gguf ? "GGUF" : "safetensors", checkpoint.files().size() == 1 ? "" : "s",
             human_bytes(static_cast<double>(checkpoint.file_bytes())));
  if (!import.layers.empty()) {
    fmt::print("{}          {}\n", styled(Style::bold, "bits"), common(bits).dump());
    fmt::print("{}         {} (0: a whole row)\n", styled(Style::bold, "group"), common(groups).dump());
  }
  fmt::print("\n");
  using Align = Table::Align;
  std::vector<Table::Column> columns = {
      {"weight", Align::left}, {"shape"}, {"format", Align::left}, {"scale per", Align::left}, {"size"}};
  if (reads_data) columns.insert(columns.end(), {{"scale"}, {"saturated"}});
  print_table(std::move(columns), rows);

  fmt::print("\n");
  std::vector<Row> totals;
  Json totals_json = Json::object();
  const auto add_total = [&](const std::string& name, const Total& total) {
    totals.push_back({name, std::to_string(total.count), std::to_string(total.numbers),
                      bits_per_number(total), human_bytes(static_cast<double>(total.bytes))});
  };
  for (const auto& [name, total] : by_format) {
    add_total(name, total);
    totals_json[name] = total.json();
  }
  add_total("total", all);
  print_table({{"total", Align::left}, {"tensors"}, {"numbers"}, {"bits each"}, {"size"}}, totals);

  file.write({{"path", options.path},
              {"container", is_gguf ? "gguf" : "safetensors"},
              {"architecture", architecture},
              {"format", import.format.empty() ? Json(nullptr) : Json(import.format)},
              {"bits", common(bits)},
              {"group", common(groups)},
              {"files", checkpoint.files().size()},
              {"file_bytes", checkpoint.file_bytes()},
              {"layers", std::move(layers)},
              {"tensors", std::move(tensors)},
              {"by_format", std::move(totals_json)},
              {"total", all.json()}});
  return kSuccess;
}

}  // namespace quantfuse::cli
