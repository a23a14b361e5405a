// How cuBLASLt is to run one GEMM: its descriptors, each with an owner, and an algorithm.
#pragma once

#include <c10/util/Exception.h>
#include <cublasLt.h>

#include <memory>
#include <type_traits>

namespace fp8lt {

#define FP8LT_CHECK(expr)                                                                     \
  do {                                                                                        \
    const cublasStatus_t fp8lt_status = (expr);                                               \
    TORCH_CHECK(fp8lt_status == CUBLAS_STATUS_SUCCESS, "fp8lt: ", #expr, " failed: ",         \
                cublasLtGetStatusString(fp8lt_status), " (cuBLASLt ", cublasLtGetVersion(), ")"); \
  } while (0)

// A deleter must not throw: it may run while another error unwinds.
template <auto Destroy>
struct Deleter {
  template <typename T>
  void operator()(T* handle) const noexcept {
    Destroy(handle);
  }
};
template <typename Handle, auto Destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Deleter<Destroy>>;
using MatmulDesc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <typename T>
void set(const MatmulDesc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  FP8LT_CHECK(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
}
template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  FP8LT_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value,
                                                   sizeof(value)));
}

struct Plan {
  MatmulDesc desc;
  Layout a, b, d;
  cublasLtMatmulAlgo_t algo;
  bool fast_accum, by_row;
};

}  // namespace fp8lt
