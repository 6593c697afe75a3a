// SPDX-License-Identifier: Apache-2.0
//
// cvt between numbers, and cvta between the addresses of memory spaces.
#include <cmath>
#include <limits>

#include "machine.h"
#include "numbers.h"

namespace emulator {
namespace {

struct F16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

enum Rounding { kNearest, kTowardsZero, kDown, kUp };

template <class To>
To float_to_integer(double v, int64_t rounding) {
  if (std::isnan(v)) return 0;
  v = rounding == kNearest ? std::nearbyint(v)
      : rounding == kDown  ? std::floor(v)
      : rounding == kUp    ? std::ceil(v)
                           : std::trunc(v);
  // Held at the ends of the type.
  if (v <= static_cast<double>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (v >= static_cast<double>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(v);
}

template <class To, class From>
To convert_one(From v, int64_t rounding) {
  if constexpr (std::is_same_v<From, F16>) return convert_one<To>(f16_to_float(v.bits), rounding);
  else if constexpr (std::is_same_v<From, Bf16>) return convert_one<To>(bf16_to_float(v.bits), rounding);
  else if constexpr (std::is_same_v<To, F16>) return F16{float_to_f16(static_cast<float>(v))};
  else if constexpr (std::is_same_v<To, Bf16>) return Bf16{float_to_bf16(static_cast<float>(v))};
  else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>)
    return float_to_integer<To>(v, rounding);
  else if constexpr (std::is_floating_point_v<From> && std::is_same_v<From, To>) {
    return rounding == kNearest ? v
           : rounding == kDown  ? std::floor(v)
           : rounding == kUp    ? std::ceil(v)
                                : std::trunc(v);
  } else return static_cast<To>(v);
}

// Registers may be wider than the types: a source gives its lower bits, a result is extended by its sign.
template <class To, class From>
void convert(Warp& w, const Instruction& i) {
  const Operand &to = i.operands[0], &from = i.operands[1];
  auto source = [&](int l) -> From {
    if constexpr (sizeof(From) < 8) {
      if (from.is_wide) return Warp::from_slot<From>(static_cast<uint32_t>(w.slots<uint64_t>(from)[l]));
    }
    return w.value<From>(from, l);
  };
  auto extended = [](To v) -> uint64_t {
    if constexpr (std::is_integral_v<To>) return static_cast<uint64_t>(static_cast<int64_t>(v));
    else return Warp::to_slot<To>(v);
  };
  if (to.is_wide)
    w.set_all<uint64_t>(to, [&](int l) { return extended(convert_one<To>(source(l), i.with[0])); });
  else
    w.set_all<uint32_t>(
        to, [&](int l) { return static_cast<uint32_t>(extended(convert_one<To>(source(l), i.with[0]))); });
}

// Two floats into the halves of a word, the first in the upper.
template <class To>
void pack_pair(Warp& w, const Instruction& i) {
  const auto *a = w.slots<float>(i.operands[1]), *b = w.slots<float>(i.operands[2]);
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    const To high = convert_one<To>(Warp::from_slot<float>(a[l]), kNearest),
             low = convert_one<To>(Warp::from_slot<float>(b[l]), kNearest);
    return uint32_t{high.bits} << 16 | low.bits;
  });
}
template <bool kE4m3>
void pack_fp8(Warp& w, const Instruction& i) {
  const auto *a = w.slots<float>(i.operands[1]), *b = w.slots<float>(i.operands[2]);
  auto code = [](float v) { return kE4m3 ? float_to_e4m3(v) : float_to_e5m2(v); };
  w.set_all<uint16_t>(i.operands[0], [&](int l) {
    return static_cast<uint16_t>(code(Warp::from_slot<float>(a[l])) << 8 |
                                 code(Warp::from_slot<float>(b[l])));
  });
}
template <bool kE4m3>
void unpack_fp8(Warp& w, const Instruction& i) {
  const auto* a = w.slots<uint16_t>(i.operands[1]);
  auto half = [](uint32_t c) {
    const auto code = static_cast<uint8_t>(c);
    return uint32_t{float_to_f16(kE4m3 ? e4m3_to_float(code) : e5m2_to_float(code))};
  };
  w.set_all<uint32_t>(i.operands[0], [&](int l) { return half(a[l] >> 8) << 16 | half(a[l]); });
}
// Two integers saturated to 8 bits, below the lower half of c; the first in the upper of the two.
void pack_s8(Warp& w, const Instruction& i) {
  const auto *a = w.slots<int32_t>(i.operands[1]), *b = w.slots<int32_t>(i.operands[2]),
             *c = w.slots<uint32_t>(i.operands[3]);
  auto code = [](uint32_t v) { return static_cast<uint8_t>(std::clamp(static_cast<int32_t>(v), -128, 127)); };
  w.set_all<uint32_t>(i.operands[0],
                      [&](int l) { return c[l] << 16 | uint32_t{code(a[l])} << 8 | code(b[l]); });
}

template <class To>
Handler convert_from(std::string_view from) {
  if (from == "f16") return convert<To, F16>;
  if (from == "bf16") return convert<To, Bf16>;
  if (from == "f32") return convert<To, float>;
  if (from == "f64") return convert<To, double>;
  if (from == "s8") return convert<To, int8_t>;
  if (from == "u8") return convert<To, uint8_t>;
  if (from == "s16") return convert<To, int16_t>;
  if (from == "u16") return convert<To, uint16_t>;
  if (from == "s32") return convert<To, int32_t>;
  if (from == "u32") return convert<To, uint32_t>;
  if (from == "s64") return convert<To, int64_t>;
  if (from == "u64") return convert<To, uint64_t>;
  return nullptr;
}
Handler convert_between(std::string_view to, std::string_view from) {
  if (to == "f16") return convert_from<F16>(from);
  if (to == "bf16") return convert_from<Bf16>(from);
  if (to == "f32") return convert_from<float>(from);
  if (to == "f64") return convert_from<double>(from);
  if (to == "s8") return convert_from<int8_t>(from);
  if (to == "u8") return convert_from<uint8_t>(from);
  if (to == "s16") return convert_from<int16_t>(from);
  if (to == "u16") return convert_from<uint16_t>(from);
  if (to == "s32") return convert_from<int32_t>(from);
  if (to == "u32") return convert_from<uint32_t>(from);
  if (to == "s64") return convert_from<int64_t>(from);
  if (to == "u64") return convert_from<uint64_t>(from);
  return nullptr;
}

// ---- Addresses: those of global memory are generic as they are, others are where the host has them ----

uint64_t base_of(const Warp& w, int64_t space, int lane) {
  if (space == static_cast<int64_t>(Space::shared))
    return reinterpret_cast<uint64_t>(w.block.shared_window().data());
  if (space == static_cast<int64_t>(Space::local)) return reinterpret_cast<uint64_t>(w.local(lane));
  if (space == static_cast<int64_t>(Space::param))
    return reinterpret_cast<uint64_t>(w.block.machine.params.data());
  return 0;
}
template <bool kToSpace>
void convert_address(Warp& w, const Instruction& i) {
  const auto* a = w.slots<uint64_t>(i.operands[1]);
  w.set_all<uint64_t>(i.operands[0], [&](int l) {
    const uint64_t base = base_of(w, i.with[0], l);
    return kToSpace ? a[l] - base : a[l] + base;
  });
}

}  // namespace

void bind_conversion(const Mnemonic& name, Instruction& i) {
  const std::string_view op = name.parts[0];
  if (op == "cvta") {
    const bool is_to = name.parts[1] == "to";
    const auto space = name.parts[is_to ? 2 : 1];
    i.with[0] = static_cast<int64_t>(space == "shared"  ? Space::shared
                                     : space == "local" ? Space::local
                                     : space == "param" ? Space::param
                                                        : Space::global);
    if (name.last() == "u64") i.run = is_to ? convert_address<true> : convert_address<false>;
    return;
  }
  if (op != "cvt") return;
  const auto from = name.last(), to = name.from_end(1);
  if (name.parts[1] == "pack") {
    if (to == "s32" && name.from_end(2) == "s8" && name.has("sat")) i.run = pack_s8;
    return;
  }
  if (to == "f16x2" && from == "f32") i.run = pack_pair<F16>;
  else if (to == "bf16x2" && from == "f32") i.run = pack_pair<Bf16>;
  else if (to == "e4m3x2" && from == "f32") i.run = pack_fp8<true>;
  else if (to == "e5m2x2" && from == "f32") i.run = pack_fp8<false>;
  else if (to == "f16x2" && from == "e4m3x2") i.run = unpack_fp8<true>;
  else if (to == "f16x2" && from == "e5m2x2") i.run = unpack_fp8<false>;
  else if (!name.has("sat") && !name.has("ftz") && !name.has("rz") && !name.has("relu")) {
    i.with[0] = name.has("rzi") ? kTowardsZero : name.has("rmi") ? kDown : name.has("rpi") ? kUp : kNearest;
    i.run = convert_between(to, from);
  }
}

}  // namespace emulator
