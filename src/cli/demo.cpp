// SPDX-License-Identifier: Apache-2.0
//
// `quantfuse demo`: one layer of a language model in each scheme: how small, how exact, how fast, by which kernel.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "bench.h"
#include "commands.h"
#include "library.h"
#include "tensor.h"

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

uint16_t to_bf16(float value) {  // of finite numbers, to nearest even
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void check_status(qf_status status) {
  if (status != QF_OK) throw std::runtime_error(qf_last_error());
}

// The layer before it is quantized, and what it gives.
struct Layer {
  int64_t n, k;
  Tensor weight, x;            // float32 [n, k]; bfloat16 [tokens, k]
  std::vector<float> exact_y;  // [tokens, n]

  // Student's t with 5 degrees of freedom has the long tails of trained weights; a hundredth of the inputs are ten times
  // as large as the others, as in the hidden states of real models.
  Layer(int64_t n, int64_t k) : n(n), k(k) {
    weight = Tensor(kF32, n, k).allocated();
    x = Tensor(kBf16, kTokens, k).allocated();
    parallel(n, [&](int64_t row) {
      std::mt19937 random(static_cast<uint32_t>(row));
      std::student_t_distribution<float> heavy(5.0f);
      for (int64_t c = 0; c < k; ++c) weight.data<float>()[row * k + c] = 0.02f * heavy(random);
    });
    std::mt19937 random(12345);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kTokens * k; ++i) {
      x.data<uint16_t>()[i] = to_bf16(normal(random) * (i % k % 100 == 7 ? 10.0f : 1.0f));
    }
    exact_y.resize(static_cast<size_t>(kTokens * n));
    parallel(n, [&](int64_t row) {
      std::vector<float> inputs(static_cast<size_t>(k));
      for (int64_t t = 0; t < kTokens; ++t) exact_y[static_cast<size_t>(t * n + row)] = dot(t, row);
    });
  }

 private:
  float dot(int64_t token, int64_t row) const {
    const uint16_t* a = x.data<uint16_t>() + token * k;
    const float* w = weight.data<float>() + row * k;
    constexpr int kLanes = 16;  // sums side by side, which a compiler makes a vector of
    float sums[kLanes] = {};
    int64_t c = 0;
    for (; c + kLanes <= k; c += kLanes) {
      for (int j = 0; j < kLanes; ++j) sums[j] += from_bf16(a[c + j]) * w[c + j];
    }
    double total = 0;
    for (const float s : sums) total += s;
    for (; c < k; ++c) total += from_bf16(a[c]) * w[c];
    return static_cast<float>(total);
  }

  template <class Work>
  static void parallel(int64_t count, Work work) {
    const int64_t threads = qf_get_num_threads();
    std::vector<std::thread> pool;
    for (int64_t t = 0; t < threads; ++t) {
      pool.emplace_back([=] {
        for (int64_t i = count * t / threads; i < count * (t + 1) / threads; ++i) work(i);
      });
    }
    for (std::thread& thread : pool) thread.join();
  }
};

// The layer in one scheme, with as many copies of the packed weight as make every call find it in memory, not in a cache.
class QuantizedLayer {
 public:
  QuantizedLayer(const Layer& layer, const cases::LinearSpec& spec, double cache_bytes)
      : layer_(layer), spec_(spec) {
    const cases::WeightSpec& w = spec.weight;
    codes_ = codes_tensor(w.format, layer.n, layer.k).allocated();
    scale_ = block_tensor(w.has_e8m0_scale ? kE8m0 : kF32, w.block, layer.n, layer.k).allocated();
    const qf_quantize_args quantize = {layer.weight.get(), w.format,     w.block, QF_SCALE_DYNAMIC,
                                       codes_.get(),       scale_.get(), nullptr, nullptr};
    call_with_workspace(qf_quantize, qf_quantize_workspace, quantize, nullptr);

    view_ = {w.format, layer.n, layer.k, w.block, codes_.get(), scale_.get(), nullptr, nullptr, 0, nullptr};
    uint64_t packed_bytes = 0;
    check_status(qf_weight_packed_bytes(&view_, {QF_CPU, 0}, &packed_bytes));
    const int copies = copies_beyond_cache(static_cast<double>(packed_bytes), cache_bytes);
    for (int i = 0; i < copies; ++i) {
      packed_.push_back(Tensor::vector(kU8, static_cast<int64_t>(packed_bytes)).allocated());
      if (i > 0) {
        std::memcpy(packed_[i].data<uint8_t>(), packed_[0].data<uint8_t>(), packed_bytes);
        continue;
      }
      view_.packed = packed_[0].get();
      check_status(qf_weight_pack(&view_, nullptr));
    }
  }

  int copies() const { return static_cast<int>(packed_.size()); }
  size_t bytes() const { return codes_.bytes() + scale_.bytes(); }

  // Everything of a call that does not change from one to the next.
  class Call {
   public:
    Call(QuantizedLayer& layer, int64_t tokens) : layer_(layer), x_(kBf16, tokens, layer.layer_.k), y_(kBf16, tokens, layer.layer_.n) {
      x_ = std::move(x_).allocated();
      y_ = std::move(y_).allocated();
      std::memcpy(x_.data<void>(), layer.layer_.x.data<void>(), x_.bytes());
      args_.x = x_.get();
      args_.act_format = layer.spec_.act_format;
      args_.weight = layer.view_;
      args_.y = y_.get();
      uint64_t bytes = 0;
      check_status(qf_linear_workspace(&args_, nullptr, &bytes));
      workspace_ = Tensor::vector(kU8, static_cast<int64_t>(bytes)).allocated();
    }
    void run(int copy) {
      args_.weight.packed = layer_.packed_[static_cast<size_t>(copy)].get();
      qf_call call = {};
      call.workspace = workspace_.data<void>();
      call.workspace_bytes = workspace_.bytes();
      check_status(qf_linear(&args_, &call));
    }
    const uint16_t* result() const { return y_.data<uint16_t>(); }

   private:
    QuantizedLayer& layer_;
    Tensor x_, y_, workspace_;
    qf_linear_args args_ = {};
  };

  // || y - exact || / || exact ||
  double error() {
    Call call(*this, kTokens);
    call.run(0);
    double difference = 0, norm = 0;
    for (size_t i = 0; i < layer_.exact_y.size(); ++i) {
      const double exact = layer_.exact_y[i], d = from_bf16(call.result()[i]) - exact;
      difference += d * d;
      norm += exact * exact;
    }
    return std::sqrt(difference / norm);
  }

  Timing time(int64_t tokens) {
    Call call(*this, tokens);
    let_idle_threads_sleep();
    return measure([&](int copy) { call.run(copy); }, copies(), kSeconds);
  }

 private:
  template <class Args, class Run, class Workspace>
  static void call_with_workspace(Run run, Workspace workspace, const Args& args, const char* kernel) {
    qf_call call = {};
    call.kernel = kernel;
    uint64_t bytes = 0;
    check_status(workspace(&args, &call, &bytes));
    const Tensor memory = Tensor::vector(kU8, static_cast<int64_t>(bytes)).allocated();
    call.workspace = memory.data<void>();
    call.workspace_bytes = bytes;
    check_status(run(&args, &call));
  }

  const Layer& layer_;
  cases::LinearSpec spec_;
  Tensor codes_, scale_;
  std::vector<Tensor> packed_;
  qf_weight view_ = {};
};

cases::LinearSpec spec_of(const Scheme& scheme, const Layer& layer, int64_t m) {
  ProblemOptions o;
  o.weight = scheme.weight, o.act_quant = scheme.act_quant;
  o.m = m, o.n = layer.n, o.k = layer.k;
  return std::get<cases::LinearSpec>(spec_from_options("linear", o));
}

// The kernel that runs for this shape, against the reference kernel, element by element within the derived bound.
std::string check_kernel(const cases::LinearSpec& spec) {
  const cases::CasePtr c = cases::make_case(spec);
  c->make({QF_CPU, 0}, /*seed=*/1, /*copies=*/1);
  check_status(c->run(nullptr, 0, nullptr));
  return c->check();
}

std::string kernel_of(const Spec& spec) {
  return Json::parse(explain_spec(spec, {QF_CPU, 0}, nullptr, false))["chosen"].get<std::string>();
}

std::string speedup(const Timing& timing, const std::vector<BaselineTiming>& baselines) {
  const BaselineTiming* best = quickest(baselines);
  return best ? fmt::format("{:.1f}x", best->timing.us / timing.us) : "";
}

std::string layer_name(int64_t n, int64_t k) {
  if (n == 4096 && k == 4096) return "the attention output projection of Llama-3-8B";
  if (n == 4096 && k == 14336) return "the down projection of Llama-3-8B";
  return "a layer";
}

// The CUDA operation of this version, on every GPU: activations quantized per token.
bool show_cuda(Json& json) {
  const Json gpus = library_info()["cuda"]["devices"];
  bool is_all_right = true;
  for (int id = 0; id < static_cast<int>(gpus.size()); ++id) {
    const Machine machine = measure_machine({QF_CUDA, id}, qf_get_num_threads());
    fmt::print("\n{}: 4096 tokens of 4096 bfloat16 activations, quantized per token\n\n", styled(Style::bold, machine.device_name));
    Table table({{"format", Table::Align::left, 6}, {"us"}, {"GB/s", Table::Align::right, 6}, {"% of read bandwidth"},
                 {"check", Table::Align::left}, {"kernel", Table::Align::left}});
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
      table.print_row({format, fmt::format("{:.1f}", row.timing.us), fmt::format("{:.0f}", row.bytes / row.timing.us / 1e3),
                       fmt::format("{:.0f}%", 100 * row.limit_us / row.timing.us), wrong.empty() ? "ok" : "WRONG", row.kernel},
                      wrong.empty() ? Style::plain : Style::bad);
      Json entry = row_json(row);
      entry["check"] = wrong;
      json["cuda"].push_back(std::move(entry));
    }
  }
  return is_all_right;
}

}  // namespace

int run_demo(const DemoOptions& options) {
  JsonFile file(options.json_path);
  const Json cpu = library_info()["cpu"];
  const double cache_bytes = std::max(cpu["l3_bytes"].get<double>(), cpu["l2_bytes"].get<double>());
  const double float_bytes = 4.0 * static_cast<double>(options.n) * static_cast<double>(options.k);

  fmt::print("{}: {} outputs, {} inputs, {} in float32.\n", styled(Style::bold, layer_name(options.n, options.k)), options.n,
             options.k, human_bytes(float_bytes));
  fmt::print("The weights are synthetic (random, heavy-tailed, with outlying activations): no model is downloaded.\n");
  fmt::print("{}, {}, {} threads.\n\n", cpu["model"].get<std::string>(), cpu["isa"].get<std::string>(), qf_get_num_threads());

  Progress progress(std::size(kSchemes) + 2);
  progress.step("making the layer");
  const Layer layer(options.n, options.k);
  progress.step("timing float32");
  Baselines baselines(qf_get_num_threads(), cache_bytes, kSeconds);
  const auto& float_1 = baselines.measure(Arithmetic::f32, {1, layer.n, layer.k});
  const auto& float_m = baselines.measure(Arithmetic::f32, {kTokens, layer.n, layer.k});
  progress.clear();

  Table table({{"weight", Table::Align::left, 36}, {"size", Table::Align::right, 8}, {"of f32", Table::Align::right},
               {"error", Table::Align::right, 6}, {"1 token", Table::Align::right, 9}, {"speed-up", Table::Align::right},
               {fmt::format("{} tokens", kTokens), Table::Align::right, 9}, {"speed-up", Table::Align::right},
               {"check", Table::Align::left, 5}, {"kernel", Table::Align::left}});
  const auto us_text = [](double us) { return fmt::format("{:.0f} us", us); };
  table.print_titles();
  const BaselineTiming *best_1 = quickest(float_1), *best_m = quickest(float_m);
  if (best_1 && best_m) {
    table.print_row({"float32", human_bytes(float_bytes), "100%", "", us_text(best_1->timing.us), "1.0x",
                     us_text(best_m->timing.us), "1.0x", "", best_1->name + ", " + best_m->name}, Style::dim);
  }

  Json json;
  json["layer"] = {{"n", layer.n}, {"k", layer.k}, {"float_bytes", float_bytes}, {"weights", "synthetic"}};
  json["schemes"] = Json::array();
  bool is_all_right = true;
  for (const Scheme& scheme : kSchemes) {
    progress.step(scheme.title);
    const cases::LinearSpec one = spec_of(scheme, layer, 1), many = spec_of(scheme, layer, kTokens);
    QuantizedLayer quantized(layer, one, cache_bytes);
    const Timing us_1 = quantized.time(1), us_m = quantized.time(kTokens);
    const double error = quantized.error();
    const std::string wrong = check_kernel(one) + check_kernel(many);
    const std::string kernel_1 = kernel_of(one), kernel_m = kernel_of(many);
    is_all_right = is_all_right && wrong.empty();
    progress.clear();
    table.print_row({scheme.title, human_bytes(static_cast<double>(quantized.bytes())),
                     fmt::format("{:.0f}%", 100 * static_cast<double>(quantized.bytes()) / float_bytes), fmt::format("{:.2f}%", 100 * error),
                     us_text(us_1.us), speedup(us_1, float_1), us_text(us_m.us), speedup(us_m, float_m),
                     wrong.empty() ? "ok" : "WRONG", kernel_1 == kernel_m ? kernel_1 : kernel_1 + ", " + kernel_m},
                    wrong.empty() ? Style::plain : Style::bad);
    if (!wrong.empty()) fmt::print(stderr, "quantfuse: {}: {}\n", scheme.title, wrong);
    Json entry = {{"scheme", scheme.title}, {"bytes", quantized.bytes()}, {"error", error}, {"check", wrong}};
    entry["kernels"] = {{"1", kernel_1}, {std::to_string(kTokens), kernel_m}};
    entry["us"] = {{"1", us_1.us}, {std::to_string(kTokens), us_m.us}};
    json["schemes"].push_back(std::move(entry));
  }
  fmt::print("\nerror    of the layer's output against float32, ||y - y32|| / ||y32||, {} tokens in bfloat16\n", kTokens);
  fmt::print("speed-up against {}, the weights coming from memory each time\n",
             best_1 ? "the quicker of OpenBLAS and oneDNN in float32" : "nothing: neither OpenBLAS nor oneDNN was found");
  fmt::print("check    every output against the reference kernel, within a derived bound\n");

  for (const auto& b : float_1) json["float32_us"]["1"][b.name] = b.timing.us;
  for (const auto& b : float_m) json["float32_us"][std::to_string(kTokens)][b.name] = b.timing.us;
  is_all_right = show_cuda(json) && is_all_right;
  file.write(json);
  return is_all_right ? kSuccess : kCheckFailed;
}

}  // namespace quantfuse::cli
