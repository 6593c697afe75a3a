// SPDX-License-Identifier: Apache-2.0
//
// The layouts that importers/compressed_tensors.cpp reads, written as compressed-tensors writes them: scales
// in the type of the weight, codes as the scheme's format has them.
#include <fmt/format.h>

#include <stdexcept>

#include "checkpoint/packing.h"
#include "checkpoint/scale_grid.h"
#include "checkpoint/weight_layout.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* kVersion = "0.15.0";  // the oldest that reads all of these

enum Part : size_t { kCodes, kScale, kZeroOrShape, kShapeAfterZero };

const char* format_of(const Scheme& scheme) {
  if (scheme.has_e8m0_scale) return scheme.format == QF_FP8_E4M3 ? "mxfp8-quantized" : "mxfp4-pack-quantized";
  if (scheme.format == QF_FP8_E4M3) return "float-quantized";
  return scheme.act_format == QF_FORMAT_NONE ? "pack-quantized" : "int-quantized";
}

OrderedJson quantization_args(int bits, bool is_float, bool is_dynamic, const char* strategy) {
  return {{"num_bits", bits},      {"type", is_float ? "float" : "int"},
          {"symmetric", true},     {"group_size", nullptr},
          {"strategy", strategy},  {"block_structure", nullptr},
          {"dynamic", is_dynamic}, {"actorder", nullptr}};
}

class CompressedTensorsLayout final : public WeightLayout {
 public:
  explicit CompressedTensorsLayout(const Scheme& scheme) : WeightLayout(scheme) {}

  std::string refusal(int64_t, int64_t k) const override {
    const int64_t group = scheme().block.rows == 1 ? scheme().block.cols : 0;
    if (group == 0 || k % group == 0) return "";
    return fmt::format("{} inputs are no whole number of groups of {}", k, group);
  }

  Type scale_type(Type weight_type) const override { return weight_type; }

  std::vector<TensorHeader> parts(const std::string& module, int64_t n, int64_t k,
                                  Type weight_type) const override {
    const Scheme& s = scheme();
    const ScaleGrid grid = scale_grid(n, k, s.block);
    std::vector<TensorHeader> parts = {codes_header(n, k)};
    const bool is_one = s.block.rows == 0;
    const Type scale_type = s.has_e8m0_scale ? Type::u8 : weight_type;
    parts.push_back({"weight_scale", scale_type,
                     is_one ? std::vector<int64_t>{1} : std::vector<int64_t>{grid.rows, grid.cols}});
    if (s.is_asymmetric && is_packed()) {
      parts.push_back({"weight_zero_point", Type::i32, {packed_words(n, s.bits()), grid.cols}});
    } else if (s.is_asymmetric) {
      parts.push_back({"weight_zero_point", Type::i8, {grid.rows, grid.cols}});
    }
    if (is_packed()) parts.push_back({"weight_shape", Type::i64, {2}});
    for (TensorHeader& part : parts) part.name = module + "." + part.name;
    return parts;
  }

  std::map<std::string, std::string> metadata(const std::string&, int64_t, int64_t) const override {
    return {};
  }

  void store(WeightRows& rows, Type weight_type, const Store& store) const override {
    store_codes(rows, store);
    store_scales(rows, weight_type, store);
    if (scheme().is_asymmetric) store_zeros(rows, store);
    if (is_packed() && rows.first == 0) {
      const int64_t shape[2] = {rows.n, rows.k};
      store(scheme().is_asymmetric ? kShapeAfterZero : kZeroOrShape, 0,
            {reinterpret_cast<const uint8_t*>(shape), sizeof(shape)});
    }
  }

  OrderedJson config(const std::vector<std::string>& ignored) const override {
    const Scheme& s = scheme();
    const bool is_group = s.block.rows == 1 && s.block.cols > 0;
    const char* strategy = s.block.rows == 0   ? "tensor"
                           : is_group          ? "group"
                           : s.block.rows == 1 ? "channel"
                                               : "block";
    OrderedJson weights = quantization_args(s.bits(), !is_integer(s.format), false, strategy);
    weights["symmetric"] = !s.is_asymmetric;
    if (is_group) weights["group_size"] = s.block.cols;
    if (s.block.rows > 1) weights["block_structure"] = {s.block.rows, s.block.cols};
    if (s.has_e8m0_scale) weights["scale_dtype"] = weights["zp_dtype"] = "torch.uint8";
    if (s.is_asymmetric) weights["zp_dtype"] = "torch.int8";
    OrderedJson activations;
    if (s.act_format != QF_FORMAT_NONE) {
      activations = quantization_args(8, !is_integer(s.act_format), true, s.act_group ? "group" : "token");
      if (s.act_group) activations["group_size"] = s.act_group;
    }
    const OrderedJson group = {{"targets", {"Linear"}},
                               {"weights", weights},
                               {"input_activations", activations},
                               {"output_activations", nullptr},
                               {"format", format_of(s)}};
    return {{"quant_method", "compressed-tensors"},
            {"quantization_status", "compressed"},
            {"format", format_of(s)},
            {"config_groups", {{"group_0", group}}},
            {"ignore", ignored},
            {"kv_cache_scheme", nullptr},
            {"global_compression_ratio", nullptr},
            {"version", kVersion}};
  }

 private:
  bool is_packed() const { return is_integer(scheme().format) && scheme().act_format == QF_FORMAT_NONE; }

  TensorHeader codes_header(int64_t n, int64_t k) const {
    if (is_packed()) return {"weight_packed", Type::i32, {n, packed_words(k, scheme().bits())}};
    if (is_integer(scheme().format)) return {"weight", Type::i8, {n, k}};
    if (scheme().format == QF_FP8_E4M3) return {"weight", Type::e4m3, {n, k}};
    return {"weight_packed", Type::u8, {n, row_bytes(scheme().format, k)}};
  }

  void store_codes(WeightRows& rows, const Store& store) const {
    std::span<const uint8_t> bytes = rows.codes;
    if (is_packed()) {
      bytes = words_from_rows(rows.codes, rows.count, rows.k, scheme().bits(), rows.packed);
    } else if (scheme().format == QF_INT4) {
      int8_from_codes(rows.codes, rows.count, rows.k, rows.packed);
      bytes = rows.packed;
    }
    if (rows.count) store(kCodes, rows.first * static_cast<int64_t>(bytes.size()) / rows.count, bytes);
  }

  void store_scales(WeightRows& rows, Type weight_type, const Store& store) const {
    const int64_t first = rows.first / std::max<int64_t>(scheme().block.rows, 1) *
                          scale_grid(rows.n, rows.k, scheme().block).cols;
    if (scheme().has_e8m0_scale) return store(kScale, first, rows.scale_e8m0);
    rows.packed.resize(rows.scale.size() * static_cast<size_t>(type_info(weight_type).bytes));
    store_floats(rows.scale, weight_type, rows.packed.data());
    store(kScale, first * type_info(weight_type).bytes, rows.packed);
  }

  void store_zeros(WeightRows& rows, const Store& store) const {
    const int64_t groups = scale_grid(rows.n, rows.k, scheme().block).cols;
    if (!is_packed()) {
      const auto* zeros = reinterpret_cast<const uint8_t*>(rows.zero.data());
      return store(kZeroOrShape, rows.first * groups, {zeros, rows.zero.size()});
    }
    words_from_columns(rows.zero, rows.count, groups, scheme().bits(), rows.packed);
    store(kZeroOrShape, packed_words(rows.first, scheme().bits()) * groups * 4, rows.packed);
  }
};

}  // namespace

std::unique_ptr<WeightLayout> compressed_tensors_layout(const Scheme& scheme) {
  const bool is_known = is_integer(scheme.format) || scheme.format == QF_FP8_E4M3 ||
                        (scheme.format == QF_FP4_E2M1 && scheme.has_e8m0_scale);
  if (!is_known) {
    throw std::invalid_argument("compressed-tensors has no " + scheme.name + ": use --format quantfuse");
  }
  if (scheme.block.rows == 0 && is_integer(scheme.format) && scheme.act_format == QF_FORMAT_NONE) {
    throw std::invalid_argument(
        "compressed-tensors packs no integers with one scale for a whole tensor: "
        "use --group channel or --format quantfuse");
  }
  if (scheme.format == QF_FP8_E4M3 && !scheme.has_e8m0_scale && scheme.block.rows == 1 &&
      scheme.block.cols > 0) {
    throw std::invalid_argument(
        "engines load no FP8 in groups from compressed-tensors: use --group channel, "
        "--scheme fp8-block or --format quantfuse");
  }
  return std::make_unique<CompressedTensorsLayout>(scheme);
}

}  // namespace quantfuse::checkpoint
