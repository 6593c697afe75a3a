// SPDX-License-Identifier: Apache-2.0
//
// GPTQ, as auto-gptq and GPTQModel write it. Codes are packed along the inputs, zero points along the
// outputs, both in natural order, a 3-bit code across words where it falls so:
//
//   qweight  I32 [ceil(in*bits/32), out]     qzeros  I32 [groups, ceil(out*bits/32)]
//   scales   F16 [groups, out]               g_idx   I32 [in], the group of each input
//
//   w[o,i] = (q - z) * scale of group g_idx[i], in float16
//
// Version 2 stores zero points as they are, version 1 less one. For 2, 4 and 8 bits that one was taken off
// the whole word (word - 0x11111111 at 4 bits), so that a zero point of 0 borrowed from its neighbour: it is
// put back the same way, before the word is split. At 3 bits every field was reduced by itself, modulo 8.
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/name_pattern.h"
#include "checkpoint/packing.h"
#include "core/dtype.h"

namespace quantfuse::checkpoint {
namespace {

enum class Version { v1 = 1, v2 = 2 };

struct Parts {
  const Tensor &qweight, &qzeros, &scales;
  const Tensor* g_idx;  // null: input / group
  int bits;
  int64_t n, k, group, num_groups;
  Version version;
  bool is_symmetric;  // as the config says
};

// 1 in every field of a word.
constexpr uint32_t ones(int bits) { return bits == 2 ? 0x55555555u : bits == 4 ? 0x11111111u : 0x01010101u; }

uint32_t stored_zero(const Tensor& qzeros, int64_t group, int64_t out, int bits, Version version) {
  const int64_t first = group * qzeros.size(1);
  const uint32_t mask = (1u << bits) - 1;
  if (bits == 3) {
    const uint32_t field = FieldStream{qzeros, first, 1, bits}.at(out);
    return version == Version::v1 ? (field + 1) & mask : field;
  }
  const int64_t bit = out * bits;
  const uint32_t word = load<uint32_t>(qzeros, first + bit / 32) + (version == Version::v1 ? ones(bits) : 0);
  return word >> (bit % 32) & mask;
}

// Whether all zero points, read as `version` has them, are `value`.
bool are_all(const Tensor& qzeros, int64_t n, int bits, Version version, uint32_t value) {
  for (int64_t group = 0; group < qzeros.size(0); ++group) {
    for (int64_t out = 0; out < n; ++out) {
      if (stored_zero(qzeros, group, out, bits, version) != value) return false;
    }
  }
  return true;
}

std::vector<int8_t> load_zeros(const Parts& p) {
  const uint32_t middle = 1u << (p.bits - 1);
  // Symmetric zero points are the middle. Read as the wrong version they are off by one, all of them.
  const uint32_t mislabelled = p.version == Version::v1 ? middle + 1 : middle - 1;
  if (p.is_symmetric && p.n > 0 && p.num_groups > 0 &&
      are_all(p.qzeros, p.n, p.bits, p.version, mislabelled & ((1u << p.bits) - 1))) {
    fail(fmt::format(
        "{}: read as version {} every zero point is {}, but a symmetric {}-bit one is {}: this is "
        "version {}; state checkpoint_format={}",
        printable(p.qzeros.name), static_cast<int>(p.version), mislabelled, p.bits, middle,
        p.version == Version::v1 ? 2 : 1, p.version == Version::v1 ? "gptq_v2" : "gptq"));
  }
  std::vector<int8_t> zeros(static_cast<size_t>(p.n * p.num_groups));
  for (int64_t group = 0; group < p.num_groups; ++group) {
    for (int64_t out = 0; out < p.n; ++out) {
      const auto zero = static_cast<int>(stored_zero(p.qzeros, group, out, p.bits, p.version));
      zeros[static_cast<size_t>(out * p.num_groups + group)] =
          static_cast<int8_t>(zero - static_cast<int>(middle));
    }
  }
  if (std::all_of(zeros.begin(), zeros.end(), [](int8_t zero) { return zero == 0; })) zeros.clear();
  return zeros;
}

CanonicalWeight load(const Parts& p) {
  CanonicalWeight w;
  w.format = integer_format(p.bits);
  w.n = p.n, w.k = p.k;
  w.block = {1, p.group};
  w.num_groups = p.num_groups;
  w.codes = codes_from_columns(p.qweight, p.n, p.k, p.bits);
  w.scale = load_scales_transposed(p.scales);
  w.zero = load_zeros(p);
  if (p.g_idx) w.g_idx = load_group_index(*p.g_idx, p.num_groups);
  // Without act-order g_idx says what the group size says already.
  const auto is_in_order = [&] {
    for (int64_t i = 0; i < p.k; ++i) {
      if (w.g_idx[static_cast<size_t>(i)] != i / w.block_cols()) return false;
    }
    return true;
  };
  if (p.g_idx && is_in_order()) w.g_idx.clear();
  return w;
}

// The layer-wise exceptions of GPTQModel: {"+:PATTERN": {fields}, "-:PATTERN": {}}.
class Exceptions {
 public:
  explicit Exceptions(const Settings& settings) {
    const auto dynamic = settings.find_object("dynamic");
    if (!dynamic) return;
    for (auto& [key, fields] : dynamic->objects()) {
      if (key.starts_with("-:")) continue;
      rules_.emplace_back(NamePattern(key.starts_with("+:") ? key.substr(2) : key), fields);
    }
  }
  Settings apply(const Settings& settings, const std::string& module) const {
    for (const auto& [pattern, fields] : rules_) {
      if (pattern.matches(module)) return settings.merged(fields);
    }
    return settings;
  }

 private:
  std::vector<std::pair<NamePattern, Settings>> rules_;
};

Version version_from_zeros(const Tensor& qzeros, int64_t n, int bits) {
  const uint32_t middle = 1u << (bits - 1);
  for (const Version version : {Version::v1, Version::v2}) {
    if (n > 0 && are_all(qzeros, n, bits, version, middle)) return version;
  }
  fail(fmt::format(
      "quantization_config.checkpoint_format is missing, and the zero points of {} are not "
      "symmetric ones, which would tell version 1 from 2: state checkpoint_format=gptq or gptq_v2",
      printable(qzeros.name)));
}

// What the config says; none where it says nothing.
std::optional<Version> version_of(const Settings& settings) {
  const auto format = settings.find_text("checkpoint_format"), also = settings.find_text("format");
  if (format && also && *format != *also)
    settings.refuse("format", "the same as checkpoint_format, " + *format);
  const char* key = format ? "checkpoint_format" : "format";
  const auto name = format ? format : also;
  if (!name) return std::nullopt;
  if (*name == "gptq") return Version::v1;
  if (*name == "gptq_v2") return Version::v2;
  settings.refuse(key, "gptq or gptq_v2: the others are not supported");
}

void add_layer(Plan& plan, const std::string& module, const Settings& settings,
               std::optional<Version>& version) {
  const int64_t bits_said = settings.integer("bits"), group_size = settings.integer("group_size");
  if (bits_said != 2 && bits_said != 3 && bits_said != 4 && bits_said != 8) {
    settings.refuse("bits", "2, 3, 4 or 8");
  }
  if (group_size != -1 && group_size <= 0) settings.refuse("group_size", "-1 or more than 0");
  const int bits = static_cast<int>(bits_said);

  const Tensor& qweight = plan.need(module + ".qweight");
  const Tensor& qzeros = plan.need(module + ".qzeros", qweight.name);
  const Tensor& scales = plan.need(module + ".scales", qweight.name);
  const bool is_reordered = settings.find_flag("desc_act").value_or(false);
  const Tensor* g_idx =
      is_reordered ? &plan.need(module + ".g_idx", qweight.name) : plan.find(module + ".g_idx");
  expect_type(qweight, {Type::i32});
  expect_type(qzeros, {Type::i32});
  expect_type(scales, {Type::f16, Type::bf16, Type::f32});
  expect_rank(qweight, 2);
  if (g_idx) expect_type(*g_idx, {Type::i32});
  if (g_idx) expect_rank(*g_idx, 1);

  const int64_t n = qweight.size(1), k = g_idx ? g_idx->size(0) : qweight.size(0) * 32 / bits;
  expect_shape(qweight, {packed_words(k, bits), n},
               fmt::format("{} inputs{} at {} bits", k, g_idx ? " (g_idx)" : "", bits));
  const int64_t group = group_size == -1 || group_size >= k ? 0 : group_size;
  const int64_t num_groups = ceil_div(k, group ? group : std::max<int64_t>(k, 1));
  const std::string why =
      fmt::format("qweight {} holds {} outputs of {} inputs at {} bits, and group_size is {}",
                  shape_text(qweight.shape), n, k, bits, group_size);
  expect_shape(scales, {num_groups, n}, why);
  expect_shape(qzeros, {num_groups, packed_words(n, bits)}, why);
  if (!version) version = version_from_zeros(qzeros, n, bits);

  const bool is_symmetric = settings.find_flag("sym").value_or(false);
  LayerInfo info;
  info.name = module + ".weight";
  info.shape = {n, k};
  info.format = fmt::format("int{}", bits);
  info.bits = bits;
  info.block = {1, group};
  info.is_asymmetric = !is_symmetric;
  info.has_g_idx = is_reordered;
  info.rounding = scales.type;
  info.tensors = {&qweight, &qzeros, &scales};
  if (g_idx) info.tensors.push_back(g_idx);
  const Parts parts{qweight, qzeros, scales, g_idx, bits, n, k, group, num_groups, *version, is_symmetric};
  plan.add(std::make_unique<CanonicalLayer>(std::move(info), [parts] { return load(parts); }));
}

void plan_gptq(Plan& plan) {
  const Settings& settings = plan.settings;
  if (settings.find_text("pack_dtype").value_or("int32") != "int32") settings.refuse("pack_dtype", "int32");
  const Exceptions exceptions(settings);
  std::optional<Version> version = version_of(settings);
  for (const std::string& module : plan.modules_with(".qweight")) {
    add_layer(plan, module, exceptions.apply(settings, module), version);
  }
  plan.format = fmt::format("gptq v{}", static_cast<int>(version.value_or(Version::v1)));
}

}  // namespace

extern const Importer gptq_importer;
const Importer gptq_importer{"gptq", {".qweight"}, {".qzeros", ".scales", ".g_idx"}, plan_gptq};

}  // namespace quantfuse::checkpoint
