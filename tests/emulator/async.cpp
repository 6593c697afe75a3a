// SPDX-License-Identifier: Apache-2.0
//
// Copies beside the program (cp.async, bulk, of boxes of tensors), and the barriers that count their bytes.
#include <algorithm>
#include <bit>

#include "machine.h"
#include "tensor_map.h"

namespace emulator {
namespace {

// ---- mbarrier: 64 bits of shared memory ----

struct Mbarrier {
  uint64_t phase : 1, expected : 20, pending : 20;
  int64_t bytes : 23;  // to come; below 0 where they came before they were announced
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier read(const Warp& w, const uint8_t* at) {
  uint64_t bits;
  std::memcpy(&bits, at, sizeof bits);
  if (bits == 0xcbcbcbcbcbcbcbcb) w.fault("a barrier that was not initialised");  // memory as it was
  return std::bit_cast<Mbarrier>(bits);
}
void write(const Warp& w, uint8_t* at, Mbarrier b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1, b.pending = b.expected;
    if (Races* races = w.races()) races->end_phase(at);
  }
  std::memcpy(at, &b, sizeof b);
}
void arrive_at(const Warp& w, uint8_t* at, int64_t more_bytes) {
  Mbarrier b = read(w, at);
  if (b.pending == 0) w.fault("more arrivals at a barrier than it expects");
  b.bytes += more_bytes;
  b.pending -= 1;
  write(w, at, b);
}
void complete(const Warp& w, uint8_t* at, int64_t bytes) {
  Mbarrier b = read(w, at);
  b.bytes -= bytes;
  write(w, at, b);
}

void mbarrier_init(Warp& w, const Instruction& i) {
  w.for_lanes([&](int l) {
    const uint32_t count = w.value<uint32_t>(i.operands[1], l);
    Mbarrier b = {};
    b.expected = b.pending = count;
    std::memcpy(w.memory(Space::shared, w.address(i.operands[0], l), 8, l, true), &b, sizeof b);
  });
  ++w.block.machine.num_events;
}
// "_, [barrier]" and, where bytes are announced, their number.
void mbarrier_arrive(Warp& w, const Instruction& i) {
  if (i.operands[0].kind != Operand::Kind::none) w.fault("the state of a barrier is not kept");
  w.for_lanes([&](int l) {
    const int64_t bytes = i.with[0] ? w.value<uint32_t>(i.operands[2], l) : 0;
    uint8_t* barrier = w.memory(Space::shared, w.address(i.operands[1], l), 8, l, true);
    if (Races* races = w.races()) races->arrive(w, barrier);
    arrive_at(w, barrier, bytes);
  });
  ++w.block.machine.num_events;
}
void mbarrier_test(Warp& w, const Instruction& i) {
  uint32_t done = 0;
  w.for_lanes([&](int l) {
    const uint8_t* barrier = w.memory(Space::shared, w.address(i.operands[1], l), 8, l, false);
    const uint32_t parity = w.value<uint32_t>(i.operands[2], l) & 1;
    if (read(w, barrier).phase == parity) return;
    done |= 1u << l;
    if (Races* races = w.races()) races->learn(w, barrier);
  });
  w.set_predicate(i.operands[0], done);
  if (done != w.active) w.rest();
}

// ---- cp.async: 4 to 16 bytes a lane ----

void copy_few(Warp& w, const Instruction& i) {
  const auto bytes = static_cast<uint32_t>(i.operands[2].value);
  w.for_lanes([&](int l) {
    const uint32_t used =
        i.operands.size() > 3 ? std::min(w.value<uint32_t>(i.operands[3], l), bytes) : bytes;
    uint8_t* to = w.memory(Space::shared, w.address(i.operands[0], l), bytes, l, true);
    const uint64_t at = w.address(i.operands[1], l);
    if (at % bytes) w.fault("an address that is not aligned");
    if (used && !is_allocated(at, used)) w.fault("copies bytes that are not allocated");
    if (Races* races = w.races()) races->begin(w, Races::Work::copies_in, to, bytes, true);
    w.block.machine.later(&w, [=] {
      if (used) std::memcpy(to, reinterpret_cast<const void*>(at), used);
      std::memset(to + used, 0, bytes - used);
    });
  });
}
// with: which copies. What waits for all, and so has no number of groups, waits for what is in none yet too.
void commit_group(Warp& w, const Instruction& i) {
  if (Races* races = w.races()) races->commit(w, static_cast<Races::Work>(i.with[0]));
}
void wait_for_own(Warp& w, const Instruction& i) {
  w.block.machine.finish_copies(&w);
  Races* races = w.races();
  if (!races) return;
  const auto work = static_cast<Races::Work>(i.with[0]);
  if (i.operands.empty()) races->commit(w, work);
  races->wait(w, work, i.operands.empty() ? 0 : static_cast<size_t>(i.operands[0].value));
}
void arrive_after_copies(Warp& w, const Instruction& i) {
  w.block.machine.finish_copies(&w);
  w.for_lanes([&](int l) {
    uint8_t* barrier = w.memory(Space::shared, w.address(i.operands[0], l), 8, l, true);
    if (Races* races = w.races()) races->arrive(w, barrier, /*with_copies=*/true);
    arrive_at(w, barrier, 0);
  });
  ++w.block.machine.num_events;
}

// ---- Bulk copies ----

uint32_t aligned16(const Warp& w, uint64_t v) {
  if (v % 16) w.fault("a bulk copy that is not of multiples of 16 bytes");
  return static_cast<uint32_t>(v);
}

// [to], [from], bytes, [barrier]
template <bool kFromShared>
void bulk_copy(Warp& w, const Instruction& i) {
  w.for_lanes([&](int l) {
    const uint32_t bytes = aligned16(w, w.value<uint32_t>(i.operands[2], l));
    if (bytes == 0) return;
    const uint64_t to_at = w.address(i.operands[0], l), from_at = w.address(i.operands[1], l);
    aligned16(w, to_at), aligned16(w, from_at);
    uint8_t* to = w.block.shared(w, to_at, bytes);
    const uint8_t* from = reinterpret_cast<const uint8_t*>(from_at);
    if constexpr (kFromShared) from = w.block.shared(w, from_at, bytes);
    else if (!is_allocated(from_at, bytes)) w.fault("copies bytes that are not allocated");
    uint8_t* barrier = w.block.shared(w, w.address(i.operands[3], l), 8);
    const Warp* warp = &w;
    if (Races* races = w.races()) {
      races->begin_for(w, barrier, from, bytes, false);
      races->begin_for(w, barrier, to, bytes, true);
    }
    w.block.machine.later(&w, [=] {
      std::memcpy(to, from, bytes);
      complete(*warp, barrier, bytes);
    });
  });
}

TensorMap map_at(const Warp& w, uint64_t address) {
  TensorMap m;
  std::memcpy(&m, reinterpret_cast<const void*>(address), sizeof m);
  if (m.magic != kTensorMapMagic || address % 64) w.fault("an address that has no tensor map");
  return m;
}

struct Box {
  TensorMap map;
  int64_t first[5] = {};  // where it begins in the tensor
  uint32_t bytes() const {
    uint32_t all = map.element_bytes;
    for (int d = 0; d < map.rank; ++d) all *= map.box[d] + 1u;
    return all;
  }
  // For each row of the box: its place in it, where it is in memory, and which of its bytes are in the
  // tensor.
  template <class F>
  void for_rows(const Warp& w, F f) const {
    const int64_t row_bytes = (map.box[0] + 1) * map.element_bytes;
    const int64_t begin = std::clamp<int64_t>(-first[0], 0, map.box[0] + 1);
    const int64_t end =
        std::clamp<int64_t>(static_cast<int64_t>(map.sizes[0]) - first[0], begin, map.box[0] + 1);
    int64_t at[5] = {};
    for (int64_t row = 0;; ++row) {
      bool is_inside = true;
      int64_t offset = first[0] * map.element_bytes;
      for (int d = 1; d < map.rank; ++d) {
        const int64_t p = first[d] + at[d];
        is_inside &= p >= 0 && p < static_cast<int64_t>(map.sizes[d]);
        offset += p * static_cast<int64_t>(map.strides[d - 1]);
      }
      const int64_t b = is_inside ? begin * map.element_bytes : 0,
                    e = is_inside ? end * map.element_bytes : 0;
      uint8_t* memory = map.data + offset;
      if (e > b && !is_allocated(reinterpret_cast<uint64_t>(memory + b), static_cast<size_t>(e - b)))
        w.fault("a box of bytes that are not allocated");
      f(row * row_bytes, row_bytes, memory, b, e);
      int d = 1;
      while (d < map.rank && ++at[d] > map.box[d]) at[d++] = 0;
      if (d >= map.rank) return;
    }
  }
};

Box box_at(const Warp& w, const Instruction& i, int map_operand, int lane) {
  Box box;
  box.map = map_at(w, w.address(i.operands[map_operand], lane));
  if (box.map.rank != i.with[0]) w.fault("a tensor map of another rank");
  for (int d = 0; d < box.map.rank; ++d)
    box.first[d] = w.value<int32_t>(i.operands[map_operand + 1 + d], lane);
  return box;
}

// [to], [map, {coordinates}], [barrier], and the blocks that get it
void box_copy(Warp& w, const Instruction& i) {
  const int rank = static_cast<int>(i.with[0]);
  w.for_lanes([&](int l) {
    const Box box = box_at(w, i, 1, l);
    const uint64_t to_at = w.address(i.operands[0], l), barrier_at = w.address(i.operands[2 + rank], l);
    if (to_at % 128) w.fault("a box at no multiple of 128 bytes");
    uint32_t blocks = i.with[1] ? w.value<uint16_t>(i.operands[3 + rank], l) : 0;
    const uint32_t bytes = box.bytes();
    auto fill = [&w, box, bytes](uint64_t at, Block& block, uint8_t* barrier) {
      uint8_t* base = block.shared(w, at, bytes) - at;  // so that base + an address is the place of it
      box.for_rows(
          w, [&](int64_t place, int64_t row_bytes, const uint8_t* memory, int64_t begin, int64_t end) {
            for (int64_t b = 0; b < row_bytes; b += 16) {  // pieces that stay together
              uint8_t* piece = base + swizzled(at + static_cast<uint64_t>(place + b), box.map.swizzle);
              std::memset(piece, 0, 16);
              const int64_t from = std::max(b, begin), to = std::min(b + 16, end);
              if (from < to) std::memcpy(piece + (from - b), memory + from, static_cast<size_t>(to - from));
            }
          });
      complete(w, barrier, bytes);
    };
    constexpr uint64_t kOffset = (1u << kBlockShift) - 1;
    if (!i.with[1]) {
      if (to_at > kOffset) w.fault("a box for another block without multicast");
      uint8_t* barrier = w.block.shared(w, barrier_at, 8);
      Block* block = &w.block;
      if (Races* races = w.races()) races->begin_for(w, barrier, block->shared(w, to_at, bytes), bytes, true);
      w.block.machine.later(&w, [=] { fill(to_at, *block, barrier); });
      return;
    }
    for (uint32_t r = 0; r < w.block.cluster.blocks.size(); ++r) {
      if (!(blocks >> r & 1)) continue;
      blocks &= ~(1u << r);
      Block* block = w.block.cluster.blocks[r].get();
      uint8_t* barrier = block->shared(w, barrier_at & kOffset, 8);
      if (Races* races = w.races())
        races->begin_for(w, barrier, block->shared(w, to_at & kOffset, bytes), bytes, true);
      w.block.machine.later(&w, [=] { fill(to_at & kOffset, *block, barrier); });
    }
    if (blocks) w.fault("a box for blocks that are not in the cluster");
  });
}

// [map, {coordinates}], [from]
void box_store(Warp& w, const Instruction& i) {
  const int rank = static_cast<int>(i.with[0]);
  w.for_lanes([&](int l) {
    const Box box = box_at(w, i, 0, l);
    const uint64_t from_at = w.address(i.operands[1 + rank], l);
    if (from_at % 128) w.fault("a box at no multiple of 128 bytes");
    uint8_t* base = w.block.shared(w, from_at, box.bytes()) - from_at;
    const Warp* warp = &w;
    if (Races* races = w.races())
      races->begin(w, Races::Work::copies_out, base + from_at, box.bytes(), false);
    w.block.machine.later(&w, [=] {
      box.for_rows(*warp, [&](int64_t place, int64_t, uint8_t* memory, int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b)
          memory[b] = base[swizzled(from_at + static_cast<uint64_t>(place + b), box.map.swizzle)];
      });
    });
  });
}

// [to], value, [barrier], both in another block
void store_async(Warp& w, const Instruction& i) {
  w.for_lanes([&](int l) {
    uint8_t* to = w.block.shared(w, w.address(i.operands[0], l), 4);
    uint8_t* barrier = w.block.shared(w, w.address(i.operands[2], l), 8);
    const auto v = w.value<uint32_t>(i.operands[1], l);
    const Warp* warp = &w;
    if (Races* races = w.races()) races->begin_for(w, barrier, to, sizeof v, true);
    w.block.machine.later(&w, [=] {
      std::memcpy(to, &v, sizeof v);
      complete(*warp, barrier, sizeof v);
    });
  });
}

}  // namespace

void bind_async(const Mnemonic& name, Instruction& i) {
  const auto& p = name.parts;
  if (p[0] == "mbarrier") {
    if (p[1] == "init") i.run = mbarrier_init;
    else if (p[1] == "arrive") i.run = mbarrier_arrive, i.with[0] = name.has("expect_tx");
    else if ((p[1] == "try_wait" || p[1] == "test_wait") && name.has("parity")) i.run = mbarrier_test;
  } else if (p[0] == "st" && name.has("async") && name.last() == "b32") {
    i.run = store_async;
  } else if (p[0] == "cp" && p[1] == "async") {
    i.with[0] = static_cast<int64_t>(p[2] == "bulk" ? Races::Work::copies_out : Races::Work::copies_in);
    if (p[2] == "ca" || p[2] == "cg") i.run = copy_few;
    else if (p[2] == "commit_group") i.run = commit_group;
    else if (p[2] == "wait_all" || p[2] == "wait_group") i.run = wait_for_own;
    else if (p[2] == "mbarrier" && name.has("noinc")) i.run = arrive_after_copies;
    else if (p[2] == "bulk") {
      if (p[3] == "commit_group") i.run = commit_group;
      else if (p[3] == "wait_group") i.run = wait_for_own;
      else if (p[3] == "tensor") {
        i.with[0] = p[4][0] - '0';
        i.with[1] = name.has("multicast::cluster");
        i.run = p[5] == "global" ? box_store : box_copy;
      } else if (p[3] == "shared::cluster") {
        i.run = p[4] == "global" ? bulk_copy<false> : bulk_copy<true>;
      }
    }
  }
}

}  // namespace emulator
