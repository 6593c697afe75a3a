// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <algorithm>

namespace emulator {
namespace {

// Long enough that turns cost little, short enough that what waits is not far behind.
constexpr int kSlice = 4000;
// Turns in which nothing happens that another warp could wait for, until it is a deadlock.
constexpr int kIdleTurns = 3000;

uint32_t lanes(uint32_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

}  // namespace

// ---- Warp ----

Warp::Warp(Block& b, uint32_t i, uint32_t num_threads)
    : block(b), index(i), program_(b.machine.program), predicates_(program_.num_predicates) {
  registers_ = b.cluster.memory.take(program_.register_bytes);
  local_bytes_ = (program_.local_bytes + 15) / 16 * 16;
  local_ = b.cluster.memory.take(local_bytes_ * kLanes);
  std::memset(local_, 0xcb, local_bytes_ * kLanes);
  shared_ = b.shared_window();
  threads_ = lanes(num_threads);
  groups_.push_back({0, threads_, false, false});
}

std::string Warp::text_at(uint32_t pc) const {
  if (pc >= program_.code.size()) return "(the end)";
  const Instruction& i = program_.code[pc];
  std::string text(i.text, std::min<uint32_t>(i.text_bytes, 160));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; }, ' ');
  return text;
}

std::string Warp::where() const {
  std::string text = "block " + std::to_string(block.index.x) + "," + std::to_string(block.index.y) +
                     " warp " + std::to_string(index);
  for (const Group& g : groups_) text += " at '" + text_at(g.pc) + "'" + (g.is_parked ? " parked" : "");
  return text;
}

void Warp::fault(const std::string& what) const {
  throw Fault("block " + std::to_string(block.index.x) + "," + std::to_string(block.index.y) + " warp " +
              std::to_string(index) + ": " + what + ", in '" + text_at(pc_) + "'");
}

Group* Warp::pick() {
  if (groups_.size() == 1) {
    Group& g = groups_[0];
    return g.is_parked || g.is_resting ? nullptr : &g;
  }
  // Those that have met are one again.
  for (size_t a = 0; a < groups_.size(); ++a) {
    for (size_t b = a + 1; b < groups_.size();) {
      if (groups_[a].pc != groups_[b].pc) {
        ++b;
        continue;
      }
      groups_[a].mask |= groups_[b].mask;
      groups_[a].is_parked = groups_[a].is_resting = false;
      groups_.erase(groups_.begin() + static_cast<ptrdiff_t>(b));
    }
  }
  Group* lowest = nullptr;
  for (Group& g : groups_) {
    if (!g.is_parked && !g.is_resting && (!lowest || g.pc < lowest->pc)) lowest = &g;
  }
  return lowest;
}

int Warp::run(int budget) {
  int done = 0;
  for (; done < budget; ++done) {
    current_ = pick();
    if (!current_) break;
    pc_ = current_->pc;
    if (pc_ >= program_.code.size()) fault("ran over the end");
    const Instruction& i = program_.code[pc_];
    active = current_->mask;
    if (i.guard >= 0) {
      const uint32_t p = predicates_[i.guard];
      active &= i.is_guard_negated ? ~p : p;
    }
    current_->pc = pc_ + 1;
    if (!active) continue;
    i.run(*this, i);
    if (!current_) continue;  // ended, or parted
    if (is_to_stay_) current_->pc = pc_, is_to_stay_ = false;
    if (is_to_park_) current_->is_parked = true, is_to_park_ = false;
    if (is_to_rest_) current_->is_resting = true, is_to_rest_ = false;
  }
  for (Group& g : groups_) g.is_resting = false;
  block.machine.num_instructions += static_cast<uint64_t>(done);
  return done;
}

void Warp::split_off(uint32_t pc, uint32_t mask) {
  current_->mask &= ~mask;
  const bool is_empty = current_->mask == 0;
  if (is_empty) {
    current_->pc = pc, current_->mask = mask;
  } else {
    groups_.push_back({pc, mask, false, false});
    current_ = nullptr;
  }
}

void Warp::jump(uint32_t target) { split_off(target, active); }

void Warp::jump_each(const uint32_t* targets) {
  uint32_t rest = active;
  current_->mask &= ~active;
  if (current_->mask == 0) groups_.erase(groups_.begin() + (current_ - groups_.data()));
  current_ = nullptr;
  while (rest) {
    const uint32_t target = targets[__builtin_ctz(rest)];
    uint32_t same = 0;
    for (uint32_t r = rest; r; r &= r - 1) {
      const int l = __builtin_ctz(r);
      if (targets[l] == target) same |= 1u << l;
    }
    rest &= ~same;
    groups_.push_back({target, same, false, false});
  }
}

void Warp::leave() {
  ended_ |= active;
  current_->mask &= ~active;
  if (current_->mask == 0) {
    groups_.erase(groups_.begin() + (current_ - groups_.data()));
    current_ = nullptr;
  }
  unpark();  // those that gather now wait for fewer
  if (groups_.empty()) ++block.num_done;
  ++block.machine.num_events;
  block.cluster.open_if_all_arrived();
}

bool Warp::gather(uint32_t mask) {
  if ((mask & threads_ & ~ended_ & ~current_->mask) == 0) return true;
  is_to_stay_ = is_to_park_ = true;
  return false;
}

uint32_t Warp::special(Special which, uint32_t d, int lane) const {
  const LaunchConfig& c = block.machine.config;
  auto part = [d](const Dim3& v) { return d == 0 ? v.x : d == 1 ? v.y : v.z; };
  switch (which) {
    case Special::tid: {
      const uint32_t t = index * kLanes + static_cast<uint32_t>(lane);
      return d == 0 ? t % c.block.x : d == 1 ? t / c.block.x % c.block.y : t / c.block.x / c.block.y;
    }
    case Special::ntid: return part(c.block);
    case Special::ctaid: return part(block.index);
    case Special::nctaid: return part(c.grid);
    case Special::laneid: return static_cast<uint32_t>(lane);
    case Special::warpid: return index;
    case Special::cluster_rank: return block.rank;
    case Special::smid: return 0;
    case Special::clock: return static_cast<uint32_t>(block.machine.num_instructions);
  }
  fault("a special register");
}

uint8_t* Warp::checked_memory(Space space, uint64_t at, uint32_t bytes, int lane, bool is_write) const {
  if (at % bytes != 0) fault("an address that is not aligned, " + std::to_string(at));
  switch (space) {
    case Space::shared: return block.shared(*this, at, bytes);
    case Space::local:
      if (at + bytes > local_bytes_) fault("beyond local memory");
      return local(lane) + at;
    case Space::param:
      if (is_write || at + bytes > block.machine.params.size()) fault("beyond the arguments");
      return block.machine.params.data() + at;
    default: break;
  }
  if (const Allocation a = find_allocation(at, bytes); a.end) {
    recent_[next_recent_++ % recent_.size()] = a;
    return reinterpret_cast<uint8_t*>(at);
  }
  if (space == Space::generic) {
    auto within = [&](const uint8_t* begin, size_t size) {
      const auto b = reinterpret_cast<uint64_t>(begin);
      return at >= b && at + bytes <= b + size;
    };
    const auto window = block.shared_window();
    if (within(local(lane), local_bytes_) || within(window.data(), window.size()))
      return reinterpret_cast<uint8_t*>(at);
    if (!is_write && within(block.machine.params.data(), block.machine.params.size()))
      return reinterpret_cast<uint8_t*>(at);
  }
  fault(std::string(is_write ? "writes " : "reads ") + std::to_string(bytes) +
        " bytes that are not allocated (lane " + std::to_string(lane) + ")");
}

// ---- Block ----

Block::Block(Machine& m, Cluster& c, uint32_t r, Dim3 i) : machine(m), cluster(c), rank(r), index(i) {
  const size_t bytes =
      std::max<size_t>(m.program.shared_bytes, m.program.dynamic_shared + m.config.dynamic_shared);
  shared_ = {c.memory.take(bytes), bytes};
  std::memset(shared_.data(), 0xcb, bytes);
  const uint64_t threads = m.config.block.count();
  for (uint64_t t = 0; t < threads; t += kLanes) {
    warps.push_back(std::make_unique<Warp>(*this, static_cast<uint32_t>(t / kLanes),
                                           static_cast<uint32_t>(std::min<uint64_t>(threads - t, kLanes))));
  }
}

uint8_t* Block::shared(const Warp& w, uint64_t address, uint32_t bytes) {
  const uint64_t rank_and_one = address >> kBlockShift, offset = address & ((1u << kBlockShift) - 1);
  if (rank_and_one > cluster.blocks.size()) w.fault("no such shared memory");
  const auto window = rank_and_one == 0 ? shared_ : cluster.blocks[rank_and_one - 1]->shared_;
  if (offset < kSharedBegin || offset + bytes > window.size()) {
    w.fault("address " + std::to_string(offset) + " beyond " + std::to_string(window.size()) +
            " bytes of shared memory");
  }
  return window.data() + offset;
}

void Block::arrive(Warp& warp, uint32_t id, uint32_t threads, bool waits) {
  NumberedBarrier& b = barriers.at(id);
  b.arrived += kLanes;
  ++machine.num_events;
  if (b.arrived > threads) warp.fault("more threads than the barrier expects");
  if (Races* races = warp.races()) races->arrive(warp, b);
  if (b.arrived == threads) {
    for (Warp* w : b.waiting) w->unpark();
    if (waits) b.waiting.push_back(&warp);
    if (Races* races = warp.races()) races->open(b, b.waiting);
    b.waiting.clear();
    b.arrived = 0;
  } else if (waits) {
    b.waiting.push_back(&warp);
    warp.park();
  }
}

// ---- Cluster ----

namespace {
std::multimap<size_t, uint8_t*> spare;  // one thread emulates at a time
constexpr size_t kMostSpare = 4096;
}  // namespace

uint8_t* Scratch::take(size_t bytes) {
  bytes = (bytes + 1023) / 1024 * 1024;
  if (const auto it = spare.find(bytes); it != spare.end()) {
    taken_.push_back(*it);
    spare.erase(it);
  } else {
    taken_.emplace_back(bytes,
                        static_cast<uint8_t*>(std::aligned_alloc(1024, std::max<size_t>(bytes, 1024))));
  }
  return taken_.back().second;
}

Scratch::~Scratch() {
  for (const auto& memory : taken_) spare.insert(memory);
  while (spare.size() > kMostSpare) {
    std::free(spare.begin()->second);
    spare.erase(spare.begin());
  }
}

void Cluster::open_if_all_arrived() {
  bool has_arrivals = false;
  for (const auto& block : blocks) {
    for (const auto& w : block->warps) {
      if (w->threads() & ~w->ended() & ~w->cluster_arrived) return;
      has_arrivals |= w->cluster_arrived != 0;
    }
  }
  if (!has_arrivals) return;
  ++phase;
  if (races) races->cluster_open();
  for (const auto& block : blocks)
    for (const auto& w : block->warps) w->cluster_arrived = 0;
}

// ---- Machine ----

Machine::Machine(const Program& p, const LaunchConfig& c, std::span<const uint8_t> arguments, uint64_t seed,
                 bool finds_races)
    : program(p),
      config(c),
      param_lines_(arguments.size() / 64 + 1),
      is_delayed_(seed != 0),
      finds_races_(finds_races),
      random_(seed) {
  params = {param_lines_.data()->bytes, arguments.size()};
  std::copy(arguments.begin(), arguments.end(), params.begin());
  if (c.grid.x % c.cluster) throw Fault("the grid is no multiple of its clusters");
  num_clusters_ = c.grid.count() / c.cluster;
}

void Machine::start_cluster() {
  const uint64_t first = next_cluster_++ * config.cluster;
  auto cluster = std::make_unique<Cluster>();
  for (uint32_t r = 0; r < config.cluster; ++r) {
    const uint64_t b = first + r;
    const Dim3 index{static_cast<uint32_t>(b % config.grid.x),
                     static_cast<uint32_t>(b / config.grid.x % config.grid.y),
                     static_cast<uint32_t>(b / config.grid.x / config.grid.y)};
    cluster->blocks.push_back(std::make_unique<Block>(*this, *cluster, r, index));
  }
  if (finds_races_) cluster->races = std::make_unique<Races>(*cluster);
  running_.push_back(std::move(cluster));
}

void Machine::finish_copies(const Warp* owner) {
  for (Copy& copy : copies_)
    if (!owner || copy.owner == owner) copy.run();
  std::erase_if(copies_, [&](const Copy& copy) { return !owner || copy.owner == owner; });
}

// Every warp once. Whether anything was done that others may wait for.
bool Machine::turn() {
  const uint64_t events = num_events;
  bool has_run_out = false;  // a warp that would have gone on
  std::vector<Warp*> warps;
  for (auto& cluster : running_)
    for (auto& block : cluster->blocks)
      for (auto& warp : block->warps)
        if (!warp->is_done()) warps.push_back(warp.get());
  if (is_delayed_) std::shuffle(warps.begin(), warps.end(), random_);
  for (Warp* warp : warps) {
    has_run_out |= warp->run(kSlice) == kSlice;
    // Copies come in any order, and none before its time.
    while (!copies_.empty() && random_() % 4 == 0) {
      std::swap(copies_[random_() % copies_.size()], copies_.back());
      const Copy copy = std::move(copies_.back());
      copies_.pop_back();
      copy.run();
      ++num_events;
    }
  }
  const auto is_done = [](const auto& cluster) {
    return std::all_of(cluster->blocks.begin(), cluster->blocks.end(),
                       [](const auto& b) { return b->is_done(); });
  };
  if (std::any_of(running_.begin(), running_.end(), is_done)) {
    finish_copies(nullptr);  // into memory that goes
    std::erase_if(running_, is_done);
  }
  return has_run_out || num_events != events || !copies_.empty();
}

void Machine::run_ahead() {
  is_previous_done = false;
  constexpr uint64_t kMostBlocks = 264;  // two for each SM
  const uint64_t most = std::min(num_clusters_, kMostBlocks / config.cluster);
  while (turn() || next_cluster_ < most)
    if (next_cluster_ < most) start_cluster();
}

void Machine::run() {
  is_previous_done = true;
  int idle = 0;
  while (!running_.empty() || next_cluster_ < num_clusters_) {
    const bool is_busy = turn();
    if (is_busy) {
      idle = 0;
    } else if (next_cluster_ < num_clusters_) {
      start_cluster();
    } else if (!running_.empty() && ++idle > kIdleTurns) {
      std::string text = "deadlock:";
      for (const auto& cluster : running_)
        for (const auto& block : cluster->blocks)
          for (const auto& warp : block->warps)
            if (!warp->is_done() && text.size() < 2000) text += " " + warp->where() + ";";
      throw Fault(text);
    }
  }
}

}  // namespace emulator
