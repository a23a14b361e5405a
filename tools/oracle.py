"""What FP8 copies stand for, in float64: what the tools compare results with."""

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # elements that share a block scale


def undone(data: Tensor, scale_inv: Tensor, scaling: Any) -> Tensor:
    """Return an FP8 copy [R, C] times what undoes its scales, laid out as `fp8lt.ops` says."""
    from fp8lt.emulate import Scaling

    rows, cols = data.shape
    inv = scale_inv.double()
    if scaling == Scaling.TENSORWISE:
        inv = inv[0]
    elif scaling == Scaling.ROWWISE:
        inv = inv[:rows, None]
    else:
        square = scaling == Scaling.BLOCKWISE_128X128
        by_row = inv.repeat_interleave(BLOCK, 0)[:rows] if square else inv.t()
        inv = by_row.repeat_interleave(BLOCK, 1)[:, :cols]
    return data.double() * inv


def same_bytes(q: Any) -> bool:
    """Say whether both copies of an `ops.Quantized` have the same bytes."""
    from fp8lt.emulate import Scaling

    return q.scaling_t is None or q.scaling in (Scaling.TENSORWISE, Scaling.BLOCKWISE_128X128)


def both_undone(q: Any) -> tuple[Tensor, Tensor]:
    """Return what both copies of an `ops.Quantized` stand for, neither of them transposed."""
    rows = undone(q.data, q.scale_inv, q.scaling)
    if q.scaling_t is not None:
        return rows, undone(q.data_t, q.scale_inv_t, q.scaling_t).t()
    # Folded: the columns have the scales of the rows, and `scale_inv_t` is all ones.
    from fp8lt.emulate import Scaling

    columns = undone(q.data_t, q.scale_inv_t, Scaling.ROWWISE).t()
    return rows, columns * q.scale_inv.double()[:, None]


def spread(rows: int, cols: int, where: torch.device, seed: int) -> Tensor:
    """Return normal numbers, bf16, whose rows, columns and blocks have magnitudes of their own.

    So that no scale is right in another's place.
    """
    draw = torch.Generator(where).manual_seed(seed)
    x = torch.randn(rows, cols, generator=draw, device=where)
    r, c = (torch.arange(size, device=where) for size in (rows, cols))
    by_row, by_column = r * 5 % 7 + r // BLOCK * 3 % 5, c * 3 % 7 + c // BLOCK * 2 % 5
    return (x * 2.0 ** (by_row[:, None] - 5) * 2.0 ** (by_column - 5)).bfloat16()
