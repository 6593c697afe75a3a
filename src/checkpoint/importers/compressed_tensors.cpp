// SPDX-License-Identifier: Apache-2.0
//
// compressed-tensors, which llm-compressor writes. The config has groups of layers, each with a format:
//
//   pack-quantized          weight_packed  I32 [out, ceil(in*bits/32)], along the inputs, dense: a field may
//                           straddle two words;  weight_shape  I64 [2] = out, in
//   int-quantized, naive    weight  I8 [out, in]
//   float-quantized         weight  F8_E4M3 [out, in]
//   mxfp8-quantized         weight  F8_E4M3 [out, in],  weight_scale  U8, E8M0
//   mxfp4-pack-quantized    weight_packed  U8 [out, in/2], the low nibble first,  weight_scale  U8, E8M0
//   nvfp4-pack-quantized    the same nibbles,  weight_scale  F8_E4M3,  weight_global_scale  F32 [1]
//
//   weight_scale            one per tensor, row, group or 2-D block, by the group's strategy
//   weight_zero_point       asymmetric: I32, packed along the OUTPUTS [ceil(out*bits/32), groups]; or I8
//   weight_g_idx            I32 [in], of older versions with actorder "group"
//
//   w = (q - z) * scale, in the scale's type; stored fields are q + 2^(bits-1), zero points the same
//   NVFP4: w = q * (weight_scale / weight_global_scale) in float32, rounded to bfloat16
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/packing.h"
#include "checkpoint/scale_grid.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

// ---- Which group a module belongs to ----

// How a target matches a module; what is more exact comes first and has precedence.
enum class Match { name, pattern, module_class, none };

// "model.layers.0.mlp.up_proj", "re:.*up_proj" or the name of a class, which a checkpoint does not show: it
// matches every module.
class Target {
 public:
  explicit Target(const std::string& text) : text_(text) {
    if (text.starts_with("re:")) pattern_.emplace(text.substr(3));
  }
  Match match(const std::string& module) const {
    if (pattern_) return pattern_->matches(module) ? Match::pattern : Match::none;
    if (text_ == module) return Match::name;
    const bool is_class =
        !text_.empty() && text_[0] >= 'A' && text_[0] <= 'Z' && text_.find('.') == text_.npos;
    return is_class ? Match::module_class : Match::none;
  }

 private:
  std::string text_;
  std::optional<NamePattern> pattern_;
};

std::vector<Target> targets_of(const Settings& settings, const char* key) {
  std::vector<Target> targets;
  for (const std::string& text : settings.texts(key)) targets.emplace_back(text);
  return targets;
}

Match best_match(const std::vector<Target>& targets, const std::string& module) {
  Match best = Match::none;
  for (const Target& target : targets) best = std::min(best, target.match(module));
  return best;
}

struct Group {
  std::vector<Target> targets;
  std::string format;
  Settings weights;

  int bits() const {
    const int64_t bits = weights.integer("num_bits");
    if (bits < 1 || bits > 8) weights.refuse("num_bits", "1 to 8");
    return static_cast<int>(bits);
  }
  bool is_symmetric() const { return weights.find_flag("symmetric").value_or(true); }

  qf_block block() const {
    const std::string strategy = weights.text("strategy");
    const int64_t group_size = weights.find_integer("group_size").value_or(-1);
    if (strategy == "tensor") return {0, 0};
    if (strategy == "channel") return {1, 0};
    if (strategy == "group" || strategy == "tensor_group") {
      if (group_size == -1 && strategy == "group") return {1, 0};
      if (group_size <= 0) weights.refuse("group_size", "more than 0");
      return {1, group_size};
    }
    if (strategy != "block") weights.refuse("strategy", "tensor, channel, group, tensor_group or block");
    const auto block = weights.find_integers("block_structure");
    const bool is_good = block && block->size() == 2 && (*block)[0] > 0 && (*block)[1] > 0;
    if (!is_good) weights.refuse("block_structure", "[ROWS, COLUMNS]");
    return {(*block)[0], (*block)[1]};
  }
};

std::vector<Group> groups_of(const Settings& settings) {
  const auto objects = settings.find_object("config_groups");
  if (!objects) settings.refuse("config_groups", "an object");
  const auto common_format = settings.find_text("format");
  std::vector<Group> groups;
  for (const auto& [name, group] : objects->objects()) {
    const auto weights = group.find_object("weights");
    if (!weights) continue;  // activations or the KV cache alone
    const auto format = group.find_text("format");
    if (!format && !common_format) group.refuse("format", "a format");
    groups.push_back({targets_of(group, "targets"), format ? *format : *common_format, *weights});
  }
  return groups;
}

// ---- A module's tensors ----

struct Module {
  const Plan& plan;
  std::string name;
  const Group& group;

  const Tensor& need(const char* part) const { return plan.need(name + "." + part); }
  const Tensor* find(const char* part) const { return plan.find(name + "." + part); }
};

LayerInfo info_of(const Module& m, int64_t n, int64_t k, const std::string& format) {
  LayerInfo info;
  info.name = m.name + ".weight";
  info.shape = {n, k};
  info.format = format;
  info.bits = m.group.bits();
  info.block = m.group.block();
  if (info.block.cols >= k) info.block.cols = 0;
  return info;
}

const Tensor& scale_of(const Module& m, const LayerInfo& info, std::initializer_list<Type> types) {
  const Tensor& scale = m.need("weight_scale");
  expect_type(scale, types);
  const qf_block block = m.group.block();
  expect_grid(scale, info.shape[0], info.shape[1], block,
              fmt::format("the weight is {}, and a scale is for {}x{} of it (0: the whole dimension)",
                          shape_text(info.shape), block.rows, block.cols));
  return scale;
}

// ---- Integers ----

struct IntegerParts {
  const Tensor &codes, &scale;
  const Tensor *zero, *g_idx;
  int64_t n, k;
  int bits;
  qf_block block;
};

// Packed along the outputs, so that every group is a column of words.
std::vector<int8_t> unpack_zeros(const IntegerParts& p, int64_t num_groups) {
  std::vector<int8_t> zeros(static_cast<size_t>(p.n * num_groups));
  for (int64_t group = 0; group < num_groups; ++group) {
    const FieldStream stream{*p.zero, group, num_groups, p.bits};
    for (int64_t row = 0; row < p.n; ++row) {
      const int zero = static_cast<int>(stream.at(row)) - (1 << (p.bits - 1));
      zeros[static_cast<size_t>(row * num_groups + group)] = static_cast<int8_t>(zero);
    }
  }
  return zeros;
}

CanonicalWeight load_integers(const IntegerParts& p) {
  CanonicalWeight w = load_scaled(p.scale, integer_format(p.bits), p.n, p.k, p.block);
  w.codes = p.codes.type == Type::i32 ? codes_from_rows(p.codes, p.n, p.k, p.bits)
                                      : codes_from_int8(p.codes, p.n, p.k, p.bits);
  if (p.zero) w.zero = p.zero->type == Type::i32 ? unpack_zeros(p, w.num_groups) : load_zeros_int8(*p.zero);
  // A group index of -1 everywhere is the tool's way to say that there is none.
  if (p.g_idx && p.k > 0 && load<int32_t>(*p.g_idx, 0) != -1)
    w.g_idx = load_group_index(*p.g_idx, w.num_groups);
  return w;
}

const Tensor* zero_of(const Module& m, const LayerInfo& info) {
  const Tensor* zero = m.group.is_symmetric() ? m.find("weight_zero_point") : &m.need("weight_zero_point");
  if (!zero) return nullptr;
  expect_type(*zero, {Type::i32, Type::i8});
  const int64_t n = info.shape[0], k = info.shape[1];
  const std::string why = fmt::format("the weight is {} at {} bits", shape_text(info.shape), info.bits);
  if (zero->type == Type::i8) {
    expect_grid(*zero, n, k, info.block, why);
  } else {
    if (info.block.rows != 1)
      fail(printable(zero->name) + " is packed, but its scales are not those of rows");
    expect_shape(*zero, {packed_words(n, info.bits), scale_grid(n, k, info.block).cols},
                 why + ", packed along them");
  }
  return zero;
}

std::unique_ptr<Layer> integer_layer(const Module& m, LayerInfo info, const Tensor& codes) {
  const Tensor& scale = scale_of(m, info, {Type::f16, Type::bf16, Type::f32});
  const Tensor* zero = zero_of(m, info);
  const bool needs_g_idx = m.group.weights.find_text("actorder").value_or("") == "group";
  const Tensor* g_idx = needs_g_idx ? &m.need("weight_g_idx") : m.find("weight_g_idx");
  if (g_idx) {
    expect_type(*g_idx, {Type::i32});
    expect_shape(*g_idx, {info.shape[1]}, "a group for each input");
  }
  info.is_asymmetric = !m.group.is_symmetric();
  info.has_g_idx = g_idx != nullptr;
  info.rounding = scale.type;
  info.tensors.insert(info.tensors.end(), {&codes, &scale});
  if (zero) info.tensors.push_back(zero);
  if (g_idx) info.tensors.push_back(g_idx);
  const IntegerParts parts{codes, scale, zero, g_idx, info.shape[0], info.shape[1], info.bits, info.block};
  return std::make_unique<CanonicalLayer>(std::move(info), [parts] { return load_integers(parts); });
}

std::unique_ptr<Layer> packed_layer(const Module& m) {
  const Tensor &packed = m.need("weight_packed"), &shape = m.need("weight_shape");
  expect_type(packed, {Type::i32});
  expect_rank(packed, 2);
  expect_type(shape, {Type::i64, Type::i32});
  expect_shape(shape, {2}, "out and in");
  const auto dim = [&](int64_t i) {
    return shape.type == Type::i64 ? load<int64_t>(shape, i) : load<int32_t>(shape, i);
  };
  const int64_t n = dim(0), k = dim(1);
  const int bits = m.group.bits();
  declared_bytes(shape.name, Type::u8, {n, k});
  if (packed.size(0) != n || packed.size(1) != packed_words(k, bits)) {
    fail(fmt::format("{} says {}, but weight_packed {} holds {} rows of {} columns at {} bits",
                     printable(shape.name), shape_text({n, k}), shape_text(packed.shape), packed.size(0),
                     packed.size(1) * 32 / bits, bits));
  }
  LayerInfo info = info_of(m, n, k, fmt::format("int{}", bits));
  info.tensors = {&shape};
  return integer_layer(m, std::move(info), packed);
}

std::unique_ptr<Layer> int8_layer(const Module& m) {
  const Tensor& weight = m.need("weight");
  expect_type(weight, {Type::i8});
  expect_rank(weight, 2);
  return integer_layer(m, info_of(m, weight.size(0), weight.size(1), fmt::format("int{}", m.group.bits())),
                       weight);
}

// ---- Floating point ----

// Older versions kept a zero point that does nothing beside floating-point codes.
void expect_zeros(const Tensor& zero) {
  const auto is_zero = [](uint8_t byte) { return byte == 0; };
  if (std::all_of(zero.bytes.begin(), zero.bytes.end(), is_zero)) return;
  fail(printable(zero.name) + " is not 0, and floating-point codes have no zero point");
}

// Codes that are stored the way the canonical form has them.
std::unique_ptr<Layer> stored_layer(LayerInfo info, const Tensor& codes, const Tensor& scale,
                                    qf_format format) {
  info.tensors.insert(info.tensors.end(), {&codes, &scale});
  const int64_t n = info.shape[0], k = info.shape[1];
  return std::make_unique<CanonicalLayer>(info, [&codes, &scale, format, n, k, block = info.block] {
    CanonicalWeight w = load_scaled(scale, format, n, k, block);
    w.codes.assign(codes.bytes.begin(), codes.bytes.end());
    return w;
  });
}

std::unique_ptr<Layer> fp8_layer(const Module& m, bool is_mx) {
  const Tensor& weight = m.need("weight");
  expect_type(weight, {Type::e4m3});
  expect_rank(weight, 2);
  if (m.group.bits() != 8) m.group.weights.refuse("num_bits", "8");
  LayerInfo info = info_of(m, weight.size(0), weight.size(1), is_mx ? "mxfp8" : "fp8_e4m3");
  const Tensor& scale = is_mx ? scale_of(m, info, {Type::u8, Type::e8m0})
                              : scale_of(m, info, {Type::f16, Type::bf16, Type::f32});
  info.rounding = is_mx ? Type::bf16 : scale.type;
  if (const Tensor* zero = m.find("weight_zero_point")) {
    expect_zeros(*zero);
    info.tensors.push_back(zero);
  }
  return stored_layer(std::move(info), weight, scale, QF_FP8_E4M3);
}

struct Fp4Weight {
  LayerInfo info;
  const Tensor& packed;
};

Fp4Weight fp4_of(const Module& m, const char* format) {
  const Tensor& packed = m.need("weight_packed");
  expect_type(packed, {Type::u8});
  expect_rank(packed, 2);
  if (m.group.bits() != 4) m.group.weights.refuse("num_bits", "4");
  Fp4Weight weight{info_of(m, packed.size(0), packed.size(1) * 2, format), packed};
  weight.info.rounding = Type::bf16;  // the tool unpacks to bfloat16, whatever the model's type
  return weight;
}

std::unique_ptr<Layer> mxfp4_layer(const Module& m) {
  auto [info, packed] = fp4_of(m, "mxfp4");
  const Tensor& scale = scale_of(m, info, {Type::u8, Type::e8m0});
  return stored_layer(std::move(info), packed, scale, QF_FP4_E2M1);
}

std::unique_ptr<Layer> nvfp4_layer(const Module& m) {
  auto [info, packed] = fp4_of(m, "nvfp4");
  const Tensor &scale = scale_of(m, info, {Type::e4m3}), &global = m.need("weight_global_scale");
  expect_type(global, {Type::f32});
  if (global.numel() != 1) expect_shape(global, {1}, "one for the whole weight");
  info.tensors = {&packed, &scale, &global};
  const int64_t n = info.shape[0], k = info.shape[1];
  return std::make_unique<CanonicalLayer>(info,
                                          [&packed = packed, &scale, &global, n, k, block = info.block] {
                                            CanonicalWeight w = load_scaled(scale, QF_FP4_E2M1, n, k, block);
                                            const float divisor = load_scales(global)[0];
                                            if (divisor == 0)
                                              fail(printable(global.name) + " is 0, and it is divided by");
                                            for (float& s : w.scale) s /= divisor;
                                            w.codes.assign(packed.bytes.begin(), packed.bytes.end());
                                            return w;
                                          });
}

// ---- The plan ----

std::unique_ptr<Layer> layer_of(const Module& m) {
  const std::string& format = m.group.format;
  const bool is_float = m.group.weights.find_text("type").value_or("int") == "float";
  if (format == "pack-quantized") return packed_layer(m);
  if (format == "int-quantized") return int8_layer(m);
  if (format == "naive-quantized") return is_float ? fp8_layer(m, false) : int8_layer(m);
  if (format == "float-quantized") return fp8_layer(m, false);
  if (format == "mxfp8-quantized") return fp8_layer(m, true);
  if (format == "mxfp4-pack-quantized") return mxfp4_layer(m);
  if (format == "nvfp4-pack-quantized") return nvfp4_layer(m);
  fail(fmt::format("quantization_config: the format '{}' of compressed-tensors is not supported",
                   printable(format)));
}

// Several groups may match a module. The most exact one counts, unless the tensors say that it is another.
std::unique_ptr<Layer> layer_of(const Plan& plan, const std::string& name, const std::vector<Group>& groups) {
  std::string first_error;
  for (const Match match : {Match::name, Match::pattern, Match::module_class}) {
    for (const Group& group : groups) {
      if (best_match(group.targets, name) != match) continue;
      try {
        return layer_of(Module{plan, name, group});
      } catch (const CheckpointError& e) {
        if (first_error.empty()) first_error = e.what();
      }
    }
  }
  if (first_error.empty()) {
    fail(fmt::format("{} is quantized, but is a target of no group in quantization_config", printable(name)));
  }
  fail(first_error);
}

void plan_compressed_tensors(Plan& plan) {
  const Settings& settings = plan.settings;
  const std::vector<Group> groups = groups_of(settings);
  const std::vector<Target> ignored = targets_of(settings, "ignore");
  std::set<std::string> planned, formats;
  for (const Tensor& tensor : plan.checkpoint.tensors()) {
    std::string name;
    for (const char* end : {".weight_packed", ".weight_scale"}) {
      if (tensor.name.ends_with(end))
        name = tensor.name.substr(0, tensor.name.size() - std::string_view(end).size());
    }
    if (name.empty() || !planned.insert(name).second) continue;
    const Match ignored_by = best_match(ignored, name);
    if (ignored_by == Match::name || ignored_by == Match::pattern) {
      settings.refuse("ignore", "a list that does not match " + printable(name) + ", which is quantized");
    }
    plan.add(layer_of(plan, name, groups));
  }
  for (const Group& group : groups) formats.insert(group.format);
  plan.format = "compressed-tensors";
  for (const std::string& format : formats) plan.format += " " + printable(format);
}

}  // namespace

extern const Importer compressed_tensors_importer;
const Importer compressed_tensors_importer{
    "compressed-tensors",
    {".weight_packed", ".weight_scale"},
    {".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"},
    plan_compressed_tensors};

}  // namespace quantfuse::checkpoint
