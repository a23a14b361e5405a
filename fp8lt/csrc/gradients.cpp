// gradients.py's operators on CUDA tensors: backward of the layer in one call, for graphs.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <utility>

#include "memory.h"
#include "operands.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;

Columns columns(const OptionalTensor& data_t, const OptionalTensor& scale_inv_t,
                const OptionalTensor& fold) {
  return {data_t.value_or(Tensor()), scale_inv_t.value_or(Tensor()), fold.value_or(Tensor())};
}

// What backward asks of a recipe.
Recipe recipe_of(Recipe::Kind kind, ScalarType backward_fp8, bool fast_grad_input,
                 bool fast_grad_weight, bool power_of_two) {
  Recipe recipe{};
  recipe.kind = kind;
  recipe.backward_fp8 = backward_fp8;
  recipe.fast_grad_input = fast_grad_input;
  recipe.fast_grad_weight = fast_grad_weight;
  recipe.power_of_two = power_of_two;
  return recipe;
}

Tensors3 gradients(const Tensor& dy, const Columns& x, const Columns& w, int64_t k,
                   ScalarType x_dtype, ScalarType w_dtype, std::optional<ScalarType> bias_dtype,
                   const Recipe& recipe, const AmaxHistory& history) {
  TORCH_CHECK(dy.dim() == 2, "fp8lt: want dy [M, N], got ", dy.sizes());
  TORCH_CHECK(x.data_t.defined() == x.scale_inv_t.defined() &&
                  w.data_t.defined() == w.scale_inv_t.defined(),
              "fp8lt: want x_t and x_scale_inv, and w_t and w_scale_inv, both or neither");
  const bool need_x = w.data_t.defined(), need_w = x.data_t.defined();
  constexpr bool kRowsLast = false;
  Quantized q = quantize_dy(dy, recipe, history, need_x, need_w, w.fold, x.fold, bias_dtype,
                            kRowsLast);
  const auto nothing = [&] { return empty({0}, dy.scalar_type(), dy.device()); };
  Tensor dx, dw;
  if (need_x) {
    dx = gemm_nt(q.data, w.data_t, q.scale_inv, w.scale_inv_t, {dy.size(0), k}, std::nullopt,
                 x_dtype, recipe.fast_grad_input, recipe.forward_scalings());
    q.data = q.scale_inv = Tensor();  // before dw; they may share their memory
  }
  if (need_w) {
    dw = gemm_nt(q.data_t, x.data_t, q.scale_inv_t, x.scale_inv_t, {dy.size(1), k}, std::nullopt,
                 w_dtype, recipe.fast_grad_weight, recipe.grad_weight_scalings());
  }
  return {need_x ? std::move(dx) : nothing(), need_w ? std::move(dw) : nothing(),
          bias_dtype.has_value() ? std::move(q.sums) : nothing()};
}

// As gradients.py declares them.
Tensors3 linear_backward(const Tensor& dy, const OptionalTensor& x_t,
                         const OptionalTensor& x_scale_inv, const OptionalTensor& x_fold,
                         const OptionalTensor& w_t, const OptionalTensor& w_scale_inv,
                         const OptionalTensor& w_fold, int64_t recipe, int64_t k,
                         ScalarType x_dtype, ScalarType w_dtype,
                         std::optional<ScalarType> bias_dtype, ScalarType backward_fp8,
                         bool fast_grad_input, bool fast_grad_weight, bool power_of_two) {
  constexpr auto kDelayed = static_cast<int64_t>(Recipe::Kind::kDelayed);
  constexpr auto kLast = static_cast<int64_t>(Recipe::Kind::kBlockwise);
  TORCH_CHECK(recipe >= 0 && recipe <= kLast && recipe != kDelayed,
              "fp8lt: want recipe in 0 ... ", kLast, ", not ", kDelayed, ", got ", recipe);
  const Recipe made =
      recipe_of(static_cast<Recipe::Kind>(recipe), backward_fp8, fast_grad_input, fast_grad_weight, power_of_two);
  return gradients(dy, columns(x_t, x_scale_inv, x_fold), columns(w_t, w_scale_inv, w_fold), k,
                   x_dtype, w_dtype, bias_dtype, made, {});
}

Tensors3 linear_backward_delayed(const Tensor& dy, const OptionalTensor& x_t,
                                 const OptionalTensor& x_scale_inv, const OptionalTensor& x_fold,
                                 const OptionalTensor& w_t, const OptionalTensor& w_scale_inv,
                                 const OptionalTensor& w_fold, Tensor state, int64_t margin,
                                 bool most_recent, int64_t k, ScalarType x_dtype,
                                 ScalarType w_dtype, std::optional<ScalarType> bias_dtype,
                                 ScalarType backward_fp8, bool fast_grad_input,
                                 bool fast_grad_weight, bool power_of_two) {
  Recipe made =
      recipe_of(Recipe::Kind::kDelayed, backward_fp8, fast_grad_input, fast_grad_weight, power_of_two);
  made.margin = margin;
  made.most_recent = most_recent;
  TORCH_CHECK(state.dim() == 1, "fp8lt: want state [H + 2], got ", state.sizes());
  constexpr int64_t kRow = 0;
  constexpr bool kRecord = true;
  return gradients(dy, columns(x_t, x_scale_inv, x_fold), columns(w_t, w_scale_inv, w_fold), k,
                   x_dtype, w_dtype, bias_dtype, made, {std::move(state), kRow, kRecord});
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) {
  m.impl("linear_backward", TORCH_FN(linear_backward));
  m.impl("linear_backward_delayed", TORCH_FN(linear_backward_delayed));
}

}  // namespace fp8lt
