// SPDX-License-Identifier: Apache-2.0
//
// QuantFuse's own layout: the canonical form as it is. It is what QuantizedWeight.save of the Python package
// writes for one weight, with the module's name in front of each tensor and each weight's metadata under its
// name:
//
//   M.codes   I8, U8 or F8 [n, k], or U8 [n, ceil(k/2)]      M.scales  F32 or U8 (E8M0)      M.zeros  I8
//   __metadata__["M.weight"] = {"format": "quantfuse.weight.1", "quantization", "shape", "block", "is_gated"}
#include "checkpoint/quantfuse_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/scale_grid.h"
#include "checkpoint/weight_layout.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

using OrderedJson = nlohmann::ordered_json;

enum Part : size_t { kCodes, kScales, kZeros };

std::span<const uint8_t> bytes_of(const auto& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(values[0])};
}

class QuantfuseLayout final : public WeightLayout {
 public:
  explicit QuantfuseLayout(const Scheme& scheme) : WeightLayout(scheme) {}

  std::string refusal(int64_t, int64_t) const override { return ""; }
  Type scale_type(Type) const override { return Type::f32; }

  std::vector<TensorHeader> parts(const std::string& module, int64_t n, int64_t k, Type) const override {
    const Scheme& s = scheme();
    const ScaleGrid grid = scale_grid(n, k, s.block);
    std::vector<TensorHeader> parts = {
        {module + ".codes", stored_code_type(s.format), {n, row_bytes(s.format, k)}},
        {module + ".scales", s.has_e8m0_scale ? Type::u8 : Type::f32, {grid.rows, grid.cols}}};
    if (s.is_asymmetric) parts.push_back({module + ".zeros", Type::i8, {grid.rows, grid.cols}});
    return parts;
  }

  std::map<std::string, std::string> metadata(const std::string& module, int64_t n,
                                              int64_t k) const override {
    const Scheme& s = scheme();
    const OrderedJson json = {{"format", kQuantfuseFormat},
                              {"quantization", stored_format_name(s.format, s.has_e8m0_scale)},
                              {"shape", fmt::format("{} {}", n, k)},
                              {"block", fmt::format("{} {}", s.block.rows, s.block.cols)},
                              {"is_gated", "0"}};
    return {{module + ".weight", json.dump()}};
  }

  void store(WeightRows& rows, Type, const Store& store) const override {
    const Scheme& s = scheme();
    const int64_t first_scale =
        rows.first / std::max<int64_t>(s.block.rows, 1) * scale_grid(rows.n, rows.k, s.block).cols;
    store(kCodes, rows.first * row_bytes(s.format, rows.k), rows.codes);
    if (s.has_e8m0_scale) store(kScales, first_scale, rows.scale_e8m0);
    else store(kScales, first_scale * static_cast<int64_t>(sizeof(float)), bytes_of(rows.scale));
    if (s.is_asymmetric) store(kZeros, first_scale, bytes_of(rows.zero));
  }

  OrderedJson config(const std::vector<std::string>& ignored) const override {
    const Scheme& s = scheme();
    OrderedJson activations;
    if (s.act_format != QF_FORMAT_NONE) {
      activations = {{"quantization", format_name(s.act_format)}, {"group", s.act_group}};
    }
    return {{"quant_method", "quantfuse"},
            {"format", kQuantfuseFormat},
            {"scheme", s.name},
            {"quantization", stored_format_name(s.format, s.has_e8m0_scale)},
            {"block", {s.block.rows, s.block.cols}},
            {"symmetric", !s.is_asymmetric},
            {"activations", activations},
            {"ignore", ignored}};
  }
};

}  // namespace

std::unique_ptr<WeightLayout> quantfuse_layout(const Scheme& scheme) {
  return std::make_unique<QuantfuseLayout>(scheme);
}

}  // namespace quantfuse::checkpoint
