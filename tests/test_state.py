"""The state of delayed scaling: where it lives, how it is saved, what enters it."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from cases import CountOps
from delayed_models import batch, model, same, states, train, used
from torch import nn

import fp8lt
from fp8lt import DelayedScaling
from fp8lt.state import resized


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


@pytest.mark.parametrize("number", [99.0, -1.0, 0.5, float("nan")])
def test_a_state_with_a_place_outside_of_its_ring_is_refused(number: float) -> None:
    layers = model()
    states = fp8lt.delayed_state_dict(layers)
    for state in states.values():
        state[:, -2] = number
    with pytest.raises(ValueError, match=r"fp8_state: want amaxes .* positions in 0 \.\.\. H - 1"):
        fp8lt.load_delayed_state_dict(layers, states)


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
