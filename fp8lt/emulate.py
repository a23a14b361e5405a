"""The operators in plain PyTorch: their readable definition, on any device.

Same scales, same bytes, same rounding as the kernels in `csrc/`. A GEMM multiplies in float32, so
its sums are at least as exact as the hardware's; `fast_accum` changes nothing here.

What a matrix [R, C] shares one scale over, and how `scale_inv` is laid out (padded: PAD below):

    TENSORWISE          all of it            [max(padded R, padded C)], the number written out
    ROWWISE             a row                [padded R]
    BLOCKWISE_1X128     128 of a row         [ceil(C / 128), padded R], cuBLASLt's VEC128
    BLOCKWISE_128X128   a square             [ceil(R / 128), ceil(C / 128) rounded up to 4]

A GEMM contracts rows, so a transposed copy has the scales of its own rows: `scale_inv_t`.
"""

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-12  # floor of an amax: an all-zero tensor gets a large finite scale, not inf
PAD = 16  # both dimensions of an FP8 copy are multiples of it, zero-filled (see ops)
BLOCK = 128  # elements along the contraction that share a block scale
_MANTISSA_BITS = 23  # of a float32


class Scaling(IntEnum):
    """What shares one scale; the numbers of `torch.nn.functional.ScalingType`."""

    TENSORWISE = 0
    ROWWISE = 1
    BLOCKWISE_1X128 = 4
    BLOCKWISE_128X128 = 5


BLOCKWISE = (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128)


def padded(size: int) -> int:
    """Round a dimension up to a multiple of PAD."""
    return (size + PAD - 1) // PAD * PAD


def blocks(size: int) -> int:
    """Return the number of blocks along a dimension."""
    return (size + BLOCK - 1) // BLOCK


def grid_columns(size: int) -> int:
    """Return the columns of a grid of 128x128 scales: cuBLASLt wants a multiple of 4."""
    return (blocks(size) + 3) // 4 * 4


def scale_from_amax(
    amax: Tensor, dtype: torch.dtype, power_of_two: bool = False, margin: int = 0
) -> Tensor:
    """Return `scale = FP8_MAX / (max(amax, EPS) * 2**margin)`, f32, correctly rounded.

    With `power_of_two` it is then rounded down to one, so that scaling is exact.
    """
    # In float32, PyTorch turns `number / tensor` into a reciprocal and a product: off by one bit
    # for some amax. In float64 that does not survive the rounding to float32.
    floored = amax.double().clamp(min=EPS) * 2.0**margin
    scale = (torch.finfo(dtype).max / floored).float()
    return _floor_to_power_of_two(scale) if power_of_two else scale


def _floor_to_power_of_two(scale: Tensor) -> Tensor:
    # By clearing the mantissa, which is exact. torchao takes exp2(floor(log2(scale))), and a log2
    # just below an integer rounds to it: such a scale comes out twice as large there.
    power = (scale.view(torch.int32) & -(1 << _MANTISSA_BITS)).view(torch.float32)
    return torch.where(scale.isnan(), scale, power)


def saturate_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 `x` to `dtype`; out of range gives +-FP8_MAX, NaN stays NaN."""
    # A bare cast gives 448, inf or nan there, depending on the dtype and the PyTorch release.
    fp8_max = torch.finfo(dtype).max
    return x.clamp(-fp8_max, fp8_max).to(dtype)


# --------------------------------------------------------------------------------------- quantise


def quantize_tensorwise(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    sums_dtype: torch.dtype | None = None,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [R, C] with one scale; see `ops.quantize_tensorwise`."""
    scale = scale_from_amax(_amax(x), dtype, power_of_two)
    copies, scale_inv = _under_one_scale(x, scale, dtype, row_major, transposed)
    return *copies, scale_inv, _sums(x, sums_dtype)


def quantize_delayed(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [R, C] with one scale from `state`, in place; see `ops.quantize_delayed`."""
    amax, (ring, position, recorded) = _amax(x), state.split((state.shape[0] - 2, 1, 1))
    length = ring.shape[0]
    # Whoever wrote the state: no place outside of it.
    place = torch.where((position >= 0) & (position < length), position.trunc(), 0.0)
    past = ring[((place - 1) % length).long()] if most_recent else ring.amax(0, keepdim=True)
    deciding = torch.where(recorded > 0, past, amax)  # the first tensor's own, no step with scale 1
    scale = scale_from_amax(deciding, dtype, power_of_two, margin)
    copies, scale_inv = _under_one_scale(x, scale, dtype, row_major, transposed)
    # The scale knows nothing of a NaN or Inf in x, which saturates in the copies.
    scale_inv = torch.where(amax.isfinite(), scale_inv, torch.nan)
    if record:
        # A zero does not enter either: after zeros, whatever comes would saturate.
        enters = amax.isfinite() & (amax > 0)
        here = enters & (torch.arange(length, device=x.device) == place)
        ring = torch.where(here, amax, ring)
        position = torch.where(enters, (place + 1) % length, position)
        state.copy_(torch.cat([ring, position, torch.where(enters, 1.0, recorded)]))
    return *copies, scale_inv, _sums(x, sums_dtype)


def quantize_shards(
    shards: list[Tensor], dtype: torch.dtype, amaxes: Tensor, power_of_two: bool
) -> list[Tensor]:
    """Quantise each [R, C] under a given amax; see `ops.quantize_shards`."""
    return [
        quantize_delayed(x, dtype, True, False, amax, 0, False, False, None, power_of_two)[0]
        for x, amax in zip(shards, amaxes.unbind(), strict=True)
    ]


def quantize_rowwise(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    power_of_two: bool,
    folded: bool,
    fold_cols: Tensor | None,
    fold_rows: Tensor | None,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [R, C] with a scale per row of each copy; see `ops.quantize_rowwise`."""
    sums, x = _sums(x, sums_dtype), _real(x)
    if folded:
        q, scale_inv = _quantize_rows(x, None, dtype, power_of_two)
        ones = x.new_ones(padded(x.shape[1]) if transposed else 0)
        return *_copies(q, row_major, transposed), scale_inv, ones, sums
    data, data_t = _nothing(x, dtype), _nothing(x, dtype)
    scale_inv, scale_inv_t = x.new_empty(0), x.new_empty(0)
    if row_major:
        data, scale_inv = _quantize_rows(x, fold_cols, dtype, power_of_two)
    if transposed:
        data_t, scale_inv_t = _quantize_rows(x.t(), fold_rows, dtype, power_of_two)
    return data, data_t, scale_inv, scale_inv_t, sums


def quantize_blockwise(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    power_of_two: bool,
    square: bool,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [R, C] with a scale per block of 128; see `ops.quantize_blockwise`."""
    sums, x = _sums(x, sums_dtype), _real(x)
    data, data_t = _nothing(x, dtype), _nothing(x, dtype)
    scale_inv, scale_inv_t = x.new_empty(0, 0), x.new_empty(0, 0)
    if square:
        q, squares = _quantize_squares(x, dtype, power_of_two)
        data, data_t = _copies(q, row_major, transposed)
        scale_inv = _grid(squares) if row_major else scale_inv
        scale_inv_t = _grid(squares.t()) if transposed else scale_inv_t
        return data, data_t, scale_inv, scale_inv_t, sums
    if row_major:
        data, scale_inv = _quantize_row_blocks(x, dtype, power_of_two)
    if transposed:
        data_t, scale_inv_t = _quantize_row_blocks(x.t().contiguous(), dtype, power_of_two)
    return data, data_t, scale_inv, scale_inv_t, sums


def _quantize_rows(
    v: Tensor, fold: Tensor | None, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantise float32 `v` [R, C], times `fold` [C], with a scale per row; scale_inv [padded R]."""
    rows, cols = v.shape
    if fold is not None:
        v = v * fold[:cols]
    v = v.contiguous()
    amax = v.abs().amax(1) if cols else v.new_zeros(rows)
    scale = scale_from_amax(F.pad(amax, (0, padded(rows) - rows)), dtype, power_of_two)
    q = saturate_cast(v * scale[:rows, None], dtype)
    return _pad(q, padded(rows), padded(cols)), scale.reciprocal()


def _quantize_row_blocks(
    v: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """Quantise float32 `v` [R, C] in blocks [1, 128]; scale_inv [blocks C, padded R]."""
    shape, rows, count = v.shape, padded(v.shape[0]), blocks(v.shape[1])
    v = _pad(v, rows, count * BLOCK).view(rows, count, BLOCK)
    scale = scale_from_amax(v.abs().amax(2), dtype, power_of_two)
    q = saturate_cast(v * scale[:, :, None], dtype).view(rows, count * BLOCK)
    return _repad(q, *shape), scale.reciprocal().t().contiguous()


def _quantize_squares(v: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Quantise float32 `v` [R, C] in blocks [128, 128]; scale_inv [blocks R, blocks C]."""
    shape, (down, across) = v.shape, map(blocks, v.shape)
    v = _pad(v, down * BLOCK, across * BLOCK).view(down, BLOCK, across, BLOCK)
    scale = scale_from_amax(v.abs().amax((1, 3)), dtype, power_of_two)
    q = saturate_cast(v * scale[:, None, :, None], dtype).view(down * BLOCK, across * BLOCK)
    return _repad(q, *shape), scale.reciprocal()


def _grid(scale_inv: Tensor) -> Tensor:
    """Pad the scales of squares, [blocks R, blocks C], with zeros to [blocks R, L4]."""
    return F.pad(scale_inv.contiguous(), (0, -scale_inv.shape[1] % 4))


def _amax(x: Tensor) -> Tensor:
    # amax() keeps a NaN and raises for an empty tensor.
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def _under_one_scale(
    x: Tensor, scale: Tensor, dtype: torch.dtype, row_major: bool, transposed: bool
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the copies of `x` [R, C], and `scale_inv` written out for every row of either."""
    rows, cols = map(padded, x.shape)
    q = _pad(saturate_cast(_real(x) * scale, dtype), rows, cols)
    return _copies(q, row_major, transposed), scale.reciprocal().repeat(max(rows, cols, PAD))


def transposed(data: Tensor) -> Tensor:
    """Return an FP8 copy [R, C] transposed; see `ops.transposed`."""
    # As bytes: not every device copies FP8. A clone: without elements contiguous() is an alias.
    columns = data.view(torch.uint8).t().clone(memory_format=torch.contiguous_format)
    return columns.view(data.dtype)


def cast_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the transposed copy of `x` [R, C] under a scale that is known."""
    rows, cols = x.shape
    # Not by _pad(), which would make a compiler guard on sizes.
    x = F.pad(x.float(), (0, padded(cols) - cols, 0, padded(rows) - rows))
    return saturate_cast(x * scale, dtype).t().contiguous()


def _real(x: Tensor) -> Tensor:
    # contiguous(): pointwise operations would hand x's strides on to the copy.
    return x.contiguous().float()


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    """Fill `x` up to [rows, cols] with zeros."""
    if x.shape == (rows, cols):
        return x
    pad = (0, cols - x.shape[1], 0, rows - x.shape[0])
    if x.dtype == torch.float32:
        return F.pad(x, pad)
    # As bytes: not every PyTorch pads FP8 tensors. Byte 0 is zero in every format.
    return F.pad(x.view(torch.uint8), pad).view(x.dtype)


def _repad(q: Tensor, rows: int, cols: int) -> Tensor:
    """Cut `q` down to its [rows, cols] and pad these: zero even where a block's scale is NaN."""
    if q.shape != (rows, cols):
        # clone, not contiguous(): that leaves an empty tensor the strides of what it was cut from.
        q = q[:rows, :cols].clone(memory_format=torch.contiguous_format)
    return _pad(q, padded(rows), padded(cols))


def _copies(q: Tensor, row_major: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the bytes `q` [R, C] as they are and transposed; [0, 0] for one not asked for."""
    # clone, not contiguous(): of one row that would alias `q`, which operators must not return.
    q_t = q.t().clone(memory_format=torch.contiguous_format) if transposed else None
    return (
        q if row_major else _nothing(q, q.dtype),
        _nothing(q, q.dtype) if q_t is None else q_t,
    )


def _nothing(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((0, 0), dtype=dtype)


def _sums(x: Tensor, sums_dtype: torch.dtype | None) -> Tensor:
    if sums_dtype is None:
        return x.new_empty(0, dtype=torch.float32)
    return x.sum(0, dtype=torch.float32).to(sums_dtype)


# ------------------------------------------------------------------------------------------- gemm


def gemm_nt(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    m: int,
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    a_scaling: int = Scaling.TENSORWISE,
    b_scaling: int = Scaling.TENSORWISE,
) -> Tensor:
    """Multiply `a` [m, K] by `b` [n, K].T and undo both scales; see `ops.gemm_nt`."""
    a, b = a[:m].float(), b[:n].float()
    a_invs = _by_block(a_scale_inv, a_scaling, *a.shape)
    b_invs = _by_block(b_scale_inv, b_scaling, *b.shape)
    width = BLOCK if a_scaling in BLOCKWISE else a.shape[1]
    y = a.new_zeros(m, n)
    with torch.autocast(a.device.type, enabled=False):  # or float32 would not mean float32
        for block, (a_inv, b_inv) in enumerate(zip(a_invs, b_invs, strict=True)):
            k = slice(block * width, (block + 1) * width)
            y += _undo_scales(a[:, k] @ b[:, k].t(), a_inv[:, None], b_inv[None, :])
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def gemm_nt_add(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    d: Tensor,
    fast_accum: bool,
    a_scaling: int = Scaling.TENSORWISE,
    b_scaling: int = Scaling.TENSORWISE,
) -> None:
    """Add the product to `d` [m, n] f32; see `ops.gemm_nt_add`."""
    m, n = d.shape
    scalings = (a_scaling, b_scaling)
    d += gemm_nt(a, b, a_scale_inv, b_scale_inv, m, n, None, torch.float32, fast_accum, *scalings)


def _undo_scales(y: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    # The smaller first: the sums may be as large as 448 * 448 * K.
    return y * torch.minimum(a_inv, b_inv) * torch.maximum(a_inv, b_inv)


def _by_block(scale_inv: Tensor, scaling: int, rows: int, k: int) -> Tensor:
    """Return what undoes each block's scales: [blocks, rows], or [1, 1] for one number."""
    if scaling == Scaling.TENSORWISE:
        return scale_inv.view(-1)[:1].view(1, 1)
    if scaling == Scaling.ROWWISE:
        return scale_inv[None, :rows]
    if scaling == Scaling.BLOCKWISE_1X128:
        return scale_inv[:, :rows]
    return scale_inv[:, : blocks(k)].t().repeat_interleave(BLOCK, 1)[:, :rows]
