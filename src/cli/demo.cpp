// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse demo`: one layer of a language model in each scheme: how small, how exact, how fast, by which
// kernel.
#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "bench.h"
#include "commands.h"
#include "demo_layer.h"
#include "library.h"

namespace quantfuse::cli {
namespace {

constexpr int64_t kTokens = 32;
constexpr double kSeconds = 0.25;

struct Scheme {
  const char* title;
  const char* weight;
  const char* act_quant;
};
constexpr Scheme kSchemes[] = {
    {"INT8", "int8", "none"},
    {"INT8, INT8 activations", "int8", "int8"},
    {"INT4 groups of 128", "int4", "none"},
    {"INT4 groups of 128, INT8 activations", "int4", "int8"},
    {"FP8 E4M3", "fp8", "none"},
    {"MXFP4", "mxfp4", "none"},
};

void check_status(qf_status status) {
  if (status != QF_OK) throw std::runtime_error(qf_last_error());
}

cases::LinearSpec spec_of(const Scheme& scheme, const FloatLayer& layer, int64_t m) {
  ProblemOptions o;
  o.weight = scheme.weight, o.act_quant = scheme.act_quant;
  o.m = m, o.n = layer.n, o.k = layer.k;
  return std::get<cases::LinearSpec>(spec_from_options("linear", o));
}

// The kernel that runs for this shape, on random numbers, against the reference kernel: element by element,
// within the derived bound.
std::string check_kernel(const cases::LinearSpec& spec) {
  const cases::CasePtr c = cases::make_case(spec);
  c->make({QF_CPU, 0}, /*seed=*/1, /*copies=*/1);
  check_status(c->run(nullptr, 0, nullptr));
  return c->check();
}

std::string kernel_of(const Spec& spec) {
  return Json::parse(explain_spec(spec, {QF_CPU, 0}, nullptr, false))["chosen"].get<std::string>();
}

std::string layer_name(int64_t n, int64_t k) {
  if (n == 4096 && k == 4096) return "The attention output projection of Llama-3-8B";
  if (n == 4096 && k == 14336) return "The down projection of Llama-3-8B";
  return "A layer";
}

// The CUDA operation of this version, on every GPU: activations quantized per token.
bool show_cuda(Json& json) {
  const Json gpus = library_info()["cuda"]["devices"];
  bool is_all_right = true;
  for (int id = 0; id < static_cast<int>(gpus.size()); ++id) {
    const Machine machine = measure_machine({QF_CUDA, id}, qf_get_num_threads());
    fmt::print("\n{}: 4096 tokens of 4096 bfloat16 activations, quantized per token\n\n",
               styled(Style::bold, machine.device_name));
    Table table({{"format", Table::Align::left, 6},
                 {"us"},
                 {"GB/s", Table::Align::right, 6},
                 {"% of read bandwidth"},
                 {"check", Table::Align::left},
                 {"kernel", Table::Align::left}});
    table.print_titles();
    for (const char* format : {"int8", "fp8"}) {
      ProblemOptions o;
      o.format = format, o.m = o.n = 4096;
      const Spec spec = spec_from_options("quantize", o);
      const Row row = measure_row(spec, machine, {kSeconds, "", nullptr});
      const cases::CasePtr c = case_from_spec(spec);
      c->make(machine.device, 1, 1);
      check_status(c->run(nullptr, 0, nullptr));
      const std::string wrong = c->check();
      is_all_right = is_all_right && wrong.empty();
      table.print_row(
          {format, fmt::format("{:.1f}", row.timing.us),
           fmt::format("{:.0f}", row.bytes / row.timing.us / 1e3),
           fmt::format("{:.0f}%", 100 * row.roofline()), wrong.empty() ? "ok" : "WRONG", row.kernel},
          wrong.empty() ? Style::plain : Style::bad);
      Json entry = row_json(row);
      entry["check"] = wrong;
      json["cuda"].push_back(std::move(entry));
    }
  }
  return is_all_right;
}

// What one scheme makes of the layer.
struct Result {
  const Scheme& scheme;
  size_t bytes;
  double error;
  Timing one, many;  // one token, kTokens of them
  std::string kernel_one, kernel_many;
  std::string wrong;  // "" if the check went well
};

Result measure_scheme(const Scheme& scheme, const FloatLayer& layer, double cache_bytes) {
  const cases::LinearSpec one = spec_of(scheme, layer, 1), many = spec_of(scheme, layer, kTokens);
  const QuantizedLayer quantized(layer, one, cache_bytes);
  Result r{scheme, quantized.bytes(), quantized.error(), {}, {}, kernel_of(one), kernel_of(many), ""};
  r.one = quantized.time(1, kSeconds);
  r.many = quantized.time(kTokens, kSeconds);
  r.wrong = check_kernel(one);
  if (r.wrong.empty()) r.wrong = check_kernel(many);
  return r;
}

Json result_json(const Result& r) {
  const std::string many = std::to_string(kTokens);
  Json json = {{"scheme", r.scheme.title}, {"bytes", r.bytes}, {"error", r.error}, {"check", r.wrong}};
  json["kernels"] = {{"1", r.kernel_one}, {many, r.kernel_many}};
  json["us"] = {{"1", r.one.us}, {many, r.many.us}};
  return json;
}

// The table of all schemes, with float32 for its first line.
class Report {
 public:
  Report(double float_bytes, const std::vector<BaselineTiming>& float_one,
         const std::vector<BaselineTiming>& float_many)
      : float_bytes_(float_bytes),
        float_one_(quickest(float_one)),
        float_many_(quickest(float_many)),
        table_(columns()) {
    table_.print_titles();
    if (!float_one_ || !float_many_) return;
    table_.print_row(
        {"float32", human_bytes(float_bytes), "1x", "2x", "", us_text(float_one_->timing), "1.0x",
         us_text(float_many_->timing), "1.0x", "", float_one_->name + ", " + float_many_->name},
        Style::dim);
  }

  void print(const Result& r) const {
    const auto bytes = static_cast<double>(r.bytes);
    const bool is_same_kernel = r.kernel_one == r.kernel_many;
    table_.print_row({r.scheme.title, human_bytes(bytes), fmt::format("{:.2f}x", bytes / float_bytes_),
                      fmt::format("{:.2f}x", 2 * bytes / float_bytes_), fmt::format("{:.1f}%", 100 * r.error),
                      us_text(r.one), speedup(float_one_, r.one), us_text(r.many),
                      speedup(float_many_, r.many), r.wrong.empty() ? "ok" : "WRONG",
                      is_same_kernel ? r.kernel_one : r.kernel_one + ", " + r.kernel_many},
                     r.wrong.empty() ? Style::plain : Style::bad);
    if (!r.wrong.empty()) fmt::print(stderr, "quantfuse: {}: {}\n", r.scheme.title, r.wrong);
  }

  void print_legend() const {
    fmt::print(
        "\nerror     of the layer's output against float32: ||y - y32|| / ||y32||, {} tokens in bfloat16\n",
        kTokens);
    fmt::print("speed-up  against {}, the weights coming from memory each time\n",
               float_one_ ? "the quicker of OpenBLAS and oneDNN in float32"
                          : "nothing: OpenBLAS and oneDNN were not found");
    fmt::print(
        "check     every output of these kernels, on random data of this shape, against the reference "
        "kernel\n");
  }

 private:
  static std::vector<Table::Column> columns() {
    using Align = Table::Align;
    return {{"weight", Align::left, 36},
            {"size", Align::right, 8},
            {"of f32"},
            {"of bf16"},
            {"error", Align::right, 6},
            {"1 token", Align::right, 9},
            {"speed-up"},
            {fmt::format("{} tokens", kTokens), Align::right, 9},
            {"speed-up"},
            {"check", Align::left},
            {"kernel", Align::left}};
  }
  static std::string us_text(const Timing& timing) { return fmt::format("{:.0f} us", timing.us); }
  static std::string speedup(const BaselineTiming* baseline, const Timing& timing) {
    return baseline ? fmt::format("{:.1f}x", baseline->timing.us / timing.us) : "";
  }

  double float_bytes_;
  const BaselineTiming *float_one_, *float_many_;
  Table table_;
};

}  // namespace

int run_demo(const DemoOptions& options) {
  JsonFile file(options.json_path);
  const Json cpu = library_info()["cpu"];
  const double cache_bytes = std::max(cpu["l3_bytes"].get<double>(), cpu["l2_bytes"].get<double>());
  const double float_bytes = 4.0 * static_cast<double>(options.n) * static_cast<double>(options.k);

  fmt::print("{}: {} outputs, {} inputs, {} in float32\n",
             styled(Style::bold, layer_name(options.n, options.k)), options.n, options.k,
             human_bytes(float_bytes));
  fmt::print(
      "The weights are synthetic (random, heavy-tailed, with outlying activations): no model is "
      "downloaded.\n");
  fmt::print("{}, {}, {} threads\n\n", cpu["model"].get<std::string>(), cpu["isa"].get<std::string>(),
             qf_get_num_threads());

  Progress progress(std::size(kSchemes) + 2);
  progress.step("making the layer");
  const FloatLayer layer(options.n, options.k, kTokens);
  progress.step("timing float32");
  const Baselines baselines(qf_get_num_threads(), cache_bytes);
  const auto float_one = baselines.measure(Arithmetic::f32, {1, layer.n, layer.k}, kSeconds);
  const auto float_many = baselines.measure(Arithmetic::f32, {kTokens, layer.n, layer.k}, kSeconds);

  Json json;
  json["layer"] = {{"n", layer.n}, {"k", layer.k}, {"float_bytes", float_bytes}, {"weights", "synthetic"}};
  for (const auto& b : float_one) json["float32_us"]["1"][b.name] = b.timing.us;
  for (const auto& b : float_many) json["float32_us"][std::to_string(kTokens)][b.name] = b.timing.us;
  json["schemes"] = Json::array();

  progress.clear();
  const Report report(float_bytes, float_one, float_many);
  bool is_all_right = true;
  for (const Scheme& scheme : kSchemes) {
    progress.step(scheme.title);
    const Result result = measure_scheme(scheme, layer, cache_bytes);
    progress.clear();
    report.print(result);
    json["schemes"].push_back(result_json(result));
    is_all_right = is_all_right && result.wrong.empty();
  }
  report.print_legend();
  is_all_right = show_cuda(json) && is_all_right;
  file.write(json);
  return is_all_right ? kSuccess : kCheckFailed;
}

}  // namespace quantfuse::cli
