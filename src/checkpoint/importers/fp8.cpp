// SPDX-License-Identifier: Apache-2.0
//
// DeepSeek's FP8 with 2-D blocks, which Transformers calls fine-grained FP8:
//
//   weight  F8_E4M3 [out, in]     weight_scale_inv  F32 (or F8_E8M0) [ceil(out/rows), ceil(in/cols)]
//
//   w[o,i] = weight * weight_scale_inv[o / rows, i / cols], in float32
//
// Despite its name the scale is multiplied by. The block is the config's weight_block_size: it cannot be had
// from the grid where it does not divide the weight.
#include <fmt/format.h>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "checkpoint/scale_grid.h"

namespace quantfuse::checkpoint {
namespace {

qf_block block_of(const Settings& settings) {
  const auto block = settings.find_integers("weight_block_size");
  const bool is_good = block && block->size() == 2 && (*block)[0] > 0 && (*block)[1] > 0;
  if (!is_good) settings.refuse("weight_block_size", "[ROWS, COLUMNS]");
  return {(*block)[0], (*block)[1]};
}

void add_layer(Plan& plan, const Tensor& weight, const qf_block& block) {
  const Tensor& scale = plan.need(weight.name + "_scale_inv", weight.name);
  expect_type(scale, {Type::f32, Type::bf16, Type::f16, Type::e8m0});
  expect_rank(weight, 2);
  const int64_t n = weight.size(0), k = weight.size(1);
  expect_shape(scale, {scale_grid(n, k, block).rows, scale_grid(n, k, block).cols},
               fmt::format("the weight is {} and weight_block_size is [{}, {}]", shape_text(weight.shape),
                           block.rows, block.cols));
  LayerInfo info;
  info.name = weight.name;
  info.shape = weight.shape;
  info.format = "fp8_e4m3";
  info.bits = 8;
  info.block = block;
  info.tensors = {&weight, &scale};
  plan.add(std::make_unique<CanonicalLayer>(std::move(info), [&weight, &scale, n, k, block] {
    CanonicalWeight w = load_scaled(scale, QF_FP8_E4M3, n, k, block);
    w.codes.assign(weight.bytes.begin(), weight.bytes.end());
    return w;
  }));
}

void plan_fp8(Plan& plan) {
  const Settings& settings = plan.settings;
  const qf_block block = block_of(settings);
  const auto unconverted = settings.texts("modules_to_not_convert");
  plan.format = "fp8 block";
  for (const Tensor& weight : plan.checkpoint.tensors()) {
    if (weight.type != Type::e4m3) continue;
    const std::string module = weight.name.substr(0, weight.name.rfind('.'));
    if (is_listed(unconverted, module)) {
      settings.refuse("modules_to_not_convert",
                      "a list without " + printable(module) + ", which is quantized");
    }
    add_layer(plan, weight, block);
  }
}

}  // namespace

extern const Importer fp8_importer;
const Importer fp8_importer{"fp8", {"_scale_inv"}, {}, plan_fp8};

}  // namespace quantfuse::checkpoint
