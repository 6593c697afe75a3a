// SPDX-License-Identifier: Apache-2.0
//
// Plain loops, compiled for the vectors that the processor turns out to have.
#pragma once

namespace quantfuse::checkpoint {

// For lambdas and functions that with_vectors is to compile anew: they must become part of their callers.
#define QF_VECTORIZED __attribute__((always_inline))

#if defined(__x86_64__)
template <class Work>
__attribute__((target("avx512f,avx512bw"))) auto run_avx512(const Work& work) {
  return work();
}
template <class Work>
__attribute__((target("avx2"))) auto run_avx2(const Work& work) {
  return work();
}
#endif

// What `work`, a lambda [&]() QF_VECTORIZED { ... }, returns.
template <class Work>
auto with_vectors(const Work& work) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512bw"),
                    has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx512) return run_avx512(work);
  if (has_avx2) return run_avx2(work);
#endif
  return work();
}

}  // namespace quantfuse::checkpoint
