// The layer as one call.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels.h"
#include "recipe.h"

namespace fp8lt {

// What the scales of one call come from, where the recipe has a history; see state.Histories.
struct Histories {
  at::Tensor amaxes, scaled_by;
  bool record = false;
};

// Where dw is added up, if anywhere, and what autograd gets in its place; see main_grad.MainGrad.
struct MainGrad {
  enum class Returns : int64_t { kNothing = 0, kEmpty = 1, kZeros = 2 };

  at::Tensor sum;  // [N, K] f32
  Returns returns = Returns::kNothing;
};

// See ops.linear. With gradients where they are wanted.
at::Tensor linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                  std::optional<Quantized> w_quantized, MainGrad main_grad,
                  const Histories& histories, const Recipe& recipe, at::ScalarType out_dtype);

}  // namespace fp8lt
