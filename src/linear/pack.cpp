// SPDX-License-Identifier: Apache-2.0
//
// qf_weight_pack: for the CPU from canonical rows to the panels of packed.h; for CUDA see packed_strips.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/device.h"
#include "core/operation.h"
#include "cpu/huge_pages.h"
#include "cpu/threads.h"
#include "linear/packed.h"
#include "linear/packed_strips.h"

namespace quantfuse::linear {
namespace {

constexpr int64_t kGroupPadding = 8;  // a word of 4-bit codes

// The order of columns: for every padded position the column of w or -1, and where each group begins.
struct ColumnOrder {
  std::vector<int32_t> k_map, bounds;
  bool is_identity = true;  // padding at the very end does not count
};

ColumnOrder order_columns(const Weight& w) {
  std::vector<std::vector<int32_t>> members;
  ColumnOrder order;
  order.bounds.push_back(0);
  auto close_group = [&] {
    while (order.k_map.size() % kGroupPadding != 0) order.k_map.push_back(-1);
    order.bounds.push_back(static_cast<int32_t>(order.k_map.size()));
  };
  if (w.g_idx && w.g_idx.data) {
    members.resize(w.num_groups);
    for (int64_t k = 0; k < w.k; ++k) members[w.group_of(k)].push_back(static_cast<int32_t>(k));
    for (const auto& group : members) {
      order.k_map.insert(order.k_map.end(), group.begin(), group.end());
      close_group();
    }
  } else {
    for (int64_t g = 0; g < w.num_groups; ++g) {
      const int64_t end = std::min((g + 1) * w.block.cols, w.k);
      for (int64_t k = g * w.block.cols; k < end; ++k) order.k_map.push_back(static_cast<int32_t>(k));
      close_group();
    }
  }
  for (size_t i = 0; i < order.k_map.size(); ++i) {
    const bool is_tail = static_cast<int64_t>(i) >= w.k && order.k_map[i] < 0;
    if (order.k_map[i] != static_cast<int32_t>(i) && !is_tail) order.is_identity = false;
  }
  return order;
}

// The row of w that lane `lane` of panel `panel` holds, or -1 in the padding.
int64_t row_of_lane(const PackedHeader& h, int64_t panel, int64_t lane) {
  if (!h.is_gated) {
    const int64_t row = panel * 2 * h.lanes + lane;
    return row < h.n ? row : -1;
  }
  const int64_t half = h.n / 2, column = panel * h.lanes + lane % h.lanes;
  if (column >= half) return -1;
  return lane < h.lanes ? column : half + column;
}

// What turns a word of codes into a stored one: integers are moved to be unsigned.
uint32_t stored_offset(qf_format f) { return f == QF_INT8 ? 0x80808080u : f == QF_INT4 ? 0x88888888u : 0u; }

// Nibbles 0 to 3 go to the even places, 4 to 7 to the odd ones.
uint32_t interleave_nibbles(uint32_t v) {
  auto spread = [](uint32_t x) {
    return (x & 0xf) | (x & 0xf0) << 4 | (x & 0xf00) << 8 | (x & 0xf000) << 12;
  };
  return spread(v & 0xffff) | spread(v >> 16) << 4;
}

// A word of one row: columns k_map[0 .. per word - 1], padding as code 0.
uint32_t gather_word(const Weight& w, const uint8_t* row, const int32_t* k_map) {
  uint32_t bits = 0;
  if (is_packed_4bit(w.format)) {
    for (int i = 0; i < 8; ++i)
      bits |= static_cast<uint32_t>(k_map[i] < 0 ? 0 : nibble_at(row, k_map[i])) << 4 * i;
    return interleave_nibbles(bits);
  }
  const int bytes = code_bits(w.format) / 8;
  for (int i = 0; i < 4 / bytes; ++i) {
    if (k_map[i] < 0) continue;
    uint32_t code = 0;
    std::memcpy(&code, row + int64_t{k_map[i]} * bytes, static_cast<size_t>(bytes));
    bits |= code << 8 * bytes * i;
  }
  return bits;
}

void pack_panel_codes(const Weight& w, const PackedHeader& h, const ColumnOrder& order, int64_t panel,
                      uint32_t* out) {
  const bool is_4bit = is_packed_4bit(w.format);
  const int64_t per_word = 32 / code_bits(w.format);
  const int64_t words = h.k_padded / per_word, panel_rows = 2 * h.lanes;
  const int64_t whole_words = order.is_identity ? w.k / per_word : 0;
  const uint32_t offset = stored_offset(w.format);
  for (int64_t lane = 0; lane < panel_rows; ++lane) {
    const int64_t row = row_of_lane(h, panel, lane);
    const auto* codes = row < 0 ? nullptr : reinterpret_cast<const uint8_t*>(w.codes.row_bytes_at(row));
    for (int64_t word = 0; word < words; ++word) {
      uint32_t bits = 0;
      if (codes && word < whole_words) {
        std::memcpy(&bits, codes + word * 4, 4);
        if (is_4bit) bits = interleave_nibbles(bits);
      } else if (codes) {
        bits = gather_word(w, codes, order.k_map.data() + word * per_word);
      }
      out[word * panel_rows + lane] = bits ^ offset;
    }
  }
}

// Scale and zero point of a group. An offset becomes part of the zero point, for one rounding of it:
// (q - z) s + o = (q - (z - o / s)) s. A scale below 2^-64 of the offset is raised to that, which changes no
// sum (its codes are worth less than 2^-56 of the offset) and keeps the quotient finite.
struct ScaleAndZero {
  float scale, zero;
};
ScaleAndZero scale_and_zero(const Weight& w, int64_t row, int64_t group) {
  if (row < 0) return {0.0f, 0.0f};
  const float scale = w.scale_at(row, group), zero = w.zero_at(row, group);
  if (!w.offset) return {scale, zero};
  const float offset = w.offset_at(row, group), folded = std::max(scale, std::fabs(offset) * 0x1p-64f);
  return {folded, static_cast<float>(zero - static_cast<double>(offset) / folded)};
}

// What follows from the other fields: how many panels there are, and where everything is.
void place_parts(PackedHeader& h) {
  h.num_panels = h.is_gated ? ceil_div(h.n / 2, h.lanes) : ceil_div(h.n, 2 * h.lanes);
  int64_t offset = sizeof(PackedHeader);
  auto reserve = [&](int64_t bytes) {
    const int64_t at = offset;
    offset = round_up(offset + bytes, 64);
    return at;
  };
  const int64_t panel_floats = h.num_groups * 2 * h.lanes * 4;
  h.codes = reserve(h.num_panels * PackedView{&h}.panel_code_bytes());
  h.scales = reserve(h.num_panels * panel_floats);
  h.zeros = reserve(h.has_zeros ? h.num_panels * panel_floats : 0);
  h.k_map = reserve(h.has_k_map ? h.k_padded * 4 : 0);
  h.bounds = reserve((h.num_groups + 1) * 4);
  h.total_bytes = offset;
}

// Whether all that kernels find their way by is as pack_cpu() writes it, so that damaged bytes lead nowhere
// outside. Every call asks: of a weight without k_map that is its groups.
bool is_whole(const PackedHeader& given) {
  const auto is_flag = [](int32_t flag) { return flag == 0 || flag == 1; };
  PackedHeader h = given;
  if ((h.lanes != 8 && h.lanes != 16) || !is_flag(h.has_zeros) || !is_flag(h.has_float_zeros) ||
      !is_flag(h.has_k_map) || h.num_groups < 0 || h.num_groups > h.total_bytes / (h.n / (2 * h.lanes) + 1) ||
      h.k_padded < h.k || h.k_padded > h.k + 8 * h.num_groups) {
    return false;
  }
  place_parts(h);
  if (std::memcmp(&h, &given, sizeof h) != 0) return false;
  const PackedView view{&given};
  bool is_good = view.bounds()[0] == 0 && view.bounds()[h.num_groups] == h.k_padded;
  for (int64_t g = 0; g < h.num_groups; ++g) {
    is_good &= view.bounds()[g] <= view.bounds()[g + 1] && view.bounds()[g] % 8 == 0;
  }
  for (int64_t i = 0; h.has_k_map && i < h.k_padded; ++i) {
    is_good &= view.k_map()[i] >= -1 && view.k_map()[i] < h.k;
  }
  return is_good && h.k_padded % 8 == 0;
}

}  // namespace

int packed_lanes_of_cpu() {
  const Target t = cpu_settings().target;
  return t >= Target::avx512 ? 16 : t >= Target::avx2 ? 8 : 0;
}

PackedHeader plan_packed(const Weight& w, int lanes) {
  PackedHeader h = {};
  h.magic = PackedHeader::kMagic;
  h.lanes = lanes;
  h.format = w.format;
  h.is_gated = w.is_gated;
  h.has_zeros = w.zero || w.offset;
  h.has_float_zeros = w.has_float_zeros();
  h.n = w.n, h.k = w.k;
  const ColumnOrder order = order_columns(w);
  h.has_k_map = !order.is_identity;
  h.k_padded = static_cast<int64_t>(order.k_map.size());
  h.num_groups = w.num_groups;
  place_parts(h);
  return h;
}

void pack_cpu(const Weight& w, const PackedHeader& plan, void* out) {
  const ColumnOrder order = order_columns(w);
  char* base = static_cast<char*>(out);
  use_huge_pages(out, static_cast<size_t>(plan.total_bytes));
  std::memset(base, 0, sizeof(PackedHeader));  // not valid until all of it is
  const int64_t panel_rows = 2 * plan.lanes;
  const PackedView sizes{&plan};
  parallel_ranges(plan.num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      pack_panel_codes(w, plan, order, panel,
                       reinterpret_cast<uint32_t*>(base + plan.codes + panel * sizes.panel_code_bytes()));
      auto* scales = reinterpret_cast<float*>(base + plan.scales) + panel * plan.num_groups * panel_rows;
      auto* zeros = reinterpret_cast<float*>(base + plan.zeros) + panel * plan.num_groups * panel_rows;
      for (int64_t g = 0; g < plan.num_groups; ++g) {
        for (int64_t lane = 0; lane < panel_rows; ++lane) {
          const int64_t row = row_of_lane(plan, panel, lane);
          const ScaleAndZero group = scale_and_zero(w, row, g);
          scales[g * panel_rows + lane] = group.scale;
          if (plan.has_zeros) zeros[g * panel_rows + lane] = group.zero;
        }
      }
    }
  });
  if (plan.has_k_map) std::memcpy(base + plan.k_map, order.k_map.data(), order.k_map.size() * 4);
  std::memcpy(base + plan.bounds, order.bounds.data(), order.bounds.size() * 4);
  std::memcpy(base, &plan, sizeof plan);
}

PackedCheck view_packed(const Weight& w) {
  if (!w.packed) return {{}, "the weight is not packed (qf_weight_pack)"};
  if (!w.packed.data) return {{}, nullptr};  // a question about shapes only
  if (w.packed.size < static_cast<int64_t>(sizeof(PackedHeader))) return {{}, "weight.packed is too short"};
  const auto* h = w.packed.as<const PackedHeader>();
  if (h->magic != PackedHeader::kMagic) return {{}, "weight.packed was not made by qf_weight_pack"};
  if (h->total_bytes != w.packed.size) return {{}, "weight.packed has another size than it was packed with"};
  if (h->n != w.n || h->k != w.k || h->format != w.format || h->is_gated != (w.is_gated ? 1 : 0)) {
    return {{}, "weight.packed holds another weight: its n, k, format or is_gated differ"};
  }
  if (!is_whole(*h))
    return {{}, "weight.packed is damaged: its parts are not where qf_weight_pack puts them"};
  return {{h}, nullptr};
}

}  // namespace quantfuse::linear

namespace {

using namespace quantfuse;

// The weight as pack() needs it: canonical, of a form that its device packs.
Weight parse_for_pack(Arguments& arg, const qf_weight& a) {
  qf_weight canonical = a;
  canonical.packed = nullptr;
  arg.require(a.codes != nullptr, "weight.codes is missing");
  Weight w = parse_weight(arg, canonical);
  const char* reason = nullptr;
  if (arg.device().type == QF_CUDA) {
    reason = linear::not_in_strips(w);
  } else if (linear::packed_lanes_of_cpu() == 0) {
    reason = "the scalar kernels of this CPU, or of QUANTFUSE_ISA=scalar, use the canonical weight";
  }
  if (reason) fail_unsupported(std::string("weight_pack: ") + reason);
  return w;
}

int64_t packed_bytes(const Arguments& arg, const Weight& w) {
  if (arg.device().type == QF_CUDA) return linear::plan_strips(w).total_bytes();
  if (w.g_idx) check_weight_values(arg, w);
  return linear::plan_packed(w, linear::packed_lanes_of_cpu()).total_bytes;
}

}  // namespace

extern "C" qf_status qf_weight_packed_bytes(const qf_weight* weight, qf_device device, uint64_t* bytes) {
  return guarded([&] {
    Arguments arg("weight_pack", /*needs_data=*/weight && weight->g_idx && device.type == QF_CPU);
    arg.require(weight != nullptr, "weight is null");
    arg.require(bytes != nullptr, "bytes is null");
    const Weight w = parse_for_pack(arg, *weight);
    arg.require(device.type == arg.device().type, "device is not the one that the weight is on");
    *bytes = static_cast<uint64_t>(packed_bytes(arg, w));
  });
}

extern "C" qf_status qf_weight_pack(const qf_weight* weight, const qf_call* call) {
  return guarded([&] {
    Arguments arg("weight_pack", /*needs_data=*/true);
    arg.require(weight != nullptr, "weight is null");
    const Weight w = parse_for_pack(arg, *weight);
    check_weight_values(arg, w);
    const int64_t expected = packed_bytes(arg, w);
    Dim bytes{"bytes"};
    const Vector out =
        arg.expect("weight.packed", weight->packed).shape(bytes).dtype({DType::u8}).aligned(64).vector();
    if (out.size != expected) {
      arg.fail("weight.packed has " + std::to_string(out.size) + " bytes, expected " +
               std::to_string(expected));
    }
    arg.writes("weight.packed");
    if (arg.device().type == QF_CUDA) {
      const DeviceScope scope(arg.device());
      linear::pack_strips(arg, w, linear::plan_strips(w), out.data, call ? call->stream : nullptr);
    } else {
      linear::pack_cpu(w, linear::plan_packed(w, linear::packed_lanes_of_cpu()), out.data);
    }
  });
}
