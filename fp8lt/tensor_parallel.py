"""A layer whose weight is a DTensor: each rank multiplies what it has, under scales of its own.

    weight        x                 y = x @ w.T       dx                dw
    Shard(0)      Replicate         Shard(last)       Partial           Shard(0)      colwise
    Shard(1)      Shard(last)       Partial           Shard(last)       Shard(1)      rowwise
    Replicate     Shard(others)     as x              as x              Partial       sequence

Each row is a GEMM of local operands, in forward and in backward, so the scales of a shard never
meet those of another: what ranks exchange, before and after, is in high precision, as DTensor has
it. `parallelize_module` with `ColwiseParallel`, `RowwiseParallel` and `PrepareModuleInput` works as
with `nn.Linear`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Local = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Once(torch.autograd.Function):
    """A bias that is added up over ranks, and so added on one of them; all get its gradient."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, here: bool) -> Tensor:
        return bias.clone() if here else torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def linear(x: Tensor, w: Any, bias: Any, local: Local) -> Tensor:
    """Return `x @ w.T + bias`, a DTensor, computed by `local` from what this rank has of them.

    Raises TypeError or RuntimeError where x or bias is no DTensor of w's mesh, or none of the rows
    of the table above.
    """
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    mesh, last = w.device_mesh, x.dim() - 1
    for name, t in (("x", x), ("bias", bias)):
        if t is None:
            continue
        if not isinstance(t, DTensor):
            raise TypeError(
                f"fp8lt: weight is a DTensor, want {name} to be one, too, got {type(t).__name__}: "
                "parallelize_module (ColwiseParallel, RowwiseParallel) makes it one"
            )
        if t.device_mesh != mesh:
            raise RuntimeError(f"fp8lt: want {name} on weight's mesh {mesh}, got {t.device_mesh}")
    assert isinstance(x, DTensor)
    of_y: list[Placement] = []
    of_dx: list[Placement] = []
    of_dw: list[Placement] = []
    of_bias: list[Placement] = []
    of_db: list[Placement] = []
    first = True  # of those whose results are added up
    for dim, (of_x, of_w) in enumerate(zip(x.placements, w.placements, strict=True)):
        if of_w.is_shard(0) and of_x.is_replicate():
            row: tuple[Placement, ...] = Shard(last), Partial(), Shard(0), Shard(0), Shard(0)
        elif of_w.is_shard(1) and of_x.is_shard(last):
            row = Partial(), Shard(last), Shard(1), Replicate(), Replicate()
            first = first and mesh.get_local_rank(dim) == 0
        elif of_w.is_replicate() and (of_x.is_replicate() or of_x.is_shard()):
            if of_x.is_shard(last):
                raise RuntimeError(_unfit(x, w))
            summed = Partial() if of_x.is_shard() else Replicate()
            row = of_x, of_x, summed, Replicate(), summed
        else:
            raise RuntimeError(_unfit(x, w))
        for placements, one in zip((of_y, of_dx, of_dw, of_bias, of_db), row, strict=True):
            placements.append(one)
    if bias is not None and list(bias.placements) != of_bias:
        raise RuntimeError(
            f"fp8lt: want bias placed {tuple(of_bias)}, as weight {w.placements} has it, "
            f"got {bias.placements}"
        )
    b = None if bias is None else bias.to_local(grad_placements=of_db)
    if b is not None and any(one.is_partial() for one in of_y):
        b = _Once.apply(b, first)
    y = local(x.to_local(grad_placements=of_dx), w.to_local(grad_placements=of_dw), b)
    shape = torch.Size((*x.shape[:-1], w.shape[0]))
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    result: Tensor = DTensor.from_local(y, mesh, of_y, run_check=False, shape=shape, stride=stride)
    return result


def _unfit(x: Any, w: Any) -> str:
    return (
        "fp8lt: want weight Shard(0) and x Replicate (ColwiseParallel), weight Shard(1) and x "
        f"Shard({x.dim() - 1}) (RowwiseParallel), or weight Replicate and x whole in its last "
        f"dimension; got weight {w.placements}, x {x.placements}"
    )
