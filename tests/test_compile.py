"""`torch.compile`: whole graphs, few of them, and the bits of eager mode."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import randn
from functorch.compile import make_boxed_compiler, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import fp8lt
from fp8lt import recipe

DEEP = 40  # layers


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def deep_model(on: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [(nn.Linear(32, 32, bias=i % 2 == 0), nn.ReLU()) for i in range(DEEP)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).to(on, torch.bfloat16)


def converted(model: nn.Module, name: str) -> nn.Module:
    fp8lt.convert_to_float8_training(model)
    for module in model.modules():
        if isinstance(module, fp8lt.Linear):
            module.recipe = name  # type: ignore[assignment]
    return model


def kinds(name: str, on: torch.device) -> dict[str, tuple[Callable[[Tensor], Tensor], nn.Module]]:
    """Return what is compiled, by name, and whose parameters get gradients."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 40).to(on, torch.bfloat16)
    state = fp8lt.DelayedState(device=on) if name == "delayed" else None
    if name == "delayed":
        with fp8lt.fp8_autocast(recipe=name):  # a compiled function cannot begin a history
            plain(torch.ones(2, 48, device=on, dtype=torch.bfloat16))
    module = fp8lt.Linear(48, 40, recipe=name).to(on, torch.bfloat16)

    def function(x: Tensor) -> Tensor:
        return fp8lt.linear(x, plain.weight, plain.bias, recipe=name, state=state)

    def in_context(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(recipe=name):
            return plain(x)

    return {
        "function": (function, plain),
        "module": (module, module),
        "context": (in_context, plain),
    }


def step(run: Callable[[Tensor], Tensor], x: Tensor, parameters: nn.Module) -> list[Tensor]:
    x = x.clone().requires_grad_()
    parameters.zero_grad()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in parameters.parameters())]


@pytest.mark.parametrize("kind", ["function", "module", "context"])
@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_layer_is_one_graph_with_the_bits_of_eager_mode(
    on: torch.device, name: str, kind: str
) -> None:
    (eager, layer), (same, twin) = (kinds(name, on)[kind] for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(same, backend=counter, fullgraph=True)
    for rows in (33, 64, 7, 100):  # the second size makes a graph for all
        x = randn(rows, 48, on=on, dtype=torch.bfloat16, seed=rows)
        got, want = step(compiled, x, twin), step(eager, x, layer)
        assert all(map(torch.equal, got, want))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", recipe.NAMES)
def test_inference_is_one_graph_too(on: torch.device, name: str) -> None:
    layer = fp8lt.Linear(48, 40, recipe=name).to(on, torch.bfloat16)
    x = randn(33, 48, on=on, dtype=torch.bfloat16)
    layer(x)  # a history for the recipe that has one
    want = layer(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode():
            want = layer(x)
            got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_what_is_recomputed_has_the_bits_of_eager_mode_too(on: torch.device, name: str) -> None:
    lean = dataclasses.replace(recipe.resolve(name), recompute_weight=True)
    torch.manual_seed(0)
    layers = [fp8lt.Linear(48, 40, recipe=lean).to(on, torch.bfloat16) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layers[0], backend=counter, fullgraph=True)
    for rows in (33, 64, 7, 100):
        x = randn(rows, 48, on=on, dtype=torch.bfloat16, seed=rows)
        assert all(map(torch.equal, step(compiled, x, layers[0]), step(layers[1], x, layers[1])))
    assert counter.frame_count <= 2


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 256, bias=False) for _ in range(2))
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize("lean", [False, True])
def test_lean_and_compiled_nothing_is_kept_that_backward_can_make(name: str, lean: bool) -> None:
    scaling = dataclasses.replace(recipe.resolve(name), recompute_weight=lean)
    model = SwiGLU().bfloat16()
    fp8lt.convert_to_float8_training(model, config=scaling)
    kept: list[torch.Size] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        graphs = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        *_, output = graphs[0].graph.nodes
        for node in output.args[0][num_fwd_outputs:]:
            if node.op != "placeholder" and node.meta["val"].dtype == torch.float8_e4m3fn:
                kept.append(node.meta["val"].shape)
        return graphs

    plain = make_boxed_compiler(lambda graph, _: graph)
    backend = aot_autograd(
        fw_compiler=plain, bw_compiler=plain, partition_fn=partition,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    # A graph cannot make its own input: its columns are kept, once for each scale they have.
    columns, weights = (
        [(64, 32)] * (1 if name == "tensorwise" else 2),
        [(64, 256)] * 2 + [(256, 64)],
    )
    assert sorted(kept) == sorted(columns if lean else [*columns, (256, 32), *weights])


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_a_deep_model_is_compiled_once_and_once_more_for_other_sizes(
    on: torch.device, name: str
) -> None:
    """BUG-70: what layers have of their own in Python makes neither breaks nor recompilations."""
    model = converted(deep_model(on), name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rows, frames in ((16, 1), (16, 1), (24, 2), (40, 2), (8, 2)):
        step(compiled, randn(rows, 32, on=on, dtype=torch.bfloat16, seed=rows), model)
        assert counter.frame_count == frames


@pytest.mark.parametrize("outside", [True, False])
def test_a_context_makes_no_recompilations(on: torch.device, outside: bool) -> None:
    """BUG-70, of a model that is not converted; each step has a context of its own."""
    model = deep_model(on)[:10]
    counter = CompileCounterWithBackend("aot_eager")

    def inside(x: Tensor) -> Tensor:
        with fp8lt.fp8_autocast(recipe="rowwise"):
            return model(x)

    compiled = torch.compile(model if outside else inside, backend=counter, fullgraph=True)
    for rows, frames in ((16, 1), (16, 1), (24, 2), (40, 2)):
        context = fp8lt.fp8_autocast(recipe="rowwise") if outside else contextlib.nullcontext()
        x = randn(rows, 32, on=on, dtype=torch.bfloat16, seed=rows)
        with context:
            got = compiled(x)
        assert torch.equal(got, inside(x))
        assert counter.frame_count == frames


def test_a_compiled_transform_is_an_error_and_no_zero() -> None:
    """`torch.func` under a compiler asks the operators for derivatives, which they do not have."""
    w, x = torch.randn(32, 48), torch.randn(4, 48)
    gradient = torch.func.grad(lambda x: fp8lt.linear(x, w).square().sum())
    with pytest.raises(RuntimeError, match=r"functorch transforms|derivative for fp8lt::"):
        torch.compile(gradient, backend="aot_eager")(x)


def test_an_operator_has_no_derivative() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    data, *_ = torch.ops.fp8lt.quantize_tensorwise.default(x, torch.float8_e4m3fn, True, True)
    with pytest.raises(RuntimeError, match="derivative for fp8lt::quantize_tensorwise"):
        data.float().sum().backward()
