// The GEMM operator on CUDA tensors: checks of what would be read out of bounds, what cuBLASLt asks
// of alignment and of the shape of its result, device and stream.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <array>
#include <optional>
#include <string>

#include "gemm.h"
#include "memory.h"
#include "operators.h"
#include "quantize.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;

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

void check_operand(const char* name, const Tensor& t, int64_t rows, const Tensor& a) {
  TORCH_CHECK(is_fp8(t.scalar_type()), "fp8lt: want ", name, " in an FP8 dtype, got ",
              t.scalar_type());
  TORCH_CHECK(t.dim() == 2 && t.is_contiguous() && t.size(0) == padded(rows) &&
                  t.size(1) % kPad == 0 && t.size(1) == a.size(1) && t.device() == a.device(),
              "fp8lt: want ", name, " [", padded(rows), ", K], contiguous, K a multiple of ", kPad,
              " and the same for a and b, on one device; got ", t.sizes(), " on ", t.device());
}

// Of an operand with so many true rows, and with `k` columns.
void check_scale(const char* name, const Tensor& scale, Scaling scaling, int64_t rows, int64_t k,
                 const Tensor& a) {
  bool fits = scale.dim() == 1 && scale.numel() >= padded(rows);
  std::array<int64_t, 2> sizes{};
  switch (scaling) {
    case Scaling::kTensorwise: fits = scale.dim() <= 1 && scale.numel() > 0; break;
    case Scaling::kRowwise: break;
    case Scaling::k1x128: sizes = {blocks_of(k), padded(rows)}; break;
    case Scaling::k128x128: sizes = {blocks_of(rows), blocks_to_4(k)}; break;
  }
  const bool blocks = scaling == Scaling::k1x128 || scaling == Scaling::k128x128;
  if (blocks) fits = scale.sizes() == at::IntArrayRef(sizes);
  const auto want = [&]() -> std::string {
    if (blocks) return c10::str(at::IntArrayRef(sizes));
    return scaling == Scaling::kRowwise ? c10::str("[", padded(rows), "]") : "[S]";
  };
  TORCH_CHECK(scale.scalar_type() == ScalarType::Float && fits && scale.is_contiguous() &&
                  scale.device() == a.device(),
              "fp8lt: want ", name, " ", want(), ", contiguous, float32 on ", a.device(), ", got ",
              scale.sizes(), " ", scale.scalar_type(), " on ", scale.device());
}

void check_scalings(Scaling a, Scaling b, bool fast_accum) {
  const bool a_block = a == Scaling::k1x128 || a == Scaling::k128x128;
  const bool b_block = b == Scaling::k1x128 || b == Scaling::k128x128;
  const bool same = a == b && a != Scaling::k128x128;
  TORCH_CHECK((same || (a_block && b_block && a != b)) &&
                  (a_block || a == Scaling::kTensorwise || a == Scaling::kRowwise),
              "fp8lt: want a_scaling and b_scaling (0, 0), (1, 1), (4, 4), (4, 5) or (5, 4), got (",
              static_cast<int64_t>(a), ", ", static_cast<int64_t>(b), ")");
  TORCH_CHECK(!a_block || !fast_accum,
              "fp8lt: want fast_accum=False with scales of blocks: cuBLASLt has no other");
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

// The operands of a GEMM, and what cuBLASLt is to make of them.
struct Operands {
  const Tensor &a, &b, &a_scale_inv, &b_scale_inv;
  Scaling a_scaling, b_scaling;
  bool fast_accum;
};

void check(const Operands& operands, int64_t m, int64_t n) {
  const auto& [a, b, a_scale_inv, b_scale_inv, a_scaling, b_scaling, fast_accum] = operands;
  check_operand("a", a, m, a);
  check_operand("b", b, n, a);
  check_scalings(a_scaling, b_scaling, fast_accum);
  check_scale("a_scale_inv", a_scale_inv, a_scaling, m, a.size(1), a);
  check_scale("b_scale_inv", b_scale_inv, b_scaling, n, a.size(1), a);
}

// What cuBLASLt can compute instead of [m, n]: a row of d must be a multiple of 16 bytes, and scales
// of 1x128 lie as far apart as their operand has rows: those that it is padded to.
std::array<int64_t, 2> computable(const Operands& operands, int64_t m, int64_t n,
                                  ScalarType out_dtype) {
  const bool ragged = n * at::elementSize(out_dtype) % 16 != 0 ||
                      (operands.b_scaling == Scaling::k1x128 && n != padded(n));
  return {operands.a_scaling == Scaling::k1x128 ? padded(m) : m, ragged ? padded(n) : n};
}

// Into `d` of these sizes, or to what it holds; the current device is that of the operands.
void multiply(const Operands& operands, std::array<int64_t, 2> sizes, const Tensor& bias,
              const Tensor& d, bool adds) {
  const auto& [a, b, a_scale_inv, b_scale_inv, a_scaling, b_scaling, fast_accum] = operands;
  const auto [m, n] = sizes;
  const Tensor lt_a = aligned(a), lt_b = aligned(b);
  const Tensor lt_a_scale = aligned(a_scale_inv), lt_b_scale = aligned(b_scale_inv);
  GemmProblem problem{};
  problem.device = a.get_device();
  problem.m = m;
  problem.n = n;
  problem.k = a.size(1);
  problem.a_type = cuda_type(a.scalar_type());
  problem.b_type = cuda_type(b.scalar_type());
  problem.d_type = cuda_type(d.scalar_type());
  problem.fast_accum = fast_accum;
  problem.a_scaling = a_scaling;
  problem.b_scaling = b_scaling;
  problem.a = lt_a.const_data_ptr();
  problem.b = lt_b.const_data_ptr();
  problem.a_scale_inv = lt_a_scale.const_data_ptr<float>();
  problem.b_scale_inv = lt_b_scale.const_data_ptr<float>();
  problem.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  problem.d = d.mutable_data_ptr();
  problem.adds = adds;
  problem.written_out = a_scaling == Scaling::kTensorwise && lt_a_scale.numel() >= m &&
                        lt_b_scale.numel() >= n;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const Workspace workspace(stream, kWorkspaceBytes);
  gemm_nt(problem, workspace.pointer, stream);
}

}  // namespace

Tensor gemm_nt_cuda(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                    const Tensor& b_scale_inv, at::IntArrayRef sizes,
                    const std::optional<Tensor>& bias, ScalarType out_dtype, bool fast_accum,
                    Scaling a_scaling, Scaling b_scaling) {
  const int64_t m = c10::multiply_integers(sizes.begin(), sizes.end() - 1), n = sizes.back();
  const Operands operands{a, b, a_scale_inv, b_scale_inv, a_scaling, b_scaling, fast_accum};
  check(operands, m, n);
  check_types(a.scalar_type(), b.scalar_type(), out_dtype, bias, a, n);
  const c10::cuda::CUDAGuard guard(a.device());
  if (m == 0 || n == 0) return empty(sizes, out_dtype, a.device());
  if (a.size(1) == 0) {
    Tensor d = empty(sizes, out_dtype, a.device()).zero_();
    return bias.has_value() ? d.add_(*bias) : d;
  }

  const std::array<int64_t, 2> lt_sizes = computable(operands, m, n, out_dtype);
  const bool whole = lt_sizes == std::array<int64_t, 2>{m, n};
  Tensor d = empty(whole ? sizes : at::IntArrayRef(lt_sizes), out_dtype, a.device());
  Tensor lt_bias;
  if (bias.has_value() && lt_sizes[1] != n) {
    lt_bias = empty({lt_sizes[1]}, bias->scalar_type(), a.device()).zero_();
    lt_bias.narrow(0, 0, n).copy_(*bias);
  } else if (bias.has_value()) {
    lt_bias = aligned(bias->contiguous());
  }
  multiply(operands, lt_sizes, lt_bias, d, false);
  if (whole) return d;
  // The excess is cut off. What at::_unsafe_view does, whose header includes half of torch's.
  const Tensor cut = d.narrow(0, 0, m).narrow(1, 0, n).contiguous();
  return at::_ops::_unsafe_view::call(cut, c10::fromIntArrayRefSlow(sizes));
}

void gemm_nt_add_cuda(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                      const Tensor& b_scale_inv, const Tensor& d, bool fast_accum,
                      Scaling a_scaling, Scaling b_scaling) {
  TORCH_CHECK(d.dim() == 2 && d.scalar_type() == ScalarType::Float && d.is_contiguous() &&
                  d.device() == a.device(),
              "fp8lt: want d [m, n], contiguous, float32 on ", a.device(), ", got ", d.sizes(), " ",
              d.scalar_type(), " on ", d.device());
  const int64_t m = d.size(0), n = d.size(1);
  const Operands operands{a, b, a_scale_inv, b_scale_inv, a_scaling, b_scaling, fast_accum};
  check(operands, m, n);
  check_types(a.scalar_type(), b.scalar_type(), ScalarType::Float, std::nullopt, a, n);
  const c10::cuda::CUDAGuard guard(a.device());
  if (m == 0 || n == 0 || a.size(1) == 0) return;
  const std::array<int64_t, 2> lt_sizes = computable(operands, m, n, ScalarType::Float);
  const bool aligned = reinterpret_cast<uintptr_t>(d.const_data_ptr()) % 16 == 0;
  if (aligned && lt_sizes == std::array<int64_t, 2>{m, n}) {
    multiply(operands, lt_sizes, {}, d, true);
    return;
  }
  const Tensor apart = empty(lt_sizes, ScalarType::Float, a.device());
  multiply(operands, lt_sizes, {}, apart, false);
  d.add_(apart.narrow(0, 0, m).narrow(1, 0, n));
}

Tensor gemm_nt_op(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, int64_t m, int64_t n, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum, int64_t a_scaling, int64_t b_scaling) {
  return gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, {m, n}, bias, out_dtype, fast_accum,
                      static_cast<Scaling>(a_scaling), static_cast<Scaling>(b_scaling));
}

void gemm_nt_add_op(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                    const Tensor& b_scale_inv, Tensor d, bool fast_accum, int64_t a_scaling,
                    int64_t b_scaling) {
  gemm_nt_add_cuda(a, b, a_scale_inv, b_scale_inv, d, fast_accum,
                   static_cast<Scaling>(a_scaling), static_cast<Scaling>(b_scaling));
}

}  // namespace fp8lt
