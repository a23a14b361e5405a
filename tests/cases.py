"""The one case table, and the oracles, shared by CPU and GPU tests."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8lt

M_SIZES = (0, 1, 3, 17, 4099)
NK_SIZES = (1, 8, 15, 100, 1027, 4096)
SHAPES = tuple(itertools.product(M_SIZES, NK_SIZES, NK_SIZES))  # (M, N, K)
# What two CPU cores multiply in float64 within a second; the GPU takes all of SHAPES.
SMALL_SHAPES = tuple(s for s in SHAPES if s[0] * s[1] * s[2] <= 2e8 and max(s[1:]) < 4096)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Relative Frobenius errors. Against float64 on the *same quantised operands* only the rounding of
# the result and the accumulation remain: measured with bf16 results 1.7e-3 on a CPU, on an H200
# 1.7e-3 with slow and 2.1e-3 with fast accumulation at K = 4096; with f32 results 5e-8, 1.3e-4 and
# 1.3e-3.
T_SAME = 5e-3
# Against float64 on the original operands: two quantisations of Gaussian data.
T_FORWARD = 0.05  # measured 0.038 with e4m3 @ e4m3, on a CPU and on an H200
T_BACKWARD = 0.075  # measured 0.060 with e5m2 @ e4m3 on a CPU, 0.059 on an H200


def error(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||, NaN if anything is; 0 where there is nothing."""
    assert got.shape == want.shape
    difference = (got.double() - want.double()).norm()
    return 0.0 if difference == 0 else (difference / want.double().norm()).item()


def randn(*shape: int, on: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the same Gaussian numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(on)


def dequantised(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Return x in float64 after a tensorwise quantise, written from its definition."""
    if x.numel() == 0:
        return x.double()
    fp8_max = torch.finfo(fp8).max
    amax = max(x.abs().max().item(), 1e-12)  # Python floats: IEEE division
    scale = torch.tensor(fp8_max / amax, dtype=torch.float32)  # rounded once
    q = (x.float() * scale.to(x.device)).clamp(-fp8_max, fp8_max).to(fp8)
    return q.double() * (1 / scale).double().to(x.device)


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, **options: object
) -> tuple[Tensor, ...]:
    """Return y, dx, dw and, with a bias, db."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
    y = fp8lt.linear(*leaves, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield `x` [R, C] with its values in every layout that a caller may come with."""
    rows, cols = x.shape
    yield "contiguous", x
    yield "transposed", x.t().contiguous().t()
    yield "columns of a wider matrix", torch.cat([x, x, x], 1)[:, cols : 2 * cols]
    yield "every other row", torch.stack([x, -x], 1).reshape(2 * rows, cols)[::2]
    shifted = x.new_empty(rows * cols + 1)
    shifted[1:] = x.reshape(-1)
    yield "misaligned by one element", shifted[1:].view(rows, cols)


class CountOps(TorchDispatchMode):
    """Counts the calls of fp8lt's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"gemm_nt": 0, "quantize_tensorwise": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
