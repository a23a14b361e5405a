// What the extension adds to the operators that schemas.py defines: their CUDA kernels, and two
// functions for Python.

#include <cublasLt.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "autotune.h"
#include "operators.h"

namespace fp8lt {
namespace {

// What was compiled against and what is loaded: build.py compares them.
std::tuple<int64_t, int64_t> cublaslt_versions() {
  return {CUBLAS_VERSION, static_cast<int64_t>(cublasLtGetVersion())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) {
  m.impl("quantize_tensorwise", TORCH_FN(quantize_tensorwise_op));
  m.impl("quantize_delayed", TORCH_FN(quantize_delayed_op));
  m.impl("quantize_shards", TORCH_FN(quantize_shards_op));
  m.impl("quantize_rowwise", TORCH_FN(quantize_rowwise_op));
  m.impl("quantize_blockwise", TORCH_FN(quantize_blockwise_op));
  m.impl("transposed", TORCH_FN(transposed_op));
  m.impl("gemm_nt", TORCH_FN(gemm_nt_op));
  m.impl("gemm_nt_add", TORCH_FN(gemm_nt_add_op));
}
// The layer has a derivative, the operators that it is made of have none: to ask for one is an
// error. Without this it would be lost, as where torch.func nests a derivative in another.
void refuse_derivatives(torch::Library& library) {
  for (const char* name : {"quantize_tensorwise", "quantize_delayed", "quantize_shards",
                           "quantize_rowwise", "quantize_blockwise", "transposed", "gemm_nt",
                           "gemm_nt_add", "linear_backward", "linear_backward_delayed"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
TORCH_LIBRARY_IMPL(fp8lt, AutogradCUDA, m) { refuse_derivatives(m); }
TORCH_LIBRARY_IMPL(fp8lt, AutogradCPU, m) { refuse_derivatives(m); }

TORCH_LIBRARY_IMPL(fp8lt, CompositeExplicitAutograd, m) {
  m.impl("cublaslt_versions", TORCH_FN(cublaslt_versions));
  m.impl("set_autotune", [](bool enabled, std::string directory, bool verbose) {
    set_autotune(enabled, directory, verbose);
  });
}

}  // namespace fp8lt
