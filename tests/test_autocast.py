"""`fp8_autocast`: which linears run in FP8, where, and that nothing else changes."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from cases import RunPython, randn, run_aside
from contexts import CPU, assert_equal, converted, model, steps
from torch import Tensor, nn

import fp8lt
from fp8lt import recipe


@pytest.fixture(autouse=True)
def counts() -> Iterator[None]:
    fp8lt.stats(reset=True)
    yield
    fp8lt.stats(reset=True)


# ---------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_model_trains_as_if_it_were_converted(on: torch.device, name: str) -> None:
    plain = model(on)
    same = converted(plain, name)

    def run(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(recipe=name):
            return plain(x)

    want = steps(same, same, on)
    assert_equal(steps(plain, run, on), want)  # backward runs outside
    assert fp8lt.stats() == {"rerouted": 6, "kept": {}}


def test_all_modes_of_autograd_give_the_same(on: torch.device) -> None:
    """BUG-55: inference mode and no_grad run the same code."""
    layer, x = model(on), randn(7, 48, on=on, dtype=torch.bfloat16)
    layer = layer.bfloat16()
    want = converted(layer)(x)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), fp8lt.fp8_autocast():
            assert torch.equal(layer(x), want)
    with torch.inference_mode():
        inside = x.clone()
    with fp8lt.fp8_autocast(), torch.inference_mode():
        assert torch.equal(layer(inside), want)
    assert fp8lt.stats()["rerouted"] == 8


def test_torch_autocast_casts_inputs_and_keeps_gradients_of_f32_weights(on: torch.device) -> None:
    """BUG-56."""
    layer, x = nn.Linear(48, 64, device=on), randn(7, 48, on=on, dtype=torch.float32)
    x.requires_grad_()
    with torch.autocast(on.type, torch.bfloat16), fp8lt.fp8_autocast():
        y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {t.grad.dtype for t in (x, layer.weight)} == {torch.float32}
    want = fp8lt.linear(x.bfloat16(), layer.weight, layer.bias.bfloat16())
    assert torch.equal(y, want)


@pytest.mark.parametrize("packed", [True, False])
def test_the_projections_of_attention_are_rerouted(on: torch.device, packed: bool) -> None:
    other = {} if packed else {"kdim": 32, "vdim": 32}
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(48, 4, batch_first=True, device=on, **other)
    q = randn(2, 5, 48, on=on, dtype=torch.float32)
    k = q if packed else randn(2, 6, 32, on=on, dtype=torch.float32)

    def by_hand() -> Tensor:
        if packed:
            projected = fp8lt.linear(q, attention.in_proj_weight, attention.in_proj_bias).chunk(
                3, 2
            )
        else:
            weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
            biases = attention.in_proj_bias.chunk(3)
            projected = [fp8lt.linear(*i) for i in zip((q, k, k), weights, biases, strict=True)]
        heads = [t.unflatten(2, (4, 12)).transpose(1, 2) for t in projected]
        mixed = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        out = attention.out_proj
        return fp8lt.linear(mixed, out.weight, out.bias)

    for training in (True, False):  # without gradients PyTorch has one operator for all of it
        attention.train(training)
        fp8lt.stats(reset=True)
        with torch.set_grad_enabled(training), fp8lt.fp8_autocast():
            y, _ = attention(q, k, k, need_weights=False)
        torch.testing.assert_close(y, by_hand(), rtol=0, atol=2e-2)
        assert not torch.allclose(y, attention(q, k, k)[0], rtol=0, atol=1e-4)
        assert fp8lt.stats()["rerouted"] == (2 if packed else 4)


def test_a_transformer_layer_is_rerouted_in_training_and_inference() -> None:
    layer = nn.TransformerEncoderLayer(48, 4, 64, batch_first=True)
    x = randn(2, 5, 48, on=CPU, dtype=torch.float32)
    for training in (True, False):
        layer.train(training)
        fp8lt.stats(reset=True)
        with torch.set_grad_enabled(training), fp8lt.fp8_autocast():
            layer(x)
        assert fp8lt.stats()["rerouted"] == 4


def test_what_is_converted_stays_what_it_is() -> None:
    same = converted(model(), "rowwise")
    x = randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, high = same(x), model()(x)
    with fp8lt.fp8_autocast():
        assert torch.equal(same(x), fp8)
        with fp8lt.disable_fp8(same):
            assert torch.equal(same(x), high)
    assert fp8lt.stats()["rerouted"] == 0


# ------------------------------------------------------------------------------ where it does it


def test_the_innermost_context_decides_and_ends_with_its_block() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, rowwise, high = converted(plain)(x), converted(plain, "rowwise")(x), plain(x)
    with fp8lt.fp8_autocast():
        assert torch.equal(plain(x), fp8)
        with fp8lt.fp8_autocast(recipe="rowwise"):
            assert torch.equal(plain(x), rowwise)
            with fp8lt.fp8_autocast(enabled=False):
                assert torch.equal(plain(x), high)
            with pytest.raises(KeyError), fp8lt.fp8_autocast(enabled=False):
                raise KeyError
            assert torch.equal(plain(x), rowwise)
        assert torch.equal(plain(x), fp8)
    assert torch.equal(plain(x), high)
    assert fp8lt.stats() == {"rerouted": 8, "kept": {"the context is disabled": 2}}


def test_one_context_may_be_entered_again() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, context = converted(plain)(x), fp8lt.fp8_autocast()
    with context, context:
        assert torch.equal(plain(x), fp8)
    assert torch.equal(plain(x), model()(x))
    with context:
        assert torch.equal(plain(x), fp8)


def test_a_function_is_decorated_and_a_generator_refused() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)

    @fp8lt.fp8_autocast(recipe="rowwise")
    def run(x: Tensor, more: int) -> Tensor:
        """Run."""
        return run(x, more - 1) if more else plain(x)

    assert torch.equal(run(x, 2), converted(plain, "rowwise")(x))
    assert (run.__name__, run.__doc__) == ("run", "Run.")
    assert torch.equal(plain(x), model()(x))

    def generator() -> Iterator[Tensor]:
        yield plain(x)

    with pytest.raises(
        TypeError, match=r"want a function.* generatorfunction .*generator: it runs"
    ):
        fp8lt.fp8_autocast()(generator)


def test_it_holds_for_its_thread_alone() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, high = converted(plain)(x), plain(x)
    entered, seen = threading.Barrier(2), {}

    def run(name: str, enabled: bool) -> None:
        with fp8lt.fp8_autocast(enabled):
            entered.wait()
            seen[name] = plain(x)
            entered.wait()

    threads = [threading.Thread(target=run, args=args) for args in (("on", True), ("off", False))]
    with fp8lt.fp8_autocast():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        other = threading.Thread(target=lambda: seen.update(none=plain(x)))
        other.start()
        other.join()
    assert torch.equal(seen["on"], fp8)
    assert torch.equal(seen["off"], high)
    assert torch.equal(seen["none"], high)


def test_an_import_changes_nothing_of_pytorch(run_python: RunPython) -> None:
    run_python(
        """
import torch, torch.nn.functional as F
from torch.utils import checkpoint

def ours():
    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    return F.linear, F.multi_head_attention_forward, frame.__init__, function.forward

before = ours()
import fp8lt
assert ours() == before
with fp8lt.fp8_autocast():
    pass
assert ours()[:2] == before[:2]
assert torch._C._len_torch_function_stack() == 0
""",
        FP8LT_BUILD="off",
    )


def test_who_has_wrapped_f_linear_is_heard_and_rerouted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x, calls = model(), randn(7, 48, on=CPU, dtype=torch.float32), []
    fp8, original = converted(plain)(x), F.linear
    monkeypatch.setattr(F, "linear", lambda *args: calls.append(args) or original(*args))
    with fp8lt.fp8_autocast():
        assert torch.equal(plain(x), fp8)
    assert len(calls) == 2


def test_other_threads_may_compile_meanwhile() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, high, double = converted(plain)(x), plain(x), copy.deepcopy(plain).double()
    compiling, go_on = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiling.set()
        go_on.wait(30)
        return graph.forward

    context = fp8lt.fp8_autocast()
    before = fp8lt.fp8_autocast(enabled=False).__enter__()
    compiled = run_aside(torch.compile(lambda: x.sin() + 1, backend=backend))
    assert compiling.wait(30)
    before.__exit__(None, None, None)
    with context:
        assert torch.equal(plain(x), fp8)
        assert torch.equal(double(x.double()), double(x.double()))
        go_on.set()
        assert compiled.wait(30)
        assert torch.equal(plain(x), fp8)
    assert torch.equal(plain(x), high)


# --------------------------------------------------------------------------------------- counts


def test_what_is_not_rerouted_is_counted_with_the_reason() -> None:
    """BUG-67: the context says what it did not see as a linear."""
    x, w = randn(3, 48, on=CPU, dtype=torch.float32), randn(5, 48, on=CPU, dtype=torch.float32)
    assert torch._C._nn.linear is F.linear
    with fp8lt.fp8_autocast():
        assert torch.equal(F.linear(x, w), fp8lt.linear(x, w))
        assert torch.equal(F.linear(x.double(), w.double()), x.double() @ w.double().t())
        assert torch.equal(F.linear(x, w[0]), x @ w[0])
        torch.func.vmap(F.linear, (0, None))(x, w)
        torch.addmm(w[:, 0], x, w.t())
        nn.LSTM(48, 8)(x)
    assert fp8lt.stats()["rerouted"] == 1
    assert fp8lt.stats(reset=True)["kept"] == {
        "its dtype is torch.float64": 1,
        "weight is no matrix, or input a scalar": 1,
        "it is inside of a torch.func transform": 1,
        "matmul is not F.linear": 2,
        "addmm is not F.linear": 1,
    }
    assert fp8lt.stats() == {"rerouted": 0, "kept": {}}


class Answers(Tensor):
    """A weight that computes by itself, as adapters and quantised ones do."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if func is F.linear:
            return "mine"
        return super().__torch_function__(func, types, args, kwargs or {})


def test_what_fp8_has_no_form_for_stays_as_it_is() -> None:
    x, w = randn(3, 48, on=CPU, dtype=torch.float32), randn(8, 48, on=CPU, dtype=torch.float32)
    nested = torch.nested.nested_tensor([x, x[:2]])
    cases = [
        (x, w.to_sparse()), (x, w.to_sparse_csr()), (x.to_sparse_csr(), w), (nested, w),
        (x, w, torch.ones(())), (x, w, torch.ones(1)),
    ]  # fmt: skip
    for case in cases:
        want = F.linear(*case)
        with fp8lt.fp8_autocast(), fp8lt.fp8_autocast(recipe="rowwise"):
            got = F.linear(*case)
        if not want.is_nested:
            assert torch.equal(got, want)
    with fp8lt.fp8_autocast(), fp8lt.fp8_autocast():
        assert F.linear(x, w.as_subclass(Answers)) == "mine"
    assert fp8lt.stats() == {
        "rerouted": 0,
        "kept": {
            "a tensor is sparse or nested": 4,
            "bias is broadcast": 2,
            "Answers is a tensor subclass": 1,
        },
    }


@pytest.mark.parametrize("what", [3, None, nn.Linear, functools.partial(iter)])
def test_only_functions_are_decorated(what: object) -> None:
    if isinstance(what, functools.partial):
        assert callable(fp8lt.fp8_autocast()(what))
        return
    with pytest.raises(TypeError, match="want a function to decorate, got"):
        fp8lt.fp8_autocast()(what)  # type: ignore[type-var]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="enabled: want True or False, got 'rowwise'"):
        fp8lt.fp8_autocast("rowwise")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"recipe: want one of .*; got 'rows'"):
        fp8lt.fp8_autocast(recipe="rows")
    with pytest.raises(ValueError, match="fp8_format: want 'hybrid' or 'e4m3', got 'e4m4'"):
        fp8lt.fp8_autocast(fp8_format="e4m4")  # type: ignore[arg-type]
    assert fp8lt.fp8_autocast(fp8_format="e4m3").recipe.fp8_format == "e4m3"


def test_a_linear_that_does_not_fit_raises_as_ever() -> None:
    with fp8lt.fp8_autocast(), pytest.raises(RuntimeError, match=r"got x \[3, 5\] and w \[4, 6\]"):
        F.linear(torch.ones(3, 5), torch.ones(4, 6))
