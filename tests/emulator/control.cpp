// SPDX-License-Identifier: Apache-2.0
//
// Branches, calls, barriers, and what the lanes of a warp do together.
#include <algorithm>

#include "machine.h"

namespace emulator {
namespace {

void branch(Warp& w, const Instruction& i) { w.jump(i.target); }
void call(Warp& w, const Instruction& i) {
  Operand kept = i.operands[0];
  kept.kind = Operand::Kind::reg;
  w.set_all<uint32_t>(kept, [&](int) { return w.next_pc(); });
  w.jump(i.target);
}
void return_from_call(Warp& w, const Instruction& i) {
  Operand kept = i.operands[0];
  kept.kind = Operand::Kind::reg;
  w.jump_each(w.slots<uint32_t>(kept));
}
void leave(Warp& w, const Instruction&) { w.leave(); }
void trap(Warp& w, const Instruction&) { w.fault("trap"); }
void nothing(Warp&, const Instruction&) {}
void rest(Warp& w, const Instruction&) { w.rest(); }

// ---- Barriers ----

// bar.sync and bar.arrive: whole warps.
void barrier(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  const int lane = static_cast<int>(w.first_lane());
  const auto id = w.value<uint32_t>(i.operands[0], lane);
  const uint64_t all = (w.block.machine.config.block.count() + kLanes - 1) / kLanes * kLanes;
  const uint32_t threads =
      i.operands.size() > 1 ? w.value<uint32_t>(i.operands[1], lane) : static_cast<uint32_t>(all);
  w.block.arrive(w, id, threads, i.with[0]);
}
void warp_barrier(Warp& w, const Instruction& i) {
  const auto mask = w.value<uint32_t>(i.operands[0], static_cast<int>(w.first_lane()));
  if (!w.gather(mask)) return;
  if (Races* races = w.races(); races && (w.threads() & ~w.ended() & ~mask) == 0) races->lanes_meet(w);
}
void cluster_arrive(Warp& w, const Instruction& i) {
  if (!w.gather_all()) return;
  Cluster& c = w.block.cluster;
  const bool is_relaxed = i.with[0];
  if (c.races && !is_relaxed) c.races->cluster_arrive(w);
  w.cluster_phase = c.phase + 1;  // the one to come
  w.cluster_arrived |= w.active;
  ++w.block.machine.num_events;
  c.open_if_all_arrived();
}
void cluster_wait(Warp& w, const Instruction&) {
  if (w.block.cluster.phase >= w.cluster_phase) {
    if (Races* races = w.races()) races->cluster_pass(w);
    return;
  }
  w.wait_here();
  w.rest();
}

void wait_for_previous_kernel(Warp& w, const Instruction&) {
  if (w.block.machine.is_previous_done) return;
  w.wait_here();
  w.rest();
}

// ---- Lanes together ----

bool gather_members(Warp& w, const Operand& mask) {
  return w.gather(w.value<uint32_t>(mask, static_cast<int>(w.first_lane())));
}

enum Shuffle { kUp, kDown, kButterfly, kIndex };
void shuffle(Warp& w, const Instruction& i) {
  if (!gather_members(w, i.group(4)[0])) return;
  const auto* a = w.slots<uint32_t>(i.group(1)[0]);
  const auto *b = w.slots<uint32_t>(i.group(2)[0]), *c = w.slots<uint32_t>(i.group(3)[0]);
  uint32_t from[kLanes];
  std::copy(a, a + kLanes, from);
  uint32_t valid = 0;
  alignas(64) uint32_t result[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const int clamp = static_cast<int>(c[l] & 31), segments = static_cast<int>(c[l] >> 8 & 31),
              by = static_cast<int>(b[l] & 31);
    const int last = (l & segments) | (clamp & ~segments), first = l & segments;
    int j = 0;
    bool is_valid = false;
    switch (i.with[0]) {
      case kUp: j = l - by, is_valid = j >= last; break;
      case kDown: j = l + by, is_valid = j <= last; break;
      case kButterfly: j = l ^ by, is_valid = j <= last; break;
      default: j = first | (by & ~segments), is_valid = j <= last;
    }
    if (!is_valid) j = l;
    if ((w.active >> l & 1) && !(w.active >> j & 1)) w.fault("reads a lane that does not take part");
    result[l] = from[j];
    valid |= uint32_t{is_valid} << l;
  }
  w.set_all<uint32_t>(i.operands[0], [&](int l) { return result[l]; });
  if (i.counts[0] == 2) w.set_predicate(i.operands[1], valid);
}

enum Reduce { kAdd, kMin, kMax, kAnd, kOr, kXor };
template <class T>
void reduce(Warp& w, const Instruction& i) {
  if (!gather_members(w, i.operands[2])) return;
  bool is_first = true;
  T total = 0;
  w.for_lanes([&](int l) {
    const T v = w.value<T>(i.operands[1], l);
    total = is_first            ? v
            : i.with[0] == kAdd ? static_cast<T>(static_cast<uint32_t>(total) + static_cast<uint32_t>(v))
            : i.with[0] == kMin ? std::min(total, v)
            : i.with[0] == kMax ? std::max(total, v)
            : i.with[0] == kAnd ? static_cast<T>(total & v)
            : i.with[0] == kOr  ? static_cast<T>(total | v)
                                : static_cast<T>(total ^ v);
    is_first = false;
  });
  w.set_all<T>(i.operands[0], [&](int) { return total; });
}
enum Vote { kBallot, kAny, kAll };
void vote(Warp& w, const Instruction& i) {
  if (!gather_members(w, i.operands[2])) return;
  const uint32_t bits = w.predicate(i.operands[1]) & w.active;
  if (i.with[0] == kBallot) w.set_all<uint32_t>(i.operands[0], [&](int) { return bits; });
  else w.set_predicate(i.operands[0], (i.with[0] == kAny ? bits != 0 : bits == w.active) ? ~0u : 0);
}
void elect(Warp& w, const Instruction& i) {
  if (!gather_members(w, i.group(1)[0])) return;
  const uint32_t leader = w.first_lane();
  if (i.operands[0].kind != Operand::Kind::none)
    w.set_all<uint32_t>(i.operands[0], [&](int) { return leader; });
  w.set_predicate(i.operands[1], 1u << leader);
}
void active_mask(Warp& w, const Instruction& i) {
  const uint32_t mask = w.active;
  w.set_all<uint32_t>(i.operands[0], [&](int) { return mask; });
}

}  // namespace

void bind_control(const Mnemonic& name, Instruction& i) {
  const auto& p = name.parts;
  if (p[0] == "bra") i.run = branch;
  else if (p[0] == "call") i.run = call;
  else if (p[0] == "ret") i.run = i.with[0] ? return_from_call : leave;
  else if (p[0] == "exit") i.run = leave;
  else if (p[0] == "trap" || p[0] == "brkpt") i.run = trap;
  else if (p[0] == "nanosleep") i.run = rest;
  else if (p[0] == "bar" && p[1] == "warp") i.run = warp_barrier;
  else if ((p[0] == "bar" || p[0] == "barrier") && (p[1] == "sync" || p[1] == "arrive"))
    i.run = barrier, i.with[0] = p[1] == "sync";
  else if (p[0] == "barrier" && p[1] == "cluster")
    i.run = p[2] == "arrive" ? cluster_arrive : cluster_wait, i.with[0] = name.has("relaxed");
  else if (p[0] == "griddepcontrol" && p[1] == "wait") i.run = wait_for_previous_kernel;
  else if (p[0] == "griddepcontrol" || p[0] == "setmaxnreg") i.run = nothing;
  else if (p[0] == "shfl") {
    i.run = shuffle;
    i.with[0] = p[2] == "up" ? kUp : p[2] == "down" ? kDown : p[2] == "bfly" ? kButterfly : kIndex;
  } else if (p[0] == "redux") {
    const auto what = p[2];
    i.with[0] = what == "add"   ? kAdd
                : what == "min" ? kMin
                : what == "max" ? kMax
                : what == "and" ? kAnd
                : what == "or"  ? kOr
                                : kXor;
    if (name.last() == "s32") i.run = reduce<int32_t>;
    if (name.last() == "u32" || name.last() == "b32") i.run = reduce<uint32_t>;
  } else if (p[0] == "vote") {
    i.run = vote;
    i.with[0] = p[2] == "ballot" ? kBallot : p[2] == "any" ? kAny : kAll;
    if (p[2] == "uni") i.run = nullptr;
  } else if (p[0] == "elect") i.run = elect;
  else if (p[0] == "activemask") i.run = active_mask;
}

}  // namespace emulator
