// SPDX-License-Identifier: Apache-2.0
//
// GGUF: every tensor of a block type is a layer (gguf_blocks.h has their bytes), and the format needs no
// config. All of them are exact in the canonical form: minima are offsets, and the types with a table have
// a format of their own.
#include "checkpoint/gguf_blocks.h"

#include <fmt/format.h>

#include "checkpoint/error.h"
#include "checkpoint/import.h"
#include "formats/codes.h"

namespace quantfuse::checkpoint {
namespace {

template <class Block>
constexpr bool kHasOffset = requires(const Block& b) {
  b.offset(0);
};

// What is taken off the codes, and off the zero point, so that unsigned codes of 4 bits are INT4.
template <class Block>
constexpr int kShift = Block::kLowest == 0 && Block::kHighest == 15 ? 8 : 0;

// The canonical format that holds all codes of a block type.
template <class Block>
constexpr qf_format kFormat =
    Block::kLowest - kShift<Block> >= -8 && Block::kHighest - kShift<Block> <= 7 ? QF_INT4 : QF_INT8;
template <>
constexpr qf_format kFormat<gguf::MXFP4> = QF_FP4_E2M1;
template <>
constexpr qf_format kFormat<gguf::IQ4_NL> = QF_IQ4_NL;
template <>
constexpr qf_format kFormat<gguf::IQ4_XS> = QF_IQ4_NL;

template <class Block>
class BlockLayer final : public Layer {
 public:
  using Layer::Layer;

  void dequantize(std::span<float> out) const override {
    for_each_block([&](const Block& block, int64_t first) {
      for (int i = 0; i < Block::kCount; ++i) {
        const int group = i / Block::kGroup;
        float value = block.scale(group) * static_cast<float>(block.code(i));
        if constexpr (kHasOffset<Block>) value += block.offset(group);
        out[static_cast<size_t>(first + i)] = value;
      }
    });
  }

  LayerValues values() const override {
    LayerValues values;
    values.num_codes = info().numel();
    for_each_block([&](const Block& block, int64_t) {
      for (int group = 0; group < Block::kCount / Block::kGroup; ++group)
        values.add_scale(block.scale(group));
      for (int i = 0; i < Block::kCount; ++i) {
        const int code = block.code(i);
        values.num_saturated += code <= Block::kLowest || code >= Block::kHighest;
      }
    });
    return values;
  }

  std::optional<CanonicalWeight> canonical() const override {
    CanonicalWeight w;
    w.format = kFormat<Block>;
    w.k = info().shape.back();
    w.n = w.k ? info().numel() / w.k : 0;
    w.block = {1, Block::kGroup};
    w.num_groups = w.k / Block::kGroup;
    w.codes.resize(static_cast<size_t>(w.n * w.row_bytes()));
    for_each_block([&](const Block& block, int64_t first) {
      // A row is a whole number of blocks, so that the flattened codes are also those of the rows.
      for (int i = 0; i < Block::kCount; ++i) {
        const bool is_4bit = is_packed_4bit(w.format);
        store_code(w.format, w.codes.data(), first + i,
                   static_cast<uint8_t>(code_of(block, i) & (is_4bit ? 0x0f : 0xff)));
      }
      add_scales(w, block);
    });
    if (kShift<Block> != 0) w.zero.assign(w.scale.size(), static_cast<int8_t>(-kShift<Block>));
    make_scales_positive(w);
    return w;
  }

 private:
  static int code_of(const Block& block, int i) {
    if constexpr (requires { block.e2m1(i); }) return block.e2m1(i);
    else if constexpr (requires { block.index(i); }) return block.index(i);
    else return block.code(i) - kShift<Block>;
  }

  void add_scales(CanonicalWeight& w, const Block& block) const {
    if constexpr (requires { block.e; }) {
      if (block.e == E8m0::kNan) fail(printable(info().name) + ": a scale of 2^128 has no canonical form");
      w.scale_e8m0.push_back(block.e);
    } else {
      for (int group = 0; group < Block::kCount / Block::kGroup; ++group) {
        w.scale.push_back(block.scale(group));
        if (!is_finite(w.scale.back())) fail(printable(info().name) + ": a scale is not finite");
        if constexpr (kHasOffset<Block>) {
          w.offset.push_back(block.offset(group));
          if (!is_finite(w.offset.back())) fail(printable(info().name) + ": a minimum is not finite");
        }
      }
    }
  }

  template <class Visit>
  void for_each_block(Visit&& visit) const {
    const auto bytes = info().tensors[0]->bytes;
    for (size_t i = 0; i < bytes.size() / sizeof(Block); ++i) {
      Block block;
      std::memcpy(&block, bytes.data() + i * sizeof(Block), sizeof(Block));
      visit(block, static_cast<int64_t>(i) * Block::kCount);
    }
  }
};

template <class Block>
std::unique_ptr<Layer> make_layer(const Tensor& tensor) {
  LayerInfo info;
  info.name = tensor.name;
  info.shape = tensor.shape;
  info.format = type_name(tensor.type);
  info.bits = Block::kBits;
  info.block = {1, Block::kGroup};
  info.is_asymmetric = kHasOffset<Block>;
  info.tensors = {&tensor};
  return std::make_unique<BlockLayer<Block>>(std::move(info));
}

std::unique_ptr<Layer> layer_of(const Tensor& tensor) {
  switch (tensor.type) {
    case Type::q4_0: return make_layer<gguf::Q4_0>(tensor);
    case Type::q4_1: return make_layer<gguf::Q4_1>(tensor);
    case Type::q5_0: return make_layer<gguf::Q5_0>(tensor);
    case Type::q5_1: return make_layer<gguf::Q5_1>(tensor);
    case Type::q8_0: return make_layer<gguf::Q8_0>(tensor);
    case Type::q2_k: return make_layer<gguf::Q2_K>(tensor);
    case Type::q3_k: return make_layer<gguf::Q3_K>(tensor);
    case Type::q4_k: return make_layer<gguf::Q4_K>(tensor);
    case Type::q5_k: return make_layer<gguf::Q5_K>(tensor);
    case Type::q6_k: return make_layer<gguf::Q6_K>(tensor);
    case Type::iq4_nl: return make_layer<gguf::IQ4_NL>(tensor);
    case Type::iq4_xs: return make_layer<gguf::IQ4_XS>(tensor);
    case Type::tq2_0: return make_layer<gguf::TQ2_0>(tensor);
    case Type::mxfp4: return make_layer<gguf::MXFP4>(tensor);
    default: return nullptr;
  }
}

void plan_gguf(Plan& plan) {
  plan.format = "gguf";
  for (const Tensor& tensor : plan.checkpoint.tensors()) {
    if (auto layer = layer_of(tensor)) plan.add(std::move(layer));
  }
}

}  // namespace

extern const Importer gguf_importer;
const Importer gguf_importer{"gguf", {}, {}, plan_gguf};

}  // namespace quantfuse::checkpoint
