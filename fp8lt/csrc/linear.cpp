// The autograd function of linear.py once more, for native eager CUDA: the same three GEMMs and the
// same contract, without Python between the operators. On small layers the host is the bottleneck,
// and a Python autograd function alone costs it as much as two thirds of a bf16 layer. It is there
// for the CPU, too, so that a machine without a GPU can compare the two.

#include "linear.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch.h"
#include "kernels.h"
#include "shared_input.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::variable_list;

// Whether the dispatcher would just call the CUDA kernel of an operator. Below autograd.
template <typename... Tensors>
bool is_direct(const Tensors&... tensors) {
  return dispatch_key(tensors...) == c10::DispatchKey::CUDA;
}

// `x` [..., C]
Quantized quantize(const Tensor& x, ScalarType dtype, bool row_major, bool transposed,
                   std::optional<ScalarType> sums_dtype, bool power_of_two, Memory memory) {
  if (is_direct(x)) {
    return quantize_tensorwise_cuda(x, dtype, row_major, transposed, sums_dtype, power_of_two,
                                    memory);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fp8lt::quantize_tensorwise", "")
                             .typed<Quantized(const Tensor&, ScalarType, bool, bool,
                                              std::optional<ScalarType>, bool)>();
  const int64_t rows = c10::multiply_integers(x.sizes().begin(), x.sizes().end() - 1);
  return op.call(x.reshape({rows, x.size(-1)}), dtype, row_major, transposed, sums_dtype,
                 power_of_two);
}

// The result has these `sizes`, [..., n].
Tensor gemm_nt(const Tensor& a, const Tensor& b, const Tensor& a_scale_inv,
               const Tensor& b_scale_inv, at::IntArrayRef sizes, const std::optional<Tensor>& bias,
               ScalarType out_dtype, bool fast_accum) {
  if (is_direct(a, b, bias.has_value() ? *bias : a)) {
    return gemm_nt_cuda(a, b, a_scale_inv, b_scale_inv, sizes, bias, out_dtype, fast_accum);
  }
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fp8lt::gemm_nt", "")
          .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, c10::SymInt,
                        c10::SymInt, const std::optional<Tensor>&, ScalarType, bool, int64_t,
                        int64_t)>();
  const int64_t m = c10::multiply_integers(sizes.begin(), sizes.end() - 1);
  constexpr auto kTensorwise = static_cast<int64_t>(Scaling::kTensorwise);
  const Tensor d = op.call(a, b, a_scale_inv, b_scale_inv, m, sizes.back(), bias, out_dtype,
                           fast_accum, kTensorwise, kTensorwise);
  // A view would forbid to change the result in place.
  return sizes.size() == 2 ? d : at::_unsafe_view(d, sizes);
}

struct Options {
  ScalarType forward_fp8, backward_fp8, out_dtype;
  bool fast_output, fast_grad_input, fast_grad_weight;
  bool recompute_weight;  // keep w instead of w_t
  bool power_of_two;
  std::optional<Quantized> w_quantized;  // w, by somebody who uses it more than once
};

struct Forward {
  Tensor y;
  Quantized x, w;  // FP8; transposed where a gradient will need that
};

// y [..., N] = x [..., K] @ w [N, K].T + bias
Forward forward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                const Options& o, bool need_x, bool need_w, std::optional<uint64_t> x_made_by) {
  Forward f;
  f.x = x_made_by.has_value() && is_direct(x)
            ? quantize_shared_input(x, *x_made_by, o.forward_fp8, o.power_of_two)
            : quantize(x, o.forward_fp8, true, need_w, std::nullopt, o.power_of_two,
                       Memory::kScaleWithDataT);
  f.w = o.w_quantized ? *o.w_quantized
                      : quantize(w, o.forward_fp8, true, need_x && !o.recompute_weight,
                                 std::nullopt, o.power_of_two, Memory::kScaleWithDataT);
  // As ops._place_bias: in the epilogue where it has a form for it, else after, in f32.
  const bool f32 = o.out_dtype == ScalarType::Float;
  const bool after = bias.has_value() && f32 && bias->scalar_type() != ScalarType::BFloat16;
  std::optional<Tensor> epilogue;
  if (bias.has_value() && !after) epilogue = f32 ? *bias : bias->to(o.out_dtype);
  at::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  f.y = gemm_nt(std::get<0>(f.x), std::get<0>(f.w), std::get<2>(f.x), std::get<2>(f.w), sizes,
                epilogue, o.out_dtype, o.fast_output);
  // Who listens may keep the GEMM's result, as a selective checkpoint does.
  if (after) f.y = is_direct(f.y, *bias) ? f.y.add_(*bias) : f.y.add(*bias);
  return f;
}

// PyTorch held its nodes by std::shared_ptr, with a deleter of its own, before it counted in them.
template <typename Node, typename... Args>
decltype(torch::autograd::Edge::function) make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  } else {
    return std::shared_ptr<Node>(new Node(std::forward<Args>(args)...),
                                 [](auto* node) { deleteNode(node); });
  }
}

// The node of a gradient that cannot be differentiated again.
struct Refuse : torch::autograd::Node {
  // The edge leads to nowhere, but without one nobody would call this.
  explicit Refuse(const Tensor& anchor) : Node(torch::autograd::collect_next_edges(anchor)) {}

  std::string name() const override { return "fp8lt::Refuse"; }

  variable_list apply(variable_list&&) override {
    TORCH_CHECK(false,
                "fp8lt.linear cannot be differentiated twice: backward has only FP8 copies of x "
                "and w. Run the layers of a gradient penalty in high precision "
                "(fp8lt.disable_fp8)");
  }
};

// What autograd calls for the gradients of x, w and bias. A node of its own, since a
// torch::autograd::Function keeps its state in a dictionary, which costs twice the time.
struct LinearBackward : torch::autograd::Node {
  // Those that are needed; instead of w_t and its scale it may be the weight itself.
  torch::autograd::SavedVariable x_t, x_scale_inv, w_t, w_scale_inv, weight;
  bool recompute_weight;
  at::DimVector x_sizes;
  int64_t n;
  ScalarType x_dtype, w_dtype, bias_dtype, forward_fp8, backward_fp8;
  bool fast_grad_input, fast_grad_weight, power_of_two;

  LinearBackward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                 const Options& o)
      : Node(torch::autograd::collect_next_edges(x, w, bias)),
        recompute_weight(o.recompute_weight),
        x_sizes(x.sizes()),
        n(w.size(0)),
        x_dtype(x.scalar_type()),
        w_dtype(w.scalar_type()),
        bias_dtype(bias.has_value() ? bias->scalar_type() : ScalarType::Undefined),
        forward_fp8(o.forward_fp8),
        backward_fp8(o.backward_fp8),
        fast_grad_input(o.fast_grad_input),
        fast_grad_weight(o.fast_grad_weight),
        power_of_two(o.power_of_two) {}

  std::string name() const override { return "fp8lt::LinearBackward"; }

  void save(const Forward& f, const Tensor& w, bool need_x, bool need_w) {
    const auto keep = [](const Tensor& t) { return torch::autograd::SavedVariable(t, false); };
    if (need_w) {
      x_t = keep(std::get<1>(f.x));
      x_scale_inv = keep(std::get<2>(f.x));
    }
    if (need_x && recompute_weight) {
      weight = keep(w);
    } else if (need_x) {
      w_t = keep(std::get<1>(f.w));
      w_scale_inv = keep(std::get<2>(f.w));
    }
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  void release() {
    for (auto* saved : {&x_t, &x_scale_inv, &w_t, &w_scale_inv, &weight}) saved->reset_data();
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!gradients[0].defined()) return variable_list(3);
    Wanted wanted;
    wanted.dx = task_should_compute_output(0);
    wanted.dw = task_should_compute_output(1);
    wanted.db = bias_dtype != ScalarType::Undefined && task_should_compute_output(2);
    // Here, where autograd is on: a checkpoint runs its forward once more inside `unpack`.
    Saved saved = unpack(wanted);
    // From here on only `saved` keeps them, and lets each go after its GEMM.
    if (!torch::autograd::get_current_graph_task_keep_graph()) release();
    forget_shared_input();
    variable_list results = [&] {
      const at::AutoDispatchBelowAutograd below;
      return gradients_of(std::move(gradients[0]), wanted, std::move(saved));
    }();
    if (at::GradMode::is_enabled()) {  // with create_graph=True only
      const Tensor anchor = at::empty({0}).requires_grad_();
      for (Tensor& g : results) {  // an error, never a constant, also where dy itself is one
        if (g.defined()) torch::autograd::set_history(g, make_node<Refuse>(anchor));
      }
    }
    return results;
  }

  struct Wanted {
    bool dx, dw, db;
  };

  struct Saved {
    Tensor x_t, x_scale_inv, w_t, w_scale_inv, weight;
  };

  Saved unpack(const Wanted& wanted) const {
    Saved saved;
    if (wanted.dw) {
      saved.x_t = x_t.unpack();
      saved.x_scale_inv = x_scale_inv.unpack();
    }
    if (wanted.dx && recompute_weight) {
      saved.weight = weight.unpack();
    } else if (wanted.dx) {
      saved.w_t = w_t.unpack();
      saved.w_scale_inv = w_scale_inv.unpack();
    }
    return saved;
  }

  int64_t tokens() const {
    return c10::multiply_integers(x_sizes.begin(), x_sizes.end() - 1);
  }

  // Whether the peak is lower with dw before dx. Each GEMM finds what the other left: its result,
  // or operands that are still to be used.
  bool grad_weight_first() const {
    const int64_t m = tokens(), k = x_sizes.back();
    const int64_t dx = m * k * c10::elementSize(x_dtype), dw = n * k * c10::elementSize(w_dtype);
    const int64_t dy = m * n, w_t = n * k, x_t = m * k;  // FP8; of dy there are two copies
    const int64_t w_t_early = recompute_weight ? 0 : w_t;
    return std::max(dw + 2 * dy + x_t + w_t_early, dw + dx + dy + w_t) <
           std::max(dx + 2 * dy + x_t + w_t, dx + dw + dy + x_t);
  }

  variable_list gradients_of(Tensor dy, const Wanted& wanted, Saved saved) const {
    Tensor dx, dw, db;
    Quantized q;
    const bool dw_first = wanted.dx && wanted.dw && grad_weight_first();
    if (wanted.dx || wanted.dw) {
      q = quantize(dy, backward_fp8, wanted.dx, wanted.dw,
                   wanted.db ? std::optional<ScalarType>(bias_dtype) : std::nullopt, power_of_two,
                   dw_first ? Memory::kScaleWithData : Memory::kScaleWithDataT);
      if (wanted.db) db = std::get<3>(q);
      dy = Tensor();  // often the last to hold it
    } else if (wanted.db) {
      db = at::sum(dy.reshape({tokens(), n}), {0}, false, ScalarType::Float).to(bias_dtype);
    }
    if (dw_first) dw = grad_weight(q, saved);
    if (wanted.dx) dx = grad_input(q, saved);
    if (wanted.dw && !dw_first) dw = grad_weight(q, saved);
    return {dx, dw, db};
  }

  // dx [..., K] = dy [M, N] @ w [N, K]. Takes its operands out of `dy` and `saved`.
  Tensor grad_input(Quantized& dy, Saved& saved) const {
    const Tensor data = std::move(std::get<0>(dy));
    Quantized w(Tensor(), std::move(saved.w_t), std::move(saved.w_scale_inv), Tensor());
    if (recompute_weight) {
      w = quantize(saved.weight, forward_fp8, false, true, std::nullopt, power_of_two,
                   Memory::kScaleWithDataT);
    }
    return gemm_nt(data, std::get<1>(w), std::get<2>(dy), std::get<2>(w), x_sizes, std::nullopt,
                   x_dtype, fast_grad_input);
  }

  // dw [N, K] = dy [M, N].T @ x [M, K]. Takes its operands out of `dy` and `saved`.
  Tensor grad_weight(Quantized& dy, Saved& saved) const {
    const Tensor data_t = std::move(std::get<1>(dy));
    const Tensor x_t = std::move(saved.x_t), x_scale_inv = std::move(saved.x_scale_inv);
    return gemm_nt(data_t, x_t, std::get<2>(dy), x_scale_inv, {n, x_sizes.back()},
                   std::nullopt, w_dtype, fast_grad_weight);
  }
};

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& w_data, const std::optional<Tensor>& w_data_t,
              const std::optional<Tensor>& w_scale_inv, ScalarType forward_fp8,
              ScalarType backward_fp8, ScalarType out_dtype, bool fast_output,
              bool fast_grad_input, bool fast_grad_weight, bool recompute_weight,
              bool power_of_two) {
  TORCH_CHECK(x.dim() >= 1 && w.dim() == 2 && x.size(-1) == w.size(1),
              "fp8lt: want x [..., K] and w [N, K], got ", x.sizes(), " and ", w.sizes());
  Options o{forward_fp8,     backward_fp8,     out_dtype,        fast_output,
            fast_grad_input, fast_grad_weight, recompute_weight, power_of_two,
            {}};
  if (w_data.has_value()) {
    o.w_quantized = Quantized(*w_data, w_data_t.value(), w_scale_inv.value(), Tensor());
    o.recompute_weight = false;  // its w_t is there
  }
  const bool record = at::GradMode::is_enabled();
  const bool need_x = record && x.requires_grad(), need_w = record && w.requires_grad();
  const bool need_bias = record && bias.has_value() && bias->requires_grad();
  // Of an activation that backward keeps, the number of the operation that made it: here, where
  // autograd is on, since it may have to make that operation anew.
  std::optional<uint64_t> x_made_by;
  if (need_x && need_w && !x.is_leaf()) x_made_by = x.grad_fn()->sequence_nr();
  Forward f;
  {
    const at::AutoDispatchBelowAutograd below;
    f = forward(x, w, bias, o, need_x, need_w, x_made_by);
  }
  if (need_x || need_w || need_bias) {
    const auto node = make_node<LinearBackward>(x, w, bias, o);
    static_cast<LinearBackward&>(*node).save(f, w, need_x, need_w);
    torch::autograd::set_history(f.y, node);
  }
  return f.y;
}

// In inference mode the autograd keys are off, and the others are called directly.
TORCH_LIBRARY_IMPL(fp8lt, AutogradCUDA, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, AutogradCPU, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(fp8lt, CPU, m) { m.impl("linear", TORCH_FN(linear)); }

}  // namespace fp8lt
