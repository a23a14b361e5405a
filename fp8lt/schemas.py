"""The operators as PyTorch's dispatcher knows them: schemas, checks, CPU kernels, fakes.

`emulate.py` says what they compute, `ops.py` is how they are called. Arguments are checked here, by
the CPU kernel and the fake alike; the extension checks once more what it would read out of bounds.
"""

from typing import Any

import torch
from torch import Tensor

from . import device, emulate
from .emulate import BLOCKWISE, PAD, Scaling, blocks, grid_columns, padded
from .operators import define, library

REAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (*device.OCP, *device.FNUZ)
E5M2 = (device.OCP.e5m2, device.FNUZ.e5m2)
# The pairs of scalings that a GEMM takes, those of cuBLASLt.
PAIRS = (
    (Scaling.TENSORWISE, Scaling.TENSORWISE),
    (Scaling.ROWWISE, Scaling.ROWWISE),
    (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_1X128),
    (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128),
    (Scaling.BLOCKWISE_128X128, Scaling.BLOCKWISE_1X128),
)

# --------------------------------------------------------------------------------------- quantise


def _check_quantize(x: Tensor, dtype: torch.dtype, sums_dtype: torch.dtype | None) -> None:
    if x.dim() != 2:
        raise RuntimeError(f"fp8lt: want x [R, C], got {list(x.shape)}")
    if x.dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want x of float32, float16 or bfloat16, got {x.dtype}")
    if dtype not in FP8_DTYPES:
        raise RuntimeError(f"fp8lt: want dtype float8_e4m3fn or float8_e5m2, got {dtype}")
    if sums_dtype is not None and sums_dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want sums_dtype float32, float16 or bfloat16, got {sums_dtype}")


def _empty_copies(
    x: Tensor, dtype: torch.dtype, row_major: bool, transposed: bool
) -> tuple[Tensor, Tensor]:
    rows, cols = padded(x.shape[0]), padded(x.shape[1])
    return (
        x.new_empty((rows, cols) if row_major else (0, 0), dtype=dtype),
        x.new_empty((cols, rows) if transposed else (0, 0), dtype=dtype),
    )


def _empty_sums(x: Tensor, sums_dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(0 if sums_dtype is None else x.shape[1], dtype=sums_dtype or torch.float32)


def _tensorwise_fake(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    sums_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor, ...]:
    longest = torch.sym_max(padded(x.shape[0]), padded(x.shape[1]))
    scale_inv = x.new_empty(torch.sym_max(longest, PAD), dtype=torch.float32)
    copies = _empty_copies(x, dtype, row_major, transposed)
    return *copies, scale_inv, _empty_sums(x, sums_dtype)


quantize_tensorwise = define(
    "quantize_tensorwise(Tensor x, ScalarType dtype, bool row_major, bool transposed,"
    " ScalarType? sums_dtype=None, bool power_of_two=False)"
    " -> (Tensor data, Tensor data_t, Tensor scale_inv, Tensor sums)",
    lambda x, dtype, _r, _t, sums_dtype=None, _p=False: _check_quantize(x, dtype, sums_dtype),
    emulate.quantize_tensorwise,
    _tensorwise_fake,
)


def _check_delayed(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    state: Tensor,
    margin: int,
    most_recent: bool,
    record: bool,
    sums_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> None:
    _check_quantize(x, dtype, sums_dtype)
    fits = state.dim() == 1 and state.shape[0] >= 3 and state.is_contiguous()
    if not fits or state.dtype != torch.float32:
        raise RuntimeError(
            "fp8lt: want state [H + 2], H >= 1, contiguous, float32, "
            f"got {list(state.shape)} {state.dtype}"
        )
    if state.device != x.device:
        raise RuntimeError(f"fp8lt: want state on {x.device}, as x is, got it on {state.device}")


def _delayed_fake(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    state: Tensor,
    margin: int,
    most_recent: bool,
    record: bool,
    *options: Any,
) -> tuple[Tensor, ...]:
    return _tensorwise_fake(x, dtype, row_major, transposed, *options)


quantize_delayed = define(
    "quantize_delayed(Tensor x, ScalarType dtype, bool row_major, bool transposed,"
    " Tensor(a!) state, int margin, bool most_recent, bool record,"
    " ScalarType? sums_dtype=None, bool power_of_two=False)"
    " -> (Tensor data, Tensor data_t, Tensor scale_inv, Tensor sums)",
    _check_delayed,
    emulate.quantize_delayed,
    _delayed_fake,
)


def _check_shards(
    shards: list[Tensor], dtype: torch.dtype, amaxes: Tensor, power_of_two: bool
) -> None:
    if amaxes.dim() != 2 or tuple(amaxes.shape) != (len(shards), 3):
        raise RuntimeError(
            f"fp8lt: want amaxes [{len(shards)}, 3], one row for each shard, got "
            f"{list(amaxes.shape)}"
        )
    for x, amax in zip(shards, amaxes.unbind(), strict=True):
        _check_delayed(x, dtype, True, False, amax, 0, False, False, None, power_of_two)


def _shards_fake(
    shards: list[Tensor], dtype: torch.dtype, amaxes: Tensor, power_of_two: bool
) -> list[Tensor]:
    return [_empty_copies(x, dtype, True, False)[0] for x in shards]


quantize_shards = define(
    "quantize_shards(Tensor[] shards, ScalarType dtype, Tensor amaxes, bool power_of_two)"
    " -> Tensor[]",
    _check_shards,
    emulate.quantize_shards,
    _shards_fake,
)


def _check_rowwise(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    power_of_two: bool,
    folded: bool,
    fold_cols: Tensor | None,
    fold_rows: Tensor | None,
    sums_dtype: torch.dtype | None = None,
) -> None:
    _check_quantize(x, dtype, sums_dtype)
    for name, fold, size in (
        ("fold_cols", fold_cols, x.shape[1]),
        ("fold_rows", fold_rows, x.shape[0]),
    ):
        if fold is None:
            continue
        if folded:
            raise RuntimeError(f"fp8lt: want no {name} with folded=True: it has one quantisation")
        fits = fold.dim() == 1 and fold.is_contiguous() and fold.shape[0] >= padded(size)
        if fold.dtype != torch.float32 or not fits:
            raise RuntimeError(
                f"fp8lt: want {name} [{padded(size)}] or longer, contiguous, float32, "
                f"got {list(fold.shape)} {fold.dtype}"
            )


def _rowwise_fake(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    power_of_two: bool,
    folded: bool,
    fold_cols: Tensor | None,
    fold_rows: Tensor | None,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    return (
        *_empty_copies(x, dtype, row_major, transposed),
        x.new_empty(padded(x.shape[0]) if row_major or folded else 0, dtype=torch.float32),
        x.new_empty(padded(x.shape[1]) if transposed else 0, dtype=torch.float32),
        _empty_sums(x, sums_dtype),
    )


quantize_rowwise = define(
    "quantize_rowwise(Tensor x, ScalarType dtype, bool row_major, bool transposed,"
    " bool power_of_two, bool folded, Tensor? fold_cols, Tensor? fold_rows,"
    " ScalarType? sums_dtype=None)"
    " -> (Tensor data, Tensor data_t, Tensor scale_inv, Tensor scale_inv_t, Tensor sums)",
    _check_rowwise,
    emulate.quantize_rowwise,
    _rowwise_fake,
)


def _blockwise_fake(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    power_of_two: bool,
    square: bool,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    rows, cols = x.shape
    scaling = Scaling.BLOCKWISE_128X128 if square else Scaling.BLOCKWISE_1X128
    scales = _block_scales_shape(scaling, rows, cols) if row_major else (0, 0)
    scales_t = _block_scales_shape(scaling, cols, rows) if transposed else (0, 0)
    return (
        *_empty_copies(x, dtype, row_major, transposed),
        x.new_empty(scales, dtype=torch.float32),
        x.new_empty(scales_t, dtype=torch.float32),
        _empty_sums(x, sums_dtype),
    )


def _block_scales_shape(scaling: int, rows: int, k: int) -> tuple[int, int]:
    """Return the sizes of the scales of an operand [rows, k]."""
    if scaling == Scaling.BLOCKWISE_1X128:
        return blocks(k), padded(rows)
    return blocks(rows), grid_columns(k)


quantize_blockwise = define(
    "quantize_blockwise(Tensor x, ScalarType dtype, bool row_major, bool transposed,"
    " bool power_of_two, bool square, ScalarType? sums_dtype=None)"
    " -> (Tensor data, Tensor data_t, Tensor scale_inv, Tensor scale_inv_t, Tensor sums)",
    lambda x, dtype, _r, _t, _p, _s, sums_dtype=None: _check_quantize(x, dtype, sums_dtype),
    emulate.quantize_blockwise,
    _blockwise_fake,
)


def _check_transposed(data: Tensor) -> None:
    fits = data.dim() == 2 and data.is_contiguous() and all(n == padded(n) for n in data.shape)
    if data.dtype not in FP8_DTYPES or not fits:
        raise RuntimeError(
            "fp8lt: want data [R, C] in an FP8 dtype, contiguous, R and C multiples of 16, "
            f"got {list(data.shape)} {data.dtype}"
        )


transposed = define(
    "transposed(Tensor data) -> Tensor",
    _check_transposed,
    emulate.transposed,
    lambda data: data.new_empty((data.shape[1], data.shape[0])),
)


# ------------------------------------------------------------------------------------------- gemm


def _check_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    a_scaling: int = 0,
    b_scaling: int = 0,
) -> None:
    k = a.shape[-1] if a.dim() == 2 else 0
    _check_operand("a", a, m, k)
    _check_operand("b", b, n, k)
    if a.dtype in E5M2 and b.dtype in E5M2:
        raise RuntimeError(
            f"fp8lt: {a.dtype} @ {b.dtype} does not exist in hardware: one of a and b must be e4m3"
        )
    if (a_scaling, b_scaling) not in PAIRS:
        allowed = ", ".join(f"({int(a)}, {int(b)})" for a, b in PAIRS)
        raise RuntimeError(
            f"fp8lt: want (a_scaling, b_scaling) one of {allowed}, got ({a_scaling}, {b_scaling})"
        )
    _check_scales("a_scale_inv", a_scale_inv, a_scaling, m, k)
    _check_scales("b_scale_inv", b_scale_inv, b_scaling, n, k)
    if fast_accum and a_scaling in BLOCKWISE:
        raise RuntimeError("fp8lt: want fast_accum False: block scales have no fast accumulation")
    if out_dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want out_dtype float32, float16 or bfloat16, got {out_dtype}")
    if bias is not None:
        _check_epilogue(bias, n, out_dtype)


def _check_operand(name: str, operand: Tensor, rows: int, k: int) -> None:
    if operand.dtype not in FP8_DTYPES:
        raise RuntimeError(f"fp8lt: want {name} in an FP8 dtype, got {operand.dtype}")
    shape = list(operand.shape)
    if shape != [padded(rows), k] or k != padded(k) or not operand.is_contiguous():
        raise RuntimeError(
            f"fp8lt: want {name} [{padded(rows)}, K], contiguous, K a multiple of 16 and the "
            f"same for a and b; got {shape}"
        )


def _check_scales(name: str, scale_inv: Tensor, scaling: int, rows: int, k: int) -> None:
    shape = list(scale_inv.shape)
    if scaling == Scaling.TENSORWISE:
        want, fits = "[S]", len(shape) <= 1 and scale_inv.numel() > 0
    elif scaling == Scaling.ROWWISE:
        # Equality first: of a symbolic size it is known, `>=` would be a guard.
        enough = len(shape) == 1 and (shape[0] == padded(rows) or shape[0] >= rows)
        want, fits = f"[{rows}] or longer", enough
    else:
        sizes = list(_block_scales_shape(scaling, rows, k))
        want, fits = str(sizes), shape == sizes
    if not fits or scale_inv.dtype != torch.float32 or not scale_inv.is_contiguous():
        raise RuntimeError(
            f"fp8lt: want {name} {want}, contiguous, float32, got {shape} {scale_inv.dtype}"
        )


def _check_epilogue(bias: Tensor, n: int, out_dtype: torch.dtype) -> None:
    want = torch.bfloat16 if out_dtype == torch.float32 else out_dtype
    if bias.dtype != want:
        raise RuntimeError(
            f"fp8lt: the epilogue adds a {want} bias to {out_dtype}, got a bias of {bias.dtype}"
        )
    if bias.dim() != 1 or bias.shape[0] != n:
        raise RuntimeError(f"fp8lt: want bias [{n}], got {list(bias.shape)}")


def _gemm_nt_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *_: Any,
) -> Tensor:
    return a.new_empty((m, n), dtype=out_dtype)


gemm_nt = define(
    "gemm_nt(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, SymInt m, SymInt n,"
    " Tensor? bias, ScalarType out_dtype, bool fast_accum, int a_scaling=0, int b_scaling=0)"
    " -> Tensor",
    _check_gemm,
    emulate.gemm_nt,
    _gemm_nt_fake,
)


def _check_gemm_nt_add(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    d: Tensor,
    fast_accum: bool,
    a_scaling: int = 0,
    b_scaling: int = 0,
) -> None:
    if d.dim() != 2 or d.dtype != torch.float32 or not d.is_contiguous() or d.device != a.device:
        raise RuntimeError(
            f"fp8lt: want d [m, n], contiguous, float32 on {a.device}, got {list(d.shape)} "
            f"{d.dtype} on {d.device}"
        )
    m, n = d.shape
    scalings = (a_scaling, b_scaling)
    _check_gemm(a, b, a_scale_inv, b_scale_inv, m, n, None, torch.float32, fast_accum, *scalings)


gemm_nt_add = define(
    "gemm_nt_add(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor(a!) d,"
    " bool fast_accum, int a_scaling=0, int b_scaling=0) -> ()",
    _check_gemm_nt_add,
    emulate.gemm_nt_add,
    lambda *_: None,
)


# ------------------------------------------------------------------------- the extension's own

# The whole layer with its gradients, made by the extension alone: `linear.py` is its definition.
# Only delayed scaling changes what it is given; backward adds to `main_grad`.
_OPERANDS = (
    "Tensor x, Tensor w, Tensor? bias, Tensor? w_data, Tensor? w_data_t, Tensor? w_scale_inv,"
    " Tensor? w_scale_inv_t, Tensor? main_grad, int returns"
)
_OPTIONS = (
    "ScalarType forward_fp8, ScalarType backward_fp8, ScalarType out_dtype, bool fast_output,"
    " bool fast_grad_input, bool fast_grad_weight, bool recompute_weight, bool power_of_two"
)
library.define(f"linear({_OPERANDS}, int recipe, {_OPTIONS}) -> Tensor")
library.define(
    f"linear_delayed({_OPERANDS}, Tensor(a!) amaxes, Tensor(b!) scaled_by, bool record,"
    f" {_OPTIONS}, int margin, bool most_recent) -> Tensor"
)
library.define("cublaslt_versions() -> (int compiled, int loaded)")
library.define("set_autotune(bool enabled, str directory, bool verbose) -> ()")


@torch.library.register_fake("fp8lt::linear", lib=library)
@torch.library.register_fake("fp8lt::linear_delayed", lib=library)
def _linear_fake(x: Tensor, w: Tensor, *args: Any) -> Tensor:
    _, _, out_dtype = (one for one in args if isinstance(one, torch.dtype))
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype)
