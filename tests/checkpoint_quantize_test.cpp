// SPDX-License-Identifier: Apache-2.0
//
// Quantizing checkpoints: what is chosen, what is written (read back by the importers, against the library's
// own quantization), how work goes on after it was stopped, and what is left behind when it fails.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/quantize.h"
#include "checkpoint_files.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

// ---- Inputs ----

std::vector<float> normal_numbers(int64_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 0.05f);
  std::vector<float> numbers(static_cast<size_t>(count));
  for (float& number : numbers) number = normal(rng);
  return numbers;
}

NewTensor float_tensor(const std::string& name, std::vector<int64_t> shape, Type type, unsigned seed = 1) {
  int64_t count = 1;
  for (const int64_t dim : shape) count *= dim;
  Bytes bytes(static_cast<size_t>(count * type_info(type).bytes));
  store_floats(normal_numbers(count, seed), type, bytes.data());
  return {{name, type, std::move(shape)}, std::move(bytes)};
}

struct Work {
  Scheme scheme;
  bool is_own_layout = false;
  Method method = Method::rtn;
  Selection selection = {};
  int64_t shard_bytes = INT64_MAX;
  Json options = Json::object();
};

Work run_of(const std::string& scheme, const std::string& group = "", bool is_asymmetric = false) {
  SchemeOptions options{scheme, std::nullopt, is_asymmetric};
  if (!group.empty()) options.group = group;
  return {scheme_from(options)};
}

QuantizeResult quantize(
    const fs::path& in, const fs::path& out, const Work& run,
    const OnTensor& on_tensor = [](const std::string&, int64_t) {}) {
  const Checkpoint checkpoint(in);
  const auto layout =
      run.is_own_layout ? quantfuse_layout(run.scheme) : compressed_tensors_layout(run.scheme);
  const QuantizePlan plan = plan_quantization(checkpoint, run.selection, *layout, run.shard_bytes);
  WorkFolder folder(out, describe_job(checkpoint, run.options));
  return quantize_checkpoint({checkpoint, *layout, plan, run.method, in}, folder, on_tensor);
}

std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

// ---- What comes back ----

// What the library makes of a matrix, with scales rounded to `scale_type` before the codes: an oracle that
// shares the kernels but neither pieces, nor threads, nor layouts, nor files.
std::vector<float> expected_numbers(const NewTensor& tensor, const Scheme& scheme, Type scale_type) {
  const int64_t n = tensor.header.shape[0], k = tensor.header.shape[1];
  const Tensor view{tensor.header.name, tensor.header.type, tensor.header.shape, tensor.data};
  std::vector<float> numbers(static_cast<size_t>(n * k));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = load_float(view, static_cast<int64_t>(i));
  const int64_t rows = scheme.block.rows ? scheme.block.rows : n,
                cols = scheme.block.cols ? scheme.block.cols : k;
  for (int64_t r0 = 0; r0 < n; r0 += rows) {
    for (int64_t c0 = 0; c0 < k; c0 += cols) {
      float low = 0, high = 0;
      const auto each = [&](const auto& visit) {
        for (int64_t r = r0; r < std::min(r0 + rows, n); ++r) {
          for (int64_t c = c0; c < std::min(c0 + cols, k); ++c)
            visit(numbers[static_cast<size_t>(r * k + c)]);
        }
      };
      each([&](float x) { low = std::min(low, x), high = std::max(high, x); });
      const CodeRange range = code_range(scheme.format);
      float scale = std::max(high, -low) / range.symmetric_max, zero = 0;
      if (scheme.has_e8m0_scale)
        scale = std::exp2(std::floor(std::log2(std::max(high, -low))) - static_cast<float>(range.emax));
      if (scheme.is_asymmetric) {
        const auto steps = static_cast<float>(range.highest - range.lowest);
        scale = high / steps - low / steps;
        zero = std::nearbyint(-low * (1.0f / scale)) + static_cast<float>(range.lowest);
      }
      if (!scheme.has_e8m0_scale) scale = round_to(scale_type, scale);
      each([&](float& x) {
        const uint8_t code = encode_value(scheme.format, x * (1.0f / scale), static_cast<int>(zero));
        x = round_to(scale_type, (decode_at(scheme.format, &code, 0) - zero) * scale);
      });
    }
  }
  return numbers;
}

std::vector<float> dequantized(const fs::path& folder, const std::string& name) {
  const Checkpoint checkpoint(folder);
  const Import import = import_checkpoint(checkpoint);
  for (const auto& layer : import.layers) {
    if (layer->info().name != name) continue;
    std::vector<float> numbers(static_cast<size_t>(layer->info().numel()));
    layer->dequantize(numbers);
    return numbers;
  }
  ADD_FAILURE() << name << " is not there";
  return {};
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(a[i]), 2);
  }
  return std::sqrt(error / norm);
}

struct SchemeCase {
  const char *scheme, *group;
  bool is_asymmetric;
};

// Each in every type of weight, with rows that do not fill pieces, words or blocks.
class Schemes : public testing::TestWithParam<std::tuple<SchemeCase, Type, bool>> {};

TEST_P(Schemes, AreReadBackAsTheyWereMeant) {
  const auto& [scheme_case, type, is_own_layout] = GetParam();
  Work run = run_of(scheme_case.scheme, scheme_case.group, scheme_case.is_asymmetric);
  run.is_own_layout = is_own_layout;
  const bool is_known = is_own_layout || message_of([&] { compressed_tensors_layout(run.scheme); }).empty();
  if (!is_known) GTEST_SKIP() << "compressed-tensors has no such scheme";
  const TemporaryFolder folder;
  const int64_t group = run.scheme.block.rows == 1 ? run.scheme.block.cols : 0;
  const int64_t k = group ? 3 * group : 199;
  const NewTensor weight = float_tensor("a.proj.weight", {301, k}, type);
  fs::create_directory(folder / "in");
  write_safetensors(folder / "in/model.safetensors", {float_tensor("a.norm.weight", {7}, type), weight});

  const QuantizeResult result = quantize(folder / "in", folder / "out", run);
  const Type scale_type = is_own_layout ? Type::f32 : type;
  const std::vector<float> expected = expected_numbers(weight, run.scheme, scale_type);
  const std::vector<float> got = dequantized(folder / "out", "a.proj.weight");
  ASSERT_EQ(got.size(), expected.size());
  // MX formats come back in bfloat16, which holds all of their numbers.
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], expected[i]) << i;

  std::vector<float> numbers(expected.size());
  const Tensor view{"", type, weight.header.shape, weight.data};
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = load_float(view, static_cast<int64_t>(i));
  ASSERT_EQ(result.layers.size(), 1u);
  EXPECT_NEAR(result.layers[0].error, relative_error(numbers, expected), 1e-3 * result.layers[0].error);
}

INSTANTIATE_TEST_SUITE_P(
    All, Schemes,
    testing::Combine(testing::Values(SchemeCase{"int4", "", false}, SchemeCase{"int4", "32", true},
                                     SchemeCase{"int4", "channel", true}, SchemeCase{"int8", "", false},
                                     SchemeCase{"int8", "64", true}, SchemeCase{"int8", "tensor", false},
                                     SchemeCase{"fp8", "", false}, SchemeCase{"fp8", "tensor", false},
                                     SchemeCase{"fp8-block", "", false}, SchemeCase{"fp8-e5m2", "64", false},
                                     SchemeCase{"fp4", "", false}, SchemeCase{"mxfp4", "", false},
                                     SchemeCase{"mxfp8", "", false}, SchemeCase{"w8a8-int8", "", true},
                                     SchemeCase{"w8a8-fp8", "", false},
                                     SchemeCase{"w8a8-fp8-block", "", false}, SchemeCase{"w4a8", "", false}),
                     testing::Values(Type::f32, Type::f16, Type::bf16), testing::Bool()),
    [](const auto& info) {
      const SchemeCase& c = std::get<0>(info.param);
      return test_name(std::string(c.scheme) + c.group + (c.is_asymmetric ? "asym" : "") +
                           type_name(std::get<1>(info.param)) + (std::get<2>(info.param) ? "own" : "ct"),
                       info.index);
    });

TEST(QuantizeMethod, MseIsNoWorseThanRoundToNearest) {
  const TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", {float_tensor("a.weight", {64, 512}, Type::bf16)});
  Work run = run_of("int4");
  const double rtn = quantize(folder / "model.safetensors", folder / "rtn", run).layers.at(0).error;
  run.method = Method::mse;
  const double mse = quantize(folder / "model.safetensors", folder / "mse", run).layers.at(0).error;
  EXPECT_LT(mse, rtn);
  EXPECT_GT(mse, 0.5 * rtn);
}

TEST(QuantizeNumbers, TinyAndHugeWeightsKeepFiniteScales) {
  for (const Type type : {Type::f32, Type::f16, Type::bf16}) {
    const TemporaryFolder folder;
    std::vector<float> numbers(4 * 128, 0.0f);
    for (size_t i = 0; i < 128; ++i) {
      numbers[i] = type == Type::f16 ? 6e-8f : 1e-38f;          // smaller than any scale
      numbers[128 + i] = type == Type::f16 ? 65504.0f : 3e38f;  // whose squares are infinite
    }
    Bytes bytes(numbers.size() * static_cast<size_t>(type_info(type).bytes));
    store_floats(numbers, type, bytes.data());
    write_safetensors(folder / "model.safetensors", {{{"a.weight", type, {4, 128}}, bytes}});
    const auto result = quantize(folder / "model.safetensors", folder / "out", run_of("int4"));
    EXPECT_LT(result.layers.at(0).error, 0.01) << type_name(type);
    const auto got = dequantized(folder / "out", "a.weight");
    EXPECT_NEAR(got[128] / numbers[128], 1, 0.01);
    EXPECT_EQ(got[300], 0);
  }
}

// ---- What is chosen ----

std::map<std::string, std::string> reasons(const std::vector<NewTensor>& tensors, const Work& run,
                                           const std::string& config = "{}") {
  const TemporaryFolder folder;
  folder.write("config.json", config);
  write_safetensors(folder / "model.safetensors", tensors);
  const Checkpoint checkpoint(folder.path());
  const auto layout = compressed_tensors_layout(run.scheme);
  const QuantizePlan plan = plan_quantization(checkpoint, run.selection, *layout, INT64_MAX);
  std::map<std::string, std::string> result;
  for (const LeftAlone& left : plan.left_alone) result[left.tensor->name] = left.why;
  return result;
}

std::vector<NewTensor> model_tensors() {
  std::vector<NewTensor> tensors;
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.experts.1.w2.weight", "lm_head.weight", "model.layers.0.mlp.router.weight",
        "transformer.wte.weight", "gpt_neox.embed_in.weight", "embed_out.weight"}) {
    tensors.push_back(float_tensor(name, {8, 128}, Type::bf16));
  }
  tensors.push_back(float_tensor("model.norm.weight", {8}, Type::bf16));
  tensors.push_back(float_tensor("model.layers.0.self_attn.q_proj.bias", {8}, Type::bf16));
  tensors.push_back(float_tensor("model.odd.weight", {8, 100}, Type::bf16));
  tensors.push_back(float_tensor("model.conv.weight", {2, 2, 2}, Type::bf16));
  return tensors;
}

TEST(QuantizePlan, LeavesWhatIsNoLinearLayer) {
  const auto why = reasons(model_tensors(), run_of("int4"));
  EXPECT_EQ(why.at("model.embed_tokens.weight"), "embedding");
  EXPECT_EQ(why.at("gpt_neox.embed_in.weight"), "embedding");
  EXPECT_EQ(why.at("transformer.wte.weight"), "embedding");
  EXPECT_EQ(why.at("lm_head.weight"), "output head");
  EXPECT_EQ(why.at("embed_out.weight"), "output head");
  EXPECT_EQ(why.at("model.layers.0.mlp.gate.weight"), "router");
  EXPECT_EQ(why.at("model.layers.0.mlp.router.weight"), "router");
  EXPECT_EQ(why.at("model.norm.weight"), "1 dimension");
  EXPECT_EQ(why.at("model.conv.weight"), "3 dimensions");
  EXPECT_EQ(why.at("model.layers.0.self_attn.q_proj.bias"), "no weight");
  EXPECT_EQ(why.at("model.odd.weight"), "100 inputs are no whole number of groups of 128");
  EXPECT_EQ(why.size(), 11u);  // all but q_proj, gate_proj and the expert
}

TEST(QuantizePlan, ObeysPatterns) {
  Work run = run_of("int4");
  run.selection.exclude.emplace_back("q_proj", "--exclude");
  EXPECT_EQ(reasons(model_tensors(), run).at("model.layers.0.self_attn.q_proj.weight"), "excluded");
  run.selection.include.emplace("mlp\\.|lm_head", "--include");
  const auto why = reasons(model_tensors(), run);
  EXPECT_EQ(why.count("lm_head.weight"), 0u);
  EXPECT_EQ(why.count("model.layers.0.mlp.gate.weight"), 0u);
  EXPECT_EQ(why.at("embed_out.weight"), "output head");
  EXPECT_EQ(why.at("model.embed_tokens.weight"), "embedding");
}

TEST(QuantizePlan, LeavesConv1DOfGpt2) {
  const std::vector<NewTensor> tensors = {float_tensor("h.0.attn.c_attn.weight", {8, 128}, Type::f32),
                                          float_tensor("h.0.q_proj.weight", {8, 128}, Type::f32)};
  EXPECT_EQ(reasons(tensors, run_of("int4"), R"({"model_type": "gpt2"})").at("h.0.attn.c_attn.weight"),
            "Conv1D");
  EXPECT_TRUE(reasons(tensors, run_of("int4"), R"({"model_type": "llama"})").empty());
}

TEST(QuantizePlan, FailsWhereNothingIsLeft) {
  const std::vector<NewTensor> norms = {float_tensor("norm.weight", {8}, Type::bf16)};
  EXPECT_NE(message_of([&] { reasons(norms, run_of("int4")); }).find("nothing to quantize"),
            std::string::npos);
}

TEST(SchemeOptions, RefusesWhatDoesNotGoTogether) {
  EXPECT_NE(message_of([] { run_of("fp8", "", true); }).find("no zero points"), std::string::npos);
  EXPECT_NE(message_of([] { run_of("mxfp4", "64"); }).find("always has blocks of 1x32"), std::string::npos);
  EXPECT_NE(message_of([] { run_of("int4", "-3"); }).find("--group"), std::string::npos);
  EXPECT_NE(message_of([] { run_of("int4", "12x"); }).find("--group"), std::string::npos);
  EXPECT_NE(message_of([] { run_of("int8", "tensor", true); }).find("--asymmetric"), std::string::npos);
  EXPECT_NE(message_of([] { run_of("int5"); }).find("no scheme 'int5'"), std::string::npos);
  EXPECT_NE(message_of([] { compressed_tensors_layout(run_of("fp4").scheme); }).find("--format quantfuse"),
            std::string::npos);
}

// ---- The folder ----

// Three layers, one per shard, a config in an order of its own, and other files.
void write_model(const fs::path& folder) {
  fs::create_directory(folder);
  std::ofstream(folder / "config.json") << R"({"z": 1, "model_type": "llama", "a": {"rms_norm_eps": 1e-05}})";
  std::ofstream(folder / "tokenizer.json") << "{}";
  std::ofstream(folder / "pytorch_model.bin") << "weights";
  write_safetensors(folder / "model.safetensors", {float_tensor("a.weight", {64, 128}, Type::bf16, 1),
                                                   float_tensor("b.weight", {64, 128}, Type::bf16, 2),
                                                   float_tensor("c.weight", {64, 128}, Type::bf16, 3),
                                                   float_tensor("lm_head.weight", {64, 128}, Type::bf16, 4)});
}

Work sharded_run() {
  Work run = run_of("int4");
  run.shard_bytes = 5000;
  run.options = {{"scheme", "int4"}};
  return run;
}

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> result;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    result[fs::relative(entry.path(), folder).string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return result;
}

TEST(QuantizeFolder, HasShardsIndexConfigAndOtherFiles) {
  const TemporaryFolder folder;
  write_model(folder / "in");
  const auto before = contents(folder / "in");
  const QuantizeResult result = quantize(folder / "in", folder / "out", sharded_run());
  EXPECT_EQ(contents(folder / "in"), before);
  EXPECT_EQ(result.copied, std::vector<std::string>{"tokenizer.json"});

  const auto after = contents(folder / "out");
  std::vector<std::string> names;
  for (const auto& [name, text] : after) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{
                       "config.json", "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors",
                       "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors",
                       "model.safetensors.index.json", "tokenizer.json"}));
  const auto config = nlohmann::ordered_json::parse(after.at("config.json"));
  std::vector<std::string> keys;
  for (const auto& [key, value] : config.items()) keys.push_back(key);
  EXPECT_EQ(keys, (std::vector<std::string>{"z", "model_type", "a", "quantization_config"}));
  EXPECT_EQ(config["a"]["rms_norm_eps"], 1e-05);
  EXPECT_EQ(config["quantization_config"]["ignore"], nlohmann::ordered_json({"lm_head"}));
  const auto index = nlohmann::json::parse(after.at("model.safetensors.index.json"));
  EXPECT_EQ(index["weight_map"].size(), 3u * 3 + 1);
  EXPECT_EQ(index["metadata"]["total_size"], 3 * (64 * 64 + 64 * 2 + 16) + 64 * 128 * 2);
  // Opening checks the index against the files.
  EXPECT_EQ(import_checkpoint(Checkpoint(folder / "out")).layers.size(), 3u);
}

// Stops the work at the given tensor, as a kill does, but for the files that a destructor removes.
struct Stop : std::exception {};

TEST(QuantizeFolder, GoesOnWhereItWasStopped) {
  const TemporaryFolder folder;
  write_model(folder / "in");
  const Work run = sharded_run();
  quantize(folder / "in", folder / "whole", run);
  EXPECT_THROW(quantize(folder / "in", folder / "out", run,
                        [](const std::string& name, int64_t) {
                          if (name == "c.weight") throw Stop();
                        }),
               Stop);
  EXPECT_TRUE(fs::exists(folder / "out/model-00002-of-00004.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "out/model-00003-of-00004.safetensors"));
  EXPECT_FALSE(fs::exists(folder / "out/config.json"));
  // What a kill would have left: half a file that has not got its name.
  std::ofstream(folder / "out/.quantize/model-00003-of-00004.safetensors.aB3xYz") << "half";
  const auto time = fs::last_write_time(folder / "out/model-00001-of-00004.safetensors");

  std::vector<std::string> done;
  const QuantizeResult result = quantize(folder / "in", folder / "out", run,
                                         [&](const std::string& name, int64_t) { done.push_back(name); });
  EXPECT_EQ(done, (std::vector<std::string>{"c.weight", "lm_head.weight", ""}));
  EXPECT_EQ(result.num_resumed, 2u);
  EXPECT_EQ(result.layers.size(), 3u);
  for (const QuantizedLayer& layer : result.layers) EXPECT_GT(layer.error, 0.01) << layer.name;
  EXPECT_EQ(fs::last_write_time(folder / "out/model-00001-of-00004.safetensors"), time);
  EXPECT_EQ(contents(folder / "out"), contents(folder / "whole"));
}

TEST(QuantizeFolder, RefusesToGoOnWithOtherWork) {
  const TemporaryFolder folder;
  write_model(folder / "in");
  Work run = sharded_run();
  const auto stop = [](const std::string& name, int64_t) {
    if (name == "c.weight") throw Stop();
  };
  EXPECT_THROW(quantize(folder / "in", folder / "out", run, stop), Stop);
  run.options = {{"scheme", "int8"}};
  const auto before = contents(folder / "out");
  EXPECT_NE(message_of([&] {
              quantize(folder / "in", folder / "out", run);
            }).find("scheme was \"int4\" and is \"int8\" now"),
            std::string::npos);
  run.options = {{"scheme", "int4"}};
  fs::last_write_time(folder / "in/model.safetensors",
                      fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_NE(
      message_of([&] { quantize(folder / "in", folder / "out", run); }).find("the input has changed since"),
      std::string::npos);
  EXPECT_EQ(contents(folder / "out"), before);
}

TEST(QuantizeFolder, LeavesOtherFoldersAlone) {
  const TemporaryFolder folder;
  write_model(folder / "in");
  fs::create_directory(folder / "out");
  std::ofstream(folder / "out/notes.txt") << "mine";
  const auto is_refused = [&](const char* out, const char* why) {
    const std::string message = message_of([&] { quantize(folder / "in", folder / out, sharded_run()); });
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  is_refused("out", "is not empty");
  is_refused("in", "is not empty");
  is_refused("in/config.json", "is not a folder");
  is_refused("no/such/folder", "cannot be written");
  EXPECT_EQ(contents(folder / "out"), (std::map<std::string, std::string>{{"notes.txt", "mine"}}));
}

TEST(QuantizeFolder, HoldsOneProcessAtATime) {
  const TemporaryFolder folder;
  const WorkFolder first(folder / "out", Json::object());
  EXPECT_NE(message_of([&] { WorkFolder second(folder / "out", Json::object()); }).find("another process"),
            std::string::npos);
}

TEST(QuantizeFolder, NamesWhatIsNotFiniteAndLeavesNothing) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (const Type type : {Type::f32, Type::f16, Type::bf16}) {
      const TemporaryFolder folder;
      NewTensor weight = float_tensor("model.up.weight", {40, 128}, type);
      const auto each = static_cast<size_t>(type_info(type).bytes);
      store_floats(std::vector<float>{bad}, type, weight.data.data() + (35 * 128 + 9) * each);
      write_safetensors(folder / "model.safetensors", {weight});
      const std::string message =
          message_of([&] { quantize(folder / "model.safetensors", folder / "out", run_of("int4")); });
      EXPECT_NE(message.find("model.up.weight has "), std::string::npos) << message;
      EXPECT_NE(message.find(" at [35, 9]"), std::string::npos) << message;
      EXPECT_FALSE(fs::exists(folder / "out"));
    }
  }
}

// ---- Our own layout, where it is not what it says ----

struct OwnFile {
  std::vector<NewTensor> tensors = {{{"m.codes", Type::u8, {4, 16}}, Bytes(64)},
                                    {{"m.scales", Type::f32, {4, 1}}, bytes_of(std::vector<float>(4, 1.0f))}};
  nlohmann::json metadata = {{"format", "quantfuse.weight.1"},
                             {"quantization", "int4"},
                             {"shape", "4 32"},
                             {"block", "1 0"},
                             {"is_gated", "0"}};

  // What reading it back says; "" where all is well.
  std::string message() const {
    const TemporaryFolder folder;
    NewFile file(folder / "model.safetensors");
    std::vector<TensorHeader> headers;
    for (const NewTensor& tensor : tensors) headers.push_back(tensor.header);
    write_safetensors_header(file, headers, {{"m.weight", metadata.dump()}});
    for (const NewTensor& tensor : tensors) file.write(tensor.data);
    file.finish();
    folder.write("config.json", R"({"quantization_config": {"quant_method": "quantfuse"}})");
    return message_of([&] {
      const Checkpoint checkpoint(folder.path());
      import_checkpoint(checkpoint).layers.at(0)->canonical();
    });
  }
};

TEST(OwnLayout, NamesWhatIsWrong) {
  EXPECT_EQ(OwnFile().message(), "");
  const auto expect_message = [](const char* expected, const auto& spoil) {
    OwnFile file;
    spoil(file);
    const std::string message = file.message();
    EXPECT_NE(message.find(expected), std::string::npos) << message << " lacks " << expected;
  };
  const auto set = [](const char* key, const char* value) {
    return [key, value](OwnFile& file) { file.metadata[key] = value; };
  };
  expect_message("m.scales is missing", [](OwnFile& file) { file.tensors.pop_back(); });
  expect_message("m.codes has shape [4, 16], expected [4, 17]", set("shape", "4 33"));
  expect_message("m.codes has type U8, expected I8", set("quantization", "int8"));
  expect_message("m.scales has type F32, expected U8", set("quantization", "mxfp4"));
  expect_message("m.scales has shape [4, 1], expected [4, 2]", set("block", "1 16"));
  expect_message("expected a format of quantfuse", set("quantization", "int3"));
  expect_message("expected quantfuse.weight.1", set("format", "quantfuse.weight.9"));
  for (const char* bad : {"", "4", "4 ", "4 32 1", "4  32", "-4 32", "four 32", "4 99999999999999999999"}) {
    expect_message("expected two sizes", set("shape", bad));
  }
  expect_message("m.zeros has shape [1], expected [4, 1]", [](OwnFile& file) {
    file.tensors.push_back({{"m.zeros", Type::i8, {1}}, {0}});
  });
  expect_message("has the index 5 at 0, out of range", [](OwnFile& file) {
    file.tensors.push_back({{"m.g_idx", Type::i32, {32}}, bytes_of(std::vector<int32_t>(32, 5))});
  });
  expect_message("m.scales is not finite at index 0", [](OwnFile& file) {
    file.tensors[1].data = bytes_of(std::vector<float>(4, std::numeric_limits<float>::infinity()));
  });
}

// ---- Memory ----

// A field of /proc/self/status, in bytes; 0 where there is none.
int64_t process_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::atoll(line.c_str() + field.size() + 1) * 1024;
  }
  return 0;
}

TEST(QuantizeMemory, IsOneTensorAndItsResult) {
  const TemporaryFolder folder;
  constexpr int64_t kTensorBytes = 2048 * 2048 * 4, kSlack = 8'000'000;
  {
    std::vector<NewTensor> tensors;
    for (const char* name : {"a.weight", "b.weight", "c.weight", "d.weight", "e.weight", "f.weight"}) {
      tensors.push_back(float_tensor(name, {2048, 2048}, Type::f32));
    }
    write_safetensors(folder / "model.safetensors", tensors);
  }
  for (const char* group : {"channel", "tensor"}) {
    // The pages of this process are those of its peak from here on.
    if (!(std::ofstream("/proc/self/clear_refs") << 5).flush()) GTEST_SKIP() << "the peak cannot be reset";
    const int64_t before = process_bytes("VmRSS");
    quantize(folder / "model.safetensors", folder / group, run_of("fp8", group));
    const int64_t taken = process_bytes("VmHWM") - before;
    EXPECT_LT(taken, kTensorBytes + kTensorBytes / 4 + kSlack) << group;  // of 6 tensors
    EXPECT_GT(taken, 0);
  }
}

TEST(QuantizeInput, MayBeUnaligned) {
  const TemporaryFolder folder;
  const NewTensor weight = float_tensor("a.weight", {33, 128}, Type::bf16);
  write_safetensors(folder / "model.safetensors", {{{"byte", Type::u8, {1}}, {0}}, weight});
  quantize(folder / "model.safetensors", folder / "out", run_of("int4"));
  const auto expected = expected_numbers(weight, run_of("int4").scheme, Type::bf16);
  EXPECT_EQ(dequantized(folder / "out", "a.weight"), expected);
}

TEST(QuantizeInput, MayBeSharded) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "in");
  write_safetensors(folder / "in/x.safetensors", {float_tensor("a.weight", {64, 128}, Type::f32, 1)});
  write_safetensors(folder / "in/y.safetensors", {float_tensor("b.weight", {64, 128}, Type::f16, 2)});
  std::ofstream(folder / "in/model.safetensors.index.json")
      << R"({"weight_map": {"a.weight": "x.safetensors", "b.weight": "y.safetensors"}})";
  EXPECT_EQ(quantize(folder / "in", folder / "out", run_of("int4")).layers.size(), 2u);
  EXPECT_EQ(import_checkpoint(Checkpoint(folder / "out")).layers.size(), 2u);
}

}  // namespace
}  // namespace quantfuse::checkpoint
