// The autograd function of linear.py once more, for native eager CUDA: the same three GEMMs and the
// same contract, without Python between the operators. On small layers the host is the bottleneck,
// and a Python autograd function alone costs it as much as two thirds of a bf16 layer. It is there
// for the CPU, too, so that a machine without a GPU can compare the two.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Quantized = std::tuple<Tensor, Tensor, Tensor>;  // data, data_t, scale_inv

// Through the dispatcher, so that modes, profilers and tests see these operators as from Python.
Quantized quantize(const Tensor& x, ScalarType dtype, bool row_major, bool transposed) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fp8lt::quantize_tensorwise", "")
                             .typed<Quantized(const Tensor&, ScalarType, bool, bool)>();
  return op.call(x, dtype, row_major, transposed);
}

Tensor gemm_nt(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, int64_t m, int64_t n, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fp8lt::gemm_nt", "")
          .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                        c10::SymInt, const std::optional<Tensor>&, ScalarType, bool)>();
  return op.call(a, b, a_scale_inv, b_scale_inv, m, n, bias, out_dtype, fast_accum);
}

struct Options {
  ScalarType forward_fp8, backward_fp8, out_dtype;
  bool fast_output, fast_grad_input, fast_grad_weight;
  std::optional<Quantized> w_quantized;  // w, by somebody who uses it more than once
};

struct Forward {
  Tensor y;
  Quantized x, w;  // FP8; transposed where a gradient will need that
};

// y [..., N] = x [..., K] @ w [N, K].T + bias
Forward forward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                const Options& o, bool need_x, bool need_w) {
  const int64_t k = w.size(1), n = w.size(0);
  const int64_t m = c10::multiply_integers(x.sizes().slice(0, x.dim() - 1));
  Forward f;
  f.x = quantize(x.reshape({m, k}), o.forward_fp8, true, need_w);
  f.w = o.w_quantized ? *o.w_quantized : quantize(w, o.forward_fp8, true, need_x);
  // As ops._place_bias: in the epilogue where it has a form for it, else after, in f32.
  const bool f32 = o.out_dtype == ScalarType::Float;
  const bool after = bias.has_value() && f32 && bias->scalar_type() != ScalarType::BFloat16;
  std::optional<Tensor> epilogue;
  if (bias.has_value() && !after) epilogue = f32 ? *bias : bias->to(o.out_dtype);
  Tensor y = gemm_nt(std::get<0>(f.x), std::get<0>(f.w), std::get<2>(f.x), std::get<2>(f.w), m, n,
                     epilogue, o.out_dtype, o.fast_output);
  if (after) y.add_(*bias);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = n;
  f.y = at::_unsafe_view(y, shape);  // a view would forbid to change the result in place
  return f;
}

// A gradient, unchanged, that cannot be differentiated again.
struct Refuse : torch::autograd::Function<Refuse> {
  static Tensor forward(AutogradContext*, const Tensor& gradient, const Tensor& /*anchor*/) {
    return gradient.view(gradient.sizes());
  }
  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK(false,
                "fp8lt.linear cannot be differentiated twice: backward has only FP8 copies of x "
                "and w. Run the layers of a gradient penalty in high precision "
                "(fp8lt.disable_fp8)");
  }
};

struct Linear : torch::autograd::Function<Linear> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w,
                        const std::optional<Tensor>& bias, const Options& o) {
    const bool need_x = x.requires_grad(), need_w = w.requires_grad();
    Forward f = fp8lt::forward(x, w, bias, o, need_x, need_w);
    const auto keep = [](bool needed, const Quantized& q) {
      return needed ? variable_list{std::get<1>(q), std::get<2>(q)}
                    : variable_list{Tensor(), Tensor()};
    };
    variable_list saved = keep(need_w, f.x);
    for (Tensor& t : keep(need_x, f.w)) saved.push_back(std::move(t));
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["x_shape"] = x.sizes().vec();
    ctx->saved_data["n"] = w.size(0);
    ctx->saved_data["x_dtype"] = x.scalar_type();
    ctx->saved_data["w_dtype"] = w.scalar_type();
    ctx->saved_data["bias_dtype"] = bias.has_value() ? bias->scalar_type() : ScalarType::Undefined;
    ctx->saved_data["backward_fp8"] = o.backward_fp8;
    ctx->saved_data["fast_grad_input"] = o.fast_grad_input;
    ctx->saved_data["fast_grad_weight"] = o.fast_grad_weight;
    return f.y;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const bool twice = at::GradMode::is_enabled();  // with create_graph=True only
    variable_list results = [&] {
      const at::NoGradGuard no_grad;
      return gradients_of(ctx, gradients[0]);
    }();
    if (twice) {  // an error, never a constant, also where dy itself is one
      const Tensor anchor = at::empty({0}).requires_grad_();
      for (Tensor& g : results) {
        if (g.defined()) g = Refuse::apply(g, anchor);
      }
    }
    return results;
  }

  static variable_list gradients_of(AutogradContext* ctx, const Tensor& dy_nd) {
    auto& data = ctx->saved_data;
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<int64_t> x_shape = data["x_shape"].toIntVector();
    const int64_t n = data["n"].toInt(), k = x_shape.back();
    const int64_t m = c10::multiply_integers(x_shape.begin(), x_shape.end() - 1);
    const bool need_x = ctx->needs_input_grad(0), need_w = ctx->needs_input_grad(1);
    const ScalarType bias_dtype = data["bias_dtype"].toScalarType();
    const Tensor dy = dy_nd.reshape({m, n});
    Tensor dx, dw, db;
    Quantized q;
    if (need_x || need_w) q = quantize(dy, data["backward_fp8"].toScalarType(), need_x, need_w);
    if (need_x) {
      dx = gemm_nt(std::get<0>(q), saved[2], std::get<2>(q), saved[3], m, k, std::nullopt,
                   data["x_dtype"].toScalarType(), data["fast_grad_input"].toBool())
               .reshape(x_shape);
    }
    if (need_w) {
      dw = gemm_nt(std::get<1>(q), saved[0], std::get<2>(q), saved[1], n, k, std::nullopt,
                   data["w_dtype"].toScalarType(), data["fast_grad_weight"].toBool());
    }
    if (bias_dtype != ScalarType::Undefined && ctx->needs_input_grad(2)) {
      db = at::sum(dy, {0}, false, ScalarType::Float).to(bias_dtype);
    }
    return {dx, dw, db, Tensor()};
  }
};

std::optional<Quantized> quantized(const std::optional<Tensor>& data,
                                   const std::optional<Tensor>& data_t,
                                   const std::optional<Tensor>& scale_inv) {
  if (!data.has_value()) return std::nullopt;
  return Quantized(*data, data_t.value(), scale_inv.value());
}

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& w_data, const std::optional<Tensor>& w_data_t,
                       const std::optional<Tensor>& w_scale_inv, ScalarType forward_fp8,
                       ScalarType backward_fp8, ScalarType out_dtype, bool fast_output,
                       bool fast_grad_input, bool fast_grad_weight) {
  const Options o{forward_fp8,     backward_fp8,     out_dtype,  fast_output,
                  fast_grad_input, fast_grad_weight, quantized(w_data, w_data_t, w_scale_inv)};
  const bool wanted = x.requires_grad() || w.requires_grad() ||
                      (bias.has_value() && bias->requires_grad());
  if (wanted && at::GradMode::is_enabled()) return Linear::apply(x, w, bias, o);
  const at::AutoDispatchBelowAutograd below;
  return forward(x, w, bias, o, false, false).y;
}

}  // namespace

// In inference mode the autograd keys are off, and the others are called directly.
TORCH_LIBRARY_IMPL(fp8lt, AutogradCUDA, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, AutogradCPU, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, CPU, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace fp8lt
