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

// A quantise on its way: what all scalings have in common. The caller has x's device current.
class Quantising {
 public:
  Quantising(const Tensor& x, const Copies& copies)
      : cols(x.size(-1)),
        rows(c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1)),
        input_(x.contiguous()) {
    TORCH_CHECK(is_fp8(copies.dtype), "fp8lt: want dtype float8_e4m3fn or float8_e5m2, got ",
                copies.dtype);
    q.x = input_.const_data_ptr();
    q.real = real_type(x.scalar_type());
    q.fp8 = copies.dtype == ScalarType::Float8_e4m3fn ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
    q.power_of_two = copies.power_of_two;
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
    const bool counts = q.scaling == Scaling::kTensorwise;
    Workspace workspace(stream, quantize_scratch_bytes(q), counts);
    static_assert(kCounters * sizeof(uint32_t) <= Workspace::kZeroBytes);
    static_assert(kZeros * sizeof(uint32_t) == Workspace::kTurnBytes);
    q.scratch = workspace.pointer;
    q.counters = static_cast<uint32_t*>(workspace.zeros);
    if (takes_zeros(q)) {
      const auto [zeros, next] = workspace.turn();
      q.zeros = static_cast<uint32_t*>(zeros);
      q.next_zeros = static_cast<uint32_t*>(next);
    }
    const cudaError_t status = quantize(q, stream);
    if (status != cudaSuccess) workspace.clear_turns(stream);
    check_cuda(status, "quantize");
  }

  const int64_t cols, rows;
  Quantize q{};

 private:
  Tensor input_;
};

// Run it, with memory for what it returns. The scales have these shapes; one without elements is
// not wanted, and `scale_inv` belongs to both copies if `shared`.
Quantized finish(Quantising& quantising, const Copies& copies, at::IntArrayRef scale_sizes,
                 at::IntArrayRef scale_t_sizes, bool shared, c10::Device device) {
  using Sizes = std::array<int64_t, 2>;
  const ScalarType dtype = copies.dtype;
  const bool row_major = copies.row_major, transposed = copies.transposed;
  const int64_t rows = padded(quantising.rows), cols = padded(quantising.cols);
  const Sizes nothing{0, 0}, sizes = row_major ? Sizes{rows, cols} : nothing,
                             sizes_t = transposed ? Sizes{cols, rows} : nothing;
  constexpr auto kScale = ScalarType::Float;
  Quantized result;
  if (copies.memory == Memory::kApart) {
    result = {empty(sizes, dtype, device), empty(sizes_t, dtype, device),
              empty(scale_sizes, kScale, device), empty(scale_t_sizes, kScale, device), Tensor()};
  } else {
    const bool scale_with_t =
        shared && transposed && (!row_major || copies.memory == Memory::kScaleWithDataT);
    const auto bytes = [](at::IntArrayRef sizes, ScalarType type) {
      return Block::bytes_of(c10::multiply_integers(sizes), type);
    };
    const size_t scale_bytes = bytes(scale_sizes, kScale);
    Block with_data(bytes(sizes, dtype) + (scale_with_t ? 0 : scale_bytes), device);
    Block with_data_t(bytes(sizes_t, dtype) + bytes(scale_t_sizes, kScale) +
                          (scale_with_t ? scale_bytes : 0),
                      device);
    result.data = with_data.take(sizes, dtype);
    result.data_t = with_data_t.take(sizes_t, dtype);
    result.scale_inv = (scale_with_t ? with_data_t : with_data).take(scale_sizes, kScale);
    result.scale_inv_t = with_data_t.take(scale_t_sizes, kScale);
  }
  if (copies.sums_dtype.has_value()) {
    result.sums = quantising.sums(*copies.sums_dtype);
  } else if (copies.memory == Memory::kApart) {
    result.sums = empty({0}, kScale, device);
  }
  const auto scales = [](Tensor& t) {
    return t.numel() > 0 ? t.mutable_data_ptr<float>() : nullptr;
  };
  Quantize& q = quantising.q;
  q.data = row_major ? result.data.mutable_data_ptr() : nullptr;
  q.data_t = transposed ? result.data_t.mutable_data_ptr() : nullptr;
  q.scale_inv = scales(result.scale_inv);
  q.scale_inv_t = scales(result.scale_inv_t);
  q.scale_count = result.scale_inv.numel();
  quantising.run();
  return result;
}

// One number for each row or column of x, which is folded into it.
const float* fold(const char* name, const Tensor& t, int64_t count, const Tensor& x) {
  if (!t.defined()) return nullptr;
  TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 1 && t.is_contiguous() &&
                  t.numel() >= padded(count) && t.device() == x.device(),
              "fp8lt: want ", name, " [", padded(count), "], contiguous, float32 on ", x.device(),
              ", got ", t.sizes(), " ", t.scalar_type(), " on ", t.device());
  return t.const_data_ptr<float>();
}

// With one scale for the tensor, by a history if that has a state.
Quantized quantize_one_scale(const Tensor& x, const Copies& copies, const History& history) {
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, copies);
  quantising.q.scaling = Scaling::kTensorwise;
  quantising.q.history = history;
  const int64_t scales = std::max({padded(quantising.rows), padded(quantising.cols), kPad});
  constexpr bool kShared = true;
  Quantized result = finish(quantising, copies, {scales}, {0}, kShared, x.device());
  result.scale_inv_t = result.scale_inv;
  return result;
}

void check_matrix(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "fp8lt: want x [R, C], got ", x.sizes());
}

Tensors4 one_scale(Quantized q) {
  return {std::move(q.data), std::move(q.data_t), std::move(q.scale_inv), std::move(q.sums)};
}

Tensors5 two_scales(Quantized q) {
  return {std::move(q.data), std::move(q.data_t), std::move(q.scale_inv),
          std::move(q.scale_inv_t), std::move(q.sums)};
}

}  // namespace

History history_in(const Tensor& amaxes, int64_t row, c10::Device device, int64_t margin,
                   bool most_recent, bool record) {
  TORCH_CHECK(amaxes.scalar_type() == ScalarType::Float && amaxes.dim() >= 1 &&
                  amaxes.size(-1) >= 3 && (row + 1) * amaxes.size(-1) <= amaxes.numel() &&
                  amaxes.is_contiguous() && amaxes.device() == device,
              "fp8lt: want state [..., H + 2], H at least 1, contiguous, float32 on ", device,
              ", got ", amaxes.sizes(), " ", amaxes.scalar_type(), " on ", amaxes.device());
  const int64_t width = amaxes.size(-1);
  return {amaxes.mutable_data_ptr<float>() + row * width, width - 2, static_cast<int>(margin),
          most_recent, record};
}

Quantized quantize_tensorwise_cuda(const Tensor& x, const Copies& copies) {
  return quantize_one_scale(x, copies, {});
}

Quantized quantize_delayed_cuda(const Tensor& x, const Copies& copies, const History& history) {
  return quantize_one_scale(x, copies, history);
}

Quantized quantize_rowwise_cuda(const Tensor& x, const Copies& copies, bool folded,
                                const Tensor& fold_cols, const Tensor& fold_rows) {
  TORCH_CHECK(!folded || (!fold_cols.defined() && !fold_rows.defined()),
              "fp8lt: fold_cols and fold_rows are folded into an x that is not `folded` itself");
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, copies);
  quantising.q.scaling = Scaling::kRowwise;
  quantising.q.folded = folded;
  quantising.q.fold_cols = fold("fold_cols", fold_cols, quantising.cols, x);
  quantising.q.fold_rows = fold("fold_rows", fold_rows, quantising.rows, x);
  const int64_t rows = copies.row_major || folded ? padded(quantising.rows) : 0;
  const int64_t cols = copies.transposed ? padded(quantising.cols) : 0;
  return finish(quantising, copies, {rows}, {cols}, folded, x.device());
}

Quantized quantize_blockwise_cuda(const Tensor& x, const Copies& copies, bool square) {
  const c10::cuda::CUDAGuard guard(x.device());
  Quantising quantising(x, copies);
  quantising.q.scaling = square ? Scaling::k128x128 : Scaling::k1x128;
  using Sizes = std::array<int64_t, 2>;
  const auto sizes = [&](bool wanted, int64_t rows, int64_t cols) {
    if (!wanted) return Sizes{0, 0};
    if (!square) return Sizes{blocks_of(cols), padded(rows)};
    return Sizes{blocks_of(rows), blocks_to_4(cols)};
  };
  constexpr bool kShared = false;
  return finish(quantising, copies, sizes(copies.row_major, quantising.rows, quantising.cols),
                sizes(copies.transposed, quantising.cols, quantising.rows), kShared, x.device());
}

Tensor transposed_cuda(const Tensor& data) {
  TORCH_CHECK(data.dim() == 2 && is_fp8(data.scalar_type()) && data.is_contiguous() &&
                  data.size(0) % kPad == 0 && data.size(1) % kPad == 0,
              "fp8lt: want data [R, C] in an FP8 dtype, contiguous, R and C multiples of ", kPad,
              ", got ", data.sizes(), " ", data.scalar_type());
  const c10::cuda::CUDAGuard guard(data.device());
  const Tensor input = aligned(data);
  Tensor data_t = empty({data.size(1), data.size(0)}, data.scalar_type(), data.device());
  Quantize q{};
  q.data = const_cast<void*>(input.const_data_ptr());
  q.data_t = data_t.mutable_data_ptr();
  q.rows = data.size(0);
  q.cols = data.size(1);
  check_cuda(transpose(q, c10::cuda::getCurrentCUDAStream()), "transpose");
  return data_t;
}

Tensors4 quantize_tensorwise_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                                std::optional<ScalarType> sums_dtype, bool power_of_two) {
  check_matrix(x);
  return one_scale(
      quantize_tensorwise_cuda(x, {dtype, row_major, transposed, sums_dtype, power_of_two}));
}

Tensors4 quantize_delayed_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                             Tensor state, int64_t margin, bool most_recent, bool record,
                             std::optional<ScalarType> sums_dtype, bool power_of_two) {
  check_matrix(x);
  TORCH_CHECK(state.dim() == 1, "fp8lt: want state [H + 2], got ", state.sizes());
  return one_scale(
      quantize_delayed_cuda(x, {dtype, row_major, transposed, sums_dtype, power_of_two},
                            history_in(state, 0, x.device(), margin, most_recent, record)));
}

std::vector<Tensor> quantize_shards_op(at::TensorList shards, ScalarType dtype,
                                       const Tensor& amaxes, bool power_of_two) {
  const auto count = static_cast<int64_t>(shards.size());
  TORCH_CHECK(amaxes.dim() == 2 && amaxes.size(0) == count && amaxes.size(1) == 3,
              "fp8lt: want amaxes [", count, ", 3], one row for each shard, got ", amaxes.sizes());
  Copies rows{dtype, /*row_major=*/true, /*transposed=*/false, std::nullopt, power_of_two};
  rows.memory = Memory::kScaleWithData;
  constexpr bool kMostRecent = false, kRecord = false;
  std::vector<Tensor> data;
  data.reserve(shards.size());
  for (int64_t i = 0; i < count; ++i) {
    check_matrix(shards[i]);
    const History history = history_in(amaxes, i, shards[i].device(), 0, kMostRecent, kRecord);
    data.push_back(quantize_delayed_cuda(shards[i], rows, history).data);
  }
  return data;
}

Tensors5 quantize_rowwise_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                             bool power_of_two, bool folded,
                             const std::optional<Tensor>& fold_cols,
                             const std::optional<Tensor>& fold_rows,
                             std::optional<ScalarType> sums_dtype) {
  check_matrix(x);
  return two_scales(
      quantize_rowwise_cuda(x, {dtype, row_major, transposed, sums_dtype, power_of_two}, folded,
                            fold_cols.value_or(Tensor()), fold_rows.value_or(Tensor())));
}

Tensors5 quantize_blockwise_op(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                               bool power_of_two, bool square,
                               std::optional<ScalarType> sums_dtype) {
  check_matrix(x);
  return two_scales(
      quantize_blockwise_cuda(x, {dtype, row_major, transposed, sums_dtype, power_of_two}, square));
}

Tensor transposed_op(const Tensor& data) { return transposed_cuda(data); }

}  // namespace fp8lt
