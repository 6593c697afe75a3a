// SPDX-License-Identifier: Apache-2.0
//
// QuantFuse's own layout, as quantfuse_layout.cpp, and QuantizedWeight.save and the layers of the Python
// package write it: the canonical form as it is. A file of one weight has no names in front of its tensors,
// and its metadata as they are. A layer's state, which save_pretrained writes, has a tensor in place of
// metadata.
//
//   M.codes   I8, U8 or F8 [n, k], or U8 [n, ceil(k/2)]      M.scales  F32 or U8 (E8M0), one per block
//   M.zeros   I8, like the scales, optional                  M.g_idx   I32 [k], optional
//   M.offsets F32, like the scales, optional
//   __metadata__["M.weight"] = {"format": "quantfuse.weight.1", "quantization", "shape", "block", "is_gated"}
//   M.layout  I64 [6]: format, n, k, rows and columns of a block, is_gated
#include <fmt/format.h>

#include <charconv>
#include <tuple>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/quantfuse_layout.h"
#include "checkpoint/scale_grid.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

// What a weight's tensors do not say by themselves.
struct Declared {
  qf_format format = QF_FORMAT_NONE;
  bool has_e8m0_scale = false;
  int64_t n = 0, k = 0;
  qf_block block = {};
};

constexpr qf_format kFormats[] = {QF_INT8,     QF_INT4, QF_FP8_E4M3, QF_FP8_E5M2,
                                  QF_FP4_E2M1, QF_NF4,  QF_FP4_BNB,  QF_IQ4_NL};
// In the state of a layer, where microscaled formats have numbers of their own.
constexpr int64_t kMxfp8Number = 16, kMxfp4Number = 17;

// Calls is_it(format, has_e8m0_scale) for every format until it is true.
template <class IsIt>
bool find_format(Declared& declared, const IsIt& is_it) {
  for (const qf_format format : kFormats) {
    for (const bool has_e8m0_scale : {false, true}) {
      if (has_e8m0_scale && format != QF_FP8_E4M3 && format != QF_FP4_E2M1) continue;
      declared.format = format, declared.has_e8m0_scale = has_e8m0_scale;
      if (is_it(format, has_e8m0_scale)) return true;
    }
  }
  return false;
}

// "64 256"
std::pair<int64_t, int64_t> pair_of(const Settings& metadata, const char* key) {
  const std::string text = metadata.text(key);
  int64_t numbers[2] = {-1, -1};
  const char *begin = text.data(), *end = begin + text.size();
  for (int64_t& number : numbers) {
    const auto [after, error] = std::from_chars(begin, end, number);
    const char expected_end = &number == numbers ? ' ' : '\0';
    if (error != std::errc() || number < 0 || (after == end ? '\0' : *after) != expected_end) {
      metadata.refuse(key, "two sizes");
    }
    begin = after + 1;
  }
  return {numbers[0], numbers[1]};
}

Declared declared_by(const Settings& metadata) {
  if (metadata.text("format") != kQuantfuseFormat) metadata.refuse("format", kQuantfuseFormat);
  Declared declared;
  const std::string name = metadata.text("quantization");
  const auto has_name = [&](qf_format format, bool has_e8m0_scale) {
    return name == stored_format_name(format, has_e8m0_scale);
  };
  if (!find_format(declared, has_name)) metadata.refuse("quantization", "a format of quantfuse");
  std::tie(declared.n, declared.k) = pair_of(metadata, "shape");
  std::tie(declared.block.rows, declared.block.cols) = pair_of(metadata, "block");
  return declared;
}

Declared declared_by(const Tensor& layout) {
  expect_type(layout, {Type::i64});
  expect_shape(layout, {6}, "the layout of a layer");
  int64_t numbers[6];
  for (int64_t i = 0; i < 6; ++i) {
    numbers[i] = load<int64_t>(layout, i);
    if (numbers[i] < 0) fail(fmt::format("{} has the number {}", printable(layout.name), numbers[i]));
  }
  Declared declared;
  const auto has_number = [&](qf_format format, bool has_e8m0_scale) {
    if (!has_e8m0_scale) return numbers[0] == format;
    return numbers[0] == (format == QF_FP4_E2M1 ? kMxfp4Number : kMxfp8Number);
  };
  if (!find_format(declared, has_number)) {
    fail(fmt::format("{} has the format {}, expected one of quantfuse", printable(layout.name), numbers[0]));
  }
  declared.n = numbers[1], declared.k = numbers[2];
  declared.block = {numbers[3], numbers[4]};
  return declared;
}

struct Parts {
  const Tensor &codes, &scales;
  const Tensor *zeros, *offsets, *g_idx;
  qf_format format;
  int64_t n, k;
  qf_block block;
};

CanonicalWeight load(const Parts& p) {
  CanonicalWeight w = load_scaled(p.scales, p.format, p.n, p.k, p.block);
  w.codes.assign(p.codes.bytes.begin(), p.codes.bytes.end());
  if (p.zeros) w.zero = load_zeros_int8(*p.zeros);
  if (p.offsets) w.offset = load_scales(*p.offsets);
  if (p.g_idx) {
    w.num_groups = p.scales.shape.back();
    w.g_idx = load_group_index(*p.g_idx, w.num_groups);
  }
  return w;
}

// `prefix` is "M." of a model, and empty in a file of one weight.
void add_layer(Plan& plan, const std::string& prefix, const Declared& declared) {
  const auto [format, has_e8m0_scale, n, k, block] = declared;
  const std::string format_text = stored_format_name(format, has_e8m0_scale);
  const Tensor& codes = plan.need(prefix + "codes");
  const Tensor& scales = plan.need(prefix + "scales", codes.name);
  const Tensor *zeros = plan.find(prefix + "zeros"), *offsets = plan.find(prefix + "offsets"),
               *g_idx = plan.find(prefix + "g_idx");

  expect_type(codes, {stored_code_type(format)});
  expect_shape(codes, {n, row_bytes(format, k)},
               fmt::format("the weight is said to be {} of shape {}", format_text, shape_text({n, k})));
  const std::string why =
      fmt::format("the weight is {}, and a scale is for {}x{} of it (0: the whole dimension)",
                  shape_text({n, k}), block.rows, block.cols);
  if (has_e8m0_scale) expect_type(scales, {Type::u8});
  else expect_type(scales, {Type::f32, Type::u8});
  if (g_idx) {
    expect_type(*g_idx, {Type::i32});
    expect_shape(*g_idx, {k}, "a group for each input");
    expect_rank(scales, 2);
    expect_shape(scales, {scale_grid(n, k, block).rows, scales.size(1)}, why);
  } else {
    expect_grid(scales, n, k, block, why);
  }
  if (zeros) {
    if (!is_integer(format)) fail(printable(zeros->name) + " is there, and the codes are no integers");
    expect_type(*zeros, {Type::i8});
    expect_shape(*zeros, scales.shape, "one for each scale");
  }
  if (offsets) {
    if (!is_integer(format)) fail(printable(offsets->name) + " is there, and the codes are no integers");
    expect_type(*offsets, {Type::f32});
    expect_shape(*offsets, scales.shape, "one for each scale");
  }

  LayerInfo info;
  info.name = prefix + "weight";
  info.shape = {n, k};
  info.format = format_text;
  info.bits = is_packed_4bit(format) ? 4 : 8;
  info.block = block;
  info.is_asymmetric = zeros || offsets;
  info.has_g_idx = g_idx != nullptr;
  info.tensors = {&codes, &scales};
  if (zeros) info.tensors.push_back(zeros);
  if (offsets) info.tensors.push_back(offsets);
  if (g_idx) info.tensors.push_back(g_idx);
  if (const Tensor* layout = plan.find(prefix + "layout")) info.tensors.push_back(layout);
  const Parts parts{codes, scales, zeros, offsets, g_idx, format, n, k, block};
  plan.add(std::make_unique<CanonicalLayer>(std::move(info), [parts] { return load(parts); }));
}

void plan_quantfuse(Plan& plan) {
  const auto& metadata = plan.checkpoint.metadata();
  plan.format = "quantfuse";
  if (plan.find("codes")) return add_layer(plan, "", declared_by(Settings(Json(metadata), "__metadata__")));
  for (const std::string& module : plan.modules_with(".codes")) {
    if (const Tensor* layout = plan.find(module + ".layout")) {
      add_layer(plan, module + ".", declared_by(*layout));
      continue;
    }
    const std::string name = module + ".weight", what = "__metadata__['" + printable(name) + "']";
    const auto found = metadata.find(name);
    if (found == metadata.end()) fail(what + " is missing, and so is " + printable(module) + ".layout");
    add_layer(plan, module + ".", declared_by(Settings(parse_json(found->second, what), what)));
  }
}

}  // namespace

extern const Importer quantfuse_importer;
const Importer quantfuse_importer{
    "quantfuse", {}, {".codes", ".scales", ".zeros", ".offsets", ".g_idx", ".layout"}, plan_quantfuse};

}  // namespace quantfuse::checkpoint
