"""The operators: what exactly is a quantise, a GEMM.

Two families, defined here once for every backend (`torch.ops.fp8lt.*`):

    quantize_*   one real matrix x [R, C] -> FP8 copies, row-major and transposed, and scale_inv;
                 on the side the sums of x's columns, since it is read anyway
    gemm_nt      a [m, K] @ b [n, K].T, both K-major, on FP8 copies: the only GEMM there is

**Padding** is settled here and nowhere else. An FP8 copy has both dimensions rounded up to a
multiple of 16 and zero-filled: the contraction of a GEMM must be such a multiple, and either
dimension of a matrix is contracted in one of its GEMMs. Zeros add nothing to a sum, and amax is
taken before padding. `gemm_nt` is told the true m and n and returns exactly that. So callers never
see a shape that was not theirs.

Backends: CPU runs `emulate`; CUDA runs the compiled extension, which registers itself for these
operators; any device runs `emulate` when asked (`emulated=True`). Outputs are always contiguous
and their shapes depend on shapes and dtypes alone.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from . import build, device, emulate, settings
from .emulate import PAD, padded
from .recipe import Recipe

REAL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (*device.OCP, *device.FNUZ)
_E5M2 = (device.OCP.e5m2, device.FNUZ.e5m2)

_library = torch.library.Library("fp8lt", "DEF")
_library.define(
    "quantize_tensorwise(Tensor x, ScalarType dtype, bool row_major, bool transposed,"
    " ScalarType? sums_dtype=None) -> (Tensor data, Tensor data_t, Tensor scale_inv, Tensor sums)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "gemm_nt(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, SymInt m, SymInt n,"
    " Tensor? bias, ScalarType out_dtype, bool fast_accum) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
# The whole layer with its gradients, made by the extension alone: `linear.py` is its definition.
_library.define(
    "linear(Tensor x, Tensor w, Tensor? bias, Tensor? w_data, Tensor? w_data_t,"
    " Tensor? w_scale_inv, ScalarType forward_fp8, ScalarType backward_fp8, ScalarType out_dtype,"
    " bool fast_output, bool fast_grad_input, bool fast_grad_weight, bool recompute_weight)"
    " -> Tensor"
)
_library.define("cublaslt_versions() -> (int compiled, int loaded)")
_library.define("set_autotune(bool enabled, str directory, bool verbose) -> ()")


class Quantized(NamedTuple):
    """A matrix [R, C] in FP8, padded; a layout that was not asked for is [0, 0]."""

    data: Tensor  # [padded R, padded C] fp8
    data_t: Tensor  # [padded C, padded R] fp8
    scale_inv: Tensor  # [S] f32: real = data * scale_inv[0]
    sums: Tensor  # [C] sums of the unquantised columns; [0] if not asked for

    # S = max(padded R, padded C): the one number is written out for every row of either copy, since
    # cuBLASLt's best kernel for a large GEMM wants a scale per row.


def quantize_tensorwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    row_major: bool = True,
    transposed: bool = True,
    sums_dtype: torch.dtype | None = None,
    emulated: bool = False,
) -> Quantized:
    """Quantise a matrix with one scale, from its own amax, into the layouts asked for.

        scale = FP8_MAX / max(amax, 1e-12)      data = saturate(x * scale)      sums = x.sum(0)

    x: [R, C] bf16, f16 or f32, any strides. dtype: an FP8 dtype.
    sums_dtype: bf16, f16 or f32, what the f32 sums are rounded to; None: they are not wanted.
    A NaN or Inf in x makes `scale_inv`, and with it every product, non-finite.
    """
    call = emulate.quantize_tensorwise if emulated else torch.ops.fp8lt.quantize_tensorwise.default
    return Quantized(*call(x, dtype, row_major, transposed, sums_dtype))


def gemm_nt(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    emulated: bool = False,
) -> Tensor:
    """Return `(a @ b.T) * a_scale_inv * b_scale_inv + bias`, [m, n] in `out_dtype`.

    a: [padded m, K] fp8, b: [padded n, K] fp8, not both e5m2.
    a_scale_inv, b_scale_inv: [S] f32, one number each, in every element.
    bias: [n] bf16, f16 or f32. The epilogue adds it in f32 where it has a form for it; an f32 or
    f16 bias of an f32 result is added after, so that it is not rounded first.
    fast_accum: let the hardware skip promoting partial sums to f32, where that saves time.
    """
    epilogue, after = _place_bias(bias, out_dtype)
    call = _emulated_gemm_nt if emulated else torch.ops.fp8lt.gemm_nt.default
    y: Tensor = call(a, b, a_scale_inv, b_scale_inv, m, n, epilogue, out_dtype, fast_accum)
    return y if after is None else y + after  # not in place: a checkpoint may have kept y


def _place_bias(bias: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split a bias into the one the epilogue adds and the one added after the GEMM."""
    if bias is None:
        return None, None
    if out_dtype == torch.float32:
        return (bias, None) if bias.dtype == torch.bfloat16 else (None, bias)
    return bias.to(out_dtype), None  # what autocast does to a float32 bias, too


def backend(where: torch.device, emulated: bool = False) -> bool:
    """Decide how tensors on `where` run; return whether that is `emulate` called directly.

    Raises RuntimeError, with the reason, where native FP8 does not exist and emulation was not
    asked for, by `emulated` or FP8LT_EMULATE=1.
    """
    if where.type in ("cpu", "meta"):
        return False  # the operators themselves: emulated on a CPU, shapes alone on meta
    if emulated:
        return True
    support = device.support(where)
    reason = support.reason
    if support.native:
        failure = build.ensure()
        if failure is None:
            return False
        reason = failure
    if settings.read().emulate:
        return True
    raise RuntimeError(
        f"fp8lt: no native FP8 for tensors on {where}: {reason}\n"
        "Set FP8LT_EMULATE=1, or emulate=True in the recipe, to compute in plain PyTorch (slow)."
    )


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_quantized: Quantized | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
) -> Tensor:
    """Run `linear.py`'s autograd function in the extension: the same, with less host time."""
    args = (
        x, w, bias, *(w_quantized[:3] if w_quantized else (None, None, None)),
        recipe.forward_dtype(device.OCP), recipe.backward_dtype(device.OCP), out_dtype,
        recipe.fast_accum_output, recipe.fast_accum_grad_input, recipe.fast_accum_grad_weight,
        recipe.recompute_weight,
    )  # fmt: skip
    native, y = build.module(), NotImplemented
    if native is not None and not has_torch_function_variadic(x, w, bias):
        y = native.linear(*args)
    if y is NotImplemented:  # somebody listens to operators, or there is no such function
        y = torch.ops.fp8lt.linear.default(*args)
    return y


# What torch.compiler.assume_constant_result does, without its import of Dynamo: under
# torch.compile the answer is a constant, and finding it is not traced.
backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ------------------------------------------------------------------- checks, CPU kernels, fakes


def _check_quantize(x: Tensor, dtype: torch.dtype, sums_dtype: torch.dtype | None) -> None:
    if x.dim() != 2:
        raise RuntimeError(f"fp8lt: want x [R, C], got {list(x.shape)}")
    if x.dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want x of float32, float16 or bfloat16, got {x.dtype}")
    if dtype not in FP8_DTYPES:
        raise RuntimeError(f"fp8lt: want dtype float8_e4m3fn or float8_e5m2, got {dtype}")
    if sums_dtype is not None and sums_dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want sums_dtype float32, float16 or bfloat16, got {sums_dtype}")


def _check_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    k = a.shape[-1] if a.dim() == 2 else 0
    for name, operand, rows in (("a", a, m), ("b", b, n)):
        if operand.dtype not in FP8_DTYPES:
            raise RuntimeError(f"fp8lt: want {name} in an FP8 dtype, got {operand.dtype}")
        shape = list(operand.shape)
        if shape != [padded(rows), k] or k != padded(k) or not operand.is_contiguous():
            raise RuntimeError(
                f"fp8lt: want {name} [{padded(rows)}, K], contiguous, K a multiple of 16 and the "
                f"same for a and b; got {shape}"
            )
    for name, scale in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        contiguous = scale.dim() <= 1 and scale.is_contiguous()
        if scale.dtype != torch.float32 or not contiguous or scale.numel() == 0:
            raise RuntimeError(
                f"fp8lt: want {name} [S], contiguous, float32, "
                f"got {list(scale.shape)} {scale.dtype}"
            )
    if a.dtype in _E5M2 and b.dtype in _E5M2:
        raise RuntimeError(
            f"fp8lt: {a.dtype} @ {b.dtype} does not exist in hardware: one of a and b must be e4m3"
        )
    if out_dtype not in REAL_DTYPES:
        raise RuntimeError(f"fp8lt: want out_dtype float32, float16 or bfloat16, got {out_dtype}")
    if bias is not None:
        _check_epilogue(bias, n, out_dtype)


def _check_epilogue(bias: Tensor, n: int, out_dtype: torch.dtype) -> None:
    want = torch.bfloat16 if out_dtype == torch.float32 else out_dtype
    if bias.dtype != want:
        raise RuntimeError(
            f"fp8lt: the epilogue adds a {want} bias to {out_dtype}, got a bias of {bias.dtype}"
        )
    if bias.dim() != 1 or bias.shape[0] != n:
        raise RuntimeError(f"fp8lt: want bias [{n}], got {list(bias.shape)}")


@torch.library.impl(_library, "quantize_tensorwise", "CPU")
def _quantize_tensorwise_cpu(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize(x, dtype, sums_dtype)
    return emulate.quantize_tensorwise(x, dtype, row_major, transposed, sums_dtype)


@torch.library.register_fake("fp8lt::quantize_tensorwise", lib=_library)
def _quantize_tensorwise_fake(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_quantize(x, dtype, sums_dtype)
    rows, cols = padded(x.shape[0]), padded(x.shape[1])
    return (
        x.new_empty((rows, cols) if row_major else (0, 0), dtype=dtype),
        x.new_empty((cols, rows) if transposed else (0, 0), dtype=dtype),
        x.new_empty(torch.sym_max(torch.sym_max(rows, cols), PAD), dtype=torch.float32),
        x.new_empty(0 if sums_dtype is None else x.shape[1], dtype=sums_dtype or torch.float32),
    )


def _emulated_gemm_nt(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    _check_gemm(a, b, a_scale_inv, b_scale_inv, m, n, bias, out_dtype)
    return emulate.gemm_nt(a, b, a_scale_inv, b_scale_inv, m, n, bias, out_dtype, fast_accum)


_library.impl("gemm_nt", _emulated_gemm_nt, "CPU")


@torch.library.register_fake("fp8lt::linear", lib=_library)
def _linear_fake(x: Tensor, w: Tensor, *args: Any) -> Tensor:
    out_dtype = args[6]  # after bias, the three parts of w_quantized and the two FP8 dtypes
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype)


@torch.library.register_fake("fp8lt::gemm_nt", lib=_library)
def _gemm_nt_fake(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    _check_gemm(a, b, a_scale_inv, b_scale_inv, m, n, bias, out_dtype)
    return a.new_empty((m, n), dtype=out_dtype)
