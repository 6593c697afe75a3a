// SPDX-License-Identifier: Apache-2.0
//
// The formulas of awq_search.h as written, sums in double, one number at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "awq_search/awq_search.h"
#include "core/element.h"

namespace quantfuse::awq_search_ref {
using namespace awq_search;
using quantize::Quantizer;
namespace {

class Reference {
 public:
  explicit Reference(const Problem& p) : p_(p), magnitudes_(p.k), scale_(p.k) {}

  void run() {
    find_magnitudes(p_, magnitudes_.data());
    int32_t best = 0;
    double least = 0;
    for (int32_t i = 0; i <= p_.grid; ++i) {
      find_channel_scale(p_, magnitudes_.data(), i, scale_.data());
      const double loss = total_loss();
      if (p_.loss) p_.loss.as<float>()[i] = static_cast<float>(loss);
      if (i == 0 || loss < least) best = i, least = loss;
    }
    find_channel_scale(p_, magnitudes_.data(), best, scale_.data());
    std::copy(scale_.begin(), scale_.end(), p_.channel_scale.as<float>());
    if (!p_.clip) return;
    for (int64_t r = 0; r < p_.n; ++r) {
      for (int64_t g = 0; g < p_.groups; ++g) p_.clip.row<float>(r)[g] = best_clip(r, g);
    }
  }

 private:
  int64_t end_of(int64_t g) const { return p_.k - g * p_.group < p_.group ? p_.k : (g + 1) * p_.group; }
  float scaled(int64_t r, int64_t c) const { return float_at(p_.weight, r, c) * scale_[c]; }

  struct Range {
    float low = 0, high = 0;
    float largest() const { return std::max(high, -low); }
  };
  Range range_of(int64_t r, int64_t g) const {
    Range range;
    for (int64_t c = g * p_.group; c < end_of(g); ++c) {
      range.low = std::min(range.low, scaled(r, c));
      range.high = std::max(range.high, scaled(r, c));
    }
    return range;
  }

  // The number that v becomes in a group of the given range.
  float quantized(float v, const Range& range) const {
    const Quantizer z = quantizer_from_range(p_.kind(), p_.range, range.low, range.high);
    const int code = round_saturate(v * (1.0f / z.scale), -512, 512) + z.zero;
    return static_cast<float>(std::clamp(code, p_.range.lowest, p_.range.highest) - z.zero) * z.scale;
  }

  double total_loss() const {
    double total = 0;
    std::vector<double> d(p_.k);
    for (int64_t r = 0; r < p_.n; ++r) {
      for (int64_t g = 0; g < p_.groups; ++g) {
        const Range range = range_of(r, g);
        for (int64_t c = g * p_.group; c < end_of(g); ++c)
          d[c] = quantized(scaled(r, c), range) / static_cast<double>(scale_[c]) - float_at(p_.weight, r, c);
      }
      for (int64_t t = 0; t < p_.t; ++t) {
        double y = 0;
        for (int64_t c = 0; c < p_.k; ++c) y += d[c] * float_at(p_.x, t, c);
        total += y * y;
      }
    }
    return total;
  }

  // e H e^T is the sum over the inputs of ((x / s) e^T)^2, piece by piece of the group.
  double clipped_error(int64_t r, int64_t g, const Range& range, float factor) const {
    const float limit = factor * range.largest();
    const Range clipped = {std::max(range.low, -limit), std::min(range.high, limit)};
    double error = 0;
    for (int64_t begin = g * p_.group; begin < end_of(g); begin += p_.piece()) {
      for (int64_t t = 0; t < p_.t; ++t) {
        double y = 0;
        for (int64_t c = begin; c < std::min(begin + p_.piece(), end_of(g)); ++c) {
          const float v = scaled(r, c), limited = std::clamp(v, clipped.low, clipped.high);
          y += (quantized(limited, clipped) - static_cast<double>(v)) * float_at(p_.x, t, c) / scale_[c];
        }
        error += y * y;
      }
    }
    return error;
  }

  float best_clip(int64_t r, int64_t g) const {
    const Range range = range_of(r, g);
    float best = clip_factor(0);
    double least = clipped_error(r, g, range, best);
    for (int step = 1; step < kClipSteps; ++step) {
      const double error = clipped_error(r, g, range, clip_factor(step));
      if (error < least) least = error, best = clip_factor(step);
    }
    return best * range.largest();
  }

  const Problem& p_;
  std::vector<float> magnitudes_, scale_;
};

Verdict accepts(const Problem&) { return kYes; }
void launch(const Problem& p, const Launch&) { Reference(p).run(); }

}  // namespace

extern const Kernel<Problem> entry = {"awq_search_ref", Target::reference, accepts, no_workspace<Problem>,
                                      launch};

}  // namespace quantfuse::awq_search_ref
