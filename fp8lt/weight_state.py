"""The amax histories of weights that no layer of ours has: those in an `fp8_autocast`."""

import weakref
from collections import OrderedDict
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .recipe import DelayedScaling, Recipe
from .state import DelayedState

_STATES = "_fp8lt_states"  # an attribute of the weight


class _States(dict[tuple[int, ...], DelayedState]):
    """The amax histories of a weight, by length, and of its views, also by place and shape.

    An attribute of the very tensor, since a compiled function can find that. It is not its
    weight's in a copy, and leaves nothing in a file.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weakref.ref(weight)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def state_of(weight: Tensor, recipe: Recipe) -> DelayedState | None:
    """Return the amax histories of a weight, begun if there are none."""
    if not isinstance(recipe, DelayedScaling):
        return None
    # Attention cuts its weight anew for every call.
    owner = weight._base if weight._base is not None else weight
    states = getattr(owner, _STATES, None)
    if not isinstance(states, _States) or states.weight() is not owner:
        states = _States(owner)
        setattr(owner, _STATES, states)
    key: tuple[int, ...] = (recipe.amax_history_len,)
    if owner is not weight:
        key += (int(weight.storage_offset()), *weight.shape)
    state = states.get(key)
    if state is None:
        state = DelayedState(recipe, weight.device)
        if isinstance(state.amaxes, (FakeTensor, FunctionalTensor)):
            raise RuntimeError(_NO_HISTORY)
        states[key] = state
    if state.amaxes.device != weight.device:
        state.amaxes = state.amaxes.to(weight.device)
    return state


def traced_state_of(weight: Tensor, recipe: Recipe) -> DelayedState | None:
    """Return the same where the compiler traces it, which can only find what there is."""
    if not isinstance(recipe, DelayedScaling):
        return None
    states = getattr(weight, _STATES, {})
    state: DelayedState | None = states.get((recipe.amax_history_len,))
    if state is None:
        raise RuntimeError(_NO_HISTORY)
    return state


_NO_HISTORY = (
    "fp8lt: a weight has no amax history yet, and code that is traced cannot begin one: with "
    "recipe 'delayed', run the model once in eager mode inside of fp8_autocast, or convert it"
)
