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

constexpr int64_t kSmallBytes = 64'000'000;  // read in a fraction of a second

// ---- Words ----

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

std::string bytes_words(int64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

double saturated_share(const LayerValues& values) {
  if (values.num_codes == 0) return 0;
  return static_cast<double>(values.num_saturated) / static_cast<double>(values.num_codes);
}

// One value where all layers agree, a list where they do not, null where there are none.
Json common(const std::set<int64_t>& values) {
  if (values.empty()) return nullptr;
  if (values.size() == 1) return *values.begin();
  return values;
}

// ---- What is found out, as a table and as JSON ----

struct Total {
  int64_t count = 0, numbers = 0, bytes = 0;

  void add(int64_t more_numbers, int64_t more_bytes) {
    ++count;
    numbers += more_numbers;
    bytes += more_bytes;
  }
  Json json() const { return {{"count", count}, {"numbers", numbers}, {"bytes", bytes}}; }
  std::vector<std::string> row(const std::string& name) const {
    const double bits = numbers ? 8.0 * static_cast<double>(bytes) / static_cast<double>(numbers) : 0;
    return {name, std::to_string(count), std::to_string(numbers), fmt::format("{:.2f}", bits),
            bytes_words(bytes)};
  }
};

class Report {
 public:
  explicit Report(bool has_values) : has_values_(has_values) {}

  void add(const LayerInfo& info, const std::optional<LayerValues>& values) {
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
    rows_.push_back({info.name, shape_words(info.shape), format_words(info), block_words(info.block),
                     bytes_words(info.bytes())});
    if (values) {
      json["scale_min"] = values->scale_min;
      json["scale_max"] = values->scale_max;
      json["saturated"] = saturated_share(*values);
      rows_.back().push_back(fmt::format("{:.3g} .. {:.3g}", values->scale_min, values->scale_max));
      rows_.back().push_back(fmt::format("{:.2f}%", 100.0 * saturated_share(*values)));
    }
    layers_.push_back(std::move(json));
    bits_.insert(info.bits);
    groups_.insert(info.block.cols);
    count(format_words(info) + " " + block_words(info.block), info.numel(), info.bytes());
  }

  void add(const Tensor& tensor) {
    const auto bytes = static_cast<int64_t>(tensor.bytes.size());
    const char* type = type_name(tensor.type);
    tensors_.push_back({{"name", tensor.name}, {"dtype", type}, {"shape", tensor.shape}, {"bytes", bytes}});
    rows_.push_back({tensor.name, shape_words(tensor.shape), type, "", bytes_words(bytes)});
    if (has_values_) rows_.back().insert(rows_.back().end(), {"", ""});
    count(type, tensor.numel(), bytes);
  }

  void print() const {
    using Align = Table::Align;
    if (!layers_.empty()) {
      fmt::print("{}          {}\n", styled(Style::bold, "bits"), common(bits_).dump());
      fmt::print("{}         {} (0: a whole row)\n", styled(Style::bold, "group"), common(groups_).dump());
    }
    std::vector<Table::Column> columns = {
        {"weight", Align::left}, {"shape"}, {"format", Align::left}, {"scale per", Align::left}, {"size"}};
    if (has_values_) columns.insert(columns.end(), {{"scale"}, {"saturated"}});
    print_table(std::move(columns), rows_);
    std::vector<std::vector<std::string>> totals;
    for (const auto& [name, total] : by_format_) totals.push_back(total.row(name));
    totals.push_back(all_.row("all"));
    print_table({{"total", Align::left}, {"tensors"}, {"numbers"}, {"bits each"}, {"size"}}, totals);
  }

  void add_to(Json& json) const {
    json["bits"] = common(bits_);
    json["group"] = common(groups_);
    json["layers"] = layers_;
    json["tensors"] = tensors_;
    for (const auto& [name, total] : by_format_) json["by_format"][name] = total.json();
    json["total"] = all_.json();
  }

 private:
  void count(const std::string& format, int64_t numbers, int64_t bytes) {
    by_format_[format].add(numbers, bytes);
    all_.add(numbers, bytes);
  }

  static void print_table(std::vector<Table::Column> columns,
                          const std::vector<std::vector<std::string>>& rows) {
    Table table(std::move(columns));
    for (const auto& row : rows) table.fit(row);
    fmt::print("\n");
    table.print_titles();
    for (const auto& row : rows) table.print_row(row);
  }

  bool has_values_;
  Json layers_ = Json::array(), tensors_ = Json::array();
  std::vector<std::vector<std::string>> rows_;
  std::set<int64_t> bits_, groups_;
  std::map<std::string, Total> by_format_;
  Total all_;
};

}  // namespace

int run_inspect(const InspectOptions& options) {
  expect_exists(options.path);
  JsonFile file(options.json_path);
  const Checkpoint checkpoint(options.path);
  const Import import = import_checkpoint(checkpoint, stated_fields(options.stated));
  const bool reads_data = options.reads_data || checkpoint.file_bytes() < kSmallBytes;

  Report report(reads_data);
  Progress progress(import.layers.size());
  for (const auto& layer : import.layers) {
    std::optional<LayerValues> values;
    if (reads_data) {
      progress.step(layer->info().name);
      layer->info().prefetch_pages();
      values = layer->values();
      layer->info().release_pages();
    }
    report.add(layer->info(), values);
  }
  progress.clear();
  for (const Tensor* tensor : import.plain) report.add(*tensor);

  const bool is_gguf = checkpoint.container() == Container::gguf;
  const size_t num_files = checkpoint.files().size();
  const std::string architecture = checkpoint.architecture();
  fmt::print("{}  {}\n", styled(Style::bold, "architecture"),
             architecture.empty() ? "unknown" : architecture);
  fmt::print("{}        {}, {} {} file{}, {}\n", styled(Style::bold, "format"),
             import.format.empty() ? "not quantized" : import.format, num_files,
             is_gguf ? "GGUF" : "safetensors", num_files == 1 ? "" : "s",
             bytes_words(checkpoint.file_bytes()));
  report.print();

  Json json = {
      {"path", options.path},         {"container", is_gguf ? "gguf" : "safetensors"},
      {"architecture", architecture}, {"format", import.format.empty() ? Json(nullptr) : Json(import.format)},
      {"files", num_files},           {"file_bytes", checkpoint.file_bytes()}};
  report.add_to(json);
  file.write(json);
  return kSuccess;
}

}  // namespace quantfuse::cli
