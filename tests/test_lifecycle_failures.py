"""Kinds of bugs that such libraries have had with layers: converted, changed, saved, costly."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from cases import T_FORWARD, Names, error, randn
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import fp8lt
from fp8lt import recipe
from fp8lt.state import resized

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("name", recipe.NAMES)
pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------- conversion


@NAMES
def test_conversion_touches_no_tensor(name: str) -> None:
    """BUG-59: all that it makes are the states of delayed scaling."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    places = [p.data_ptr() for p in model.parameters()]
    with Names() as names:
        fp8lt.convert_to_float8_training(model, config=name)
    assert names.called == ["zeros.default"] * 2 * (name == "delayed")
    assert [p.data_ptr() for p in model.parameters()] == places


def test_hooks_of_every_kind_and_frozen_weights_survive_conversion() -> None:
    """BUG-61."""
    layer, called = nn.Linear(16, 8), []
    layer.weight.requires_grad_(False)
    layer.register_full_backward_pre_hook(lambda *_: called.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: called.append("state dict"))
    layer.register_load_state_dict_post_hook(lambda *_: called.append("load"))
    layer = fp8lt.convert_to_float8_training(layer)
    x = torch.randn(2, 16, requires_grad=True)
    layer(x).sum().backward()
    layer.load_state_dict(layer.state_dict())
    assert called == ["backward pre", "backward", "state dict", "load"]
    assert layer.weight.grad is None
    assert not layer.weight.requires_grad


def _run_in_child(
    layer: nn.Module, x: Tensor, results: "multiprocessing.Queue[list[float]]"
) -> None:
    results.put(layer(x).flatten().tolist())


@NAMES
def test_layers_and_recipes_travel_between_processes(name: str) -> None:
    """BUG-64."""
    layer = fp8lt.Linear(16, 8, recipe=name)
    one = recipe.resolve(name)
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    x = torch.randn(3, 16)
    want = layer(x).flatten().tolist()
    if name != "delayed":  # one child is slow enough
        assert pickle.loads(pickle.dumps(layer))(x).flatten().tolist() == want
        return
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    child = spawn.Process(target=_run_in_child, args=(layer, x, results))
    child.start()
    got = results.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert got == layer(x).flatten().tolist()


@NAMES
def test_a_token_count_that_changes_is_compiled_once(name: str) -> None:
    """BUG-07: experts get another number of tokens in every step."""
    torch._dynamo.reset()
    layer = fp8lt.Linear(48, 40, recipe=name)
    eager = copy.deepcopy(layer)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for rows in (16, 5, 33, 128):
        x = randn(rows, 48, on=CPU, dtype=torch.float32, seed=rows)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), eager(x))
    assert counter.frame_count == 1


@NAMES
def test_a_transformer_layer_gives_the_same_however_it_is_run(name: str) -> None:
    """BUG-60: in evaluation PyTorch reads its weights, and always those of its attention."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    layer = fp8lt.convert_to_float8_training(copy.deepcopy(plain), config=name)
    assert [m for m in layer.modules() if isinstance(m, fp8lt.Linear)] == [
        layer.linear1,
        layer.linear2,
    ]
    x = randn(4, 16, 64, on=CPU, dtype=torch.float32)
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                want, got = plain.train(training)(x), layer.train(training)(x)
            assert error(got, want) <= T_FORWARD / 2  # measured 0.012: half of x passes by
            assert torch.equal(got, want) == (not training and not grad)
    for weights in (True, False):
        got, want = (m.self_attn(x, x, x, need_weights=weights) for m in (layer, plain))
        assert torch.equal(got[0], want[0])
    for m in (plain, layer):
        m.train()(x).square().sum().backward()
    assert all(0 < error(p.grad, q.grad) < 0.25 for p, q in zip(  # measured up to 0.15
        layer.parameters(), plain.parameters(), strict=True))  # fmt: skip


class Adapted(nn.Linear):
    """A layer with an adapter inside, as LoRA libraries derive them."""

    def __init__(self) -> None:
        super().__init__(32, 16)
        self.down, self.up = nn.Linear(32, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + self.up(self.down(input))


def test_what_computes_its_weight_or_wraps_a_layer_still_does() -> None:
    """BUG-60."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "class": nn.utils.parametrizations.weight_norm(nn.Linear(32, 16)),
            "adapted": Adapted(),
            "wrapped": nn.Sequential(nn.Linear(32, 16)),
        }
    )
    with pytest.warns(FutureWarning, match="weight_norm"):  # a hook sets the weight
        model["hook"] = torch.nn.utils.weight_norm(nn.Linear(32, 16))
    kinds = [type(m) for m in model.values()]
    x = randn(9, 32, on=CPU, dtype=torch.float32)
    before = {name: m(x) for name, m in model.items()}
    adapted = model["adapted"]
    fp8lt.convert_to_float8_training(model, module_filter_fn=lambda m, _: m.out_features > 4)
    after = {name: m(x) for name, m in model.items()}
    assert torch.equal(after["class"], before["class"])
    assert error(after["adapted"], before["adapted"]) <= T_FORWARD
    for name in ("wrapped", "hook"):
        assert 0 < error(after[name], before[name]) <= T_FORWARD
    assert [type(m) for m in model.values()] == [*kinds[:3], fp8lt.Linear]
    assert (type(adapted.up), type(adapted.down)) == (fp8lt.Linear, nn.Linear)
    sum(y.sum() for y in after.values()).backward()
    assert all(p.grad is not None for p in model.parameters())
    fp8lt.revert(model)
    assert all(torch.equal(m(x), before[name]) for name, m in model.items())


# ------------------------------------------------------------------------------ modes and weights


@NAMES
def test_gradients_are_asked_for_by_tensors_and_not_by_the_mode(
    on: torch.device, name: str
) -> None:
    """BUG-45: a frozen layer in evaluation, as under an adapter; one that trains in no_grad."""
    layer = fp8lt.Linear(48, 40, device=on, recipe=name)
    frozen = copy.deepcopy(layer).requires_grad_(False).eval()
    results = []
    for one in (layer, frozen):
        x = randn(17, 48, on=on, dtype=torch.float32).requires_grad_()
        y = one(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *fp8lt.delayed_state_dict(one).values()])
    assert all(map(torch.equal, *results))
    assert frozen.weight.grad is None
    assert frozen.bias.grad is None
    layer.train()
    with torch.no_grad():
        assert torch.equal(layer(x), frozen(x))
    assert all(map(torch.equal, results[0][2:], fp8lt.delayed_state_dict(layer).values()))


def rewrite(layer: nn.Module) -> None:
    """Free a weight's memory, and fill it with others, as FSDP does between two steps."""
    storage, twice = layer.weight.untyped_storage(), layer.weight.detach() * 2
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.copy_(twice.untyped_storage())


SEEN: dict[str, Callable[[nn.Module], object]] = {  # also in `reuse_weights`
    "step": lambda layer: torch.optim.SGD(layer.parameters(), lr=1.0).step(),
    "load": lambda layer: layer.load_state_dict({k: 2 * v for k, v in layer.state_dict().items()}),
    "copy": lambda layer: layer.weight.copy_(2 * layer.weight),
    "data": lambda layer: setattr(layer.weight, "data", 2 * layer.weight.data),
    "vector": lambda layer: nn.utils.vector_to_parameters(
        2 * nn.utils.parameters_to_vector(layer.parameters()), layer.parameters()
    ),
    "device": lambda layer: layer._apply(lambda t: 2 * t),  # what to() does, with other numbers
}
NOT_SEEN: dict[str, Callable[[nn.Module], object]] = {
    "through data": lambda layer: layer.weight.data.mul_(2),
    "reshard": rewrite,
}


@NAMES
@pytest.mark.parametrize("how", [*SEEN, *NOT_SEEN])
@pytest.mark.parametrize("reused", [False, True])
def test_a_weight_that_has_changed_is_never_stale(
    on: torch.device, name: str, how: str, reused: bool
) -> None:
    """BUG-50: after an evaluation, too; in `reuse_weights`, what that cannot see ends with it."""
    torch.manual_seed(0)
    layer, other = (fp8lt.Linear(48, 40, device=on, recipe=name) for _ in range(2))
    x = randn(17, 48, on=on, dtype=torch.float32)

    def step() -> None:
        with torch.no_grad():
            layer(x)
        layer(x.clone().requires_grad_()).sum().backward()

    def change() -> None:
        before = layer.weight.detach().clone()
        with torch.no_grad():
            (SEEN | NOT_SEEN)[how](layer)
        assert not torch.equal(layer.weight, before)

    def check() -> None:
        other.load_state_dict(layer.state_dict())
        results = []
        for one in (layer, other):
            leaf = x.clone().requires_grad_()
            y = one(leaf)
            y.backward(torch.ones_like(y))
            results.append((y, leaf.grad))
        assert all(map(torch.equal, *results))

    if not reused:
        step()
        change()
        check()
        return
    with fp8lt.reuse_weights(layer):
        step()
        change()
        if how in SEEN:
            check()
    check()
    assert "_weight_cache" not in vars(layer)


# ------------------------------------------------------------------------------------ checkpoints


KINDS = {
    "plain": None,
    **{name: recipe.resolve(name) for name in recipe.NAMES},
    "delayed, 32": fp8lt.DelayedScaling(amax_history_len=32),
}
KEYS = ["0.weight", "0.bias", "2.weight", "2.bias"]
BATCH = randn(8, 32, on=CPU, dtype=torch.float32)


def used(kind: str, seed: int) -> nn.Sequential:
    """Return a model that has run a step."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    if kind != "plain":
        fp8lt.convert_to_float8_training(layers, config=KINDS[kind])
    layers(BATCH * (seed + 1)).square().sum().backward()
    return layers


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("assign", [False, True])
def test_every_model_loads_the_checkpoint_of_every_other(target: str, assign: bool) -> None:
    """BUG-62: strictly; without histories of these weights it starts new ones."""
    loaded = used(target, 1)
    for source in KINDS:
        saved, file = used(source, 0), io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
        assert list(state_dict) == KEYS
        loaded.load_state_dict(state_dict, strict=True, assign=assign)
        assert same(loaded, saved)
        histories = [*fp8lt.delayed_state_dict(saved).values()]
        for i, state in enumerate(fp8lt.delayed_state_dict(loaded).values()):
            kept = resized(histories[i], state.shape[1] - 2) if histories else 0 * state
            assert torch.equal(state, kept)
        loaded(BATCH).square().sum().backward()


def test_a_name_that_a_wrapper_adds_can_be_taken_away() -> None:
    """BUG-62: "module." before every key, also of what the metadata hold."""
    saved, loaded = used("delayed", 0), used("delayed", 1)
    state_dict = nn.ModuleDict({"module": saved}).state_dict()
    consume_prefix_in_state_dict_if_present(state_dict, "module.")
    loaded.load_state_dict(state_dict, strict=True)
    assert same(loaded, saved)
    states = (fp8lt.delayed_state_dict(one).values() for one in (loaded, saved))
    assert all(map(torch.equal, *states))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("source", ["plain", "rowwise", "delayed"])
@pytest.mark.parametrize("target", ["plain", "rowwise", "delayed"])
def test_distributed_checkpoints_load_into_every_model(
    tmp_path: Path, source: str, target: str
) -> None:
    """BUG-62: they keep the keys alone, so a history is saved beside them."""
    saved, loaded = used(source, 0), used(target, 1)
    both = [{"model": m.state_dict(), "fp8": fp8lt.delayed_state_dict(m)} for m in (saved, loaded)]
    assert list(both[0]["model"]) == KEYS
    dcp.save(both[0], checkpoint_id=tmp_path)
    if source != target:  # nothing fits the histories of a delayed target
        del both[1]["fp8"]
    dcp.load(both[1], checkpoint_id=tmp_path)
    loaded.load_state_dict(dict(both[1]["model"]), strict=True)
    if source == target:
        fp8lt.load_delayed_state_dict(loaded, both[1]["fp8"])
        assert torch.equal(loaded(BATCH), saved(BATCH))
    assert same(loaded, saved)


# --------------------------------------------------------------------------------------- contexts


def test_what_a_context_cannot_see_is_in_the_readme() -> None:
    """BUG-67: a call by another way is either counted, or named."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    layer, lstm, x = nn.Linear(48, 8), nn.LSTM(48, 8), randn(3, 48, on=CPU, dtype=torch.float32)
    ways: dict[str, Callable[[], Tensor]] = {
        "`torch.jit.script`": lambda: scripted(x),
        "`torch.ops.aten.linear`": lambda: torch.ops.aten.linear(x, layer.weight, layer.bias),
        "`nn.LSTM`": lambda: lstm(x)[0],
        "`torch.func` transforms": lambda: torch.func.grad(lambda w: F.linear(x, w).square().sum())(
            layer.weight
        ),
    }
    scripted = torch.jit.script(layer)
    for name, call in ways.items():
        want = call()
        fp8lt.stats(reset=True)
        with fp8lt.fp8_autocast():
            assert torch.equal(call(), want)
            assert fp8lt.stats()["rerouted"] == 0
            assert not torch.equal(torch._C._nn.linear(x, layer.weight), x @ layer.weight.t())
        assert name in readme.split("### Without converting")[1].split("###")[0]
        counts = fp8lt.stats(reset=True)
        assert counts["rerouted"] == 1
        transforms = {"it is inside of a torch.func transform": 1} if "func" in name else {}
        assert counts["kept"] == {"matmul is not F.linear": 1, **transforms}
