"""`fp8_autocast` under the compiler."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cases import randn
from contexts import CPU, converted, model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import checkpoint

import fp8lt
from fp8lt import recipe


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_compiled_model_sees_the_context(on: torch.device, name: str) -> None:
    plain, x = model(on), randn(7, 48, on=on, dtype=torch.float32)
    compiled = torch.compile(plain, fullgraph=True)
    if name == "delayed":
        with fp8lt.fp8_autocast(recipe=name):
            plain(x)
            want = plain(x)
    else:
        want = converted(plain, name)(x)
    for _ in range(2):
        with fp8lt.fp8_autocast(recipe=name):
            torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
            with fp8lt.fp8_autocast(enabled=False):
                torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(compiled(x), model(on)(x), rtol=1e-5, atol=1e-5)


def test_a_compiled_function_may_enter_it_and_break_in_it() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    fp8, high = converted(plain)(x), plain(x)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        with fp8lt.fp8_autocast():
            y = plain(x)
        return y, plain(x)

    def run_and_break(x: Tensor) -> tuple[Tensor, Tensor]:
        with fp8lt.fp8_autocast():
            torch._dynamo.graph_break()
            y = plain(x)
        return y, plain(x)

    for compiled in (torch.compile(run, fullgraph=True), torch.compile(run_and_break)):
        a, b = compiled(x)
        torch.testing.assert_close(a, fp8, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b, high, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain(x), high)


@pytest.mark.parametrize("enabled", [True, False])
def test_eager_code_after_a_break_is_in_the_same_context(enabled: bool) -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    want = converted(plain)(x) if enabled else plain(x)

    @torch._dynamo.disable
    def eager(x: Tensor) -> Tensor:
        return plain(x)

    @torch.compile(backend="aot_eager")
    def run(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(enabled):
            return eager(x)

    assert torch.equal(run(x), want)
    with fp8lt.fp8_autocast(not enabled):
        assert torch.equal(run(x), want)
    assert torch._C._len_torch_function_stack() == 0


def test_what_is_left_to_eager_mode_is_not_compiled_piece_by_piece() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    counter = CompileCounterWithBackend("aot_eager")

    @torch._dynamo.disable(recursive=False)
    def eager(x: Tensor) -> Tensor:
        return F.gelu(plain(F.relu(x)))

    @torch.compile(backend=counter)
    def run(x: Tensor) -> Tensor:
        return eager(x) + 1

    fp8lt.stats(reset=True)
    with fp8lt.fp8_autocast():
        got = run(x)
    assert counter.frame_count == 1
    assert torch.equal(got, F.gelu(converted(plain)(F.relu(x))) + 1)
    assert fp8lt.stats()["rerouted"] == 2


def test_attention_in_a_compiled_context_is_one_graph_with_the_gradients_of_eager_mode(
    on: torch.device,
) -> None:
    project, out = (nn.Linear(64, size).to(on, torch.bfloat16) for size in (192, 64))

    @fp8lt.fp8_autocast()
    def attend(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k[:, ::2], v[:, ::2], is_causal=True, enable_gqa=True)
        return out(y.transpose(1, 2).flatten(-2))

    x = randn(2, 32, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    inputs = [x, project.weight, out.weight]
    want = torch.autograd.grad(attend(x).square().sum(), inputs)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x).square().sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert (a - b).float().norm() < 0.02 * b.float().norm()  # 0.0 on a CPU


def test_a_region_inside_of_a_compiled_function_is_never_quietly_in_high_precision() -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32).requires_grad_()

    def run(x: Tensor) -> Tensor:
        return checkpoint.checkpoint(plain, x, use_reentrant=False)

    with fp8lt.fp8_autocast():
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"torch.compile hides what a checkpointed region"):
            torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        torch._dynamo.reset()
        got = torch.compile(run, backend="aot_eager")(x)
    same = converted(plain)
    assert torch.equal(got, same(x))
    (dx,) = torch.autograd.grad(got.sum(), x)
    assert torch.equal(dx, torch.autograd.grad(same(x).sum(), x)[0])
    torch._dynamo.reset()
    with fp8lt.disable_fp8(same):  # of a converted model, it is compiled
        got = torch.compile(
            lambda x: checkpoint.checkpoint(same, x, use_reentrant=False),
            backend="aot_eager", fullgraph=True,
        )(x)  # fmt: skip
    assert torch.equal(got, plain(x))


def test_compiled_code_leaves_alone_what_eager_mode_does() -> None:
    for weight in (torch.ones(8, 48, dtype=torch.float64), torch.ones(48)):
        torch._dynamo.reset()
        x = torch.ones(3, 48, dtype=weight.dtype)
        with fp8lt.fp8_autocast(), fp8lt.fp8_autocast(recipe="rowwise"):
            got = torch.compile(F.linear, backend="aot_eager", fullgraph=True)(x, weight)
        assert torch.equal(got, F.linear(x, weight))


def test_compiled_attention_is_rerouted() -> None:
    attention = nn.MultiheadAttention(48, 4, batch_first=True)
    q = randn(2, 5, 48, on=CPU, dtype=torch.float32)
    with fp8lt.fp8_autocast():
        want = attention(q, q, q)[0]
        got = torch.compile(lambda q: attention(q, q, q)[0], fullgraph=True)(q)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_compiled_function_cannot_begin_a_history() -> None:
    layer = nn.Linear(48, 48)
    with (
        fp8lt.fp8_autocast(recipe="delayed"),
        pytest.raises(Exception, match="run the model once in eager mode"),
    ):
        torch.compile(layer, fullgraph=True)(randn(7, 48, on=CPU, dtype=torch.float32))


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_keeps_what_the_context_said(strict: bool) -> None:
    plain, x = model(), randn(7, 48, on=CPU, dtype=torch.float32)
    with fp8lt.fp8_autocast():
        program = torch.export.export(plain, (x,), strict=strict)
    assert "fp8lt.gemm_nt" in program.graph_module.print_readable(print_output=False)
    assert torch.equal(program.module()(x), converted(plain)(x))
