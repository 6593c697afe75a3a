// SPDX-License-Identifier: Apache-2.0
//
// bitsandbytes, 4 bits: NF4 or FP4. The weight is flattened row by row, two codes to a byte, the HIGH nibble
// first; blocks of 64 run over the flattened weight and across the ends of rows.
//
//   M.weight              U8 (or a wider storage type) of ceil(out*in/2) bytes
//   M.weight.absmax       F32 [blocks]
//   M.weight.quant_map    F32 [16], the value of each code
//   M.weight.quant_state.bitsandbytes__nf4   U8, a JSON text: quant_type, blocksize, dtype, shape
//
// With double quantization absmax is U8, and
//
//   absmax = nested_quant_map[u8] * nested_absmax[block / nested_blocksize] + nested_offset
//
//   w = quant_map[code] * absmax, in float32, rounded to dtype
//
// The canonical form is NF4 or FP4_BNB where quant_map is theirs and no block has parts of two rows: the
// inputs are a multiple of the block size, or divide it.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "core/dtype.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

constexpr const char* kStateMark = ".quant_state.bitsandbytes__";
constexpr const char* kStates[] = {".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"};

struct Nested {
  const Tensor &absmax, &quant_map;
  int64_t block_size;
  float offset;
};

struct Parts {
  const Tensor &weight, &absmax, &quant_map;
  std::optional<Nested> nested;
  int64_t block_size;
};

class Bnb4Layer final : public Layer {
 public:
  Bnb4Layer(LayerInfo info, const Parts& parts) : Layer(std::move(info)), parts_(parts) {}

  void dequantize(std::span<float> out) const override {
    const std::vector<float> map = load_scales(parts_.quant_map), absmax = load_absmax();
    const Type rounding = info().rounding;
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = round_to(rounding, map[code_at(i)] * absmax[i / static_cast<size_t>(parts_.block_size)]);
    }
  }

  std::optional<CanonicalWeight> canonical() const override {
    const std::vector<int64_t>& shape = info().shape;
    const qf_format format = format_of_map();
    if (shape.size() != 2 || shape[1] % 2 != 0 || shape[1] == 0 || format == QF_FORMAT_NONE)
      return std::nullopt;
    CanonicalWeight w;
    w.format = format;
    w.n = shape[0], w.k = shape[1];
    if (w.k % parts_.block_size == 0) {
      w.block = {1, parts_.block_size};
    } else if (parts_.block_size % w.k == 0) {
      w.block = {parts_.block_size / w.k, 0};
    } else {
      return std::nullopt;
    }
    w.num_groups = w.k / w.block_cols();
    w.codes.assign(parts_.weight.bytes.begin(), parts_.weight.bytes.end());
    for (uint8_t& byte : w.codes) byte = static_cast<uint8_t>(byte << 4 | byte >> 4);
    w.scale = load_absmax();
    if (!std::all_of(w.scale.begin(), w.scale.end(), [](float scale) { return is_finite(scale); })) {
      fail(printable(info().name) + ": an absmax is not finite");
    }
    return w;
  }

  LayerValues values() const override {
    LayerValues values;
    values.num_codes = info().numel();
    for (const float scale : load_absmax()) values.add_scale(scale);
    // Saturated is what has the largest magnitude, which is a block's absmax itself.
    const std::vector<float> map = load_scales(parts_.quant_map);
    float largest = 0;
    for (const float value : map) largest = std::max(largest, std::abs(value));
    std::array<int64_t, 16> counts{};
    for (size_t i = 0; i < static_cast<size_t>(values.num_codes); ++i) ++counts[code_at(i)];
    for (size_t code = 0; code < counts.size(); ++code) {
      if (std::abs(map[code]) == largest) values.num_saturated += counts[code];
    }
    return values;
  }

 private:
  qf_format format_of_map() const {
    const std::vector<float> map = load_scales(parts_.quant_map);
    for (const qf_format format : {QF_NF4, QF_FP4_BNB}) {
      if (std::equal(map.begin(), map.end(), codebook_of(format))) return format;
    }
    return QF_FORMAT_NONE;
  }

  uint8_t code_at(size_t i) const {
    const uint8_t byte = parts_.weight.bytes[i / 2];
    return i % 2 ? byte & 15 : byte >> 4;
  }

  std::vector<float> load_absmax() const {
    if (!parts_.nested) return load_scales(parts_.absmax);
    const Nested& nested = *parts_.nested;
    const std::vector<float> scales = load_scales(nested.absmax), map = load_scales(nested.quant_map);
    std::vector<float> absmax(parts_.absmax.bytes.size());
    for (size_t i = 0; i < absmax.size(); ++i) {
      absmax[i] =
          map[parts_.absmax.bytes[i]] * scales[i / static_cast<size_t>(nested.block_size)] + nested.offset;
    }
    return absmax;
  }

  Parts parts_;
};

int64_t block_size_of(const Settings& state, const char* key) {
  const int64_t size = state.integer(key);
  if (size <= 0) state.refuse(key, "more than 0");
  return size;
}

Settings read_state(const Tensor& tensor) {
  expect_type(tensor, {Type::u8});
  const std::string_view text(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  Json json = parse_json(text, printable(tensor.name));
  if (!json.is_object()) fail(printable(tensor.name) + ": not a JSON object");
  return Settings(std::move(json), printable(tensor.name));
}

void expect_absmax(const Tensor& tensor, Type type, int64_t num_blocks, const std::string& why) {
  expect_type(tensor, {type});
  expect_shape(tensor, {num_blocks}, why);
}

void add_layer(Plan& plan, const std::string& name, const char* state_end) {
  const Tensor& state_tensor = plan.need(name + state_end);
  const Settings state = read_state(state_tensor);
  const std::string quant_type = state_end + std::string_view(kStateMark).size();
  if (state.text("quant_type") != quant_type) state.refuse("quant_type", quant_type + ", as the name says");
  if (plan.settings.find_text("bnb_4bit_quant_type").value_or(quant_type) != quant_type) {
    plan.settings.refuse("bnb_4bit_quant_type", quant_type + ", which " + printable(name) + " is");
  }
  const auto shape = state.find_integers("shape");
  if (!shape) state.refuse("shape", "a list of integers");
  // As bytes the numbers are twice what the weight has, which also holds the shape against overflow.
  const int64_t numel = declared_bytes(name, Type::u8, *shape);

  const Tensor &weight = plan.need(name), &absmax = plan.need(name + ".absmax"),
               &quant_map = plan.need(name + ".quant_map");
  if (static_cast<int64_t>(weight.bytes.size()) != ceil_div(numel, 2)) {
    fail(fmt::format("{} has {} bytes, expected {}: the shape in its quant_state is {}", printable(name),
                     weight.bytes.size(), ceil_div(numel, 2), shape_text(*shape)));
  }
  expect_type(quant_map, {Type::f32});
  expect_shape(quant_map, {16}, "a value for each of 4 bits");
  const int64_t block_size = block_size_of(state, "blocksize"), num_blocks = ceil_div(numel, block_size);
  const std::string why = fmt::format("{} numbers in blocks of {}", numel, block_size);

  LayerInfo info;
  info.name = name;
  info.shape = *shape;
  info.format = quant_type;
  info.bits = 4;
  info.block = {1, block_size};
  if (!float_type_from_name(state.text("dtype"), info.rounding)) state.refuse("dtype", "a float type");
  info.tensors = {&weight, &absmax, &quant_map, &state_tensor};
  Parts parts{weight, absmax, quant_map, std::nullopt, block_size};
  const bool is_nested = state.has("nested_blocksize");
  if (plan.settings.find_flag("bnb_4bit_use_double_quant").value_or(is_nested) != is_nested) {
    plan.settings.refuse("bnb_4bit_use_double_quant",
                         fmt::format("{}, as the quant_state of {} has it", is_nested, printable(name)));
  }
  expect_absmax(absmax, is_nested ? Type::u8 : Type::f32, num_blocks, why);
  if (is_nested) {
    const Tensor &nested_absmax = plan.need(name + ".nested_absmax"),
                 &nested_map = plan.need(name + ".nested_quant_map");
    const int64_t nested_size = block_size_of(state, "nested_blocksize");
    expect_absmax(nested_absmax, Type::f32, ceil_div(num_blocks, nested_size),
                  fmt::format("{} scales in blocks of {}", num_blocks, nested_size));
    expect_type(nested_map, {Type::f32});
    expect_shape(nested_map, {256}, "a value for each byte");
    parts.nested.emplace(
        Nested{nested_absmax, nested_map, nested_size, static_cast<float>(state.number("nested_offset"))});
    info.tensors.insert(info.tensors.end(), {&nested_absmax, &nested_map});
  }
  plan.add(std::make_unique<Bnb4Layer>(std::move(info), parts));
}

void plan_bitsandbytes(Plan& plan) {
  const Settings& settings = plan.settings;
  if (settings.find_flag("load_in_8bit").value_or(false)) {
    settings.refuse("load_in_8bit", "false: 8-bit checkpoints of bitsandbytes are not supported");
  }
  for (const char* state : kStates) {
    for (const std::string& name : plan.modules_with(state)) add_layer(plan, name, state);
  }
  plan.format = plan.layers.empty() ? "bitsandbytes" : "bitsandbytes " + plan.layers[0]->info().format;
}

}  // namespace

extern const Importer bitsandbytes_importer;
const Importer bitsandbytes_importer{
    "bitsandbytes",
    {kStates[0], kStates[1]},
    {".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"},
    plan_bitsandbytes};

}  // namespace quantfuse::checkpoint
