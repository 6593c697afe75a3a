// SPDX-License-Identifier: Apache-2.0
//
// Arithmetic, logic, comparison, selection, and moves between registers.
#include <algorithm>
#include <cmath>

#include "machine.h"
#include "numbers.h"

namespace emulator {
namespace {

// ---- Of one, two and three operands ----

template <class T, class Op>
void unary(Warp& w, const Instruction& i) {
  const auto* a = w.slots<T>(i.operands[1]);
  w.set_all<T>(i.operands[0], [&](int l) { return Op{}(Warp::from_slot<T>(a[l])); });
}
template <class T, class Op>
void binary(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]);
  w.set_all<T>(i.operands[0],
               [&](int l) { return Op{}(Warp::from_slot<T>(a[l]), Warp::from_slot<T>(b[l])); });
}
template <class T, class Op>
void ternary(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]), *c = w.slots<T>(i.operands[3]);
  w.set_all<T>(i.operands[0], [&](int l) {
    return Op{}(Warp::from_slot<T>(a[l]), Warp::from_slot<T>(b[l]), Warp::from_slot<T>(c[l]));
  });
}

// Signed numbers wrap around.
template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
T wrap(Unsigned<T> v) {
  return static_cast<T>(v);
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>)
      return wrap<T>(static_cast<Unsigned<T>>(Unsigned<T>(a) + Unsigned<T>(b)));
    else return a + b;
  }
};
struct Sub {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>)
      return wrap<T>(static_cast<Unsigned<T>>(Unsigned<T>(a) - Unsigned<T>(b)));
    else return a - b;
  }
};
struct MulLow {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>)
      return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else return a * b;
  }
};
struct MulHigh {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (sizeof(T) == 8) {
      using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> 64);
    } else {
      using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
      return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> (8 * sizeof(T)));
    }
  }
};
struct Div {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) return static_cast<T>(-1);
      if (std::is_signed_v<T> && b == static_cast<T>(-1))
        return wrap<T>(static_cast<Unsigned<T>>(0 - Unsigned<T>(a)));
    }
    return static_cast<T>(a / b);
  }
};
struct Rem {
  template <class T>
  T operator()(T a, T b) const {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
// Of a number and NaN the number.
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) return std::isnan(a) ? b : std::isnan(b) ? a : std::min(a, b);
    else return std::min(a, b);
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) return std::isnan(a) ? b : std::isnan(b) ? a : std::max(a, b);
    else return std::max(a, b);
  }
};
struct And {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct Neg {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_integral_v<T>) return wrap<T>(static_cast<Unsigned<T>>(0 - Unsigned<T>(a)));
    else return -a;
  }
};
struct Abs {
  template <class T>
  T operator()(T a) const {
    if constexpr (std::is_integral_v<T>) return a < 0 ? Neg{}(a) : a;
    else return std::fabs(a);
  }
};
struct Fma {
  template <class T>
  T operator()(T a, T b, T c) const {
    return std::fma(a, b, c);
  }
};
struct MadLow {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add{}(MulLow{}(a, b), c);
  }
};
struct Reciprocal {
  template <class T>
  T operator()(T a) const {
    return T(1) / a;
  }
};
struct SquareRoot {
  template <class T>
  T operator()(T a) const {
    return std::sqrt(a);
  }
};
struct Popc {
  uint32_t operator()(uint32_t a) const { return static_cast<uint32_t>(__builtin_popcount(a)); }
};
struct Brev {
  uint32_t operator()(uint32_t a) const {
    uint32_t r = 0;
    for (int b = 0; b < 32; ++b) r |= (a >> b & 1) << (31 - b);
    return r;
  }
};
struct Clz {
  uint32_t operator()(uint32_t a) const { return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32; }
};

// Approximations. The hardware's differ in the last places; the bounds of the tests allow for that.
struct Exp2Flushed {
  float operator()(float a) const { return flush(std::exp2(flush(a))); }
};
struct Exp2 {
  float operator()(float a) const { return std::exp2(a); }
};
struct Log2 {
  float operator()(float a) const { return std::log2(a); }
};
struct ReciprocalFlushed {
  float operator()(float a) const { return flush(1.f / flush(a)); }
};
struct ReciprocalRoot {
  float operator()(float a) const { return static_cast<float>(1. / std::sqrt(static_cast<double>(a))); }
};
struct Tanh {
  float operator()(float a) const { return std::tanh(a); }
};
struct Sin {
  float operator()(float a) const { return std::sin(a); }
};
struct Cos {
  float operator()(float a) const { return std::cos(a); }
};

// ---- Pairs of 16-bit floats: float32 has every product and sum of two before it is rounded ----

template <bool kBf16, class Op>
uint32_t on_pairs(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    auto part = [&](uint32_t v) {
      const auto bits = static_cast<uint16_t>(v >> (16 * half));
      return static_cast<double>(kBf16 ? bf16_to_float(bits) : f16_to_float(bits));
    };
    const double exact = Op{}(part(a), part(b), part(c));
    const auto rounded = static_cast<float>(exact);
    result |= uint32_t{kBf16 ? float_to_bf16(rounded) : float_to_f16(rounded)} << (16 * half);
  }
  return result;
}
struct PairAdd {
  double operator()(double a, double b, double) const { return a + b; }
};
struct PairSub {
  double operator()(double a, double b, double) const { return a - b; }
};
struct PairMul {
  double operator()(double a, double b, double) const { return a * b; }
};
struct PairMax {
  double operator()(double a, double b, double) const { return Max{}(a, b); }
};
struct PairMin {
  double operator()(double a, double b, double) const { return Min{}(a, b); }
};
struct PairFma {
  double operator()(double a, double b, double c) const { return a * b + c; }  // a b is exact
};
template <bool kBf16, class Op, int kOperands>
void pairs(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *b = w.slots<uint32_t>(i.operands[2]);
  const auto* c = kOperands == 3 ? w.slots<uint32_t>(i.operands[3]) : a;
  w.set_all<uint32_t>(i.operands[0], [&](int l) { return on_pairs<kBf16, Op>(a[l], b[l], c[l]); });
}
template <class Op, int kOperands>
Handler pairs_of(std::string_view type) {
  return type == "bf16x2" ? pairs<true, Op, kOperands> : pairs<false, Op, kOperands>;
}
struct MaxHalves {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
  }
};
struct MinHalves {
  uint32_t operator()(uint32_t a, uint32_t b) const {
    return std::min(a >> 16, b >> 16) << 16 | std::min(a & 0xffff, b & 0xffff);
  }
};

// ---- Of operands that differ in type ----

template <class T, class Wide>
void mul_wide(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]);
  w.set_all<Wide>(i.operands[0], [&](int l) {
    return static_cast<Wide>(static_cast<Wide>(Warp::from_slot<T>(a[l])) *
                             static_cast<Wide>(Warp::from_slot<T>(b[l])));
  });
}
template <class T, class Wide>
void mad_wide(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]);
  const auto* c = w.slots<Wide>(i.operands[3]);
  w.set_all<Wide>(i.operands[0], [&](int l) {
    return MadLow{}(static_cast<Wide>(Warp::from_slot<T>(a[l])), static_cast<Wide>(Warp::from_slot<T>(b[l])),
                    Warp::from_slot<Wide>(c[l]));
  });
}
// By 32-bit counts, which are held at the width.
template <class T, bool kLeft>
void shift(Warp& w, const Instruction& i) {
  const auto* a = w.slots<T>(i.operands[1]);
  const auto* b = w.slots<uint32_t>(i.operands[2]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  w.set_all<T>(i.operands[0], [&](int l) {
    const T v = Warp::from_slot<T>(a[l]);
    const uint32_t by = b[l];
    if constexpr (kLeft) return by >= kBits ? T(0) : static_cast<T>(Unsigned<T>(v) << by);
    else return by >= kBits ? (v < T(0) ? static_cast<T>(-1) : T(0)) : static_cast<T>(v >> by);
  });
}
void shift_funnel(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *b = w.slots<uint32_t>(i.operands[2]),
             *c = w.slots<uint32_t>(i.operands[3]);
  const bool is_left = i.with[0], is_clamped = i.with[1];
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    const uint32_t by = is_clamped ? std::min(c[l], 32u) : c[l] & 31;
    const uint64_t both = uint64_t{b[l]} << 32 | a[l];
    return static_cast<uint32_t>(is_left ? both << by >> 32 : both >> by);
  });
}
// Any function of three words, by its table of eight rows: a function each, so that the compiler simplifies
// it.
template <int kTable>
struct Lop3 {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t c) const {
    uint32_t r = 0;
    if constexpr (kTable & 1) r |= ~a & ~b & ~c;
    if constexpr (kTable & 2) r |= ~a & ~b & c;
    if constexpr (kTable & 4) r |= ~a & b & ~c;
    if constexpr (kTable & 8) r |= ~a & b & c;
    if constexpr (kTable & 16) r |= a & ~b & ~c;
    if constexpr (kTable & 32) r |= a & ~b & c;
    if constexpr (kTable & 64) r |= a & b & ~c;
    if constexpr (kTable & 128) r |= a & b & c;
    return r;
  }
};
template <int... kTables>
Handler lop3_of(int64_t table, std::integer_sequence<int, kTables...>) {
  static constexpr Handler kAll[] = {ternary<uint32_t, Lop3<kTables>>...};
  return kAll[table & 255];
}
void permute_bytes(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *b = w.slots<uint32_t>(i.operands[2]),
             *c = w.slots<uint32_t>(i.operands[3]);
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    const uint64_t both = uint64_t{b[l]} << 32 | a[l];
    uint32_t r = 0;
    for (int byte = 0; byte < 4; ++byte) {
      const uint32_t select = c[l] >> (4 * byte) & 15;
      auto v = static_cast<uint8_t>(both >> (8 * (select & 7)));
      if (select & 8) v = v & 0x80 ? 0xff : 0;  // its sign
      r |= uint32_t{v} << (8 * byte);
    }
    return r;
  });
}
template <bool kSigned>
void extract_bits(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *b = w.slots<uint32_t>(i.operands[2]),
             *c = w.slots<uint32_t>(i.operands[3]);
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    const uint32_t at = b[l] & 255, count = c[l] & 255;
    if (count == 0) return 0u;
    auto bit = [&](uint32_t p) { return p > 31 ? (kSigned ? a[l] >> 31 : 0) : a[l] >> p & 1; };
    uint32_t r = 0;
    for (uint32_t p = 0; p < 32; ++p) r |= (p < count ? bit(at + p) : kSigned ? bit(at + count - 1) : 0) << p;
    return r;
  });
}
template <class T>
void insert_bits(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]);
  const auto *c = w.slots<uint32_t>(i.operands[3]), *d = w.slots<uint32_t>(i.operands[4]);
  constexpr uint32_t kBits = 8 * sizeof(T);
  w.set_all<T>(i.operands[0], [&](int l) {
    const uint32_t at = std::min(c[l] & 255, kBits), count = std::min(d[l] & 255, kBits);
    using Wide = unsigned __int128;
    const auto mask = static_cast<T>(((Wide{1} << count) - 1) << at);
    return static_cast<T>((b[l] & ~mask) | (static_cast<T>(Wide{a[l]} << at) & mask));
  });
}
void dot4_signed(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *b = w.slots<uint32_t>(i.operands[2]),
             *c = w.slots<uint32_t>(i.operands[3]);
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    uint32_t sum = c[l];
    for (int byte = 0; byte < 4; ++byte)
      sum += static_cast<uint32_t>(static_cast<int8_t>(a[l] >> (8 * byte)) *
                                   static_cast<int8_t>(b[l] >> (8 * byte)));
    return sum;
  });
}

// ---- Comparison and selection ----

enum class Compare { eq, ne, lt, le, gt, ge };
template <class T, Compare kCompare, bool kUnordered>
void compare(Warp& w, const Instruction& i) {
  const Operand* source = i.group(1);
  const auto *a = w.slots<T>(source[0]), *b = w.slots<T>(i.group(2)[0]);
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) {
    const T x = Warp::from_slot<T>(a[l]), y = Warp::from_slot<T>(b[l]);
    bool is_true = kCompare == Compare::eq   ? x == y
                   : kCompare == Compare::ne ? x != y
                   : kCompare == Compare::lt ? x < y
                   : kCompare == Compare::le ? x <= y
                   : kCompare == Compare::gt ? x > y
                                             : x >= y;
    if constexpr (std::is_floating_point_v<T>) {
      const bool has_nan = x != x || y != y;
      is_true = has_nan ? kUnordered : is_true;
    }
    bits |= uint32_t{is_true} << l;
  }
  if (i.counts.size() == 4) {  // combined with a predicate
    const uint32_t more = w.predicate(i.group(3)[0]);
    bits = i.with[0] == 1 ? bits & more : i.with[0] == 2 ? bits | more : bits ^ more;
  }
  w.set_predicate(i.operands[0], bits);
  if (i.counts[0] == 2) w.set_predicate(i.operands[1], ~bits);
}
template <class T, bool kUnordered>
Handler compare_by(std::string_view how) {
  if (how == "eq") return compare<T, Compare::eq, kUnordered>;
  if (how == "ne") return compare<T, Compare::ne, kUnordered>;
  if (how == "lt" || how == "lo") return compare<T, Compare::lt, kUnordered>;
  if (how == "le" || how == "ls") return compare<T, Compare::le, kUnordered>;
  if (how == "gt" || how == "hi") return compare<T, Compare::gt, kUnordered>;
  if (how == "ge" || how == "hs") return compare<T, Compare::ge, kUnordered>;
  return nullptr;
}
template <class T>
void test_nan(Warp& w, const Instruction& i) {
  const auto* a = w.slots<T>(i.operands[1]);
  const auto* b = w.slots<T>(i.operands[2]);
  uint32_t bits = 0;
  for (int l = 0; l < kLanes; ++l) {
    const T x = Warp::from_slot<T>(a[l]), y = Warp::from_slot<T>(b[l]);
    bits |= uint32_t{x != x || y != y} << l;
  }
  w.set_predicate(i.operands[0], i.with[0] ? bits : ~bits);
}
template <class T>
void select(Warp& w, const Instruction& i) {
  const auto *a = w.slots<T>(i.operands[1]), *b = w.slots<T>(i.operands[2]);
  const uint32_t p = w.predicate(i.operands[3]);
  w.set_all<T>(i.operands[0], [&](int l) { return Warp::from_slot<T>(p >> l & 1 ? a[l] : b[l]); });
}

// ---- Predicates ----

void predicate_and(Warp& w, const Instruction& i) {
  w.set_predicate(i.operands[0], w.predicate(i.operands[1]) & w.predicate(i.operands[2]));
}
void predicate_or(Warp& w, const Instruction& i) {
  w.set_predicate(i.operands[0], w.predicate(i.operands[1]) | w.predicate(i.operands[2]));
}
void predicate_xor(Warp& w, const Instruction& i) {
  w.set_predicate(i.operands[0], w.predicate(i.operands[1]) ^ w.predicate(i.operands[2]));
}
void predicate_not(Warp& w, const Instruction& i) {
  w.set_predicate(i.operands[0], ~w.predicate(i.operands[1]));
}
void predicate_move(Warp& w, const Instruction& i) {
  w.set_predicate(i.operands[0], w.predicate(i.operands[1]));
}

// ---- Moves ----

template <class T>
void move(Warp& w, const Instruction& i) {
  const Operand& from = i.operands[1];
  if (from.kind == Operand::Kind::special) {
    w.set_all<T>(i.operands[0], [&](int l) { return static_cast<T>(w.special(from.special, from.slot, l)); });
    return;
  }
  const auto* a = w.slots<T>(from);
  w.set_all<T>(i.operands[0], [&](int l) { return Warp::from_slot<T>(a[l]); });
}
// Parts of `kPart` bits into one of twice as many, or more, and back.
template <class Whole, class Part>
void join(Warp& w, const Instruction& i) {
  const Operand* parts = i.group(1);
  constexpr int kParts = sizeof(Whole) / sizeof(Part);
  w.set_all<Whole>(i.operands[0], [&](int l) {
    Whole v = 0;
    for (int p = 0; p < kParts; ++p)
      v |= static_cast<Whole>(w.value<Part>(parts[p], l)) << (8 * sizeof(Part) * p);
    return v;
  });
}
template <class Whole, class Part>
void take_apart(Warp& w, const Instruction& i) {
  constexpr int kParts = sizeof(Whole) / sizeof(Part);
  Whole all[kLanes];  // a part may be written over it
  for (int l = 0; l < kLanes; ++l) all[l] = w.value<Whole>(i.group(1)[0], l);
  for (int p = 0; p < kParts; ++p) {
    if (i.operands[p].kind == Operand::Kind::none) continue;
    w.set_all<Part>(i.operands[p],
                    [&](int l) { return static_cast<Part>(all[l] >> (8 * sizeof(Part) * p)); });
  }
}

// ---- By the name of the type ----

template <template <class> class Make>
Handler by_integer(std::string_view type) {
  if (type == "s16") return Make<int16_t>::handler();
  if (type == "u16" || type == "b16") return Make<uint16_t>::handler();
  if (type == "s32") return Make<int32_t>::handler();
  if (type == "u32" || type == "b32") return Make<uint32_t>::handler();
  if (type == "s64") return Make<int64_t>::handler();
  if (type == "u64" || type == "b64") return Make<uint64_t>::handler();
  return nullptr;
}
template <template <class> class Make>
Handler by_number(std::string_view type) {
  if (type == "f32") return Make<float>::handler();
  if (type == "f64") return Make<double>::handler();
  return by_integer<Make>(type);
}
template <class Op>
struct Binary {
  template <class T>
  struct Of {
    static Handler handler() { return binary<T, Op>; }
  };
};
template <class Op>
struct Unary {
  template <class T>
  struct Of {
    static Handler handler() { return unary<T, Op>; }
  };
};
template <class T>
struct MadOf {
  static Handler handler() { return ternary<T, MadLow>; }
};
template <class T>
struct ShiftLeftOf {
  static Handler handler() { return shift<T, true>; }
};
template <class T>
struct ShiftRightOf {
  static Handler handler() { return shift<T, false>; }
};
template <class T>
struct SelectOf {
  static Handler handler() { return select<T>; }
};

Handler logic(std::string_view op, std::string_view type) {
  if (type == "pred") {
    return op == "and"   ? predicate_and
           : op == "or"  ? predicate_or
           : op == "xor" ? predicate_xor
                         : predicate_not;
  }
  if (op == "and") return by_integer<Binary<And>::Of>(type);
  if (op == "or") return by_integer<Binary<Or>::Of>(type);
  if (op == "xor") return by_integer<Binary<Xor>::Of>(type);
  return by_integer<Unary<Not>::Of>(type);
}

Handler comparison(const Mnemonic& name, Instruction& i) {
  std::string_view how = name.parts[1];
  const std::string_view type = name.last();
  if (name.parts.size() > 3 && (name.parts[2] == "and" || name.parts[2] == "or" || name.parts[2] == "xor"))
    i.with[0] = name.parts[2] == "and" ? 1 : name.parts[2] == "or" ? 2 : 3;
  const bool is_float = type == "f32" || type == "f64";
  if (is_float && (how == "nan" || how == "num")) {
    i.with[0] = how == "nan";
    return type == "f32" ? test_nan<float> : test_nan<double>;
  }
  const bool is_unordered = is_float && how.size() == 3;  // ltu and so on
  if (is_unordered) how = how.substr(0, 2);
  if (type == "f32") return is_unordered ? compare_by<float, true>(how) : compare_by<float, false>(how);
  if (type == "f64") return is_unordered ? compare_by<double, true>(how) : compare_by<double, false>(how);
  if (type == "s16") return compare_by<int16_t, false>(how);
  if (type == "u16" || type == "b16") return compare_by<uint16_t, false>(how);
  if (type == "s32") return compare_by<int32_t, false>(how);
  if (type == "u32" || type == "b32") return compare_by<uint32_t, false>(how);
  if (type == "s64") return compare_by<int64_t, false>(how);
  if (type == "u64" || type == "b64") return compare_by<uint64_t, false>(how);
  return nullptr;
}

Handler moving(std::string_view type, const Instruction& i) {
  if (type == "pred") return predicate_move;
  const bool is_64 = type.size() == 3 && type.substr(1) == "64", is_32 = type.substr(1) == "32";
  if (i.counts[0] == 2) return is_64 ? take_apart<uint64_t, uint32_t> : take_apart<uint32_t, uint16_t>;
  if (i.counts[0] == 4) return is_64 ? take_apart<uint64_t, uint16_t> : take_apart<uint32_t, uint8_t>;
  if (i.counts[1] == 2) return is_64 ? join<uint64_t, uint32_t> : join<uint32_t, uint16_t>;
  if (i.counts[1] == 4) return is_64 ? join<uint64_t, uint16_t> : join<uint32_t, uint8_t>;
  return is_64 ? move<uint64_t> : is_32 ? move<uint32_t> : move<uint16_t>;
}

Handler multiplying(const Mnemonic& name) {
  const auto type = name.last();
  const bool is_mad = name.parts[0] == "mad";
  if (name.has("wide")) {
    if (type == "s16") return is_mad ? mad_wide<int16_t, int32_t> : mul_wide<int16_t, int32_t>;
    if (type == "u16") return is_mad ? mad_wide<uint16_t, uint32_t> : mul_wide<uint16_t, uint32_t>;
    if (type == "s32") return is_mad ? mad_wide<int32_t, int64_t> : mul_wide<int32_t, int64_t>;
    return is_mad ? mad_wide<uint32_t, uint64_t> : mul_wide<uint32_t, uint64_t>;
  }
  if (is_mad) return name.has("lo") ? by_integer<MadOf>(type) : nullptr;
  if (name.has("hi")) return by_integer<Binary<MulHigh>::Of>(type);
  return by_number<Binary<MulLow>::Of>(type);
}

}  // namespace

void bind_arithmetic(const Mnemonic& name, Instruction& i) {
  const std::string_view op = name.parts[0], type = name.last();
  const bool is_pair = type == "f16x2" || type == "bf16x2";
  // Rounding is to nearest, and nothing saturates, wherever our compiler writes arithmetic.
  if (name.has("rz") || name.has("rm") || name.has("rp") || name.has("sat")) return;
  if (op == "add") i.run = is_pair ? pairs_of<PairAdd, 2>(type) : by_number<Binary<Add>::Of>(type);
  else if (op == "sub") i.run = is_pair ? pairs_of<PairSub, 2>(type) : by_number<Binary<Sub>::Of>(type);
  else if (op == "mul" || op == "mad") i.run = is_pair ? pairs_of<PairMul, 2>(type) : multiplying(name);
  else if (op == "fma") {
    i.run = is_pair         ? pairs_of<PairFma, 3>(type)
            : type == "f32" ? ternary<float, Fma>
            : type == "f64" ? ternary<double, Fma>
                            : nullptr;
  } else if (op == "min" || op == "max") {
    const bool is_max = op == "max";
    if (is_pair) i.run = is_max ? pairs_of<PairMax, 2>(type) : pairs_of<PairMin, 2>(type);
    else if (type == "u16x2") i.run = is_max ? binary<uint32_t, MaxHalves> : binary<uint32_t, MinHalves>;
    else i.run = is_max ? by_number<Binary<Max>::Of>(type) : by_number<Binary<Min>::Of>(type);
  } else if (op == "div") i.run = by_number<Binary<Div>::Of>(type);
  else if (op == "rem") i.run = by_integer<Binary<Rem>::Of>(type);
  else if (op == "neg") i.run = by_number<Unary<Neg>::Of>(type);
  else if (op == "abs") i.run = by_number<Unary<Abs>::Of>(type);
  else if (op == "and" || op == "or" || op == "xor" || op == "not") i.run = logic(op, type);
  else if (op == "shl") i.run = by_integer<ShiftLeftOf>(type);
  else if (op == "shr") i.run = by_integer<ShiftRightOf>(type);
  else if (op == "shf") i.run = shift_funnel, i.with = {name.has("l"), name.has("clamp"), 0, 0};
  else if (op == "lop3") i.run = lop3_of(i.operands[4].value, std::make_integer_sequence<int, 256>());
  else if (op == "prmt" && type == "b32") i.run = permute_bytes;
  else if (op == "bfe" && (type == "u32" || type == "s32"))
    i.run = type == "s32" ? extract_bits<true> : extract_bits<false>;
  else if (op == "bfi") i.run = type == "b64" ? insert_bits<uint64_t> : insert_bits<uint32_t>;
  else if (op == "dp4a" && name.parts[1] == "s32" && name.parts[2] == "s32") i.run = dot4_signed;
  else if (op == "popc" && type == "b32") i.run = unary<uint32_t, Popc>;
  else if (op == "brev" && type == "b32") i.run = unary<uint32_t, Brev>;
  else if (op == "clz" && type == "b32") i.run = unary<uint32_t, Clz>;
  else if (op == "rcp") {
    i.run = type == "f64"     ? unary<double, Reciprocal>
            : name.has("ftz") ? unary<float, ReciprocalFlushed>
                              : unary<float, Reciprocal>;
  } else if (op == "sqrt") i.run = type == "f64" ? unary<double, SquareRoot> : unary<float, SquareRoot>;
  else if (op == "rsqrt" && type == "f32") i.run = unary<float, ReciprocalRoot>;
  else if (op == "ex2" && type == "f32")
    i.run = name.has("ftz") ? unary<float, Exp2Flushed> : unary<float, Exp2>;
  else if (op == "lg2" && type == "f32") i.run = unary<float, Log2>;
  else if (op == "tanh" && type == "f32") i.run = unary<float, Tanh>;
  else if (op == "sin" && type == "f32") i.run = unary<float, Sin>;
  else if (op == "cos" && type == "f32") i.run = unary<float, Cos>;
  else if (op == "setp") i.run = comparison(name, i);
  else if (op == "selp") i.run = by_number<SelectOf>(type);
  else if (op == "mov") i.run = moving(type, i);
}

}  // namespace emulator
