// SPDX-License-Identifier: Apache-2.0
#include "races.h"

#include <algorithm>
#include <bit>

#include "machine.h"

namespace emulator {
namespace {

constexpr size_t kCellBytes = 4;

}  // namespace

Races::Races(const Cluster& cluster) : cluster_(cluster), cells_(cluster.blocks.size()) {
  for (const auto& block : cluster.blocks) {
    for (size_t i = 0; i < block->warps.size(); ++i, num_actors_ += kActorsOfWarp) {
      OfWarp& w = warps_.emplace_back();
      w.number = static_cast<uint32_t>(warps_.size() - 1), w.first_actor = num_actors_;
    }
  }
}

uint32_t Races::number_of(const Warp& warp) const {
  return warp.block.rank * static_cast<uint32_t>(warp.block.warps.size()) + warp.index;
}

Races::OfBarrier& Races::of(const uint8_t* barrier) {
  const auto [it, is_new] = barriers_.try_emplace(barrier);
  if (is_new) it->second.actor = num_actors_++;
  return it->second;
}

uint32_t& Races::at(Knowledge& knowledge, uint32_t actor) {
  if (knowledge.size() <= actor) knowledge.resize(actor + 1);
  return knowledge[actor];
}

void Races::add(Knowledge& to, const Knowledge& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

Races::Knowledge Races::give(const Warp& warp) {
  OfWarp& w = of(warp);
  Knowledge given = w.known;
  const uint32_t living = warp.threads() & ~warp.ended();
  const bool is_whole = warp.active == living, is_one = std::has_single_bit(warp.active);
  at(given, w.first_actor + kAll) = is_whole ? w.time : w.met;
  at(given, w.first_actor + kOneLane) = is_whole || is_one ? w.time : w.met;
  ++w.time;
  return given;
}

void Races::lanes_meet(const Warp& warp) {
  OfWarp& w = of(warp);
  w.met = w.time++;
}

void Races::access(const Warp& warp, const uint8_t* address, size_t bytes, bool is_write) {
  OfWarp& w = of(warp);
  const uint32_t actor = w.first_actor + (std::has_single_bit(warp.active) ? kOneLane : kAll);
  touch(warp, w.known, {actor, w.time, w.number, warp.pc()}, address, bytes, is_write);
}

void Races::begin(const Warp& warp, Work work, const uint8_t* address, size_t bytes, bool is_write) {
  OfWarp& w = of(warp);
  const auto kind = static_cast<uint32_t>(work);
  touch(warp, w.known, {w.first_actor + kFirstWork + kind, w.work_time[kind], w.number, warp.pc()}, address,
        bytes, is_write);
}

void Races::commit(const Warp& warp, Work work) {
  OfWarp& w = of(warp);
  const auto kind = static_cast<uint32_t>(work);
  w.groups[kind].push_back(w.work_time[kind]++);
}

void Races::wait(const Warp& warp, Work work, size_t groups_left) {
  OfWarp& w = of(warp);
  const auto kind = static_cast<uint32_t>(work);
  auto& groups = w.groups[kind];
  if (groups.size() <= groups_left) return;
  const auto end = groups.end() - static_cast<ptrdiff_t>(groups_left);
  at(w.known, w.first_actor + kFirstWork + kind) = end[-1];
  groups.erase(groups.begin(), end);
}

void Races::begin_for(const Warp& warp, const uint8_t* barrier, const uint8_t* address, size_t bytes,
                      bool is_write) {
  OfBarrier& b = of(barrier);
  // With what the lanes that begin it know, the others' part of it being what they did before all met.
  const Knowledge known = give(warp);
  touch(warp, known, {b.actor, b.time, of(warp).number, warp.pc()}, address, bytes, is_write);
  add(b.given, known);
  at(b.given, b.actor) = b.time;
}

void Races::arrive(const Warp& warp, const uint8_t* barrier, bool with_copies) {
  Knowledge given = give(warp);
  if (with_copies) {
    OfWarp& w = of(warp);
    const auto kind = static_cast<uint32_t>(Work::copies_in);
    at(given, w.first_actor + kFirstWork + kind) = w.work_time[kind]++;
  }
  add(of(barrier).given, given);
}

void Races::end_phase(const uint8_t* barrier) {
  OfBarrier& b = of(barrier);
  add(b.taken, b.given);
  b.given.clear();
  ++b.time;
}

void Races::learn(const Warp& warp, const uint8_t* barrier) { add(of(warp).known, of(barrier).taken); }

void Races::arrive(const Warp& warp, const NumberedBarrier& barrier) {
  add(numbered_[&barrier], give(warp));
  lanes_meet(warp);
}
void Races::open(const NumberedBarrier& barrier, const std::vector<Warp*>& waited) {
  Knowledge& given = numbered_[&barrier];
  for (const Warp* warp : waited) add(of(*warp).known, given);
  given.clear();
}

void Races::cluster_arrive(const Warp& warp) { add(cluster_given_, give(warp)); }
void Races::cluster_open() {
  add(cluster_taken_, cluster_given_);
  cluster_given_.clear();
}
void Races::cluster_pass(const Warp& warp) {
  lanes_meet(warp);
  add(of(warp).known, cluster_taken_);
}

Races::Cell* Races::cells(const uint8_t* address, size_t bytes, uint32_t& block, uint32_t& offset) {
  for (block = 0; block < cluster_.blocks.size(); ++block) {
    const auto window = cluster_.blocks[block]->shared_window();
    if (address < window.data() || address + bytes > window.data() + window.size()) continue;
    auto& cells = cells_[block];
    if (cells.empty()) cells.resize(window.size() / kCellBytes + 1);
    offset = static_cast<uint32_t>(address - window.data());
    return &cells[offset / kCellBytes];
  }
  return nullptr;
}

void Races::touch(const Warp& warp, const Knowledge& known, const Epoch& epoch, const uint8_t* address,
                  size_t bytes, bool is_write) {
  uint32_t block = 0, offset = 0;
  Cell* cell = cells(address, bytes, block, offset);
  if (!cell) return;
  const uint32_t own = of(warp).first_actor;
  const auto is_ordered = [&](const Epoch& before) {
    if (before.actor == 0 || before.actor == own + kAll || before.actor == own + kOneLane) return true;
    return before.actor < known.size() && before.time <= known[before.actor];
  };
  const size_t count = (offset % kCellBytes + bytes + kCellBytes - 1) / kCellBytes;
  for (size_t i = 0; i < count; ++i, ++cell) {
    const auto at = static_cast<uint32_t>(offset + i * kCellBytes);
    if (!is_ordered(cell->write)) fault(warp, is_write, cell->write, true, block, at);
    if (is_write) {
      for (const Epoch& read : cell->reads)
        if (!is_ordered(read)) fault(warp, true, read, false, block, at);
      cell->reads.clear();
      cell->write = epoch;
      continue;
    }
    const auto same = std::find_if(cell->reads.begin(), cell->reads.end(),
                                   [&](const Epoch& read) { return read.actor == epoch.actor; });
    if (same != cell->reads.end()) *same = epoch;
    else cell->reads.push_back(epoch);
  }
}

void Races::fault(const Warp& warp, bool is_write, const Epoch& other, bool was_write, uint32_t block,
                  uint32_t offset) const {
  const size_t warps = cluster_.blocks[0]->warps.size();
  const Warp& before = *cluster_.blocks[other.warp / warps]->warps[other.warp % warps];
  warp.fault(std::string("a race: ") + (is_write ? "writes" : "reads") + " byte " + std::to_string(offset) +
             " of block " + std::to_string(block) + "'s shared memory, which '" + before.text_at(other.pc) +
             "' of block " + std::to_string(before.block.rank) + " warp " + std::to_string(before.index) +
             (was_write ? " wrote" : " reads") + ", and nothing orders them");
}

}  // namespace emulator
