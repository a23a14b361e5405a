"""Weights that FSDP2 gathers in FP8: a byte per element in place of two or four.

    shards, f32 or bf16      [N / world, K] on each rank      what the optimizer updates
    one amax                 over all shards                  precomputed, or by an all-reduce here
    shards in FP8            gathered                         [N, K] in FP8 on each rank
    y  = x @ w.T             the gathered rows
    dx = dy @ w              their transpose, made in backward

`fully_shard` asks a parameter how it is gathered (`fsdp_pre_all_gather`, `fsdp_post_all_gather`),
if its class says so. So the sharded weight is a tensor of a class of its own, and what comes out of
the gather of another. Every rank casts its shard under the scale of the whole weight, so the bytes
are those of a weight that is gathered first and quantised then.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree

from . import device, emulate, ops
from .emulate import PAD, Scaling, padded
from .recipe import DynamicScaling, Recipe

if TYPE_CHECKING:  # these take half a second to import
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
PRECOMPUTED = "_fp8_gather_scale"  # an attribute of a layer
# What makes a shard of a weight: by `fully_shard` and `nn.Module`.
_STAYS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default,
    aten.slice.Tensor, aten.split.Tensor, aten.clone.default, aten.empty_like.default,
    aten.new_zeros.default, aten._to_copy.default, aten._pin_memory.default,
}  # fmt: skip


class ShardedWeight(Tensor):
    """A weight, or a rank's shard of one, in its own precision; it is gathered in FP8.

    What is computed from it is a plain tensor.
    """

    shard: Tensor
    recipe: Recipe

    @staticmethod
    def __new__(cls, shard: Tensor, recipe: Recipe) -> "ShardedWeight":
        self = _wrapper(cls, shard, shard.shape, shard.stride(), shard.dtype, shard.requires_grad)
        self.shard, self.recipe = shard.detach(), recipe
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recipes: list[Recipe] = []

        def unwrapped(t: ShardedWeight) -> Tensor:
            recipes.append(t.recipe)
            return t.shard

        inner = pytree.tree_map_only(ShardedWeight, unwrapped, (args, kwargs or {}))
        result = func(*inner[0], **inner[1])
        if func._schema.is_mutable:
            return args[0] if isinstance(args[0], ShardedWeight) else result
        if func not in _STAYS:
            return result
        return pytree.tree_map_only(Tensor, lambda t: ShardedWeight(t, recipes[0]), result)

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["shard"], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], recipe: Recipe, size: Any, stride: Any
    ) -> "ShardedWeight":
        return ShardedWeight(inner["shard"], recipe)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.shard!r})"

    def quantized(self) -> ops.Quantized:
        """Return all of it in FP8, where nothing shards it."""
        return ops.quantize_tensorwise(
            self.shard, self.recipe.forward_dtype(device.formats(self.device)),
            power_of_two=self.recipe.power_of_two_scales, emulated=self._emulated(),
        )  # fmt: skip

    def fsdp_pre_all_gather(
        self,
        mesh: "DeviceMesh",
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        amax, scale_inv = _precomputed(module) or self._common_scale(mesh)
        q = ops.quantize_delayed(
            self.shard, self.recipe.forward_dtype(device.formats(self.device)),
            torch.cat([amax, amax.new_tensor([0, 1])]), record=False, transposed=False,
            power_of_two=self.recipe.power_of_two_scales, emulated=self._emulated(),
        )  # fmt: skip
        rows = math.ceil(outer_size[0] / mesh.size())  # of the largest shard
        # As bytes: not every backend sends FP8, nor pads it.
        shard = q.data[: min(rows, len(q.data))].view(torch.uint8)
        if len(shard) < rows:
            shard = nn.functional.pad(shard, (0, 0, 0, rows - len(shard)))
        longest = max(*map(padded, outer_size), PAD)
        return (shard,), (scale_inv.expand(longest).contiguous(),)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor],
        metadata: tuple[Tensor],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]] | None:
        (data,), (scale_inv,) = all_gather_outputs, metadata
        if out is not None:  # its rows are in the memory of `data`
            assert isinstance(out, GatheredWeight)
            out.scale_inv = scale_inv
            return None
        rows = data.view(self.recipe.forward_dtype(device.formats(data.device)))
        return GatheredWeight(rows, scale_inv, rows.shape, param_dtype), ()

    def _common_scale(self, mesh: "DeviceMesh") -> tuple[Tensor, Tensor]:
        amax = _amaxes([self.shard])
        distributed.all_reduce(amax, distributed.ReduceOp.MAX, group=mesh.get_group())
        return amax, _scales_inv(amax, self.recipe, self.device)

    def _emulated(self) -> bool:
        return ops.backend(self.device, self.recipe.emulate, self.recipe.name).emulated


class GatheredWeight(Tensor):
    """A weight [N, K] that was gathered in FP8. Elsewhere than in a layer it is dequantised."""

    rows: Tensor  # fp8 [N or more, K]
    scale_inv: Tensor  # f32 [S], the one number

    @staticmethod
    def __new__(
        cls, rows: Tensor, scale_inv: Tensor, size: torch.Size, dtype: torch.dtype
    ) -> "GatheredWeight":
        self = _wrapper(cls, rows, size, (size[1], 1), dtype)
        self.rows, self.scale_inv = rows, scale_inv
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._of(args[0].shape)
        if func is aten.as_strided.default:
            weight, size, stride, *_ = args
            assert isinstance(weight, GatheredWeight)
            if size[1:] == [weight.shape[1]] and list(stride) == [size[1], 1]:
                return weight._of(torch.Size(size))  # `fully_shard` cuts off the padding
        args, kwargs = pytree.tree_map_only(
            GatheredWeight, GatheredWeight.dequantized, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any
    ) -> "GatheredWeight":
        return GatheredWeight(inner["rows"], inner["scale_inv"], size, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({list(self.shape)}, {self.rows.dtype}, {self.dtype})"

    def _of(self, size: torch.Size) -> "GatheredWeight":
        return GatheredWeight(self.rows, self.scale_inv, size, self.dtype)

    def quantized(self) -> ops.Quantized:
        """Return it as a layer takes it; backward makes the transposed copy."""
        nothing, tensorwise = self.rows.new_empty(0, 0), Scaling.TENSORWISE
        return ops.Quantized(
            self.rows[: len(self)], nothing, self.scale_inv, self.scale_inv, self.scale_inv[:0],
            tensorwise, tensorwise,
        )  # fmt: skip

    def dequantized(self) -> Tensor:
        return (self.rows[: len(self)].float() * self.scale_inv[0]).to(self.dtype)


class _Precomputed(NamedTuple):
    """The scale of a layer's weight, until that changes. With the layer, not with the shard: of
    that, `fully_shard` makes another, on some ranks.
    """

    version: int
    amax: Tensor  # f32 [1]
    scale_inv: Tensor


def _precomputed(layer: nn.Module) -> tuple[Tensor, Tensor] | None:
    known = vars(layer).get(PRECOMPUTED)
    if known is None:
        return None
    if known.version != layer.weight._version:
        # Not a reduction here: ranks that see this differently would wait for each other for ever.
        raise RuntimeError(
            "fp8lt: a weight that is gathered in FP8 was changed after its scale was computed: "
            "call precompute_float8_dynamic_scale_for_fsdp after each change, on all ranks"
        )
    return known.amax, known.scale_inv


def _wrapper(
    cls: Any,
    inner: Tensor,
    size: torch.Size,
    stride: Any,
    dtype: torch.dtype,
    requires_grad: bool = False,
) -> Any:
    return Tensor._make_wrapper_subclass(
        cls, size, strides=stride, dtype=dtype, device=inner.device, requires_grad=requires_grad
    )


def _amaxes(shards: Iterable[Tensor]) -> Tensor:
    """Return the amax of each shard, f32; a NaN, which a reduction may lose, as Inf."""
    amaxes = [
        t.abs().amax().float() if t.numel() else t.new_zeros((), dtype=torch.float32)
        for t in shards
    ]
    return torch.stack(amaxes).nan_to_num(nan=math.inf, posinf=math.inf)


def _scales_inv(amaxes: Tensor, recipe: Recipe, where: torch.device) -> Tensor:
    dtype = recipe.forward_dtype(device.formats(where))
    return emulate.scale_from_amax(amaxes, dtype, recipe.power_of_two_scales).reciprocal()


def sharded(weight: object) -> ShardedWeight | None:
    """Return the shard of a parameter that is gathered in FP8, None of any other."""
    local = getattr(weight, "_local_tensor", weight)  # of a DTensor
    return local if isinstance(local, ShardedWeight) else None


def plain(weight: Tensor) -> Tensor:
    """Return a weight as a checkpoint has it, in the same memory."""
    shard = sharded(weight)
    if shard is None:
        return weight
    if shard is weight:
        return shard.shard
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    return DTensor.from_local(
        shard.shard, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip


def why_not_in_fp8(weight: Tensor, recipe: Recipe) -> str | None:
    """Say why a weight cannot be gathered in FP8; None if it can."""
    if not isinstance(recipe, DynamicScaling):
        return f"recipe {recipe.name!r} has no scale of the whole weight alone"
    if not isinstance(weight, ShardedWeight) and any(n % PAD or not n for n in weight.shape):
        return f"its sizes {list(weight.shape)} are no multiples of {PAD}"
    return None


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in FP8, in one all-reduce.

    To be called after each `optimizer.step()`, and whatever else changes weights, on all ranks: a
    gather of a weight that has changed since is an error. Without any call every gather reduces an
    amax of its own. Nobody sees a change through `weight.data`.

    Raises RuntimeError where a weight is not sharded just now: between forward and backward.

    Example:
        >>> model = nn.Sequential(fp8lt.Linear(16, 16))
        >>> fp8lt.precompute_float8_dynamic_scale_for_fsdp(model)  # nothing is sharded: no effect
    """
    groups: dict[Any, list[nn.Module]] = {}
    for name, layer in module.named_modules():
        weight: Any = layer._parameters.get("weight")
        if isinstance(weight, GatheredWeight):
            raise RuntimeError(
                "precompute_float8_dynamic_scale_for_fsdp: want sharded weights, but "
                f"that of {name!r} is gathered: call it after optimizer.step(), or reshard() first"
            )
        shard = sharded(weight)
        if shard is not None and shard is not weight:
            groups.setdefault((weight.device_mesh, shard.recipe), []).append(layer)
    for (mesh, recipe), layers in groups.items():
        weights: list[Any] = [layer.weight for layer in layers]
        amaxes = _amaxes(weight._local_tensor.shard for weight in weights)
        distributed.all_reduce(amaxes, distributed.ReduceOp.MAX, group=mesh.get_group())
        scales_inv = _scales_inv(amaxes, recipe, amaxes.device)
        scales = zip(amaxes.split(1), scales_inv.split(1), strict=True)
        for layer, weight, scale in zip(layers, weights, scales, strict=True):
            setattr(layer, PRECOMPUTED, _Precomputed(weight._version, *scale))
