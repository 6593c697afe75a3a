// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse bench checkpoint`: how fast checkpoints are quantized and imported, beside how fast this machine
// copies. The weights are those of one layer of Llama-3-8B in BF16 (436 MB), in a folder for temporary files,
// page cache warm.
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>

#include "bench.h"
#include "checkpoint/import.h"
#include "checkpoint/parallel.h"
#include "checkpoint/quantize.h"
#include "commands.h"
#include "output.h"

namespace quantfuse::cli {
namespace {

using namespace checkpoint;
namespace fs = std::filesystem;
using checkpoint::Tensor;

constexpr int kRuns = 5;  // of which the quickest counts: a copy rate is what the machine can do
constexpr int64_t kPiece = 1 << 20;

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (fs::temp_directory_path() / "quantfuse-bench-XXXXXX").string();
    if (!mkdtemp(path.data()))
      throw UsageError("cannot make a folder in " + fs::temp_directory_path().string());
    path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Of the quickest run: on a machine that others use too, the processors' time tells more than the clock's.
struct Elapsed {
  double seconds = INFINITY, cpu_seconds = INFINITY;
};

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

Elapsed time_of(const std::function<void()>& work) {
  Elapsed best;
  for (int run = 0; run < kRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    const double cpu_start = cpu_seconds();
    work();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best.seconds = std::min(best.seconds, taken.count());
    best.cpu_seconds = std::min(best.cpu_seconds, cpu_seconds() - cpu_start);
  }
  return best;
}

// ---- Files ----

struct Weight {
  const char* name;
  int64_t n, k;
};
constexpr Weight kLayer[] = {{"self_attn.q_proj", 4096, 4096}, {"self_attn.k_proj", 1024, 4096},
                             {"self_attn.v_proj", 1024, 4096}, {"self_attn.o_proj", 4096, 4096},
                             {"mlp.gate_proj", 14336, 4096},   {"mlp.up_proj", 14336, 4096},
                             {"mlp.down_proj", 4096, 14336}};

// Bytes that repeat every prime number of elements, so that no two rows are alike.
void write_repeated(NewFile& file, std::span<const uint8_t> period, int64_t size) {
  for (int64_t written = 0; written < size;) {
    const int64_t next = std::min(size - written, static_cast<int64_t>(period.size()));
    file.write(period.first(static_cast<size_t>(next)));
    written += next;
  }
}

void write_layer(const fs::path& path) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  std::vector<float> numbers(999983);
  for (float& number : numbers) number = normal(rng);
  std::vector<uint8_t> period(numbers.size() * sizeof(bf16));
  store_floats(numbers, Type::bf16, period.data());

  NewFile file(path);
  std::vector<TensorHeader> headers;
  for (const Weight& w : kLayer) {
    headers.push_back({std::string("model.layers.0.") + w.name + ".weight", Type::bf16, {w.n, w.k}});
  }
  write_safetensors_header(file, headers);
  for (const Weight& w : kLayer) write_repeated(file, period, w.n * w.k * static_cast<int64_t>(sizeof(bf16)));
  file.finish();
}

// One 4-bit weight [4096, 14336] in groups of 128, of random words, as a tool would save it.
void write_packed(const fs::path& path, const std::vector<TensorHeader>& headers) {
  std::mt19937 rng(1);
  std::vector<uint32_t> words(999983);
  for (uint32_t& word : words) word = rng();
  std::vector<uint8_t> ones(1 << 16);
  store_floats(std::vector<float>(ones.size() / sizeof(f16), 1.0f), Type::f16, ones.data());

  NewFile file(path);
  write_safetensors_header(file, headers);
  for (const TensorHeader& header : headers) {
    const int64_t size = declared_bytes(header.name, header.type, header.shape);
    if (header.type == Type::i64) {
      const int64_t shape[2] = {4096, 14336};
      file.write({reinterpret_cast<const uint8_t*>(shape), sizeof(shape)});
    } else {
      const auto* bytes = reinterpret_cast<const uint8_t*>(words.data());
      write_repeated(file, header.type == Type::f16 ? ones : std::span(bytes, words.size() * 4), size);
    }
  }
  file.finish();
}

struct PackedFormat {
  const char* name;
  std::vector<TensorHeader> headers;
  StatedFields config;
};

std::vector<PackedFormat> packed_formats() {
  constexpr int64_t n = 4096, k = 14336, groups = k / 128;
  return {{"awq",
           {{"m.qweight", Type::i32, {k, n / 8}},
            {"m.qzeros", Type::i32, {groups, n / 8}},
            {"m.scales", Type::f16, {groups, n}}},
           {{"quant_method", "awq"}, {"bits", "4"}, {"group_size", "128"}}},
          {"gptq",
           {{"m.qweight", Type::i32, {k / 8, n}},
            {"m.qzeros", Type::i32, {groups, n / 8}},
            {"m.scales", Type::f16, {groups, n}}},
           {{"quant_method", "gptq"}, {"bits", "4"}, {"group_size", "128"}, {"checkpoint_format", "gptq"}}},
          {"compressed-tensors",
           {{"m.weight_shape", Type::i64, {2}},
            {"m.weight_packed", Type::i32, {n, k / 8}},
            {"m.weight_scale", Type::f16, {n, groups}}},
           {{"quant_method", "compressed-tensors"},
            {"format", "pack-quantized"},
            {"config_groups.g.targets", R"(["Linear"])"},
            {"config_groups.g.weights", R"({"num_bits": 4, "strategy": "group", "group_size": 128})"}}}};
}

// ---- Work ----

void copy_in_memory(std::span<const uint8_t> from, std::vector<uint8_t>& to) {
  for_each_piece(static_cast<int64_t>(from.size()) / kPiece, num_worker_threads(), [&](int, int64_t piece) {
    std::memcpy(to.data() + piece * kPiece, from.data() + piece * kPiece, kPiece);
  });
}

// The way `quantize` writes: all threads, to the disk before the file has its name.
void copy_file(std::span<const uint8_t> from, const fs::path& to) {
  NewFile file(to);
  for_each_piece(static_cast<int64_t>(from.size()) / kPiece, num_worker_threads(), [&](int, int64_t piece) {
    file.write_at(piece * kPiece, from.subspan(static_cast<size_t>(piece * kPiece), kPiece));
  });
  file.finish();
}

void quantize_once(const Checkpoint& checkpoint, const fs::path& in, const fs::path& out,
                   const std::string& scheme, Method method) {
  const auto layout = compressed_tensors_layout(scheme_from({scheme, std::nullopt, false}));
  const QuantizePlan plan = plan_quantization(checkpoint, {}, *layout, INT64_MAX);
  fs::remove_all(out);
  WorkFolder folder(out, describe_job(checkpoint, checkpoint::Json::object()));
  quantize_checkpoint({checkpoint, *layout, plan, method, in}, folder, [](const std::string&, int64_t) {});
}

class Report {
 public:
  Report()
      : table_({{"case", Table::Align::left, 34},
                {"ms", Table::Align::right, 8},
                {"CPU ms", Table::Align::right, 8},
                {"GB/s", Table::Align::right, 6},
                {"% of copied file"},
                {"% of memory copy"}}) {
    table_.print_titles();
  }

  // Rates are of the bytes that are read.
  double add(const std::string& name, const Elapsed& time, double bytes) {
    const double rate = bytes / time.seconds / 1e9;
    const auto share = [&](double of) { return of > 0 ? fmt::format("{:.0f}", 100 * rate / of) : "-"; };
    table_.print_row({name, fmt::format("{:.1f}", 1e3 * time.seconds),
                      fmt::format("{:.1f}", 1e3 * time.cpu_seconds), fmt::format("{:.2f}", rate),
                      share(file_rate), share(memory_rate)});
    rows_.push_back({{"case", name},
                     {"seconds", time.seconds},
                     {"cpu_seconds", time.cpu_seconds},
                     {"bytes", bytes},
                     {"gbps", rate}});
    return rate;
  }
  const Json& rows() const { return rows_; }

  double memory_rate = 0, file_rate = 0;  // once they are known

 private:
  Table table_;
  Json rows_ = Json::array();
};

}  // namespace

int run_checkpoint_bench(const BenchOptions& options) {
  JsonFile json(options.json_path);
  if (options.threads > 0) qf_set_num_threads(options.threads);
  const TemporaryFolder folder;
  const fs::path in = folder.path() / "model.safetensors";
  write_layer(in);
  const Checkpoint checkpoint(in);
  const auto bytes = checkpoint.files()[0]->bytes();
  const auto size = static_cast<double>(bytes.size());
  fmt::print("one layer of Llama-3-8B, {} of BF16, in {}, {} threads\n\n", human_bytes(size),
             folder.path().string(), num_worker_threads());

  Report report;
  {
    std::vector<uint8_t> copy(bytes.size());
    report.memory_rate = report.add("copy in memory", time_of([&] { copy_in_memory(bytes, copy); }), size);
  }
  report.file_rate =
      report.add("copy the file", time_of([&] { copy_file(bytes, folder.path() / "copy"); }), size);
  fs::remove(folder.path() / "copy");
  const fs::path out = folder.path() / "out";
  for (const char* scheme : {"int4", "int8", "fp8", "fp8-block", "mxfp4", "mxfp8", "w8a8-int8"}) {
    report.add(std::string("quantize rtn ") + scheme,
               time_of([&] { quantize_once(checkpoint, in, out, scheme, Method::rtn); }), size);
  }
  fs::remove_all(out);

  for (const PackedFormat& format : packed_formats()) {
    const fs::path path = folder.path() / (std::string(format.name) + ".safetensors");
    write_packed(path, format.headers);
    const Checkpoint packed(path);
    const Import import = import_checkpoint(packed, format.config);
    const double packed_bytes = 4096.0 * 14336 / 2;
    report.add(std::string("import int4 of ") + format.name,
               time_of([&] { import.layers.at(0)->canonical(); }), packed_bytes);
  }
  json.write({{"threads", num_worker_threads()}, {"rows", report.rows()}});
  return kSuccess;
}

}  // namespace quantfuse::cli
