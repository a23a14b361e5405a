"""Kinds of bugs that such libraries have had, for which no other file has a place."""

import copy
import multiprocessing
import pickle
from collections.abc import Callable

import pytest
import torch
from cases import T_BACKWARD, T_FORWARD, error, randn
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import fp8lt
from fp8lt import ops, recipe

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("name", recipe.NAMES)


def layer_of(name: str, on: torch.device) -> Callable[..., Tensor]:
    """Return `fp8lt.linear` in that recipe, with a state where it wants one."""
    state = fp8lt.DelayedState(device=on) if name == "delayed" else None
    return lambda x, w, bias=None: fp8lt.linear(x, w, bias, recipe=name, state=state)


def leaf(
    *shape: int, on: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    return randn(*shape, on=on, dtype=dtype, seed=seed).requires_grad_()


@NAMES
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2, 3, 4)], ids=str)
def test_leading_dimensions_are_rows(on: torch.device, name: str, lead: tuple[int, ...]) -> None:
    """BUG-05: a vector, one row and many dimensions, with their gradients."""
    results = []
    for flat in (False, True):
        x, w, b = leaf(*lead, 48, on=on), leaf(40, 48, on=on, seed=1), leaf(40, on=on, seed=2)
        y = layer_of(name, on)(x.reshape(-1, 48) if flat else x, w, b).reshape(*lead, 40)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, w.grad, b.grad])
    assert all(map(torch.equal, *results))


@NAMES
@pytest.mark.parametrize(
    ("x_shape", "n"), [((0, 64), 40), ((2, 0, 64), 40), ((3, 64), 0), ((3, 0), 40)], ids=str
)
def test_what_is_empty_has_empty_or_zero_results(
    on: torch.device, name: str, x_shape: tuple[int, ...], n: int
) -> None:
    """BUG-08, BUG-09: no rows, no columns, nothing to sum over: then y is exactly the bias."""
    x, w = leaf(*x_shape, on=on, dtype=torch.bfloat16), leaf(n, x_shape[-1], on=on)
    b = leaf(n, on=on, seed=2)
    y = layer_of(name, on)(x, w, b)
    assert (y.dtype, y.shape) == (torch.bfloat16, (*x_shape[:-1], n))
    if x_shape[-1] == 0:
        assert torch.equal(y, b.bfloat16().expand(y.shape))
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
    assert not x.grad.any()
    for t in (w, b):
        assert t.grad is not None
        assert (t.grad.dtype, t.grad.shape) == (t.dtype, t.shape)
    assert not w.grad.any()
    if y.numel() == 0:
        assert not b.grad.any()


@NAMES
@pytest.mark.parametrize(("m", "n"), [(1, 1), (50, 1), (1, 50)])
def test_one_row_or_one_column_is_right(on: torch.device, name: str, m: int, n: int) -> None:
    """BUG-15: a scale per row and a scale of all are as many then."""
    x, w = randn(m, 512, on=on, dtype=torch.float32), randn(n, 512, on=on, dtype=torch.float32)
    x, w = x.abs() * 10, w.abs() / 7  # nothing cancels
    assert error(layer_of(name, on)(x, w), x.double() @ w.double().t()) <= T_FORWARD


@NAMES
@pytest.mark.parametrize("zero", ["x", "w", "dy", "row", "block"])
def test_zeros_give_zeros_and_nothing_else(on: torch.device, name: str, zero: str) -> None:
    """BUG-26."""
    x, w = randn(9, 256, on=on, dtype=torch.float32), randn(40, 256, on=on, dtype=torch.float32)
    dy = randn(9, 40, on=on, dtype=torch.float32)
    {"x": x, "w": w, "dy": dy, "row": x[3:4], "block": x[:, 128:]}[zero].zero_()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = layer_of(name, on)(x, w)
    y.backward(dy)
    results = {"y": y, "dx": x.grad, "dw": w.grad}
    assert all(t.isfinite().all() for t in results.values())
    none = {"x": ("y", "dw"), "w": ("y", "dx"), "dy": ("dx", "dw"), "row": (), "block": ()}[zero]
    assert all((results[name] == 0).all() for name in none)
    if zero == "row":
        assert (y[3] == 0).all()
    if zero == "block":
        assert (w.grad[:, 128:] == 0).all()


@NAMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible_and_is_forgotten(
    on: torch.device, name: str, bad: float
) -> None:
    """BUG-31: where rows have scales of their own, in its row alone."""
    run, w = layer_of(name, on), randn(40, 48, on=on, dtype=torch.float32)
    x = randn(20, 48, on=on, dtype=torch.float32)
    before = run(x, w)
    spoilt = x.clone()
    spoilt[7, 5] = bad
    y = run(spoilt, w)
    assert not y[7].isfinite().any()
    if name not in ("tensorwise", "delayed"):
        others = torch.arange(20, device=on) != 7
        assert torch.equal(y[others], before[others])
    assert torch.equal(run(x, w), before)


@NAMES
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_the_size_of_numbers_does_not_matter(on: torch.device, name: str, size: float) -> None:
    """BUG-32."""
    x, w = randn(64, 320, on=on, dtype=torch.float32), randn(40, 320, on=on, dtype=torch.float32)
    x = x * size
    assert error(layer_of(name, on)(x, w), x.double() @ w.double().t()) <= T_FORWARD


@NAMES
def test_autocast_forward_and_plain_backward(on: torch.device, name: str) -> None:
    """BUG-56: odd shapes, f32 weights, and backward where autocast is off."""
    x, w, b = leaf(37, 45, on=on), leaf(29, 45, on=on, seed=1), leaf(29, on=on, seed=2)
    with torch.autocast(on.type, torch.bfloat16):
        y = layer_of(name, on)(x, w, b)
    y.backward(randn(37, 29, on=on, dtype=torch.bfloat16, seed=3))
    dy = randn(37, 29, on=on, dtype=torch.bfloat16, seed=3).double()
    want = {"x": dy @ w.double(), "w": dy.t() @ x.double(), "b": dy.sum(0)}
    for t, name_of in ((x, "x"), (w, "w"), (b, "b")):
        assert t.grad is not None
        assert t.grad.dtype == torch.float32
        assert error(t.grad, want[name_of]) <= T_BACKWARD


class NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def test_conversion_touches_no_tensor() -> None:
    """BUG-59."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    places = [p.data_ptr() for p in model.parameters()]
    with NoOps():
        fp8lt.convert_to_float8_training(model)
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


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_layout_is_refused_everywhere_or_nowhere(where: str) -> None:
    """BUG-24."""
    q = ops.quantize_tensorwise(torch.zeros(32, 48, device=where), torch.float8_e4m3fn)
    crooked = q.data.t().contiguous().t()
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.gemm_nt(crooked, q.data, q.scale_inv, q.scale_inv, 32, 32)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.gemm_nt(q.data, crooked, q.scale_inv, q.scale_inv, 32, 32)
