// SPDX-License-Identifier: Apache-2.0
//
// The emulated GPU itself, on PTX written for it: that it computes, and above all that it finds out what is
// wrong.
#include <gtest/gtest.h>

#include <cmath>

#include "machine.h"
#include "numbers.h"

namespace emulator {
namespace {

// A buffer of the emulated GPU.
struct Buffer {
  explicit Buffer(size_t words) : data(static_cast<uint32_t*>(allocate(words * 4))), count(words) {
    for (size_t i = 0; i < words; ++i) data[i] = static_cast<uint32_t>(i);
  }
  ~Buffer() { release(data); }
  Buffer(const Buffer&) = delete;
  uint32_t* data;
  size_t count;
};

struct Grid {
  Dim3 blocks{1, 1, 1}, threads{32, 1, 1};
  uint32_t cluster = 1;
  uint64_t seed = 0;
  bool finds_races = false;
};

// `body` with %in and %out in registers, %tid.x in %t, on `in` and `out`.
void run(const std::string& body, Buffer& in, Buffer& out, const Grid& grid = {}) {
  const std::string ptx =
      ".version 9.0\n.target sm_90a\n.address_size 64\n"
      ".visible .entry test(.param .u64 a, .param .u64 b)\n{\n"
      ".reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b32 %t; .reg .f32 %f<16>;\n"
      ".reg .b64 %rd<16>; .reg .b64 %in, %out, %mine;\n"
      ".shared .align 1024 .b8 room[4096]; .shared .align 8 .b64 barrier;\n"
      "ld.param.u64 %in, [a]; ld.param.u64 %out, [b]; mov.u32 %t, %tid.x;\n"
      "mul.wide.u32 %rd0, %t, 4; add.s64 %mine, %out, %rd0;\n" +
      body + "\nret;\n}\n";
  Module module(ptx);
  const Program& program = module.program("test");
  const uint64_t pointers[2] = {reinterpret_cast<uint64_t>(in.data), reinterpret_cast<uint64_t>(out.data)};
  std::vector<uint8_t> params(sizeof pointers);
  std::memcpy(params.data(), pointers, sizeof pointers);
  const LaunchConfig config{grid.blocks, grid.threads, grid.cluster, 0};
  Machine(program, config, params, grid.seed, grid.finds_races).run();
}

std::string fault_of(const std::string& body, const Grid& grid = {}) {
  Buffer in(64), out(64);
  try {
    run(body, in, out, grid);
  } catch (const Fault& fault) {
    return fault.what();
  }
  return "";
}

TEST(Emulator, LanesThatPartMeetAgain) {
  Buffer in(64), out(64);
  // Each lane loops as often as its number says; then all take part in a sum.
  run("mov.u32 %r1, 0; mov.u32 %r2, 0;\n"
      "again: setp.ge.u32 %p1, %r1, %t; @%p1 bra done; add.s32 %r2, %r2, 3; add.s32 %r1, %r1, 1; bra again;\n"
      "done: redux.sync.add.s32 %r3, %r2, -1; add.s32 %r4, %r3, %r2; st.global.u32 [%mine], %r4;",
      in, out);
  for (uint32_t l = 0; l < 32; ++l) EXPECT_EQ(out.data[l], 3 * 496 + 3 * l);
}

TEST(Emulator, CallsReturnToWhereTheyCameFrom) {
  const std::string ptx =
      ".func (.param .b32 result) twice(.param .b32 x)\n{\n.reg .b32 %r<4>;\n"
      "ld.param.u32 %r1, [x]; add.s32 %r2, %r1, %r1; st.param.b32 [result+0], %r2; ret;\n}\n"
      ".entry test(.param .u64 b)\n{\n.reg .b32 %r<4>; .reg .b64 %rd<4>;\n"
      "ld.param.u64 %rd1, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;\n"
      "{ .param .b32 x0; st.param.b32 [x0+0], %r1; .param .b32 y0; call.uni (y0), twice, (x0); "
      "ld.param.b32 %r2, [y0+0]; }\n"
      "{ .param .b32 x0; st.param.b32 [x0+0], %r2; .param .b32 y0; call.uni (y0), twice, (x0); "
      "ld.param.b32 %r3, [y0+0]; }\n"
      "st.global.u32 [%rd3], %r3; ret;\n}\n";
  Buffer out(32);
  Module module(ptx);
  const uint64_t pointer = reinterpret_cast<uint64_t>(out.data);
  std::vector<uint8_t> params(8);
  std::memcpy(params.data(), &pointer, 8);
  const LaunchConfig config{{1, 1, 1}, {32, 1, 1}, 1, 0};
  Machine(module.program("test"), config, params, 0, false).run();
  for (uint32_t l = 0; l < 32; ++l) EXPECT_EQ(out.data[l], 4 * l);
}

// A copy beside the program, waited for at its barrier: "%t" is the only lane that begins it.
const std::string kCopy =
    "setp.eq.s32 %p1, %t, 0;\n"
    "@%p1 mbarrier.init.shared.b64 [barrier], 1;\n bar.sync 0;\n"
    "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [barrier], 128;\n"
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [room], [%in], 128, [barrier];\n";
const std::string kWait = "again: mbarrier.try_wait.parity.shared.b64 %p2, [barrier], 0;\n@!%p2 bra again;\n";
const std::string kUse =
    "mov.u32 %r5, room; mul.lo.s32 %r6, %t, 4; add.s32 %r5, %r5, %r6;\n"
    "ld.shared.u32 %r7, [%r5]; st.global.u32 [%mine], %r7;\n";

TEST(Emulator, CopiesAreThereForThoseThatWait) {
  for (const uint64_t seed : {0, 1, 2, 3}) {
    Buffer in(64), out(64);
    run(kCopy + kWait + kUse, in, out, {.seed = seed});
    for (uint32_t l = 0; l < 32; ++l) EXPECT_EQ(out.data[l], l) << "seed " << seed;
  }
}

TEST(Emulator, WhoDoesNotWaitForACopyIsFoundOut) {
  Buffer in(64), out(64);
  run(kCopy + kUse, in, out, {.seed = 1});
  EXPECT_NE(out.data[5], 5u);
}

TEST(Emulator, StoresIntoAnotherBlockOfTheCluster) {
  Buffer in(64), out(64);
  run("setp.eq.s32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [barrier], 1;\n"
      "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [barrier], 128;\n"
      "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
      "mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, room; mul.lo.s32 %r4, %t, 4;\n"
      "add.s32 %r3, %r3, %r4; mapa.shared::cluster.u32 %r5, %r3, %r2;\n"
      "mov.u32 %r6, barrier; mapa.shared::cluster.u32 %r7, %r6, %r2; mad.lo.s32 %r8, %r1, 100, %t;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r8, [%r7];\n" +
          kWait +
          "ld.shared.u32 %r9, [%r3]; mul.wide.u32 %rd1, %r1, 128; add.s64 %rd2, %mine, %rd1;\n"
          "st.global.u32 [%rd2], %r9;\n"
          "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;",
      in, out, {.blocks = {2, 1, 1}, .cluster = 2, .seed = 5});
  for (uint32_t l = 0; l < 32; ++l) {
    EXPECT_EQ(out.data[l], 100 + l);
    EXPECT_EQ(out.data[32 + l], l);
  }
}

TEST(Emulator, KernelsBeginBeforeTheOneAheadHasEnded) {
  const std::string head =
      ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry test(.param .u64 a)\n{\n"
      ".reg .b32 %r<8>; .reg .b64 %a;\nld.param.u64 %a, [a];\n";
  Module first(head + "mov.u32 %r1, 7; st.global.u32 [%a], %r1;\nret;\n}\n");
  Module second(head +
                "ld.global.u32 %r1, [%a]; griddepcontrol.wait; ld.global.u32 %r2, [%a];\n"
                "st.global.u32 [%a+4], %r1; st.global.u32 [%a+8], %r2;\nret;\n}\n");
  Buffer memory(4);
  const uint64_t pointer = reinterpret_cast<uint64_t>(memory.data);
  std::vector<uint8_t> params(8);
  std::memcpy(params.data(), &pointer, 8);
  const LaunchConfig config{{1, 1, 1}, {1, 1, 1}, 1, 0};
  Machine ahead(first.program("test"), config, params, 0, false);
  Machine early(second.program("test"), config, params, 0, false);
  early.run_ahead();
  ahead.run();
  early.run();
  EXPECT_EQ(memory.data[1], 0u);  // read too early
  EXPECT_EQ(memory.data[2], 7u);
}

TEST(Emulator, ProductsOfMatrices) {
  // Row g of a is all g + 1, every column of b all 1: 16 products, and the 0.5 that was there.
  Buffer in(64), out(128);
  run("shr.u32 %r1, %t, 2; add.s32 %r1, %r1, 1; cvt.rn.f32.u32 %f1, %r1; add.rn.f32 %f2, %f1, 0f41000000;\n"
      "cvt.rn.bf16x2.f32 %r2, %f1, %f1; cvt.rn.bf16x2.f32 %r3, %f2, %f2; mov.u32 %r4, 0x3f803f80;\n"
      "mov.f32 %f3, 0f3f000000;\n"
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f4,%f5,%f6,%f7}, {%r2,%r3,%r2,%r3}, {%r4,%r4}, "
      "{%f3,%f3,%f3,%f3};\n"
      "st.global.f32 [%mine], %f4; st.global.f32 [%mine+128], %f7;",
      in, out);
  for (uint32_t l = 0; l < 32; ++l) {
    EXPECT_EQ(bits_to_float(out.data[l]), 16.f * static_cast<float>(l / 4 + 1) + 0.5f);
    EXPECT_EQ(bits_to_float(out.data[32 + l]), 16.f * static_cast<float>(l / 4 + 9) + 0.5f);
  }
}

TEST(Emulator, FindsWhatIsWrong) {
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), text.npos) << "'" << text << "' has no '" << part << "'";
  };
  has(fault_of("ld.global.u32 %r1, [%in+1024];"), "reads 4 bytes that are not allocated");
  has(fault_of("st.global.u32 [%mine+256], %t;"), "writes 4 bytes that are not allocated");
  has(fault_of("ld.global.u32 %r1, [%in+2];"), "not aligned");
  has(fault_of("mov.u32 %r1, 100000; ld.shared.u32 %r2, [%r1];"), "shared memory");
  has(fault_of("mbarrier.arrive.shared.b64 _, [barrier];"), "not initialised");
  has(fault_of("setp.eq.s32 %p1, %t, 0; @%p1 mbarrier.init.shared.b64 [barrier], 2; bar.sync 0;\n" + kWait),
      "deadlock");
  has(fault_of("setp.lt.s32 %p1, %t, 32; @%p1 bar.sync 1, 96;", {.threads = {64, 1, 1}}), "deadlock");
  has(fault_of("setp.lt.s32 %p1, %t, 16; @%p1 bra done; shfl.sync.idx.b32 %r1, %t, 0, 31, 0xffff0000; done:"),
      "does not take part");
  has(fault_of("frobnicate.b32 %r1, %r2;"), "not understood");
}

// The access that nothing orders with another, of two warps or the blocks of a cluster; "" where all is well.
std::string race_in(const std::string& body, uint32_t blocks = 1) {
  // %r1: this thread's word, %r2: that of the other warp's same lane; %p1: lane 0 of warp 0, %p2: warp 0
  const std::string begin =
      "mov.u32 %r1, room; mul.lo.s32 %r3, %t, 4; add.s32 %r1, %r1, %r3; xor.b32 %r2, %r1, 128;\n"
      "setp.eq.s32 %p1, %t, 0; setp.lt.s32 %p2, %t, 32;\n";
  return fault_of(begin + body,
                  {.blocks = {blocks, 1, 1}, .threads = {64, 1, 1}, .cluster = blocks, .finds_races = true});
}

TEST(Emulator, FindsRaces) {
  const auto is_race = [](const std::string& body, uint32_t blocks = 1) {
    const std::string fault = race_in(body, blocks);
    EXPECT_NE(fault.find("a race: "), fault.npos) << body << "\n" << fault;
  };
  const auto is_fine = [](const std::string& body, uint32_t blocks = 1) {
    EXPECT_EQ(race_in(body, blocks), "") << body;
  };
  const std::string write = "st.shared.u32 [%r1], %t;\n", read_other = "ld.shared.u32 %r4, [%r2];\n";
  is_fine(write + "ld.shared.u32 %r4, [%r1];");  // each its own
  is_race(write + read_other);
  is_race(read_other + write);
  is_fine(write + "bar.sync 0;\n" + read_other);
  is_fine(read_other + "bar.sync 1, 64;\n" + write);
  is_fine(write + "@%p2 bra wait; bar.arrive 1, 64; bra done;\nwait: bar.sync 1, 64;\n" + read_other +
          "done:");
  is_race(write + "@%p2 bra wait; bar.arrive 1, 64;\n" + read_other +
          "bra done;\nwait: bar.sync 1, 64; done:");

  // A lane arrives for its warp, and the other warp waits.
  const std::string init = "@%p1 mbarrier.init.shared.b64 [barrier], 1; bar.sync 0;\n", wait = kWait;
  const std::string one_arrives = init + "@!%p2 bra other;\n" + write;
  const std::string arrive = "@%p1 mbarrier.arrive.shared.b64 _, [barrier];\nbra done;\nother:\n";
  is_fine(one_arrives + "bar.warp.sync -1;\n" + arrive + wait + read_other + "done:");
  is_race(one_arrives + "bar.warp.sync -1;\n" + arrive + read_other + "done:");
  is_race(one_arrives + arrive + wait + read_other + "done:");  // the other lanes may not have written

  // A copy writes what is read: before, after, and while it is on its way.
  const std::string copy =
      "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [barrier], 128;\n"
      "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [room], [%in], 128, "
      "[barrier];\n";
  is_fine(init + copy + wait + "ld.shared.u32 %r4, [%r1];");
  is_race(init + copy + "ld.shared.u32 %r4, [%r2];");
  is_race(init + "ld.shared.u32 %r4, [%r2];\n" + copy);
  is_fine(init + "ld.shared.u32 %r4, [%r2]; bar.sync 0;\n" + copy);
  is_race(init + copy + copy);  // both at once

  // cp.async: there for the others once its warp has waited, and they for its warp.
  const std::string copy_few = "@%p2 cp.async.ca.shared.global [%r1], [%in], 4;\ncp.async.commit_group;\n";
  is_fine(copy_few + "cp.async.wait_group 0; bar.sync 0;\n" + read_other);
  is_race(copy_few + "bar.sync 0;\n" + read_other);
  is_race(copy_few + "cp.async.wait_group 1; bar.sync 0;\n" + read_other);
  is_fine(copy_few + "cp.async.commit_group; cp.async.wait_group 1; bar.sync 0;\n" + read_other);

  // Blocks of a cluster: an arrival that is relaxed tells nothing.
  const std::string store_far =
      "mov.u32 %r5, %cluster_ctarank; xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6;\n"
      "st.shared::cluster.u32 [%r7], %t;\n";
  const std::string meet = "barrier.cluster.wait.acquire.aligned;\n", read = "ld.shared.u32 %r4, [%r1];\n";
  const std::string stay = "barrier.cluster.arrive.relaxed.aligned;\n" + meet;
  is_fine(store_far + "barrier.cluster.arrive.release.aligned;\n" + meet + read + stay, 2);
  is_race(store_far + "barrier.cluster.arrive.relaxed.aligned;\n" + meet + read + stay, 2);
}

TEST(Emulator, RoundsAsTheFormatsDo) {
  // Every code of 8 bits comes back from the number that it stands for, and numbers between two go to the
  // even.
  for (int c = 0; c < 256; ++c) {
    const auto code = static_cast<uint8_t>(c);
    const float e4m3 = e4m3_to_float(code), e5m2 = e5m2_to_float(code);
    if (!std::isnan(e4m3)) {
      EXPECT_EQ(float_to_e4m3(e4m3), code);
    }
    if (std::isfinite(e5m2)) {
      EXPECT_EQ(float_to_e5m2(e5m2), code);
    }
    if (c % 128 >= 0x7e || c % 2) continue;
    const float between = (e4m3_to_float(code) + e4m3_to_float(static_cast<uint8_t>(c + 1))) / 2;
    EXPECT_EQ(float_to_e4m3(between), code);
  }
  EXPECT_EQ(float_to_e4m3(1e9f), 0x7e);
  EXPECT_EQ(float_to_e5m2(-1e9f), 0xfb);
  EXPECT_EQ(float_to_bf16(bits_to_float(0x3f808000)), 0x3f80);
  EXPECT_EQ(float_to_bf16(bits_to_float(0x3f818000)), 0x3f82);
}

}  // namespace
}  // namespace emulator
