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
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import operands, ops
from .emulate import BLOCK, Scaling, blocks
from .fsdp import GatheredWeight, plain
from .module import Linear, amaxes_of
from .recipe import DelayedScaling
from .state import History

_CHUNK = 1 << 22  # elements that are looked at together: some 100 MB of memory meanwhile
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
    """The answer of `tensor_stats`. Reading it waits for the device; `print` shows all of it."""

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
    return row.non_finite == 0, min(row.sqnr, row.row_sqnr)


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
    sums, amax = v.new_zeros(7, dtype=torch.float64), v.new_zeros((), dtype=torch.float32)
    step = max(1, _CHUNK // cols)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        inv = scale_inv[part if len(scale_inv) > 1 else slice(None)]
        real = _in_blocks(v[part].float(), width)
        fp8 = _in_blocks(q.data[part, :cols].float(), width)
        scaled = real / inv[:, :, None]  # in FP8's units: what is small stays above zero, squared
        signal, noise = (
            (t.square().sum(2).double() * inv.double().square()).sum(1)
            for t in (scaled, fp8 - scaled)
        )
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
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            sums = {role: stats._sums.setdefault((name, role), _Sums()) for role in _ROLES}
            for handle in _Watch(layer, sums).hooks():
                stack.callback(handle.remove)
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield stats


class _Watch:
    """The hooks of one layer."""

    def __init__(self, layer: Linear, sums: dict[str, _Sums]) -> None:
        self.layer, self.sums = layer, sums
        self.fold: Tensor | None = None  # of w's columns, which dy takes over

    def hooks(self) -> Iterator[RemovableHandle]:
        yield self.layer.register_forward_pre_hook(self._before, with_kwargs=True)
        # First: others may send y to other ranks, or put it together.
        yield self.layer.register_forward_hook(self._after, with_kwargs=True, prepend=True)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, weight = _local(_input(args, kwargs)), self.layer.weight
        recomputed = torch._C._current_graph_task_id() != -1
        if recomputed or self.layer._fp8_disabled or not _can_be_measured(x):
            return
        with torch.no_grad():
            kind = x.device.type
            if torch.is_autocast_enabled(kind):  # as `linear` does
                x = x.to(torch.get_autocast_dtype(kind))
            x = _matrix(x)
            self.sums["x"].add(x, operands.quantize_x(x, **self._how("x", x)))
            if isinstance(weight, GatheredWeight):
                return
            w = _local(plain(weight)).detach()
            q = operands.quantize_w(w, **self._how("w", w))
            self.sums["w"].add(w, q)
            self.fold = operands.columns(q).fold

    def _after(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        x, layer = _input(args, kwargs), self.layer
        if layer._fp8_disabled or not y.requires_grad:
            return
        # In FP8 for dx and, but in one recipe, for dw.
        dw_in_fp8 = layer.weight.requires_grad and not operands.keeps_x(layer.recipe)
        if x.requires_grad or dw_in_fp8:
            y.register_hook(self._backward)

    def _backward(self, dy: Tensor) -> None:
        dy = _local(dy)
        if not _can_be_measured(dy):
            return
        with torch.no_grad():
            dy = _matrix(dy)
            q = operands.quantize_dy(
                dy, row_major=True, fold_cols=self.fold, fold_rows=None, sums_dtype=None,
                **self._how("dy", dy),
            )  # fmt: skip
            v = dy if self.fold is None else dy * self.fold[: dy.shape[1]]
            self.sums["dy"].add(v, q)

    def _how(self, role: str, t: Tensor) -> dict[str, Any]:
        """Return the arguments with which the layer's own quantise gives the same bytes."""
        recipe, history = self.layer.recipe, None
        if isinstance(recipe, DelayedScaling):
            history = History(amaxes_of(self.layer)[_ROLES.index(role)].clone(), record=False)
        emulated = ops.backend(t.device, recipe.emulate, recipe.name).emulated
        return {"recipe": recipe, "history": history, "transposed": False, "emulated": emulated}


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def _local(t: Any) -> Any:
    """Return this rank's part of a DTensor."""
    return t._local_tensor if type(t).__name__ == "DTensor" else t


def _can_be_measured(t: Any) -> bool:
    """Say whether there is something to measure; what is wrong with it, the layer says better."""
    if not isinstance(t, Tensor) or t.dim() < 1 or t.is_meta or t.dtype not in ops.REAL_DTYPES:
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
