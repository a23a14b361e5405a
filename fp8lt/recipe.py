"""Recipes: how tensors become FP8. Frozen choices, no tensors, no state (that is `state.py`).

    scale = FP8_MAX / max(amax, 1e-12)      real -> FP8:  q = saturate(x * scale)
    scale_inv = 1 / scale                   FP8 -> real:  x ~ q * scale_inv

    name                   one scale for                             x, w, dy
    "tensorwise"           a tensor                                  e4m3, e4m3, e5m2
    "delayed"              a tensor, from amaxes of earlier calls    e4m3, e4m3, e5m2
    "rowwise"              a row of each operand of each GEMM        e4m3
    "rowwise_with_gw_hp"   the same; dw from x and dy themselves     e4m3
    "rowwise_folded"       a row of x and w, folded into dy          e4m3
    "blockwise"            128 of a row of x, dy; 128 x 128 of w     e4m3

A finer scale keeps an outlier's damage to its row or block, and costs time. A recipe speaks of
formats in words ("e4m3"); which dtype that is depends on the tensor's device (`device.formats`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Literal

import torch

from .device import Formats


@dataclass(frozen=True)
class Recipe(ABC):
    """What every recipe says; the base of the ones that can be used.

    Fast accumulation skips the periodic promotion of partial sums to float32: fine for the output,
    not for gradients.

    Args:
        fp8_format: "hybrid" quantises x and w to e4m3 and dy to e5m2; "e4m3" takes e4m3 for all.
        fast_accum_output: fast accumulation in `y = x @ w.T`.
        fast_accum_grad_input: the same in `dx = dy @ w`.
        fast_accum_grad_weight: the same in `dw = dy.T @ x`.
        recompute_weight: keep w itself from forward to backward, and quantise it once more there,
            instead of keeping its transposed FP8 copy: a byte less per weight, a little more time.
            Under `torch.compile`, with one scale per tensor, x is quantised there once more, too,
            where it can be made from what backward has in any case.
        power_of_two_scales: round scales down to powers of two, so that they multiply exactly.
        emulate: compute in plain PyTorch even where native FP8 exists.

    Raises:
        ValueError: `fp8_format` is unknown, or "e5m2", which no hardware can multiply by itself.
    """

    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    fast_accum_output: bool = True
    fast_accum_grad_input: bool = False
    fast_accum_grad_weight: bool = False
    recompute_weight: bool = False
    power_of_two_scales: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.fp8_format == "e5m2":
            raise ValueError(
                "fp8_format: 'e5m2' would need e5m2 @ e5m2 GEMMs, which no GPU has; "
                "want 'hybrid' (e5m2 for dy only) or 'e4m3'"
            )
        if self.fp8_format not in ("hybrid", "e4m3"):
            raise ValueError(f"fp8_format: want 'hybrid' or 'e4m3', got {self.fp8_format!r}")
        for one in fields(self):
            if isinstance(one.default, bool) and not isinstance(getattr(self, one.name), bool):
                got = getattr(self, one.name)
                raise ValueError(f"{one.name}: want True or False, got {got!r}")

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which `resolve` knows this kind of recipe."""

    def forward_dtype(self, formats: Formats) -> torch.dtype:
        """Return the dtype of x and w, given the formats of their device."""
        return formats.e4m3

    def backward_dtype(self, formats: Formats) -> torch.dtype:
        """Return the dtype of dy."""
        return formats.e5m2 if self.fp8_format == "hybrid" else formats.e4m3


@dataclass(frozen=True)
class DynamicScaling(Recipe):
    """The `tensorwise` recipe: one scale per tensor, from this tensor's own amax.

    Bytes and scales equal torchao's "tensorwise" and nanochat's. Arguments: see `Recipe`.

    Example:
        >>> recipe = fp8lt.DynamicScaling(power_of_two_scales=True)
        >>> fp8lt.linear(torch.ones(2, 3), torch.ones(1, 3), recipe=recipe)
        tensor([[3.],
                [3.]])
    """

    @property
    def name(self) -> str:
        return "tensorwise"


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """The `delayed` recipe: one scale per tensor, from the amaxes of earlier calls.

        scale = FP8_MAX / (max(a, 1e-12) * 2**margin)      a: from the history of the tensor's role

    A tensor is then read once, for its amax and its copies, instead of twice. What exceeds `a` by
    more than the margin saturates. The first tensor of a role is scaled by its own amax. What is
    recorded, and when: `state.py`.

    Args: see `Recipe`, and, as in TransformerEngine,
        margin: powers of two that are left free above `a`; negative ones let `a` itself saturate.
        amax_history_len: how many recorded amaxes the history holds, 1 or more.
        amax_compute_algo: `a` is the "max" of the history, or its "most_recent" entry.

    Raises:
        ValueError: as for `Recipe`; a margin that is no integer of -32 to 32, a history that is no
            integer of 1 or more, an algorithm that is not known.

    Example:
        >>> layer = fp8lt.Linear(3, 2, recipe=fp8lt.DelayedScaling(amax_history_len=4, margin=1))
        >>> layer(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    margin: int = 0
    amax_history_len: int = 16
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        # bool is an int to Python; a larger margin would leave the range of float32.
        if type(self.margin) is not int or abs(self.margin) > 32:
            raise ValueError(f"margin: want an integer of -32 to 32, got {self.margin!r}")
        if type(self.amax_history_len) is not int or self.amax_history_len < 1:
            raise ValueError(
                f"amax_history_len: want an integer of 1 or more, got {self.amax_history_len!r}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo: want 'max' or 'most_recent', got {self.amax_compute_algo!r}"
            )

    @property
    def name(self) -> str:
        return "delayed"


@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """The `rowwise` recipes: one scale per row of each operand of each GEMM.

    A scale must not vary along a contraction, so x, w and dy are each quantised twice, along rows
    and along columns. Bytes and scales equal torchao's "rowwise" and "rowwise_with_gw_hp", but for
    scales just below a power of two, which torchao rounds up.

    Args: see `Recipe`, and
        power_of_two_scales: the default here. Undoing a scale, and folding it, is then exact.
        high_precision_grad_weight: `rowwise_with_gw_hp`: dw is computed from x and dy themselves,
            and dx from w with one scale. Forward keeps x.
        folded: `rowwise_folded`: x and w are quantised once, along rows, and their scales are
            folded into dy before it is quantised:
            `dx = (dy * sw) @ wq`, `dw = (dy * sx).T @ xq`, where `w = sw * wq` and `x = sx * xq`.

    Raises:
        ValueError: as for `Recipe`; both `high_precision_grad_weight` and `folded`, or the former
            and `fast_accum_grad_weight`.

    Example:
        >>> fp8lt.RowwiseScaling(folded=True).name
        'rowwise_folded'
        >>> x = torch.tensor([[1e-4], [1e4]])  # a scale for each row: none is flushed to zero
        >>> fp8lt.linear(x, torch.ones(1, 1), recipe=fp8lt.RowwiseScaling()).count_nonzero()
        tensor(2)
    """

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two_scales: bool = True
    high_precision_grad_weight: bool = False
    folded: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high_precision_grad_weight and self.folded:
            raise ValueError(
                "high_precision_grad_weight, folded: want one of them at most: "
                "in high precision, dw has no scales to fold"
            )
        if self.high_precision_grad_weight and self.fast_accum_grad_weight:
            raise ValueError(
                "fast_accum_grad_weight: want False with high_precision_grad_weight, "
                "which computes dw without FP8"
            )

    @property
    def name(self) -> str:
        if self.high_precision_grad_weight:
            return "rowwise_with_gw_hp"
        return "rowwise_folded" if self.folded else "rowwise"


@dataclass(frozen=True)
class BlockScaling(Recipe):
    """The `blockwise` recipe: one scale per 128 elements of x and dy, per 128 x 128 of w.

    As DeepSeek-V3 was trained. x and dy are quantised twice, along rows and along columns.
    Arguments: see `Recipe`.

    Raises:
        ValueError: as for `Recipe`; fast accumulation, which cuBLASLt lacks with block scales.

    Example:
        >>> recipe = fp8lt.BlockScaling(power_of_two_scales=True)
        >>> fp8lt.linear(torch.ones(2, 3), torch.ones(1, 3), recipe=recipe)
        tensor([[3.],
                [3.]])
    """

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    fast_accum_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("fast_accum_output", "fast_accum_grad_input", "fast_accum_grad_weight"):
            if getattr(self, field):
                raise ValueError(
                    f"{field}: want False: cuBLASLt has no fast accumulation with block scales"
                )

    @property
    def name(self) -> str:
        return "blockwise"


_NAMED: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        DynamicScaling(),
        DelayedScaling(),
        RowwiseScaling(),
        RowwiseScaling(high_precision_grad_weight=True),
        RowwiseScaling(folded=True),
        BlockScaling(),
    )
}
NAMES = tuple(_NAMED)


def resolve(recipe: "str | Recipe") -> Recipe:
    """Return the recipe of that name, or the recipe itself.

    Raises:
        ValueError: no recipe has that name.
        TypeError: neither a name nor a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe: want a name or a recipe object, got {type(recipe).__name__}")
    if recipe not in _NAMED:
        raise ValueError(f"recipe: want one of {', '.join(NAMES)}; got {recipe!r}")
    return _NAMED[recipe]
