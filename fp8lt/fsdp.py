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

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from . import device, ops
from .emulate import PAD, Scaling
from .fsdp_scales import amaxes_of, check_placements, scales_of
from .recipe import DynamicScaling, Recipe

if TYPE_CHECKING:  # these take half a second to import
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
PRECOMPUTED = "_fp8_gather_scale"  # an attribute of a layer, see fsdp_precompute.py
# What makes a shard of a weight: by `fully_shard` and `nn.Module`.
_STAYS = {
    aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default,
    aten.slice.Tensor, aten.split.Tensor, aten.clone.default, aten.empty_like.default,
    aten.new_zeros.default, aten._to_copy.default, aten._pin_memory.default,
}  # fmt: skip


class Writes:
    """How often the elements were written that some `ShardedWeight`s share.

    Not a tensor's version, which an optimizer's fused operators leave as it is for a DTensor.
    """

    def __init__(self) -> None:
        self.count = 0


class ShardedWeight(Tensor):
    """A weight, or a rank's shard of one, in its own precision; it is gathered in FP8.

    What is computed from it is a plain tensor.
    """

    shard: Tensor
    recipe: Recipe
    writes: Writes

    @staticmethod
    def __new__(cls, shard: Tensor, recipe: Recipe, writes: Writes | None = None) -> Any:
        self = _wrapper(cls, shard, shard.shape, shard.stride(), shard.dtype, shard.requires_grad)
        self.shard, self.recipe, self.writes = shard.detach(), recipe, writes or Writes()
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inference = torch.is_inference_mode_enabled()
        if inference and func not in _STAYS:  # there even a narrow comes as it is
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inner = pytree.tree_map_only(ShardedWeight, lambda t: t.shard, (args, kwargs))
        result = func(*inner[0], **inner[1])
        first = args[0] if args else None
        if func._schema.is_mutable:
            _count_writes(func, args, kwargs)
            return first if isinstance(first, ShardedWeight) else result
        # One dimension: what `fully_shard` knows memory by, and never gathers.
        flat = func is aten.view.default and result.dim() == 1
        if func not in _STAYS or flat or not isinstance(first, ShardedWeight):
            return result
        alias = func._schema.returns[0].alias_info is not None
        # `fully_shard` pads a shard that it has already by a copy into new zeros.
        writes = first.writes if alias or func is aten.new_zeros.default else None
        # An alias of what is no inference tensor is none either.
        with torch.inference_mode(inference and not (alias and not first.is_inference())):
            return pytree.tree_map_only(
                Tensor, lambda t: ShardedWeight(t, first.recipe, writes), result
            )

    def untyped_storage(self) -> torch.UntypedStorage:
        if TracingContext.try_get() is not None:  # the compiler keeps its own books of wrappers
            return super().untyped_storage()
        return self.shard.untyped_storage()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        shard = value.shard if isinstance(value, ShardedWeight) else value.detach()
        if (shard.shape, shard.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"fp8lt: want data {list(self.shape)} {self.dtype} for a weight that is gathered "
                f"in FP8, got {list(shard.shape)} {shard.dtype}"
            )
        self.shard = shard
        self.writes.count += 1

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["shard"], self.recipe

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], recipe: Recipe, size: Any, stride: Any
    ) -> "ShardedWeight":
        return ShardedWeight(inner["shard"], recipe)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.shard!r})"

    def fsdp_pre_all_gather(
        self,
        mesh: "DeviceMesh",
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], tuple[Tensor, int, bool]]:
        known: Any = vars(module).get(PRECOMPUTED)
        if known is None:
            data, scale_inv = self._under_common_scale(mesh, module.weight)
        else:
            known.check(module)
            data, scale_inv = known.together.rows(known.place, self), known.scale_inv
        (n, k), (rows, columns) = outer_size, self.shape
        if columns == k:  # sharded by rows: as many as the largest shard has
            rows = max(rows, math.ceil(n / mesh.size()))
        if data.shape != (rows, columns):
            data = data[: min(rows, len(data)), :columns].contiguous()
        data = data.view(torch.uint8)  # not every backend sends FP8, nor pads it
        if len(data) < rows:
            data = nn.functional.pad(data, (0, 0, 0, rows - len(data)))
        return (data,), (scale_inv, k, known is None)

    # `fully_shard` asks for it at every gather, and Python would derive it anew each time.
    fsdp_pre_all_gather.__signature__ = inspect.signature(  # type: ignore[attr-defined]
        fsdp_pre_all_gather
    )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor],
        metadata: tuple[Tensor, int, bool],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[()]] | None:
        (data,), (scale_inv, k, made_in_gather) = all_gather_outputs, metadata
        if made_in_gather and scale_inv.is_cuda:  # on the stream of copies; it is used on this one
            scale_inv.record_stream(torch.cuda.current_stream(scale_inv.device))
        data = data.view(-1, k)
        if out is not None:  # its rows are in the memory of `data`
            assert isinstance(out, GatheredWeight)
            out.scale_inv = scale_inv
            return None
        rows = data.view(self.recipe.forward_dtype(device.formats(data.device)))
        return GatheredWeight(rows, scale_inv, rows.shape, param_dtype), ()

    def _under_common_scale(self, mesh: "DeviceMesh", weight: Any) -> tuple[Tensor, Tensor]:
        check_placements(weight)
        amax = amaxes_of([self.shard], mesh)
        distributed.all_reduce(amax, distributed.ReduceOp.MAX, group=mesh.get_group())
        amaxes, (scale_inv,) = scales_of(amax, self.recipe, [weight])
        return cast([self], amaxes)[0], scale_inv


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
        if func is aten.as_strided.default and not any(args[3:]) and not kwargs:
            weight, size, stride, *_ = args
            assert isinstance(weight, GatheredWeight)
            if size[1:] == [weight.shape[1]] and list(stride) == [size[1], 1]:
                return weight._of(torch.Size(size))  # `fully_shard` cuts off the padding
        if func._schema.is_mutable:
            raise RuntimeError(
                f"fp8lt: {func} would be lost on a weight that was gathered in FP8: change the "
                "sharded one"
            )
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
        with torch.inference_mode(torch.is_inference_mode_enabled() and self.is_inference()):
            return GatheredWeight(self.rows, self.scale_inv, size, self.dtype)

    def dequantized(self) -> Tensor:
        return (self.rows[: len(self)].float() * self.scale_inv[0]).to(self.dtype)


def cast(shards: list[ShardedWeight], amaxes: Tensor) -> list[Tensor]:
    """Return them in FP8, with padding; amaxes: those of their wholes."""
    recipe, where = shards[0].recipe, shards[0].device
    return ops.quantize_shards(
        [shard.shard for shard in shards], recipe.forward_dtype(device.formats(where)), amaxes,
        power_of_two=recipe.power_of_two_scales, emulated=_emulated(shards[0], recipe),
    )  # fmt: skip


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


def quantized(weight: ShardedWeight | GatheredWeight) -> ops.Quantized:
    """Return a weight as a layer takes it. Of a gathered one backward makes the columns.

    A function, since Dynamo takes the call of a method for an operation of the graph.
    """
    if isinstance(weight, ShardedWeight):  # that nothing shards
        shard, recipe = weight.shard, weight.recipe
        return ops.quantize_tensorwise(
            shard, recipe.forward_dtype(device.formats(shard.device)),
            power_of_two=recipe.power_of_two_scales, emulated=_emulated(shard, recipe),
        )  # fmt: skip
    rows, scale_inv, tensorwise = weight.rows, weight.scale_inv, Scaling.TENSORWISE
    return ops.Quantized(
        rows[: weight.shape[0]], rows.new_empty(0, 0), scale_inv, scale_inv, scale_inv[:0],
        tensorwise, tensorwise,
    )  # fmt: skip


def _emulated(t: Tensor, recipe: Recipe) -> bool:
    return ops.backend(t.device, recipe.emulate, recipe.name).emulated


def _count_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    source = given.get("src")  # of a copy: of a shard into its own padding it changes nothing
    for argument in func._schema.arguments:
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        for t in pytree.tree_leaves(given.get(argument.name)):
            if isinstance(t, ShardedWeight):
                same = isinstance(source, ShardedWeight) and source.writes is t.writes
                t.writes.count += not same


def sharded(weight: object) -> ShardedWeight | None:
    """Return the shard of a parameter that is gathered in FP8, None of any other."""
    local = getattr(weight, "_local_tensor", weight)  # of a DTensor
    return local if isinstance(local, ShardedWeight) else None


def plain(weight: Tensor) -> Tensor:
    """Return a weight as a checkpoint has it, in the same memory."""
    shard = sharded(weight)
    return weight if shard is None else _with_local(weight, shard.shard)


def gathered_in_fp8(weight: Tensor, recipe: Recipe) -> Tensor:
    """Return a weight, or a DTensor of shards, that is gathered in FP8, in the same memory."""
    return _with_local(weight, ShardedWeight(getattr(weight, "_local_tensor", weight), recipe))


def _with_local(weight: Any, local: Tensor) -> Tensor:
    if not hasattr(weight, "_local_tensor"):
        return local
    from torch.distributed.tensor import DTensor

    result: Tensor = DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip
    return result


def why_not_in_fp8(weight: Tensor, recipe: Recipe) -> str | None:
    """Say why a weight cannot be gathered in FP8; None if it can."""
    if not isinstance(recipe, DynamicScaling):
        return f"recipe {recipe.name!r} has no scale of the whole weight alone"
    if not isinstance(weight, ShardedWeight) and any(n % PAD or not n for n in weight.shape):
        return f"its sizes {list(weight.shape)} are no multiples of {PAD}"
    return None
