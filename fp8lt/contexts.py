"""What holds for a model inside of a `with`: high precision, weights quantised once, statistics."""

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch
from torch import nn

from .module import Linear
from .tensor_stats import TensorStats, Watch
from .weight_cache import WeightCache


@contextlib.contextmanager
def disable_fp8(module: nn.Module) -> Iterator[nn.Module]:
    """Run `module` in high precision inside the `with`, for evaluation; for all threads.

    Every `fp8lt.Linear` in it computes as the plain layer meanwhile. Contexts may nest, and FP8
    comes back when one is left by an exception.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
        >>> x = torch.randn(3, 8)
        >>> with fp8lt.disable_fp8(model):
        ...     torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        True
    """
    layers = [m for m in module.modules() if isinstance(m, Linear)]
    _count_disabled(layers, +1)
    try:
        yield module
    finally:
        _count_disabled(layers, -1)


_disabling = threading.Lock()


def _count_disabled(layers: list[Linear], change: int) -> None:
    # Counted: contexts of two threads need not end in the order in which they began.
    with _disabling:
        for layer in layers:
            count = vars(layer).get("_fp8_disabled", 0) + change
            if count > 0:
                layer._fp8_disabled = count
            else:  # also where `revert` took the count away meanwhile
                vars(layer).pop("_fp8_disabled", None)


@contextlib.contextmanager
def reuse_weights(module: nn.Module) -> Iterator[nn.Module]:
    """Quantise every weight of `module` once inside the `with`, instead of at every call.

    For the micro-batches of one optimizer step, and for inference. It keeps one or two bytes per
    weight until the `with` is left. A weight that is replaced, or changed in place so that autograd
    counts it (an optimizer step, `load_state_dict`, `copy_` under `no_grad`), is quantised anew.
    Not seen is a change in place through `weight.data`, or of memory that is reused behind a
    parameter (FSDP): leave the `with` for that. Under `torch.compile` nothing is reused.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
        >>> with fp8lt.reuse_weights(model):
        ...     for _ in range(4):
        ...         model(torch.randn(3, 8)).sum().backward()
    """
    layers = [m for m in module.modules() if isinstance(m, Linear) and m._weight_cache is None]
    for layer in layers:
        layer._weight_cache = WeightCache()
    try:
        yield module
    finally:
        for layer in layers:
            vars(layer).pop("_weight_cache", None)


@contextlib.contextmanager
def tensor_stats(module: nn.Module) -> Iterator[TensorStats]:
    """Measure x and w of every converted layer that runs inside the `with`, and dy in its backward.

    For a step now and then. Results and gradients are what they are without it. A compiled model
    runs uncompiled inside, and a recomputation (`torch.utils.checkpoint`) is not measured again.
    Nor is what runs in high precision (`disable_fp8`), what a CUDA graph captures, and a weight
    that FSDP2 has gathered in FP8, of which nothing more precise is there.

    Args:
        module: a model with `fp8lt.Linear` layers; each has its name in it.

    Yields:
        a `TensorStats`, which fills; it may be read inside or later.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: it has no such layer.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(64, 32)))
        >>> with fp8lt.tensor_stats(model) as stats:
        ...     model(torch.randn(16, 64)).square().sum().backward()
        >>> [(row.tensor, row.saturated, row.sqnr > 20) for row in stats.rows]
        [('x', 0.0, True), ('w', 0.0, True), ('dy', 0.0, True)]
        >>> print(stats)  # doctest: +ELLIPSIS
        layer  tensor  calls ...
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: want an nn.Module, got {type(module).__name__}")
    layers = {name: m for name, m in module.named_modules() if isinstance(m, Linear)}
    if not layers:
        raise ValueError(
            "module: want one with fp8lt.Linear layers, got none in "
            f"{type(module).__name__}; see fp8lt.convert_to_float8_training"
        )
    stats = TensorStats()
    watches = {name: Watch(stats, name) for name in layers}
    for name, layer in layers.items():
        layer._watches = (*layer._watches, watches[name])
    try:
        with _uncompiled():
            yield stats
    finally:
        for name, layer in layers.items():
            others = vars(layer).get("_watches", ())  # gone where `revert` was called meanwhile
            left = tuple(watch for watch in others if watch is not watches[name])
            if left:
                layer._watches = left
            else:
                vars(layer).pop("_watches", None)


_stance = contextlib.ExitStack()
_uncompiled_count = 0
_changing_stance = threading.Lock()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what is compiled as it was before; contexts may end in any order."""
    global _uncompiled_count
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        yield
        return
    with _changing_stance:
        if _uncompiled_count == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _uncompiled_count += 1
    try:
        yield
    finally:
        with _changing_stance:
            _uncompiled_count -= 1
            if _uncompiled_count == 0:
                _stance.close()
