"""A scale per row: bytes against torchao, powers of two, folding, products against float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from cases import DTYPES, T_SAME, assert_same, awkward, error, layouts, randn, raw, to_gpu, undone
from torch import Tensor

import fp8lt
from fp8lt import device, emulate, ops
from fp8lt.emulate import Scaling

E4M3, E5M2 = device.OCP
FP8 = (E4M3, E5M2)
CPU = torch.device("cpu")
Options = Callable[[str], dict[str, object]]  # of a device
ROWWISE = (Scaling.ROWWISE, Scaling.ROWWISE)
SIZES = (1, 17, 127, 129, 300)
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (300, 1), (17, 33), (128, 128), (129, 250),
          (300, 1027)]  # fmt: skip


def scales_by_hand(amax: Tensor, fp8: torch.dtype, power_of_two: bool) -> Tensor:
    """Return scales from Python floats, whose division and frexp are exact."""
    scales = [torch.finfo(fp8).max / max(a, 1e-12) for a in amax.tolist()]
    rounded = torch.tensor(scales, dtype=torch.float32)
    if not power_of_two:
        return rounded
    return torch.tensor([2.0 ** (math.frexp(s)[1] - 1) for s in rounded.tolist()])


def rows_by_hand(v: Tensor, fp8: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes and scale_inv of f32 `v`, quantised with a scale per row."""
    scale = scales_by_hand(v.abs().amax(1), fp8, power_of_two)
    fp8_max = torch.finfo(fp8).max
    return raw((v * scale[:, None]).clamp(-fp8_max, fp8_max).to(fp8)), 1 / scale


# --------------------------------------------------------------------------------- powers of two


@pytest.mark.parametrize("fp8", FP8)
def test_a_scale_is_rounded_down_to_a_power_of_two_exactly(fp8: torch.dtype) -> None:
    powers = torch.tensor([2.0**e for e in range(-100, 40)])
    for scale in (powers, powers.nextafter(powers * 2), (powers * 2).nextafter(powers)):
        assert torch.equal(emulate._floor_to_power_of_two(scale), powers)
    special = torch.tensor([0.0, torch.inf, torch.nan])
    torch.testing.assert_close(
        emulate._floor_to_power_of_two(special), special, rtol=0, atol=0, equal_nan=True
    )
    amax = 10 ** (torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 60 - 30)
    assert torch.equal(emulate.scale_from_amax(amax, fp8, True), scales_by_hand(amax, fp8, True))


def test_torchao_rounds_a_scale_just_below_a_power_of_two_up() -> None:
    from torchao.float8.float8_utils import _round_scale_down_to_power_of_2

    scale = torch.tensor([2.0**20]).nextafter(torch.tensor([0.0]))
    assert _round_scale_down_to_power_of_2(scale).item() == 2.0**20  # not down: log2 rounds
    assert emulate._floor_to_power_of_two(scale).item() == 2.0**19
    away = torch.rand(20000, generator=torch.Generator().manual_seed(0)) + 1.001
    away = away[away < 1.999] * 2.0**7
    want = _round_scale_down_to_power_of_2(away)
    assert torch.equal(emulate._floor_to_power_of_two(away), want)


def test_tensorwise_and_blockwise_scales_are_rounded_too(on: torch.device) -> None:
    x = randn(40, 50, on=on, dtype=torch.float32)
    scale = scales_by_hand(x.abs().max()[None].cpu(), E4M3, True)
    q = ops.quantize_tensorwise(x, E4M3, power_of_two=True)
    assert torch.equal(q.scale_inv.cpu(), (1 / scale).expand(64))
    assert torch.equal(raw(q.data[:40, :50]), raw((x.cpu() * scale).to(E4M3)))
    square = ops.quantize_blockwise(x, E4M3, square=True, power_of_two=True)
    assert torch.equal(square.scale_inv[0, :1].cpu(), 1 / scale)
    assert torch.equal(raw(square.data), raw(q.data))


# --------------------------------------------------------------------------------------- quantise


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_scales_equal_torchao(dtype: torch.dtype, power_of_two: bool) -> None:
    from torchao.float8 import float8_scaling_utils, float8_training_tensor
    from torchao.float8.config import ScalingGranularity

    gemm = float8_training_tensor.ScaledMMConfig(False, False, False, False)
    config = float8_training_tensor.LinearMMConfig(gemm, gemm, gemm)
    for seed, fp8 in enumerate(FP8):
        x = (randn(96, 112, on=CPU, dtype=torch.float32, seed=seed) * 3).to(dtype)
        got = ops.quantize_rowwise(x, fp8, power_of_two=power_of_two)
        sides = ((-1, got.data, got.scale_inv), (0, got.data_t.t(), got.scale_inv_t))
        for dim, data, scale_inv in sides:  # as float8_linear.py casts for its three GEMMs
            want = float8_scaling_utils.hp_tensor_to_float8_dynamic(
                x, fp8, config, scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=dim, round_scales_to_power_of_2=power_of_two,
            )  # fmt: skip
            assert torch.equal(raw(data), raw(want._data))
            assert torch.equal(scale_inv, want._scale.reciprocal().flatten())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("fp8", FP8)
def test_rows_and_columns_have_scales_of_their_own(
    on: torch.device, fp8: torch.dtype, power_of_two: bool
) -> None:
    x = randn(17, 35, on=CPU, dtype=torch.float32) * 10 ** torch.linspace(-9, 9, 17)[:, None]
    x *= 10 ** torch.linspace(9, -9, 35)
    x[3], x[:, 4] = 0, 0
    q = ops.quantize_rowwise(x.to(on), fp8, power_of_two=power_of_two)
    empty = 1 / scales_by_hand(torch.zeros(1), fp8, power_of_two)
    for v, data, scale_inv in ((x, q.data, q.scale_inv), (x.t(), q.data_t, q.scale_inv_t)):
        want, want_inv = rows_by_hand(v, fp8, power_of_two)
        rows, cols = v.shape
        assert data.shape == (emulate.padded(rows), emulate.padded(cols))
        assert scale_inv.shape == data.shape[:1]
        assert torch.equal(raw(data)[:rows, :cols], want)
        assert torch.equal(scale_inv[:rows].cpu(), want_inv)
        assert not raw(data)[rows:].any()
        assert not raw(data)[:, cols:].any()
        assert (scale_inv[rows:].cpu() == empty).all()  # as if of rows of zeros


def test_folds_multiply_before_the_scale_is_taken(on: torch.device) -> None:
    x = randn(20, 40, on=CPU, dtype=torch.float32)
    fold_cols, fold_rows = randn(64, on=CPU, dtype=torch.float32).exp(), torch.rand(32) + 1
    for cols, rows in itertools.product((None, fold_cols), (None, fold_rows)):
        q = ops.quantize_rowwise(
            x.to(on), E4M3, fold_cols=None if cols is None else cols.to(on),
            fold_rows=None if rows is None else rows.to(on),
            sums_dtype=torch.float32,
        )  # fmt: skip
        v = x if cols is None else x * cols[:40]
        u = x if rows is None else x * rows[:20, None]
        assert torch.equal(raw(q.data)[:20, :40], rows_by_hand(v, E4M3, False)[0])
        assert torch.equal(q.scale_inv[:20].cpu(), rows_by_hand(v, E4M3, False)[1])
        assert torch.equal(raw(q.data_t)[:40, :20], rows_by_hand(u.t(), E4M3, False)[0])
        assert torch.equal(q.scale_inv_t[:40].cpu(), rows_by_hand(u.t(), E4M3, False)[1])
        assert error(q.sums.cpu(), x.double().sum(0)) < 1e-6  # of x itself


def test_folded_has_the_bytes_of_the_rows_in_both_copies(on: torch.device) -> None:
    x = randn(20, 40, on=on, dtype=torch.bfloat16)
    plain = ops.quantize_rowwise(x, E4M3, power_of_two=True)
    for row_major, transposed in itertools.product((True, False), repeat=2):
        q = ops.quantize_rowwise(
            x, E4M3, row_major=row_major, transposed=transposed, power_of_two=True, folded=True
        )
        assert torch.equal(q.scale_inv, plain.scale_inv)
        assert torch.equal(raw(q.data), raw(plain.data) if row_major else raw(q.data[:0, :0]))
        assert torch.equal(q.scale_inv_t, torch.ones(48 if transposed else 0, device=on))
        if transposed:
            assert torch.equal(raw(q.data_t), raw(plain.data).t())
        assert (q.scaling, q.scaling_t) == (Scaling.ROWWISE, None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_layouts_asked_for_are_made(on: torch.device, shape: tuple[int, int]) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    both = ops.quantize_rowwise(x, E4M3)
    rows = ops.quantize_rowwise(x, E4M3, transposed=False)
    columns = ops.quantize_rowwise(x, E4M3, row_major=False, sums_dtype=torch.bfloat16)
    assert torch.equal(raw(rows.data), raw(both.data))
    assert torch.equal(raw(columns.data_t), raw(both.data_t))
    assert torch.equal(rows.scale_inv, both.scale_inv)
    assert torch.equal(columns.scale_inv_t, both.scale_inv_t)
    assert rows.data_t.shape == columns.data.shape == (0, 0)
    assert rows.scale_inv_t.shape == columns.scale_inv.shape == rows.sums.shape == (0,)
    assert (columns.sums.shape, columns.sums.dtype) == (shape[1:], torch.bfloat16)


def test_layout_of_the_operand_changes_nothing(on: torch.device) -> None:
    x = randn(33, 48, on=on, dtype=torch.float32)
    for folded in (False, True):
        want = ops.quantize_rowwise(x, E4M3, folded=folded)
        for _, view in layouts(x):
            assert_same(ops.quantize_rowwise(view, E4M3, folded=folded), want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_element_spoils_its_row_and_column_alone(on: torch.device, bad: float) -> None:
    x = torch.ones(40, 50, device=on, dtype=torch.bfloat16)
    x[7, 9] = bad
    q = ops.quantize_rowwise(x, E4M3, power_of_two=True)
    assert (~q.scale_inv.isfinite()).nonzero().tolist() == [[7]]
    assert (~q.scale_inv_t.isfinite()).nonzero().tolist() == [[9]]


def test_an_emulated_call_on_any_device_equals_the_cpu_operator(on: torch.device) -> None:
    x = awkward(70, 90, torch.bfloat16)
    fold = {"fold_cols": torch.rand(96), "fold_rows": torch.rand(80)}
    got = ops.quantize_rowwise(
        x.to(on), E4M3, **{k: v.to(on) for k, v in fold.items()}, emulated=True
    )
    assert_same(got, ops.quantize_rowwise(x, E4M3, **fold))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [*SHAPES, (4099, 520), (520, 4099), (64, 20000), (66000, 24)], ids=str
)
def test_native_bytes_equal_emulated(
    shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype
) -> None:
    rows, cols = map(emulate.padded, shape)
    fold_cols = randn(cols, on=CPU, dtype=torch.float32, seed=1).exp()
    fold_rows = randn(rows, on=CPU, dtype=torch.float32, seed=2).exp()
    folds = [
        {},
        {"fold_cols": fold_cols},
        {"fold_rows": fold_rows},
        {"fold_cols": fold_cols, "fold_rows": fold_rows},
        {"folded": True},
    ]
    x = awkward(*shape, dtype)
    for (_, view), fold, power_of_two in itertools.product(layouts(x), folds, (False, True)):
        options = {**fold, "power_of_two": power_of_two}
        on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options.items()}
        got = ops.quantize_rowwise(to_gpu(view), fp8, **on_gpu)
        assert_same(got, ops.quantize_rowwise(x, fp8, **options))


# ------------------------------------------------------------------------------------------- gemm


def of_all_magnitudes(rows: int, k: int, on: torch.device, seed: int) -> Tensor:
    """Return Gaussian rows, each of a magnitude of its own from 1e-6 to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(rows, 1, generator=generator) * 12 - 6
    return (torch.randn(rows, k, generator=generator) * 10**exponents).to(on)


def check_gemm(shape: tuple[int, int, int], on: torch.device, fp8: torch.dtype = E4M3) -> None:
    """Compare with float64 on the same operands, element by element."""
    m, n, k = shape
    a = ops.quantize_rowwise(of_all_magnitudes(m, k, on, 0), fp8, transposed=False)
    b = ops.quantize_rowwise(of_all_magnitudes(n, k, on, 1), E4M3, transposed=False)
    got = ops.gemm_nt(a.data, b.data, a.scale_inv, b.scale_inv, m, n, scaling=ROWWISE)
    a_real = undone(a.data, a.scale_inv, a.scaling)[:m]
    b_real = undone(b.data, b.scale_inv, b.scaling)[:n]
    difference = (got.double() - a_real @ b_real.t()).abs()
    assert (difference <= T_SAME * (a_real.abs() @ b_real.abs().t())).all()  # cf. cancellation


@pytest.mark.parametrize("k", SIZES)
def test_gemm_equals_float64_on_the_same_operands(on: torch.device, k: int) -> None:
    """BUG-37."""
    for m, n in itertools.product(SIZES, SIZES):
        check_gemm((m, n, k), on)
    check_gemm((127, 129, k), on, E5M2)


@pytest.mark.gpu
def test_a_large_gemm_is_right() -> None:
    check_gemm((8192, 4096, 4096), torch.device("cuda"))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("fast_accum", [True, False])
def test_bias_output_dtypes_and_longer_scales_are_right(
    on: torch.device, out_dtype: torch.dtype, fast_accum: bool
) -> None:
    q = ops.quantize_rowwise(randn(33, 80, on=on, dtype=torch.float32), E4M3)
    one = ops.quantize_tensorwise(randn(50, 80, on=on, dtype=torch.float32), E4M3)  # [S] scales
    bias = randn(50, on=on, dtype=torch.bfloat16)
    got = ops.gemm_nt(
        q.data, one.data, q.scale_inv, one.scale_inv, 33, 50,
        bias=bias, out_dtype=out_dtype, fast_accum=fast_accum, scaling=ROWWISE,
    )  # fmt: skip
    want = undone(q.data, q.scale_inv, q.scaling)[:33] @ undone(one.data, one.scale_inv, 0)[:50].t()
    assert got.dtype == out_dtype
    assert error(got, want + bias.double()) <= T_SAME


def test_a_huge_and_a_tiny_row_do_not_overflow_on_the_way(on: torch.device) -> None:
    # cuBLASLt multiplies by one scale after the other: there 3e37 * 448 * 320 is too much for f32.
    huge = 3e37 if on.type == "cpu" else 1e32
    a = ops.quantize_rowwise(torch.full((16, 320), huge, device=on), E4M3)
    b = ops.quantize_rowwise(torch.full((16, 320), 1e-9, device=on), E4M3)
    for p, q in ((a, b), (b, a)):
        y = ops.gemm_nt(p.data, q.data, p.scale_inv, q.scale_inv, 16, 16, scaling=ROWWISE)
        assert error(y, torch.full_like(y, huge * 1e-9 * 320)) < 0.01


# ----------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (17, 35), (32, 48)], ids=str)
def test_operators_pass_opcheck(
    on: torch.device, shape: tuple[int, int], opcheck_fp8: None
) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    folds = [torch.ones(emulate.padded(size), device=on) for size in reversed(shape)]
    for fold in ([None, None], folds):
        for row_major, transposed in ((True, True), (False, True), (True, False)):
            args = (x, E4M3, row_major, transposed, True, False, *fold, torch.float32)
            torch.library.opcheck(torch.ops.fp8lt.quantize_rowwise.default, args)
    for view in (x, x.t().contiguous().t()):
        args = (view, E4M3, True, True, True, True, None, None)
        torch.library.opcheck(torch.ops.fp8lt.quantize_rowwise.default, args)
    q = ops.quantize_rowwise(x, E4M3)
    rows = shape[0]
    args = (q.data, q.data, q.scale_inv, q.scale_inv, rows, rows, None, torch.bfloat16, True, 1, 1)
    torch.library.opcheck(torch.ops.fp8lt.gemm_nt.default, args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            lambda d: {"folded": True, "fold_cols": torch.ones(48, device=d)},
            "want no fold_cols with folded=True",
        ),
        (
            lambda d: {"folded": True, "fold_rows": torch.ones(32, device=d)},
            "want no fold_rows with folded=True",
        ),
        (
            lambda d: {"fold_cols": torch.ones(40, device=d)},
            r"want fold_cols \[48\] or longer, .* got \[40\]",
        ),
        (
            lambda d: {"fold_rows": torch.ones(1, 32, device=d)},
            r"want fold_rows \[32\] or longer, .* got \[1, 32\]",
        ),
        (
            lambda d: {"fold_rows": torch.ones(32, device=d).double()},
            r"contiguous, float32, got \[32\] torch.float64",
        ),
        (
            lambda d: {"fold_cols": torch.ones(96, device=d)[::2]},
            r"want fold_cols \[48\] or longer, contiguous",
        ),
        (lambda d: {"sums_dtype": torch.int8}, "want sums_dtype float32, float16 or bfloat16, got"),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_quantise_refuses_what_it_cannot_do(where: str, options: Options, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.quantize_rowwise(torch.zeros(20, 40, device=where), E4M3, **options(where))
    with pytest.raises(RuntimeError, match=r"want x \[R, C\], got \[3\]"):
        ops.quantize_rowwise(torch.zeros(3, device=where), E4M3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: {"scaling": (0, 1)},
            r"want \(a_scaling, b_scaling\) one of \(0, 0\), .*got \(0, 1\)",
        ),
        (lambda d: {"scaling": (5, 5)}, r"one of .*\(5, 4\), got \(5, 5\)"),
        (lambda d: {"scaling": (2, 2)}, r"one of .*\(5, 4\), got \(2, 2\)"),
        (
            lambda d: {"a_scale_inv": torch.ones(19, device=d)},
            r"want a_scale_inv \[20\] or longer.* got \[19\]",
        ),
        (
            lambda d: {"b_scale_inv": torch.ones(1, 32, device=d)},
            r"want b_scale_inv \[20\] or longer.* got \[1, 32\]",
        ),
        (
            lambda d: {"b_scale_inv": torch.ones(64, device=d)[::2]},
            r"want b_scale_inv \[20\] or longer, contiguous",
        ),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_gemm_refuses_what_it_cannot_do(where: str, change: Options, message: str) -> None:
    q = ops.quantize_rowwise(torch.zeros(20, 40, device=where), E4M3)
    args = {"a": q.data, "b": q.data, "a_scale_inv": q.scale_inv, "b_scale_inv": q.scale_inv}
    with pytest.raises(RuntimeError, match=message):
        ops.gemm_nt(**{**args, "m": 20, "n": 20, "scaling": ROWWISE, **change(where)})


@pytest.mark.parametrize("dy_factor", [1e-9, 1.0, 1e6])
def test_the_high_precision_dw_is_not_rounded_to_x(on: torch.device, dy_factor: float) -> None:
    x = randn(24, 32, on=on, dtype=torch.float16)
    w = randn(16, 32, on=on, dtype=torch.float32).requires_grad_()
    dy = randn(24, 16, on=on, dtype=torch.float32, seed=1) * dy_factor
    y = fp8lt.linear(x, w, recipe="rowwise_with_gw_hp", out_dtype=torch.float32)
    (dw,) = torch.autograd.grad(y, w, dy)
    torch.testing.assert_close(dw, dy.t() @ x.float(), rtol=1e-4, atol=1e-4 * dy_factor)


def test_an_f32_weight_gets_a_high_precision_dw_of_more_than_sixteen_bits(on: torch.device) -> None:
    x = randn(24, 32, on=on, dtype=torch.bfloat16)
    w = randn(16, 32, on=on, dtype=torch.float32).requires_grad_()
    y = fp8lt.linear(x, w, recipe="rowwise_with_gw_hp")
    (dw,) = torch.autograd.grad(y, w, torch.ones_like(y))
    want = torch.ones_like(y).double().t() @ x.double()
    torch.testing.assert_close(dw.double(), want, rtol=1e-5, atol=1e-4)
    assert not torch.equal(dw, dw.bfloat16().float())
