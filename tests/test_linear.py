"""`fp8lt.linear`: values and gradients against float64, strides and pointers, bad input."""

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
    dequantised,
    error,
    layouts,
    randn,
    run,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fp8lt
from fp8lt import device, ops

E4M3, E5M2 = device.OCP
CPU = torch.device("cpu")


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
    """BUG-01."""
    check_same_operands(shape, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_forward_and_backward_equal_float64_on_the_same_operands(
    shape: tuple[int, int, int],
) -> None:
    check_same_operands(shape, torch.device("cuda"))


@pytest.mark.parametrize("m", [1, 2, 7, 15, 16, 17, 24, 31, 33, 257])
def test_gaussian_errors_are_those_of_fp8_alone(on: torch.device, m: int) -> None:
    """BUG-01, BUG-02."""
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
    """BUG-35."""
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
    assert error(dw, want) < 5e-4  # measured 4e-8 on a CPU; rounded to bf16 1.7e-3


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
    """BUG-20."""
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
    """BUG-16."""
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
    """BUG-33."""
    with pytest.raises(
        ValueError, match=r"recipe: want one of tensorwise, delayed, rowwise, .*; got 'rowwize'"
    ):
        fp8lt.linear(X, W, recipe="rowwize")
    with pytest.raises(TypeError, match="recipe: want a name or a recipe object, got int"):
        fp8lt.linear(X, W, recipe=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="want out_dtype bfloat16, float16 or float32, got"):
        fp8lt.linear(X, W, out_dtype=torch.int8)


def test_a_gpu_without_fp8_refuses_with_its_name_or_emulates_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a100 = device.capability_support("NVIDIA A100", (8, 0))
    monkeypatch.setattr(device, "support", lambda where, recipe: a100)
    monkeypatch.delenv("FP8LT_EMULATE", raising=False)
    cuda = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"cuda:0: NVIDIA A100 has compute capability 8\.0"):
        ops.backend(cuda)
    assert ops.backend(cuda, emulated=True) == ops.EMULATED
    monkeypatch.setenv("FP8LT_EMULATE", "1")
    assert ops.backend(cuda) == ops.EMULATED
