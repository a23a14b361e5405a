"""What FP8 does to the tensors of a model's layers: the way to find the layer that hurts.

    amax        max |v|
    scale       FP8_MAX / amax or, delayed, by earlier amaxes; the smallest where there are many
    saturated   share of elements with |v * scale| beyond what rounds to FP8_MAX
    flushed     share of elements that are not zero, and zero in FP8
    non-finite  share of elements that are NaN or Inf
    SQNR        10 log10(|v|^2 / |q * scale_inv - v|^2), in decibels: +6 is half the error
    row SQNR    10 log10(1 / m), m: the mean over rows that are not zero of |error|^2 / |row|^2

The first is that of a tensor's largest rows, the second tells whether small ones are lost. v is x,
w or dy as its layer quantises it along rows, q what that makes of it. So each tensor is quantised
once more, by the same kernels and from the same histories, which stay as they are; the sums are
taken on the tensor's device, and read when somebody looks. Normal numbers under one scale have
32 dB in e4m3 and 26 in e5m2, whatever their amax. Far below that, the magnitudes of a tensor are
too far apart for its recipe, or its scale is old.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import operands, ops
from .emulate import BLOCK, Scaling, blocks
from .fsdp import GatheredWeight, plain
from .recipe import Recipe
from .state import History

_CHUNK = 1 << 22  # elements that are looked at together: some 200 MB of memory meanwhile
_ROLES = ("x", "w", "dy")


class TensorStat(NamedTuple):
    """What FP8 did to one tensor of a layer, over all calls that were seen."""

    layer: str  # qualified name
    tensor: str  # "x", "w" or "dy"
    calls: int
    amax: float
    scale: float
    saturated: float  # share of elements, 0 to 1; so the next two
    flushed: float
    non_finite: float
    sqnr: float  # dB; NaN of zeros, and where anything is not finite; so the next
    row_sqnr: float


class TensorStats:
    """The answer of `tensor_stats`. Reading it waits for the device; `print` shows all of it.

    Example:
        >>> layer = fp8lt.Linear(2, 2)
        >>> with fp8lt.tensor_stats(layer) as stats:
        ...     _ = layer(torch.tensor([[3.0, -5.0]]))
        >>> [(row.tensor, row.amax) for row in stats.rows if row.tensor == "x"]
        [('x', 5.0)]
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], _Sums] = {}

    @property
    def rows(self) -> list[TensorStat]:
        """All tensors, layer by layer as the model has them, and in each x, w, dy."""
        return [
            sums.stat(layer, tensor) for (layer, tensor), sums in self._sums.items() if sums.calls
        ]

    def worst(self, count: int = 10) -> list[TensorStat]:
        """Return the tensors with the lowest SQNR of both, first of all what is not finite.

        Zeros are left out: FP8 does not hurt them.
        """
        found = [row for row in self.rows if row.amax != 0]
        return sorted(found, key=_hurt)[:count]

    def table(self, worst: int | None = None) -> str:
        """Return all rows as text, or the so many `worst`."""
        return _table(self.rows if worst is None else self.worst(worst))

    def __str__(self) -> str:
        return self.table()


def _hurt(row: TensorStat) -> tuple[bool, float]:
    both = (-math.inf if math.isnan(one) else one for one in (row.sqnr, row.row_sqnr))
    return row.non_finite == 0, min(both)


class _Sums:
    """The sums of one tensor over its calls, on its device."""

    def __init__(self) -> None:
        self.calls = self.elements = 0
        self.sums: Tensor | None = None  # f64 [7], see `_measure`
        self.largest: Tensor | None = None  # f64 [2]

    def add(self, v: Tensor, q: ops.Quantized) -> None:
        sums, largest = _measure(v, q)
        self.calls += 1
        self.elements += v.numel()
        if self.sums is None or self.largest is None:
            self.sums, self.largest = sums, largest
        else:
            self.sums = self.sums + sums
            self.largest = torch.maximum(self.largest, largest)

    def stat(self, layer: str, tensor: str) -> TensorStat:
        assert self.sums is not None
        assert self.largest is not None
        *counts, signal, noise, row_noise, rows = self.sums.tolist()
        amax, scale_inv = self.largest.tolist()
        saturated, flushed, non_finite = (count / max(self.elements, 1) for count in counts)
        return TensorStat(
            layer, tensor, self.calls, amax, 1 / scale_inv if scale_inv else math.inf, saturated,
            flushed, non_finite, decibels(signal, noise), decibels(rows, row_noise),
        )  # fmt: skip


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); NaN of no signal, and of what is not finite."""
    if not signal > 0 or not noise >= 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise else math.inf


def _measure(v: Tensor, q: ops.Quantized) -> tuple[Tensor, Tensor]:
    """Return sums and maxima of v [R, C], given the rows of its FP8 copy, f64.

    [saturated, flushed, non-finite, |v|^2, |error|^2, |error|^2 / |row|^2, rows that are not zero]
    [amax, scale_inv]
    """
    rows, cols = v.shape
    if not v.numel():
        return v.new_zeros(7, dtype=torch.float64), v.new_zeros(2, dtype=torch.float64)
    scale_inv = _scale_inv(q, rows, cols)  # [R or 1, blocks or 1]
    width = BLOCK if scale_inv.shape[1] > 1 else cols
    sums, amax = v.new_zeros(7, dtype=torch.float64), v.new_zeros((), dtype=torch.float64)
    step = max(1, _CHUNK // cols)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        inv = scale_inv[part if len(scale_inv) > 1 else slice(None)].double()
        # f64: squares of f32 would leave its range on either side.
        real = _in_blocks(v[part].double(), width)
        fp8 = _in_blocks(q.data[part, :cols].double(), width)
        scaled = real / inv[:, :, None]
        signal, noise = ((t.square().sum(2) * inv.square()).sum(1) for t in (scaled, fp8 - scaled))
        sums += torch.stack([
            (scaled.abs() > _saturates_above(q.data.dtype)).sum().double(),
            ((fp8 == 0) & (real != 0)).sum().double(),
            (~real.isfinite()).sum().double(),
            signal.sum(),
            noise.sum(),
            torch.where(signal != 0, noise / signal, 0).sum(),
            (signal != 0).sum(),
        ])  # fmt: skip
        amax = torch.maximum(amax, real.abs().amax())
    return sums, torch.stack([amax, scale_inv.amax()]).double()


def _in_blocks(v: Tensor, width: int) -> Tensor:
    """Return [R, C] as [R, blocks of `width`, width], with zeros at the end."""
    return F.pad(v, (0, -v.shape[1] % width)).view(len(v), -1, width)


def _scale_inv(q: ops.Quantized, rows: int, cols: int) -> Tensor:
    """Return what undoes the scales of a copy [rows, cols]: one per row, or per row and block."""
    if q.scaling == Scaling.TENSORWISE:
        return q.scale_inv[:1].view(1, 1)
    if q.scaling == Scaling.ROWWISE:
        return q.scale_inv[:rows, None]
    if q.scaling == Scaling.BLOCKWISE_1X128:
        return q.scale_inv[:, :rows].t()
    return q.scale_inv[:, : blocks(cols)].repeat_interleave(BLOCK, 0)[:rows]


def _saturates_above(fp8: torch.dtype) -> float:
    """Return the largest magnitude that is rounded to FP8_MAX: half a step above it."""
    info = torch.finfo(fp8)
    return float(info.max + 2 ** math.floor(math.log2(info.max)) * info.eps / 2)


# ------------------------------------------------------------------------------- layers at work


class Watch:
    """Measures the calls of one layer, which tells it of them."""

    def __init__(self, stats: TensorStats, name: str) -> None:
        self.sums = {role: stats._sums.setdefault((name, role), _Sums()) for role in _ROLES}

    def begin(
        self,
        x: Tensor,
        w: Tensor,
        w_quantized: ops.Quantized | None,
        recipe: Recipe,
        amaxes: Tensor | None,
    ) -> "Call | None":
        """Measure x and w, before the layer uses them and records their amaxes."""
        x = _arrived(x)
        if not _can_be_measured(x):
            return None
        call = Call(self.sums["dy"], recipe, amaxes, x.requires_grad, w.requires_grad)
        is_recomputed = torch._C._current_graph_task_id() != -1
        with _aside():
            if not is_recomputed:
                kind = x.device.type
                # As `linear` does.
                autocasts = torch.is_autocast_enabled(kind)
                seen = _matrix(x.to(torch.get_autocast_dtype(kind)) if autocasts else x)
                self.sums["x"].add(seen, operands.quantize_x(seen, **call.how("x", seen)))
            w = w if isinstance(w, GatheredWeight) else plain(w).detach()
            if type(w) is Tensor:
                q = w_quantized or operands.quantize_w(w, **call.how("w", w))
                call.fold = operands.columns(q).fold
                if not is_recomputed:
                    self.sums["w"].add(w, q)
        return call


class Call:
    """One call of a layer, until its backward."""

    fold: Tensor | None = None  # of w's columns, which dy takes over

    def __init__(
        self, sums: _Sums, recipe: Recipe, amaxes: Tensor | None, dx: bool, dw: bool
    ) -> None:
        self.sums, self.recipe, self.amaxes = sums, recipe, amaxes
        # In FP8 for dx and, but in one recipe, for dw.
        self.needs_dy = dx or (dw and not operands.keeps_x(recipe))

    def end(self, y: Tensor) -> None:
        """Measure dy as the layer's backward gets it: after all hooks of y."""
        if self.needs_dy and y.grad_fn is not None:
            y.grad_fn.register_prehook(self._backward)

    def _backward(self, gradients: tuple[Tensor | None, ...]) -> None:
        dy = _arrived(gradients[0])
        if dy is None or not _can_be_measured(dy):
            return
        with _aside():
            dy = _matrix(dy.detach())
            q = operands.quantize_dy(
                dy, row_major=True, fold_cols=self.fold, fold_rows=None, sums_dtype=None,
                **self.how("dy", dy),
            )  # fmt: skip
            self.sums.add(dy if self.fold is None else dy * self.fold[: dy.shape[1]], q)

    def how(self, role: str, t: Tensor) -> dict[str, Any]:
        """Return the arguments with which the layer's own quantise gives the same bytes."""
        history = None
        if self.amaxes is not None:
            history = History(self.amaxes[_ROLES.index(role)].clone(), record=False)
        emulated = ops.backend(t.device, self.recipe.emulate, self.recipe.name).emulated
        return {
            "recipe": self.recipe, "history": history, "transposed": False, "emulated": emulated,
        }  # fmt: skip


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Compute what nobody shall hear of: neither autograd nor a selective checkpoint."""
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _arrived(t: Any) -> Any:
    """Wait for a tensor that a collective has yet to bring, as the layer does."""
    return t.wait() if type(t).__name__ == "AsyncCollectiveTensor" else t


def _can_be_measured(t: Tensor) -> bool:
    if type(t) not in (Tensor, nn.Parameter) or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def _matrix(t: Tensor) -> Tensor:
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


# ----------------------------------------------------------------------------------- for people


def _table(rows: list[TensorStat]) -> str:
    head = ["layer", "tensor", "calls", "amax", "scale", "saturated", "flushed", "non-finite"]
    head += ["SQNR, dB", "row SQNR, dB"]
    lines = [head, *([
        row.layer or "(root)", row.tensor, str(row.calls), f"{row.amax:.3g}", f"{row.scale:.3g}",
        *(f"{share:.2%}" for share in (row.saturated, row.flushed, row.non_finite)),
        f"{row.sqnr:.1f}", f"{row.row_sqnr:.1f}",
    ] for row in rows)]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([*map(str.ljust, line[:2], widths), *map(str.rjust, line[2:], widths[2:])])
        for line in lines
    )
