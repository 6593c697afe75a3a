// SPDX-License-Identifier: Apache-2.0
//
// Accesses to a cluster's shared memory that nothing orders: the same bytes, from two warps or from a warp
// and a copy, one of them a write, and no barrier between.
//
// Every actor has a clock, and every warp knows up to which time of each actor it has learned what that did
// (vector clocks, as in FastTrack; Flanagan and Freund, 2009). Barriers pass knowledge on: who arrives gives
// what it knows, who has waited takes it. An access is ordered after an earlier one if its warp knows of that
// one's time.
//
// Copies and the products of wgmma are actors of their own, because they go on beside the program: what a
// warp has begun is known, to itself as well, once it has waited for the group that it was committed with;
// what counts bytes at a barrier, once the barrier's phase has ended. They begin with what the warp knows.
//
// Lanes of a warp that arrive for all of it know what the others did up to the last bar.warp.sync (or barrier
// of the block). Within a warp nothing is looked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace emulator {

struct Cluster;
struct NumberedBarrier;
class Warp;

class Races {
 public:
  explicit Races(const Cluster& cluster);  // with all of its warps

  // What a warp does beside the program, and later waits for in groups.
  enum class Work : uint32_t { products, copies_in, copies_out };

  // The active lanes touch `bytes` at an address; other memory than shared is of no interest.
  void access(const Warp& warp, const uint8_t* at, size_t bytes, bool is_write);
  void begin(const Warp& warp, Work work, const uint8_t* at, size_t bytes, bool is_write);
  void commit(const Warp& warp, Work work);
  void wait(const Warp& warp, Work work, size_t groups_left);
  void begin_for(const Warp& warp, const uint8_t* barrier, const uint8_t* at, size_t bytes, bool is_write);

  void lanes_meet(const Warp& warp);
  // Barriers of copies, by where they are. With `with_copies` what the warp has begun to copy is done first.
  void arrive(const Warp& warp, const uint8_t* barrier, bool with_copies = false);
  void end_phase(const uint8_t* barrier);
  void learn(const Warp& warp, const uint8_t* barrier);
  // Barriers with a number, and the cluster's.
  void arrive(const Warp& warp, const NumberedBarrier& barrier);
  void open(const NumberedBarrier& barrier, const std::vector<Warp*>& waited);
  void cluster_arrive(const Warp& warp);
  void cluster_open();
  void cluster_pass(const Warp& warp);

 private:
  using Knowledge = std::vector<uint32_t>;  // of each actor, a time
  struct Epoch {
    uint32_t actor, time, warp, pc;  // the warp that did it, or began it
  };
  struct Cell {  // four bytes
    Epoch write = {};
    std::vector<Epoch> reads;  // since then, the last of each actor
  };
  struct OfWarp {
    Knowledge known;
    uint32_t number = 0, first_actor = 0;
    uint32_t time = 1, met = 0;  // now; when all lanes met
    uint32_t work_time[3] = {1, 1, 1};
    std::vector<uint32_t> groups[3];  // the times of those not yet waited for
  };
  struct OfBarrier {
    uint32_t actor = 0, time = 1;
    Knowledge given, taken;  // in this phase; in those that have ended
  };
  // The actors of a warp: all lanes, one lane alone, and its work of three kinds.
  static constexpr uint32_t kAll = 0, kOneLane = 1, kFirstWork = 2, kActorsOfWarp = 5;

  uint32_t number_of(const Warp& warp) const;  // in the cluster
  OfWarp& of(const Warp& warp) { return warps_[number_of(warp)]; }
  OfBarrier& of(const uint8_t* barrier);
  static void add(Knowledge& to, const Knowledge& from);
  static uint32_t& at(Knowledge& knowledge, uint32_t actor);
  // What others learn from the active lanes now; what these do next is later than that.
  Knowledge give(const Warp& warp);
  void touch(const Warp& warp, const Knowledge& known, const Epoch& epoch, const uint8_t* at, size_t bytes,
             bool is_write);
  Cell* cells(const uint8_t* at, size_t bytes, uint32_t& block, uint32_t& offset);
  [[noreturn]] void fault(const Warp& warp, bool is_write, const Epoch& other, bool was_write, uint32_t block,
                          uint32_t offset) const;

  const Cluster& cluster_;
  uint32_t num_actors_ = 1;  // 0 is nobody
  std::vector<OfWarp> warps_;
  std::unordered_map<const uint8_t*, OfBarrier> barriers_;
  std::unordered_map<const NumberedBarrier*, Knowledge> numbered_;  // what has been given
  std::vector<std::vector<Cell>> cells_;                            // of each block
  Knowledge cluster_given_, cluster_taken_;
};

}  // namespace emulator
