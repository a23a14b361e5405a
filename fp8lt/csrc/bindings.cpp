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
#include <string>
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

// A quantise on its way: what all scalings have in common. The caller has x's device current.
class Quantising {
 public:
  Quantising(const Tensor& x, ScalarType dtype, bool power_of_two)
      : cols(x.size(-1)),
        rows(c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1)),
        input_(x.contiguous()) {
    TORCH_CHECK(is_fp8(dtype), "fp8lt: want dtype float8_e4m3fn or float8_e5m2, got ", dtype);
    q.x = input_.const_data_ptr();
    q.real = real_type(x.scalar_type());
    q.fp8 = dtype == ScalarType::Float8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
    q.power_of_two = power_of_two;
    q.rows = rows;
    q.cols = cols;
  }

  // The sums of x's columns: made on the side, or now, where the kernel cannot.
  Tensor sums(ScalarType dtype) {
    TORCH_CHECK(is_real(dtype), "fp8lt: want sums_dtype float32, float16 or bfloat16, got ", dtype);
    if (rows == 0 || !quantize_has_sums(input_.get_device())) {
      return at::sum(input_.view({rows, cols}), {0}, false, ScalarType::Float).to(dtype);
    }
    Tensor sums = empty({cols}, dtype, input_.device());
    q.sums = sums.mutable_data_ptr();
    q.sums_type = real_type(dtype);
    return sums;
  }

  void run() {
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const Workspace workspace(stream, quantize_scratch_bytes(q));
    q.scratch = workspace.pointer;
    check_cuda(quantize(q, stream), "quantize");
  }

  const int64_t cols, rows;
  Quantize q{};

 private:
  Tensor input_;
};

// Two copies, each with its scales, and sums; see ops.Quantized.
using QuantizedTwice = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Both copies have scales of their own, whose shapes these are; nothing for what is not asked for.
QuantizedTwice quantize_twice(Quantising& quantising, ScalarType dtype, bool row_major,
                              bool transposed, at::IntArrayRef scale_sizes,
                              at::IntArrayRef scale_t_sizes,
                              std::optional<ScalarType> sums_dtype, c10::Device device) {
  const int64_t rows = padded(quantising.rows), cols = padded(quantising.cols);
  Quantize& q = quantising.q;
  const auto copy = [&](bool wanted, int64_t height, int64_t width, void** place) {
    Tensor t = wanted ? empty({height, width}, dtype, device) : empty({0, 0}, dtype, device);
    *place = wanted ? t.mutable_data_ptr() : nullptr;
    return t;
  };
  const auto scales = [&](at::IntArrayRef sizes, float** place) {
    Tensor t = empty(sizes, ScalarType::Float, device);
    *place = t.numel() > 0 ? t.mutable_data_ptr<float>() : nullptr;
    return t;
  };
  Tensor data = copy(row_major, rows, cols, &q.data);
  Tensor data_t = copy(transposed, cols, rows, &q.data_t);
  Tensor scale_inv = scales(scale_sizes, &q.scale_inv);
  Tensor scale_inv_t = scales(scale_t_sizes, &q.scale_inv_t);
  Tensor sums = sums_dtype.has_value() ? quantising.sums(*sums_dtype)
                                       : empty({0}, ScalarType::Float, device);
  quantising.run();
  return {std::move(data), std::move(data_t), std::move(scale_inv), std::move(scale_inv_t),
          std::move(sums)};
}

// One number for each row or column of x, which is folded into it.
const float* fold(const char* name, const std::optional<Tensor>& t, int64_t count,
                  const Tensor& x) {
  if (!t.has_value()) return nullptr;
  TORCH_CHECK(t->scalar_type() == ScalarType::Float && t->dim() == 1 && t->is_contiguous() &&
                  t->numel() >= count && t->device() == x.device(),
              "fp8lt: want ", name, " [", padded(count), "], contiguous, float32 on ", x.device(),
              ", got ", t->sizes(), " ", t->scalar_type(), " on ", t->device());
  return t->const_data_ptr<float>();
}

void check_matrix(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "fp8lt: want x [R, C], got ", x.sizes());
}

// With one scale for the tensor, by a history if that has a state.
Quantized quantize_one_scale(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                             std::optional<ScalarType> sums_dtype, bool power_of_two,
                             Memory memory, const History& history) {
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, dtype, power_of_two);
  Quantized result = allocate(quantising.rows, quantising.cols, dtype, row_major, transposed,
                              memory, x.device());
  auto& [data, data_t, scale_inv, sums] = result;
  if (sums_dtype.has_value()) {
    sums = quantising.sums(*sums_dtype);
  } else if (memory == Memory::kApart) {
    sums = empty({0}, ScalarType::Float, x.device());
  }
  Quantize& q = quantising.q;
  q.data = row_major ? data.mutable_data_ptr() : nullptr;
  q.data_t = transposed ? data_t.mutable_data_ptr() : nullptr;
  q.scale_inv = scale_inv.mutable_data_ptr<float>();
  q.scale_count = scale_inv.numel();
  q.scaling = Scaling::kTensorwise;
  q.history = history;
  quantising.run();
  return result;
}

}  // namespace

Quantized quantize_tensorwise_cuda(const Tensor& x, ScalarType dtype, bool row_major,
                                   bool transposed, std::optional<ScalarType> sums_dtype,
                                   bool power_of_two, Memory memory) {
  return quantize_one_scale(x, dtype, row_major, transposed, sums_dtype, power_of_two, memory, {});
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
  const std::string want = blocks                          ? c10::str(at::IntArrayRef(sizes))
                           : scaling == Scaling::kRowwise ? c10::str("[", padded(rows), "]")
                                                          : "[S]";
  TORCH_CHECK(scale.scalar_type() == ScalarType::Float && fits && scale.is_contiguous() &&
                  scale.device() == a.device(),
              "fp8lt: want ", name, " ", want, ", contiguous, float32 on ", a.device(), ", got ",
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

}  // namespace

Tensor gemm_nt_cuda(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                    const Tensor& b_scale_inv, at::IntArrayRef sizes,
                    const std::optional<Tensor>& bias, ScalarType out_dtype, bool fast_accum,
                    Scaling a_scaling, Scaling b_scaling) {
  const int64_t m = c10::multiply_integers(sizes.begin(), sizes.end() - 1), n = sizes.back();
  check_operand("a", a, m, a);
  check_operand("b", b, n, a);
  check_scalings(a_scaling, b_scaling, fast_accum);
  check_scale("a_scale_inv", a_scale_inv, a_scaling, m, a.size(1), a);
  check_scale("b_scale_inv", b_scale_inv, b_scaling, n, a.size(1), a);
  check_types(a.scalar_type(), b.scalar_type(), out_dtype, bias, a, n);
  const c10::cuda::CUDAGuard guard(a.device());
  const int64_t k = a.size(1);
  if (m == 0 || n == 0) return empty(sizes, out_dtype, a.device());
  if (k == 0) {
    Tensor d = at::zeros(sizes, a.options().dtype(out_dtype));
    return bias.has_value() ? d.add_(*bias) : d;
  }

  // A row of d must be a multiple of 16 bytes, and scales of 1x128 lie as far apart as their
  // operand has rows: those that it is padded to. The excess is cut off.
  const int64_t lt_m = a_scaling == Scaling::k1x128 ? padded(m) : m;
  const bool ragged = n * at::elementSize(out_dtype) % 16 != 0 ||
                      (b_scaling == Scaling::k1x128 && n != padded(n));
  const int64_t lt_n = ragged ? padded(n) : n;
  const std::array<int64_t, 2> lt_sizes{lt_m, lt_n};
  const bool whole = !ragged && lt_m == m;
  Tensor d = empty(whole ? sizes : at::IntArrayRef(lt_sizes), out_dtype, a.device());
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
  problem.m = lt_m;
  problem.n = lt_n;
  problem.k = k;
  problem.a_type = cuda_type(a.scalar_type());
  problem.b_type = cuda_type(b.scalar_type());
  problem.d_type = cuda_type(out_dtype);
  problem.fast_accum = fast_accum;
  problem.a_scaling = a_scaling;
  problem.b_scaling = b_scaling;
  problem.a = lt_a.const_data_ptr();
  problem.b = lt_b.const_data_ptr();
  problem.a_scale_inv = lt_a_scale.const_data_ptr<float>();
  problem.b_scale_inv = lt_b_scale.const_data_ptr<float>();
  problem.bias = lt_bias.defined() ? lt_bias.const_data_ptr() : nullptr;
  problem.d = d.mutable_data_ptr();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  problem.written_out = a_scaling == Scaling::kTensorwise && lt_a_scale.numel() >= m &&
                        lt_b_scale.numel() >= lt_n;
  {
    const Workspace workspace(stream, kWorkspaceBytes);
    gemm_nt(problem, workspace.pointer, stream);
  }
  if (whole) return d;
  return at::_unsafe_view(d.narrow(0, 0, m).narrow(1, 0, n).contiguous(), sizes);
}

namespace {

Quantized quantize_tensorwise_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                                 std::optional<ScalarType> sums_dtype, bool power_of_two) {
  check_matrix(x);
  return quantize_tensorwise_cuda(x, dtype, row_major, transposed, sums_dtype, power_of_two,
                                  Memory::kApart);
}

Quantized quantize_delayed_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                              Tensor state, int64_t margin, bool most_recent, bool record,
                              std::optional<ScalarType> sums_dtype, bool power_of_two) {
  check_matrix(x);
  TORCH_CHECK(state.scalar_type() == ScalarType::Float && state.dim() == 1 && state.numel() >= 3 &&
                  state.is_contiguous() && state.device() == x.device(),
              "fp8lt: want state [H + 2], H at least 1, contiguous, float32 on ", x.device(),
              ", got ", state.sizes(), " ", state.scalar_type(), " on ", state.device());
  const History history{state.mutable_data_ptr<float>(), state.numel() - 2,
                        static_cast<int>(margin), most_recent, record};
  return quantize_one_scale(x, dtype, row_major, transposed, sums_dtype, power_of_two,
                            Memory::kApart, history);
}

QuantizedTwice quantize_rowwise_op(const Tensor& x, ScalarType dtype, bool row_major,
                                   bool transposed, bool power_of_two, bool folded,
                                   const std::optional<Tensor>& fold_cols,
                                   const std::optional<Tensor>& fold_rows,
                                   std::optional<ScalarType> sums_dtype) {
  check_matrix(x);
  TORCH_CHECK(!folded || (!fold_cols.has_value() && !fold_rows.has_value()),
              "fp8lt: fold_cols and fold_rows are folded into an x that is not `folded` itself");
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, dtype, power_of_two);
  quantising.q.fold_cols = fold("fold_cols", fold_cols, quantising.cols, x);
  quantising.q.fold_rows = fold("fold_rows", fold_rows, quantising.rows, x);
  const int64_t rows = row_major || folded ? padded(quantising.rows) : 0;
  const int64_t cols = transposed ? padded(quantising.cols) : 0;
  quantising.q.scaling = Scaling::kRowwise;
  quantising.q.folded = folded;
  return quantize_twice(quantising, dtype, row_major, transposed, {rows}, {cols}, sums_dtype,
                        x.device());
}

QuantizedTwice quantize_blockwise_op(const Tensor& x, ScalarType dtype, bool row_major,
                                     bool transposed, bool power_of_two, bool square,
                                     std::optional<ScalarType> sums_dtype) {
  check_matrix(x);
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, dtype, power_of_two);
  using Sizes = std::array<int64_t, 2>;
  const auto sizes = [&](bool wanted, int64_t rows, int64_t cols) {
    if (!wanted) return Sizes{0, 0};
    if (!square) return Sizes{blocks_of(cols), padded(rows)};
    return Sizes{blocks_of(rows), blocks_to_4(cols)};
  };
  const Sizes scales = sizes(row_major, quantising.rows, quantising.cols);
  const Sizes scales_t = sizes(transposed, quantising.cols, quantising.rows);
  quantising.q.scaling = square ? Scaling::k128x128 : Scaling::k1x128;
  return quantize_twice(quantising, dtype, row_major, transposed, scales, scales_t, sums_dtype,
                        x.device());
}

Tensor gemm_nt_op(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, int64_t m, int64_t n, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum, int64_t a_scaling, int64_t b_scaling) {
  return gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, {m, n}, bias, out_dtype, fast_accum,
                      static_cast<Scaling>(a_scaling), static_cast<Scaling>(b_scaling));
}

// What was compiled against and what is loaded: build.py compares them.
std::tuple<int64_t, int64_t> cublaslt_versions() {
  return {CUBLAS_VERSION, static_cast<int64_t>(cublasLtGetVersion())};
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) {
  m.impl("quantize_tensorwise", TORCH_FN(quantize_tensorwise_op));
  m.impl("quantize_delayed", TORCH_FN(quantize_delayed_op));
  m.impl("quantize_rowwise", TORCH_FN(quantize_rowwise_op));
  m.impl("quantize_blockwise", TORCH_FN(quantize_blockwise_op));
  m.impl("gemm_nt", TORCH_FN(gemm_nt_op));
}
TORCH_LIBRARY_IMPL(fp8lt, CompositeExplicitAutograd, m) {
  m.impl("cublaslt_versions", TORCH_FN(cublaslt_versions));
  m.impl("set_autotune", [](bool enabled, std::string directory, bool verbose) {
    set_autotune(enabled, directory, verbose);
  });
}

}  // namespace fp8lt
