"""`fp8_autocast`: the linears of a model that was not converted, in FP8 inside of a context.

A context is a `TorchFunctionMode`: PyTorch shows it the functions that are called while it is
entered, in its thread, and none at any other time. So nothing of PyTorch is replaced for rerouting.

**Rerouted** to `fp8lt.linear`: `F.linear`, and so `nn.Linear` and everything that calls either: the
projections of `nn.MultiheadAttention` and of the transformer layers of `torch.nn`.

**Not rerouted**: other products (`x @ w.t()`, `torch.addmm`, `F.bilinear`, convolutions, attention
itself, `torch.ops.aten.linear`); layers that are one operator inside (`nn.LSTM`); other dtypes than
bf16, f16 and f32; sparse and nested tensors; a weight that is no matrix; tensor subclasses that
answer for themselves (DTensor); what runs inside of `torch.func` transforms; `torch.jit.script`;
what other threads call.

**Backward** runs in FP8 wherever it is called: forward has decided. What backward itself calls is
not rerouted, even if a context is still entered; but a checkpointed region recomputes what its
first pass computed, whether or not `torch.utils.checkpoint` was called inside of a context.

**The compiler** traces a context as any other code. What it hides from contexts is refused: a
checkpointed region, `torch.cond` and the like inside of a compiled function; without
`fullgraph=True` it then leaves them to eager mode. In a compiled function the rules about backward
and transforms do not hold: what is traced in a context is rerouted.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from .linear import linear
from .ops import REAL_DTYPES
from .recipe import Recipe, resolve
from .weight_state import state_of, traced_state_of

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LINEAR = torch._C._nn.linear  # F.linear, unless somebody wraps it


class fp8_autocast(TorchFunctionMode):  # named as torch.autocast is
    """Run every `F.linear` in FP8 inside of a `with`, or inside of a decorated function.

    For models that are not converted. Contexts nest, the innermost decides; they end with their
    block, also by an exception, and hold for the thread that entered them. See the module for what
    is rerouted. Inside, any call of a PyTorch function, and any read of a tensor's attribute, takes
    longer for each context (1 to 2 us).

    Args:
        enabled: False leaves linears in high precision, inside of an enabled context, too.
        recipe: as for `linear`. With "delayed" each weight has a `DelayedState` as long as it
            lives, which all its contexts of the same history length share; it is in no checkpoint.
        fp8_format: "hybrid" or "e4m3", in place of the recipe's.

    Raises:
        TypeError: `enabled` is no bool; what is decorated is no function, or one that yields.
        ValueError: no recipe has that name; the recipe does not have that format.

    Example:
        >>> layer, x = torch.nn.Linear(64, 32), torch.randn(3, 64)
        >>> with fp8lt.fp8_autocast():
        ...     y = layer(x)
        >>> torch.equal(y, fp8lt.linear(x, layer.weight, layer.bias))
        True
    """

    task = -1  # the backward pass in which it was entered; -1: in none

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
        entered = self
        if not torch.compiler.is_dynamo_compiling():
            _Regions.watch()
            _tell_compiler()
            entered = copy.copy(self)  # threads, and blocks within blocks, may share `self`
            entered.task = torch._C._current_graph_task_id()
        TorchFunctionMode.__enter__(entered)
        return self

    def __call__(self, function: _Function) -> _Function:
        name = getattr(function, "__qualname__", repr(function))
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"fp8_autocast: want a function to decorate, got {name}")
        for kind in ("generatorfunction", "asyncgenfunction", "coroutinefunction"):
            if getattr(inspect, f"is{kind}")(function):
                raise TypeError(
                    f"fp8_autocast: want a function to decorate, got the {kind} {name}: "
                    "it runs after the call has returned"
                )

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        overriding: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Asked for here, since by itself a function that asks may be compiled, and so say yes. Not
        # `is_compiling`: that is true in all threads while one of them compiles.
        if torch.compiler.is_dynamo_compiling():
            return self._traced(func, args, kwargs)
        compiler = set_eval_frame(None)
        try:
            _tell_compiler()
            return self._seen(func, args, kwargs)
        finally:
            set_eval_frame(compiler)

    def _seen(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _thread.decided:  # by a context inside of this one
            return func(*args, **kwargs)
        if func is _LINEAR:
            return self._linear(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attention(func, args, kwargs)
        if func in _OTHER_PRODUCTS and self.enabled:
            _count(f"{_OTHER_PRODUCTS[func]} is not F.linear")
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        reason = self._why_inactive() or _why_kept(input, weight, bias)
        _count(reason)
        with _thread.deciding():
            if reason is not None:
                return F.linear(input, weight, bias)
            state = state_of(weight, self.recipe)
            return linear(input, weight, bias, recipe=self.recipe, state=state)

    def _attention(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call what calls F.linear, but is itself what PyTorch shows."""
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if self._why_inactive() or not all(map(_answers_not, tensors)):
            _count("multi_head_attention_forward is kept as a whole")
            with _thread.deciding():
                return func(*args, **kwargs)
        TorchFunctionMode.__enter__(self)
        try:
            return _unseen(func)(*args, **kwargs)
        finally:
            TorchFunctionMode.__exit__(self, None, None, None)

    def _traced(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do the same as far as the compiler can trace it; it counts nothing."""
        if func is _LINEAR:
            return self._traced_linear(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _unseen_attention(*args, **kwargs)
        if self.enabled and isinstance(func, torch._ops.HigherOrderOperator):
            raise RuntimeError(
                "fp8lt: torch.compile hides what a checkpointed region, torch.cond or the like "
                "calls from fp8_autocast: convert the model instead, or compile what is inside"
            )
        if func is Tensor.unflatten:  # calls super(), which PyTorch 2.11 cannot trace from here
            func = torch.unflatten
        return func(*args, **kwargs)

    def _traced_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        fits = input.dtype in REAL_DTYPES and weight.dtype in REAL_DTYPES
        if not self.enabled or not fits or weight.dim() != 2 or input.dim() == 0:
            # By this name a context outside of this one does not know it.
            return torch.ops.aten.linear.default(input, weight, bias)
        state = traced_state_of(weight, self.recipe)
        return linear(input, weight, bias, recipe=self.recipe, state=state)

    def _why_inactive(self) -> str | None:
        """Return why nothing is rerouted here; None if it is."""
        if not self.enabled:
            return "the context is disabled"
        if torch._C._current_graph_task_id() not in (-1, self.task):
            return "backward calls it"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "it is inside of a torch.func transform"
        return None


def _why_kept(input: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return why these tensors are left alone; None if they are not."""
    for t in (input, weight, bias):
        if t is None:
            continue
        if not _answers_not(t):
            return f"{type(t).__name__} is a tensor subclass"
        if t.layout != torch.strided or t.is_nested:
            return "a tensor is sparse or nested"
        if t.dtype not in REAL_DTYPES:
            return f"its dtype is {t.dtype}"
    if weight.dim() != 2 or input.dim() == 0:
        return "weight is no matrix, or input a scalar"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "bias is broadcast"
    return None


def _answers_not(t: Tensor) -> bool:
    """Say whether `t` is a tensor as any other, with no `__torch_function__` of its own."""
    kind = type(t)
    if kind in (Tensor, nn.Parameter) or isinstance(t, (FakeTensor, FunctionalTensor)):
        return True
    return kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl and _function_of(
        kind
    ) in (torch._C._disabled_torch_function_impl, _function_of(Tensor))


def _function_of(kind: type[Tensor]) -> Any:
    function = kind.__torch_function__
    return getattr(function, "__func__", function)  # of a class method


class _Thread(threading.local):
    """What a thread's contexts tell each other: whether one of them has decided about a call."""

    decided = False

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        before, self.decided = self.decided, True
        try:
            yield
        finally:
            self.decided = before


_thread = _Thread()


_compiler_knows = False


def _tell_compiler() -> None:
    """Have the methods that PyTorch calls by itself not compiled by themselves.

    What a compiled function leaves to eager mode is run as it is, but the compiler looks at every
    Python function that is called then. It would make a graph of each PyTorch function, and `stats`
    would not see it.
    """
    global _compiler_knows
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported for this: it takes a second
    if dynamo is not None and not _compiler_knows:
        for method in (fp8_autocast.__enter__, fp8_autocast.__torch_function__):
            dynamo.skip_code(method.__code__)
        _compiler_knows = True


@contextlib.contextmanager
def in_high_precision() -> Iterator[None]:
    """Leave linears alone, whatever context is entered."""
    if torch._C._len_torch_function_stack() == 0:
        yield
        return
    with fp8_autocast(enabled=False):
        yield


# ------------------------------------------------------------------------------------ attention


# `nn.MultiheadAttention` ends in a function that first asks whether somebody wants to see it as a
# whole. A context wants to see the linears that it calls: so a copy is called, which does not ask.
def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    names = {**vars(F), "has_torch_function": lambda tensors: False}
    code: Any = function
    same = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__)
    same.__kwdefaults__ = code.__kwdefaults__
    return same


_unseen_attention = _unseen(F.multi_head_attention_forward)  # for the compiler


# --------------------------------------------------------------------------------------- counts

_OTHER_PRODUCTS = {
    getattr(owner, name): name.strip("_")
    for owner in (torch, Tensor)
    for name in (
        "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "einsum", "inner", "tensordot",
        "__matmul__",
    )
    if hasattr(owner, name)
} | {F.bilinear: "bilinear", torch.linalg.matmul: "linalg.matmul"}  # fmt: skip
_counting = threading.Lock()
_rerouted = 0
_kept: Counter[str] = Counter()


def _count(reason: str | None) -> None:
    global _rerouted
    with _counting:
        if reason is None:
            _rerouted += 1
        else:
            _kept[reason] += 1


def stats(*, reset: bool = False) -> dict[str, Any]:
    """Return what contexts of `fp8_autocast` have seen, in all threads: how many calls.

    {"rerouted": calls of F.linear, "kept": {reason: calls}}: of F.linear, of attention as a whole,
    and of the commonest other products. `reset` starts anew after that. A recomputation is one more
    call; what a compiled function reroutes is not counted.

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


class _Regions:
    """What `torch.utils.checkpoint` begins in a context is recomputed in that context.

    It keeps autocast and random numbers for that, and nothing of ours. So from the first context
    on, it asks who begins a region for the context, and gives the region's function that along. Of
    a thread that is in no context nothing changes.
    """

    _lock = threading.Lock()
    _watching = False

    @classmethod
    def watch(cls) -> None:
        if cls._watching:
            return
        with cls._lock:
            if cls._watching:
                return
            frame: Any = checkpoint._CheckpointFrame
            function: Any = checkpoint.CheckpointFunction
            begin_frame, begin_reentrant = frame.__init__, function.forward

            @functools.wraps(begin_frame)
            def begin(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
                begin_frame(self, _with_context(recompute_fn), *args, **kwargs)

            @functools.wraps(begin_reentrant)
            def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
                return begin_reentrant(ctx, _with_context(run_function), *args)

            frame.__init__, function.forward = begin, staticmethod(forward)
            cls._watching = True


def _with_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `function` in the context that it would run in now; if there is one."""
    task = torch._C._current_graph_task_id()
    for mode in reversed(_get_current_function_mode_stack()):
        # Of contexts that were entered before a backward pass, what that recomputes is in none.
        if isinstance(mode, fp8_autocast) and mode.task == task:
            return mode(function)
    return function
