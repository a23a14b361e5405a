"""`gemm_nt` by PyTorch's own operator, for GPUs with FP8 whose library the extension does not call.

    one scale per tensor   torch._scaled_mm(a, b.T, scale_a, scale_b), rounded once
    one scale per row      the same with [M, 1] and [1, N], where it has a kernel for that: e4m3
                           operands and a bf16 result without bias; else the scales, which do not
                           vary along the contraction, are multiplied on to an f32 result

That is hipBLASLt on AMD; on NVIDIA cuBLASLt, or for scales per row a kernel of PyTorch's. The
operator wants `b` K-major and both K and N a multiple of 16, which padding has seen to.
"""

import torch
from torch import Tensor
from torch.nn import functional

from . import device
from .emulate import Scaling

_E4M3 = (device.OCP.e4m3, device.FNUZ.e4m3)


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
    """Do what `ops.gemm_nt` says, for scales of tensors and of rows."""
    if {a_scaling, b_scaling} - {Scaling.TENSORWISE, Scaling.ROWWISE}:
        raise RuntimeError("fp8lt: torch._scaled_mm is not used for scales of blocks")
    if 0 in (m, n, a.shape[1]):
        y = a.new_zeros((m, n), dtype=out_dtype)
        return y if bias is None else y + bias
    a = a[:m]  # any number of rows will do
    if a_scaling == Scaling.TENSORWISE:
        one_each = (a_scale_inv.reshape(-1)[:1], b_scale_inv.reshape(-1)[:1])
        inside = None if bias is None or out_dtype == torch.float32 else _padded(bias, b.shape[0])
        y = _multiply(a, b, one_each, inside, out_dtype, fast_accum, n)
        return y if bias is None or inside is not None else y + bias
    rows, cols = a_scale_inv[:m, None], b_scale_inv[None, : b.shape[0]]
    if bias is None and out_dtype == torch.bfloat16 and a.dtype == b.dtype in _E4M3:
        return _multiply(a, b, (rows, cols), None, out_dtype, fast_accum, n)
    ones = (a_scale_inv.new_ones(1),) * 2
    y = _multiply(a, b, ones, None, torch.float32, fast_accum, n) * rows * cols[:, :n]
    return (y if bias is None else y + bias).to(out_dtype)


def _multiply(
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    n: int,
) -> Tensor:
    y = torch._scaled_mm(
        a, b.t(), *scales, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum
    )
    return y if y.shape[1] == n else y[:, :n].contiguous()


def _padded(bias: Tensor, size: int) -> Tensor:
    return functional.pad(bias, (0, size - bias.shape[0]))
