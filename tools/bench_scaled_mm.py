"""FP8 over `torch._scaled_mm` by hand, the way it is pasted into training code: the plain peer.

    scale = FP8_MAX / amax      data = saturate(x * scale)      one scale per tensor

Forward multiplies with fast accumulation, backward without. `_scaled_mm` takes a row-major and a
column-major operand, so backward transposes copies of all it multiplies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in FP8 and the f32 factor that undoes the scaling."""
    fp8_max = torch.finfo(dtype).max
    scale = fp8_max / x.abs().amax().float().clamp(min=1e-12)
    data = (x.float() * scale).clamp(-fp8_max, fp8_max).to(dtype)
    return data, scale.reciprocal()


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def multiply(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, out: torch.dtype, fast: bool):
    return torch._scaled_mm(a, b, scale_a=a_inv, scale_b=b_inv, out_dtype=out, use_fast_accum=fast)


class ScaledMM(torch.autograd.Function):
    """`x @ w.T` in FP8, with its two backward GEMMs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        xq, x_inv = to_fp8(x, E4M3)
        wq, w_inv = to_fp8(w, E4M3)
        ctx.save_for_backward(xq, x_inv, wq, w_inv)
        return multiply(xq, wq.t(), x_inv, w_inv, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        xq, x_inv, wq, w_inv = ctx.saved_tensors
        dyq, dy_inv = to_fp8(dy.contiguous(), E5M2)
        dx = multiply(dyq, column_major(wq), dy_inv, w_inv, dy.dtype, fast=False)
        dw = multiply(
            dyq.t().contiguous(), column_major(xq), dy_inv, x_inv, dy.dtype, fast=False
        )  # fmt: skip
        return dx, dw


def scaled_mm_linear(x: Tensor, w: Tensor) -> Tensor:
    """Return `x @ w.T`; x [..., K], w [N, K], all sizes multiples of 16."""
    y: Tensor = ScaledMM.apply(x.flatten(0, -2), w)
    return y.view(*x.shape[:-1], w.shape[0])


class ScaledMMLinear(nn.Linear):
    """`nn.Linear` without bias over `scaled_mm_linear`; made by assigning `__class__`."""

    def forward(self, input: Tensor) -> Tensor:
        return scaled_mm_linear(input, self.weight)


def prequantised(w: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `x -> x @ w.T` for inference: the weight is quantised here, once."""
    wq, w_inv = to_fp8(w, E4M3)

    def forward(x: Tensor) -> Tensor:
        xq, x_inv = to_fp8(x, E4M3)
        return multiply(xq, wq.t(), x_inv, w_inv, x.dtype, fast=True)

    return forward
