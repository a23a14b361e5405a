"""The state of delayed scaling in regions that are checkpointed, and in code that is compiled."""

import threading
from collections.abc import Callable

import pytest
import torch
from cases import run_aside
from delayed_models import RECIPE, batch, model, same, states
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lt
from fp8lt import DelayedScaling


def keep(region: Callable, x: Tensor) -> Tensor:
    return region(x)


def recompute(region: Callable, x: Tensor) -> Tensor:
    return checkpoint(region, x, use_reentrant=False)


def recompute_reentrant(region: Callable, x: Tensor) -> Tensor:
    return checkpoint(region, x, use_reentrant=True)


def recompute_all_of_it_twice(region: Callable, x: Tensor) -> Tensor:
    inner = lambda x: recompute(region, x).sin()  # noqa: E731
    return recompute(lambda x: recompute(inner, x).cos(), x)


def keep_all_of_it(region: Callable, x: Tensor) -> Tensor:
    return region(x).sin().cos()


def results(through: Callable, run: Callable, recipe: DelayedScaling = RECIPE) -> list[Tensor]:
    """Return outputs, gradients and states of three steps."""
    layers, found = model(recipe), []
    for step in range(3):
        layers.zero_grad()
        x = batch(step).requires_grad_()
        found += [t.detach().clone() for t in run(layers, through, x)]
        found += [x.grad, *[p.grad.clone() for p in layers.parameters()], *states(layers)]
    return found


def one_region(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
    y = through(layers, x * 1)
    y.pow(2).sum().backward()
    return [y]


def regions_that_share_layers(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
    twice = lambda x: layers(layers(x) * 3)  # noqa: E731
    y = through(layers, through(twice, x * 1) + 1) + layers(x)
    y.pow(2).sum().backward()
    return [y]


def micro_batches_in_flight(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
    ys = [through(layers, x * scale) for scale in (1, 4, 0.5)]
    for y in (ys[1], ys[0], ys[2]):
        y.pow(2).sum().backward()
    return ys


def two_backward_passes(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
    y = through(layers, x * 1)
    y.sum().backward(retain_graph=True)
    y.pow(2).sum().backward()
    return [y]


@pytest.mark.parametrize(
    "run", [one_region, regions_that_share_layers, micro_batches_in_flight, two_backward_passes]
)
@pytest.mark.parametrize("lean", [False, True])
def test_checkpointing_changes_no_bit_and_records_once(run: Callable, lean: bool) -> None:
    """BUG-44."""
    recipe = DelayedScaling(amax_history_len=3, recompute_weight=lean)
    assert same(results(recompute, run, recipe), results(keep, run, recipe))
    nested = results(recompute_all_of_it_twice, run, recipe)
    assert same(nested, results(keep_all_of_it, run, recipe))


def test_reentrant_checkpointing_records_in_the_recomputation() -> None:
    assert same(results(recompute_reentrant, one_region), results(keep, one_region))
    with pytest.raises(RuntimeError, match=r"several times; .* pass use_reentrant"):
        results(recompute_reentrant, regions_that_share_layers)


def test_a_weight_reused_in_the_first_pass_is_reused_in_the_recomputation() -> None:
    def run(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
        with fp8lt.reuse_weights(layers):
            ys = [through(layers, x * scale) for scale in (1, 4)]
            ys[1].sum().backward()
        ys[0].sum().backward()  # out of the context
        return ys

    assert same(results(recompute, run), results(keep, run))


def test_what_a_region_keeps_goes_with_its_graph() -> None:
    layers = model()
    y = recompute(layers, batch(0))
    assert len(fp8lt.state._calls) == 1
    del y
    assert len(fp8lt.state._calls) == 0
    with pytest.raises(ZeroDivisionError):
        recompute(lambda x: layers(x) / (1 // 0), batch(0))
    recompute(layers, batch(0)).sum().backward()
    assert (len(fp8lt.state._calls), len(fp8lt.state._repeated)) == (0, 0)


def test_a_region_that_recomputes_other_layers_is_refused() -> None:
    layers, calls = model(), []

    def region(x: Tensor) -> Tensor:
        calls.append(1)
        return layers(x) if len(calls) == 1 else layers[2](layers[1](x.repeat(1, 2)[:, :48]))

    y = recompute(region, batch(0).requires_grad_())
    with pytest.raises(RuntimeError, match="called other layers of recipe 'delayed'"):
        y.sum().backward()


def test_compiled_code_leaves_a_region_in_eager_mode() -> None:
    def run(layers: nn.Module, through: Callable, x: Tensor) -> list[Tensor]:
        step = lambda x: recompute(layers, x * 1) * 2  # noqa: E731
        y = torch.compile(step, backend="aot_eager")(x) if through is recompute else step(x)
        y.pow(2).sum().backward()
        return [y]

    assert same(results(recompute, run), results(keep, run))
    layers, options = model(), {"backend": "aot_eager", "fullgraph": True}
    around = torch.compile(lambda x: recompute(layers, x), **options)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        around(batch(0))
    inside = torch.compile(layers, **options)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="inside of a checkpointed region"):
        recompute(inside, batch(0))


def test_another_thread_may_compile_meanwhile() -> None:
    """Its compiling must not look like ours: a region would be refused, or not be recorded."""
    layer = fp8lt.Linear(8, 8, recipe="delayed")
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiling.set()
        go_on.wait(30)
        return graph.forward

    compiled = run_aside(torch.compile(lambda: torch.ones(2).sin(), backend=backend))
    assert compiling.wait(30)
    checkpoint(layer, torch.ones(2, 8), use_reentrant=False).sum().backward()
    go_on.set()
    assert compiled.wait(30)
    assert layer.fp8_state[:, -2].tolist() == [1.0, 1.0, 1.0]  # one entry each
