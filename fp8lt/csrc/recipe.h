// What a layer is told by its recipe; recipe.py explains.
#pragma once

#include <c10/core/ScalarType.h>

#include <utility>

#include "scaling.h"

namespace fp8lt {

struct Recipe {
  enum class Kind : int64_t {  // numbered as recipe.NAMES
    kTensorwise,
    kDelayed,
    kRowwise,
    kRowwiseWithGwHp,
    kRowwiseFolded,
    kBlockwise
  };

  Kind kind;
  at::ScalarType forward_fp8, backward_fp8;
  bool fast_output, fast_grad_input, fast_grad_weight;
  bool recompute_weight, power_of_two;
  int64_t margin;  // these two of kDelayed
  bool most_recent;

  bool is_rowwise() const {
    return kind == Kind::kRowwise || kind == Kind::kRowwiseWithGwHp ||
           kind == Kind::kRowwiseFolded;
  }
  // dw is computed from x itself.
  bool keeps_x() const { return kind == Kind::kRowwiseWithGwHp; }

  // What the scales of both operands of a GEMM belong to; see operands.py.
  using Scalings = std::pair<Scaling, Scaling>;

  Scalings forward_scalings() const {  // of y and of dx
    if (kind == Kind::kBlockwise) return {Scaling::k1x128, Scaling::k128x128};
    return is_rowwise() ? Scalings{Scaling::kRowwise, Scaling::kRowwise}
                        : Scalings{Scaling::kTensorwise, Scaling::kTensorwise};
  }
  Scalings grad_weight_scalings() const {
    if (kind == Kind::kBlockwise) return {Scaling::k1x128, Scaling::k1x128};
    return forward_scalings();
  }
};

}  // namespace fp8lt
