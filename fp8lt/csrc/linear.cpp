// The autograd function of linear.py once more, for native eager CUDA: the same three GEMMs and the
// same contract, without Python between the operators. On small layers the host is the bottleneck,
// and a Python autograd function alone costs it as much as two thirds of a bf16 layer. It is there
// for the CPU, too, so that a machine without a GPU can compare the two.

#include "linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
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
#include "operands.h"
#include "shared_input.h"

namespace fp8lt {
namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::variable_list;

// One call of the layer.
struct Call {
  Recipe recipe;
  ScalarType out_dtype;
  AmaxHistory x, w, dy;
  bool need_x, need_w;    // their gradients
  bool recompute_weight;  // keep w instead of its columns
  bool transpose_weight;  // keep the rows of w in FP8 instead
  std::optional<uint64_t> x_made_by;
};

struct Forward {
  Tensor y;
  Quantized x, w;  // FP8; transposed where a gradient will need that
};

// y [..., N] = x [..., K] @ w [N, K].T + bias
Forward forward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                std::optional<Quantized> w_quantized, const Call& call) {
  Forward f;
  const Recipe& recipe = call.recipe;
  f.x = quantize_x(x, recipe, call.x, call.need_w && !recipe.keeps_x(), call.x_made_by);
  f.w = w_quantized.has_value()
            ? *std::move(w_quantized)
            : quantize_w(w, recipe, call.w, call.need_x && !call.recompute_weight);
  // As ops._place_bias: in the epilogue where it has a form for it, else after, in f32.
  const bool f32 = call.out_dtype == ScalarType::Float;
  const bool after = bias.has_value() && f32 && bias->scalar_type() != ScalarType::BFloat16;
  std::optional<Tensor> epilogue;
  if (bias.has_value() && !after) epilogue = f32 ? *bias : bias->to(call.out_dtype);
  at::DimVector sizes(x.sizes());
  sizes.back() = w.size(0);
  f.y = gemm_nt(f.x.data, f.w.data, f.x.scale_inv, f.w.scale_inv, sizes, epilogue, call.out_dtype,
                recipe.fast_output, recipe.forward_scalings());
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
                "(fp8lt.disable_fp8, or fp8lt.fp8_autocast(enabled=False))");
  }
};

// `Columns` as autograd keeps them.
struct SavedColumns {
  torch::autograd::SavedVariable data_t, scale_inv_t, fold;

  void keep(const Columns& c) {
    data_t = {c.data_t, false};
    scale_inv_t = {c.scale_inv_t, false};
    if (c.fold.defined()) fold = {c.fold, false};
  }
  Columns unpack() const { return {data_t.unpack(), scale_inv_t.unpack(), fold.unpack()}; }
  void release() {
    for (auto* saved : {&data_t, &scale_inv_t, &fold}) saved->reset_data();
  }
};

// What autograd calls for the gradients of x, w and bias. A node of its own, since a
// torch::autograd::Function keeps its state in a dictionary, which costs twice the time.
struct LinearBackward : torch::autograd::Node {
  // Those that are needed: columns, or x or the weight itself.
  SavedColumns x_columns, w_columns;
  torch::autograd::SavedVariable x, weight;
  MainGrad main_grad;
  Recipe recipe;
  bool recompute_weight, transpose_weight;
  AmaxHistory history_of_w, history_of_dy;
  at::DimVector x_sizes;
  int64_t n;
  ScalarType x_dtype, w_dtype, bias_dtype;

  LinearBackward(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                 const Call& call)
      : Node(torch::autograd::collect_next_edges(x, w, bias)),
        recipe(call.recipe),
        recompute_weight(call.recompute_weight),
        transpose_weight(call.transpose_weight),
        history_of_dy(call.dy),
        x_sizes(x.sizes()),
        n(w.size(0)),
        x_dtype(x.scalar_type()),
        w_dtype(w.scalar_type()),
        bias_dtype(bias.has_value() ? bias->scalar_type() : ScalarType::Undefined) {}

  std::string name() const override { return "fp8lt::LinearBackward"; }

  void save(Forward f, const Tensor& x, const Tensor& w, const Call& call) {
    if (call.need_w && recipe.keeps_x()) {
      this->x = {x, false};
    } else if (call.need_w) {
      x_columns.keep(columns_of(std::move(f.x), recipe));
    }
    if (call.need_x && recompute_weight) {
      weight = {w, false};
    } else if (call.need_x && transpose_weight) {
      w_columns.keep({std::move(f.w.data), std::move(f.w.scale_inv), {}});
    } else if (call.need_x) {
      w_columns.keep(columns_of(std::move(f.w), recipe));
    }
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

  void release() {
    for (auto* columns : {&x_columns, &w_columns}) columns->release();
    for (auto* saved : {&x, &weight}) saved->reset_data();
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
    Columns x_columns, w_columns;
    Tensor x, weight;
  };

  Saved unpack(const Wanted& wanted) const {
    Saved saved;
    if (wanted.dw && recipe.keeps_x()) {
      saved.x = x.unpack();
    } else if (wanted.dw) {
      saved.x_columns = x_columns.unpack();
    }
    if (wanted.dx && recompute_weight) {
      saved.weight = weight.unpack();
    } else if (wanted.dx) {
      saved.w_columns = w_columns.unpack();
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
    const int64_t w_t_early = recompute_weight && !needs_w_columns_first() ? 0 : w_t;
    return std::max(dw + 2 * dy + x_t + w_t_early, dw + dx + dy + w_t) <
           std::max(dx + 2 * dy + x_t + w_t, dx + dw + dy + x_t);
  }

  // Folded, dy takes over the scales of w's columns.
  bool needs_w_columns_first() const { return recipe.kind == Recipe::Kind::kRowwiseFolded; }

  variable_list gradients_of(Tensor dy, const Wanted& wanted, Saved saved) const {
    Tensor dx, dw, db;
    Quantized q;
    const bool columns_of_dy = wanted.dw && !recipe.keeps_x();
    const bool dw_first = wanted.dx && columns_of_dy && grad_weight_first();
    if (wanted.dx && recompute_weight && needs_w_columns_first()) {
      saved.w_columns = columns_of_w(saved.weight, recipe, history_of_w);
    }
    if (wanted.dx || columns_of_dy) {
      q = quantize_dy(dy, recipe, history_of_dy, wanted.dx, columns_of_dy, saved.w_columns.fold,
                      saved.x_columns.fold,
                      wanted.db ? std::optional<ScalarType>(bias_dtype) : std::nullopt, dw_first);
      if (wanted.db) db = q.sums;
    } else if (wanted.db) {
      db = at::sum(dy.reshape({tokens(), n}), {0}, false, ScalarType::Float).to(bias_dtype);
    }
    if (!wanted.dw || columns_of_dy) dy = Tensor();  // often the last to hold it
    if (dw_first) dw = grad_weight(q, saved);
    if (wanted.dx) dx = grad_input(q, saved);
    if (columns_of_dy && !dw_first) dw = grad_weight(q, saved);
    if (wanted.dw && !columns_of_dy) dw = grad_weight_in_high_precision(dy, saved.x);
    return {dx, dw, db};
  }

  // dx [..., K] = dy [M, N] @ w [N, K]. Takes its operands out of `dy` and `saved`.
  Tensor grad_input(Quantized& dy, Saved& saved) const {
    const Tensor data = std::move(dy.data), scale_inv = std::move(dy.scale_inv);
    Columns w = saved.w_columns.data_t.defined()
                    ? std::move(saved.w_columns)
                    : columns_of_w(saved.weight, recipe, history_of_w);
    if (transpose_weight) w.data_t = transposed(w.data_t);
    return gemm_nt(data, w.data_t, scale_inv, w.scale_inv_t, x_sizes, std::nullopt, x_dtype,
                   recipe.fast_grad_input, recipe.forward_scalings());
  }

  // dw [N, K] = dy [M, N].T @ x [M, K]. Takes its operands out of `dy` and `saved`.
  Tensor grad_weight(Quantized& dy, Saved& saved) const {
    const Tensor data_t = std::move(dy.data_t), scale_inv_t = std::move(dy.scale_inv_t);
    const Columns x = std::move(saved.x_columns);
    if (main_grad.sum.defined()) {
      gemm_nt_add(data_t, x.data_t, scale_inv_t, x.scale_inv_t, main_grad.sum,
                  recipe.fast_grad_weight, recipe.grad_weight_scalings());
      return in_place_of_dw();
    }
    return gemm_nt(data_t, x.data_t, scale_inv_t, x.scale_inv_t, {n, x_sizes.back()},
                   std::nullopt, w_dtype, recipe.fast_grad_weight, recipe.grad_weight_scalings());
  }

  Tensor grad_weight_in_high_precision(const Tensor& dy, const Tensor& x) const {
    if (!main_grad.sum.defined()) return fp8lt::grad_weight_in_high_precision(dy, x, w_dtype);
    main_grad.sum.add_(fp8lt::grad_weight_in_high_precision(dy, x, ScalarType::Float));
    return in_place_of_dw();
  }

  // Something for hooks that wait for a gradient, where they are told of.
  Tensor in_place_of_dw() const {
    if (main_grad.returns == MainGrad::Returns::kNothing) return {};
    const auto options = main_grad.sum.options().dtype(w_dtype);
    Tensor dw = at::empty({n, x_sizes.back()}, options);
    return main_grad.returns == MainGrad::Returns::kZeros ? dw.zero_() : dw;
  }
};

// A history for the scale that w gets in this call, and once more in backward.
AmaxHistory keep_scale_of_w(const Tensor& w, Call& call) {
  if (call.recipe.kind == Recipe::Kind::kTensorwise) {
    call.w = {at::zeros({3}, w.options().dtype(ScalarType::Float)), 0, true};  // of one amax
    return {call.w.amaxes, 0, false};
  }
  return call.w.record ? AmaxHistory{call.w.amaxes.clone(), call.w.row, false} : call.w;
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
              std::optional<Quantized> w_quantized, MainGrad main_grad, const Histories& histories,
              const Recipe& recipe, ScalarType out_dtype) {
  TORCH_CHECK(x.dim() >= 1 && w.dim() == 2 && x.size(-1) == w.size(1),
              "fp8lt: want x [..., K] and w [N, K], got ", x.sizes(), " and ", w.sizes());
  TORCH_CHECK((recipe.kind == Recipe::Kind::kDelayed) == histories.amaxes.defined(),
              "fp8lt: want amaxes with recipe delayed alone");
  const bool record = at::GradMode::is_enabled();
  Call call{recipe,
            out_dtype,
            {histories.scaled_by, 0, histories.record},
            {histories.scaled_by, 1, histories.record},
            {histories.amaxes, 2, true},
            record && x.requires_grad(),
            record && w.requires_grad(),
            recipe.recompute_weight && !w_quantized.has_value(),  // else it is there in FP8
            w_quantized.has_value() && w_quantized->data_t.numel() == 0,
            {}};
  const bool need_bias = record && bias.has_value() && bias->requires_grad();
  // Of an activation that backward keeps, the number of the operation that made it: here, where
  // autograd is on, since it may have to make that operation anew.
  if (call.need_x && call.need_w && !x.is_leaf()) call.x_made_by = x.grad_fn()->sequence_nr();
  AmaxHistory history_of_w = call.w;
  Forward f;
  {
    const at::AutoDispatchBelowAutograd below;
    if (call.need_x && call.recompute_weight) history_of_w = keep_scale_of_w(w, call);
    f = forward(x, w, bias, std::move(w_quantized), call);
  }
  Tensor y = f.y;
  if (call.need_x || call.need_w || need_bias) {
    const auto node = make_node<LinearBackward>(x, w, bias, call);
    auto& backward = static_cast<LinearBackward&>(*node);
    backward.history_of_w = std::move(history_of_w);
    backward.main_grad = std::move(main_grad);
    backward.save(std::move(f), x, w, call);
    torch::autograd::set_history(y, node);
  }
  return y;
}

namespace {

std::optional<Quantized> quantized(const std::optional<Tensor>& data,
                                   const std::optional<Tensor>& data_t,
                                   const std::optional<Tensor>& scale_inv,
                                   const std::optional<Tensor>& scale_inv_t) {
  if (!data.has_value()) return std::nullopt;
  return Quantized{*data, data_t.value(), scale_inv.value(), scale_inv_t.value(), Tensor()};
}

MainGrad main_grad_of(const std::optional<Tensor>& sum, int64_t returns) {
  return {sum.value_or(Tensor()), static_cast<MainGrad::Returns>(returns)};
}

// As schemas.py declares them: what changes nothing in forward, and what does.
Tensor linear_op(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                 const std::optional<Tensor>& w_data, const std::optional<Tensor>& w_data_t,
                 const std::optional<Tensor>& w_scale_inv,
                 const std::optional<Tensor>& w_scale_inv_t,
                 const std::optional<Tensor>& main_grad, int64_t returns, int64_t recipe,
                 ScalarType forward_fp8, ScalarType backward_fp8, ScalarType out_dtype,
                 bool fast_output, bool fast_grad_input, bool fast_grad_weight,
                 bool recompute_weight, bool power_of_two) {
  constexpr int64_t kMargin = 0;
  constexpr bool kMostRecent = false;
  return linear(x, w, bias, quantized(w_data, w_data_t, w_scale_inv, w_scale_inv_t),
                main_grad_of(main_grad, returns), {},
                {static_cast<Recipe::Kind>(recipe), forward_fp8, backward_fp8, fast_output,
                 fast_grad_input, fast_grad_weight, recompute_weight, power_of_two, kMargin,
                 kMostRecent},
                out_dtype);
}

Tensor linear_delayed_op(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& w_data,
                         const std::optional<Tensor>& w_data_t,
                         const std::optional<Tensor>& w_scale_inv,
                         const std::optional<Tensor>& w_scale_inv_t,
                         const std::optional<Tensor>& main_grad, int64_t returns, Tensor amaxes,
                         Tensor scaled_by, bool record, ScalarType forward_fp8,
                         ScalarType backward_fp8, ScalarType out_dtype, bool fast_output,
                         bool fast_grad_input, bool fast_grad_weight, bool recompute_weight,
                         bool power_of_two, int64_t margin, bool most_recent) {
  return linear(x, w, bias, quantized(w_data, w_data_t, w_scale_inv, w_scale_inv_t),
                main_grad_of(main_grad, returns),
                {std::move(amaxes), std::move(scaled_by), record},
                {Recipe::Kind::kDelayed, forward_fp8, backward_fp8, fast_output, fast_grad_input,
                 fast_grad_weight, recompute_weight, power_of_two, margin, most_recent},
                out_dtype);
}

// In inference mode the autograd keys are off, and the others are called directly.
void implement(torch::Library& library) {
  library.impl("linear", TORCH_FN(linear_op));
  library.impl("linear_delayed", TORCH_FN(linear_delayed_op));
}

}  // namespace

TORCH_LIBRARY_IMPL(fp8lt, AutogradCUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(fp8lt, AutogradCPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(fp8lt, CUDA, m) { implement(m); }
TORCH_LIBRARY_IMPL(fp8lt, CPU, m) { implement(m); }

}  // namespace fp8lt
