"""The contenders of one linear layer, each behind the same small interface.

`build(w)` makes a `Layer` from a weight [N, K]; `missing` says why a contender cannot be had here.
Everything optional is imported when it is asked for, fp8lt too: its environment variables are set
by then.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from bench_scaled_mm import prequantised, scaled_mm_linear
from bench_timing import reason
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Layer:
    """A linear layer without bias, ready to run."""

    forward: Callable[[Tensor], Tensor]
    weight: Tensor | None = None  # the leaf whose gradient is dw; None: inference only
    context: Callable[[], Any] = contextlib.nullcontext  # in which it is checked and measured
    held_bytes: int = 0  # what it keeps beside the weight


@dataclass(frozen=True)
class Contender:
    """A name, a factory, and what must work before the factory can."""

    name: str
    build: Callable[[Tensor], Layer]
    needs: Callable[[], Any] = lambda: None  # raises where the contender cannot be had


@functools.cache  # a failing import is not tried again
def missing(needs: Callable[[], Any]) -> str | None:
    """Say why a contender with these `needs` cannot run here, or None."""
    try:
        needs()
    except Exception as error:  # a broken installation may raise anything
        return reason(error)
    return None


def versions() -> dict[str, str | None]:
    """Return the versions of what can be measured here; None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in ("fp8lt", "torchao", "transformer_engine", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["fp8lt"] is None:  # a checkout on the path
        found["fp8lt"] = __import__("fp8lt").__version__
    return found


def leaf(w: Tensor) -> Tensor:
    return w.detach().clone().requires_grad_()


def plain(w: Tensor, kind: Callable[..., nn.Module] = nn.Linear, **kwargs: Any) -> Any:
    """Return a module of that kind with this weight."""
    module = kind(w.shape[1], w.shape[0], bias=False, device=w.device, **kwargs)
    with torch.no_grad():
        module.weight.copy_(w)
    return module


def compiled(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Compile for these shapes alone, as is best for speed."""
    # On the CPU only the plumbing is of interest, and Inductor would need a C++ compiler.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    return torch.compile(function, dynamic=False, backend=backend)


def forget_compiled() -> None:
    """Drop all compiled code, and make Dynamo raise where it would quietly give up."""
    import torch._dynamo

    torch._dynamo.reset()
    # Beyond its limit Dynamo runs a function uncompiled: that would be measured under a wrong name.
    for name, value in (("recompile_limit", 64), ("fail_on_recompile_limit_hit", True)):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, value)


# ------------------------------------------------------------------------------------- factories


def bf16(w: Tensor) -> Layer:
    weight = leaf(w)
    return Layer(lambda x: F.linear(x, weight), weight)


def fp8lt_linear(w: Tensor, recipe: str = "tensorwise") -> Layer:
    import fp8lt

    weight = leaf(w)
    return Layer(lambda x: fp8lt.linear(x, weight, recipe=recipe), weight)


def fp8lt_delayed(w: Tensor) -> Layer:
    import fp8lt

    weight, state = leaf(w), fp8lt.DelayedState(device=w.device)
    return Layer(lambda x: fp8lt.linear(x, weight, recipe="delayed", state=state), weight)


def fp8lt_reused(w: Tensor) -> Layer:
    import fp8lt

    weight = leaf(w)
    w_quantized = fp8lt.quantize_weight(weight)
    return Layer(
        lambda x: fp8lt.linear(x, weight, w_quantized=w_quantized), weight,
        held_bytes=sum(t.nbytes for t in w_quantized if isinstance(t, Tensor)),
    )  # fmt: skip


@contextlib.contextmanager
def autotuned() -> Iterator[None]:
    """Have fp8lt choose its GEMM kernels by time inside."""
    import fp8lt

    fp8lt.autotune()
    try:
        yield
    finally:
        fp8lt.autotune(False)


def fp8lt_autotuned(w: Tensor) -> Layer:
    layer = fp8lt_linear(w)
    layer.context = autotuned
    return layer


def scaled_mm(w: Tensor, compile_it: bool) -> Layer:
    weight = leaf(w)
    function = compiled(scaled_mm_linear, w.device) if compile_it else scaled_mm_linear
    return Layer(lambda x: function(x, weight), weight)


def torchao(w: Tensor, recipe: str, compile_it: bool) -> Layer:
    module = torchao_convert(plain(w, dtype=w.dtype), recipe)
    return Layer(compiled(module, w.device) if compile_it else module, module.weight)


def torchao_convert(module: nn.Module, recipe: str) -> nn.Module:
    """Convert with torchao; it returns another object where the root itself is a layer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(module, config=config)


def torchao_prequantised(w: Tensor) -> Layer:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerTensor,
        quantize_,
    )

    module = plain(w, dtype=w.dtype)
    quantize_(module, Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()))
    return Layer(module)


def te_module(w: Tensor) -> Any:
    import transformer_engine.pytorch as te

    return plain(w, te.Linear, params_dtype=w.dtype)


def te_context(name: str) -> Callable[[], Any]:
    """Return what makes the context of one forward; backward runs outside of it."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    kinds = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }
    chosen = kinds[name]()
    if hasattr(te, "autocast"):
        return lambda: te.autocast(enabled=True, recipe=chosen)
    return lambda: te.fp8_autocast(enabled=True, fp8_recipe=chosen)  # its name in older releases


def te_linear(w: Tensor, recipe: str) -> Layer:
    module, context = te_module(w), te_context(recipe)

    def forward(x: Tensor) -> Tensor:
        with context():
            return module(x)

    return Layer(forward, module.weight)


# -------------------------------------------------------------------------------- the two line-ups


def needs_torchao() -> None:
    import torchao.float8  # noqa: F401


def needs_te() -> None:
    import transformer_engine.pytorch  # noqa: F401


TORCHAO = [
    Contender(
        f"torchao-{recipe}" + "-compiled" * compile_it,
        functools.partial(torchao, recipe=recipe, compile_it=compile_it),
        needs_torchao,
    )
    for recipe in ("tensorwise", "rowwise")
    for compile_it in (False, True)
]
TE = [
    Contender(f"te-{recipe}", functools.partial(te_linear, recipe=recipe), needs_te)
    for recipe in ("delayed", "current", "block")
]
FP8LT = [
    Contender("fp8lt", fp8lt_linear),
    Contender("fp8lt-reused", fp8lt_reused),
]
TRAINING = [
    Contender("bf16", bf16),
    *FP8LT,
    Contender("fp8lt-autotuned", fp8lt_autotuned),
    Contender("fp8lt-delayed", fp8lt_delayed),
    *(
        Contender(f"fp8lt-{recipe}", functools.partial(fp8lt_linear, recipe=recipe))
        for recipe in ("rowwise", "rowwise_with_gw_hp", "rowwise_folded", "blockwise")
    ),
    Contender("scaled_mm", functools.partial(scaled_mm, compile_it=False)),
    Contender("scaled_mm-compiled", functools.partial(scaled_mm, compile_it=True)),
    *TORCHAO,
    *TE,
]
INFERENCE = [
    Contender("bf16", bf16),
    *FP8LT,
    Contender("scaled_mm-prequantised", lambda w: Layer(prequantised(w))),
    Contender("torchao-prequantised", torchao_prequantised, needs_torchao),
]
