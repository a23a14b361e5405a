"""The quantised weight of a layer in `reuse_weights`."""

import torch
from torch import Tensor

from .linear import quantize_weight
from .ops import Quantized
from .recipe import Recipe
from .state import DelayedState


class WeightCache:
    """A weight in FP8, as long as it is the same weight."""

    # One attribute, so that threads see all of it or none. It holds the weight itself: the address
    # of one that is computed for each call (a parametrization) would soon be another's.
    _held: tuple[Tensor, tuple[object, ...], Quantized] | None = None

    def get(
        self, weight: Tensor, recipe: Recipe, transposed: bool, state: DelayedState | None
    ) -> Quantized | None:
        """Return `weight` quantised, or None where that must not be kept.

        Not where a change of it could not be seen, nor while a CUDA graph is captured: its memory
        is the graph's. What another stream quantised may not be ready on this one.
        """
        if weight.is_inference() or weight.is_meta:
            return None
        stream = 0
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            # torch.cuda.current_stream makes an object, which takes as long as a kernel launch.
            stream = torch._C._cuda_getCurrentRawStream(weight.get_device())
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.shape, stream, recipe)
        if self._held is not None:
            of_weight, of_key, held = self._held
            complete = not transposed or bool(held.data_t.numel())
            if of_weight is weight and of_key == key and complete:
                return held
        quantized = quantize_weight(weight, recipe=recipe, transposed=transposed, state=state)
        self._held = (weight, key, quantized)
        return quantized
