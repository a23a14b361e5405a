"""`fp8_autocast`: the linears of a model that was not converted, in FP8 inside of a context.

A context is a `TorchFunctionMode`: PyTorch shows it the functions that are called while it is
entered, in its thread, and none at any other time. Nothing of PyTorch is replaced for that.

**Rerouted** to `fp8lt.linear`: `F.linear`, and so `nn.Linear` and everything that calls either: the
projections of `nn.MultiheadAttention` and of the transformer layers of `torch.nn`.

**Not rerouted**, and counted by `stats` where they can be seen: other products (`x @ w.t()`,
`torch.addmm`, `F.bilinear`, convolutions, attention itself, `torch.ops.aten.linear`); layers that
are one operator inside (`nn.LSTM`); other dtypes than bf16, f16 and f32; a weight that is no
matrix; tensor subclasses that are dispatched in Python (DTensor); what runs inside of `torch.func`
transforms; `torch.jit.script`; what other threads call.

**Backward** runs in FP8 wherever it is called: forward has decided. What backward itself calls is
not rerouted, even if the context is still entered; but a checkpointed region recomputes what its
first pass computed, whether or not `torch.utils.checkpoint` was called inside of a context.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from .linear import linear
from .ops import REAL_DTYPES
from .recipe import DelayedScaling, Recipe, resolve
from .state import DelayedState

_Function = TypeVar("_Function", bound=Callable[..., Any])
_STATE = "_fp8lt_state"  # of a weight, in a context of recipe "delayed"


class fp8_autocast(TorchFunctionMode):  # named as torch.autocast is
    """Run every `F.linear` in FP8 inside of a `with`, or inside of a decorated function.

    For models that are not converted. Contexts nest, the innermost decides; they end with their
    block, also by an exception, and hold for the thread that entered them. See the module for what
    is rerouted. A call of a PyTorch function takes some 1 us longer inside.

    Args:
        enabled: False leaves linears in high precision, inside of an enabled context, too.
        recipe: as for `linear`. With "delayed" each weight has a `DelayedState` as long as it
            lives, which all its contexts of the same history length share; it is in no checkpoint.
        fp8_format: "hybrid" or "e4m3", in place of the recipe's.

    Raises:
        TypeError: `enabled` is no bool; what is decorated is a generator or a coroutine.
        ValueError: no recipe has that name; the recipe does not have that format.

    Example:
        >>> layer, x = torch.nn.Linear(64, 32), torch.randn(3, 64)
        >>> with fp8lt.fp8_autocast():
        ...     y = layer(x)
        >>> torch.equal(y, fp8lt.linear(x, layer.weight, layer.bias))
        True
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        recipe: str | Recipe = "tensorwise",
        fp8_format: Literal["hybrid", "e4m3"] | None = None,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled: want True or False, got {enabled!r}")
        super().__init__()
        recipe = resolve(recipe)
        if fp8_format is not None:
            recipe = dataclasses.replace(recipe, fp8_format=fp8_format)
        self.enabled, self.recipe = enabled, recipe

    def __enter__(self) -> "fp8_autocast":
        if not torch.compiler.is_compiling():
            _entered.contexts.append(_Entry(self, torch._C._current_graph_task_id()))
            _Regions.watch(+1)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not torch.compiler.is_compiling():
            _entered.contexts.pop()
            _Regions.watch(-1)

    def __call__(self, function: _Function) -> _Function:
        for kind in ("generatorfunction", "asyncgenfunction", "coroutinefunction"):
            if getattr(inspect, f"is{kind}")(function):
                raise TypeError(
                    f"fp8_autocast: want a function to decorate, got the {kind} "
                    f"{function.__qualname__}: it runs after the call has returned"
                )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        if not compiling and _entered.contexts[-1].context is not self:
            return func(*args, **kwargs)  # a context inside of this one has decided
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.multi_head_attention_forward and (compiling or self._why_not_now() is None):
            with self:  # it calls F.linear, but is itself what PyTorch shows
                return _multi_head_attention(*args, **kwargs)
        if func in _OTHER_PRODUCTS:
            _count(f"{_OTHER_PRODUCTS[func]} is not F.linear")
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            if not self.enabled:  # by this name a context outside of this one does not know it
                return torch.ops.aten.linear.default(input, weight, bias)
        else:
            reason = self._why_not_now() or _why_not(input, weight, bias)
            _count(reason)
            if reason is not None:
                return F.linear(input, weight, bias)
        state = _state_of(weight, self.recipe)
        return linear(input, weight, bias, recipe=self.recipe, state=state)

    def _why_not_now(self) -> str | None:
        """Return why nothing is rerouted here; None if it is."""
        if not self.enabled:
            return "the context is disabled"
        task = torch._C._current_graph_task_id()
        if task not in (-1, _entered.contexts[-1].task):
            return "backward calls it"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "it is inside of a torch.func transform"
        return None


def _why_not(input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why these tensors are left alone; None if they are not."""
    for t in (input, weight, bias):
        if t is None:
            continue
        dispatch = type(t).__torch_dispatch__
        if dispatch is not torch._C._disabled_torch_dispatch_impl and not isinstance(t, FakeTensor):
            return f"{type(t).__name__} is a tensor subclass"
        if t.dtype not in REAL_DTYPES:
            return f"its dtype is {t.dtype}"
    if weight.dim() != 2 or input.dim() == 0:
        return "weight is no matrix, or input a scalar"
    return None


@contextlib.contextmanager
def in_high_precision() -> Iterator[None]:
    """Leave linears alone, whatever context is entered."""
    if not torch.compiler.is_compiling() and not _entered.contexts:
        yield
        return
    with fp8_autocast(enabled=False):
        yield


def _state_of(weight: Tensor, recipe: Recipe) -> DelayedState | None:
    """Return the amax histories of a weight: an attribute of that very tensor."""
    if not isinstance(recipe, DelayedScaling):
        return None
    states: dict[int, DelayedState] | None = getattr(weight, _STATE, None)
    if states is None:
        states = {}
        if not torch.compiler.is_compiling():
            setattr(weight, _STATE, states)
    state = states.get(recipe.amax_history_len)
    if state is None and torch.compiler.is_compiling():
        raise RuntimeError(
            "fp8lt: a weight has no amax history yet, and a compiled function cannot make one: "
            "with recipe 'delayed', run the model once in eager mode inside of fp8_autocast"
        )
    if state is None:
        state = states[recipe.amax_history_len] = DelayedState(recipe, weight.device)
    if state.amaxes.device != weight.device:
        state.amaxes = state.amaxes.to(weight.device)
    return state


# ------------------------------------------------------------------------------------ attention

# `nn.MultiheadAttention` ends here. A context that is entered sees this function, not the linears
# that it calls: so a copy is called, which does not ask whether somebody wants to see it.
_multi_head_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    F.multi_head_attention_forward.__name__,
    F.multi_head_attention_forward.__defaults__,
)
_multi_head_attention.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


# --------------------------------------------------------------------------------------- counts

_OTHER_PRODUCTS = {
    getattr(owner, name): name.strip("_")
    for owner in (torch, Tensor)
    for name in ("matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "__matmul__")
    if hasattr(owner, name)
} | {F.bilinear: "bilinear"}
_counting = threading.Lock()
_rerouted = 0
_kept: Counter[str] = Counter()


def _count(reason: str | None) -> None:
    global _rerouted
    if torch.compiler.is_compiling():  # once, whatever the compiled function does then
        return
    with _counting:
        if reason is None:
            _rerouted += 1
        else:
            _kept[reason] += 1


def stats(*, reset: bool = False) -> dict[str, Any]:
    """Return what contexts of `fp8_autocast` have seen, in all threads: how many calls.

    {"rerouted": calls of F.linear, "kept": {reason: calls}}. `reset` starts anew after that.
    A compiled function is not counted; a recomputation is one more call.

    Example:
        >>> _ = fp8lt.stats(reset=True)
        >>> x, w = torch.ones(2, 3), torch.ones(4, 3)
        >>> with fp8lt.fp8_autocast():
        ...     y = torch.nn.functional.linear(x, w) + x @ w.t()
        >>> fp8lt.stats()
        {'rerouted': 1, 'kept': {'matmul is not F.linear': 1}}
    """
    global _rerouted
    with _counting:
        counts = {"rerouted": _rerouted, "kept": dict(_kept)}
        if reset:
            _rerouted = 0
            _kept.clear()
    return counts


# -------------------------------------------------------------------------------- recomputation


@dataclasses.dataclass(frozen=True)
class _Entry:
    context: fp8_autocast
    task: int  # the backward pass in which it was entered, or -1


class _Entered(threading.local):
    """The contexts of this thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[_Entry] = []


_entered = _Entered()


class _Regions:
    """What `torch.utils.checkpoint` begins in a context is recomputed in that context.

    It keeps autocast and random numbers for that, and nothing of ours. So as long as any thread is
    in a context, whoever begins a region gives its function the context along. With none, PyTorch's
    own functions are back.
    """

    _lock = threading.Lock()
    _contexts = 0
    _begin_frame = checkpoint._CheckpointFrame.__init__
    _begin_reentrant = checkpoint.CheckpointFunction.forward

    @classmethod
    def watch(cls, change: int) -> None:
        with cls._lock:
            before, cls._contexts = cls._contexts, cls._contexts + change
            if (before == 0) == (cls._contexts == 0):
                return
            frame: Any = checkpoint._CheckpointFrame
            function: Any = checkpoint.CheckpointFunction
            if cls._contexts:
                frame.__init__ = cls._frame
                function.forward = staticmethod(cls._reentrant)
            else:
                frame.__init__ = cls._begin_frame
                function.forward = staticmethod(cls._begin_reentrant)

    @staticmethod
    def _frame(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        _Regions._begin_frame(self, _with_context(recompute_fn), *args, **kwargs)

    @staticmethod
    def _reentrant(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return _Regions._begin_reentrant(ctx, _with_context(run_function), *args)


def _with_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `function` in the context that is entered now; if there is one."""
    if not _entered.contexts:
        return function
    context = _entered.contexts[-1].context

    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with context:
            return function(*args, **kwargs)

    return again
