// SPDX-License-Identifier: Apache-2.0
#include "cuda/cublaslt.h"

#if defined(QF_HAS_CUBLASLT_HEADER)
#include <dlfcn.h>

#include <string>

namespace quantfuse {
namespace {

// The newest first. What is called here is the same in both.
void* open_library() {
  for (const char* version : {"13", "12"}) {
    const std::string name = std::string("libcublasLt.so.") + version;
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

const CublasLt* cublaslt() {
  static const CublasLt* loaded = []() -> const CublasLt* {
    void* library = open_library();
    static CublasLt lt;
    const bool is_whole = library && find(library, "cublasLtCreate", lt.create) &&
                          find(library, "cublasLtMatmulDescCreate", lt.create_description) &&
                          find(library, "cublasLtMatmulDescDestroy", lt.destroy_description) &&
                          find(library, "cublasLtMatmulDescSetAttribute", lt.set_attribute) &&
                          find(library, "cublasLtMatrixLayoutCreate", lt.create_layout) &&
                          find(library, "cublasLtMatrixLayoutDestroy", lt.destroy_layout) &&
                          find(library, "cublasLtMatmulPreferenceCreate", lt.create_preference) &&
                          find(library, "cublasLtMatmulPreferenceDestroy", lt.destroy_preference) &&
                          find(library, "cublasLtMatmulPreferenceSetAttribute", lt.set_preference) &&
                          find(library, "cublasLtMatmulAlgoGetHeuristic", lt.get_heuristic) &&
                          find(library, "cublasLtMatmul", lt.matmul);
    return is_whole ? &lt : nullptr;
  }();
  return loaded;
}

}  // namespace quantfuse
#endif
