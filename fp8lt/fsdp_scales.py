"""The scales of weights that FSDP2 gathers in FP8: one each, of the amaxes of all its shards."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import device, emulate
from .emulate import PAD, padded
from .recipe import Recipe

if TYPE_CHECKING:  # these take half a second to import
    from torch.distributed.device_mesh import DeviceMesh


def check_placements(weight: Any) -> None:
    """Raise RuntimeError for a weight that is sharded twice."""
    if sum(placement.is_shard() for placement in weight.placements) > 1:
        raise RuntimeError(
            "fp8lt: weights of tensor-parallel layers are not gathered in FP8: leave them out "
            "of enable_fsdp_float8_all_gather"
        )


def amaxes_of(shards: list[Tensor], mesh: "DeviceMesh") -> Tensor:
    """Return the amax of each shard, f32; a NaN, which a reduction may lose, as Inf.

    Where the mesh is: a shard may be offloaded.
    """
    parts = [t if t.numel() else t.new_zeros(1) for t in shards]  # of nothing there is no amax
    if all(t.is_cuda for t in parts):
        # The infinity norm is the amax: one launch for many shards. On a CPU it is slow.
        found = list(torch._foreach_norm(parts, math.inf, dtype=torch.float32))
    else:
        found = [t.abs().amax().float() for t in parts]
        if len({t.device for t in found}) > 1:
            found = [t.to(mesh.device_type) for t in found]
    amaxes = torch.stack(found).nan_to_num(nan=math.inf, posinf=math.inf)
    # Not `to` for all: without a number it means the current GPU, which may be another.
    return amaxes if amaxes.device.type == mesh.device_type else amaxes.to(mesh.device_type)


def scales_of(
    amaxes: Tensor, recipe: Recipe, weights: Iterable[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return what `ops.quantize_shards` wants of the amaxes, and a `scale_inv` for each weight.

    See `ops.quantize_tensorwise` for the latter. Each has memory of its own, since a gathered
    weight keeps it.
    """
    known = torch.stack([amaxes, torch.zeros_like(amaxes), torch.ones_like(amaxes)], 1)
    dtype = recipe.forward_dtype(device.formats(amaxes.device))
    scales = emulate.scale_from_amax(amaxes, dtype, recipe.power_of_two_scales)
    lengths = [max(PAD, *map(padded, weight.shape)) for weight in weights]
    numbers = scales.reciprocal().split(1)
    return known, [
        number.expand(length).contiguous() for number, length in zip(numbers, lengths, strict=True)
    ]
