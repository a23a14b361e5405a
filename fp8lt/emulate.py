"""The operators in plain PyTorch: their readable definition, on any device.

Same scales, same bytes, same rounding as the kernels in `csrc/`. A GEMM multiplies in float32, so
its sums are at least as exact as the hardware's; `fast_accum` changes nothing here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-12  # floor of an amax: an all-zero tensor gets a large finite scale, not inf
PAD = 16  # both dimensions of an FP8 copy are multiples of it, zero-filled (see ops)


def padded(size: int) -> int:
    """Round a dimension up to a multiple of PAD."""
    return (size + PAD - 1) // PAD * PAD


def scale_from_amax(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `scale = FP8_MAX / max(amax, EPS)`, f32, correctly rounded."""
    # In float32, PyTorch turns `number / tensor` into a reciprocal and a product: off by one bit
    # for some amax. In float64 that does not survive the rounding to float32.
    return (torch.finfo(dtype).max / amax.double().clamp(min=EPS)).float()


def saturate_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 `x` to `dtype`; out of range gives +-FP8_MAX, NaN stays NaN."""
    # A bare cast gives 448, inf or nan there, depending on the dtype and the PyTorch release.
    fp8_max = torch.finfo(dtype).max
    return x.clamp(-fp8_max, fp8_max).to(dtype)


def quantize_tensorwise(
    x: Tensor,
    dtype: torch.dtype,
    row_major: bool,
    transposed: bool,
    sums_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise `x` [R, C] with one scale; see `ops.quantize_tensorwise`."""
    # amax() keeps a NaN and raises for an empty tensor.
    amax = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
    scale = scale_from_amax(amax, dtype)
    rows, cols = x.shape
    # contiguous(): pointwise operations would hand x's strides on to the copy.
    q = saturate_cast(x.contiguous().float() * scale, dtype)
    if (rows, cols) != (padded(rows), padded(cols)):
        # As bytes: not every PyTorch pads FP8 tensors. Byte 0 is zero in every format.
        pad = (0, padded(cols) - cols, 0, padded(rows) - rows)
        q = F.pad(q.view(torch.uint8), pad).view(dtype)
    nothing = q.new_empty((0, 0))
    # clone, not contiguous(): of one row that would alias `q`, which operators must not return.
    q_t = q.t().clone(memory_format=torch.contiguous_format) if transposed else nothing
    written_out = scale.reciprocal().repeat(max(padded(rows), padded(cols), PAD))
    sums = x.new_empty(0, dtype=torch.float32)
    if sums_dtype is not None:
        sums = x.sum(0, dtype=torch.float32).to(sums_dtype)
    return q if row_major else nothing.clone(), q_t, written_out, sums


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
) -> Tensor:
    """Multiply `a` [m, K] by `b` [n, K].T and undo both scales; see `ops.gemm_nt`."""
    with torch.autocast(a.device.type, enabled=False):  # or float32 would not mean float32
        y = a[:m].float() @ b[:n].float().t()
    a_inv, b_inv = a_scale_inv.view(-1)[0], b_scale_inv.view(-1)[0]
    # The smaller first: the sums may be as large as 448 * 448 * K.
    y = y * torch.minimum(a_inv, b_inv) * torch.maximum(a_inv, b_inv)
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)
