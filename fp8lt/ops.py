"""The operators: what exactly is a quantise, a GEMM.

Two families, the same for every backend (`torch.ops.fp8lt.*`, defined in `schemas.py`):

    quantize_*   one real matrix x [R, C] -> FP8 copies, row-major and transposed, and scale_inv;
                 on the side the sums of x's columns, since it is read anyway
    gemm_nt      a [m, K] @ b [n, K].T, both K-major, on FP8 copies: the only GEMM there is

**Scaling** is what shares one scale: a tensor, a row of a copy, 128 elements of a row, or a square
of 128 x 128 (`emulate.Scaling`). A GEMM contracts rows, so that a scale must not vary within a row
but by blocks: where rows and columns have scales of their own, the two copies have different bytes.

**Padding** is settled here and nowhere else. An FP8 copy has both dimensions rounded up to a
multiple of 16 and zero-filled: the contraction of a GEMM must be such a multiple, and either
dimension of a matrix is contracted in one of its GEMMs. Zeros add nothing to a sum, and amax is
taken before padding. `gemm_nt` is told the true m and n and returns exactly that. So callers never
see a shape that was not theirs.

Backends: CPU runs `emulate`; CUDA runs the compiled extension, which registers itself for these
operators; any device runs `emulate` when asked (`emulated=True`), and GEMMs by `torch._scaled_mm`
where that is what the GPU has (`scaled_mm=True`). Outputs are always contiguous and their shapes
depend on shapes and dtypes alone.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function_variadic

from . import build, device, scaled_mm_gemm, schemas, settings
from .device import indexed
from .emulate import Scaling
from .recipe import NAMES, DelayedScaling, Recipe, resolve
from .state import Histories

REAL_DTYPES = schemas.REAL_DTYPES


class Quantized(NamedTuple):
    """A matrix [R, C] in FP8, padded; a layout that was not asked for has no elements.

    `scale_inv` and `scale_inv_t` are laid out as `emulate.py` says of their scaling.
    """

    data: Tensor  # [padded R, padded C] fp8
    data_t: Tensor  # [padded C, padded R] fp8
    scale_inv: Tensor  # f32, of the rows of `data`
    scale_inv_t: Tensor  # f32, of the rows of `data_t`
    sums: Tensor  # [C] sums of the unquantised columns; [0] if not asked for
    scaling: Scaling  # what shares one scale in `data`
    scaling_t: Scaling | None  # the same in `data_t`; None: see `quantize_rowwise`, folded


def quantize_tensorwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    row_major: bool = True,
    transposed: bool = True,
    sums_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    emulated: bool = False,
) -> Quantized:
    """Quantise a matrix with one scale, from its own amax, into the layouts asked for.

        scale = FP8_MAX / max(amax, 1e-12)      data = saturate(x * scale)      sums = x.sum(0)

    x: [R, C] bf16, f16 or f32, any strides. dtype: an FP8 dtype.
    sums_dtype: bf16, f16 or f32, what the f32 sums are rounded to; None: they are not wanted.
    power_of_two: round the scale down to a power of two.
    `scale_inv` is [max(padded R, padded C)], at least [16]: the one number written out for every
    row of either copy, since cuBLASLt's best kernel for a large GEMM wants a scale per row.
    A NaN or Inf in x makes it, and with it every product, non-finite.
    """
    op = torch.ops.fp8lt.quantize_tensorwise.default
    call = schemas.quantize_tensorwise if emulated else op
    data, data_t, scale_inv, sums = call(x, dtype, row_major, transposed, sums_dtype, power_of_two)
    tensorwise = Scaling.TENSORWISE
    return Quantized(data, data_t, scale_inv, scale_inv, sums, tensorwise, tensorwise)


def quantize_delayed(
    x: Tensor,
    dtype: torch.dtype,
    state: Tensor,
    *,
    margin: int = 0,
    most_recent: bool = False,
    record: bool = True,
    row_major: bool = True,
    transposed: bool = True,
    sums_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
    emulated: bool = False,
) -> Quantized:
    """Quantise a matrix with one scale, from the amaxes in `state`, and record its own there.

        scale = FP8_MAX / (max(a, 1e-12) * 2**margin)      data = saturate(x * scale)

    state: f32 [H + 2], contiguous: the ring of amaxes [H], the position in it where the next goes,
        and 1 once there is one. Changed in place.
    `a` is the largest of the ring or, `most_recent`, the entry before the position; x's own amax as
        long as there is none. record: x's amax enters, unless it is 0 or non-finite.
    The rest as for `quantize_tensorwise`. A NaN or Inf in x makes `scale_inv` NaN.
    """
    call = schemas.quantize_delayed if emulated else torch.ops.fp8lt.quantize_delayed.default
    data, data_t, scale_inv, sums = call(
        x, dtype, row_major, transposed, state, margin, most_recent, record, sums_dtype,
        power_of_two,
    )  # fmt: skip
    tensorwise = Scaling.TENSORWISE
    return Quantized(data, data_t, scale_inv, scale_inv, sums, tensorwise, tensorwise)


def quantize_shards(
    shards: list[Tensor],
    dtype: torch.dtype,
    amaxes: Tensor,
    *,
    power_of_two: bool = False,
    emulated: bool = False,
) -> list[Tensor]:
    """Quantise several matrices, each under the amax of a whole that it is a shard of.

        data[i] = saturate(shards[i] * FP8_MAX / max(amaxes[i, 0], 1e-12))

    shards: [R, C] each, as x of `quantize_tensorwise`. amaxes: f32 [number of shards, 3],
    contiguous: each row the `state` of a `quantize_delayed` with this one amax, (amax, 0, 1).
    Each result is row-major, [padded R, padded C].
    """
    call = schemas.quantize_shards if emulated else torch.ops.fp8lt.quantize_shards.default
    result: list[Tensor] = call(shards, dtype, amaxes, power_of_two)
    return result


def quantize_rowwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    row_major: bool = True,
    transposed: bool = True,
    power_of_two: bool = False,
    folded: bool = False,
    fold_cols: Tensor | None = None,
    fold_rows: Tensor | None = None,
    sums_dtype: torch.dtype | None = None,
    emulated: bool = False,
) -> Quantized:
    """Quantise a matrix with one scale per row of each copy, into the layouts asked for.

        data   = saturate(v * scale[r])        v = x * fold_cols[c]    amax over each row of v
        data_t = saturate(u * scale_t[c]).T    u = x * fold_rows[r]    amax over each column of u

    x, dtype, sums_dtype, power_of_two: as for `quantize_tensorwise`; sums are those of x.
    fold_cols: f32 [padded C] or longer, fold_rows: f32 [padded R] or longer; None: ones.
    folded: one quantisation along rows; `data_t` has the same bytes, so that its scales vary along
        the contraction of its GEMM. That takes `scale_inv_t`, which is all ones, when `scale_inv`
        (there in any case) has been folded into the other operand. `scaling_t` is None then.
    `scale_inv` is [padded R], `scale_inv_t` [padded C]. A NaN or Inf makes its row non-finite.
    """
    call = schemas.quantize_rowwise if emulated else torch.ops.fp8lt.quantize_rowwise.default
    data, data_t, scale_inv, scale_inv_t, sums = call(
        x, dtype, row_major, transposed, power_of_two, folded, fold_cols, fold_rows, sums_dtype
    )
    scaling_t = None if folded else Scaling.ROWWISE
    return Quantized(data, data_t, scale_inv, scale_inv_t, sums, Scaling.ROWWISE, scaling_t)


def quantize_blockwise(
    x: Tensor,
    dtype: torch.dtype,
    *,
    square: bool,
    row_major: bool = True,
    transposed: bool = True,
    power_of_two: bool = False,
    sums_dtype: torch.dtype | None = None,
    emulated: bool = False,
) -> Quantized:
    """Quantise a matrix with one scale per block of 128, into the layouts asked for.

    square=False: blocks of 128 elements within a row of each copy (1x128). `scale_inv` is
        [ceil(C / 128), padded R], `scale_inv_t` [ceil(R / 128), padded C].
    square=True: blocks of 128 x 128; both copies have the same bytes. `scale_inv` is
        [ceil(R / 128), L4(C)], L4(n) = ceil(n / 128) rounded up to a multiple of 4 with zeros;
        `scale_inv_t` is the transposed grid, [ceil(C / 128), L4(R)].
    The rest as for `quantize_tensorwise`. A NaN or Inf makes its block non-finite.
    """
    call = schemas.quantize_blockwise if emulated else torch.ops.fp8lt.quantize_blockwise.default
    data, data_t, scale_inv, scale_inv_t, sums = call(
        x, dtype, row_major, transposed, power_of_two, square, sums_dtype
    )
    scaling = Scaling.BLOCKWISE_128X128 if square else Scaling.BLOCKWISE_1X128
    return Quantized(data, data_t, scale_inv, scale_inv_t, sums, scaling, scaling)


def transposed(data: Tensor, *, emulated: bool = False) -> Tensor:
    """Return an FP8 copy transposed: where both have one scale, the other copy.

    data: [R, C] fp8, contiguous, both multiples of 16. Returns [C, R], contiguous.
    """
    call = schemas.transposed if emulated else torch.ops.fp8lt.transposed.default
    data_t: Tensor = call(data)
    return data_t


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
    scaling: tuple[int, int] = (Scaling.TENSORWISE, Scaling.TENSORWISE),
    emulated: bool = False,
    scaled_mm: bool = False,
) -> Tensor:
    """Return `(a * a_scale_inv) @ (b * b_scale_inv).T + bias`, [m, n] in `out_dtype`.

    a: [padded m, K] fp8, b: [padded n, K] fp8, not both e5m2.
    a_scale_inv, b_scale_inv: f32, laid out as `scaling` of a and b says: [S], one number in every
        element; [padded m or n] or longer, one per row; [ceil(K / 128), padded m or n] for 1x128;
        [ceil(m or n / 128), L4(K)] for 128x128, see `quantize_blockwise`.
    bias: [n] bf16, f16 or f32. The epilogue adds it in f32 where it has a form for it; an f32 or
        f16 bias of an f32 result is added after, so that it is not rounded first.
    fast_accum: let the hardware skip promoting partial sums to f32, where that saves time.
    scaling: one of `schemas.PAIRS`: both a tensor's, both per row, or blocks, not both 128x128.
    With scales per row cuBLASLt multiplies a sum by one scale after the other, so that it gives Inf
    where the first product already leaves f32: where `amax * 448 * K` of an operand is near 1e38.
    """
    epilogue, after = _place_bias(bias, out_dtype)
    call = schemas.gemm_nt if emulated else torch.ops.fp8lt.gemm_nt.default
    if scaled_mm:
        call = scaled_mm_gemm.gemm_nt
    a_scaling, b_scaling = map(int, scaling)  # a graph knows no enums
    y: Tensor = call(
        a, b, a_scale_inv, b_scale_inv, m, n, epilogue, out_dtype, fast_accum, a_scaling, b_scaling
    )
    return y if after is None else y + after  # not in place: a checkpoint may have kept y


def gemm_nt_add(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    d: Tensor,
    *,
    fast_accum: bool = False,
    scaling: tuple[int, int] = (Scaling.TENSORWISE, Scaling.TENSORWISE),
    emulated: bool = False,
    scaled_mm: bool = False,
) -> None:
    """Add `(a * a_scale_inv) @ (b * b_scale_inv).T` to `d` [m, n], f32 and contiguous.

    In the GEMM itself where its rows are a multiple of 16 bytes. The rest as for `gemm_nt`.
    """
    if scaled_mm:
        d += gemm_nt(
            a, b, a_scale_inv, b_scale_inv, *d.shape, out_dtype=d.dtype, fast_accum=fast_accum,
            scaling=scaling, scaled_mm=True,
        )  # fmt: skip
        return
    call = schemas.gemm_nt_add if emulated else torch.ops.fp8lt.gemm_nt_add.default
    call(a, b, a_scale_inv, b_scale_inv, d, fast_accum, *map(int, scaling))


def _place_bias(bias: Tensor | None, out_dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split a bias into the one the epilogue adds and the one added after the GEMM."""
    if bias is None:
        return None, None
    if out_dtype == torch.float32:
        return (bias, None) if bias.dtype == torch.bfloat16 else (None, bias)
    return bias.to(out_dtype), None  # what autocast does to a float32 bias, too


class Backend(NamedTuple):
    """How tensors of a device run: arguments of `gemm_nt`; a quantise takes `emulated` alone."""

    emulated: bool  # in plain PyTorch in place of the operators' kernels
    scaled_mm: bool  # but for the GEMMs, which are torch._scaled_mm's


OPERATORS = Backend(emulated=False, scaled_mm=False)
EMULATED = Backend(emulated=True, scaled_mm=False)


def backend(where: torch.device, emulated: bool = False, recipe: str = "tensorwise") -> Backend:
    """Decide how tensors on `where` run.

    recipe: the name of the recipe, since not every GPU with FP8 has every scaling.

    Raises RuntimeError, with the reason, where FP8 GEMMs do not exist and emulation was not asked
    for, by `emulated` or FP8LT_EMULATE=1.
    """
    if where.type in ("cpu", "meta"):
        return OPERATORS  # emulated on a CPU, shapes alone on meta
    if emulated:
        return EMULATED
    way, reason = support(where, recipe)
    if way == "native":
        return OPERATORS
    if way == "scaled_mm":
        return Backend(emulated=build.loaded_library() is None, scaled_mm=True)
    if settings.read().emulate:
        return EMULATED
    raise RuntimeError(
        f"fp8lt: no native FP8 for tensors on {where}: {reason}\n"
        "Set FP8LT_EMULATE=1, or emulate=True in the recipe, to compute in plain PyTorch (slow)."
    )


# What torch.compiler.assume_constant_result does, without its import of Dynamo: under
# torch.compile the answer is a constant, and finding it is not traced.
backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


def support(where: torch.device, recipe: str) -> device.Support:
    """Say by which way tensors on a GPU run a recipe: by what the GPU has, and what is built."""
    found = device.support(where, recipe)
    if found.way == "refused" or device.amd_architecture(where) is not None:
        return found
    failure = build.ensure()
    if failure is None:
        return device.with_cublaslt(found, _loaded_cublaslt(), recipe)
    if settings.read().build == "off":
        return device.without_extension(found, failure, recipe)
    return device.Support("refused", failure)


class Availability(NamedTuple):
    """Whether FP8 runs on FP8 units, and by which way or why not."""

    available: bool
    reason: str


def is_available(
    recipe: str | Recipe = "tensorwise", device: torch.device | str | int | None = None
) -> Availability:
    """Say whether a recipe's GEMMs run on FP8 units of a device, and why: `(bool, str)`.

    recipe: a name or a recipe object. device: by default the current GPU, or else the CPU, where
    layers run emulated.
    Compiles the extension if that is still to be done. A recipe that is not available is an error
    on that device, or emulated if asked for (`emulate=True`, FP8LT_EMULATE=1).

    Raises TypeError or ValueError for a recipe that there is not, and what `torch.device` raises.

    Example:
        >>> fp8lt.is_available(device="cpu")
        Availability(available=False, reason='a CPU has no FP8 units')
    """
    recipe = resolve(recipe)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = indexed(device)
    if recipe.emulate:
        return Availability(False, "the recipe asks for emulation")
    count = torch.cuda.device_count()
    if where.type == "cuda" and (where.index or 0) >= count:
        return Availability(False, f"there is no {where}: torch sees {count} GPUs")
    way, reason = support(where, recipe.name)
    return Availability(way != "refused", reason)


@functools.cache
def _loaded_cublaslt() -> int:
    _, loaded = torch.ops.fp8lt.cublaslt_versions()
    return int(loaded)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_quantized: Quantized | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    histories: Histories | None = None,
    main_grad: tuple[Tensor | None, int] = (None, 0),
) -> Tensor:
    """Run `linear.py`'s autograd function in the extension: the same, with less host time."""
    quantized = w_quantized[:4] if w_quantized else (None, None, None, None)
    operands = (x, w, bias, *quantized, *main_grad)
    options: tuple[Any, ...] = (
        recipe.forward_dtype(device.OCP), recipe.backward_dtype(device.OCP), out_dtype,
        recipe.fast_accum_output, recipe.fast_accum_grad_input, recipe.fast_accum_grad_weight,
        recipe.recompute_weight, recipe.power_of_two_scales,
    )  # fmt: skip
    kind, of_delayed = NAMES.index(recipe.name), (0, False)
    if isinstance(recipe, DelayedScaling):
        of_delayed = (recipe.margin, recipe.amax_compute_algo == "most_recent")
    native, y = build.module(), NotImplemented
    if native is not None and not has_torch_function_variadic(x, w, bias):
        history = histories or (None, None, False)
        y = native.linear(*operands, *history, kind, *options, *of_delayed)
    if y is not NotImplemented:
        return y
    # Somebody listens to operators, or there is no such function.
    if histories is None:
        return torch.ops.fp8lt.linear.default(*operands, kind, *options)
    return torch.ops.fp8lt.linear_delayed.default(*operands, *histories, *options, *of_delayed)
