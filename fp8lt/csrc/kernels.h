// The operators on CUDA tensors, for C++: as from Python, less what only the operators' contract
// asks for. Allocations are what costs a host most after launches, so those that may share, share.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "scaling.h"

namespace fp8lt {

using Quantized = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;  // see ops.Quantized

enum class Memory {
  kApart,          // an allocation for each output, as an operator must have
  kScaleWithData,  // scale_inv with data, which is freed last; where there is one copy, with that
  kScaleWithDataT
};

inline bool is_fp8(at::ScalarType type) {
  return type == at::ScalarType::Float8_e4m3fn || type == at::ScalarType::Float8_e5m2;
}
inline bool is_real(at::ScalarType type) {
  return type == at::ScalarType::Float || type == at::ScalarType::Half ||
         type == at::ScalarType::BFloat16;
}

// `x` [..., C]: its leading dimensions are rows. See ops.quantize_tensorwise.
Quantized quantize_tensorwise_cuda(const at::Tensor& x, at::ScalarType dtype, bool row_major,
                                   bool transposed, std::optional<at::ScalarType> sums_dtype,
                                   bool power_of_two, Memory memory);

// The result has these `sizes`, [..., n], of m rows altogether. See ops.gemm_nt.
at::Tensor gemm_nt_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                        const at::Tensor& b_scale_inv, at::IntArrayRef sizes,
                        const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                        bool fast_accum, Scaling a_scaling = Scaling::kTensorwise,
                        Scaling b_scaling = Scaling::kTensorwise);

}  // namespace fp8lt
