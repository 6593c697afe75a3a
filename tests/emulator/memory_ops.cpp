// SPDX-License-Identifier: Apache-2.0
//
// Loads, stores, atomics, and the addresses of other blocks' shared memory.
#include <algorithm>

#include "machine.h"

namespace emulator {
namespace {

Space space_of(const Mnemonic& name) {
  for (const auto& part : name.parts) {
    if (part == "global") return Space::global;
    if (part.substr(0, 6) == "shared") return Space::shared;
    if (part == "local") return Space::local;
    if (part == "param") return Space::param;
  }
  return Space::generic;
}

// Arguments of functions are in local memory, those of kernels are not.
Space actual(const Instruction& i, const Operand& address) {
  const auto space = static_cast<Space>(i.with[0]);
  return space == Space::param && !address.has_base ? address.space : space;
}

// For accesses that may be to shared memory.
Races* races_of(const Warp& w, Space space) {
  return space == Space::shared || space == Space::generic ? w.races() : nullptr;
}

template <class T>
void load(Warp& w, const Instruction& i) {
  const int count = i.counts[0];
  const Operand& from = i.operands[count];
  const Space space = actual(i, from);
  if (i.with[1]) w.rest();  // an acquire: what it waits for may come from another warp
  if (space == Space::param && w.is_uniform(from)) {
    const uint8_t* at =
        w.memory(space, w.address(from, static_cast<int>(w.first_lane())), sizeof(T) * count, 0, false);
    for (int c = 0; c < count; ++c) {
      T v;
      std::memcpy(&v, at + c * sizeof(T), sizeof v);
      const auto extended = static_cast<uint64_t>(static_cast<int64_t>(v));
      if (i.operands[c].is_wide) w.set_all<uint64_t>(i.operands[c], [&](int) { return extended; });
      else w.set_all<uint32_t>(i.operands[c], [&](int) { return static_cast<uint32_t>(extended); });
    }
    return;
  }
  Races* races = races_of(w, space);
  w.for_lanes([&](int l) {
    const uint8_t* at = w.memory(space, w.address(from, l), sizeof(T) * count, l, false);
    if (races) races->access(w, at, sizeof(T) * count, false);
    for (int c = 0; c < count; ++c) {
      T v;
      std::memcpy(&v, at + c * sizeof(T), sizeof v);
      const Operand& to = i.operands[c];
      if (to.kind == Operand::Kind::none) continue;
      // Registers may be wider: extended, by the sign where the type has one.
      if (to.is_wide) w.set<uint64_t>(to, l, static_cast<uint64_t>(static_cast<int64_t>(v)));
      else w.set<uint32_t>(to, l, static_cast<uint32_t>(static_cast<int64_t>(v)));
    }
  });
}

template <class T>
void store(Warp& w, const Instruction& i) {
  const Operand& to = i.operands[0];
  const int count = i.counts[1];
  const Space space = actual(i, to);
  if (space != Space::local) ++w.block.machine.num_events;
  Races* races = races_of(w, space);
  w.for_lanes([&](int l) {
    uint8_t* at = w.memory(space, w.address(to, l), sizeof(T) * count, l, true);
    if (races) races->access(w, at, sizeof(T) * count, true);
    for (int c = 0; c < count; ++c) {
      const Operand& from = i.operands[1 + c];
      const T v = from.kind == Operand::Kind::reg && from.is_wide ? static_cast<T>(w.value<uint64_t>(from, l))
                  : sizeof(T) == 8                                ? static_cast<T>(w.slots<uint64_t>(from)[l])
                                   : static_cast<T>(w.slots<uint32_t>(from)[l]);
      std::memcpy(at + c * sizeof(T), &v, sizeof v);
    }
  });
}

template <template <class> class Of>
Handler by_type(std::string_view type) {
  if (type == "u8" || type == "b8") return Of<uint8_t>::handler();
  if (type == "s8") return Of<int8_t>::handler();
  if (type == "u16" || type == "b16" || type == "f16" || type == "bf16") return Of<uint16_t>::handler();
  if (type == "s16") return Of<int16_t>::handler();
  if (type == "u32" || type == "b32" || type == "f32") return Of<uint32_t>::handler();
  if (type == "s32") return Of<int32_t>::handler();
  if (type == "u64" || type == "b64" || type == "f64" || type == "s64") return Of<uint64_t>::handler();
  return nullptr;
}
template <class T>
struct LoadOf {
  static Handler handler() { return load<T>; }
};
template <class T>
struct StoreOf {
  static Handler handler() { return store<T>; }
};

enum Atomic { kMin, kMax, kAdd, kOr, kAnd, kExchange };

template <class T>
void atomic(Warp& w, const Instruction& i) {
  const bool has_result = i.with[2];
  const Operand &at = i.operands[has_result ? 1 : 0], &with = i.operands[has_result ? 2 : 1];
  ++w.block.machine.num_events;
  Races* races = races_of(w, static_cast<Space>(i.with[0]));
  w.for_lanes([&](int l) {
    uint8_t* p = w.memory(static_cast<Space>(i.with[0]), w.address(at, l), sizeof(T), l, true);
    if (races) w.fault("atomics on shared memory are not understood where races are looked for");
    T old, v = w.value<T>(with, l);
    std::memcpy(&old, p, sizeof old);
    v = i.with[1] == kMin   ? std::min(old, v)
        : i.with[1] == kMax ? std::max(old, v)
        : i.with[1] == kAdd ? static_cast<T>(old + v)
        : i.with[1] == kOr  ? static_cast<T>(old | v)
        : i.with[1] == kAnd ? static_cast<T>(old & v)
                            : v;
    std::memcpy(p, &v, sizeof v);
    if (has_result) w.set<T>(i.operands[0], l, old);
  });
}

// What a call passes, and what it returns.
void copy_local(Warp& w, const Instruction& i) {
  w.for_lanes([&](int l) {
    std::memmove(w.local(l) + i.with[0], w.local(l) + i.with[1], static_cast<size_t>(i.with[2]));
  });
}

void address_in_block(Warp& w, const Instruction& i) {
  const auto *a = w.slots<uint32_t>(i.operands[1]), *rank = w.slots<uint32_t>(i.operands[2]);
  w.set_all<uint32_t>(i.operands[0], [&](int l) {
    return (rank[l] + 1) << kBlockShift | (a[l] & ((1u << kBlockShift) - 1));
  });
}

void nothing(Warp&, const Instruction&) {}

void make_policy(Warp& w, const Instruction& i) {
  w.set_all<uint64_t>(i.operands[0], [](int) { return uint64_t{0}; });
}

}  // namespace

void bind_memory(const Mnemonic& name, Instruction& i) {
  const std::string_view op = name.parts[0];
  if (op == "ld" || op == "st" || op == "atom" || op == "red")
    i.with[0] = static_cast<int64_t>(space_of(name));
  if (op == "ld") {
    i.with[1] = name.has("acquire") || name.has("volatile");
    i.run = by_type<LoadOf>(name.last());
  } else if (op == "st" && !name.has("async")) {
    i.run = by_type<StoreOf>(name.last());
  } else if (op == "atom" || op == "red") {
    const std::string_view what = name.from_end(1), type = name.last();
    i.with[2] = op == "atom";
    i.with[1] = what == "min"   ? kMin
                : what == "max" ? kMax
                : what == "add" ? kAdd
                : what == "or"  ? kOr
                : what == "and" ? kAnd
                                : kExchange;
    const bool is_known = i.with[1] != kExchange || what == "exch";
    if (!is_known) return;
    i.run = type == "u64" || type == "b64"   ? atomic<uint64_t>
            : type == "s64"                  ? atomic<int64_t>
            : type == "s32"                  ? atomic<int32_t>
            : type == "u32" || type == "b32" ? atomic<uint32_t>
                                             : nullptr;
  } else if (op == "copy_local") {
    i.run = copy_local;
  } else if (op == "mapa" && name.last() == "u32") {
    i.run = address_in_block;
  } else if (op == "createpolicy") {
    i.run = make_policy;
  } else if (op == "prefetch" || op == "prefetchu" || op == "fence" || op == "membar" || op == "discard" ||
             op == "applypriority") {
    i.run = nothing;  // memory is always in order here
  }
}

}  // namespace emulator
