"""torchao's configuration objects, lowered to recipes.

Names, fields, meanings and defaults are torchao's, so that a script changes its import and nothing
else. What no recipe here computes is refused when the object is made.
"""

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import torch

from .device import FNUZ, OCP
from .recipe import NAMES, DynamicScaling, Recipe, RowwiseScaling, resolve


class Float8LinearRecipeName(str, Enum):
    """torchao's recipe names; members equal their strings.

    Example:
        >>> name = fp8lt.Float8LinearRecipeName.ROWWISE
        >>> fp8lt.convert_to_float8_training(nn.Linear(3, 2), config=name).recipe.name
        'rowwise'
    """

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


class ScalingType(str, Enum):
    """Whether a tensor is cast to FP8, as in torchao; members equal their strings.

    Example:
        >>> fp8lt.ScalingType.DYNAMIC == "dynamic"
        True
    """

    DYNAMIC = "dynamic"
    DISABLED = "disabled"  # left in its own precision


class ScalingGranularity(str, Enum):
    """What shares one scale, as in torchao; members equal their strings.

    Example:
        >>> fp8lt.ScalingGranularity.AXISWISE == "axiswise"
        True
    """

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"  # a row of an operand of a GEMM


@dataclass(frozen=True)
class CastConfig:
    """How one tensor is cast for one GEMM, as in torchao.

    Args:
        scaling_type: DYNAMIC, or DISABLED for a tensor left in its own precision.
        scaling_granularity: TENSORWISE or AXISWISE.
        target_dtype: an FP8 dtype; None: e5m2 for grad_output, e4m3 for the others.

    Raises:
        ValueError: an unknown value, or AXISWISE that is not DYNAMIC.

    Example:
        >>> e4m3 = fp8lt.CastConfig(target_dtype=torch.float8_e4m3fn)
        >>> fp8lt.Float8LinearConfig(cast_config_grad_output=e4m3).recipe().fp8_format
        'e4m3'
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("scaling_type", ScalingType),
            ("scaling_granularity", ScalingGranularity),
        ):
            value, known = getattr(self, name), [member.value for member in kind]
            if value not in known:
                raise ValueError(f"{name}: want one of {', '.join(known)}; got {value!r}")
        if self._kind == "disabled" and self.scaling_granularity == "axiswise":
            raise ValueError("scaling_granularity: axiswise wants scaling_type dynamic")
        if self.target_dtype is not None and self.target_dtype not in (*OCP, *FNUZ):
            raise ValueError(f"target_dtype: want an FP8 dtype or None, got {self.target_dtype}")

    @property
    def _kind(self) -> str:
        """The granularity, or "disabled"."""
        if self.scaling_type == "disabled":
            return "disabled"
        return ScalingGranularity(self.scaling_granularity).value


@dataclass(frozen=True)
class Float8GemmConfig:
    """Options of one GEMM, as in torchao.

    Example:
        >>> fast = fp8lt.Float8GemmConfig(use_fast_accum=True)
        >>> fp8lt.Float8LinearConfig(gemm_config_grad_input=fast).recipe().fast_accum_grad_input
        True
    """

    use_fast_accum: bool = False


# The casts of each operand: for the first of its GEMMs, and for the other.
_OPERANDS = {
    "cast_config_input": "cast_config_input_for_grad_weight",
    "cast_config_weight": "cast_config_weight_for_grad_input",
    "cast_config_grad_output": "cast_config_grad_output_for_grad_weight",
}
_CASTS = tuple(cast for pair in _OPERANDS.items() for cast in pair)
# What those casts are in each of torchao's recipes.
_KINDS = {
    "tensorwise": dict.fromkeys(_CASTS, "tensorwise"),
    "rowwise": dict.fromkeys(_CASTS, "axiswise"),
    "rowwise_with_gw_hp": {
        **dict.fromkeys(_CASTS, "axiswise"),
        "cast_config_input_for_grad_weight": "disabled",
        "cast_config_weight_for_grad_input": "tensorwise",
        "cast_config_grad_output_for_grad_weight": "disabled",
    },
}


@dataclass(frozen=True)
class Float8LinearConfig:
    """torchao's configuration object: what the recipes here can honour.

    Fields have torchao's names, meanings and defaults. Shapes are always padded, so both values of
    `pad_inner_dim` are honoured. `force_recompute_fp8_weight_in_bwd`, without effect in torchao, is
    `recompute_weight` of a recipe.

    Raises:
        ValueError: a combination that no recipe here computes; the text names the field.
        TypeError: a field that is not of its type.

    Example:
        >>> config = fp8lt.Float8LinearConfig.from_recipe_name("rowwise")
        >>> fp8lt.convert_to_float8_training(nn.Linear(3, 2), config=config).recipe.name
        'rowwise'
    """

    cast_config_input: CastConfig = field(default=CastConfig())
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = field(default=CastConfig())
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = field(default=CastConfig())
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = field(default=Float8GemmConfig(use_fast_accum=True))
    gemm_config_grad_input: Float8GemmConfig = field(default=Float8GemmConfig())
    gemm_config_grad_weight: Float8GemmConfig = field(default=Float8GemmConfig())
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        self._fill_in_casts()
        recipe = self.recipe()
        if self.enable_fsdp_float8_all_gather and not isinstance(recipe, DynamicScaling):
            raise ValueError(
                "enable_fsdp_float8_all_gather: want False with the casts of recipe "
                f"{recipe.name!r}; weights are gathered in FP8 under one scale, 'tensorwise'"
            )

    def _check_types(self) -> None:
        optional = _OPERANDS.values()  # which None says to take from the operand's other cast
        gemms = [f.name for f in fields(self) if f.name.startswith("gemm_config")]
        for names, want in ((_CASTS, CastConfig), (gemms, Float8GemmConfig)):
            for name in names:
                got = getattr(self, name)
                if not isinstance(got, want) and not (got is None and name in optional):
                    raise TypeError(f"{name}: want a fp8lt.{want.__name__}, got {got!r}")

    def _fill_in_casts(self) -> None:
        """Replace each None as torchao does; a CastConfig that others may hold stays as it is."""
        for first, other in _OPERANDS.items():
            default = OCP.e5m2 if first == "cast_config_grad_output" else OCP.e4m3
            cast = getattr(self, first)
            for name, given in ((first, cast), (other, getattr(self, other) or cast)):
                filled = replace(given, target_dtype=given.target_dtype or default)
                object.__setattr__(self, name, filled)

    @staticmethod
    def from_recipe_name(recipe_name: "Float8LinearRecipeName | str") -> "Float8LinearConfig":
        """Return the configuration of that name. Raises ValueError, listing the names."""
        name = recipe_name.value if isinstance(recipe_name, Enum) else recipe_name
        if name not in _KINDS:
            hint = "; it is no recipe of torchao's: give its name itself as config"
            raise ValueError(
                f"recipe: want one of {', '.join(_KINDS)}; "
                f"got {name!r}{hint if name in NAMES else ''}"
            )
        if name == "tensorwise":
            return Float8LinearConfig()
        casts: dict[str, Any] = {cast: _cast(kind) for cast, kind in _KINDS[name].items()}
        for cast in ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight"):
            casts[cast] = replace(casts[cast], target_dtype=OCP.e4m3)
        return Float8LinearConfig(**casts, round_scales_to_power_of_2=True)

    def recipe(self) -> Recipe:
        """Return the recipe that this configuration describes."""
        options: dict[str, Any] = dict(
            fp8_format=self._fp8_format(),
            fast_accum_output=self.gemm_config_output.use_fast_accum,
            fast_accum_grad_input=self.gemm_config_grad_input.use_fast_accum,
            fast_accum_grad_weight=self.gemm_config_grad_weight.use_fast_accum,
            recompute_weight=self.force_recompute_fp8_weight_in_bwd,
            power_of_two_scales=self.round_scales_to_power_of_2,
            emulate=self.emulate,
        )
        name = self._torchao_name()
        if name == "tensorwise":
            return DynamicScaling(**options)
        return RowwiseScaling(**options, high_precision_grad_weight=name == "rowwise_with_gw_hp")

    def _torchao_name(self) -> str:
        """Return which of torchao's recipes the granularities are."""
        kinds = {cast: getattr(self, cast)._kind for cast in _CASTS}
        name = "tensorwise" if kinds["cast_config_input"] == "tensorwise" else "rowwise"
        if kinds["cast_config_input_for_grad_weight"] == "disabled":
            name = "rowwise_with_gw_hp"
        for cast, want in _KINDS[name].items():
            if kinds[cast] != want:
                raise ValueError(
                    f"{cast}: want {want}, as in recipe {name!r}, got {kinds[cast]}: the casts can "
                    f"be combined as in torchao's recipes alone ({', '.join(_KINDS)})"
                )
        return name

    def _fp8_format(self) -> str:
        """Return the format that the dtypes of the casts are."""
        formats = {cast: _format(getattr(self, cast).target_dtype) for cast in _CASTS}
        of_dy = formats["cast_config_grad_output"]
        for cast, got in formats.items():
            want = of_dy if "grad_output" in cast else "e4m3"
            if got != want:
                raise ValueError(
                    f"{cast}: want target_dtype {want}, got {got}: input and weight are e4m3 in "
                    "every recipe, grad_output is e4m3 or e5m2, the same for both its GEMMs"
                )
        return "hybrid" if of_dy == "e5m2" else "e4m3"


def _cast(kind: str) -> CastConfig:
    if kind == "disabled":
        return CastConfig(scaling_type=ScalingType.DISABLED)
    return CastConfig(scaling_granularity=ScalingGranularity(kind))


def _format(dtype: torch.dtype) -> str:
    return "e4m3" if dtype in (OCP.e4m3, FNUZ.e4m3) else "e5m2"


def recipe_of(config: Float8LinearConfig | Recipe | str | None) -> Recipe:
    """Return the recipe that a conversion is to use.

    Raises TypeError for what is none of these, ValueError for a name that no recipe has.
    """
    if config is None:
        return resolve("tensorwise")
    if isinstance(config, Float8LinearConfig):
        return config.recipe()
    try:
        return resolve(config)
    except TypeError:
        raise TypeError(
            "config: want a fp8lt.Float8LinearConfig, a recipe or its name, got "
            f"{type(config).__module__}.{type(config).__qualname__}"
        ) from None
