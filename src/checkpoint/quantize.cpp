// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "checkpoint/error.h"
#include "checkpoint/parallel.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

namespace fs = std::filesystem;
using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kCopyBytes = 1 << 20;

// ---- One shard ----

// A file whose tensors are known, and filled in any order.
class ShardFile {
 public:
  ShardFile(const QuantizePlan::Shard& shard, const WeightLayout& layout, const WorkFolder& folder)
      : file_(folder.path() / shard.file, folder.notes()) {
    struct Place {
      const TensorHeader* header;
      size_t item, part;
    };
    std::vector<Place> places;
    std::map<std::string, std::string> metadata;
    offsets_.resize(shard.items.size());
    for (size_t i = 0; i < shard.items.size(); ++i) {
      const QuantizePlan::Item& item = shard.items[i];
      offsets_[i].resize(item.parts.size());
      for (size_t part = 0; part < item.parts.size(); ++part) places.push_back({&item.parts[part], i, part});
      if (item.is_quantized) {
        metadata.merge(layout.metadata(item.module(), item.tensor->size(0), item.tensor->size(1)));
      }
    }
    std::stable_sort(places.begin(), places.end(),
                     [](const Place& a, const Place& b) { return is_wider(a.header->type, b.header->type); });
    std::vector<TensorHeader> headers;
    for (const Place& place : places) headers.push_back(*place.header);
    const std::vector<int64_t> begins = write_safetensors_header(file_, headers, metadata);
    for (size_t i = 0; i < places.size(); ++i) offsets_[places[i].item][places[i].part] = begins[i];
    size_ = begins.back();
    file_.reserve(size_);
  }

  void write(size_t item, size_t part, int64_t offset, std::span<const uint8_t> bytes) {
    file_.write_at(offsets_[item][part] + offset, bytes);
  }
  int64_t size() const { return size_; }
  void finish() { file_.finish(); }

 private:
  NewFile file_;
  std::vector<std::vector<int64_t>> offsets_;  // of each item's parts
  int64_t size_ = 0;
};

class Worker {
 public:
  Worker(const QuantizeJob& job, const OnTensor& on_tensor)
      : job_(job), on_tensor_(on_tensor), scratch_(static_cast<size_t>(num_worker_threads())) {}

  // What there is to say about a finished shard.
  Json run(const QuantizePlan::Shard& shard, WorkFolder& folder) {
    ShardFile file(shard, job_.layout, folder);
    Json layers = Json::array();
    for (size_t i = 0; i < shard.items.size(); ++i) {
      const QuantizePlan::Item& item = shard.items[i];
      const Tensor& tensor = *item.tensor;
      on_tensor_(tensor.name, bytes_done_);
      prefetch_pages(tensor.bytes);
      if (item.is_quantized) {
        layers.push_back({{"name", tensor.name}, {"error", quantize(file, i, tensor).relative()}});
      } else {
        copy(file, i, tensor);
      }
      release_pages(tensor.bytes);
      bytes_done_ += static_cast<int64_t>(tensor.bytes.size());
    }
    const Json note = {{"bytes", file.size()}, {"layers", std::move(layers)}};
    folder.note(shard.file, note);
    file.finish();
    return note;
  }

  void skip(const QuantizePlan::Shard& shard) {
    for (const auto& item : shard.items) bytes_done_ += static_cast<int64_t>(item.tensor->bytes.size());
  }
  int64_t bytes_done() const { return bytes_done_; }

 private:
  int num_threads() const { return static_cast<int>(scratch_.size()); }

  SquaredError quantize(ShardFile& file, size_t item, const Tensor& tensor) {
    const Scheme& scheme = job_.layout.scheme();
    const int64_t n = tensor.size(0), k = tensor.size(1), step = rows_of_piece(scheme, tensor);
    const int64_t num_pieces = ceil_div(n, step);
    std::optional<OneThreadPerCall> alone;
    if (num_pieces > 1) alone.emplace();
    // In the order of the rows, so that the sum does not depend on the threads.
    std::vector<SquaredError> errors(static_cast<size_t>(num_pieces));
    for_each_piece(num_pieces, num_threads(), [&](int thread, int64_t piece) {
      WeightRows& rows = scratch_[static_cast<size_t>(thread)];
      rows.n = n, rows.k = k;
      rows.first = piece * step, rows.count = std::min(step, n - rows.first);
      errors[static_cast<size_t>(piece)] =
          quantize_rows(tensor, scheme, job_.method, job_.layout.scale_type(tensor.type), rows);
      job_.layout.store(rows, tensor.type, [&](size_t part, int64_t offset, std::span<const uint8_t> bytes) {
        file.write(item, part, offset, bytes);
      });
    });
    SquaredError sum;
    for (const SquaredError& error : errors) sum.add(error);
    return sum;
  }

  void copy(ShardFile& file, size_t item, const Tensor& tensor) {
    const auto size = static_cast<int64_t>(tensor.bytes.size());
    for_each_piece(ceil_div(size, kCopyBytes), num_threads(), [&](int, int64_t piece) {
      const int64_t begin = piece * kCopyBytes;
      const auto bytes = tensor.bytes.subspan(static_cast<size_t>(begin));
      file.write(item, 0, begin, bytes.first(std::min(bytes.size(), size_t{kCopyBytes})));
    });
  }

  const QuantizeJob& job_;
  const OnTensor& on_tensor_;
  std::vector<WeightRows> scratch_;  // one per thread
  int64_t bytes_done_ = 0;
};

// ---- Everything beside the shards ----

void write_text(const WorkFolder& folder, const std::string& name, const std::string& text) {
  NewFile file(folder.path() / name, folder.notes());
  file.write({reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  file.finish();
}

void write_json(const WorkFolder& folder, const std::string& name, const OrderedJson& json) {
  write_text(folder, name, json.dump(2) + "\n");
}

void write_index(const WorkFolder& folder, const QuantizePlan& plan) {
  int64_t total = 0;
  std::map<std::string, std::string> files;
  for (const auto& shard : plan.shards) {
    total += shard.bytes;
    for (const auto& item : shard.items) {
      for (const TensorHeader& part : item.parts) files[part.name] = shard.file;
    }
  }
  write_json(folder, "model.safetensors.index.json",
             {{"metadata", {{"total_size", total}}}, {"weight_map", files}});
}

// In the order in which it was written, with one field more.
void write_config(const WorkFolder& folder, const QuantizeJob& job) {
  const fs::path path = (fs::is_directory(job.in) ? job.in : job.in.parent_path()) / "config.json";
  OrderedJson config = OrderedJson::object();
  if (!job.checkpoint.config().empty()) {
    std::ifstream file(path);
    config = OrderedJson::parse(file);
  }
  config["quantization_config"] = job.layout.config(job.plan.ignored);
  write_json(folder, "config.json", config);
}

// Weights in any form are not copied, nor is what is written anew.
bool is_companion(const fs::directory_entry& entry) {
  if (!entry.is_regular_file()) return false;
  const std::string name = entry.path().filename().string();
  if (name.starts_with(".") || name == "config.json" || name.ends_with(".index.json")) return false;
  const std::string end = entry.path().extension().string();
  constexpr std::string_view kWeights[] = {".safetensors", ".bin", ".pt",      ".pth",  ".ckpt",
                                           ".gguf",        ".h5",  ".msgpack", ".onnx", ".ot"};
  return std::find(std::begin(kWeights), std::end(kWeights), end) == std::end(kWeights);
}

std::vector<std::string> copy_companions(const WorkFolder& folder, const fs::path& in) {
  std::vector<std::string> names;
  if (!fs::is_directory(in)) return names;
  for (const auto& entry : fs::directory_iterator(in)) {
    if (!is_companion(entry)) continue;
    const MappedFile source(entry.path());
    NewFile file(folder.path() / entry.path().filename(), folder.notes());
    file.write(source.bytes());
    file.finish();
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// FNV-1a, to tell one header from another.
uint64_t hash_of(std::span<const uint8_t> bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

void add_layers(QuantizeResult& result, const QuantizePlan::Shard& shard, const Json& note) {
  result.bytes += note.at("bytes").get<int64_t>();
  size_t next = 0;
  for (const auto& item : shard.items) {
    if (!item.is_quantized) continue;
    const Json& layer = note.at("layers").at(next++);
    result.layers.push_back({item.tensor->name, item.tensor->shape,
                             static_cast<int64_t>(item.tensor->bytes.size()), item.bytes(),
                             layer.at("error").get<double>()});
  }
}

}  // namespace

Json describe_job(const Checkpoint& checkpoint, const Json& options) {
  Json input = Json::array();
  for (const auto& file : checkpoint.files()) {
    uint64_t header;
    std::memcpy(&header, file->bytes().data(), sizeof(header));  // its length, which reading has checked
    const auto time = fs::last_write_time(file->path()).time_since_epoch().count();
    input.push_back({{"file", file->path().filename().string()},
                     {"bytes", file->bytes().size()},
                     {"time", time},
                     {"header", hash_of(file->bytes().first(sizeof(header) + header))}});
  }
  Json job = options;
  job["input"] = std::move(input);
  job["config"] = checkpoint.config();
  return job;
}

QuantizeResult quantize_checkpoint(const QuantizeJob& job, WorkFolder& folder, const OnTensor& on_tensor) {
  QuantizeResult result;
  Worker worker(job, on_tensor);
  for (const QuantizePlan::Shard& shard : job.plan.shards) {
    Json note = folder.finished(shard.file);
    if (note.is_null()) {
      note = worker.run(shard, folder);
    } else {
      ++result.num_resumed;
      worker.skip(shard);
    }
    add_layers(result, shard, note);
  }
  on_tensor("", worker.bytes_done());
  result.copied = copy_companions(folder, job.in);
  if (job.plan.shards.size() > 1) write_index(folder, job.plan);
  write_config(folder, job);
  folder.finish();
  return result;
}

}  // namespace quantfuse::checkpoint
