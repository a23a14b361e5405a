"""`fp8_autocast` and checkpointed regions; the amax histories of its weights."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from cases import randn
from contexts import CPU, assert_equal, converted, model, steps
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint

import fp8lt
from fp8lt import recipe


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    fp8lt.stats(reset=True)
    yield
    fp8lt.stats(reset=True)


# -------------------------------------------------------------------------------- checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_region_is_recomputed_in_its_context(
    on: torch.device, name: str, reentrant: bool
) -> None:
    """BUG-48: the context is around checkpoint, inside of the region, or both."""
    plain = model(on)
    same = converted(plain, name)
    want = steps(same, same, on)

    def inside(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(recipe=name):
            return plain(x)

    def around(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(recipe=name):
            return checkpoint.checkpoint(plain, x, use_reentrant=reentrant)

    def both(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(enabled=False):
            return checkpoint.checkpoint(inside, x, use_reentrant=reentrant)

    for run in (around, both, lambda x: checkpoint.checkpoint(inside, x, use_reentrant=reentrant)):
        plain = model(on)
        assert_equal(steps(plain, run, on), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_region_of_no_context_is_recomputed_in_none(on: torch.device, reentrant: bool) -> None:
    plain = model(on)
    want = steps(plain, plain, on)
    results = []
    for step in range(3):
        x = (randn(7, 48, on=on, dtype=torch.float32, seed=step) * (step + 1)).requires_grad_()
        plain.zero_grad()
        y = checkpoint.checkpoint(plain, x, use_reentrant=reentrant)
        with fp8lt.fp8_autocast():
            y.square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad for p in plain.parameters())]
    assert_equal(results, want)
    assert fp8lt.stats()["rerouted"] == 0


def test_neither_is_attention(on: torch.device) -> None:
    attention = nn.MultiheadAttention(48, 4, batch_first=True, device=on)
    q = randn(2, 5, 48, on=on, dtype=torch.float32).requires_grad_()

    def run(q: Tensor) -> Tensor:
        return attention(q, q, q)[0]

    for reentrant in (True, False):
        y = checkpoint.checkpoint(run, q, use_reentrant=reentrant)
        with fp8lt.fp8_autocast():
            y.sum().backward()
    assert fp8lt.stats()["rerouted"] == 0


def test_selective_checkpointing_gives_the_same(on: torch.device) -> None:
    plain, keep = model(on), [torch.ops.fp8lt.gemm_nt.default]
    same = converted(plain)
    want = steps(same, same, on)

    def run(x: Tensor) -> Tensor:
        def policy() -> object:
            return checkpoint.create_selective_checkpoint_contexts(keep)

        with fp8lt.fp8_autocast():
            return checkpoint.checkpoint(plain, x, use_reentrant=False, context_fn=policy)

    assert_equal(steps(plain, run, on), want)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("begun", ["inside", "outside"])
def test_nested_regions_are_recomputed_where_they_began(
    on: torch.device, begun: str, outer: bool, inner: bool
) -> None:
    """BUG-48, with a context around backward, too."""
    plain = model(on)
    same = converted(plain) if begun == "inside" else plain
    want = steps(same, same, on)
    fp8lt.stats(reset=True)

    def region(x: Tensor) -> Tensor:
        return checkpoint.checkpoint(plain, x, use_reentrant=inner) * 1

    results = []
    for step in range(3):
        x = (randn(7, 48, on=on, dtype=torch.float32, seed=step) * (step + 1)).requires_grad_()
        plain.zero_grad()
        with fp8lt.fp8_autocast(enabled=begun == "inside"):
            y = checkpoint.checkpoint(region, x, use_reentrant=outer)
        with fp8lt.fp8_autocast():
            y.square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad for p in plain.parameters())]
    assert_equal(results, want)
    assert (fp8lt.stats()["rerouted"] == 0) == (begun == "outside")


# ------------------------------------------------------------------------------ delayed scaling


def test_histories_belong_to_the_weight_object() -> None:
    """BUG-44: a weight that several modules share has one history, with an entry per call."""
    layer = nn.Linear(48, 48)
    tied = nn.Linear(48, 48)
    tied.weight = layer.weight
    state = fp8lt.DelayedState()
    x = randn(7, 48, on=CPU, dtype=torch.float32)
    for scale in (1.0, 4.0, 2.0):
        want = x * scale
        for one in (layer, tied):
            want = fp8lt.linear(want, one.weight, one.bias, recipe="delayed", state=state)
        with fp8lt.fp8_autocast(recipe="delayed"):
            assert torch.equal(tied(layer(x * scale)), want)


def test_the_parts_of_a_weight_have_histories_of_their_own() -> None:
    """Attention cuts its packed weight anew in every call."""
    attention = nn.MultiheadAttention(48, 4, batch_first=True)
    q, k = (randn(2, n, 48, on=CPU, dtype=torch.float32, seed=n) for n in (3, 4))
    for step in range(3):
        with fp8lt.fp8_autocast(recipe="delayed"):
            y = checkpoint.checkpoint(attention, q * (step + 1), k, k, use_reentrant=False)[0]
        y.sum().backward()
    states = attention.in_proj_weight._fp8lt_states
    assert len(states) == 2
    assert all((state.amaxes[:, :3] > 0).all() for state in states.values())
    assert all(state.amaxes[0, 1] == 2 * state.amaxes[0, 0] for state in list(states.values())[:1])


def test_a_history_is_in_no_file_and_no_copy() -> None:
    layer, x = nn.Linear(48, 48), randn(7, 48, on=CPU, dtype=torch.float32)
    with fp8lt.fp8_autocast(recipe="delayed"):
        layer(x)
        for kept in (layer.state_dict(keep_vars=True), layer.weight, layer.state_dict()):
            file = io.BytesIO()
            torch.save(kept, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        others = [copy.deepcopy(layer), torch.load(file, weights_only=False), nn.Linear(48, 48)]
        others[2].weight = copy.copy(layer.weight)
        for other in others:
            other(x * 3)
        other(x)
        (state,) = layer.weight._fp8lt_states.values()
        (twin,) = other.weight._fp8lt_states.values()
    assert state.amaxes[0].count_nonzero() == 3  # an amax, the next place, and that there is one
    assert twin.amaxes[0, 0] == 3 * state.amaxes[0, 0]


def test_a_fake_tensor_leaves_nothing_in_a_weight() -> None:
    layer, x = nn.Linear(48, 48), randn(7, 48, on=CPU, dtype=torch.float32)
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as fake,
        fp8lt.fp8_autocast(recipe="delayed"),
        pytest.raises(RuntimeError, match="run the model once in eager mode"),
    ):
        layer(fake.from_tensor(x))
    with fp8lt.fp8_autocast(recipe="delayed"):
        assert type(layer(x)) is Tensor


def test_a_history_goes_where_its_weight_goes(on: torch.device) -> None:
    """BUG-30."""
    layer, x = nn.Linear(48, 48), randn(7, 48, on=CPU, dtype=torch.float32)
    with fp8lt.fp8_autocast(recipe="delayed"):
        layer(x)
        layer.to(on)
        layer(x.to(on))
        layer.bfloat16()
        layer(x.to(on).bfloat16())
        short = recipe.DelayedScaling(amax_history_len=4)
        with fp8lt.fp8_autocast(recipe=short):
            layer(x.to(on).bfloat16())
    states = {key[0]: state for key, state in layer.weight._fp8lt_states.items()}
    assert {length: state.amaxes.device.type for length, state in states.items()} == {
        recipe.DelayedScaling().amax_history_len: on.type,
        4: on.type,
    }
    assert states[4].amaxes.dtype == torch.float32
