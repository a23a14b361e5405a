"""How operators are defined: `torch.ops.fp8lt.*` in PyTorch's dispatcher.

One schema, checks, a CPU kernel, the shapes for fake tensors. The compiled extension adds CUDA
kernels for the same schemas.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

library = torch.library.Library("fp8lt", "DEF")


def define(
    schema: str, check: Callable[..., None], compute: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an operator on the CPU and for fake tensors; return its checked emulation."""
    name = schema.partition("(")[0]

    # The dispatcher leaves trailing arguments out that have their defaults: so do these.
    def emulated(*args: Any) -> Any:
        check(*args)
        return compute(*args)

    def shapes(*args: Any) -> Any:
        check(*args)
        return fake(*args)

    library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, emulated, "CPU")
    library.impl(name, _without_derivative(name), "Autograd")
    torch.library.register_fake(f"fp8lt::{name}", shapes, lib=library)
    return emulated


def _without_derivative(name: str) -> Callable[..., Any]:
    """Return what autograd runs for an operator, where the extension has not put its own there.

    The layer has a derivative, the operators that it is made of have none: to ask for one is an
    error. By default PyTorch would go on with zeros, as where a compiler takes `torch.func.grad`.
    """

    def run(*args: Any) -> Any:
        operator = getattr(torch.ops.fp8lt, name).default
        if torch.is_grad_enabled():
            leaves, spec = tree_flatten(args)
            if any(isinstance(a, Tensor) and a.requires_grad for a in leaves):
                return _NoDerivative.apply(operator, spec, *leaves)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return run


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, spec: Any, *leaves: Any) -> Any:
        ctx.operator = operator
        result = operator(*tree_unflatten(leaves, spec))
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(f"derivative for {ctx.operator.name()} is not implemented")
