"""What `tensor_stats` says of x, w and dy, and that it changes nothing."""

import contextlib
import copy
import functools
import itertools
import math
import sys
from typing import Any

import pytest
import torch
from cases import randn
from fsdp_models import layers_of, shard
from ranks import WORLD, Ranks, here
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fp8lt
from fp8lt import recipe
from fp8lt.device import OCP
from fp8lt.tensor_stats import TensorStat, TensorStats

NAMES = pytest.mark.parametrize("name", recipe.NAMES)
F32 = torch.float32


def model(name: str | recipe.Recipe, on: torch.device, *sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(sizes)
    layers = nn.Sequential(*(nn.Linear(k, n) for k, n in pairs)).to(on)
    return fp8lt.convert_to_float8_training(layers, config=name)


def by_tensor(stats: TensorStats) -> dict[str, TensorStat]:
    """Return the rows of a model of one layer."""
    found = {row.tensor: row for row in stats.rows}
    assert len(found) == len(stats.rows)
    return found


def decibels(want: Tensor, got: Tensor) -> float:
    return 20 * math.log10((want.norm() / (got - want).norm()).item())


# ------------------------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_one_scale_gives_what_its_definition_says(
    on: torch.device, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[TensorStats.__module__], "_CHUNK", chunk)
    layers = model("tensorwise", on, 70, 50)
    x = randn(33, 70, on=on, dtype=F32)
    x[5] *= 1e-6  # lost
    x[7] = 0
    dy = randn(33, 50, on=on, dtype=F32, seed=1)
    with fp8lt.tensor_stats(layers) as stats:
        layers(x).backward(dy)
    found = by_tensor(stats)
    wants = {"x": (x, OCP.e4m3), "w": (layers[0].weight.detach(), OCP.e4m3), "dy": (dy, OCP.e5m2)}
    assert found.keys() == wants.keys()
    for tensor, (v, fp8) in wants.items():
        v, row = v.double().cpu(), found[tensor]
        largest = torch.finfo(fp8).max
        scale = largest / v.abs().max().item()
        q = (v * scale).float().clamp(-largest, largest).to(fp8).double() / scale
        assert (row.layer, row.calls) == ("0", 1)
        assert row.amax == v.abs().max().float().item()
        assert row.scale == pytest.approx(scale, rel=1e-6)
        assert row.saturated == row.non_finite == 0
        assert row.flushed == ((q == 0) & (v != 0)).double().mean().item()
        assert row.sqnr == pytest.approx(decibels(v, q), abs=1e-3)  # measured 8e-7
        error, size = ((q - v).norm(dim=1) / v.norm(dim=1)) ** 2, v.norm(dim=1)
        assert row.row_sqnr == pytest.approx(-10 * error[size > 0].mean().log10().item(), abs=0.01)
    assert found["x"].flushed > 0.02
    assert found["x"].sqnr > 30 > 16 > found["x"].row_sqnr
    assert stats.worst(1) == [found["x"]]


# Measured on a CPU: 31.5 to 32.0 in e4m3, 25.6 in e5m2; 3e-5 flushed at most.
@NAMES
def test_normal_numbers_have_the_precision_of_their_format(on: torch.device, name: str) -> None:
    layers = model(name, on, 300, 260)
    dy = randn(150, 260, on=on, dtype=F32, seed=1) * 1e-9
    with fp8lt.tensor_stats(layers) as stats:
        layers(randn(150, 300, on=on, dtype=F32).requires_grad_()).backward(dy)
    found = by_tensor(stats)
    assert found.keys() == {"x", "w", "dy"}
    for tensor, row in found.items():
        e5m2 = tensor == "dy" and name in ("tensorwise", "delayed")
        for value in (row.sqnr, row.row_sqnr):
            assert 25 < value < 27 if e5m2 else 31 < value < 33
        assert row.saturated == 0
        assert row.flushed < 1e-3
    if name != "rowwise_folded":  # there dy has taken over the scales of w
        assert found["dy"].amax == dy.abs().max().item()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_a_finer_scale_keeps_small_rows(on: torch.device, name: str) -> None:
    layers = model(name, on, 256, 128)
    x = randn(300, 256, on=on, dtype=F32)
    x[0] *= 1e6
    with torch.no_grad(), fp8lt.tensor_stats(layers) as stats:
        layers(x)
    row = by_tensor(stats)["x"]
    assert row.sqnr > 30
    assert row.row_sqnr < 0.1 if name == "tensorwise" else row.row_sqnr > 30
    assert row.flushed > 0.9 if name == "tensorwise" else row.flushed < 0.01


def test_an_old_scale_saturates(on: torch.device) -> None:
    layers = model(fp8lt.DelayedScaling(amax_history_len=1), on, 64, 32)
    x = randn(48, 64, on=on, dtype=F32)
    layers(x).sum().backward()
    with fp8lt.tensor_stats(layers) as stats:
        layers(4 * x).sum().backward()
    row = by_tensor(stats)["x"]
    assert row.scale == pytest.approx(448 / x.abs().max().item())
    beyond = (4 * x.abs() * row.scale > 464).double().mean().item()  # 464 rounds to 448
    assert row.saturated == pytest.approx(beyond, rel=1e-12)
    assert beyond > 0.1
    assert row.sqnr < 15


def test_what_is_not_finite_is_counted_and_comes_first(on: torch.device) -> None:
    layers = model("rowwise", on, 32, 48, 16)
    x = randn(8, 32, on=on, dtype=F32)
    x[2, 3], x[4, 5] = torch.nan, torch.inf
    with torch.no_grad(), fp8lt.tensor_stats(layers) as stats:
        layers(x)
    assert stats.rows[0].non_finite == 2 / x.numel()
    assert math.isnan(stats.rows[0].sqnr)
    first = stats.worst(2)
    assert {(row.layer, row.tensor) for row in first} == {("0", "x"), ("1", "x")}


def test_zeros_and_nothing_hurt_nobody(on: torch.device) -> None:
    layers = model("tensorwise", on, 32, 16)
    with fp8lt.tensor_stats(layers) as stats:
        layers(torch.zeros(5, 32, device=on)).sum().backward()
        layers(torch.zeros(0, 32, device=on)).sum().backward()
    found = by_tensor(stats)
    assert (found["x"].calls, found["x"].amax, found["x"].flushed) == (2, 0, 0)
    assert math.isnan(found["x"].row_sqnr)
    assert found["x"] not in stats.worst()
    assert found["dy"] in stats.worst()
    for k, n in ((0, 16), (16, 0)):
        layer = fp8lt.Linear(k, n, device=on)
        with fp8lt.tensor_stats(layer) as stats:
            layer(torch.ones(3, k, device=on, requires_grad=True)).sum().backward()
        found = by_tensor(stats)
        assert [found[t].amax for t in ("x", "w", "dy")] == [float(k > 0), 0, float(n > 0)]
        assert found["w"] not in stats.worst()


def test_neither_small_nor_large_magnitudes_leave_the_range_of_the_sums(on: torch.device) -> None:
    layers = fp8lt.convert_to_float8_training(nn.ModuleList(nn.Linear(64, 64) for _ in range(4)))
    layers.to(on)
    tiny = randn(16, 64, on=on, dtype=F32)
    tiny[1:] *= 1e-26
    inputs = [
        randn(16, 64, on=on, dtype=F32), tiny, torch.full((16, 64), 1e-42, device=on),
        randn(16, 64, on=on, dtype=F32) * 1e37,
    ]  # fmt: skip
    with torch.no_grad(), fp8lt.tensor_stats(layers) as stats:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)
    rows = {row.layer: row for row in stats.rows if row.tensor == "x"}
    assert rows["1"].row_sqnr == pytest.approx(-10 * math.log10(15 / 16), abs=0.01)
    assert rows["1"].flushed == 15 / 16
    assert (rows["2"].flushed, rows["2"].sqnr) == (1, pytest.approx(0))
    assert rows["3"].sqnr > 31
    assert stats.worst(2) == [rows["2"], rows["1"]]


def test_an_old_scale_may_leave_nothing(on: torch.device) -> None:
    layers = model(fp8lt.DelayedScaling(amax_history_len=1), on, 64, 32)
    layers(torch.full((4, 64), 1e-15, device=on)).sum().backward()
    with fp8lt.tensor_stats(layers) as stats:
        layers(randn(4, 64, on=on, dtype=F32) * 1e6).sum().backward()
    row = by_tensor(stats)["x"]
    assert row.saturated == 1
    assert abs(row.sqnr) < 1e-6  # nothing of it is left
    assert stats.worst(1) == [row]


# ----------------------------------------------------------------------------------- what is seen


def step(layers: nn.Module, x: Tensor) -> list[Tensor]:
    layers.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layers(leaf)
    y.square().sum().backward()
    states = list(fp8lt.delayed_state_dict(layers).values())
    return [y.detach(), leaf.grad, *(p.grad for p in layers.parameters()), *states]


@NAMES
def test_results_gradients_and_histories_are_as_without_it(on: torch.device, name: str) -> None:
    layers = model(name, on, 48, 80, 32)
    twin = copy.deepcopy(layers)
    for seed in range(3):
        x = randn(7, 48, on=on, dtype=F32, seed=seed) * (1 + seed)
        with fp8lt.tensor_stats(layers) as stats:
            got = step(layers, x)
        assert all(map(torch.equal, got, step(twin, x)))
        assert [row.calls for row in stats.rows] == [1] * 6
    assert all("_watches" not in vars(layer) for layer in layers)


def test_only_what_runs_in_fp8_is_measured(on: torch.device) -> None:
    layers = model("rowwise_with_gw_hp", on, 32, 48, 16)
    x = randn(4, 32, on=on, dtype=F32)
    with fp8lt.tensor_stats(layers) as stats:
        with fp8lt.disable_fp8(layers[0]):
            layers(x).sum().backward()
        # Of the first layer dy is in FP8 for dx alone, which nobody wants.
        layers[0](input=x).sum().backward()
        with torch.no_grad():
            layers[1](randn(4, 48, on=on, dtype=F32))
    seen = {(row.layer, row.tensor): row.calls for row in stats.rows}
    assert seen == {
        ("0", "x"): 1, ("0", "w"): 1, ("1", "x"): 2, ("1", "w"): 2, ("1", "dy"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_not_measured_again(on: torch.device, reentrant: bool) -> None:
    layers = model("delayed", on, 32, 32, 32)
    x = randn(4, 32, on=on, dtype=F32).requires_grad_()
    with fp8lt.tensor_stats(layers) as stats:
        checkpoint(layers, x, use_reentrant=reentrant).sum().backward()
    assert [row.calls for row in stats.rows] == [1] * 6


def test_backward_may_come_later_and_an_error_ends_it(on: torch.device) -> None:
    layers = model("tensorwise", on, 32, 16)
    x = randn(4, 32, on=on, dtype=F32)
    with fp8lt.tensor_stats(layers) as stats:
        y = layers(x)
    y.sum().backward()
    assert by_tensor(stats)["dy"].calls == 1
    with fp8lt.tensor_stats(layers) as stats, pytest.raises(RuntimeError, match=r"got x \[4, 31\]"):
        layers(x[:, 1:])
    with pytest.raises(KeyError), fp8lt.tensor_stats(layers):
        raise KeyError
    assert not layers[0]._watches


def test_dy_is_what_the_layer_gets_after_all_hooks_and_only_if_it_does(on: torch.device) -> None:
    layers = model("delayed", on, 32, 16)
    layers[0].register_forward_hook(lambda m, x, y: y.register_hook(lambda dy: dy * 1000) and None)
    with fp8lt.tensor_stats(layers) as stats:
        y = layers(randn(4, 32, on=on, dtype=F32))
        torch.autograd.grad(y.sum(), y, retain_graph=True)  # ends before the layer's backward
        assert "dy" not in by_tensor(stats)
        y.sum().backward()
    assert by_tensor(stats)["dy"].amax == layers[0].fp8_state[2, 0] == 1000


def test_a_weight_is_computed_once_and_measured_as_it_is_used(on: torch.device) -> None:
    """Not once more for the statistics: power iterations and random numbers would go on."""
    results = []
    for measured in (False, True):
        layers = model("tensorwise", on, 32, 32)
        nn.utils.parametrizations.spectral_norm(layers[0])
        context = fp8lt.tensor_stats(layers) if measured else contextlib.nullcontext()
        with context as stats:
            y = layers(randn(4, 32, on=on, dtype=F32))
            y.sum().backward()
        results.append([y.detach(), *(p.grad for p in layers.parameters()), *layers.buffers()])
    assert all(map(torch.equal, *results))
    assert by_tensor(stats)["w"].calls == 1


def test_a_weight_that_is_reused_is_measured_as_it_was_quantised(on: torch.device) -> None:
    layers = model(fp8lt.DelayedScaling(amax_history_len=4), on, 64, 32)
    x = randn(8, 64, on=on, dtype=F32)
    layers(x).sum().backward()
    layers[0].weight.data.mul_(8)
    with fp8lt.reuse_weights(layers), fp8lt.tensor_stats(layers) as stats:
        layers(x).sum().backward()
        once = by_tensor(stats)["w"]
        layers(x).sum().backward()
    assert once.saturated > 0.5
    assert by_tensor(stats)["w"][3:] == once[3:]


@NAMES
def test_selective_checkpoints_hear_nothing_of_it(on: torch.device, name: str) -> None:
    def policy(_: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    def run(layers: nn.Module, x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        y = checkpoint(layers, leaf, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        return [y.detach(), leaf.grad, *(p.grad for p in layers.parameters())]

    layers = model(name, on, 32, 32, 32)
    twin = copy.deepcopy(layers)
    x = randn(4, 32, on=on, dtype=F32)
    with fp8lt.tensor_stats(layers) as stats:
        got = run(layers, x)
    assert all(map(torch.equal, got, run(twin, x)))
    assert [row.calls for row in stats.rows] == [1] * 6


def test_a_call_is_measured_with_the_recipe_and_the_weight_that_it_had(on: torch.device) -> None:
    layers = model("rowwise_folded", on, 32, 16)
    dy = randn(4, 16, on=on, dtype=F32)
    x = randn(4, 32, on=on, dtype=F32).requires_grad_()
    with fp8lt.tensor_stats(layers) as stats:
        layers(x).backward(dy)
    want = by_tensor(stats)["dy"]
    with fp8lt.tensor_stats(layers) as stats:
        y = layers(x)
        with torch.no_grad():
            layers[0].weight.mul_(1024)
            layers(x)
        layers[0].recipe = "tensorwise"
        y.backward(dy)
    assert by_tensor(stats)["dy"] == want


def test_contexts_may_end_in_any_order_and_copies_are_in_none(on: torch.device) -> None:
    layers = model("tensorwise", on, 32, 32, 16)
    torch.compile(layers)  # the compiler is there: it is told to wait
    x = randn(4, 32, on=on, dtype=F32)
    first, second = fp8lt.tensor_stats(layers), fp8lt.tensor_stats(layers[1])
    of_all, of_one = first.__enter__(), second.__enter__()
    again = copy.deepcopy(layers)
    layers(x)
    again(x)
    assert not again[0]._watches
    first.__exit__(None, None, None)
    layers(x)
    second.__exit__(None, None, None)
    layers(x)
    assert [row.calls for row in of_all.rows] == [1] * 4
    assert [row.calls for row in of_one.rows] == [2] * 2
    assert torch._dynamo.eval_frame._stance.stance == "default"
    with fp8lt.tensor_stats(layers):
        fp8lt.revert(layers)(x)


def test_a_layer_of_ones_own_may_return_what_it_likes(on: torch.device) -> None:
    class Pair(fp8lt.Linear):
        def forward(self, input: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            return super().forward(input), None

    layer = Pair(32, 16, device=on)
    with fp8lt.tensor_stats(layer) as stats:
        layer(torch.ones(4, 32, device=on))[0].sum().backward()
    assert by_tensor(stats)["dy"].calls == 1


def test_autocast_is_heeded(on: torch.device) -> None:
    layers = model("tensorwise", on, 32, 16)
    x = torch.full((4, 32), 1 + 2**-12, device=on)  # rounds to 1 in bf16
    with fp8lt.tensor_stats(layers) as stats, torch.autocast(on.type, torch.bfloat16):
        layers(x)
    assert by_tensor(stats)["x"].amax == 1


def test_a_compiled_model_is_measured_uncompiled(on: torch.device) -> None:
    layers = model("tensorwise", on, 32, 48, 16)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    x = randn(4, 32, on=on, dtype=F32)
    want = compiled(x)
    with fp8lt.tensor_stats(compiled) as stats:
        assert torch.equal(compiled(x), want)
        compiled(x).sum().backward()
    assert [(row.layer, row.tensor, row.calls) for row in stats.rows][:2] == [
        ("_orig_mod.0", "x", 2), ("_orig_mod.0", "w", 2)
    ]  # fmt: skip
    assert len(graphs) == 1
    assert torch.equal(compiled(x), want)
    assert len(graphs) == 1


# -------------------------------------------------------------------------------- several ranks


def gathered(rank: int) -> None:
    layers, _ = layers_of(32, 48, 16)
    shard(layers)
    with fp8lt.tensor_stats(layers) as stats:
        layers(randn(5, 32, on=here(), dtype=F32)).sum().backward()
    assert {(row.layer, row.tensor) for row in stats.rows} == {
        (layer, tensor) for layer in "01" for tensor in ("x", "dy")
    }


def split(rank: int) -> None:
    mesh = init_device_mesh(here().type, (WORLD,))
    layer = fp8lt.Linear(48, 96, device=here())
    layer = parallelize_module(layer, mesh, ColwiseParallel())
    with fp8lt.tensor_stats(layer) as stats:
        layer(torch.ones(6, 48, device=here())).sum().backward()
    found = by_tensor(stats)
    assert found["w"].amax == layer.weight.to_local().abs().max()  # this rank's
    assert found["dy"].amax == 1


def by_rows(rank: int) -> None:
    """What comes out is a part of the rows, dy of the layer is all of them."""
    mesh = init_device_mesh(here().type, (WORLD,))
    layer = fp8lt.Linear(16 * WORLD, 32, device=here(), recipe="rowwise_with_gw_hp")
    layer = parallelize_module(layer, mesh, RowwiseParallel(output_layouts=Shard(0)))
    x = torch.ones(2 * WORLD, 16, device=here(), requires_grad=True)
    with fp8lt.tensor_stats(layer) as stats:
        (layer(x) * (rank + 1)).sum().backward()
    found = by_tensor(stats)
    assert found["dy"].amax == WORLD


def test_a_rank_measures_what_it_has(ranks: Ranks) -> None:
    ranks.run(gathered)
    ranks.run(split)
    ranks.run(by_rows)


# ----------------------------------------------------------------------------------- for people


def test_the_table_has_a_line_for_each_tensor() -> None:
    layers = model("tensorwise", torch.device("cpu"), 32, 16)
    with fp8lt.tensor_stats(layers[0]) as stats:
        layers[0](torch.ones(4, 32)).sum().backward()
    head, *lines = str(stats).splitlines()
    assert head.split()[:3] == ["layer", "tensor", "calls"]
    assert [line.split()[:3] for line in lines] == [["(root)", t, "1"] for t in ("x", "w", "dy")]
    assert lines[0].split()[3:8] == ["1", "448", "0.00%", "0.00%", "0.00%"]
    assert len({len(line) for line in (head, *lines)}) == 1
    # The others are powers of two, which FP8 has.
    assert stats.table(worst=1).splitlines()[1].split() == lines[1].split()
    assert str(TensorStats()).split() == head.split()


def test_it_says_what_it_wants() -> None:
    with pytest.raises(TypeError, match=r"module: want an nn\.Module, got str"):
        fp8lt.tensor_stats("model").__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"want one with fp8lt\.Linear layers, got none in Linear"):
        fp8lt.tensor_stats(nn.Linear(2, 2)).__enter__()
