// SPDX-License-Identifier: Apache-2.0
//
// The core by itself: argument checks, threads, selection.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "core/block.h"
#include "core/dot_products.h"
#include "core/expect.h"
#include "core/info.h"
#include "core/operation.h"
#include "cpu/threads.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace quantfuse {
// The generated table of the library; the tests of selection below bring their own kernels.
std::span<const OperationInfo> operations() { return {}; }

namespace {

struct TestTensor {
  explicit TestTensor(std::vector<int64_t> sizes, qf_dtype dtype = {2, 32, 1}) : shape(std::move(sizes)) {
    const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    memory.resize(static_cast<size_t>(count) + 1);
    view = {memory.data(), {QF_CPU, 0}, static_cast<int32_t>(shape.size()), dtype, shape.data(), nullptr, 0};
  }
  std::vector<int64_t> shape;
  std::vector<double> memory;  // enough for any element type
  qf_tensor view;
};

template <class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), QF_BAD_ARGUMENT);
    return e.what();
  }
  return "";
}

TEST(Expect, BindsSizesAndComparesLaterOnesWithThem) {
  TestTensor x({16, 4096}), y({8, 4096});
  Arguments arg("linear", true);
  Dim m{"m"}, n{"n"};
  const Matrix matrix = arg.expect("x", &x.view).shape(m, n).dtype(kFloats).matrix();
  EXPECT_EQ(m.value(), 16);
  EXPECT_EQ(matrix.cols, 4096);
  EXPECT_EQ(matrix.row_stride, 4096);
  EXPECT_EQ(message_of([&] { arg.expect("y", &y.view).shape(m, n); }),
            "linear: y has shape (8, 4096), expected (m=16, n=4096)");
}

TEST(Expect, NamesRankTypeDeviceAndStride) {
  TestTensor x({4, 6}), v({6}), other({4, 6});
  Arguments arg("op", true);
  Dim m{"m"}, n{"n"};
  EXPECT_EQ(message_of([&] { arg.expect("x", nullptr); }), "op: x is missing");
  EXPECT_EQ(message_of([&] { arg.expect("v", &v.view).shape(m, n); }),
            "op: v has shape (6,), expected (m, n)");
  EXPECT_EQ(message_of([&] {
              arg.expect("x", &x.view).shape(m, n).dtype({DType::i8, DType::u8});
            }),
            "op: x has type f32, expected i8 or u8");
  other.view.device = {QF_CUDA, 1};
  EXPECT_EQ(message_of([&] { arg.expect("y", &other.view); }), "op: y is on cuda:1, but v is on cpu");
  int64_t strides[] = {1, 4};
  x.view.strides = strides;
  EXPECT_EQ(message_of([&] { arg.expect("x", &x.view).shape(m, n).matrix(); }),
            "op: x has stride 4 along its last dimension, expected contiguous rows");
  strides[0] = 5, strides[1] = 1;
  EXPECT_EQ(message_of([&] { arg.expect("x", &x.view).shape(m, n).matrix(); }),
            "op: x has row stride 5, less than its 6 columns");
}

TEST(Expect, AcceptsMissingDimensionsOfOneWhereTold) {
  TestTensor column({5}), matrix({5, 1}), scalar(std::vector<int64_t>{});
  Arguments arg("op", true);
  Dim rows{"rows", 5}, one{"cols", 1}, also_one{"1", 1}, again_one{"1", 1};
  EXPECT_EQ(arg.expect("s", &column.view).shape_squeezed(rows, one).compact().rows, 5);
  EXPECT_EQ(arg.expect("s", &matrix.view).shape_squeezed(rows, one).compact().cols, 1);
  EXPECT_EQ(arg.expect("s", &scalar.view).shape_squeezed(also_one, again_one).compact().rows, 1);
  EXPECT_NE(message_of([&] { arg.expect("s", &scalar.view).shape_squeezed(rows, one); }), "");
}

TEST(Expect, RefusesSizesThatNoMemoryHolds) {
  TestTensor x({1, 1});
  int64_t shape[] = {int64_t{1} << 40, int64_t{1} << 40};
  x.view.shape = shape;
  Arguments arg("op", true);
  Dim m{"m"}, n{"n"};
  EXPECT_NE(message_of([&] {
              arg.expect("x", &x.view).shape(m, n).dtype(kFloats).matrix();
            }).find("more than memory can hold"),
            std::string::npos);
  shape[0] = -1;
  EXPECT_NE(message_of([&] { arg.expect("x", &x.view); }).find("negative"), std::string::npos);
}

TEST(Expect, FindsOverlap) {
  TestTensor x({8, 8});
  qf_tensor y = x.view;
  y.byte_offset = 16;
  Arguments arg("op", true);
  Dim m{"m"}, n{"n"};
  arg.expect("x", &x.view).shape(m, n).dtype(kFloats).matrix();
  arg.expect("y", &y).shape(m, n).dtype(kFloats).matrix();
  EXPECT_EQ(message_of([&] { arg.writes("y"); }), "op: y overlaps x, expected separate memory");
  EXPECT_EQ(message_of([&] { arg.writes("y", "x"); }),
            "op: y overlaps x, expected separate memory");  // another start
}

// The references stand on them: every sum in order of k, to the bit, and nothing beyond the last.
TEST(DotProducts, AreSumsInOrder) {
  constexpr int64_t kMost = 17, kLength = 29;
  std::vector<double> rows(kMost * kLength), vector(kLength);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = 1.0 / static_cast<double>(i + 3);
  for (size_t k = 0; k < vector.size(); ++k) vector[k] = k % 2 == 0 ? 1e9 / static_cast<double>(k + 1) : -0.1;
  for (const int64_t count : {0, 1, 7, 8, 9, 17}) {
    std::vector<double> sums(kMost + 1, -1.0);
    dot_products(rows.data(), count, kLength, vector.data(), sums.data());
    for (int64_t i = 0; i < kMost + 1; ++i) {
      double want = i < count ? 0 : -1;
      for (int64_t k = 0; i < count && k < kLength; ++k)
        want += rows[static_cast<size_t>(i * kLength + k)] * vector[static_cast<size_t>(k)];
      EXPECT_EQ(sums[static_cast<size_t>(i)], want) << i << " of " << count;
    }
  }
}

TEST(Block, ResolvesWholeDimensions) {
  const Arguments arg("op", true);
  const qf_block whole = resolve_block(arg, "block", {0, 0}, 3, 7),
                 group = resolve_block(arg, "block", {1, 128}, 3, 7);
  EXPECT_EQ(whole.rows, 3);
  EXPECT_EQ(whole.cols, 7);
  EXPECT_EQ(group.cols, 7);
  EXPECT_EQ(resolve_block(arg, "block", {0, 0}, 0, 0).rows, 1);
  EXPECT_NE(message_of([&] {
              resolve_block(arg, "block", {-1, 0}, 3, 7);
            }).find("block is {-1, 0}"),
            std::string::npos);
}

// ---- Threads ----

enum class Crew { own_pool, openmp_team };

class Threads : public testing::TestWithParam<Crew> {
 protected:
  // The caller's teams have as many threads as we may use, or one more, and then are none for us.
  void use_threads(int n) {
    set_num_threads(n);
#if defined(_OPENMP)
    omp_set_num_threads(GetParam() == Crew::openmp_team ? n : n + 1);
#endif
  }
  void SetUp() override {
#if !defined(_OPENMP)
    if (GetParam() == Crew::openmp_team) GTEST_SKIP() << "built without OpenMP";
#endif
  }
  void TearDown() override { set_num_threads(0); }
};

INSTANTIATE_TEST_SUITE_P(Crews, Threads, testing::Values(Crew::own_pool, Crew::openmp_team),
                         [](const auto& p) { return p.param == Crew::own_pool ? "OwnPool" : "OpenMpTeam"; });

// How often each index of [0, count) was visited, and how many ranges there were.
struct Visits {
  explicit Visits(int64_t count) : visits(static_cast<size_t>(count)) {}
  void run(int64_t grain) {
    parallel_ranges(static_cast<int64_t>(visits.size()), grain, [&](int64_t begin, int64_t end) {
      ++num_ranges;
      for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
    });
  }
  bool all_once() const {
    return std::all_of(visits.begin(), visits.end(), [](const auto& v) { return v == 1; });
  }
  std::vector<std::atomic<int>> visits;
  std::atomic<int> num_ranges{0};
};

TEST_P(Threads, CoverEverythingExactlyOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    use_threads(threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000}) {
      for (const int64_t grain : {1, 3, 100}) {
        Visits v(count);
        v.run(grain);
        EXPECT_TRUE(v.all_once()) << threads << " threads, " << count << " by " << grain;
        EXPECT_LE(v.num_ranges, std::min<int64_t>(threads, (count + grain - 1) / grain));
      }
    }
  }
}

TEST_P(Threads, FollowTheSetting) {
  use_threads(3);
  EXPECT_EQ(num_threads(), 3);
  Visits v(300);
  v.run(1);
  EXPECT_EQ(v.num_ranges, 3);
  set_num_threads(0);
  EXPECT_GE(num_threads(), 1);
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_THROW(set_num_threads(100000), Error);
}

TEST_P(Threads, NestedCallsStayOnTheirThread) {
  use_threads(4);
  std::atomic<int> inner_ranges{0}, inner_visits{0};
  parallel_ranges(4, 1, [&](int64_t, int64_t) {
    parallel_ranges(100, 1, [&](int64_t begin, int64_t end) {
      ++inner_ranges;
      inner_visits += static_cast<int>(end - begin);
    });
  });
  EXPECT_EQ(inner_ranges, 4);
  EXPECT_EQ(inner_visits, 400);
}

TEST_P(Threads, ConcurrentCallersAllFinish) {
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t) {
    callers.emplace_back([&] {
      use_threads(4);
      for (int i = 0; i < 200; ++i) {
        Visits v(97);
        v.run(1);
        if (v.all_once()) ++good;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 6 * 200);
}

TEST_P(Threads, ServeTheChildOfAFork) {
  use_threads(4);
  Visits(100).run(1);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a crew that waits for the parent's threads waits for ever
    Visits v(100);
    v.run(1);
    _exit(v.all_once() && v.num_ranges == 4 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

#if defined(_OPENMP)
TEST_P(Threads, JoinTheTeamsOfTheSameSizeAlone) {
  use_threads(3);
  std::atomic<int> size{0};
  parallel_ranges(3, 1, [&](int64_t, int64_t) { size = omp_get_num_threads(); });
  EXPECT_EQ(size, GetParam() == Crew::openmp_team ? 3 : 1);
}

TEST_P(Threads, TakeATeamThatIsSmallerThanAskedFor) {
  use_threads(3);
  omp_set_max_active_levels(0);
  Visits v(100);
  v.run(1);
  omp_set_max_active_levels(1);
  EXPECT_TRUE(v.all_once());
  EXPECT_EQ(v.num_ranges, 3);
}

TEST_P(Threads, StayAloneInsideAnOpenMpRegion) {
  use_threads(4);
  std::atomic<int> most_ranges{0};
#pragma omp parallel num_threads(2)
  {
    Visits v(100);
    v.run(1);
    if (v.num_ranges > most_ranges) most_ranges = v.num_ranges.load();
  }
  EXPECT_EQ(most_ranges, 1);
}
#endif

// ---- Selection, on an operation made up for it ----

struct EvenProblem {
  int64_t n;
};
Verdict accepts_even(const EvenProblem& p) { return Requirements().require(p.n % 2 == 0, "n is odd"); }
Verdict accepts_all(const EvenProblem&) { return kYes; }
void launch_nothing(const EvenProblem&, const Launch&) {}

constexpr Kernel<EvenProblem> kNotCompiled = {"toy_sm90", Target::sm90, nullptr, nullptr, nullptr};
constexpr Kernel<EvenProblem> kEven = {"toy_even", Target::reference, accepts_even, no_workspace<EvenProblem>,
                                       launch_nothing};
constexpr Kernel<EvenProblem> kAny = {"toy_ref", Target::reference, accepts_all, no_workspace<EvenProblem>,
                                      launch_nothing};

struct ToyOp {
  static constexpr const char* name = "toy";
  using Problem = EvenProblem;
  static std::span<const Kernel<Problem>* const> kernels() {
    static constexpr const Kernel<Problem>* kList[] = {&kNotCompiled, &kEven, &kAny};
    return kList;
  }
};

TEST(Select, TakesTheFirstThatAccepts) {
  EXPECT_EQ(select<ToyOp>({2}, {QF_CPU, 0}, {}).index, 1);
  EXPECT_EQ(select<ToyOp>({3}, {QF_CPU, 0}, {}).index, 2);
}

TEST(Select, GivesEveryReason) {
  Candidate candidates[3];
  const auto chosen = select<ToyOp>({3}, {QF_CPU, 0}, {}, candidates);
  EXPECT_EQ(explain_json(chosen.index, candidates),
            "{\"chosen\": \"toy_ref\", \"candidates\": ["
            "{\"kernel\": \"toy_sm90\", \"accepts\": false, \"reason\": \"not compiled into this build\"}, "
            "{\"kernel\": \"toy_even\", \"accepts\": false, \"reason\": \"n is odd\"}, "
            "{\"kernel\": \"toy_ref\", \"accepts\": true, \"reason\": \"chosen\"}]}");
}

TEST(Select, ForcedKernelRunsOrNoneDoes) {
  qf_call call = {};
  call.kernel = "toy_even";
  EXPECT_EQ(select<ToyOp>({2}, {QF_CPU, 0}, call).index, 1);
  EXPECT_EQ(select<ToyOp>({3}, {QF_CPU, 0}, call).index, -1);
  call.kernel = "toy_fast";
  EXPECT_EQ(message_of([&] {
              select<ToyOp>({2}, {QF_CPU, 0}, call);
            }),
            "toy: there is no kernel named 'toy_fast'");
}

TEST(Select, StrictRefusesTheReference) {
  qf_call call = {};
  call.strict = 1;
  EXPECT_EQ(select<ToyOp>({3}, {QF_CPU, 0}, call).index, -1);
}

TEST(Select, NoTakerIsAnErrorWithEveryReason) {
  qf_call call = {};
  call.kernel = "toy_even";
  try {
    select_or_fail<ToyOp>({3}, {QF_CPU, 0}, call);
    ADD_FAILURE() << "a kernel was found";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), QF_UNSUPPORTED);
    EXPECT_NE(std::string(e.what()).find("toy_even: n is odd"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("toy_ref: another kernel was asked for"), std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace quantfuse
