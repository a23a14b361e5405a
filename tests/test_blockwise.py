"""A scale per block: bytes and scales against a few lines by hand, products against float64."""

import itertools
from collections.abc import Callable

import pytest
import torch
from cases import DTYPES, T_SAME, assert_same, awkward, error, layouts, randn, raw, to_gpu, undone
from torch import Tensor

from fp8lt import device, ops
from fp8lt.emulate import Scaling, padded

E4M3, E5M2 = device.OCP
FP8 = (E4M3, E5M2)
CPU = torch.device("cpu")
SIZES = (1, 17, 127, 129, 300)
SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (1, 300), (300, 1), (17, 33), (128, 128), (129, 250),
          (127, 640), (300, 1027)]  # fmt: skip
PAIRS = [(4, 4), (4, 5), (5, 4)]


def ceil(size: int, block: int) -> int:
    return -(-size // block)


def by_hand(
    x: Tensor, fp8: torch.dtype, height: int, padded_cells: bool
) -> tuple[Tensor, dict[tuple[int, int], float]]:
    """Return the bytes of `x` in blocks [height, 128], and scale_inv by block.

    padded_cells: also of the cells that padding adds, where amax is 0.
    """
    rows, cols = x.shape
    data = torch.zeros(padded(rows), padded(cols)).to(fp8)
    scales = {}
    fp8_max = torch.finfo(fp8).max
    for r in range(ceil(padded(rows) if padded_cells else rows, height)):
        for c in range(ceil(cols, 128)):
            cell = (slice(height * r, height * (r + 1)), slice(128 * c, 128 * (c + 1)))
            block = x[cell].float()
            amax = block.abs().max().item() if block.numel() else 0.0
            scale = torch.tensor(fp8_max / max(amax, 1e-12))  # Python divides exactly
            data[:rows, :cols][cell] = (block * scale).clamp(-fp8_max, fp8_max).to(fp8)
            scales[r, c] = (1 / scale).item()
    return data, scales


# --------------------------------------------------------------------------------------- quantise


def of_all_magnitudes(rows: int, cols: int) -> Tensor:
    """Return Gaussian blocks, each row and each run of 128 with a magnitude of its own."""
    x = randn(rows, cols, on=CPU, dtype=torch.float32)
    x *= 10 ** (torch.arange(rows)[:, None] % 7 - 3.0)
    return x * 10 ** (torch.arange(cols) // 128 % 5 - 2.0)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("shape", SHAPES[3:], ids=str)
def test_rows_are_cut_into_blocks_of_128(
    on: torch.device, shape: tuple[int, int], fp8: torch.dtype
) -> None:
    x = of_all_magnitudes(*shape)
    q = ops.quantize_blockwise(x.to(on), fp8, square=False)
    for v, data, scale_inv in ((x, q.data, q.scale_inv), (x.t(), q.data_t, q.scale_inv_t)):
        want, scales = by_hand(v, fp8, 1, padded_cells=True)
        assert torch.equal(raw(data), raw(want))
        assert scale_inv.shape == (ceil(v.shape[1], 128), padded(v.shape[0]))
        assert {(r, c): scale_inv[c, r].item() for r, c in scales} == scales
    assert q.scaling == q.scaling_t == Scaling.BLOCKWISE_1X128


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("shape", SHAPES[3:], ids=str)
def test_squares_have_the_same_bytes_in_both_copies(
    on: torch.device, shape: tuple[int, int], fp8: torch.dtype
) -> None:
    """BUG-13."""
    x = of_all_magnitudes(*shape)
    q = ops.quantize_blockwise(x.to(on), fp8, square=True)
    want, scales = by_hand(x, fp8, 128, padded_cells=False)
    assert torch.equal(raw(q.data), raw(want))
    assert torch.equal(raw(q.data_t), raw(want).t())
    down, across = ceil(shape[0], 128), ceil(shape[1], 128)
    for grid, (rows, cols) in ((q.scale_inv, (down, across)), (q.scale_inv_t, (across, down))):
        assert grid.shape == (rows, 4 * ceil(cols, 4))
        assert not grid[:, cols:].any()
    assert {(r, c): q.scale_inv[r, c].item() for r, c in scales} == scales
    assert torch.equal(q.scale_inv_t[:, :down], q.scale_inv[:, :across].t())
    assert q.scaling == q.scaling_t == Scaling.BLOCKWISE_128X128


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_layouts_asked_for_are_made(
    on: torch.device, shape: tuple[int, int], square: bool
) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    both = ops.quantize_blockwise(x, E4M3, square=square, sums_dtype=torch.float32)
    rows = ops.quantize_blockwise(x, E4M3, square=square, transposed=False)
    columns = ops.quantize_blockwise(x, E4M3, square=square, row_major=False)
    assert torch.equal(raw(rows.data), raw(both.data))
    assert torch.equal(raw(columns.data_t), raw(both.data_t))
    assert torch.equal(rows.scale_inv, both.scale_inv)
    assert torch.equal(columns.scale_inv_t, both.scale_inv_t)
    for nothing in (rows.data_t, columns.data, rows.scale_inv_t, columns.scale_inv):
        assert nothing.shape == (0, 0)
    assert error(both.sums, x.double().sum(0)) < 1e-5
    assert rows.sums.shape == (0,)


def test_layout_of_the_operand_changes_nothing(on: torch.device) -> None:
    x = randn(33, 160, on=on, dtype=torch.float32)
    for square in (False, True):
        want = ops.quantize_blockwise(x, E4M3, square=square)
        for _, view in layouts(x):
            assert_same(ops.quantize_blockwise(view, E4M3, square=square), want)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_element_spoils_its_block_alone(on: torch.device, bad: float) -> None:
    x = torch.ones(150, 300, device=on, dtype=torch.bfloat16)
    x[140, 130] = bad
    q = ops.quantize_blockwise(x, E4M3, square=False, power_of_two=True)
    assert (~q.scale_inv.isfinite()).nonzero().tolist() == [[1, 140]]
    assert (~q.scale_inv_t.isfinite()).nonzero().tolist() == [[1, 130]]
    q = ops.quantize_blockwise(x, E4M3, square=True)
    assert (~q.scale_inv.isfinite()).nonzero().tolist() == [[1, 1]]


def test_an_emulated_call_on_any_device_equals_the_cpu_operator(on: torch.device) -> None:
    x = awkward(170, 290, torch.bfloat16)
    for square in (False, True):
        got = ops.quantize_blockwise(x.to(on), E4M3, square=square, emulated=True)
        assert_same(got, ops.quantize_blockwise(x, E4M3, square=square))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (4099, 520), (520, 4099)], ids=str)
def test_native_bytes_equal_emulated(
    shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype
) -> None:
    x = awkward(*shape, dtype)
    for square, power_of_two in itertools.product((False, True), repeat=2):
        want = ops.quantize_blockwise(x, fp8, square=square, power_of_two=power_of_two)
        for _, view in layouts(x):
            got = ops.quantize_blockwise(
                to_gpu(view), fp8, square=square, power_of_two=power_of_two
            )
            assert_same(got, want)


# ------------------------------------------------------------------------------------------- gemm


def operand(
    rows: int, k: int, scaling: int, fp8: torch.dtype, on: torch.device, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a quantised operand, its scale_inv and, in float64, what both stand for.

    Its blocks have magnitudes of their own, from 1e-6 to 1e6.
    """
    generator = torch.Generator().manual_seed(seed)
    by_row = torch.rand(rows, 1, generator=generator) * 6 - 3
    by_block = (torch.rand(ceil(k, 128), generator=generator) * 6 - 3).repeat_interleave(128)[:k]
    x = torch.randn(rows, k, generator=generator) * 10 ** (by_row + by_block)
    square = scaling == Scaling.BLOCKWISE_128X128
    q = ops.quantize_blockwise(x.to(on), fp8, square=square, transposed=False)
    return q.data, q.scale_inv, undone(q.data, q.scale_inv, scaling)[:rows]


def check_gemm(
    shape: tuple[int, int, int],
    pair: tuple[int, int],
    on: torch.device,
    fp8: torch.dtype = E4M3,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: Tensor | None = None,
) -> None:
    """Compare with float64 on the same operands, element by element."""
    m, n, k = shape
    a, a_inv, a_real = operand(m, k, pair[0], fp8, on, 0)
    b, b_inv, b_real = operand(n, k, pair[1], E4M3, on, 1)
    got = ops.gemm_nt(a, b, a_inv, b_inv, m, n, scaling=pair, out_dtype=out_dtype, bias=bias)
    want, bound = a_real @ b_real.t(), a_real.abs() @ b_real.abs().t()  # cf. cancellation
    if bias is not None:
        bias = bias if out_dtype == torch.float32 else bias.to(out_dtype)
        want, bound = want + bias.double(), bound + bias.double().abs()
    assert (got.dtype, got.shape) == (out_dtype, (m, n))
    assert ((got.double() - want).abs() <= T_SAME * bound).all()


@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("pair", PAIRS)
def test_gemm_equals_float64_on_the_same_operands(
    on: torch.device, pair: tuple[int, int], k: int
) -> None:
    """BUG-11, BUG-14."""
    for m, n in itertools.product(SIZES, SIZES):
        check_gemm((m, n, k), pair, on)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_formats_output_dtypes_and_bias_are_right(
    on: torch.device, pair: tuple[int, int], out_dtype: torch.dtype
) -> None:
    """BUG-35."""
    for bias_dtype, fp8 in itertools.product((None, *DTYPES), FP8):
        bias = None if bias_dtype is None else randn(50, on=on, dtype=bias_dtype)
        check_gemm((33, 50, 300), pair, on, fp8, out_dtype, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS)
def test_a_large_gemm_is_right(pair: tuple[int, int]) -> None:
    check_gemm((8192, 4096, 4096), pair, torch.device("cuda"))


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_to_multiply_is_zero(on: torch.device, pair: tuple[int, int]) -> None:
    for shape in ((0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)):
        check_gemm(shape, pair, on)


# ----------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (17, 135), (130, 48)], ids=str)
def test_operators_pass_opcheck(
    on: torch.device, shape: tuple[int, int], opcheck_fp8: None
) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    quantise, gemm = torch.ops.fp8lt.quantize_blockwise, torch.ops.fp8lt.gemm_nt
    for square, layouts_asked in itertools.product((False, True), ((True, True), (False, True))):
        for view in (x, x.t().contiguous().t()):
            args = (view, E4M3, *layouts_asked, False, square, torch.bfloat16)
            torch.library.opcheck(quantise.default, args)
    rows, k = shape
    for pair in PAIRS:
        (a, a_inv, _), (b, b_inv, _) = (operand(rows, k, s, E4M3, on, 0) for s in pair)
        args = (a, b, a_inv, b_inv, rows, rows, None, torch.bfloat16, False, *pair)
        torch.library.opcheck(gemm.default, args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"fast_accum": True}, "want fast_accum False: block scales have no fast"),
        (lambda d: {"scaling": (4, 0)}, r"want \(a_scaling, b_scaling\) one of .* got \(4, 0\)"),
        (
            lambda d: {"a_scale_inv": torch.ones(32, 3, device=d)},  # untransposed
            r"want a_scale_inv \[3, 32\], contiguous, float32, got \[32, 3\]",
        ),
        (
            lambda d: {"a_scale_inv": torch.ones(32, 3, device=d).t()},
            r"want a_scale_inv \[3, 32\], contiguous",
        ),
        (
            lambda d: {"b_scale_inv": torch.ones(1, 3, device=d)},
            r"want b_scale_inv \[1, 4\], contiguous, float32, got \[1, 3\]",
        ),
        (
            lambda d: {"b_scale_inv": torch.ones(1, 4, device=d).double()},
            r"want b_scale_inv \[1, 4\].*got \[1, 4\] torch.float64",
        ),
    ],
)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_gemm_refuses_what_it_cannot_do(
    where: str, change: Callable[[str], dict[str, object]], message: str
) -> None:
    """BUG-14."""
    x = torch.zeros(20, 300, device=where)
    a, b = (ops.quantize_blockwise(x, E4M3, square=square) for square in (False, True))
    args = {"a": a.data, "b": b.data, "a_scale_inv": a.scale_inv, "b_scale_inv": b.scale_inv}
    args = {**args, "m": 20, "n": 20, "scaling": (4, 5)}
    assert ops.gemm_nt(**args).shape == (20, 20)
    with pytest.raises(RuntimeError, match=message):
        ops.gemm_nt(**{**args, **change(where)})
