// SPDX-License-Identifier: Apache-2.0
//
// A quantized weight of a checkpoint. Describing one reads headers alone; its numbers are read when asked
// for.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/tensor.h"
#include "quantfuse/quantfuse.h"

namespace quantfuse::checkpoint {

// What qf_weight describes, with its memory: w[n,k] = (codes - zero) * scale + offset.
struct CanonicalWeight {
  qf_format format = QF_FORMAT_NONE;
  int64_t n = 0, k = 0;
  qf_block block = {1, 0};
  int64_t num_groups = 0;           // columns of the scales
  std::vector<uint8_t> codes;       // [n, k], or [n, ceil(k/2)] for 4-bit codes
  std::vector<float> scale;         // [ceil(n / block.rows), num_groups]
  std::vector<uint8_t> scale_e8m0;  // in place of `scale`
  std::vector<int8_t> zero;         // like the scales; empty: symmetric
  std::vector<float> offset;        // like the scales; empty: none
  std::vector<int32_t> g_idx;       // [k], the group of each column; empty: k / block.cols

  int64_t row_bytes() const;
  int64_t block_rows() const { return block.rows ? block.rows : n; }  // 0 means all
  int64_t block_cols() const { return block.cols ? block.cols : k; }
  float scale_at(int64_t i) const;
  // Where there is none, -0: what can be added to any number and leaves its bits.
  float offset_at(int64_t i) const { return offset.empty() ? -0.0f : offset[static_cast<size_t>(i)]; }
};

struct LayerInfo {
  std::string name;            // of the weight that it stands for: "model.layers.0.mlp.up_proj.weight"
  std::vector<int64_t> shape;  // [out, in]; a tensor of a GGUF may have another rank
  std::string format;          // "int4", "fp8_e4m3", "nf4", "Q4_K"
  int bits = 0;                // of a code
  qf_block block = {1, 0};     // the numbers that share a scale
  bool is_asymmetric = false;
  bool has_g_idx = false;
  Type rounding = Type::f32;  // what the format's own tool rounds its result to
  std::vector<const Tensor*> tensors;

  int64_t bytes() const;
  int64_t numel() const;
  void prefetch_pages() const;  // of its tensors, before all of them are read
  void release_pages() const;   // and after
};

// What only the data can tell.
struct LayerValues {
  float scale_min = 0, scale_max = 0;
  int64_t num_saturated = 0;  // codes at either end of their range
  int64_t num_codes = 0;

  void add_scale(float scale);

 private:
  bool has_scale_ = false;
};

class Layer {
 public:
  explicit Layer(LayerInfo info) : info_(std::move(info)) {}
  virtual ~Layer() = default;
  const LayerInfo& info() const { return info_; }

  // The form that linear() takes; none where the format does not map to it exactly.
  virtual std::optional<CanonicalWeight> canonical() const { return std::nullopt; }
  // All numbers of the weight, row-major, exactly as the format's own tool gives them.
  virtual void dequantize(std::span<float> out) const = 0;
  virtual LayerValues values() const = 0;

 private:
  LayerInfo info_;
};

// A layer whose canonical form is exact, so that all the rest follows from it.
class CanonicalLayer final : public Layer {
 public:
  using Load = std::function<CanonicalWeight()>;
  CanonicalLayer(LayerInfo info, Load load) : Layer(std::move(info)), load_(std::move(load)) {}

  std::optional<CanonicalWeight> canonical() const override;
  void dequantize(std::span<float> out) const override;
  LayerValues values() const override;

 private:
  Load load_;
};

// Integer codes of `bits` bits: up to 4 live in INT4 codes, up to 8 in INT8 codes.
inline qf_format integer_format(int bits) { return bits <= 4 ? QF_INT4 : QF_INT8; }

// The linear kernels take positive scales alone, except of codebooks. Where one is negative,
// (c - z) * s = (~c - ~z) * -s; where it is 0, all codes become the zero point under a scale of 1. The
// numbers stay the same (-0 may become 0).
void make_scales_positive(CanonicalWeight& weight);

// All elements of a scale tensor as floats. Fails, naming the tensor, at the first that is not finite.
std::vector<float> load_scales(const Tensor& tensor);
// The same for a tensor [cols, rows], as [rows, cols].
std::vector<float> load_scales_transposed(const Tensor& tensor);
// All elements of a group index; fails, naming the tensor, at the first that is not in [0, num_groups).
std::vector<int32_t> load_group_index(const Tensor& tensor, int64_t num_groups);

}  // namespace quantfuse::checkpoint
