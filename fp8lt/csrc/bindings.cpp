// The CUDA kernels of the operators that ops.py defines: allocation, checks of what would be read
// out of bounds, device and stream. Schemas and shape rules are in ops.py alone.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "autotune.h"
#include "gemm.h"
#include "kernels.h"
#include "memory.h"
#include "quantize.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;

RealType real_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return RealType::kFloat32;
    case ScalarType::Half: return RealType::kFloat16;
    case ScalarType::BFloat16: return RealType::kBFloat16;
    default:
      TORCH_CHECK(false, "fp8lt: want x of float32, float16 or bfloat16, got ", type);
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

bool is_real(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
}

// The memory of a quantise.
Quantized allocate(int64_t rows, int64_t cols, ScalarType dtype, bool row_major, bool transposed,
                   Memory memory, c10::Device device) {
  const int64_t padded_rows = padded(rows), padded_cols = padded(cols);
  const int64_t scales = std::max({padded_rows, padded_cols, kPad});
  using Sizes = std::array<int64_t, 2>;
  const Sizes nothing{0, 0}, data = row_major ? Sizes{padded_rows, padded_cols} : nothing,
                             data_t = transposed ? Sizes{padded_cols, padded_rows} : nothing;
  if (memory == Memory::kApart) {
    return {empty(data, dtype, device), empty(data_t, dtype, device),
            empty({scales}, ScalarType::Float, device), Tensor()};
  }
  const bool with_data_t = transposed && (!row_major || memory == Memory::kScaleWithDataT);
  const size_t copy = Block::bytes_of(padded_rows * padded_cols, dtype);
  const size_t bytes = Block::bytes_of(scales, ScalarType::Float);
  Block block(row_major || transposed ? copy + bytes : bytes, device);
  const auto place = [&](const Sizes& sizes, bool shares) {
    return shares ? block.take(sizes, dtype) : empty(sizes, dtype, device);
  };
  Tensor first = place(data, !row_major || !with_data_t);
  Tensor second = place(data_t, !transposed || with_data_t);
  return {std::move(first), std::move(second), block.take({scales}, ScalarType::Float), Tensor()};
}

}  // namespace

Quantized quantize_tensorwise_cuda(const Tensor& x, ScalarType dtype, bool row_major,
                                   bool transposed, std::optional<ScalarType> sums_dtype,
                                   Memory memory) {
  TORCH_CHECK(is_fp8(dtype), "fp8lt: want dtype float8_e4m3fn or float8_e5m2, got ", dtype);
  TORCH_CHECK(!sums_dtype.has_value() || is_real(*sums_dtype),
              "fp8lt: want sums_dtype float32, float16 or bfloat16, got ",
              sums_dtype.value_or(ScalarType::Undefined));
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor input = x.contiguous();
  const int64_t cols = x.size(-1);
  const int64_t rows = c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1);
  Quantized result = allocate(rows, cols, dtype, row_major, transposed, memory, x.device());
  auto& [data, data_t, scale_inv, sums] = result;
  bool fused_sums = false;
  if (sums_dtype.has_value()) {
    fused_sums = rows > 0 && quantize_has_sums(x.get_device());
    sums = fused_sums ? empty({cols}, *sums_dtype, x.device())
                      : at::sum(input.view({rows, cols}), {0}, false, ScalarType::Float)
                            .to(*sums_dtype);
  } else if (memory == Memory::kApart) {
    sums = empty({0}, ScalarType::Float, x.device());
  }

  QuantizeTensorwise q{};
  q.x = input.const_data_ptr();
  q.real = real_type(x.scalar_type());
  q.fp8 = dtype == ScalarType::Float8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
  q.rows = rows;
  q.cols = cols;
  q.data = row_major ? data.mutable_data_ptr() : nullptr;
  q.data_t = transposed ? data_t.mutable_data_ptr() : nullptr;
  q.scale_inv = scale_inv.mutable_data_ptr<float>();
  q.scale_count = scale_inv.numel();
  if (fused_sums) {
    q.sums = sums.mutable_data_ptr();
    q.sums_type = real_type(*sums_dtype);
  }
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Workspace workspace(stream, quantize_scratch_bytes(q));
  q.scratch = workspace.pointer;
  check_cuda(quantize_tensorwise(q, stream), "quantize_tensorwise");
  return result;
}

namespace {

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
  TORCH_CHECK(is_real(out), "fp8lt: want out_dtype float32, float16 or bfloat16, got ", out);
  if (!bias.has_value()) return;
  const ScalarType want = out == ScalarType::Float ? ScalarType::BFloat16 : out;
  TORCH_CHECK(bias->scalar_type() == want, "fp8lt: the epilogue adds a ", want, " bias to ", out,
              ", got a bias of ", bias->scalar_type());
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n && bias->device() == on.device(),
              "fp8lt: want bias [", n, "] on ", on.device(), ", got ", bias->sizes(), " on ",
              bias->device());
}

}  // namespace

Tensor gemm_nt_cuda(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                    const Tensor& b_scale_inv, at::IntArrayRef sizes,
                    const std::optional<Tensor>& bias, ScalarType out_dtype, bool fast_accum) {
  const int64_t m = c10::multiply_integers(sizes.begin(), sizes.end() - 1), n = sizes.back();
  check_operand("a", a, m, a);
  check_operand("b", b, n, a);
  check_scale("a_scale_inv", a_scale_inv, a);
  check_scale("b_scale_inv", b_scale_inv, a);
  check_types(a.scalar_type(), b.scalar_type(), out_dtype, bias, a, n);
  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t k = a.size(1);
  if (m == 0 || n == 0) return empty(sizes, out_dtype, a.device());
  if (k == 0) {
    Tensor d = at::zeros(sizes, a.options().dtype(out_dtype));
    return bias.has_value() ? d.add_(*bias) : d;
  }

  // A row of d must be a multiple of 16 bytes. b has the rows for it; the excess is cut off.
  const bool ragged = n * at::elementSize(out_dtype) % 16 != 0;
  const int64_t lt_n = ragged ? padded(n) : n;
  const std::array<int64_t, 2> lt_sizes{m, lt_n};
  Tensor d = empty(ragged ? at::IntArrayRef(lt_sizes) : sizes, out_dtype, a.device());
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
  {
    const Workspace workspace(stream, kWorkspaceBytes);
    gemm_nt(problem, workspace.pointer, stream);
  }
  return ragged ? at::_unsafe_view(d.narrow(1, 0, n).contiguous(), sizes) : d;
}

namespace {

Quantized quantize_tensorwise_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                              std::optional<ScalarType> sums_dtype) {
  TORCH_CHECK(x.dim() == 2, "fp8lt: want x [R, C], got ", x.sizes());
  return quantize_tensorwise_cuda(x, dtype, row_major, transposed, sums_dtype, Memory::kApart);
}

Tensor gemm_nt_op(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, int64_t m, int64_t n, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum) {
  return gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, {m, n}, bias, out_dtype, fast_accum);
}

// What was compiled against and what is loaded: build.py compares them.
std::tuple<int64_t, int64_t> cublaslt_versions() {
  return {CUBLAS_VERSION, static_cast<int64_t>(cublasLtGetVersion())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) {
  m.impl("quantize_tensorwise", TORCH_FN(quantize_tensorwise_op));
  m.impl("gemm_nt", TORCH_FN(gemm_nt_op));
}
TORCH_LIBRARY_IMPL(fp8lt, CompositeExplicitAutograd, m) {
  m.impl("cublaslt_versions", TORCH_FN(cublaslt_versions));
  m.impl("set_autotune", [](bool enabled, std::string directory, bool verbose) {
    set_autotune(enabled, directory, verbose);
  });
}

}  // namespace fp8lt
