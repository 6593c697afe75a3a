// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/scheme.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

// The block is the default; a fixed one is part of what the name means.
struct Row {
  const char* name;
  qf_format format;
  qf_block block;
  bool has_fixed_block = false, has_e8m0_scale = false;
  qf_format act_format = QF_FORMAT_NONE;
  int64_t act_group = 0;
};

constexpr bool kFixed = true, kE8m0 = true;
constexpr Row kSchemes[] = {
    {"int4", QF_INT4, {1, 128}},
    {"int8", QF_INT8, {1, 0}},
    {"fp8", QF_FP8_E4M3, {1, 0}},
    {"fp8-block", QF_FP8_E4M3, {128, 128}, kFixed},
    {"fp8-e5m2", QF_FP8_E5M2, {1, 0}},
    {"fp4", QF_FP4_E2M1, {1, 128}},
    {"mxfp4", QF_FP4_E2M1, {1, 32}, kFixed, kE8m0},
    {"mxfp8", QF_FP8_E4M3, {1, 32}, kFixed, kE8m0},
    {"w8a8-int8", QF_INT8, {1, 0}, false, false, QF_INT8},
    {"w8a8-fp8", QF_FP8_E4M3, {1, 0}, false, false, QF_FP8_E4M3},
    {"w8a8-fp8-block", QF_FP8_E4M3, {128, 128}, kFixed, false, QF_FP8_E4M3, 128},
    {"w4a8", QF_INT4, {1, 128}, false, false, QF_INT8},
};

[[noreturn]] void refuse(const std::string& message) { throw std::invalid_argument(message); }

qf_block block_from(const std::string& group) {
  if (group == "channel") return {1, 0};
  if (group == "tensor") return {0, 0};
  int64_t size = -1;
  const auto [end, error] = std::from_chars(group.data(), group.data() + group.size(), size);
  if (error != std::errc() || end != group.data() + group.size() || size < 0) {
    refuse("--group: expected a number of columns, channel or tensor, not '" + group + "'");
  }
  return {1, size};
}

}  // namespace

int Scheme::bits() const { return is_packed_4bit(format) ? 4 : 8; }

std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const Row& row : kSchemes) names.emplace_back(row.name);
  return names;
}

Scheme scheme_from(const SchemeOptions& options) {
  const auto* row = std::find_if(std::begin(kSchemes), std::end(kSchemes),
                                 [&](const Row& candidate) { return options.name == candidate.name; });
  if (row == std::end(kSchemes)) refuse("--scheme: there is no scheme '" + options.name + "'");
  Scheme scheme{options.name,          row->format,     row->has_e8m0_scale, row->block,
                options.is_asymmetric, row->act_format, row->act_group};
  if (options.group) {
    const qf_block block = block_from(*options.group);
    const bool is_same = block.rows == row->block.rows && block.cols == row->block.cols;
    if (row->has_fixed_block && !is_same) {
      refuse(
          fmt::format("--group: {} always has blocks of {}x{}", row->name, row->block.rows, row->block.cols));
    }
    scheme.block = block;
  }
  if (scheme.is_asymmetric && !is_integer(scheme.format)) {
    refuse(fmt::format("--asymmetric: {} is a floating-point format, which has no zero points", row->name));
  }
  if (scheme.is_asymmetric && scheme.block.rows != 1) {
    refuse("--asymmetric: zero points are those of rows or of groups, not of a whole tensor");
  }
  return scheme;
}

}  // namespace quantfuse::checkpoint
