// SPDX-License-Identifier: Apache-2.0
//
// The emulated GPU: grids of blocks of warps, which take turns on one CPU thread.
//
// A warp's threads run together. Where they part, each part (`Group`) goes on by itself, that with the lowest
// address first, so that they meet again behind a branch or a loop. Warps run a slice each; one that waits
// (at a barrier of copies, for a flag in memory) gives its slice up. A block begins when all before it wait
// or are done, so that few are in memory at a time and those that wait for others find them.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <span>
#include <type_traits>

#include "memory.h"
#include "program.h"
#include "races.h"

namespace emulator {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
  uint64_t count() const { return uint64_t{x} * y * z; }
};

struct LaunchConfig {
  Dim3 grid, block;
  uint32_t cluster = 1;  // blocks, along x
  uint32_t dynamic_shared = 0;
  bool overlaps = false;  // may begin before the kernel ahead has ended (programmatic dependent launch)
};

struct Cluster;
class Block;
class Machine;

// Threads of a warp that are at the same instruction.
struct Group {
  uint32_t pc = 0, mask = 0;
  bool is_parked = false;   // until others join it, or a barrier opens
  bool is_resting = false;  // has given up its slice
};

class Warp {
 public:
  Warp(Block& block, uint32_t index, uint32_t num_threads);

  // Until it has to wait or `budget` instructions are done; their number.
  int run(int budget);
  bool is_done() const { return groups_.empty(); }
  void unpark() {
    for (Group& g : groups_) g.is_parked = false;
  }

  // ---- For handlers; `active`: the lanes that execute ----
  uint32_t active = 0;
  Block& block;
  const uint32_t index;
  uint32_t first_lane() const { return static_cast<uint32_t>(__builtin_ctz(active)); }

  template <class T>
  using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

  // A register or constant as 32 slots.
  template <class T>
  const Slot<T>* slots(const Operand& o) const {
    if (o.kind == Operand::Kind::constant) {
      if constexpr (sizeof(T) == 8) return o.constant->wide.data();
      else return o.constant->narrow.data();
    }
    if (o.kind != Operand::Kind::reg || o.is_wide != (sizeof(T) == 8)) fault("an operand of another size");
    return reinterpret_cast<const Slot<T>*>(registers_ + o.slot);
  }
  template <class T>
  static T from_slot(Slot<T> s) {
    T v;
    std::memcpy(&v, &s, sizeof v);
    return v;
  }
  template <class T>
  static Slot<T> to_slot(T v) {
    Slot<T> s = 0;
    std::memcpy(&s, &v, sizeof v);
    return s;
  }
  template <class T>
  T value(const Operand& o, int lane) const {
    return from_slot<T>(slots<T>(o)[lane]);
  }
  template <class T>
  Slot<T>* target(const Operand& o) {
    if (o.kind != Operand::Kind::reg || o.is_wide != (sizeof(T) == 8)) fault("a result of another size");
    return reinterpret_cast<Slot<T>*>(registers_ + o.slot);
  }
  template <class T>
  void set(const Operand& o, int lane, T v) {
    if (o.kind != Operand::Kind::none) target<T>(o)[lane] = to_slot(v);
  }
  // The active lanes get what `f` gives for them; it is called for all 32, so that this can be vectors.
  template <class T, class F>
  void set_all(const Operand& o, F f) {
    alignas(64) Slot<T> result[kLanes];
    for (int l = 0; l < kLanes; ++l) result[l] = to_slot<T>(f(l));
    Slot<T>* to = target<T>(o);
    if (active == ~0u) {
      std::memcpy(to, result, sizeof result);
    } else {
      for (int l = 0; l < kLanes; ++l) to[l] = active >> l & 1 ? result[l] : to[l];
    }
  }
  uint32_t predicate(const Operand& o) const {
    if (o.kind == Operand::Kind::constant) return o.value ? ~0u : 0;
    if (o.kind != Operand::Kind::predicate) fault("an operand that is no predicate");
    return o.is_negated ? ~predicates_[o.slot] : predicates_[o.slot];
  }
  void set_predicate(const Operand& o, uint32_t bits) {
    if (o.kind == Operand::Kind::none) return;
    if (o.kind != Operand::Kind::predicate) fault("a result that is no predicate");
    predicates_[o.slot] = (predicates_[o.slot] & ~active) | (bits & active);
  }
  template <class F>
  void for_lanes(F f) const {
    for (uint32_t rest = active; rest; rest &= rest - 1) f(__builtin_ctz(rest));
  }
  uint64_t address(const Operand& o, int lane) const {
    if (!o.has_base) return static_cast<uint64_t>(o.value);
    // Addresses of 32 bits wrap around as such.
    if (!o.is_wide)
      return static_cast<uint32_t>(reinterpret_cast<const uint32_t*>(registers_ + o.slot)[lane] + o.value);
    return reinterpret_cast<const uint64_t*>(registers_ + o.slot)[lane] + static_cast<uint64_t>(o.value);
  }
  bool is_uniform(const Operand& address_operand) const {
    if (!address_operand.has_base) return true;
    const uint64_t first = address(address_operand, static_cast<int>(first_lane()));
    uint64_t differs = 0;
    for (int l = 0; l < kLanes; ++l) differs |= active >> l & 1 ? address(address_operand, l) ^ first : 0;
    return differs == 0;
  }
  uint8_t* local(int lane) const { return local_ + static_cast<size_t>(lane) * local_bytes_; }
  size_t local_bytes() const { return local_bytes_; }
  // `bytes`, a power of two, that a lane may touch there.
  uint8_t* memory(Space space, uint64_t at, uint32_t bytes, int lane, bool is_write) const {
    if (at % bytes == 0) {
      if (space == Space::shared && at >= kSharedBegin && at + bytes <= shared_.size())
        return shared_.data() + at;
      for (const Allocation& a : recent_)
        if (space == Space::global && at >= a.begin && at + bytes <= a.end)
          return reinterpret_cast<uint8_t*>(at);
    }
    return checked_memory(space, at, bytes, lane, is_write);
  }
  uint32_t special(Special which, uint32_t dimension, int lane) const;
  [[noreturn]] void fault(const std::string& what) const;
  uint32_t pc() const { return pc_; }
  std::string text_at(uint32_t pc) const;  // of an instruction
  Races* races() const;                    // null where they are not looked for

  // ---- Control ----
  void jump(uint32_t target);  // the active lanes
  void jump_each(const uint32_t* targets);
  uint32_t next_pc() const { return pc_ + 1; }
  void leave();  // the active lanes end
  // Whether all of `mask` that have not ended are here; if not, the instruction is tried again once they may
  // be.
  bool gather(uint32_t mask);
  bool gather_all() { return gather(~0u); }
  void park() { is_to_park_ = true; }
  void rest() { is_to_rest_ = true; }
  void wait_here() { is_to_stay_ = true; }  // try this instruction again
  uint32_t threads() const { return threads_; }
  uint32_t ended() const { return ended_; }
  std::string where() const;     // its groups and their instructions
  uint32_t cluster_arrived = 0;  // lanes that have arrived at the barrier of the cluster
  uint32_t cluster_phase = 0;    // that they wait for

 private:
  Group* pick();
  uint8_t* checked_memory(Space space, uint64_t at, uint32_t bytes, int lane, bool is_write) const;
  void split_off(uint32_t pc, uint32_t mask);

  const Program& program_;
  uint8_t* registers_;
  std::vector<uint32_t> predicates_;
  uint8_t* local_;
  size_t local_bytes_;
  std::span<uint8_t> shared_;  // of its block
  mutable std::array<Allocation, 4> recent_{};
  mutable size_t next_recent_ = 0;
  std::vector<Group> groups_;
  Group* current_ = nullptr;
  uint32_t pc_ = 0;
  uint32_t threads_ = 0, ended_ = 0;
  bool is_to_park_ = false, is_to_rest_ = false, is_to_stay_ = false;
};

// A barrier with a number, at which warps of a block arrive.
struct NumberedBarrier {
  uint32_t arrived = 0;
  std::vector<Warp*> waiting;
};

class Block {
 public:
  Block(Machine& machine, Cluster& cluster, uint32_t rank, Dim3 index);

  Machine& machine;
  Cluster& cluster;
  const uint32_t rank;  // in its cluster
  const Dim3 index;
  std::vector<std::unique_ptr<Warp>> warps;
  std::array<NumberedBarrier, 16> barriers;

  // Of this block's shared memory, or of another's in its cluster (addresses that mapa gives).
  uint8_t* shared(const Warp& w, uint64_t address, uint32_t bytes);
  std::span<uint8_t> shared_window() { return shared_; }
  void arrive(Warp& warp, uint32_t barrier, uint32_t threads, bool waits);
  bool is_done() const { return num_done == warps.size(); }
  size_t num_done = 0;

 private:
  std::span<uint8_t> shared_;
};

// Memory for registers and shared memory, which every block of a kernel needs as much of: kept for the next
// one.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch();
  uint8_t* take(size_t bytes);  // at a multiple of 1024

 private:
  std::vector<std::pair<size_t, uint8_t*>> taken_;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  std::unique_ptr<Races> races;
  Scratch memory;
  uint32_t phase = 0;  // of its barrier
  void open_if_all_arrived();
};

inline Races* Warp::races() const { return block.cluster.races.get(); }

// mapa: the block's number, and one more so that its own addresses are what they are in the block itself.
constexpr uint32_t kBlockShift = 24;

class Machine {
 public:
  Machine(const Program& program, const LaunchConfig& config, std::span<const uint8_t> params, uint64_t seed,
          bool finds_races);
  // As far as it comes while the kernel before runs, and to the end.
  void run_ahead();
  void run();

  const Program& program;
  const LaunchConfig config;
  bool is_previous_done = true;
  std::span<uint8_t> params;  // begins at a multiple of 64, which tensor maps need
  uint64_t num_events = 0;    // what others may wait for: stores, arrivals, ends
  uint64_t num_instructions = 0;

  // Does `copy` now, or, with a seed, some time later: what does not wait for it is then found out.
  template <class F>
  void later(const Warp* owner, F copy) {
    ++num_events;
    if (is_delayed_) copies_.push_back({owner, std::move(copy)});
    else copy();
  }
  void finish_copies(const Warp* owner);  // that this warp has begun; nullptr: all

 private:
  void start_cluster();
  bool turn();

  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> param_lines_;
  std::vector<std::unique_ptr<Cluster>> running_;
  uint64_t next_cluster_ = 0, num_clusters_ = 0;
  bool is_delayed_ = false, finds_races_ = false;
  std::mt19937_64 random_;
  struct Copy {
    const Warp* owner;
    std::function<void()> run;
  };
  std::vector<Copy> copies_;
};

}  // namespace emulator
