// The operators on CUDA tensors, for C++: as from Python, less what only the operators' contract
// asks for. Allocations are what costs a host most after launches, so those that may share, share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "quantize.h"
#include "scaling.h"

namespace fp8lt {

// See ops.Quantized. A scale for everything is scale_inv_t, too. What was not asked for is empty or
// undefined.
struct Quantized {
  at::Tensor data, data_t, scale_inv, scale_inv_t, sums;
};

// Where scales lie. One that belongs to both copies is with the one that is freed last.
enum class Memory {
  kApart,          // an allocation for each output, as an operator must have
  kScaleWithData,  // with the copy, scale_inv with data
  kScaleWithDataT  // the same, scale_inv with data_t if it belongs to both
};

// What a quantise is asked for.
struct Copies {
  at::ScalarType dtype;
  bool row_major, transposed;
  std::optional<at::ScalarType> sums_dtype;
  bool power_of_two;
  Memory memory = Memory::kApart;
};

inline bool is_fp8(at::ScalarType type) {
  return type == at::ScalarType::Float8_e4m3fn || type == at::ScalarType::Float8_e5m2;
}
inline bool is_real(at::ScalarType type) {
  return type == at::ScalarType::Float || type == at::ScalarType::Half ||
         type == at::ScalarType::BFloat16;
}

// `x` [..., C]: its leading dimensions are rows. See ops.quantize_*.
Quantized quantize_tensorwise_cuda(const at::Tensor& x, const Copies& copies);
Quantized quantize_delayed_cuda(const at::Tensor& x, const Copies& copies, const History& history);
Quantized quantize_rowwise_cuda(const at::Tensor& x, const Copies& copies, bool folded,
                                const at::Tensor& fold_cols, const at::Tensor& fold_rows);
Quantized quantize_blockwise_cuda(const at::Tensor& x, const Copies& copies, bool square);

// See ops.transposed.
at::Tensor transposed_cuda(const at::Tensor& data);

// `amaxes` [..., H + 2] f32 on `device`: its row as it comes, checked.
History history_in(const at::Tensor& amaxes, int64_t row, c10::Device device, int64_t margin,
                   bool most_recent, bool record);

// The result has these `sizes`, [..., n], of m rows altogether. See ops.gemm_nt.
at::Tensor gemm_nt_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                        const at::Tensor& b_scale_inv, at::IntArrayRef sizes,
                        const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                        bool fast_accum, Scaling a_scaling, Scaling b_scaling);

// Added to `d`. See ops.gemm_nt_add.
void gemm_nt_add_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                      const at::Tensor& b_scale_inv, const at::Tensor& d, bool fast_accum,
                      Scaling a_scaling, Scaling b_scaling);

}  // namespace fp8lt
