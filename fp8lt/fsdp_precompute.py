"""The scales of all weights that FSDP2 gathers in FP8, made together, and the casts under them."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from .fsdp import PRECOMPUTED, GatheredWeight, ShardedWeight, Writes, cast, sharded
from .fsdp_scales import amaxes_of, check_placements, scales_of


class Together:
    """Layers whose weights one `fully_shard` gathers.

    All shards are cast when the first is asked for: one call for a block takes less of the host's
    time. The others wait until they are asked for, by the same gather.
    """

    def __init__(self, layers: list[nn.Module], amaxes: Tensor) -> None:
        self.layers = [weakref.ref(layer) for layer in layers]  # they know this object
        self.amaxes = amaxes  # f32 [layers, 3], see `ops.quantize_shards`
        self.waiting: dict[int, Tensor] = {}
        self.stream: Any = None  # on which they were cast

    def rows(self, place: int, shard: ShardedWeight) -> Tensor:
        """Return the shard of the layer at that place in FP8."""
        stream = torch.cuda.current_stream(shard.device) if shard.is_cuda else None
        if place not in self.waiting or stream != self.stream:
            layers = [layer() for layer in self.layers]
            shards = [each for each in map(self._shard_of, layers) if each is not None]
            # An offloaded one comes as a copy, and the others are not here yet.
            if len(shards) < len(layers) or shards[place] is not shard:
                return cast([shard], self.amaxes[place : place + 1])[0]
            self.waiting = dict(enumerate(cast(shards, self.amaxes)))
            self.stream = stream
        return self.waiting.pop(place)

    def _shard_of(self, layer: nn.Module | None) -> ShardedWeight | None:
        """Return a layer's shard, if it is still to be cast under the amax that is known here."""
        known: Precomputed | None = None if layer is None else vars(layer).get(PRECOMPUTED)
        if layer is None or known is None or known.together is not self:
            return None
        return sharded(layer.weight)


class Precomputed(NamedTuple):
    """The scale of a layer's weight, until that changes. With the layer, not with the shard: of
    that, `fully_shard` makes another, on some ranks.
    """

    writes: Writes
    number: int  # of them, then
    scale_inv: Tensor  # f32 [S], see `ops.quantize_tensorwise`
    together: Together
    place: int  # of the layer there

    def check(self, layer: nn.Module) -> None:
        """Raise RuntimeError if the weight has changed since."""
        shard = sharded(layer.weight)
        if shard is None or shard.writes is not self.writes or shard.writes.count != self.number:
            # Not a reduction here: ranks that see this differently would wait for each other.
            raise RuntimeError(
                "fp8lt: a weight that is gathered in FP8 was changed after its scale was computed: "
                "call precompute_float8_dynamic_scale_for_fsdp after each change, on all ranks"
            )


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in FP8, in one all-reduce for a mesh.

    To be called after each `optimizer.step()`, and whatever else changes weights, on all ranks, and
    on the stream that the model runs on: a gather of a weight that has changed since is an error.
    Without any call every gather reduces an amax of its own. Nobody sees what is written into the
    tensors of a state dict. If you use `FSDPModule.set_post_optim_event`, record its event after
    this call.

    Raises RuntimeError where a weight is not sharded just now: between forward and backward.

    Example:
        >>> model = nn.Sequential(fp8lt.Linear(16, 16))
        >>> fp8lt.precompute_float8_dynamic_scale_for_fsdp(model)  # nothing is sharded: no effect
    """
    # No inference tensors: training goes on with them.
    with torch.inference_mode(False), torch.no_grad():
        _precompute(module)


def _precompute(module: nn.Module) -> None:
    groups: dict[Any, dict[str, nn.Module]] = {}
    for name, layer in module.named_modules():
        weight: Any = layer._parameters.get("weight")
        if isinstance(weight, GatheredWeight):
            raise RuntimeError(
                "precompute_float8_dynamic_scale_for_fsdp: want sharded weights, but "
                f"that of {name!r} is gathered: call it after optimizer.step(), or reshard() first"
            )
        shard = sharded(weight)
        if shard is not None and shard is not weight:
            key = weight.device_mesh, weight.placements, shard.recipe
            groups.setdefault(key, {})[name] = layer
    for (mesh, placements, recipe), layers in groups.items():
        units = _units(module, layers)
        weights: list[Any] = [users[0].weight for unit in units for users in unit]
        check_placements(weights[0])
        amaxes = amaxes_of([weight._local_tensor.shard for weight in weights], mesh)
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                group = mesh.get_group(dim)
                distributed.all_reduce(amaxes, distributed.ReduceOp.MAX, group=group)
        known, scales_inv = scales_of(amaxes, recipe, weights)
        done = 0
        for unit in units:
            together = Together([users[0] for users in unit], known[done : done + len(unit)])
            for place, users in enumerate(unit):
                writes = weights[done]._local_tensor.writes
                precomputed = Precomputed(writes, writes.count, scales_inv[done], together, place)
                for layer in users:
                    vars(layer)[PRECOMPUTED] = precomputed
                done += 1


def _units(module: nn.Module, layers: dict[str, nn.Module]) -> list[list[list[nn.Module]]]:
    """Divide layers by which module of a model gathers their weights, then by the weight."""
    from torch.distributed.fsdp import FSDPModule

    gatherers = {name for name, each in module.named_modules() if isinstance(each, FSDPModule)}
    units: dict[str, dict[int, list[nn.Module]]] = {}
    unit_of: dict[int, dict[int, list[nn.Module]]] = {}  # a tied weight is gathered once
    for name, layer in layers.items():
        while name and name not in gatherers:
            name = name.rpartition(".")[0]
        weight = id(layer.weight)
        unit = unit_of.setdefault(weight, units.setdefault(name, {}))
        unit.setdefault(weight, []).append(layer)
    return [list(unit.values()) for unit in units.values() if unit]
