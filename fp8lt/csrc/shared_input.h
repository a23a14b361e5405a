// Layers that share an input (queries, keys and values; gate and up) share its FP8 copies, too.
#pragma once

#include <c10/util/FunctionRef.h>

#include "kernels.h"
#include "recipe.h"

namespace fp8lt {

// What `make` makes of `x` for a recipe, where the gradients of x and w are wanted: made now, or by
// the last call if x is the same tensor of the same operation, unchanged as far as autograd counts,
// on the same stream. `made_by` is that operation's number.
//
// x must be an activation, made by an operation that autograd recorded, and saved for backward.
// Then a change of it that autograd does not see makes gradients wrong in PyTorch, too. A tensor
// that a program fills with new inputs again and again has no such promise to keep.
Quantized shared_input(const at::Tensor& x, uint64_t made_by, const Recipe& recipe,
                       c10::function_ref<Quantized()> make);

// Let go of the copies of the last input, which would stay until there is another. Backward does:
// no layer of this forward will come.
void forget_shared_input();

}  // namespace fp8lt
