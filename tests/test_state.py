"""The state of delayed scaling: where it lives, how it is saved, and what recomputation does."""

import copy
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from cases import CountOps, randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lt
from fp8lt import DelayedScaling
from fp8lt.state import resized

CPU = torch.device("cpu")
RECIPE = DelayedScaling(amax_history_len=3)


def model(recipe: DelayedScaling = RECIPE, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return fp8lt.convert_to_float8_training(layers, config=recipe)


def batch(step: int) -> Tensor:
    return randn(8, 32, on=CPU, dtype=torch.float32, seed=step) * (1 + step % 3)


def train(layers: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (layers(batch(step)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def states(layers: nn.Module) -> list[Tensor]:
    return list(fp8lt.delayed_state_dict(layers).values())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def used(recipe: DelayedScaling = RECIPE) -> nn.Sequential:
    """Return a model that has run four steps."""
    layers = model(recipe)
    train(layers, torch.optim.SGD(layers.parameters(), lr=0.1), range(4))
    return layers


def saved_and_loaded(what: object, **options: object) -> object:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, **options)


# -------------------------------------------------------------------------------------- the buffer


def test_a_layer_has_its_state_as_a_buffer_that_is_no_key_of_checkpoints() -> None:
    layer = fp8lt.Linear(8, 4, recipe="delayed", dtype=torch.bfloat16)
    assert dict(layer.named_buffers()).keys() == {"fp8_state"}
    assert (layer.fp8_state.shape, layer.fp8_state.dtype) == ((3, 18), torch.float32)
    assert not layer.fp8_state.any()
    assert layer.state_dict().keys() == nn.Linear(8, 4).state_dict().keys()
    layer.recipe = DelayedScaling(amax_history_len=2)
    assert layer.fp8_state.shape == (3, 4)
    layer.recipe = "tensorwise"
    assert not list(layer.buffers())


def test_reverting_takes_the_state_away_and_converting_starts_a_new_one() -> None:
    layers = used()
    before = {name: set(vars(m)) for name, m in nn.Sequential(nn.Linear(2, 2)).named_modules()}
    fp8lt.revert(layers)
    assert not list(layers.buffers())
    assert set(vars(layers[0])) == before["0"]
    assert layers[0]._non_persistent_buffers_set == set()
    fp8lt.convert_to_float8_training(layers, config="delayed")
    assert not any(state.any() for state in states(layers))


@pytest.mark.parametrize(
    "cast", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.float16), nn.Module.double]
)
def test_casting_a_layer_leaves_its_state_as_it_is(cast: Callable) -> None:
    """BUG-30."""
    layers = used()
    before = states(layers)
    cast(layers)
    assert layers[0].weight.dtype != torch.float32
    assert same(states(layers), before)
    if layers[0].weight.dtype == torch.bfloat16:
        layers(batch(0).bfloat16()).sum().backward()
        assert not same(states(layers), before)


def test_the_state_moves_with_its_layer() -> None:
    layers = used().to("meta")
    assert all(layer.fp8_state.is_meta for layer in layers if hasattr(layer, "weight"))
    assert layers(torch.empty(5, 32, device="meta")).shape == (5, 32)


def test_a_state_that_comes_from_meta_is_new() -> None:
    with torch.device("meta"):
        layers = model()
    layers.to_empty(device="cpu")
    assert [s.abs().sum().item() for s in states(layers)] == [0, 0]
    with torch.device("meta"):
        layers = model()
    layers.load_state_dict(used().state_dict(), assign=True)
    assert same(states(layers), states(used()))
    layers.to_empty(device="cpu")  # what was real keeps its history until
    assert same(states(layers), states(used()))
    for layer in (layers[0], layers[2]):
        layer.reset_parameters()
    assert not any(state.any() for state in states(layers))


def test_copies_and_pickles_have_states_of_their_own() -> None:
    layers = used()
    before = states(layers)
    copies = copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))
    for other in (*copies, saved_and_loaded(layers, weights_only=False)):
        assert same(states(other), before)
        other(batch(9)).sum().backward()
        assert not same(states(other), before)
    assert same(states(layers), before)


# ------------------------------------------------------------------------------------- checkpoints


def test_plain_models_and_converted_ones_load_each_other() -> None:
    plain, layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)), used()
    plain.load_state_dict(layers.state_dict(), strict=True)
    for assign in (False, True):
        for state_dict in (plain.state_dict(), dict(layers.state_dict())):
            layers(batch(9)).sum().backward()
            layers.load_state_dict(state_dict, strict=True, assign=assign)
            # Nothing is known of these weights: a history of others might scale them wrongly.
            assert same(states(layers), states(model()))
            kept = states(layers)
            layers.load_state_dict({}, strict=False)
            assert same(states(layers), kept)
    tensorwise = fp8lt.convert_to_float8_training(plain)
    tensorwise.load_state_dict(layers.state_dict())
    assert "fp8_state" not in tensorwise.state_dict()._metadata["0"]


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_carries_a_copy_of_the_state(assign: bool) -> None:
    layers = used()
    saved = layers.state_dict()
    before = states(layers)
    layers(batch(9)).sum().backward()
    assert not same(states(layers), before)
    for state_dict in (saved, saved_and_loaded(saved, weights_only=True), copy.deepcopy(saved)):
        other = model(seed=1)
        other.load_state_dict(state_dict, assign=assign)
        assert same(states(other), before)
    wrapped = nn.ModuleDict({"a": model(seed=1)})
    wrapped.load_state_dict(nn.ModuleDict({"a": layers}).state_dict())
    assert same(states(wrapped), states(layers))


@pytest.mark.parametrize("by", ["torch.save", "delayed_state_dict"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_training_resumes_bit_for_bit(by: str, algorithm: str) -> None:
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=algorithm)
    layers = model(recipe)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    want = train(layers, optimizer, range(6))
    first = model(recipe)
    optimizer = torch.optim.Adam(first.parameters(), lr=1e-2)
    losses = train(first, optimizer, range(3))
    second = model(recipe, seed=1)
    weights, states_alone, moments = saved_and_loaded(
        (first.state_dict(), fp8lt.delayed_state_dict(first), optimizer.state_dict()),
        weights_only=True,
    )
    if by == "torch.save":
        second.load_state_dict(weights)
    else:
        second.load_state_dict(dict(weights))
        fp8lt.load_delayed_state_dict(second, states_alone)
    optimizer = torch.optim.Adam(second.parameters(), lr=1e-2)
    optimizer.load_state_dict(moments)
    losses += train(second, optimizer, range(3, 6))
    assert same(losses, want)
    assert same(list(second.parameters()), list(layers.parameters()))
    assert same(states(second), states(layers))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16])
def test_a_history_of_another_length_keeps_the_most_recent_entries(length: int) -> None:
    for entries in range(6):
        ring, position = [0.0] * 3, entries % 3
        for i in range(entries):
            ring[i % 3] = i + 1.0
        saved = torch.tensor([[*ring, position, entries > 0]] * 3)
        new = resized(saved, length)
        want = [float(i + 1) for i in range(entries)][-min(3, length) :]
        at = int(new[0, length])
        oldest_first = [*new[0, at:length].tolist(), *new[0, :at].tolist()]
        assert oldest_first == [0.0] * (length - len(want)) + want
        assert new[:, -1].tolist() == [float(entries > 0)] * 3
    other = model(DelayedScaling(amax_history_len=length))
    other.load_state_dict(used().state_dict())
    assert same(states(other), [resized(state, length) for state in states(used())])


def test_states_that_do_not_fit_are_refused_by_name() -> None:
    layers = used()
    saved = fp8lt.delayed_state_dict(layers)
    assert list(saved) == ["0.fp8_state", "2.fp8_state"]
    assert list(fp8lt.delayed_state_dict(layers[0])) == ["fp8_state"]
    del saved["2.fp8_state"]
    message = r"states: missing \['2\.fp8_state'\], unexpected \['3\.fp8_state'\]"
    with pytest.raises(ValueError, match=message):
        fp8lt.load_delayed_state_dict(layers, {**saved, "3.fp8_state": torch.zeros(3, 5)})
    bad = {"0.fp8_state": torch.zeros(2, 5), "2.fp8_state": torch.zeros(3, 5)}
    with pytest.raises(ValueError, match=r"0\.fp8_state: want the state .*, got \[2, 5\]"):
        fp8lt.load_delayed_state_dict(layers, bad)
    weights = layers.state_dict()
    weights._metadata["2"]["fp8_state"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"2\.fp8_state: want the state .*, got \[5\]"):
        layers.load_state_dict(weights)


# ------------------------------------------------------------------------------- what is recorded


def test_idle_layers_do_not_roll_and_evaluation_changes_nothing() -> None:
    """BUG-43, BUG-46."""
    layers = used()
    before = states(layers)
    layers[2](torch.ones(3, 48)).sum().backward()
    assert torch.equal(states(layers)[0], before[0])
    before = states(layers)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            layers(1e3 * batch(0))
    with fp8lt.disable_fp8(layers):
        layers(1e3 * batch(0)).sum().backward()
    assert same(states(layers), before)
    layers.eval()(batch(0)).sum().backward()  # gradients count, not the flag
    assert not same(states(layers), before)


def test_a_reused_weight_is_recorded_once() -> None:
    layer = fp8lt.Linear(16, 8, recipe="delayed")
    x = torch.randn(4, 16, requires_grad=True)
    with fp8lt.reuse_weights(layer), CountOps() as count:
        for _ in range(3):
            layer(x).sum().backward()
    assert count.counts["quantize_delayed"] == 3 + 1 + 3
    assert layer.fp8_state[:, 16].tolist() == [3, 1, 3]


def test_the_state_is_the_layers_in_a_functional_call() -> None:
    layer, other = fp8lt.Linear(16, 8, recipe="delayed"), torch.zeros(3, 18)
    x = torch.randn(4, 16)
    torch.func.functional_call(layer, {"fp8_state": other}, (x,)).sum().backward()
    assert not layer.fp8_state.any()
    assert other[:, 17].tolist() == [1, 1, 1]


# --------------------------------------------------------------------------- activation checkpoints


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


@pytest.mark.parametrize("number", [99.0, -1.0, 0.5, float("nan")])
def test_a_state_with_a_place_outside_of_its_ring_is_refused(number: float) -> None:
    layers = model()
    states = fp8lt.delayed_state_dict(layers)
    for state in states.values():
        state[:, -2] = number
    with pytest.raises(ValueError, match=r"fp8_state: want amaxes .* positions in 0 \.\.\. H - 1"):
        fp8lt.load_delayed_state_dict(layers, states)


def test_another_thread_may_compile_meanwhile() -> None:
    """Its compiling must not look like ours: a region would be refused, or not be recorded."""
    layer = fp8lt.Linear(8, 8, recipe="delayed")
    compiling, done = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiling.set()
        done.wait(30)
        return graph.forward

    other = threading.Thread(target=torch.compile(lambda: torch.ones(2).sin(), backend=backend))
    other.start()
    assert compiling.wait(30)
    checkpoint(layer, torch.ones(2, 8), use_reentrant=False).sum().backward()
    done.set()
    other.join()
    assert layer.fp8_state[:, -2].tolist() == [1.0, 1.0, 1.0]  # one entry each
