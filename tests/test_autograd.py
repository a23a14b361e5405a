"""`fp8lt.linear` inside PyTorch: the autograd contract, contexts, threads, streams, graphs."""

import dataclasses
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from cases import T_SAME, CountOps, dequantised, error, randn, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8lt
from fp8lt import device
from fp8lt.recipe import resolve

E4M3, E5M2 = device.OCP
CPU = torch.device("cpu")


@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("need_w", [True, False])
@pytest.mark.parametrize("need_b", [True, False, None])
def test_only_wanted_gradients_cost_anything(
    on: torch.device, need_x: bool, need_w: bool, need_b: bool | None
) -> None:
    """BUG-25."""
    x = randn(32, 64, on=on, dtype=torch.bfloat16).requires_grad_(need_x)
    w = randn(48, 64, on=on, dtype=torch.bfloat16).requires_grad_(need_w)
    b = None if need_b is None else randn(48, on=on, dtype=torch.bfloat16).requires_grad_(need_b)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fp8lt.linear(x, w, b)
    fp8_bytes = sum(t.nbytes for t in saved if t.dtype == E4M3)
    assert fp8_bytes == need_w * x.numel() + need_x * w.numel()  # a byte an element
    assert y.requires_grad == (need_x or need_w or bool(need_b))
    if not y.requires_grad:
        return
    with CountOps() as count:
        y.backward(torch.ones_like(y))
    assert count.counts["gemm_nt"] == need_x + need_w
    assert count.quantised == count.counts["quantize_tensorwise"] == (need_x or need_w)
    assert [t.grad is not None for t in (x, w)] == [need_x, need_w]
    assert b is None or (b.grad is not None) == need_b


def test_without_grad_nothing_is_transposed(on: torch.device) -> None:
    """BUG-55."""
    x = randn(32, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(48, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    want = fp8lt.linear(x, w)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = fp8lt.linear(x, w)
        assert not y.requires_grad
        assert torch.equal(y, want)
    with torch.inference_mode():
        made_inside = x.clone()
    assert torch.equal(fp8lt.linear(made_inside, w.detach()), want)


def test_a_graph_is_used_again_only_where_it_is_retained(on: torch.device) -> None:
    for tokens in (4, 40):  # dx before dw, and after it
        x = randn(tokens, 8, on=on, dtype=torch.float32).requires_grad_()
        w = randn(5, 8, on=on, dtype=torch.float32).requires_grad_()
        y, dy = fp8lt.linear(x, w), randn(tokens, 5, on=on, dtype=torch.float32)
        want = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        got = [torch.autograd.grad(y, t, dy, retain_graph=True)[0] for t in (x, w)]
        assert all(map(torch.equal, got, want))
        assert all(map(torch.equal, torch.autograd.grad(y, (x, w), dy), want))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, (x, w), dy)


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k", "n"), [(8192, 1024, 256), (256, 1024, 8192)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_backward_lets_operands_go_and_runs_the_gemms_in_the_leaner_order(
    m: int, k: int, n: int, recompute: bool, name: str
) -> None:
    on = torch.device("cuda")
    x = randn(m, k, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(n, k, on=on, dtype=torch.bfloat16).requires_grad_()
    dy = randn(m, n, on=on, dtype=torch.bfloat16)
    recipe = dataclasses.replace(resolve(name), recompute_weight=recompute)
    gc.collect()  # not in between: what others have left would be counted
    other = torch.zeros(1, device=on).requires_grad_()
    for _ in range(2):  # the first allocates scratch memory, too
        y = fp8lt.linear(x, w, recipe=recipe) * 1  # its dy is nobody else's
        # Autograd's thread may hold the gradients that it gave last, until it takes more work.
        torch.autograd.grad(other * 1, other)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gradients = torch.autograd.grad(y, (x, w), dy)
        peak = torch.cuda.max_memory_allocated() - before
        del gradients
    fp8_dy, x_t, w_t, dx, dw = m * n, m * k, n * k, 2 * m * k, 2 * n * k
    late = w_t if recompute else 0  # made in backward; x_t and the other w_t were there before
    quantise = dy.nbytes + 2 * fp8_dy
    dx_first = max(quantise, late + dx + 2 * fp8_dy, late - w_t + dx + dw + fp8_dy)
    dw_first = max(quantise, dw + 2 * fp8_dy, late + dw + dx + fp8_dy - x_t)
    assert abs(peak - min(dx_first, dw_first)) < 2**18  # scales; a copy of dy has 2**21 bytes


def test_a_second_derivative_raises(on: torch.device) -> None:
    """BUG-52."""
    x = randn(4, 8, on=on, dtype=torch.float32).requires_grad_()
    w = randn(5, 8, on=on, dtype=torch.float32).requires_grad_()
    for loss in (lambda y: y.pow(2).sum(), lambda y: y.sum()):  # dy a function of x, or constant
        (dx,) = torch.autograd.grad(loss(fp8lt.linear(x, w)), x, create_graph=True)
        assert torch.equal(dx, torch.autograd.grad(loss(fp8lt.linear(x, w)), x)[0])
        with pytest.raises(RuntimeError, match=r"fp8lt\.linear cannot be differentiated twice"):
            (dx.pow(2).sum() + x.sum()).backward()


def test_a_forward_mode_derivative_raises(on: torch.device) -> None:
    x, w = randn(4, 8, on=on, dtype=torch.float32), randn(5, 8, on=on, dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"fp8lt\.linear has no forward-mode derivative"):
        torch.func.jvp(lambda t: fp8lt.linear(t, w), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(fp8lt.linear(x, w), fp8lt.linear(x.clone(), w))  # no tangent: fine


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_bit(on: torch.device, use_reentrant: bool) -> None:
    x = randn(20, 40, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(30, 40, on=on, dtype=torch.bfloat16).requires_grad_()
    dy = randn(20, 30, on=on, dtype=torch.bfloat16)
    v = randn(40, 30, on=on, dtype=torch.bfloat16, seed=1).requires_grad_()

    def block(x: Tensor) -> Tensor:  # with operations that save tensors of their own
        hidden = fp8lt.linear(torch.nn.functional.silu(x), w).relu()
        return fp8lt.linear(torch.nn.functional.silu(fp8lt.linear(hidden, v) * x), w)

    y = block(x)
    want = (y, *torch.autograd.grad(y, (x, w, v), dy))
    y = checkpoint(block, x, use_reentrant=use_reentrant)
    y.backward(dy)
    assert all(map(torch.equal, (y, x.grad, w.grad, v.grad), want))


def test_autocast_casts_the_input_and_keeps_float32_weights(on: torch.device) -> None:
    x = randn(20, 40, on=on, dtype=torch.float32).requires_grad_()
    w = randn(30, 40, on=on, dtype=torch.float32).requires_grad_()
    b = randn(30, on=on, dtype=torch.float32).requires_grad_()
    with torch.autocast(on.type, dtype=torch.bfloat16):
        y = fp8lt.linear(x, w, b)
        assert y.dtype == F.linear(x, w, b).dtype == torch.bfloat16
        assert fp8lt.linear(x, w, b, out_dtype=torch.float32).dtype == torch.float32
    xq, wq = dequantised(x.detach().bfloat16(), E4M3), dequantised(w.detach(), E4M3)
    assert error(y, xq @ wq.t() + b.double()) <= T_SAME
    y.float().sum().backward()
    assert {t.grad.dtype for t in (x, w, b)} == {torch.float32}


def test_emulation_inside_autocast_multiplies_in_float32() -> None:
    x, w = randn(20, 400, on=CPU, dtype=torch.float32), randn(30, 400, on=CPU, dtype=torch.float32)
    x16 = x.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fp8lt.linear(x, w, out_dtype=torch.float32)
    want = dequantised(x16, E4M3) @ dequantised(w, E4M3).t()
    assert error(y, want) < 1e-6  # measured 5e-8; rounding to bf16 alone gives 1.3e-3


def test_the_emulate_argument_agrees_with_the_native_path(on: torch.device) -> None:
    x, w, dy = (
        randn(*s, on=on, dtype=torch.bfloat16, seed=i)
        for i, s in enumerate([(33, 70), (50, 70), (33, 50)])
    )
    emulated = fp8lt.DynamicScaling(emulate=True)
    pairs = zip(run(x, w, None, dy), run(x, w, None, dy, recipe=emulated), strict=True)
    for got, want in pairs:
        assert error(got, want) <= T_SAME  # both results are rounded to bf16: see there


@pytest.mark.parametrize("shape", [(40, 48, 64), (1024, 768, 512)], ids=str)
def test_eight_threads_may_call_at_once(on: torch.device, shape: tuple[int, int, int]) -> None:
    m, n, k = shape if on.type == "cuda" else (40, 48, 64)
    w = randn(n, k, on=on, dtype=torch.bfloat16).requires_grad_()
    bias = torch.zeros(n, device=on, dtype=torch.bfloat16).requires_grad_()

    def step(scale: int) -> list[Tensor]:  # threads must not see each other's amax, or sums
        x = randn(m, k, on=on, dtype=torch.bfloat16, seed=scale) * 2.0**scale
        y = fp8lt.linear(x, w, bias)
        return [y, *torch.autograd.grad(y, (w, bias), y.detach())]

    want = [step(scale) for scale in range(8)]
    start, results = threading.Barrier(8), []

    def work(scale: int) -> None:
        start.wait()
        results.append(all(all(map(torch.equal, step(scale), want[scale])) for _ in range(10)))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [True] * 8


@pytest.mark.parametrize("recompute_weight", [False, True])
def test_aot_autograd_traces_it_in_one_graph(on: torch.device, recompute_weight: bool) -> None:
    recipe = fp8lt.DynamicScaling(recompute_weight=recompute_weight)
    compiled = torch.compile(
        lambda x, w: fp8lt.linear(x, w, recipe=recipe), backend="aot_eager", fullgraph=True
    )
    x = randn(20, 40, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(30, 40, on=on, dtype=torch.bfloat16).requires_grad_()
    got, want = compiled(x, w), fp8lt.linear(x, w)
    assert torch.equal(got, want)
    dy = torch.ones_like(want)
    gradients = (torch.autograd.grad(y, (x, w), dy) for y in (got, want))
    assert all(map(torch.equal, *gradients))


def test_export_keeps_a_dynamic_batch() -> None:
    layer = fp8lt.Linear(16, 8)
    batch = torch.export.Dim("batch", min=2)
    shapes = {"input": {0: batch}}
    program = torch.export.export(layer, (torch.randn(4, 16),), dynamic_shapes=shapes)
    x = torch.randn(33, 16)
    assert torch.equal(program.module()(x), layer(x))


def test_a_weight_that_is_quantised_again_in_backward_changes_no_bit(on: torch.device) -> None:
    x = randn(33, 70, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(50, 70, on=on, dtype=torch.bfloat16).requires_grad_()
    dy = randn(33, 50, on=on, dtype=torch.bfloat16)
    y = fp8lt.linear(x, w)
    want = (y, *torch.autograd.grad(y, (x, w), dy))
    lean = fp8lt.DynamicScaling(recompute_weight=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fp8lt.linear(x, w, recipe=lean)
    assert all(map(torch.equal, (y, *torch.autograd.grad(y, (x, w), dy)), want))
    assert [t.shape for t in saved if t.dtype == E4M3] == [(80, 48)]  # x_t, padded; no w_t
    assert any(t.data_ptr() == w.data_ptr() for t in saved)
    wq = fp8lt.quantize_weight(w)
    y = fp8lt.linear(x, w, recipe=lean, w_quantized=wq)
    assert all(map(torch.equal, (y, *torch.autograd.grad(y, (x, w), dy)), want))
    y = fp8lt.linear(x, w, recipe=lean)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


# -------------------------------------------------------------------------------------- GPU only


def attention(on: torch.device) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return an activation, three weights for it, and a gradient."""
    x = randn(96, 256, on=on, dtype=torch.bfloat16).requires_grad_()
    weights = [
        randn(128, 256, on=on, dtype=torch.bfloat16, seed=seed).requires_grad_()
        for seed in (1, 2, 3)
    ]
    return x, weights, randn(96, 128, on=on, dtype=torch.bfloat16, seed=4)


@pytest.mark.gpu
def test_layers_that_share_an_activation_share_its_copies() -> None:
    x, weights, dy = attention(torch.device("cuda"))
    want = [torch.autograd.grad(fp8lt.linear(x, w), (x, w), dy) for w in weights]
    before = torch.cuda.memory_allocated()

    def shared() -> None:
        h, x_t = x * 1, set()

        def pack(t: Tensor) -> Tensor:
            x_t.update([t.data_ptr()] if t.dtype == E4M3 and t.shape == (256, 96) else [])
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            ys = [fp8lt.linear(h, w) for w in weights]
        assert len(x_t) == 1
        got = [torch.autograd.grad(y, (h, w), dy) for y, w in zip(ys, weights, strict=True)]
        assert all(all(map(torch.equal, *pair)) for pair in zip(got, want, strict=True))

    shared()
    assert torch.cuda.memory_allocated() == before  # nothing is kept


@pytest.mark.gpu
def test_a_view_whose_base_has_changed_is_an_activation_too() -> None:
    a = randn(16, 32, on=torch.device("cuda"), dtype=torch.float32).requires_grad_()
    w = randn(8, 64, on=torch.device("cuda"), dtype=torch.float32).requires_grad_()
    c = torch.complex(a * 1, a * 2)
    x = torch.view_as_real(c).flatten(1)
    c.mul_(2)  # autograd makes the operation behind x anew
    y = fp8lt.linear(x, w)
    assert torch.equal(y, fp8lt.linear(x.detach().clone(), w))
    y.sum().backward()
    assert a.grad is not None


@pytest.mark.gpu
def test_an_activation_that_has_changed_is_quantised_anew() -> None:
    x, (w, *_), _ = attention(torch.device("cuda"))
    h = x * 1
    fp8lt.linear(h, w)
    h.mul_(3)
    assert torch.equal(fp8lt.linear(h, w), fp8lt.linear((x * 3).detach(), w))
    h = x * 1
    fp8lt.linear(h, w)
    assert torch.equal(fp8lt.linear(h.view(2, 48, 256), w).view(96, 128), fp8lt.linear(h, w))
    leaf = x.detach().clone().requires_grad_()  # such as a buffer that inputs are copied into
    fp8lt.linear(leaf, w)
    leaf.data.mul_(3)  # autograd does not count this
    assert torch.equal(fp8lt.linear(leaf, w), fp8lt.linear(leaf.clone(), w))


@pytest.mark.gpu
def test_an_activation_is_not_shared_between_streams() -> None:
    x, (w, *_), _ = attention(torch.device("cuda"))
    h = x * 1
    want = fp8lt.linear(h.detach(), w)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8lt.linear(h, w)
        with torch.cuda.stream(stream):
            y = fp8lt.linear(h, w)
    torch.cuda.synchronize()
    assert torch.equal(y, want)
    assert len({t.data_ptr() for t in saved if t.dtype == E4M3 and t.shape == (256, 96)}) == 2


@pytest.mark.gpu
def test_a_whole_step_with_a_shared_activation_can_be_captured() -> None:
    x, (w, v, _), dy = attention(torch.device("cuda"))

    def step() -> tuple[Tensor, ...]:
        h = x * 1
        return torch.autograd.grad(fp8lt.linear(h, w) + fp8lt.linear(h, v), (x, w, v), dy)

    stream = torch.cuda.Stream()  # autograd's nodes of leaves remember the stream of their making
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        with torch.no_grad():
            x.mul_(2)
        graph.replay()
        want = step()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, want))


@pytest.mark.gpu
def test_compile_with_cuda_graphs_equals_eager() -> None:
    layer = fp8lt.Linear(64, 48, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(5):  # warm-up, recording, replays
            x = randn(32, 64, on=torch.device("cuda"), dtype=torch.bfloat16, seed=seed)
            assert error(compiled(x), layer(x)) < T_SAME


@pytest.mark.gpu
def test_it_runs_on_the_current_stream() -> None:
    """BUG-83."""
    x = randn(2048, 1024, on=torch.device("cuda"), dtype=torch.bfloat16)
    w = randn(1024, 1024, on=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    want = [fp8lt.linear(x * i, w) for i in range(1, 9)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got = []
    for i in range(1, 9):
        with torch.cuda.stream(streams[i % 2]):
            torch.cuda._sleep(2_000_000)  # a slow producer on this very stream
            got.append(fp8lt.linear(x * i, w))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


@pytest.mark.gpu
def test_backward_runs_on_the_stream_of_its_forward() -> None:
    x = randn(1024, 512, on=torch.device("cuda"), dtype=torch.bfloat16).requires_grad_()
    w = randn(256, 512, on=torch.device("cuda"), dtype=torch.bfloat16, seed=1).requires_grad_()
    fp8lt.linear(x, w).sum().backward()
    want, x.grad, w.grad = (x.grad, w.grad), None, None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        fp8lt.linear(x, w).sum().backward()
    torch.cuda.synchronize()
    assert torch.equal(x.grad, want[0])
    assert torch.equal(w.grad, want[1])


@pytest.mark.gpu
def test_it_can_be_captured_in_a_cuda_graph() -> None:
    """BUG-75."""
    x = randn(100, 512, on=torch.device("cuda"), dtype=torch.bfloat16)
    w = randn(256, 512, on=torch.device("cuda"), dtype=torch.bfloat16, seed=1)
    fp8lt.linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8lt.linear(x, w)
    for factor in (1.0, 100.0):
        x.mul_(factor)
        graph.replay()
        assert torch.equal(y, fp8lt.linear(x, w))
