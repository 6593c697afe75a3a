// SPDX-License-Identifier: Apache-2.0
#include "baselines.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <functional>

#if defined(QF_HAS_OPENBLAS)
#include <cblas.h>
#endif
#if defined(QF_HAS_ONEDNN)
#include <dnnl.hpp>
#endif

namespace quantfuse::cli {
namespace {

// Numbers in [-0.5, 0.5) that are neither equal nor denormal: what they are does not change the speed.
template <class T>
std::vector<T> sample(size_t count, float amplitude) {
  std::vector<T> values(count);
  uint32_t state = 1;
  for (T& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<T>((static_cast<float>(state >> 8) * 0x1p-24f - 0.5f) * amplitude);
  }
  return values;
}

double bytes_of(Arithmetic arithmetic, const Shape& s) {
  const double inputs = static_cast<double>(s.m) * s.k + static_cast<double>(s.n) * s.k;
  return inputs * (arithmetic == Arithmetic::f32 ? 4 : 1) + 4.0 * s.m * s.n;
}

#if defined(QF_HAS_OPENBLAS)

class OpenBlas : public Baseline {
 public:
  OpenBlas(const Shape& s, int copies) : s_(s) {
    w_.assign(copies, sample<float>(s.n * s.k, 1.0f));
    x_.assign(copies, sample<float>(s.m * s.k, 1.0f));
    y_.assign(copies, std::vector<float>(s.m * s.n));
  }

  void run(int copy) override {
    const auto m = static_cast<blasint>(s_.m), n = static_cast<blasint>(s_.n), k = static_cast<blasint>(s_.k);
    const float *x = x_[copy].data(), *w = w_[copy].data();
    if (m == 1) {
      cblas_sgemv(CblasRowMajor, CblasNoTrans, n, k, 1.0f, w, k, x, 1, 0.0f, y_[copy].data(), 1);
    } else {
      cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, k, 1.0f, x, k, w, k, 0.0f, y_[copy].data(),
                  n);
    }
  }

 private:
  Shape s_;
  std::vector<std::vector<float>> w_, x_, y_;
};

#endif

#if defined(QF_HAS_ONEDNN)

using dnnl::memory;

// A matmul whose weight lies as oneDNN likes it best, reordered once, as a model that is loaded once would
// have it.
class OneDnn : public Baseline {
 public:
  OneDnn(const Shape& s, memory::data_type x_type, memory::data_type w_type, memory::data_type y_type,
         int copies)
      : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {
    const memory::desc x({s.m, s.k}, x_type, memory::format_tag::ab),
        y({s.m, s.n}, y_type, memory::format_tag::ab);
    const auto order = s.order == WeightOrder::packed ? memory::format_tag::any
                       : s.order == WeightOrder::nk   ? memory::format_tag::ba
                                                      : memory::format_tag::ab;
    const memory::desc w_layout({s.k, s.n}, w_type, order);
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc description(engine_, x, w_layout, y);
#else
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(x, w_layout, y), engine_);
#endif
    matmul_ = dnnl::matmul(description);

    const memory::desc plain({s.k, s.n}, w_type, memory::format_tag::ba);
    memory plain_w(plain, engine_), first_x(x, engine_);
    fill(plain_w, w_type);
    fill(first_x, x_type);
    for (int i = 0; i < copies; ++i) {
      memory w(description.weights_desc(), engine_), x_copy(x, engine_);
      dnnl::reorder(plain_w, w).execute(stream_, plain_w, w);
      dnnl::reorder(first_x, x_copy).execute(stream_, first_x, x_copy);
      sets_.push_back({{DNNL_ARG_SRC, x_copy}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, memory(y, engine_)}});
    }
    stream_.wait();
  }

  void run(int copy) override {
    matmul_.execute(stream_, sets_[copy]);
    stream_.wait();
  }

 private:
  static void fill(memory& target, memory::data_type type) {
    void* data = target.get_data_handle();
    const size_t bytes = target.get_desc().get_size();
    const auto put = [&](const auto& values) {
      std::copy_n(reinterpret_cast<const char*>(values.data()), bytes, static_cast<char*>(data));
    };
    if (type == memory::data_type::f32) put(sample<float>(bytes / sizeof(float), 1.0f));
    if (type == memory::data_type::s8) put(sample<int8_t>(bytes, 254.0f));
    if (type == memory::data_type::u8) put(sample<int8_t>(bytes, 254.0f));  // any bits do
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  dnnl::matmul matmul_;
  std::vector<std::unordered_map<int, memory>> sets_;
};

// Debian's oneDNN runs on OpenMP, whose setting is found in whichever runtime came with it. With any other
// runtime the number of threads could not be made the same, so there is no comparison then.
bool set_onednn_threads(int threads) {
  if (dnnl_version()->cpu_runtime != DNNL_RUNTIME_OMP) return false;
  const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set) set(threads);
  return set != nullptr;
}

#endif

using Make = std::function<std::unique_ptr<Baseline>(int copies)>;

std::vector<std::pair<std::string, Make>> candidates(Arithmetic arithmetic, [[maybe_unused]] const Shape& s,
                                                     [[maybe_unused]] bool has_onednn) {
  std::vector<std::pair<std::string, Make>> list;
  if (arithmetic == Arithmetic::f32) {
#if defined(QF_HAS_OPENBLAS)
    list.emplace_back("OpenBLAS f32", [s](int copies) { return std::make_unique<OpenBlas>(s, copies); });
#endif
  }
#if defined(QF_HAS_ONEDNN)
  using Type = memory::data_type;
  const auto add = [&](const char* name, Type x, Type w, Type y) {
    list.emplace_back(s.order == WeightOrder::packed ? name : std::string(name) + " unpacked",
                      [=](int copies) { return std::make_unique<OneDnn>(s, x, w, y, copies); });
  };
  if (has_onednn && arithmetic == Arithmetic::f32) add("oneDNN f32", Type::f32, Type::f32, Type::f32);
  if (has_onednn && arithmetic == Arithmetic::int8) {
    add("oneDNN u8s8s32", Type::u8, Type::s8, Type::s32);
    add("oneDNN s8s8s32", Type::s8, Type::s8, Type::s32);
  }
#endif
  return list;
}

}  // namespace

Baselines::Baselines([[maybe_unused]] int threads, double cache_bytes) : cache_bytes_(cache_bytes) {
#if defined(QF_HAS_OPENBLAS)
  openblas_set_num_threads(threads);
#endif
#if defined(QF_HAS_ONEDNN)
  has_onednn_ = set_onednn_threads(threads);
#endif
}

std::vector<NamedContender> Baselines::prepare(Arithmetic arithmetic, const Shape& s) const {
  std::vector<NamedContender> prepared;
  if (s.m == 0 || s.n == 0 || s.k == 0) return prepared;
  const int copies = copies_beyond_cache(bytes_of(arithmetic, s), cache_bytes_);
  for (const auto& [name, make] : candidates(arithmetic, s, has_onednn_)) {
    try {
      const std::shared_ptr<Baseline> baseline = make(copies);
      baseline->run(0);
      prepared.push_back({name, {[baseline](int copy) { baseline->run(copy); }, copies}});
    } catch (const std::exception&) {
      continue;  // this version or CPU has no such product: one baseline fewer
    }
  }
  return prepared;
}

std::vector<BaselineTiming> Baselines::measure(Arithmetic arithmetic, const Shape& shape,
                                               double seconds) const {
  const std::vector<NamedContender> prepared = prepare(arithmetic, shape);
  std::vector<Contender> contenders;
  for (const NamedContender& p : prepared) contenders.push_back(p.contender);
  const std::vector<Timing> timings = measure_in_turns(std::move(contenders), seconds);
  std::vector<BaselineTiming> named;
  for (size_t i = 0; i < prepared.size(); ++i) named.push_back({prepared[i].name, timings[i]});
  return named;
}

Json Baselines::versions() {
  Json json = Json::object();
#if defined(QF_HAS_OPENBLAS)
  json["OpenBLAS"] = openblas_get_config();
#endif
#if defined(QF_HAS_ONEDNN)
  const dnnl_version_t* v = dnnl_version();
  json["oneDNN"] = fmt::format("{}.{}.{}", v->major, v->minor, v->patch);
#endif
  return json;
}

const BaselineTiming* quickest(const std::vector<BaselineTiming>& timings) {
  const auto it = std::min_element(timings.begin(), timings.end(),
                                   [](const auto& a, const auto& b) { return a.timing.us < b.timing.us; });
  return it == timings.end() ? nullptr : &*it;
}

}  // namespace quantfuse::cli
