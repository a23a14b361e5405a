// The layer as one call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fp8lt {

// See ops.linear. With gradients where they are wanted.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& w_data,
                  const std::optional<at::Tensor>& w_data_t,
                  const std::optional<at::Tensor>& w_scale_inv, at::ScalarType forward_fp8,
                  at::ScalarType backward_fp8, at::ScalarType out_dtype, bool fast_output,
                  bool fast_grad_input, bool fast_grad_weight, bool recompute_weight,
                  bool power_of_two);

}  // namespace fp8lt
