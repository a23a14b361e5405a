"""Modules: convert a model's `nn.Linear` layers to FP8, and back.

Conversion changes a module's class and gives it a recipe, nothing else. So parameters, buffers,
hooks, names, flags, ties and optimizers made before are the same objects as before, no memory is
allocated, and checkpoints are those of the plain model.

The recipe "delayed" adds a state (`state.py`), the buffer `fp8_state`. It is no key of a state
dict, so that plain layers and converted ones load each other's; it rides in the dict's `_metadata`,
which `torch.save` and `load_state_dict` know. For what keeps keys alone (a dict put together by
hand, DCP, safetensors) there is `delayed_state_dict`.
"""

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from . import tensor_parallel
from .autocast import in_high_precision
from .config import Float8LinearConfig
from .fsdp import (
    PRECOMPUTED,
    GatheredWeight,
    ShardedWeight,
    gathered_in_fp8,
    plain,
    quantized,
    sharded,
    why_not_in_fp8,
)
from .linear import check, quantize_weight, run
from .ops import Quantized
from .recipe import DelayedScaling, Recipe, resolve
from .state import DelayedState, reduce_over_ranks, resized, zeros

_STATE = "fp8_state"  # the buffer of delayed scaling, and its name in metadata
_CONTEXT_STATE = ("_fp8_disabled", "_weight_cache", PRECOMPUTED)


class Linear(nn.Linear):
    """`nn.Linear` that computes `y = x @ weight.T + bias` with FP8 operands.

    Args: those of `nn.Linear`, and
        recipe: "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "rowwise_folded",
            "blockwise", or a recipe object (`DynamicScaling`, `DelayedScaling`, `RowwiseScaling`,
            `BlockScaling`). It may be assigned later, too; a state then starts anew.

    Attributes:
        fuse_wgrad_accumulation: whether backward adds dw to `weight.main_grad`, f32, instead of
            `weight.grad`; False at first. See `linear` on `main_grad`.

    Example:
        >>> layer = fp8lt.Linear(64, 32)
        >>> layer(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 32])
    """

    fp8_state: Tensor  # f32 [3, H + 2], of a delayed recipe
    fuse_wgrad_accumulation = False
    _recipe: Recipe
    _plain_class: type[nn.Linear] = nn.Linear  # what `revert` turns this module into
    _fp8_disabled = 0  # counted on the instance, by `disable_fp8` alone
    _weight_cache: "_WeightCache | None" = None  # likewise by `reuse_weights`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "tensorwise",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = resolve(recipe)

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: str | Recipe) -> None:
        recipe = resolve(recipe)
        weight = self._parameters.get("weight")
        if isinstance(weight, GatheredWeight):
            raise RuntimeError("recipe: the weight is gathered in FP8 just now; reshard() first")
        shard = sharded(weight)
        if shard is not None:
            reason = why_not_in_fp8(shard, recipe)
            if reason is not None:
                raise ValueError(f"recipe: the weight is gathered in FP8, but {reason}")
            shard.recipe = recipe
            vars(self).pop(PRECOMPUTED, None)
        self._recipe = recipe
        _drop_state(self)
        if isinstance(self._recipe, DelayedScaling):
            amaxes = zeros(self._recipe, self.weight.device)
            self.register_buffer(_STATE, amaxes, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self._fp8_disabled:
            with in_high_precision():
                return self._plain_forward(input)
        weight, bias = self.weight, self.bias
        check(input, weight, bias)
        if isinstance(weight, (GatheredWeight, ShardedWeight)):
            return self._run(input, weight, bias, quantized(weight))
        if type(weight).__name__ == "DTensor":  # whose import would take half a second
            return tensor_parallel.linear(input, weight, bias, self._run)
        return self._run(input, weight, bias)

    def _run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w_quantized: Quantized | None = None,
    ) -> Tensor:
        recipe = self._recipe
        state = DelayedState.of(_state_of(self)) if isinstance(recipe, DelayedScaling) else None
        cache = None if torch.compiler.is_compiling() else self._weight_cache
        if w_quantized is None and cache is not None:
            transposed = torch.is_grad_enabled() and input.requires_grad
            w_quantized = cache.get(weight, recipe, transposed, state)
        main_grad = _main_grad(weight) if self.fuse_wgrad_accumulation else None
        return run(input, weight, bias, w_quantized, recipe, None, state, main_grad)

    def _plain_forward(self, input: Tensor) -> Tensor:
        if self._plain_class is nn.Linear:
            return super().forward(input)
        plain = object.__new__(self._plain_class)  # the same layer as one of its own class,
        plain.__dict__ = self.__dict__  # which its super() calls need
        return plain.forward(input)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if _STATE in self._buffers:
            _state_of(self).zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        before = _state_of(self) if _STATE in self._buffers else None
        super()._apply(fn, recurse)
        if before is not None and self.fp8_state is not before:
            # Its device is new; not its dtype (bfloat16()), nor what it holds (to_empty()).
            self._buffers[_STATE] = _to(before, self.fp8_state.device)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = destination.get(prefix + "weight")
        if weight is not None and not keep_vars:
            destination[prefix + "weight"] = plain(weight)
        metadata = getattr(destination, "_metadata", None)
        if _STATE in self._buffers and metadata is not None:
            metadata[prefix[:-1]][_STATE] = _state_of(self).detach().clone()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *others: Any,
    ) -> None:
        before = sharded(self._parameters.get("weight"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if before is not None and sharded(self.weight) is None:  # assigned, not copied
            again = gathered_in_fp8(self.weight.detach(), before.recipe)
            self.weight = nn.Parameter(again, self.weight.requires_grad)
        if _STATE in self._buffers:
            # With assign=True the weight may have come to another device, from meta for example.
            self._buffers[_STATE] = _to(_state_of(self), self.weight.device)
            if _STATE in local_metadata:
                _restore(self, prefix + _STATE, local_metadata[_STATE])
            elif prefix + "weight" in state_dict and not self.fp8_state.is_meta:
                self.fp8_state.zero_()  # amaxes of other weights, of what other layers make of x

    def __getstate__(self) -> dict[str, Any]:
        # A copy outlives the contexts that it was made in: nothing would ever end them for it.
        return {name: value for name, value in vars(self).items() if name not in _CONTEXT_STATE}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    convert_subclasses: bool = False,
) -> nn.Module:
    """Turn the `nn.Linear` layers of `module` into `fp8lt.Linear`, in place; return `module`.

    torchao's signature and meaning, with these differences: it is the same module object also when
    the root itself is a linear layer; layers already converted are left alone; a subclass of
    `nn.Linear` is left alone unless asked for, since its own forward would be lost. Code that reads
    a layer's weight instead of calling it stays in high precision: `nn.MultiheadAttention`, and
    `nn.TransformerEncoderLayer` in evaluation without gradients.

    Args:
        module: any module, on any device, `meta` too.
        config: a `Float8LinearConfig`, a recipe object, or a name: "tensorwise" (default),
            "delayed", "rowwise", "rowwise_with_gw_hp", "rowwise_folded", "blockwise".
        module_filter_fn: called with (layer, its qualified name, "" for the root) for every layer
            that could be converted; those for which it returns False stay as they are.
        convert_subclasses: also convert subclasses of `nn.Linear`; `forward` becomes
            `fp8lt.Linear`'s until `revert`.
    """
    recipe, converted = _recipe(config), 0
    left: set[str] = set()  # names of subclasses
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: want an nn.Module, got {type(module).__name__}")
    for name, layer in module.named_modules():
        plain: type[nn.Module] = type(layer)
        if not issubclass(plain, nn.Linear):
            continue
        if issubclass(plain, Linear):
            converted += 1
            continue
        if plain is not nn.Linear and not convert_subclasses:
            left.add(plain.__name__)
            continue
        if module_filter_fn is not None and not module_filter_fn(layer, name):
            continue
        layer.__class__ = Linear
        layer.recipe = recipe
        converted += 1
        if plain is not nn.Linear:
            layer._plain_class = plain
    if isinstance(config, Float8LinearConfig) and config.enable_fsdp_float8_all_gather:
        enable_fsdp_float8_all_gather(module)
    if not converted:
        reason = "no nn.Linear passed the filter"
        if left:
            reason += (
                f", and subclasses are left alone ({', '.join(sorted(left))}): convert before "
                "`fully_shard` and the like make them, or with convert_subclasses=True"
            )
        warnings.warn(f"fp8lt: no layer was converted: {reason}", stacklevel=2)
    return module


def enable_fsdp_float8_all_gather(module: nn.Module) -> nn.Module:
    """Let FSDP2 gather the weights of converted layers in FP8; return `module`.

    To be called before `fully_shard`, and before an optimizer is made: the weights become
    parameters of a class of their own. State dicts have plain tensors as before. Layers stay as
    they are, and a warning names them, where a weight has other users, the recipe is not
    "tensorwise", or sizes are no multiples of 16.

    Raises RuntimeError where a weight is sharded already.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
        >>> model = fp8lt.enable_fsdp_float8_all_gather(model)  # now fully_shard(model)
    """
    users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    layers = {name: m for name, m in module.named_modules() if isinstance(m, Linear)}
    left: dict[str, str] = {}
    for name, layer in layers.items():
        if "weight" not in layer._parameters:
            left[name] = "it is computed (a parametrization)"
            continue
        weight = layer.weight
        if sharded(weight) is not None:
            continue
        if type(weight) is not nn.Parameter:
            raise RuntimeError(
                f"enable_fsdp_float8_all_gather: want plain weights, got one of {name!r} that is a "
                f"{type(weight).__name__}: call it before fully_shard"
            )
        reason = why_not_in_fp8(weight, layer.recipe)
        if users[id(weight)] > 1:
            reason = "it has other users"
        if reason:
            left[name] = reason
            continue
        again = gathered_in_fp8(weight.detach(), layer.recipe)
        layer.weight = nn.Parameter(again, weight.requires_grad)
    if left or not layers:
        told = "; ".join(f"{name!r}: {reason}" for name, reason in left.items())
        warnings.warn(
            "fp8lt: these weights are gathered in their own precision: "
            f"{told or 'all, no layer is converted'}",
            stacklevel=2,
        )
    return module


def revert(module: nn.Module) -> nn.Module:
    """Undo `convert_to_float8_training` in place; return `module`.

    `fp8lt.Linear` layers that were built as such become `nn.Linear`.

    Raises:
        RuntimeError: a layer's class derives from `fp8lt.Linear` (a subclass, a parametrization, a
            wrapper such as FSDP2's), so its plain class is unknown. Nothing is changed then.
    """
    layers = {name: m for name, m in module.named_modules() if isinstance(m, Linear)}
    for name, layer in layers.items():
        if type(layer) is not Linear:
            raise RuntimeError(
                f"revert: layer {name!r} is a {type(layer).__name__}, derived from fp8lt.Linear; "
                "undo what wraps it first, or use fp8lt.disable_fp8"
            )
        weight = layer._parameters.get("weight")
        shard = sharded(weight)
        if isinstance(weight, GatheredWeight) or (shard is not None and shard is not weight):
            raise RuntimeError(
                f"revert: the weight of layer {name!r} is sharded, and gathered in FP8; use "
                "fp8lt.disable_fp8"
            )
    for layer in layers.values():
        if sharded(layer._parameters.get("weight")) is not None:
            of_plain = plain(layer.weight)
            layer.weight = nn.Parameter(of_plain, layer.weight.requires_grad)
        plain_class = layer._plain_class
        _drop_state(layer)
        for attribute in ("_recipe", "_plain_class", *_CONTEXT_STATE):
            vars(layer).pop(attribute, None)
        layer.__class__ = plain_class  # type: ignore[assignment] # that is how it is undone
    return module


def delayed_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of every layer of recipe "delayed", by name: copies, f32 [3, H + 2].

    For savers that keep the keys of a state dict alone. `module.state_dict()` has the state as
    well, in its `_metadata`.

    Example:
        >>> model = nn.Sequential(fp8lt.Linear(8, 8, recipe="delayed"))
        >>> saved = fp8lt.delayed_state_dict(model)
        >>> list(saved)
        ['0.fp8_state']
        >>> fp8lt.load_delayed_state_dict(model, saved)
    """
    return {name: _state_of(m).detach().clone() for name, m in _with_state(module).items()}


def load_delayed_state_dict(module: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Restore what `delayed_state_dict` returned for a model with the same names.

    A history of another length is resized: the most recent entries are kept.

    Raises:
        ValueError: other names than those of `module`, or a tensor that is no state. Nothing is
            changed if names do not fit.
    """
    layers = _with_state(module)
    if layers.keys() != states.keys():
        missing = sorted(layers.keys() - states.keys())
        unexpected = sorted(states.keys() - layers.keys())
        raise ValueError(f"states: missing {missing}, unexpected {unexpected}")
    for name, layer in layers.items():
        _restore(layer, name, states[name])


def reduce_amaxes(module: nn.Module, group: "distributed.ProcessGroup | None" = None) -> None:
    """Give the ranks of a group the same amax histories: of each entry the largest.

    For the recipe "delayed", once a step, on all ranks of `group` (None: all there are), whether or
    not a layer has run on them: one reduction for all layers of `module`. Entries belong together
    by their age. A module without histories takes part in nothing, so it has to be the same module
    on all ranks.

    Example:
        >>> fp8lt.reduce_amaxes(nn.Sequential(fp8lt.Linear(8, 8)))  # no history: no effect
    """
    states = [_state_of(layer) for layer in _with_state(module).values()]
    if states:
        reduce_over_ranks(states, group)


def _with_state(module: nn.Module) -> dict[str, Linear]:
    return {
        f"{name}.{_STATE}" if name else _STATE: layer
        for name, layer in module.named_modules()
        if isinstance(layer, Linear) and _STATE in layer._buffers
    }


def _state_of(layer: Linear) -> Tensor:
    """Return the state: this rank's own, though `parallelize_module` makes DTensors of buffers."""
    state: Any = layer._buffers[_STATE]
    if type(state).__name__ == "DTensor":
        state = state._local_tensor
        if not torch.compiler.is_compiling():
            layer._buffers[_STATE] = state
    return state


def _drop_state(layer: Linear) -> None:
    layer._buffers.pop(_STATE, None)
    layer._non_persistent_buffers_set.discard(_STATE)


def _restore(layer: Linear, name: str, saved: Tensor) -> None:
    try:
        amaxes = resized(saved, layer.fp8_state.shape[1] - 2)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not layer.fp8_state.is_meta:
        _state_of(layer).copy_(amaxes)


def _main_grad(weight: Tensor) -> Tensor:
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "fuse_wgrad_accumulation: want a tensor weight.main_grad, "
            f"{list(weight.shape)} float32 on {weight.device}, got none"
        )
    return main_grad


def _to(amaxes: Tensor, where: torch.device) -> Tensor:
    """Move a state; one that was on meta holds nothing yet."""
    moves_in = amaxes.is_meta and where.type != "meta"
    return torch.zeros_like(amaxes, device=where) if moves_in else amaxes.to(where)


@contextlib.contextmanager
def disable_fp8(module: nn.Module) -> Iterator[nn.Module]:
    """Run `module` in high precision inside the `with`, for evaluation; for all threads.

    Every `fp8lt.Linear` in it computes as the plain layer meanwhile. Contexts may nest, and FP8
    comes back when one is left by an exception.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
        >>> x = torch.randn(3, 8)
        >>> with fp8lt.disable_fp8(model):
        ...     torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))
        True
    """
    layers = [m for m in module.modules() if isinstance(m, Linear)]
    _count_disabled(layers, +1)
    try:
        yield module
    finally:
        _count_disabled(layers, -1)


_disabling = threading.Lock()


def _count_disabled(layers: list[Linear], change: int) -> None:
    # Counted: contexts of two threads need not end in the order in which they began.
    with _disabling:
        for layer in layers:
            count = vars(layer).get("_fp8_disabled", 0) + change
            if count > 0:
                layer._fp8_disabled = count
            else:  # also where `revert` took the count away meanwhile
                vars(layer).pop("_fp8_disabled", None)


@contextlib.contextmanager
def reuse_weights(module: nn.Module) -> Iterator[nn.Module]:
    """Quantise every weight of `module` once inside the `with`, instead of at every call.

    For the micro-batches of one optimizer step, and for inference. It keeps one or two bytes per
    weight until the `with` is left. A weight that is replaced, or changed in place so that autograd
    counts it (an optimizer step, `load_state_dict`, `copy_` under `no_grad`), is quantised anew.
    Not seen is a change in place through `weight.data`, or of memory that is reused behind a
    parameter (FSDP): leave the `with` for that. Under `torch.compile` nothing is reused.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
        >>> with fp8lt.reuse_weights(model):
        ...     for _ in range(4):
        ...         model(torch.randn(3, 8)).sum().backward()
    """
    layers = [m for m in module.modules() if isinstance(m, Linear) and m._weight_cache is None]
    for layer in layers:
        layer._weight_cache = _WeightCache()
    try:
        yield module
    finally:
        for layer in layers:
            vars(layer).pop("_weight_cache", None)


class _WeightCache:
    """A weight in FP8, as long as it is the same weight."""

    # One attribute, so that threads see all of it or none. It holds the weight itself: the address
    # of one that is computed for each call (a parametrization) would soon be another's.
    _held: tuple[Tensor, tuple[object, ...], Quantized] | None = None

    def get(
        self, weight: Tensor, recipe: Recipe, transposed: bool, state: DelayedState | None
    ) -> Quantized | None:
        """Return `weight` quantised, or None where that must not be kept.

        Not where a change of it could not be seen, nor while a CUDA graph is captured: its memory
        is the graph's. What another stream quantised may not be ready on this one.
        """
        if weight.is_inference() or weight.is_meta:
            return None
        stream = 0
        if weight.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                return None
            # torch.cuda.current_stream makes an object, which takes as long as a kernel launch.
            stream = torch._C._cuda_getCurrentRawStream(weight.get_device())
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.shape, stream, recipe)
        if self._held is not None:
            of_weight, of_key, held = self._held
            complete = not transposed or bool(held.data_t.numel())
            if of_weight is weight and of_key == key and complete:
                return held
        quantized = quantize_weight(weight, recipe=recipe, transposed=transposed, state=state)
        self._held = (weight, key, quantized)
        return quantized


def _recipe(config: Float8LinearConfig | Recipe | str | None) -> Recipe:
    if config is None:
        return resolve("tensorwise")
    if isinstance(config, Float8LinearConfig):
        return config.recipe()
    try:
        return resolve(config)
    except TypeError:
        raise TypeError(
            "config: want a fp8lt.Float8LinearConfig, a recipe or its name, got "
            f"{type(config).__module__}.{type(config).__qualname__}"
        ) from None
