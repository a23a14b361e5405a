"""Backward of the layer as one operator, which is what a compiler's graph calls."""

from typing import Any

import pytest
import torch
from cases import randn
from functorch.compile import make_boxed_compiler, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import fp8lt
from fp8lt import gradients, operands, ops, recipe
from fp8lt.gradients import Backward, Dtypes, Gradients
from fp8lt.operands import Columns
from fp8lt.state import Histories

NAMES = pytest.mark.parametrize("name", recipe.NAMES)
M, N, K = 33, 48, 70


def call(name: str, on: torch.device, wanted: str, need_bias: bool, view: str) -> Backward:
    """Return a backward that wants dx, dw or "both"."""
    kind = recipe.resolve(name)
    amaxes = torch.zeros(3, 5, device=on)
    histories = Histories(amaxes, amaxes, True) if name == "delayed" else None
    x = randn(M, K, on=on, dtype=torch.bfloat16, seed=1)
    w = randn(N, K, on=on, dtype=torch.float32, seed=2)
    dy = randn(M, N, on=on, dtype=torch.bfloat16, seed=3)
    dy = dy.t().contiguous().t() if view == "transposed" else dy
    of_x, of_w = (histories.x, histories.w) if histories else (None, None)
    xq = operands.quantize_x(x, kind, of_x, transposed=True, emulated=False)
    wq = operands.quantize_w(w, kind, of_w, transposed=True, emulated=False)
    x_columns, w_columns = operands.columns(xq), operands.columns(wq)
    dtypes = Dtypes(x.dtype, w.dtype, torch.float16)
    return Backward(
        dy, x_columns if wanted != "dx" else None, w_columns if wanted != "dw" else None, K, kind,
        histories.dy if histories else None, dtypes, need_bias,
    )  # fmt: skip


@pytest.mark.parametrize("view", ["contiguous", "transposed"])
@pytest.mark.parametrize("need_bias", [False, True])
@pytest.mark.parametrize("wanted", ["dx", "dw", "both"])
@NAMES
def test_it_has_the_bits_of_its_parts(
    on: torch.device, name: str, wanted: str, need_bias: bool, view: str
) -> None:
    states, results = [], []
    for backward in (gradients._in_one_operator, gradients._in_parts):
        given = call(name, on, wanted, need_bias, view)
        results.append(backward(given))
        states.append(given.history.amaxes if given.history else torch.zeros(0))
    got, want = results
    assert [g is None for g in got] == [wanted == "dw", wanted == "dx", not need_bias]
    for g, h in zip(got, want, strict=True):
        assert (g is None) == (h is None)
        assert g is None or (g.dtype == h.dtype and torch.equal(g, h))
    assert torch.equal(*states)


@pytest.mark.parametrize("wanted", ["dx", "dw", "both"])
@NAMES
def test_it_passes_opcheck(
    on: torch.device,
    name: str,
    wanted: str,
    opcheck_fp8: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[Any, ...]] = []
    operator = torch.ops.fp8lt.linear_backward
    if name == "delayed":
        operator = torch.ops.fp8lt.linear_backward_delayed
    empty = torch.zeros(0)
    with monkeypatch.context() as patch:
        patch.setattr(operator, "default", lambda *a: taken.append(a) or (empty,) * 3)
        for view in ("contiguous", "transposed"):
            gradients._in_one_operator(call(name, on, wanted, True, view))
    for args in taken:
        torch.library.opcheck(operator.default, args)


def test_of_a_large_layer_it_stays_three_operators(
    on: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one it would keep dy, and the columns of w, alive until its end."""
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(gradients, "_in_one_operator", lambda *_: calls.append("one"))
        patch.setattr(gradients, "_in_parts", lambda *_: calls.append("three"))
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        for n in (gradients.SHORT // K, gradients.SHORT // K + 1):
            dy = torch.empty(0, n, device=on)
            dtypes = Dtypes(torch.bfloat16, torch.bfloat16, None)
            kind = recipe.resolve("tensorwise")
            given = Backward(dy, None, None, K, kind, None, dtypes, need_bias=False)
            gradients.of(given, ops.OPERATORS, None)
    assert calls == ["one", "three"]


@NAMES
def test_compiled_autograd_takes_it(on: torch.device, name: str) -> None:
    """Also where forward has been compiled, and left what it keeps to autograd."""
    compiled_autograd = torch._dynamo.compiled_autograd
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = fp8lt.Linear(48, 40, recipe=name).to(on)
        x = randn(33, 48, on=on, dtype=torch.float32).requires_grad_()
        if compiled:
            y = torch.compile(layer, backend="aot_eager")(x)
            with compiled_autograd._enable(torch.compile(backend="aot_eager")):
                y.square().sum().backward()
        else:
            layer(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    assert all(map(torch.equal, *results))


@NAMES
def test_a_compiled_backward_is_one_operator_for_each_layer(on: torch.device, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48)).to(on, torch.bfloat16)
    fp8lt.convert_to_float8_training(model, config=fp8lt.recipe.resolve(name))
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        # What changes a history is wrapped: the operator is an argument then.
        calls = [(node.target, *node.args[:1]) for node in graph.graph.nodes]
        operators = [c for call in calls for c in call if isinstance(c, torch._ops.OpOverload)]
        graphs.append([str(operator) for operator in operators])
        return graph.forward

    compiler = make_boxed_compiler(keep)
    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    x = randn(33, 48, on=on, dtype=torch.bfloat16).requires_grad_()
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    _, backward = graphs
    operator = "fp8lt.linear_backward" + "_delayed" * (name == "delayed")
    assert backward.count(f"{operator}.default") == 2
    assert not any("gemm" in target for target in backward)


def test_what_does_not_fit_is_refused(on: torch.device) -> None:
    dy, x, w, *_ = call("tensorwise", on, "both", False, "contiguous")
    operator, dtypes = torch.ops.fp8lt.linear_backward.default, (torch.bfloat16,) * 2

    def run(
        dy: Tensor,
        x: tuple[Any, ...],
        w: tuple[Any, ...],
        kind: int = 0,
        fp8: torch.dtype = torch.float8_e5m2,
    ) -> Gradients:
        return operator(dy, *x, *w, kind, K, *dtypes, None, fp8, False, False, False)

    with pytest.raises(RuntimeError, match=r"want dy \[M, N\], got \[1, 33, 48\]"):
        run(dy[None], x, w)
    for bad in ((x.data_t, None, None), (None, x.scale_inv_t, None)):
        with pytest.raises(RuntimeError, match=r"want x_t and x_scale_inv, .* both or neither"):
            run(dy, bad, w)
    for kind in (-1, 1, 6):  # 1: delayed has an operator of its own
        with pytest.raises(RuntimeError, match=f"fp8lt: want recipe .* got {kind}"):
            run(dy, x, w, kind)
    with pytest.raises(RuntimeError, match=r"want .* float8_e4m3fn or float8_e5m2, got "):
        run(dy, x, w, fp8=torch.float32)
    with pytest.raises(RuntimeError, match=r"fp8lt: want b \["):
        run(dy, Columns(x.data_t[:16], *x[1:]), w)
