#include "operands.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <tuple>
#include <utility>

#include "dispatch.h"
#include "operators.h"
#include "shared_input.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;
using Kind = Recipe::Kind;

template <typename Signature>
auto operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor matrix(const Tensor& x) {
  return x.reshape({c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1), x.size(-1)});
}

Quantized from(Tensors4 t) {
  auto& [data, data_t, scale_inv, sums] = t;
  return {std::move(data), std::move(data_t), scale_inv, scale_inv, std::move(sums)};
}

Quantized from(Tensors5 t) {
  auto& [data, data_t, scale_inv, scale_inv_t, sums] = t;
  return {std::move(data), std::move(data_t), std::move(scale_inv), std::move(scale_inv_t),
          std::move(sums)};
}

std::optional<Tensor> optional(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

Quantized tensorwise(const Tensor& x, const Copies& c) {
  if (is_direct(x)) return quantize_tensorwise_cuda(x, c);
  static const auto op =
      operator_named<decltype(quantize_tensorwise_op)>("fp8lt::quantize_tensorwise");
  return from(
      op.call(matrix(x), c.dtype, c.row_major, c.transposed, c.sums_dtype, c.power_of_two));
}

Quantized delayed(const Tensor& x, const Copies& c, const AmaxHistory& history,
                  const Recipe& recipe) {
  const bool most_recent = recipe.most_recent, record = history.record;
  if (is_direct(x, history.amaxes)) {
    return quantize_delayed_cuda(x, c, history_in(history.amaxes, history.row, x.device(),
                                                  recipe.margin, most_recent, record));
  }
  static const auto op = operator_named<decltype(quantize_delayed_op)>("fp8lt::quantize_delayed");
  const Tensor state =
      history.amaxes.dim() == 1 ? history.amaxes : history.amaxes.select(0, history.row);
  return from(op.call(matrix(x), c.dtype, c.row_major, c.transposed, state, recipe.margin,
                      most_recent, record, c.sums_dtype, c.power_of_two));
}

Quantized rowwise(const Tensor& x, const Copies& c, bool folded, const Tensor& fold_cols = {},
                  const Tensor& fold_rows = {}) {
  if (is_direct(x, fold_cols.defined() ? fold_cols : x, fold_rows.defined() ? fold_rows : x)) {
    return quantize_rowwise_cuda(x, c, folded, fold_cols, fold_rows);
  }
  static const auto op = operator_named<decltype(quantize_rowwise_op)>("fp8lt::quantize_rowwise");
  return from(op.call(matrix(x), c.dtype, c.row_major, c.transposed, c.power_of_two, folded,
                      optional(fold_cols), optional(fold_rows), c.sums_dtype));
}

Quantized blockwise(const Tensor& x, const Copies& c, bool square) {
  if (is_direct(x)) return quantize_blockwise_cuda(x, c, square);
  static const auto op =
      operator_named<decltype(quantize_blockwise_op)>("fp8lt::quantize_blockwise");
  return from(op.call(matrix(x), c.dtype, c.row_major, c.transposed, c.power_of_two, square,
                      c.sums_dtype));
}

// x or, `square`, w.
Quantized quantize_forward(const Tensor& t, const Recipe& recipe, const AmaxHistory& history,
                           bool row_major, bool transposed, bool square) {
  const Copies copies{recipe.forward_fp8, row_major,           transposed,
                      std::nullopt,       recipe.power_of_two, Memory::kScaleWithDataT};
  switch (recipe.kind) {
    case Kind::kTensorwise:
      if (!history.amaxes.defined()) return tensorwise(t, copies);
      [[fallthrough]];
    case Kind::kDelayed: return delayed(t, copies, history, recipe);
    case Kind::kBlockwise: return blockwise(t, copies, square);
    default: return rowwise(t, copies, recipe.kind == Kind::kRowwiseFolded);
  }
}

Quantized columns_under_one_scale(const Tensor& w, const Recipe& recipe) {
  constexpr bool kRowMajor = false, kTransposed = true;
  return tensorwise(w, {recipe.forward_fp8, kRowMajor, kTransposed, std::nullopt,
                        recipe.power_of_two, Memory::kScaleWithDataT});
}

}  // namespace

Quantized quantize_x(const Tensor& x, const Recipe& recipe, const AmaxHistory& history,
                     bool transposed, std::optional<uint64_t> made_by) {
  constexpr bool kRowMajor = true, kSquare = false;
  const auto make = [&] {
    return quantize_forward(x, recipe, history, kRowMajor, transposed, kSquare);
  };
  // The scale of a history belongs to one layer.
  const bool shares = made_by.has_value() && recipe.kind != Kind::kDelayed && is_direct(x);
  return shares ? shared_input(x, *made_by, recipe, make) : make();
}

Quantized quantize_w(const Tensor& w, const Recipe& recipe, const AmaxHistory& history,
                     bool transposed) {
  constexpr bool kRowMajor = true, kSquare = true;
  if (!recipe.keeps_x()) {
    return quantize_forward(w, recipe, history, kRowMajor, transposed, kSquare);
  }
  Quantized q = quantize_forward(w, recipe, history, kRowMajor, false, kSquare);
  if (transposed) {
    Quantized columns = columns_under_one_scale(w, recipe);
    q.data_t = std::move(columns.data_t);
    q.scale_inv_t = std::move(columns.scale_inv_t);
  }
  return q;
}

Quantized quantize_dy(const Tensor& dy, const Recipe& recipe, const AmaxHistory& history,
                      bool row_major, bool transposed, const Tensor& fold_cols,
                      const Tensor& fold_rows, std::optional<ScalarType> sums_dtype,
                      bool rows_last) {
  const Copies copies{recipe.backward_fp8, row_major, transposed, sums_dtype, recipe.power_of_two,
                      rows_last ? Memory::kScaleWithData : Memory::kScaleWithDataT};
  constexpr bool kFolded = false, kSquare = false;
  switch (recipe.kind) {
    case Kind::kTensorwise: return tensorwise(dy, copies);
    case Kind::kDelayed: return delayed(dy, copies, history, recipe);
    case Kind::kBlockwise: return blockwise(dy, copies, kSquare);
    default: return rowwise(dy, copies, kFolded, fold_cols, fold_rows);
  }
}

Columns columns_of(Quantized q, const Recipe& recipe) {
  const bool folded = recipe.kind == Kind::kRowwiseFolded;
  return {std::move(q.data_t), std::move(q.scale_inv_t),
          folded ? std::move(q.scale_inv) : Tensor()};
}

Columns columns_of_w(const Tensor& w, const Recipe& recipe, const AmaxHistory& history) {
  constexpr bool kRowMajor = false, kTransposed = true, kSquare = true;
  Quantized q = recipe.keeps_x()
                    ? columns_under_one_scale(w, recipe)
                    : quantize_forward(w, recipe, history, kRowMajor, kTransposed, kSquare);
  return columns_of(std::move(q), recipe);
}

Tensor transposed(const Tensor& data) {
  if (is_direct(data)) return transposed_cuda(data);
  static const auto op = operator_named<decltype(transposed_op)>("fp8lt::transposed");
  return op.call(data);
}

Tensor gemm_nt(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, at::IntArrayRef sizes, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum, Recipe::Scalings scalings) {
  const auto [a_scaling, b_scaling] = scalings;
  if (is_direct(a, b, bias.has_value() ? *bias : a)) {
    return gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, sizes, bias, out_dtype, fast_accum,
                        a_scaling, b_scaling);
  }
  static const auto op =
      operator_named<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                            c10::SymInt, c10::SymInt, const std::optional<Tensor>&, ScalarType,
                            bool, int64_t, int64_t)>("fp8lt::gemm_nt");
  const int64_t m = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  const Tensor d = op.call(a, b, a_scale_inv, b_scale_inv, m, sizes.back(), bias, out_dtype,
                           fast_accum, static_cast<int64_t>(a_scaling),
                           static_cast<int64_t>(b_scaling));
  // A view would forbid to change the result in place.
  return sizes.size() == 2 ? d : at::_unsafe_view(d, sizes);
}

void gemm_nt_add(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
                 const Tensor& b_scale_inv, const Tensor& d, bool fast_accum,
                 Recipe::Scalings scalings) {
  const auto [a_scaling, b_scaling] = scalings;
  if (is_direct(a, b, d)) {
    return gemm_nt_add_cuda(a, b, a_scale_inv, b_scale_inv, d, fast_accum, a_scaling, b_scaling);
  }
  static const auto op = operator_named<decltype(gemm_nt_add_op)>("fp8lt::gemm_nt_add");
  op.call(a, b, a_scale_inv, b_scale_inv, d, fast_accum, static_cast<int64_t>(a_scaling),
          static_cast<int64_t>(b_scaling));
}

Tensor grad_weight_in_high_precision(const Tensor& dy, const Tensor& x, ScalarType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard whatever_autocast_says(c10::autocast_dispatch_keyset);
  const ScalarType factors = c10::promoteTypes(dy.scalar_type(), x.scalar_type());
  const Tensor dy_t = matrix(dy).t(), x_2d = matrix(x);
  // A 16-bit product would round what is wanted in f32.
  const bool wide = dtype == ScalarType::Float && factors != dtype;
  if (wide && dy.is_cuda()) return at::mm(dy_t.to(factors), x_2d.to(factors), dtype);
  const ScalarType common = wide ? dtype : factors;
  return at::mm(dy_t.to(common), x_2d.to(common)).to(dtype);
}

}  // namespace fp8lt
