"""The operators: bytes against torchao, products against float64, native against emulated."""

import functools

import pytest
import torch
from cases import (
    DTYPES,
    SHAPES,
    SMALL_SHAPES,
    T_SAME,
    assert_same,
    dequantised,
    error,
    layouts,
    randn,
    raw,
    to_gpu,
)

from fp8lt import device, emulate, ops

E4M3, E5M2 = device.OCP
FP8 = (E4M3, E5M2)


def bf16_patterns(exponent: int) -> torch.Tensor:
    """All 256 bf16 numbers of one exponent: [2 signs, 128 mantissas]."""
    low = torch.arange(128) | exponent << 7
    return torch.stack([low, low | 0x8000]).to(torch.int16).view(torch.bfloat16)


# --------------------------------------------------------------------------------------- quantise


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_scales_equal_torchao(dtype: torch.dtype, fp8: torch.dtype) -> None:
    from torchao.float8 import float8_scaling_utils, float8_training_tensor

    gemm = float8_training_tensor.ScaledMMConfig(False, False, False, False)
    config = float8_training_tensor.LinearMMConfig(gemm, gemm, gemm)
    magnitudes = (1.0, 1e-3, 3e4, 1e-6) if dtype == torch.float16 else (1.0, 1e-30, 1e30, 1e-13)
    for seed, magnitude in enumerate(magnitudes):
        x = (randn(96, 112, on=torch.device("cpu"), dtype=torch.float32, seed=seed) * magnitude).to(
            dtype
        )
        want = float8_scaling_utils.hp_tensor_to_float8_dynamic(x, fp8, config)
        got = ops.quantize_tensorwise(x, fp8)
        assert torch.equal(got.data.view(torch.uint8), want._data.view(torch.uint8))
        assert torch.equal(got.scale_inv, want._scale.reciprocal().expand(112))
        assert torch.equal(got.data_t.view(torch.uint8), want._data.view(torch.uint8).t())


@pytest.mark.parametrize("fp8", FP8)
def test_every_bf16_pattern_quantises_as_in_torchao(fp8: torch.dtype) -> None:
    from torchao.float8 import float8_utils

    for exponent in range(255):  # 255 holds Inf and NaN
        x = bf16_patterns(exponent)
        scale = float8_utils.tensor_to_scale(x, fp8)
        got = ops.quantize_tensorwise(x, fp8)
        want = float8_utils.to_fp8_saturated(x.float() * scale, fp8)
        assert torch.equal(raw(got.data[:2, :128]), raw(want))
        assert torch.equal(got.scale_inv, scale.reciprocal().expand(128))
    finite = torch.cat([bf16_patterns(e) for e in range(255)])  # all under one scale
    scale = float8_utils.tensor_to_scale(finite, fp8)
    want = float8_utils.to_fp8_saturated(finite.float() * scale, fp8)
    assert torch.equal(raw(ops.quantize_tensorwise(finite, fp8).data[:510]), raw(want))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FP8)
def test_native_bytes_equal_emulated_over_every_bf16_pattern(fp8: torch.dtype) -> None:
    tensors = [bf16_patterns(exponent) for exponent in range(256)]  # the last: Inf and NaN
    tensors.append(torch.cat(tensors[:255]))
    tensors.append(torch.cat([bf16_patterns(130), torch.full((1, 128), torch.inf).bfloat16()]))
    for x in tensors:
        assert_same(ops.quantize_tensorwise(x.cuda(), fp8), ops.quantize_tensorwise(x, fp8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(0, 0), (0, 5), (5, 0), (1, 1), (1, 4096), (4096, 1), (3, 15), (16, 16), (17, 33), (127, 129),
     (128, 128), (129, 256), (100, 1027), (1000, 1000), (4099, 1024), (2500, 4100), (2048, 8200)],
)  # fmt: skip
def test_native_bytes_equal_emulated(
    shape: tuple[int, int], dtype: torch.dtype, fp8: torch.dtype
) -> None:
    x = randn(*shape, on=torch.device("cpu"), dtype=dtype, seed=sum(shape)) * 3
    for layout, view in layouts(x):
        got = ops.quantize_tensorwise(to_gpu(view), fp8)
        assert_same(got, ops.quantize_tensorwise(x, fp8))
        assert got.data.is_contiguous(), layout
        lean = ops.quantize_tensorwise(to_gpu(view), fp8, power_of_two=True)
        assert_same(lean, ops.quantize_tensorwise(x, fp8, power_of_two=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("row_major", "transposed"), [(True, False), (False, True), (False, False)]
)
def test_native_makes_only_the_layouts_asked_for(row_major: bool, transposed: bool) -> None:
    x = randn(130, 70, on=torch.device("cuda"), dtype=torch.bfloat16)
    both = ops.quantize_tensorwise(x, E4M3)
    some = ops.quantize_tensorwise(x, E4M3, row_major=row_major, transposed=transposed)
    assert some.data.shape == (both.data.shape if row_major else (0, 0))
    assert some.data_t.shape == (both.data_t.shape if transposed else (0, 0))
    assert torch.equal(raw(some.data), raw(both.data)) or not row_major
    assert torch.equal(raw(some.data_t), raw(both.data_t)) or not transposed


@pytest.mark.gpu
def test_a_tensor_of_more_than_two_to_the_31_elements_quantises_to_its_end() -> None:
    rows, cols = 65537, 32784  # 2.15e9 elements
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-200:] = randn(200, cols, on=x.device, dtype=torch.bfloat16)
    q = ops.quantize_tensorwise(x, E4M3)
    want = ops.quantize_tensorwise(x[-200:], E4M3)
    assert torch.equal(q.scale_inv[:1], want.scale_inv[:1])
    assert torch.equal(raw(q.data[rows - 200 : rows]), raw(want.data[:200]))
    assert torch.equal(raw(q.data_t[:, rows - 200 : rows]), raw(want.data_t[:, :200]))
    assert not q.data[: rows - 200].view(torch.uint8).any()


def test_padding_is_zero_and_not_part_of_amax(on: torch.device) -> None:
    """BUG-02."""
    x = randn(17, 35, on=on, dtype=torch.float32).abs() + 5  # zero is far from every element
    q = ops.quantize_tensorwise(x, E4M3)
    assert q.data.shape == (32, 48)
    assert q.data_t.shape == (48, 32)
    assert not q.data[17:].view(torch.uint8).any()
    assert not q.data[:, 35:].view(torch.uint8).any()
    assert torch.equal(q.data.view(torch.uint8).t(), q.data_t.view(torch.uint8))
    assert q.scale_inv.shape == (48,)
    assert (q.scale_inv == (448 / x.max().double()).float().reciprocal()).all()


def test_zeros_quantise_to_zeros_with_a_finite_scale(on: torch.device) -> None:
    q = ops.quantize_tensorwise(torch.zeros(3, 5, device=on), E4M3)
    assert (q.scale_inv == torch.tensor(4.48e14).reciprocal().item()).all()
    assert not q.data.view(torch.uint8).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_element_makes_scale_inv_non_finite(on: torch.device, bad: float) -> None:
    x = torch.ones(40, 40, device=on, dtype=torch.bfloat16)
    x[7, 9] = bad
    q = ops.quantize_tensorwise(x, E5M2)
    assert not q.scale_inv.isfinite().any()


def test_fnuz_formats_saturate_at_240_and_never_make_a_nan() -> None:
    x = torch.tensor([[1.0, -0.0, 1e-9, -240.0, 3.0]]) * 1e3
    q = ops.quantize_tensorwise(x, device.FNUZ.e4m3)
    assert q.data.float().abs().max() == 240
    assert not q.data.float().isnan().any()
    assert (q.scale_inv == torch.tensor(240 / 240e3).reciprocal()).all()


def test_quantise_keeps_thirty_decibels_on_gaussian_input(on: torch.device) -> None:
    x = randn(64, 96, on=on, dtype=torch.float32)
    q = ops.quantize_tensorwise(x, E4M3)
    got = q.data.double() * q.scale_inv[0]
    assert error(got, x) < 10 ** (-30 / 20)  # measured 31.4 dB


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 5), (1, 1), (1, 40), (3, 129), (127, 16), (128, 128), (500, 1027), (4099, 300)],
    ids=str,
)  # fmt: skip
def test_sums_of_columns_equal_float64(
    on: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = randn(*shape, on=on, dtype=dtype) + 1  # away from 0, where a sum cancels
    for layout, view in layouts(x):
        q = ops.quantize_tensorwise(view, E4M3, sums_dtype=torch.float32)
        assert q.sums.dtype == torch.float32
        # Measured: 6.4e-8, on a CPU and on an H200.
        assert error(q.sums, x.double().sum(0)) < 1e-6, layout
        assert_same(q, ops.quantize_tensorwise(x, E4M3))
    for rounded in (torch.bfloat16, torch.float16):
        half = ops.quantize_tensorwise(x, E5M2, row_major=False, sums_dtype=rounded).sums
        assert torch.equal(half, q.sums.to(rounded))
    assert ops.quantize_tensorwise(x, E4M3).sums.shape == (0,)


def test_sums_keep_a_nan_in_its_column_and_are_the_same_every_time(on: torch.device) -> None:
    x = randn(3000, 700, on=on, dtype=torch.bfloat16)
    x[2900, 650] = torch.nan
    first = ops.quantize_tensorwise(x, E5M2, sums_dtype=torch.float32).sums
    assert first.isnan().nonzero().tolist() == [[650]]
    for _ in range(5):
        again = ops.quantize_tensorwise(x, E5M2, sums_dtype=torch.float32).sums
        torch.testing.assert_close(again, first, rtol=0, atol=0, equal_nan=True)


# ------------------------------------------------------------------------------------------- gemm


def check_gemm(
    shape: tuple[int, int, int],
    on: torch.device,
    fp8: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out_dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
    fast_accum: bool = True,
    bound: float = T_SAME,
) -> None:
    m, n, k = shape
    a, b = (randn(r, k, on=on, dtype=torch.bfloat16, seed=i) for i, r in enumerate((m, n)))
    bias = None if bias_dtype is None else randn(n, on=on, dtype=bias_dtype, seed=1)
    aq, bq = ops.quantize_tensorwise(a, fp8[0]), ops.quantize_tensorwise(b, fp8[1])
    got = ops.gemm_nt(
        aq.data, bq.data, aq.scale_inv, bq.scale_inv, m, n,
        bias=bias, out_dtype=out_dtype, fast_accum=fast_accum,
    )  # fmt: skip
    want = dequantised(a, fp8[0]) @ dequantised(b, fp8[1]).t()
    if bias is not None:
        want += bias.double()
    assert got.dtype == out_dtype
    assert got.is_contiguous()
    assert error(got, want) <= bound


@pytest.mark.parametrize("shape", SMALL_SHAPES, ids=str)
def test_gemm_equals_float64_on_the_same_operands(shape: tuple[int, int, int]) -> None:
    check_gemm(shape, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_gemm_equals_float64_on_the_same_operands(shape: tuple[int, int, int]) -> None:
    check_gemm(shape, torch.device("cuda"))
    check_gemm(shape, torch.device("cuda"), out_dtype=torch.float32, bias_dtype=torch.float32)


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("fp8", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_every_combination_of_types_is_right(
    on: torch.device,
    fp8: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    fast_accum: bool,
) -> None:
    """BUG-34."""
    # Measured on a CPU: bf16 1.7e-3, f16 2.1e-4, f32 5e-8. A GPU sums FP8 products in fewer bits:
    # f32 results have 1.3e-4 on an H200, with slow accumulation, which is used at this size.
    bound = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 5e-4}[out_dtype]
    if bias_dtype == torch.bfloat16 or out_dtype == torch.bfloat16:
        bound = 5e-3  # a float32 bias is rounded to a 16-bit result's dtype first
    check_gemm((33, 72, 144), on, fp8, out_dtype, bias_dtype, fast_accum, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("fp8", [(E4M3, E4M3), (E5M2, E4M3)])
def test_a_large_gemm_with_a_scale_per_row_is_right(
    fp8: tuple[torch.dtype, torch.dtype],
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> None:
    # From 2**37 multiply-adds on, cuBLASLt reads the scale once per row. The probe measures 2.1e-3
    # for bf16 results on an H200, most of it from fast accumulation.
    check_gemm((8192, 4096, 4096), torch.device("cuda"), fp8, out_dtype, bias_dtype)


def test_bias_of_a_float32_result_is_not_rounded(on: torch.device) -> None:
    """BUG-35."""
    bias = randn(40, on=on, dtype=torch.float32)
    zero = ops.quantize_tensorwise(torch.zeros(40, 32, device=on), E4M3)
    y = ops.gemm_nt(
        zero.data, zero.data, zero.scale_inv, zero.scale_inv, 40, 40,
        bias=bias, out_dtype=torch.float32,
    )  # fmt: skip
    assert torch.equal(y, bias.expand(40, 40))


def test_same_inputs_give_the_same_bits(on: torch.device) -> None:
    """BUG-37."""
    q = ops.quantize_tensorwise(randn(257, 1040, on=on, dtype=torch.bfloat16), E4M3)
    call = lambda: ops.gemm_nt(q.data, q.data, q.scale_inv, q.scale_inv, 257, 257)  # noqa: E731
    first = call()
    check_gemm((64, 64, 64), on)
    assert torch.equal(first, call())


def test_an_operand_in_any_layout_is_quantised_into_contiguous_copies(on: torch.device) -> None:
    """BUG-25."""
    x = randn(32, 48, on=on, dtype=torch.float32)  # needs no padding, so no copy for that
    want = ops.quantize_tensorwise(x, E4M3)
    for layout, view in layouts(x):
        got = ops.quantize_tensorwise(view, E4M3)
        assert_same(got, want)
        assert got.data.is_contiguous(), layout
        assert got.data_t.is_contiguous(), layout


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (16, 32), (144, 112), (256, 384)], ids=str)
def test_rows_transposed_are_the_columns(
    on: torch.device, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    q = ops.quantize_tensorwise(x, dtype)
    memory = q.data.new_empty(q.data.numel() + 1)
    anywhere = memory[1:].view(q.data.shape).copy_(q.data)
    for data in (q.data, anywhere):
        got = ops.transposed(data)
        assert got.is_contiguous()
        assert torch.equal(raw(got), raw(q.data_t))


def test_only_padded_copies_are_transposed(on: torch.device) -> None:
    wrong = (
        torch.zeros(16, 16, device=on),
        *(torch.zeros(*s, device=on).to(E4M3) for s in ((16, 15), (15, 16), (16,), (16, 16, 16))),
        torch.zeros(16, 32, device=on).to(E4M3).t(),
    )
    for data in wrong:
        for call in (ops.transposed, functools.partial(ops.transposed, emulated=True)):
            with pytest.raises(RuntimeError, match=r"want data \[R, C\] in an FP8 dtype"):
                call(data)


# ----------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (17, 35), (32, 48)], ids=str)
def test_operators_pass_opcheck(
    on: torch.device, shape: tuple[int, int], opcheck_fp8: None
) -> None:
    x = randn(*shape, on=on, dtype=torch.bfloat16)
    for view in (x, x.t().contiguous().t(), x[:, :1].expand(shape)):
        for sums in (None, torch.float32, torch.bfloat16):
            args = (view, E4M3, True, True, sums)
            torch.library.opcheck(torch.ops.fp8lt.quantize_tensorwise.default, args)
    q = ops.quantize_tensorwise(x, E4M3)
    bias = randn(shape[0], on=on, dtype=torch.bfloat16)
    for b in (None, bias):
        args = (q.data, q.data, q.scale_inv, q.scale_inv, shape[0], shape[0], b)
        torch.library.opcheck(torch.ops.fp8lt.gemm_nt.default, (*args, torch.bfloat16, False))

    torch.library.opcheck(torch.ops.fp8lt.transposed.default, (q.data,))


def test_meta_tensors_get_shapes_without_anything_built() -> None:
    x = torch.empty(17, 35, device="meta", dtype=torch.bfloat16)
    q = ops.quantize_tensorwise(x, E4M3)
    y = ops.gemm_nt(q.data, q.data, q.scale_inv, q.scale_inv, 17, 17, out_dtype=torch.float32)
    assert (y.device.type, y.shape, y.dtype) == ("meta", (17, 17), torch.float32)


def bad_gemm(on: torch.device, **change: object) -> None:
    q = ops.quantize_tensorwise(randn(32, 48, on=on, dtype=torch.bfloat16), E4M3)
    args: dict = {"a": q.data, "b": q.data, "a_scale_inv": q.scale_inv, "b_scale_inv": q.scale_inv}
    ops.gemm_nt(**{**args, "m": 32, "n": 32, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"a": _fp8(d, E5M2), "b": _fp8(d, E5M2)}, "e5m2.* does not exist in hardware"),
        (lambda d: {"b": _fp8(d, E4M3, (32, 64))}, r"want b \[32, K\].* got \[32, 64\]"),
        (lambda d: {"b": _fp8(d, E4M3, (48, 32)).t()}, r"want b \[32, K\], contiguous"),
        (lambda d: {"m": 33}, r"want a \[48, K\].* got \[32, 48\]"),
        (lambda d: {"a": torch.zeros(32, 48, device=d)}, "want a in an FP8 dtype, got"),
        (lambda d: {"out_dtype": E4M3}, "want out_dtype float32, float16 or bfloat16, got"),
        (lambda d: {"bias": torch.zeros(31, device=d)}, r"want bias \[32\].*, got \[31\]"),
        (
            lambda d: {"a_scale_inv": torch.ones(0, device=d)},
            r"want a_scale_inv \[S\], contiguous, float32.*\[0\]",
        ),
        (
            lambda d: {"b_scale_inv": torch.ones(4, device=d, dtype=torch.float64)},
            r"want b_scale_inv \[S\], contiguous, float32.*(Double|float64)",
        ),
    ],
)
def test_gemm_refuses_what_it_cannot_do_and_says_why(
    on: torch.device, change: object, message: str
) -> None:
    """BUG-33, BUG-34."""
    with pytest.raises(RuntimeError, match=message):
        bad_gemm(on, **change(on))  # type: ignore[operator]


def _fp8(on: torch.device, dtype: torch.dtype, shape: tuple[int, int] = (32, 48)) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=on).view(dtype)


@pytest.mark.parametrize(
    ("x", "dtype", "message"),
    [
        (torch.zeros(3), E4M3, r"want x \[R, C\], got \[3\]"),
        (torch.zeros(2, 2, dtype=torch.int32), E4M3, "want x of float32, float16 or bfloat16, got"),
        (torch.zeros(2, 2), torch.int8, "want dtype float8_e4m3fn or float8_e5m2, got"),
    ],
)
def test_quantise_refuses_what_it_cannot_do(
    on: torch.device, x: torch.Tensor, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.quantize_tensorwise(x.to(on), dtype)
    with pytest.raises(RuntimeError, match="want sums_dtype float32, float16 or bfloat16, got"):
        ops.quantize_tensorwise(torch.zeros(2, 2, device=on), E4M3, sums_dtype=torch.int32)


def test_an_emulated_call_on_any_device_equals_the_cpu_operator(on: torch.device) -> None:
    x = randn(20, 30, on=on, dtype=torch.bfloat16)
    assert_same(
        ops.quantize_tensorwise(x, E4M3, emulated=True), ops.quantize_tensorwise(x.cpu(), E4M3)
    )


def test_scale_division_is_correctly_rounded() -> None:
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(0)) + 1e-3
    want = torch.tensor([448.0 / a for a in amax.tolist()], dtype=torch.float32)
    assert torch.equal(emulate.scale_from_amax(amax, E4M3), want)
