"""Recipes: how tensors become FP8. Frozen choices, no tensors, no state.

    scale = FP8_MAX / max(amax, 1e-12)      real -> FP8:  q = saturate(x * scale)
    scale_inv = 1 / scale                   FP8 -> real:  x ~ q * scale_inv

A recipe speaks of formats in words ("e4m3"); which dtype that is depends on the tensor's device
(`device.formats`).
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from .device import Formats


@dataclass(frozen=True)
class DynamicScaling:
    """The `tensorwise` recipe: one scale per tensor, from this tensor's own amax.

    Bytes and scales equal torchao's "tensorwise" and nanochat's. Fast accumulation skips the
    periodic promotion of partial sums to float32: fine for the output, not for gradients.

    Args:
        fp8_format: "hybrid" quantises x and w to e4m3 and dy to e5m2; "e4m3" takes e4m3 for all.
        fast_accum_output: fast accumulation in `y = x @ w.T`.
        fast_accum_grad_input: the same in `dx = dy @ w`.
        fast_accum_grad_weight: the same in `dw = dy.T @ x`.
        recompute_weight: keep w itself from forward to backward, and quantise it once more there,
            instead of keeping its transposed FP8 copy: a byte less per weight, some 2 % more time.
        emulate: compute in plain PyTorch even where native FP8 exists.

    Raises:
        ValueError: `fp8_format` is unknown, or "e5m2", which no hardware can multiply by itself.
    """

    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    fast_accum_output: bool = True
    fast_accum_grad_input: bool = False
    fast_accum_grad_weight: bool = False
    recompute_weight: bool = False
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.fp8_format == "e5m2":
            raise ValueError(
                "fp8_format: 'e5m2' would need e5m2 @ e5m2 GEMMs, which no GPU has; "
                "want 'hybrid' (e5m2 for dy only) or 'e4m3'"
            )
        if self.fp8_format not in ("hybrid", "e4m3"):
            raise ValueError(f"fp8_format: want 'hybrid' or 'e4m3', got {self.fp8_format!r}")

    @property
    def name(self) -> str:
        """The name under which `resolve` knows this recipe."""
        return "tensorwise"

    def forward_dtype(self, formats: Formats) -> torch.dtype:
        """Return the dtype of x and w, given the formats of their device."""
        return formats.e4m3

    def backward_dtype(self, formats: Formats) -> torch.dtype:
        """Return the dtype of dy."""
        return formats.e5m2 if self.fp8_format == "hybrid" else formats.e4m3


Recipe = DynamicScaling
_NAMED: dict[str, Recipe] = {"tensorwise": DynamicScaling()}
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


class Float8LinearRecipeName(str, Enum):
    """torchao's recipe names; members equal their strings."""

    TENSORWISE = "tensorwise"


@dataclass(frozen=True)
class Float8GemmConfig:
    """Options of one GEMM, as in torchao."""

    use_fast_accum: bool = False


@dataclass(frozen=True)
class Float8LinearConfig:
    """torchao's configuration object: the part of it that the recipes here can honour.

    Fields have torchao's names, meanings and defaults; one that is missing here raises TypeError,
    as any unknown argument. Shapes are always padded, so `pad_inner_dim` is not needed.
    """

    gemm_config_output: Float8GemmConfig = field(default=Float8GemmConfig(use_fast_accum=True))
    gemm_config_grad_input: Float8GemmConfig = field(default=Float8GemmConfig())
    gemm_config_grad_weight: Float8GemmConfig = field(default=Float8GemmConfig())
    force_recompute_fp8_weight_in_bwd: bool = False
    emulate: bool = False

    @staticmethod
    def from_recipe_name(recipe_name: "Float8LinearRecipeName | str") -> "Float8LinearConfig":
        """Return the configuration of that name. Raises ValueError, listing the names."""
        name = recipe_name.value if isinstance(recipe_name, Enum) else recipe_name
        resolve(name)
        return Float8LinearConfig()

    def recipe(self) -> Recipe:
        """Return the recipe that this configuration describes."""
        return DynamicScaling(
            fast_accum_output=self.gemm_config_output.use_fast_accum,
            fast_accum_grad_input=self.gemm_config_grad_input.use_fast_accum,
            fast_accum_grad_weight=self.gemm_config_grad_weight.use_fast_accum,
            recompute_weight=self.force_recompute_fp8_weight_in_bwd,
            emulate=self.emulate,
        )
