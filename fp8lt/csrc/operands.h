// operands.py once more: how each recipe quantises x, w and dy, and its GEMMs. The operators are
// called without the dispatcher where nobody would hear of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels.h"
#include "recipe.h"

namespace fp8lt {

// The amaxes that give one role its scale, and whether its own enters: a row of a tensor
// [..., H + 2]. Without one for recipes that have no history.
struct AmaxHistory {
  at::Tensor amaxes;
  int64_t row = 0;
  bool record = false;
};

// What backward needs of x or w: its columns, and their scales or those for dy to take over.
struct Columns {
  at::Tensor data_t, scale_inv_t, fold;
};

// `x` [..., K]: its rows for y and, `transposed`, its columns for dw. See shared_input.h for
// `made_by`.
Quantized quantize_x(const at::Tensor& x, const Recipe& recipe, const AmaxHistory& history,
                     bool transposed, std::optional<uint64_t> made_by);

// `w` [N, K]: its rows for y and, `transposed`, its columns for dx.
Quantized quantize_w(const at::Tensor& w, const Recipe& recipe, const AmaxHistory& history,
                     bool transposed);

// `dy` [..., N]: its rows for dx, its columns for dw. A scale of both is freed last with
// `rows_last` or with the columns.
Quantized quantize_dy(const at::Tensor& dy, const Recipe& recipe, const AmaxHistory& history,
                      bool row_major, bool transposed, const at::Tensor& fold_cols,
                      const at::Tensor& fold_rows, std::optional<at::ScalarType> sums_dtype,
                      bool rows_last);

Columns columns_of(Quantized q, const Recipe& recipe);
Columns columns_of_w(const at::Tensor& w, const Recipe& recipe, const AmaxHistory& history);

// See ops.transposed.
at::Tensor transposed(const at::Tensor& data);

// See ops.gemm_nt; the result has these `sizes`, [..., n].
at::Tensor gemm_nt(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                   const at::Tensor& b_scale_inv, at::IntArrayRef sizes,
                   const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                   bool fast_accum, Recipe::Scalings scalings);

// See ops.gemm_nt_add.
void gemm_nt_add(const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale_inv,
                 const at::Tensor& b_scale_inv, const at::Tensor& d, bool fast_accum,
                 Recipe::Scalings scalings);

// `dy` [..., N] and `x` [..., K] as they are: [N, K].
at::Tensor grad_weight_in_high_precision(const at::Tensor& dy, const at::Tensor& x,
                                         at::ScalarType dtype);

}  // namespace fp8lt
