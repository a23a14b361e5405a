"""The one case table, and the oracles, shared by CPU and GPU tests."""

import itertools
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import oracle

import fp8lt
from fp8lt import ops, toolchain
from fp8lt.recipe import DelayedScaling, Recipe, resolve

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


def sqnr(got: Tensor, want: Tensor) -> float:
    """Return signal over noise in dB; +6 is one more bit."""
    return -20 * math.log10(max(error(got, want), 1e-30))


def randn(*shape: int, on: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return the same Gaussian numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype).to(on)


def dequantised(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Return x in float64 after a tensorwise quantise, written from its definition."""
    if x.numel() == 0:
        return x.double()
    fp8_max = torch.finfo(fp8).max
    amax = max(x.abs().max().item(), 1e-12)  # Python floats: IEEE division
    scale = torch.tensor(fp8_max / amax, dtype=torch.float32)  # rounded once
    q = (x.float() * scale.to(x.device)).clamp(-fp8_max, fp8_max).to(fp8)
    return q.double() * (1 / scale).double().to(x.device)


undone = oracle.undone


def raw(x: Tensor) -> Tensor:
    """Bytes of an FP8 tensor, every NaN as 0x7F (its sign and payload are nobody's business)."""
    nan = torch.full_like(x.view(torch.uint8), 0x7F)
    return torch.where(x.float().isnan(), nan, x.view(torch.uint8)).cpu()


def assert_same(got: ops.Quantized, want: ops.Quantized) -> None:
    """Compare bytes and scales; sums are summed in another order, so not those."""
    for name in ("data", "data_t"):
        assert torch.equal(raw(getattr(got, name)), raw(getattr(want, name))), name
        assert getattr(got, name).is_contiguous(), name
    for name in ("scale_inv", "scale_inv_t"):
        torch.testing.assert_close(
            getattr(got, name).cpu(), getattr(want, name).cpu(), rtol=0, atol=0, equal_nan=True
        )
    assert got[-2:] == want[-2:]


def to_gpu(view: Tensor) -> Tensor:
    """Copy a CPU view to the GPU with its strides and offset."""
    whole = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).cuda()
    return whole.as_strided(view.shape, view.stride(), view.storage_offset())


def awkward(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers of all magnitudes on the CPU, by rows and columns, with all special ones.

    Rows of zeros, subnormals, an Inf, a NaN, each some way down the matrix, and the same by
    columns; where there is no room for them they are left out.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    x *= 10 ** torch.randint(-2, 3, (rows, 1), generator=generator).float()
    x *= 10 ** torch.randint(-2, 3, (1, cols), generator=generator).float()
    tiny = torch.finfo(dtype).smallest_normal / 8
    for m in (x, x.t()):
        for line, value in ((5, 0.0), (11, tiny), (140, 0.0), (200, tiny)):
            m[line : line + 1] = value
    for i, value in ((7, torch.inf), (30, -torch.inf), (60, torch.nan), (150, torch.nan)):
        x[i : i + 1, i + 2 : i + 3] = value
    return x.to(dtype)


def state_for(recipe: str | Recipe, on: torch.device | str) -> fp8lt.DelayedState | None:
    """Return a new state for a recipe that needs one: its first call scales as tensorwise does."""
    recipe = resolve(recipe)
    return fp8lt.DelayedState(recipe, on) if isinstance(recipe, DelayedScaling) else None


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, **options: object
) -> tuple[Tensor, ...]:
    """Return y, dx, dw and, with a bias, db; of a first call, unless there is a state."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
    options.setdefault("state", state_for(options.get("recipe", "tensorwise"), x.device))
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
        kinds = ("tensorwise", "delayed", "rowwise", "blockwise")
        self.counts = dict.fromkeys(["gemm_nt", *(f"quantize_{kind}" for kind in kinds)], 0)

    @property
    def quantised(self) -> int:
        """How many tensors were quantised, in any way."""
        return sum(self.counts.values()) - self.counts["gemm_nt"]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def missing_toolchain() -> str | None:
    """Say what a build of the extension lacks on this machine, or None."""
    try:
        toolchain.find()
    except toolchain.ToolchainError as error:
        return str(error).splitlines()[0]
    return None


RunPython = Callable[..., subprocess.CompletedProcess]  # the fixture `run_python`
needs_toolchain = pytest.mark.skipif(
    missing_toolchain() is not None, reason=f"no toolchain: {missing_toolchain()}"
)


class Names(TorchDispatchMode):
    """Collects the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(func.__name__)
        return func(*args, **(kwargs or {}))


def run_aside(function: Callable[[], object]) -> threading.Event:
    """Run it in a thread that never ends, and return what is set when it has run.

    PyTorch 2.11 crashes where anything is compiled after a thread that compiled has ended.
    """
    done = threading.Event()

    def run() -> None:
        function()
        done.set()
        threading.Event().wait()

    threading.Thread(target=run, daemon=True).start()
    return done
