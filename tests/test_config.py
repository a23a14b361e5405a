"""torchao's configuration objects: the same ones, the same meaning, or a refusal with a reason."""

import dataclasses
from enum import Enum

import pytest
import torch
from cases import state_for

import fp8lt
from fp8lt import CastConfig, Float8GemmConfig, Float8LinearConfig, ScalingGranularity, ScalingType

E4M3, E5M2 = fp8lt.device.OCP
AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
DISABLED = CastConfig(scaling_type=ScalingType.DISABLED)
TORCHAO_NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def as_words(config: object) -> object:
    """A configuration of ours or of torchao's as comparable values."""
    if dataclasses.is_dataclass(config):
        return {f.name: as_words(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return config.value if isinstance(config, Enum) else config


@pytest.mark.parametrize("name", TORCHAO_NAMES)
def test_a_named_configuration_is_torchaos(name: str) -> None:
    from torchao.float8 import config as torchao

    ours = Float8LinearConfig.from_recipe_name(name)
    assert as_words(ours) == as_words(torchao.Float8LinearConfig.from_recipe_name(name))
    assert ours == Float8LinearConfig.from_recipe_name(fp8lt.Float8LinearRecipeName(name))
    assert ours.recipe() == fp8lt.recipe.resolve(name)
    assert dataclasses.replace(ours, emulate=True).recipe().emulate


def test_enums_and_defaults_are_torchaos() -> None:
    from torchao.float8 import config as torchao

    for name in ("Float8LinearRecipeName", "ScalingType", "ScalingGranularity"):
        ours, theirs = getattr(fp8lt, name), getattr(torchao, name)
        assert {m.name: m.value for m in ours} == {m.name: m.value for m in theirs}
    for name in ("CastConfig", "Float8GemmConfig", "Float8LinearConfig"):
        ours, theirs = getattr(fp8lt, name), getattr(torchao, name)
        fields = [[f.name for f in dataclasses.fields(kind)] for kind in (ours, theirs)]
        assert fields[0] == fields[1]
    assert as_words(CastConfig()) == {
        "scaling_type": "dynamic",
        "scaling_granularity": "tensorwise",
        "target_dtype": None,
    }


def test_every_option_reaches_the_recipe() -> None:
    gemm, options = Float8GemmConfig(use_fast_accum=True), {"emulate": True}
    recipe = Float8LinearConfig(
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
        gemm_config_output=Float8GemmConfig(),
        gemm_config_grad_input=gemm,
        gemm_config_grad_weight=gemm,
        force_recompute_fp8_weight_in_bwd=True,
        round_scales_to_power_of_2=True,
        **options,
    ).recipe()
    assert recipe == fp8lt.DynamicScaling("e4m3", False, True, True, True, True, True)
    rowwise = Float8LinearConfig(
        cast_config_input=AXISWISE, cast_config_weight=AXISWISE, cast_config_grad_output=AXISWISE
    ).recipe()
    assert rowwise == fp8lt.RowwiseScaling(fp8_format="hybrid", power_of_two_scales=False)
    for pad_inner_dim in (False, True):
        assert Float8LinearConfig(pad_inner_dim=pad_inner_dim).recipe() == fp8lt.DynamicScaling()


def test_a_cast_that_is_shared_stays_as_it_was() -> None:
    shared = CastConfig()
    config = Float8LinearConfig(
        cast_config_input=shared, cast_config_weight=shared, cast_config_grad_output=shared
    )
    assert shared.target_dtype is None  # torchao fills it in: its grad_output becomes e4m3
    assert config.cast_config_input.target_dtype == E4M3
    assert config.cast_config_grad_output.target_dtype == E5M2
    assert config == Float8LinearConfig()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "enable_fsdp_float8_all_gather": True,
                **{f"cast_config_{operand}": AXISWISE for operand in ("input", "weight")},
                "cast_config_grad_output": AXISWISE,
            },
            "enable_fsdp_float8_all_gather: want False with the casts of recipe 'rowwise'",
        ),
        ({"cast_config_input": DISABLED}, "cast_config_input: want axiswise.*got disabled"),
        ({"cast_config_input": AXISWISE}, "cast_config_weight: want axiswise.*got tensorwise"),
        ({"cast_config_weight": AXISWISE}, "cast_config_weight: want tensorwise.*got axiswise"),
        ({"cast_config_grad_output": AXISWISE}, "cast_config_grad_output: want tensorwise"),
        (
            {"cast_config_weight_for_grad_input": AXISWISE},
            "cast_config_weight_for_grad_input: want tensorwise, .*tensorwise, rowwise, rowwise_wi",
        ),
        (
            {"cast_config_input_for_grad_weight": DISABLED},
            "cast_config_input: want axiswise, as in recipe 'rowwise_with_gw_hp', got tensorwise",
        ),
        (
            {"cast_config_input": CastConfig(target_dtype=E5M2)},
            "cast_config_input: want target_dtype e4m3, got e5m2",
        ),
        (
            {"cast_config_weight_for_grad_input": CastConfig(target_dtype=E5M2)},
            "cast_config_weight_for_grad_input: want target_dtype e4m3, got e5m2",
        ),
        (
            {"cast_config_grad_output_for_grad_weight": CastConfig(target_dtype=E4M3)},
            "cast_config_grad_output_for_grad_weight: want target_dtype e5m2, got e4m3",
        ),
    ],
)
def test_what_no_recipe_computes_is_refused_when_it_is_made(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Float8LinearConfig(**options)


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValueError, match="scaling_type: want one of dynamic, disabled; got 'stat"):
        CastConfig(scaling_type="static")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scaling_granularity: want one of tensorwise, axiswise;"):
        CastConfig(scaling_granularity="blockwise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scaling_granularity: axiswise wants scaling_type dynam"):
        CastConfig(ScalingType.DISABLED, ScalingGranularity.AXISWISE)
    with pytest.raises(ValueError, match=r"target_dtype: want an FP8 dtype or None, got torch\.in"):
        CastConfig(target_dtype=torch.int8)
    names = "recipe: want one of tensorwise, rowwise, rowwise_with_gw_hp; got 'mx'$"
    with pytest.raises(ValueError, match=names):
        Float8LinearConfig.from_recipe_name("mx")
    with pytest.raises(ValueError, match=r"got 'blockwise'; .* give its name itself as config"):
        Float8LinearConfig.from_recipe_name("blockwise")


@pytest.mark.parametrize("name", fp8lt.recipe.NAMES)
def test_a_model_is_converted_by_name_by_recipe_and_by_configuration(name: str) -> None:
    recipe = fp8lt.recipe.resolve(name)
    configs = [name, recipe]
    configs += [Float8LinearConfig.from_recipe_name(name)] if name in TORCHAO_NAMES else []
    for config in configs:
        layer = fp8lt.convert_to_float8_training(torch.nn.Linear(40, 24), config=config)
        assert layer.recipe == recipe
        assert f"recipe={name}" in repr(layer)
        x = torch.randn(5, 40)
        options = {"recipe": name, "state": state_for(name, "cpu")}
        assert torch.equal(layer(x), fp8lt.linear(x, layer.weight, layer.bias, **options))


def test_a_field_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"cast_config_input: want a fp8lt\.CastConfig, got None"):
        fp8lt.Float8LinearConfig(cast_config_input=None)
    with pytest.raises(TypeError, match=r"gemm_config_output: want a fp8lt\.Float8GemmConfig"):
        fp8lt.Float8LinearConfig(gemm_config_output=True)
    import torchao.float8

    config = torchao.float8.Float8LinearConfig()
    with pytest.raises(TypeError, match=r"got torchao\.float8\.config\.Float8LinearConfig"):
        fp8lt.convert_to_float8_training(torch.nn.Linear(16, 16), config=config)
