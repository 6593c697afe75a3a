// SPDX-License-Identifier: Apache-2.0
#include <initializer_list>
#include <utility>

#include "bench.h"

namespace quantfuse::cli {
namespace {

constexpr int64_t kSize = 4096;

class Suite {
 public:
  ProblemOptions o;  // of the next add()

  void add(const std::string& op, const std::string& prefix = "") {
    Spec spec = spec_from_options(op, o);
    if (!prefix.empty()) std::visit([&](auto& s) { s.name = prefix + " " + s.name; }, spec);
    specs_.push_back(std::move(spec));
  }
  void add_each_m(const std::string& op, std::initializer_list<int64_t> sizes) {
    for (const int64_t m : sizes) {
      o.m = m;
      add(op);
    }
  }
  std::vector<Spec> take() { return std::move(specs_); }

 private:
  std::vector<Spec> specs_;
};

ProblemOptions linear_options(const char* weight, const char* act, const char* act_quant = "none") {
  ProblemOptions o;
  o.n = o.k = kSize;
  o.weight = weight;
  o.act = act;
  o.act_quant = act_quant;
  return o;
}

ProblemOptions quantize_options(const char* format, int64_t rows, int64_t cols, int64_t group) {
  ProblemOptions o;
  o.format = format;
  o.m = rows, o.n = cols, o.group = group;
  return o;
}

struct Layer {
  const char* name;
  int64_t n, k;
  bool is_gated = false;
};

void add_llama_layers(Suite& suite) {
  for (const Layer& layer :
       {Layer{"llama-3-8b qkv", 6144, 4096, false}, Layer{"llama-3-8b o", 4096, 4096, false},
        Layer{"llama-3-8b gate_up", 28672, 4096, true}, Layer{"llama-3-8b down", 4096, 14336, false}}) {
    suite.o = linear_options("int4", "bf16");
    suite.o.n = layer.n, suite.o.k = layer.k, suite.o.is_gated = layer.is_gated;
    if (layer.is_gated) suite.o.activation = "silu";
    suite.add("linear", layer.name);
  }
}

// What comes before a product of 8-bit activations.
void add_producers(Suite& suite) {
  struct Form {
    const char* format;
    int64_t group;
  };
  const std::pair<int64_t, int64_t> sizes[] = {{1, 4096}, {64, 4096}, {4096, 4096}, {16384, 8192}};
  for (const Form& form : {Form{"int8", 0}, Form{"fp8", 0}, Form{"int8", 128}, Form{"fp8", 128}}) {
    for (const auto& [rows, cols] : sizes) {
      suite.o = quantize_options(form.format, rows, cols, form.group);
      suite.add("quantize");
    }
  }
  for (const auto& [rows, cols] : sizes) {
    suite.o = ProblemOptions();
    suite.o.m = rows, suite.o.n = cols;
    suite.o.has_residual = true, suite.o.out_quant = "int8";
    suite.add("rms_norm");
    suite.o.has_residual = false, suite.o.out_quant = "fp8", suite.o.has_static_scale = true;
    suite.add("gated_act");
    suite.o.has_static_scale = false, suite.o.out_group = 128;
    suite.add("gated_act");
    suite.o.is_ungated = true, suite.o.activation = "gelu";
    suite.add("gated_act");
    suite.o = quantize_options("fp8", rows, cols, 128);
    suite.o.hadamard = 128;
    suite.add("quantize");
    suite.o = quantize_options("int4", rows, cols, 128);
    suite.o.hadamard = cols;
    suite.add("quantize");
  }
}

constexpr Layer kLayers[] = {{"8B.qkv", 6144, 4096},   {"8B.o", 4096, 4096},    {"8B.gate_up", 28672, 4096},
                             {"8B.down", 4096, 14336}, {"7B.ffn", 11008, 4096}, {"70B.gate_up", 57344, 8192},
                             {"70B.down", 8192, 28672}};

// Products of codes: a scale for each row of both, and scales of blocks of 128; layers with activations.
void add_products(Suite& suite) {
  for (const Layer& layer : kLayers) {
    for (const char* format : {"int8", "fp8"}) {
      for (const bool is_blocks : {false, true}) {
        suite.o = ProblemOptions();
        suite.o.format = format;
        suite.o.n = layer.n, suite.o.k = layer.k;
        if (is_blocks) suite.o.act_group = 128, suite.o.block = "128x128";
        for (const int64_t m : {16, 64, 256, 1024, 4096}) {
          suite.o.m = m;
          suite.add("scaled_mm", layer.name);
        }
      }
    }
  }
  for (const char* format : {"int8", "fp8"}) {
    suite.o = linear_options(format, "bf16", format);
    suite.o.group = 0;
    suite.o.n = 16384, suite.o.has_bias = true, suite.o.activation = "gelu_tanh";
    suite.add_each_m("linear", {128, 4096});
  }
}

}  // namespace

std::vector<Spec> products_suite() {
  Suite suite;
  add_products(suite);
  return suite.take();
}

std::vector<Spec> cpu_suite() {
  Suite suite;
  suite.o = linear_options("int4", "bf16");
  suite.add_each_m("linear", {1, 4, 16, 64, 256, 1024});
  suite.o.has_bias = true, suite.o.activation = "silu";  // what an epilogue costs
  suite.add_each_m("linear", {1, 256});
  suite.o = linear_options("int4", "f32");
  suite.add_each_m("linear", {1, 4, 16, 64, 256, 1024});
  suite.o = linear_options("int4", "bf16", "int8");
  suite.add_each_m("linear", {1, 16, 64, 256, 1024});
  suite.o = linear_options("int8", "bf16", "int8");
  suite.add_each_m("linear", {1, 64, 256, 1024});
  suite.o.has_bias = true, suite.o.activation = "gelu_tanh";
  suite.add_each_m("linear", {256});
  for (const char* weight : {"int8", "fp8", "mxfp4"}) {
    suite.o = linear_options(weight, "bf16");
    suite.add_each_m("linear", {1, 16, 256});
  }
  suite.o = linear_options("fp8", "bf16", "fp8");
  suite.add_each_m("linear", {1, 16, 256});
  add_llama_layers(suite);

  suite.o = ProblemOptions();
  suite.o.out = "i32";
  suite.add_each_m("scaled_mm", {64, 256, 1024});

  for (const char* format : {"int8", "fp8"}) {
    suite.o = quantize_options(format, kSize, kSize, 0);
    suite.add("quantize");
  }
  suite.o = ProblemOptions();
  suite.o.m = suite.o.n = kSize;
  suite.o.out_quant = "int8";
  suite.add("rms_norm");
  suite.o.out_quant = "fp8";
  suite.add("gated_act");
  return suite.take();
}

std::vector<Spec> producers_suite() {
  Suite suite;
  add_producers(suite);
  return suite.take();
}

std::vector<Spec> h200_suite() {
  Suite suite;
  for (const Layer& layer : kLayers) {
    suite.o = linear_options("int4", "bf16");
    suite.o.n = layer.n, suite.o.k = layer.k;
    for (const int64_t m : {1, 4, 16, 64, 256, 1024, 4096}) {
      suite.o.m = m;
      suite.add("linear", layer.name);
    }
  }
  for (const char* weight : {"int8", "fp8", "mxfp4"}) {
    suite.o = linear_options(weight, "bf16");
    suite.o.n = 28672;
    suite.add_each_m("linear", {1, 16, 64, 1024});
  }
  const std::pair<const char*, int64_t> others[] = {{"nf4", 64}, {"int8", 16}, {"fp4", 16}};  // Q6_K; NVFP4
  for (const auto& [weight, group] : others) {
    suite.o = linear_options(weight, "bf16");
    suite.o.n = 28672, suite.o.group = group;
    suite.add_each_m("linear", {1, 16, 64, 1024});
  }
  suite.o = linear_options("int4", "bf16");
  suite.o.n = 28672, suite.o.is_gated = true, suite.o.activation = "silu";
  suite.add_each_m("linear", {1, 16, 64});
  suite.o = linear_options("int4", "bf16");
  suite.o.has_bias = true, suite.o.activation = "silu";
  suite.add_each_m("linear", {16, 1024});
  add_products(suite);
  add_producers(suite);
  return suite.take();
}

std::vector<Chain> h200_chains() {
  struct Model {
    const char* name;
    std::vector<Layer> layers;
  };
  const Model models[] = {
      {"8B.block", {{"", 6144, 4096}, {"", 4096, 4096}, {"", 28672, 4096, true}, {"", 4096, 14336}}},
      {"70B.block", {{"", 10240, 8192}, {"", 8192, 8192}, {"", 57344, 8192, true}, {"", 8192, 28672}}}};
  std::vector<Chain> chains;
  for (const Model& model : models) {
    for (const int64_t m : {1, 16}) {
      Suite suite;
      for (const Layer& layer : model.layers) {
        suite.o = linear_options("int4", "bf16");
        suite.o.m = m, suite.o.n = layer.n, suite.o.k = layer.k, suite.o.is_gated = layer.is_gated;
        if (layer.is_gated) suite.o.activation = "silu";
        suite.add("linear");
      }
      chains.push_back(
          {std::string(model.name) + " (qkv, o, gate_up with SwiGLU, down) " + "m=" + std::to_string(m),
           suite.take()});
    }
  }
  return chains;
}

}  // namespace quantfuse::cli
