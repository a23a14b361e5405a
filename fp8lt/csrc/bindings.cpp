// The CUDA kernels of the operators that ops.py defines: allocation, checks of what would be read
// out of bounds, device and stream. Schemas and shape rules are in ops.py alone.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "gemm.h"
#include "quantize.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;

RealType real_type(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return RealType::kFloat32;
    case ScalarType::Half: return RealType::kFloat16;
    case ScalarType::BFloat16: return RealType::kBFloat16;
    default:
      TORCH_CHECK(false, "fp8lt: want x of float32, float16 or bfloat16, got ", x.scalar_type());
  }
}

cudaDataType_t cuda_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float8_e4m3fn: return CUDA_R_8F_E4M3;
    case ScalarType::Float8_e5m2: return CUDA_R_8F_E5M2;
    case ScalarType::Float: return CUDA_R_32F;
    case ScalarType::Half: return CUDA_R_16F;
    case ScalarType::BFloat16: return CUDA_R_16BF;
    default: TORCH_CHECK(false, "fp8lt: no GEMM takes or gives ", type);
  }
}

bool is_fp8(ScalarType type) {
  return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2;
}

// cuBLASLt refuses pointers that are not 16-byte aligned, scalars too; views may be anywhere.
Tensor aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 ? t : t.clone();
}

// at::empty without its way through the dispatcher.
Tensor empty(at::IntArrayRef sizes, ScalarType dtype, c10::Device device) {
  return Tensor(at::detail::empty_cuda(sizes, dtype, device, std::nullopt));
}

void check_launch(cudaError_t status, const char* what) {
  if (status != cudaSuccess) cudaGetLastError();  // or torch's next check would report it again
  TORCH_CHECK(status == cudaSuccess, "fp8lt: ", what, " failed: ", cudaGetErrorString(status));
}

// Scratch memory of all kernels: one per stream, for life, since streams that run side by side must
// not share it. It does not come from torch's allocator, which may be lending out the memory pool
// of a CUDA graph just now: a block kept from there would outlive the graph, or be shared with it.
void* persistent_workspace(const c10::cuda::CUDAStream& stream) {
  static auto* const mutex = new std::mutex;  // never destroyed: the driver may be gone at exit
  static auto* const found = new std::map<std::pair<int, cudaStream_t>, void*>;
  const std::lock_guard<std::mutex> lock(*mutex);
  void*& mine = (*found)[{stream.device_index(), stream.stream()}];
  if (mine == nullptr) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another thread may be capturing
    check_launch(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
    if (cudaMalloc(&mine, kWorkspaceBytes) != cudaSuccess) {
      mine = nullptr;
      cudaGetLastError();  // torch may hold all memory: Workspace asks it instead
    }
    check_launch(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  }
  return mine;
}

bool is_capturing(const c10::cuda::CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_launch(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// The scratch memory for one launch on a stream; the next launch there may have the same.
struct Workspace {
  void* pointer = nullptr;
  Tensor borrowed;  // inside a capture: the graph's own, from its pool

  explicit Workspace(const c10::cuda::CUDAStream& stream) {
    if (!is_capturing(stream)) pointer = persistent_workspace(stream);
    if (pointer == nullptr) {
      borrowed = empty({static_cast<int64_t>(kWorkspaceBytes)}, ScalarType::Byte, stream.device());
      pointer = borrowed.mutable_data_ptr();
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> quantize_tensorwise_cuda(const Tensor& x, ScalarType dtype,
                                                            bool row_major, bool transposed) {
  TORCH_CHECK(x.dim() == 2, "fp8lt: want x [R, C], got ", x.sizes());
  TORCH_CHECK(is_fp8(dtype), "fp8lt: want dtype float8_e4m3fn or float8_e5m2, got ", dtype);
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor input = x.contiguous();
  const int64_t rows = x.size(0), cols = x.size(1);
  const int64_t padded_rows = padded(rows), padded_cols = padded(cols);
  const auto copy = [&](bool asked_for, int64_t outer, int64_t inner) {
    return asked_for ? empty({outer, inner}, dtype, x.device()) : empty({0, 0}, dtype, x.device());
  };
  Tensor data = copy(row_major, padded_rows, padded_cols);
  Tensor data_t = copy(transposed, padded_cols, padded_rows);
  Tensor scale_inv =
      empty({std::max({padded_rows, padded_cols, kPad})}, ScalarType::Float, x.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Workspace workspace(stream);

  QuantizeTensorwise q{};
  q.x = input.const_data_ptr();
  q.real = real_type(x);
  q.fp8 = dtype == ScalarType::Float8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
  q.rows = rows;
  q.cols = cols;
  q.data = row_major ? data.mutable_data_ptr() : nullptr;
  q.data_t = transposed ? data_t.mutable_data_ptr() : nullptr;
  q.scale_inv = scale_inv.mutable_data_ptr<float>();
  q.scale_count = scale_inv.numel();
  q.scratch = static_cast<float*>(workspace.pointer);
  check_launch(quantize_tensorwise(q, stream), "quantize_tensorwise");
  return {data, data_t, scale_inv};
}

void check_operand(const char* name, const Tensor& t, int64_t rows, const Tensor& a) {
  TORCH_CHECK(is_fp8(t.scalar_type()), "fp8lt: want ", name, " in an FP8 dtype, got ",
              t.scalar_type());
  TORCH_CHECK(t.dim() == 2 && t.is_contiguous() && t.size(0) == padded(rows) &&
                  t.size(1) % kPad == 0 && t.size(1) == a.size(1) && t.device() == a.device(),
              "fp8lt: want ", name, " [", padded(rows), ", K], contiguous, K a multiple of ", kPad,
              " and the same for a and b, on one device; got ", t.sizes(), " on ", t.device());
}

void check_scale(const char* name, const Tensor& scale, const Tensor& a) {
  TORCH_CHECK(scale.scalar_type() == ScalarType::Float && scale.dim() <= 1 && scale.numel() > 0 &&
                  scale.is_contiguous() && scale.device() == a.device(),
              "fp8lt: want ", name, " [S], contiguous, float32 on ", a.device(), ", got ",
              scale.sizes(), " ", scale.scalar_type(), " on ", scale.device());
}

void check_types(ScalarType a, ScalarType b, ScalarType out, const std::optional<Tensor>& bias,
                 const Tensor& on, int64_t n) {
  TORCH_CHECK(a != ScalarType::Float8_e5m2 || b != ScalarType::Float8_e5m2,
              "fp8lt: float8_e5m2 @ float8_e5m2 does not exist in hardware: one of a and b must be "
              "float8_e4m3fn");
  TORCH_CHECK(out == ScalarType::Float || out == ScalarType::Half || out == ScalarType::BFloat16,
              "fp8lt: want out_dtype float32, float16 or bfloat16, got ", out);
  if (!bias.has_value()) return;
  const ScalarType want = out == ScalarType::Float ? ScalarType::BFloat16 : out;
  TORCH_CHECK(bias->scalar_type() == want, "fp8lt: the epilogue adds a ", want, " bias to ", out,
              ", got a bias of ", bias->scalar_type());
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->device() == on.device(),
              "fp8lt: want bias [", n, "] on ", on.device(), ", got ", bias->sizes(), " on ",
              bias->device());
}

Tensor gemm_nt_cuda(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                    const Tensor& b_scale_inv, int64_t m, int64_t n,
                    const std::optional<Tensor>& bias, ScalarType out_dtype, bool fast_accum) {
  check_operand("a", a, m, a);
  check_operand("b", b, n, a);
  check_scale("a_scale_inv", a_scale_inv, a);
  check_scale("b_scale_inv", b_scale_inv, a);
  check_types(a.scalar_type(), b.scalar_type(), out_dtype, bias, a, n);
  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t k = a.size(1);
  if (m == 0 || n == 0) return empty({m, n}, out_dtype, a.device());
  if (k == 0) {
    Tensor d = at::zeros({m, n}, a.options().dtype(out_dtype));
    return bias.has_value() ? d.add_(*bias) : d;
  }

  // A row of d must be a multiple of 16 bytes. b has the rows for it; the excess is cut off.
  const bool ragged = n * at::elementSize(out_dtype) % 16 != 0;
  const int64_t lt_n = ragged ? padded(n) : n;
  Tensor d = empty({m, lt_n}, out_dtype, a.device());
  Tensor lt_bias;
  if (bias.has_value() && ragged) {
    lt_bias = at::zeros({lt_n}, bias->options());
    lt_bias.narrow(0, 0, n).copy_(*bias);
  } else if (bias.has_value()) {
    lt_bias = aligned(bias->contiguous());
  }
  const Tensor lt_a = aligned(a), lt_b = aligned(b);
  const Tensor lt_a_scale = aligned(a_scale_inv), lt_b_scale = aligned(b_scale_inv);

  GemmProblem problem{};
  problem.device = a.get_device();
  problem.m = m;
  problem.n = lt_n;
  problem.k = k;
  problem.a_type = cuda_type(a.scalar_type());
  problem.b_type = cuda_type(b.scalar_type());
  problem.d_type = cuda_type(out_dtype);
  problem.fast_accum = fast_accum;
  problem.a = lt_a.const_data_ptr();
  problem.b = lt_b.const_data_ptr();
  problem.a_scale_inv = lt_a_scale.const_data_ptr<float>();
  problem.b_scale_inv = lt_b_scale.const_data_ptr<float>();
  problem.bias = lt_bias.defined() ? lt_bias.const_data_ptr() : nullptr;
  problem.d = d.mutable_data_ptr();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  problem.vector_scales = lt_a_scale.numel() >= m && lt_b_scale.numel() >= lt_n;
  gemm_nt(problem, Workspace(stream).pointer, stream);
  return ragged ? d.narrow(1, 0, n).contiguous() : d;
}

// What was compiled against and what is loaded: build.py compares them.
std::tuple<int64_t, int64_t> cublaslt_versions() {
  return {CUBLAS_VERSION, static_cast<int64_t>(cublasLtGetVersion())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) {
  m.impl("quantize_tensorwise", TORCH_FN(quantize_tensorwise_cuda));
  m.impl("gemm_nt", TORCH_FN(gemm_nt_cuda));
}
TORCH_LIBRARY_IMPL(fp8lt, CompositeExplicitAutograd, m) {
  m.impl("cublaslt_versions", TORCH_FN(cublaslt_versions));
}

}  // namespace fp8lt
