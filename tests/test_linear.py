"""`fp8lt.linear`: values and gradients against float64, the autograd contract, bad input."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import (
    DTYPES,
    SHAPES,
    SMALL_SHAPES,
    T_BACKWARD,
    T_FORWARD,
    T_SAME,
    CountOps,
    dequantised,
    error,
    layouts,
    randn,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fp8lt
from fp8lt import device, ops

E4M3, E5M2 = device.OCP
CPU = torch.device("cpu")


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, **options: object
) -> tuple[Tensor, ...]:
    """Return y, dx, dw and, with a bias, db."""
    leaves = [t.detach().requires_grad_() for t in (x, w, bias) if t is not None]
    y = fp8lt.linear(*leaves, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def check_same_operands(
    shape: tuple[int, int, int], on: torch.device, bound: float = T_SAME
) -> None:
    """Compare y, dx, dw and db with float64 on the operands as they are quantised."""
    m, n, k = shape
    # One dot product of random signs may cancel to nearly nothing, where no relative error is
    # small (FP8 units sum with 13 bits): results of a few elements are judged over several draws.
    draws = 16 if 0 < min(m * n, m * k, n * k) < 16 else 1
    results: list[list[Tensor]] = [[] for _ in range(8)]
    for draw in range(draws):
        x = randn(m, k, on=on, dtype=torch.bfloat16, seed=4 * draw + 1)
        w = randn(n, k, on=on, dtype=torch.bfloat16, seed=4 * draw + 2)
        b = randn(n, on=on, dtype=torch.bfloat16, seed=4 * draw + 3)
        dy = randn(m, n, on=on, dtype=torch.bfloat16, seed=4 * draw + 4)
        xq, wq, dyq = dequantised(x, E4M3), dequantised(w, E4M3), dequantised(dy, E5M2)
        got = run(x, w, b, dy)
        want = (xq @ wq.t() + b.double(), dyq @ wq, dyq.t() @ xq, dy.double().sum(0))
        for result, tensor in zip(results, (*got, *want), strict=True):
            result.append(tensor)
    for name, got_list, want_list in zip(
        ["y", "dx", "dw", "db"], results[:4], results[4:], strict=True
    ):
        assert error(torch.stack(got_list), torch.stack(want_list)) <= bound, name


# ----------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_forward_and_backward_equal_float64_on_the_same_operands(
    shape: tuple[int, int, int],
) -> None:
    check_same_operands(shape, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_forward_and_backward_equal_float64_on_the_same_operands(
    shape: tuple[int, int, int],
) -> None:
    check_same_operands(shape, torch.device("cuda"))


@pytest.mark.parametrize("m", [1, 2, 7, 15, 16, 17, 24, 31, 33, 257])
def test_gaussian_errors_are_those_of_fp8_alone(on: torch.device, m: int) -> None:
    x = randn(m, 1024, on=on, dtype=torch.bfloat16)
    w = randn(512, 1024, on=on, dtype=torch.bfloat16, seed=1)
    dy = randn(m, 512, on=on, dtype=torch.bfloat16, seed=2)
    y, dx, dw = run(x, w, None, dy)
    assert error(y, x.double() @ w.double().t()) <= T_FORWARD
    assert error(dx, dy.double() @ w.double()) <= T_BACKWARD
    assert error(dw, dy.double().t() @ x.double()) <= T_BACKWARD


@pytest.mark.parametrize("w_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("out_dtype", [None, *DTYPES])
def test_dtypes_of_results_follow_their_tensors(
    on: torch.device,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> None:
    x = randn(19, 50, on=on, dtype=x_dtype)
    w = randn(30, 50, on=on, dtype=w_dtype, seed=1)
    bias = None if bias_dtype is None else randn(30, on=on, dtype=bias_dtype, seed=2)
    dy = randn(19, 30, on=on, dtype=out_dtype or x_dtype, seed=3)
    y, dx, dw, *db = run(x, w, bias, dy, out_dtype=out_dtype)
    assert y.dtype == (out_dtype or x_dtype)
    assert (dx.dtype, dw.dtype, [d.dtype for d in db]) == (
        x_dtype, w_dtype, [] if bias is None else [bias_dtype],
    )  # fmt: skip
    xq, wq, dyq = dequantised(x, E4M3), dequantised(w, E4M3), dequantised(dy, E5M2)
    want = xq @ wq.t() + (0 if bias is None else bias.double())
    assert error(y, want) <= T_SAME
    assert error(dx, dyq @ wq) <= T_SAME
    assert error(dw, dyq.t() @ xq) <= T_SAME


def test_gradients_of_float32_weights_are_not_rounded_to_bf16(on: torch.device) -> None:
    x, dy = randn(64, 96, on=on, dtype=torch.bfloat16), randn(64, 80, on=on, dtype=torch.bfloat16)
    w = randn(80, 96, on=on, dtype=torch.float32, seed=1)
    dw = run(x, w, None, dy)[2]
    want = dequantised(dy, E5M2).t() @ dequantised(x, E4M3)
    assert dw.dtype == torch.float32
    assert error(dw, want) < 5e-4  # measured 1e-7 on a CPU, 1e-4 on an H200; bf16 gives 1.7e-3


@pytest.mark.parametrize("shape", [(64,), (1, 64), (1, 1, 64), (2, 3, 4, 64), (0, 64), (2, 0, 64)])
def test_shapes_are_those_of_f_linear(on: torch.device, shape: tuple[int, ...]) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(32, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    b = randn(32, on=on, dtype=torch.bfloat16).requires_grad_()
    y = fp8lt.linear(x, w, b)
    assert y.shape == F.linear(x, w, b).shape
    assert error(y, F.linear(x.double(), w.double(), b.double())) <= T_FORWARD
    y.sum().backward()
    assert (x.grad.shape, w.grad.shape, b.grad.shape) == (x.shape, w.shape, b.shape)


def test_the_result_may_be_changed_in_place(on: torch.device) -> None:
    x = randn(2, 10, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    w = randn(32, 64, on=on, dtype=torch.bfloat16).requires_grad_()
    want = torch.autograd.grad(F.relu(fp8lt.linear(x, w) + 1).sum(), (x, w))
    y = fp8lt.linear(x, w)
    y += 1
    got = torch.autograd.grad(F.relu(y, inplace=True).sum(), (x, w))
    assert all(map(torch.equal, got, want))


def test_nothing_in_is_nothing_or_zero_out(on: torch.device) -> None:
    x = torch.zeros(0, 64, device=on, requires_grad=True)
    w = randn(32, 64, on=on, dtype=torch.float32).requires_grad_()
    b = torch.ones(32, device=on, requires_grad=True)
    fp8lt.linear(x, w, b).sum().backward()
    assert not w.grad.any()
    assert not b.grad.any()
    no_k = fp8lt.linear(torch.zeros(3, 0, device=on), torch.zeros(4, 0, device=on), b[:4])
    assert torch.equal(no_k, torch.ones(3, 4, device=on))
    no_n = fp8lt.linear(
        torch.ones(3, 5, device=on, requires_grad=True), torch.ones(0, 5, device=on)
    )
    assert no_n.shape == (3, 0)
    no_n.sum().backward()


def test_zeros_stay_exact_zeros(on: torch.device) -> None:
    zero = torch.zeros(20, 40, device=on, dtype=torch.bfloat16)
    w = randn(30, 40, on=on, dtype=torch.bfloat16)
    for t in run(zero, w, None, torch.zeros(20, 30, device=on, dtype=torch.bfloat16)):
        assert not t.any()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e4, 1e30])
def test_magnitude_does_not_matter(on: torch.device, magnitude: float) -> None:
    x = randn(64, 320, on=on, dtype=torch.bfloat16) * magnitude
    w = randn(32, 320, on=on, dtype=torch.bfloat16, seed=1)
    if magnitude < 1e-12:  # below the amax floor of every tensorwise library: flushed, but finite
        assert fp8lt.linear(x, w).isfinite().all()
    else:
        assert error(fp8lt.linear(x, w), x.double() @ w.double().t()) <= T_FORWARD


def test_a_huge_and_a_tiny_operand_do_not_overflow_on_the_way(on: torch.device) -> None:
    huge = randn(64, 320, on=on, dtype=torch.bfloat16) * 3e37
    tiny = randn(32, 320, on=on, dtype=torch.bfloat16, seed=1) * 1e-9
    want = huge.double() @ tiny.double().t()
    assert error(fp8lt.linear(huge, tiny), want) <= T_FORWARD
    assert error(fp8lt.linear(tiny, huge), want.t()) <= T_FORWARD


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_non_finite_stays_visible(on: torch.device, where: str, bad: float) -> None:
    t = {
        "x": randn(20, 40, on=on, dtype=torch.bfloat16),
        "w": randn(30, 40, on=on, dtype=torch.bfloat16, seed=1),
        "dy": randn(20, 30, on=on, dtype=torch.bfloat16, seed=2),
    }
    t[where][3, 5] = bad
    y, dx, dw = run(t["x"], t["w"], None, t["dy"])
    x, w = t["x"].clone().requires_grad_(), t["w"].clone().requires_grad_()
    want_y = F.linear(x, w)
    want = (want_y, *torch.autograd.grad(want_y, (x, w), t["dy"]))
    for got, reference in zip((y, dx, dw), want, strict=True):
        assert not got[~reference.isfinite()].isfinite().any()


# ------------------------------------------------------------------------------ strides, pointers


def test_layout_of_the_operands_changes_nothing(on: torch.device) -> None:
    x, w, dy = (
        randn(*shape, on=on, dtype=torch.bfloat16, seed=seed)
        for seed, shape in enumerate([(33, 70), (50, 70), (33, 50)])
    )
    b = randn(50, on=on, dtype=torch.bfloat16)
    want = run(x, w, b, dy)
    for operands in zip(*(layouts(t) for t in (x, w, dy)), strict=True):
        (layout, x_view), (_, w_view), (_, dy_view) = operands
        shifted_b = torch.cat([b[:1], b])[1:]
        got = run(x_view, w_view, shifted_b, dy_view)
        assert all(map(torch.equal, got, want)), layout


def test_an_expanded_gradient_equals_a_contiguous_one(on: torch.device) -> None:
    x, w = randn(17, 40, on=on, dtype=torch.bfloat16), randn(24, 40, on=on, dtype=torch.bfloat16)
    one = torch.ones((), device=on, dtype=torch.bfloat16)
    row = randn(1, 24, on=on, dtype=torch.bfloat16, seed=5)
    for dy in (one.expand(17, 24), row.expand(17, 24), row[:, :1].expand(17, 24)):
        got, want = run(x, w, None, dy), run(x, w, None, dy.contiguous())
        assert all(map(torch.equal, got, want))


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_shape_and_stride_is_right(on: torch.device, data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(0, 70), label=name) for name in "MNK")
    dtype = data.draw(st.sampled_from(DTYPES))

    def strided(rows: int, cols: int, seed: int) -> Tensor:
        row_step, col_step, offset = (data.draw(st.integers(0, 3)) for _ in range(3))
        if data.draw(st.booleans(), label="column-major"):
            rows, cols = cols, rows
            return strided_from(rows, cols, row_step, col_step, offset, seed).t()
        return strided_from(rows, cols, row_step, col_step, offset, seed)

    def strided_from(
        rows: int, cols: int, row_step: int, col_step: int, offset: int, seed: int
    ) -> Tensor:
        pitch = (cols * col_step + 1) * row_step  # steps of 0 expand
        buffer = randn(rows * pitch + cols * col_step + offset + 1, on=on, dtype=dtype, seed=seed)
        return buffer.as_strided((rows, cols), (pitch, col_step), offset)

    x, w, dy = strided(m, k, 0), strided(n, k, 1), strided(m, n, 2)
    y, dx, dw = run(x, w, None, dy)
    xq, wq, dyq = dequantised(x, E4M3), dequantised(w, E4M3), dequantised(dy, E5M2)
    # Cancelling sums make a relative norm meaningless: bound by the norms of the factors.
    for got, a, b in ((y, xq, wq.t()), (dx, dyq, wq), (dw, dyq.t(), xq)):
        assert got.shape == (a @ b).shape
        assert (got.double() - a @ b).norm() <= T_SAME * a.norm() * b.norm()


# ------------------------------------------------------------------------------ autograd contract


@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("need_w", [True, False])
@pytest.mark.parametrize("need_b", [True, False, None])
def test_only_wanted_gradients_cost_anything(
    on: torch.device, need_x: bool, need_w: bool, need_b: bool | None
) -> None:
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
    assert count.counts == {"gemm_nt": need_x + need_w, "quantize_tensorwise": need_x or need_w}
    assert [t.grad is not None for t in (x, w)] == [need_x, need_w]
    assert b is None or (b.grad is not None) == need_b


def test_without_grad_nothing_is_transposed(on: torch.device) -> None:
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


def test_a_second_derivative_raises(on: torch.device) -> None:
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
    y = fp8lt.linear(x, w)
    want = (y, *torch.autograd.grad(y, (x, w), dy))
    y = checkpoint(fp8lt.linear, x, w, use_reentrant=use_reentrant)
    y.backward(dy)
    assert all(map(torch.equal, (y, x.grad, w.grad), want))


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
    assert error(y, want) < 1e-6  # measured 1.3e-7; bf16 products would give 2e-3


def test_the_emulate_argument_agrees_with_the_native_path(on: torch.device) -> None:
    x, w, dy = (
        randn(*s, on=on, dtype=torch.bfloat16, seed=i)
        for i, s in enumerate([(33, 70), (50, 70), (33, 50)])
    )
    emulated = fp8lt.DynamicScaling(emulate=True)
    pairs = zip(run(x, w, None, dy), run(x, w, None, dy, recipe=emulated), strict=True)
    for got, want in pairs:
        assert error(got, want) <= T_SAME  # measured 8e-4: one rounding of bf16 now and then


def test_eight_threads_may_call_at_once(on: torch.device) -> None:
    x, w = randn(40, 64, on=on, dtype=torch.bfloat16), randn(48, 64, on=on, dtype=torch.bfloat16)
    want = fp8lt.linear(x, w)
    start, results = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        results.append(all(torch.equal(fp8lt.linear(x, w), want) for _ in range(10)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [True] * 8


def test_aot_autograd_traces_it_in_one_graph(on: torch.device) -> None:
    compiled = torch.compile(fp8lt.linear, backend="aot_eager", fullgraph=True)
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


# -------------------------------------------------------------------------------------- GPU only


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


# -------------------------------------------------------------------------------------- bad input

X, W, B = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)


@pytest.mark.parametrize(
    ("args", "kind", "message"),
    [
        ((X, torch.ones(4, 5)), RuntimeError, r"x \[2, 3\] and w \[4, 5\]"),
        ((X, torch.ones(4, 3, 1)), RuntimeError, r"w \[N, K\].*\[4, 3, 1\]"),
        ((torch.ones(()), W), RuntimeError, r"x \[\.\.\., K\].* got x \[\]"),
        ((X, W, torch.ones(5)), RuntimeError, r"want bias \[4\].* got \[5\]"),
        ((X, W, torch.ones(1, 4)), RuntimeError, r"want bias \[4\].* got \[1, 4\]"),
        ((X.int(), W), RuntimeError, "want x of bfloat16, float16 or float32, got torch.int32"),
        ((X, W.double()), RuntimeError, "want w of .* got torch.float64"),
        ((X, W, B.long()), RuntimeError, "want bias of .* got torch.int64"),
        ((X.to(E4M3), W), RuntimeError, "want x of .* got torch.float8_e4m3fn"),
        ((X, W.to("meta")), RuntimeError, "x on cpu and w on meta"),
        ((X, W, B.to("meta")), RuntimeError, "x on cpu and bias on meta"),
        (([1.0], W), TypeError, "want x to be a tensor, got list"),
        ((X, None), TypeError, "want w to be a tensor, got NoneType"),
        ((X, W, 1.0), TypeError, "want bias to be a tensor, got float"),
    ],
)
def test_bad_arguments_name_themselves(args: tuple, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        fp8lt.linear(*args)


@pytest.mark.parametrize(
    "args",
    [
        (X, torch.ones(4, 5)),
        (X, torch.ones(4, 3, 1)),
        (X.int(), W),
        (torch.ones(()), W),
        (X, W, torch.ones(5)),
        ([1.0], W),
    ],
)
def test_error_classes_are_those_of_f_linear(args: tuple) -> None:
    with pytest.raises(Exception) as reference:  # noqa: PT011
        F.linear(*args)
    with pytest.raises(reference.type):
        fp8lt.linear(*args)


def test_bad_options_name_themselves() -> None:
    with pytest.raises(ValueError, match="recipe: want one of tensorwise; got 'rowwize'"):
        fp8lt.linear(X, W, recipe="rowwize")
    with pytest.raises(TypeError, match="recipe: want a name or a recipe object, got int"):
        fp8lt.linear(X, W, recipe=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="want out_dtype bfloat16, float16 or float32, got"):
        fp8lt.linear(X, W, out_dtype=torch.int8)


def test_a_gpu_without_fp8_refuses_with_its_name_or_emulates_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a100 = device.capability_support("NVIDIA A100", (8, 0))
    monkeypatch.setattr(device, "support", lambda where: a100)
    monkeypatch.delenv("FP8LT_EMULATE", raising=False)
    cuda = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"cuda:0: NVIDIA A100 has compute capability 8\.0"):
        ops.backend(cuda)
    assert ops.backend(cuda, emulated=True)
    monkeypatch.setenv("FP8LT_EMULATE", "1")
    assert ops.backend(cuda)
