// SPDX-License-Identifier: Apache-2.0
//
// torchao, flattened into safetensors. The weight M.weight becomes M._weight_qdata, M._weight_scale and, of
// integers, M._weight_zero_point; what they are stands in the file's __metadata__ under "M.weight":
//
//   {"_type": "Int8Tensor", "_data": {"block_size": [1, 128], "dtype": {"_data": "bfloat16"}},
//    "_tensor_data_names": ["qdata", "scale", "zero_point"]}
//
//   _type                       qdata             scale
//   Int8Tensor                  I8 [out, in]      one per block
//   IntxUnpackedToInt8Tensor    I8 [out, in], of target_dtype's range
//   Float8Tensor                F8_E4M3 [out, in]
//
//   w = (qdata - zero_point) * scale, in float32, rounded to dtype
#include <fmt/format.h>

#include <algorithm>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/scale_grid.h"

namespace quantfuse::checkpoint {
namespace {

// {"_type": "torch.dtype", "_data": "bfloat16"}
std::string dtype_of(const Settings& data, const char* key) {
  const auto object = data.find_object(key);
  if (!object) data.refuse(key, "a torch.dtype");
  return object->text("_data");
}

// "int4" -> 4
int bits_of(const Settings& data) {
  const std::string dtype = dtype_of(data, "target_dtype");
  if (dtype.size() != 4 || !dtype.starts_with("int") || dtype[3] < '1' || dtype[3] > '8') {
    data.refuse("target_dtype", "int1 to int8");
  }
  return dtype[3] - '0';
}

// [1, 128] over a weight [n, k]; a block as large as the weight is the whole dimension.
qf_block block_of(const Settings& data, int64_t n, int64_t k) {
  const auto size = data.find_integers("block_size");
  const bool is_good = size && size->size() == 2 && (*size)[0] > 0 && (*size)[1] > 0;
  if (!is_good) data.refuse("block_size", "[ROWS, COLUMNS]");
  const auto whole = [](int64_t part, int64_t dim) { return part >= dim && part > 1 ? 0 : part; };
  return {whole((*size)[0], n), whole((*size)[1], k)};
}

void add_layer(Plan& plan, const std::string& name, const Settings& entry) {
  const std::string type = entry.text("_type");
  if (type != "Int8Tensor" && type != "IntxUnpackedToInt8Tensor" && type != "Float8Tensor") {
    entry.refuse("_type",
                 "Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor: the others are not supported");
  }
  const auto data = entry.find_object("_data");
  if (!data) entry.refuse("_data", "an object");
  const size_t dot = name.rfind('.');
  const size_t leaf = dot == std::string::npos ? 0 : dot + 1;
  const std::string stem = name.substr(0, leaf) + "_" + name.substr(leaf) + "_";

  const Tensor &qdata = plan.need(stem + "qdata"), &scale = plan.need(stem + "scale");
  for (const std::string& part : entry.texts("_tensor_data_names")) {
    if (part != "qdata" && part != "scale" && part != "zero_point" && plan.find(stem + part)) {
      fail(fmt::format("{} is a part of a {} that is not supported", printable(stem + part), type));
    }
  }
  const bool is_float = type == "Float8Tensor";
  expect_type(qdata, {is_float ? Type::e4m3 : Type::i8});
  expect_type(scale, {Type::f32, Type::bf16, Type::f16});
  expect_rank(qdata, 2);
  const int64_t n = qdata.size(0), k = qdata.size(1);
  const qf_block block = block_of(*data, n, k);
  const std::string why = fmt::format("qdata is {} in blocks of {}", shape_text(qdata.shape),
                                      shape_text(*data->find_integers("block_size")));
  expect_grid(scale, n, k, block, why);
  const auto parts = entry.texts("_tensor_data_names");
  const bool has_zero = std::find(parts.begin(), parts.end(), "zero_point") != parts.end();
  const Tensor* zero = is_float   ? nullptr
                       : has_zero ? &plan.need(stem + "zero_point")
                                  : plan.find(stem + "zero_point");
  if (zero) {
    expect_type(*zero, {Type::i8});
    expect_grid(*zero, n, k, block, why);
  }

  LayerInfo info;
  info.name = name;
  info.shape = qdata.shape;
  info.bits = type == "IntxUnpackedToInt8Tensor" ? bits_of(*data) : 8;
  info.format = is_float ? "fp8_e4m3" : fmt::format("int{}", info.bits);
  info.block = block;
  if (!float_type_from_name(dtype_of(*data, "dtype"), info.rounding)) data->refuse("dtype", "a float type");
  info.tensors = {&qdata, &scale};
  if (zero) info.tensors.push_back(zero);
  const int bits = info.bits;
  plan.add(
      std::make_unique<CanonicalLayer>(std::move(info), [&qdata, &scale, zero, n, k, block, bits, is_float] {
        CanonicalWeight w = load_scaled(scale, is_float ? QF_FP8_E4M3 : integer_format(bits), n, k, block);
        if (is_float) {
          w.codes.assign(qdata.bytes.begin(), qdata.bytes.end());
        } else {
          w.codes = codes_from_int8(qdata, n, k, bits);
        }
        if (zero) w.zero = load_zeros_int8(*zero);
        return w;
      }));
}

void plan_torchao(Plan& plan) {
  plan.format = "torchao";
  for (const auto& [name, text] : plan.checkpoint.metadata()) {
    if (!text.starts_with("{")) continue;  // "format": "pt"
    const std::string what = "__metadata__." + printable(name);
    const Settings entry(parse_json(text, what), what);
    if (entry.find_text("_type").value_or("Tensor") != "Tensor") add_layer(plan, name, entry);
  }
  if (!plan.layers.empty()) plan.format += " " + plan.layers[0]->info().format;
}

}  // namespace

extern const Importer torchao_importer;
const Importer torchao_importer{
    "torchao", {"._weight_qdata"}, {"._weight_scale", "._weight_zero_point"}, plan_torchao};

}  // namespace quantfuse::checkpoint
