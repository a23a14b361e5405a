// The quantise operators on CUDA tensors: memory for what they return, checks of what would be read
// out of bounds, device and stream.

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "memory.h"
#include "operators.h"
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
      constexpr bool kKeepDim = false;
      return input_.view({rows, cols}).sum({0}, kKeepDim, ScalarType::Float).to(dtype);
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
                  t->numel() >= padded(count) && t->device() == x.device(),
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

}  // namespace fp8lt
