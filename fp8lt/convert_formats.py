"""A quantised weight for a GPU of the other family: NVIDIA's FP8 formats and those of AMD's gfx94x.

the same bits      e4m3fn, e5m2 (OCP)      e4m3fnuz, e5m2fnuz (FNUZ)
an ordinary one    v                       v / 2
0x80               minus zero              NaN
largest exponent   Inf, NaN                ordinary numbers; e4m3fn has NaN alone there
"""

import torch
from torch import Tensor

from . import device as devices
from .ops import Quantized

_FAMILIES = (devices.OCP, devices.FNUZ)
_MINUS_ZERO = 0x80


def convert_quantized(quantized: Quantized, device: torch.device | str) -> Quantized:
    """Return what `quantize_weight` gave in the FP8 formats of `device`; it stays where it is.

    To FNUZ every value is kept exactly: the same bits, and `scale_inv` doubled; Inf becomes NaN.
    To OCP the scale is kept, and what is below 2^-6 (e4m3) or 2^-14 (e5m2) before scaling is
    rounded, by up to 2^-10 or 2^-17. NaN stays NaN. What has the formats already is returned as it
    is.

    Example:
        >>> wq = fp8lt.quantize_weight(torch.eye(16))
        >>> fp8lt.convert_quantized(wq, "cpu") is wq
        True
    """
    wanted, dtype = devices.formats(devices.indexed(device)), quantized.data.dtype
    if dtype in wanted:
        return quantized
    (found,) = (family for family in _FAMILIES if dtype in family)
    fp8 = wanted[found.index(dtype)]
    if wanted == devices.OCP:
        return quantized._replace(data=quantized.data.float().to(fp8),
                                  data_t=quantized.data_t.float().to(fp8))  # fmt: skip
    scale_inv = quantized.scale_inv * 2
    scale_inv_t = quantized.scale_inv_t
    if scale_inv_t is quantized.scale_inv:
        scale_inv_t = scale_inv
    elif quantized.scaling_t is not None:  # folded, those of the rows apply to the columns, too
        scale_inv_t = scale_inv_t * 2
    return quantized._replace(
        data=_halved(quantized.data, fp8), data_t=_halved(quantized.data_t, fp8),
        scale_inv=scale_inv, scale_inv_t=scale_inv_t,
    )  # fmt: skip


def _halved(data: Tensor, fnuz: torch.dtype) -> Tensor:
    """Return half of every value: the same bits, but for those that mean something else."""
    bits = data.view(torch.uint8)
    bits = torch.where(bits == _MINUS_ZERO, 0, bits)
    return torch.where(data.float().isfinite(), bits, _MINUS_ZERO).view(fnuz)  # NaN there
