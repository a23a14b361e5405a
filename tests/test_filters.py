"""The filter that leaves out layers too small to gain."""

import math

import pytest
from torch import nn

import fp8lt
from fp8lt import filters


def converted(gains: filters.Gains, *sizes: tuple[int, int]) -> fp8lt.ConversionReport:
    model = nn.Sequential(*(nn.Linear(*s, device="meta") for s in sizes))
    report = fp8lt.ConversionReport()
    fp8lt.convert_to_float8_training(model, module_filter_fn=gains, report=report)
    return report


def test_small_layers_stay_and_the_report_says_why() -> None:
    report = converted(fp8lt.gains_from_fp8(8192), (8192, 8192), (8192, 32), (8192, 1))
    assert list(report.converted) == ["0"]
    least, _ = filters.LEAST_SIZES["tensorwise"]
    want = "too small to gain: with 8192 tokens its size is {}, below {:.0f}"
    assert report.skipped == {"1": want.format(31.8, least), "2": want.format(1.0, least)}
    assert want.format(31.8, least) in str(report)


@pytest.mark.parametrize("name", filters.LEAST_SIZES)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_layer_of_the_least_size_is_converted(name: str, hidden: bool) -> None:
    least = filters.LEAST_SIZES[name][hidden]
    gains = fp8lt.gains_from_fp8(10**12, name, host_hidden=hidden)
    enough = 2 * math.ceil(least) + 1  # the size of a square layer with many tokens is half of it
    assert list(converted(gains, (enough, enough)).converted) == ["0"]
    if least > 1:
        few = 2 * math.floor(least) - 2
        with pytest.warns(UserWarning, match="no layer was converted"):
            assert list(converted(gains, (few, few)).skipped) == ["0"]


def test_fewer_tokens_and_the_hosts_time_make_layers_stay() -> None:
    for name, (eager, hidden) in filters.LEAST_SIZES.items():
        assert 0 < hidden <= eager, name
    layer = nn.Linear(4096, 4096, device="meta")
    gains = [fp8lt.gains_from_fp8(tokens)(layer, "") for tokens in (16, 16384)]
    assert gains == [False, True]


def test_another_filter_needs_no_reason() -> None:
    class Filter:
        reason = "large ones only"

        def __call__(self, layer: nn.Module, name: str) -> bool:
            return False

    report = fp8lt.ConversionReport()
    layers = nn.Sequential(nn.Linear(16, 16))
    with pytest.warns(UserWarning, match="no layer was converted"):
        fp8lt.convert_to_float8_training(layers, module_filter_fn=Filter(), report=report)
    assert report.skipped == {"0": "module_filter_fn returned False"}


def test_it_takes_what_the_conversion_takes() -> None:
    assert fp8lt.gains_from_fp8(7) == fp8lt.gains_from_fp8(7, "tensorwise")
    config = fp8lt.Float8LinearConfig.from_recipe_name("rowwise")
    assert fp8lt.gains_from_fp8(7, config) == fp8lt.gains_from_fp8(7, "rowwise")
    recipe = fp8lt.DelayedScaling(amax_history_len=3)
    assert fp8lt.gains_from_fp8(7, recipe) == fp8lt.gains_from_fp8(7, "delayed")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens: want at least 1, got 0"):
        fp8lt.gains_from_fp8(0)
    for wrong in (2.5, True, "16"):
        with pytest.raises(TypeError, match=f"tokens: want an int, got {type(wrong).__name__}"):
            fp8lt.gains_from_fp8(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="config: no size was measured for recipe 'rowwise_folded'"
    ):
        fp8lt.gains_from_fp8(16, "rowwise_folded")
    with pytest.raises(TypeError, match=r"config: want a fp8lt\.Float8LinearConfig, a recipe or"):
        fp8lt.gains_from_fp8(16, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"layer: want an nn\.Linear, got ReLU"):
        fp8lt.gains_from_fp8(16)(nn.ReLU())
