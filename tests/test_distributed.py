"""Ranks of a distributed run, each beside a twin that is not wrapped.

And what each rank does before it trains: import, build, load.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import error, randn
from contexts import converted, model
from delayed_models import states
from ranks import ROUNDING, WORLD, Ranks, Whole, here, train_beside_a_twin
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8lt
from fp8lt import build, cache, device, ops, recipe, toolchain

NAMES = pytest.mark.parametrize("name", recipe.NAMES)


# ------------------------------------------------------------------------------------- fully_shard


def shard(layers: nn.Module) -> None:
    mesh = init_device_mesh(here().type, (WORLD,))
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(layers, mesh=mesh)


def gathered(layers: nn.Module) -> Whole:
    return lambda: contextlib.nullcontext([p.full_tensor() for p in layers.parameters()])


def train_sharded(rank: int, name: str, k: int, n: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(fp8lt.Linear(k, n, device=here(), recipe=name))
    twin = copy.deepcopy(layers)
    shard(layers)
    rows = [len(some) for some in torch.arange(n).chunk(WORLD)]
    assert layers[0].weight.to_local().shape[0] == [*rows, 0][rank]
    optimizer = torch.optim.SGD(layers.parameters(), lr=1)
    train_beside_a_twin(layers, twin, optimizer, gathered(layers))


@NAMES
def test_uneven_and_empty_shards_train_as_one_process(ranks: Ranks, name: str) -> None:
    """BUG-76."""
    for k, n in ((16, WORLD - 1), (48, 101), *[(1024, 4099)] * (name == "tensorwise")):
        ranks.run(train_sharded, name, k, n)


def held_by_autograd(layers: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Return y, and the bytes that its graph keeps alive."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layers(x)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in saved)}
    return y, sum(storages.values())


def hold_no_weights(rank: int, name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(128, 128, bias=False, device=here()) for _ in range(8)))
    lean = copy.deepcopy(plain)
    fp8lt.convert_to_float8_training(lean)
    for layer in lean:
        layer.recipe = dataclasses.replace(recipe.resolve(name), recompute_weight=True)
    twin = copy.deepcopy(lean)
    shard(plain)
    shard(lean)
    x = randn(16, 128, on=here(), dtype=torch.float32).requires_grad_()
    _, most = held_by_autograd(plain, x)
    y, held = held_by_autograd(lean, x)
    assert 0 < held <= most
    # What was let go of comes back.
    y.sum().backward()
    dx, x.grad = x.grad, None
    want = twin(x)
    want.sum().backward()
    assert torch.equal(y, want)
    assert torch.equal(dx, x.grad)
    for p, q in zip(lean.parameters(), twin.parameters(), strict=True):
        assert error(p.grad.full_tensor(), q.grad) < ROUNDING


@NAMES
def test_no_weight_is_held_from_forward_to_backward(ranks: Ranks, name: str) -> None:
    """BUG-80: with `recompute_weight`, at most what F.linear holds of sharded layers."""
    ranks.run(hold_no_weights, name)


# --------------------------------------------------------------------------------------- FSDP, DDP


def train_in_fsdp(rank: int, name: str, use_orig_params: bool) -> None:
    layers = converted(model(here()), name)
    twin = copy.deepcopy(layers)
    wrapped = FullyShardedDataParallel(layers, use_orig_params=use_orig_params, device_id=here())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1)

    @contextlib.contextmanager
    def whole() -> Iterator[list[Tensor]]:
        with FullyShardedDataParallel.summon_full_params(wrapped):
            yield list(wrapped.parameters())

    train_beside_a_twin(wrapped, twin, optimizer, whole)


@pytest.mark.parametrize("use_orig_params", [True, False])
@NAMES
def test_fsdp_may_flatten_the_weights(ranks: Ranks, name: str, use_orig_params: bool) -> None:
    """BUG-81."""
    ranks.run(train_in_fsdp, name, use_orig_params)


def train_in_ddp(rank: int, name: str, options: dict[str, bool]) -> None:
    layers = converted(model(here()), name)
    twin = copy.deepcopy(layers)
    wrapped = DistributedDataParallel(layers, **options)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1)

    def prepare() -> None:
        if options.get("broadcast_buffers", True):
            for layer in twin.modules():
                for buffer in layer.buffers(recurse=False):
                    distributed.broadcast(buffer, 0)

    whole = lambda: contextlib.nullcontext(list(wrapped.parameters()))  # noqa: E731
    train_beside_a_twin(wrapped, twin, optimizer, whole, prepare)
    if name == "delayed":
        mine = states(wrapped)[0][0, :2].clone()  # the amaxes of x before the last step
        of_the_first = mine.clone()
        distributed.broadcast(of_the_first, 0)
        sent = options.get("broadcast_buffers", True)
        assert torch.equal(mine, of_the_first) == (sent or rank == 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_ddp_reduces_gradients_and_sends_histories(
    ranks: Ranks, name: str, options: dict[str, bool]
) -> None:
    """BUG-81: histories are those of rank 0 at each forward, unless `broadcast_buffers=False`."""
    ranks.run(train_in_ddp, name, options)


def train_converted_in_ddp(rank: int, name: str) -> None:
    plain = model(here())
    twin = converted(plain, name)
    wrapped = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1)
    fp8lt.convert_to_float8_training(wrapped, config=name)
    assert isinstance(plain[0], fp8lt.Linear)
    whole = lambda: contextlib.nullcontext(list(wrapped.parameters()))  # noqa: E731
    train_beside_a_twin(wrapped, twin, optimizer, whole)


@NAMES
def test_a_model_may_be_converted_inside_of_ddp(ranks: Ranks, name: str) -> None:
    """BUG-66, with an optimizer made before; see test_graphs.py for one that is compiled."""
    ranks.run(train_converted_in_ddp, name)


def reduce_histories(rank: int) -> None:
    torch.manual_seed(0)
    lengths = 4, 2
    layers = nn.Sequential(
        *(fp8lt.Linear(8, 8, recipe=fp8lt.DelayedScaling(amax_history_len=n)) for n in lengths)
    ).to(here())
    seen: dict[int, list[float]] = {}  # amaxes of x in the first layer, by rank
    for step in range(6):
        if (rank, step) != (1, 3):  # a rank that skips does not hang the others
            x = randn(4, 8, on=here(), dtype=torch.float32, seed=10 * step + rank)
            layers(x * (1 + rank)).sum().backward()
        fp8lt.reduce_amaxes(layers)
        for state in states(layers):
            everybodys = [torch.empty_like(state) for _ in range(WORLD)]
            distributed.all_gather(everybodys, state)
            assert all(torch.equal(state, other) for other in everybodys)
        for r in range(WORLD):
            if (r, step) != (1, 3):
                x = randn(4, 8, on=here(), dtype=torch.float32, seed=10 * step + r) * (1 + r)
                seen.setdefault(r, []).append(x.abs().max().item())
        # Of ranks that ran as often the entries of one age are of one step.
        ages = [[amaxes[-1 - age] for amaxes in seen.values() if age < len(amaxes)]
                for age in range(4)]  # fmt: skip
        if step < 3:
            ring = states(layers)[0][0, :4].flip(0).tolist()
            assert ring == pytest.approx([max(some, default=0) for some in ages])
    x = randn(4, 8, on=here(), dtype=torch.float32) * 100 ** (rank == WORLD - 1)
    layers(x).sum().backward()
    fp8lt.reduce_amaxes(layers)
    first = states(layers)[0]
    assert first[0, 3] > 50  # the newest entry is the last
    with torch.no_grad():
        y = [torch.empty(4, 8, device=here()) for _ in range(WORLD)]
        distributed.all_gather(y, layers(x.sign()))
        ours = layers(x.sign())
        assert torch.equal(y[rank], ours)


def test_histories_may_be_reduced_over_ranks_in_one_collective(ranks: Ranks) -> None:
    ranks.run(reduce_histories)
    ranks.run(begin_a_history)


def begin_a_history(rank: int) -> None:
    layer = fp8lt.Linear(8, 8, device=here(), recipe=fp8lt.DelayedScaling(amax_history_len=3))
    if rank == 0:
        layer(torch.full((2, 8), 5.0, device=here())).sum().backward()
    fp8lt.reduce_amaxes(layer)
    (state,) = states(layer)
    assert state[0].tolist() == [0, 0, 5, 0, 1]
    layer(torch.ones(2, 8, device=here())).sum().backward()
    assert states(layer)[0][0].tolist() == [1, 0, 5, 1, 1]
    fp8lt.reduce_amaxes(layer)
    assert states(layer)[0][0].tolist() == [0, 5, 1, 0, 1]


def run_in_all_but_one(rank: int, name: str) -> None:
    if rank == 1:
        return
    layer = fp8lt.Linear(48, 40, device=here(), recipe=name)
    for step in range(3):
        x = randn(7, 48, on=here(), dtype=torch.float32, seed=step).requires_grad_()
        layer(x).sum().backward()


@NAMES
def test_a_rank_may_skip_a_layer(ranks: Ranks, name: str) -> None:
    """BUG-77: no rank waits for another."""
    ranks.run(run_in_all_but_one, name)


# ----------------------------------------------------------- every rank is a process that imports


@pytest.mark.parametrize(
    ("policy", "at_import"), [("auto", 1), ("force", 1), ("lazy", 0), ("off", 0)]
)
def test_on_an_fp8_gpu_import_builds_what_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, policy: str, at_import: int
) -> None:
    """BUG-104: with FP8LT_BUILD=lazy, the first use does."""
    calls: list[None] = []
    monkeypatch.setenv("FP8LT_BUILD", policy)
    monkeypatch.setattr(build, "_has_native_gpu", lambda: True)
    monkeypatch.setattr(build, "ensure", lambda: calls.append(None))
    build.on_import()
    assert len(calls) == at_import
    monkeypatch.setattr(device, "support", lambda *_: device.Support("native", "a GPU"))
    monkeypatch.setattr(ops, "_loaded_cublaslt", lambda: 130101)
    assert ops.backend(torch.device("cuda", 0)) == ops.OPERATORS
    assert len(calls) == at_import + 1


def test_the_number_of_compilers_may_be_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUG-104."""
    tools = toolchain.Toolchain(Path(), "13.0.88", "c++", "12", (), Path(), Path())
    monkeypatch.setenv("MAX_JOBS", "1")
    assert build._child_environment(tools, "9.0a")["MAX_JOBS"] == "1"


@pytest.mark.parametrize(
    ("loaded", "fits"), [(130000, True), (130201, True), (120900, False), (140000, False)]
)
def test_a_cublaslt_of_another_major_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loaded: int, fits: bool
) -> None:
    """BUG-88, BUG-103."""
    tools = toolchain.Toolchain(Path(), "13.0.88", "c++", "12", (), Path(), Path())
    monkeypatch.delenv("FP8LT_BUILD", raising=False)
    monkeypatch.setattr(toolchain, "find", lambda: tools)
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(build, "_is_intact", lambda library: True)
    monkeypatch.setattr(torch.ops, "load_library", lambda file: None)
    versions = lambda: (130100, loaded)  # noqa: E731
    monkeypatch.setattr(torch.ops.fp8lt, "cublaslt_versions", versions, raising=False)
    if fits:
        assert build._load().name == "fp8lt.so"
        return
    message = f"compiled with cuBLASLt 130100's header, but torch has loaded version {loaded}"
    with pytest.raises(build.BuildError, match=message):
        build._load()
