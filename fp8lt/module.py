"""The module: `nn.Linear` in FP8, its state, and what a checkpoint has of it.

The recipe "delayed" adds a state (`state.py`), the buffer `fp8_state`. It is no key of a state
dict, so that plain layers and converted ones load each other's; it rides in the dict's `_metadata`,
which `torch.save` and `load_state_dict` know. For what keeps keys alone (a dict put together by
hand, DCP, safetensors) there is `delayed_state_dict`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from . import tensor_parallel
from .autocast import in_high_precision
from .checks import check
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
from .linear import run
from .ops import Quantized
from .recipe import DelayedScaling, Recipe, resolve
from .state import DelayedState, reduce_over_ranks, resized, zeros
from .tensor_stats import Watch
from .weight_cache import WeightCache

_STATE = "fp8_state"  # the buffer of delayed scaling, and its name in metadata
CONTEXT_STATE = ("_fp8_disabled", "_weight_cache", "_watches", PRECOMPUTED)


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
    _weight_cache: "WeightCache | None" = None  # likewise by `reuse_weights`
    _watches: tuple[Watch, ...] = ()  # likewise by `tensor_stats`

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
        drop_state(self)
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
        state = DelayedState.of(amaxes_of(self)) if isinstance(recipe, DelayedScaling) else None
        is_eager = not torch.compiler.is_compiling()
        cache = self._weight_cache if is_eager else None
        if w_quantized is None and cache is not None:
            transposed = torch.is_grad_enabled() and input.requires_grad
            w_quantized = cache.get(weight, recipe, transposed, state)
        main_grad = _main_grad(weight) if self.fuse_wgrad_accumulation else None
        args = (input, weight, bias, w_quantized, recipe, None, state, main_grad)
        if is_eager and self._watches:
            return self._watched(*args)
        return run(*args)

    def _watched(self, *args: Any) -> Tensor:
        x, w, _, w_quantized, recipe, _, state, _ = args
        amaxes = None if state is None else state.amaxes
        calls = [watch.begin(x, w, w_quantized, recipe, amaxes) for watch in self._watches]
        y = run(*args)
        for call in calls:
            if call is not None:
                call.end(y)
        return y

    def _plain_forward(self, input: Tensor) -> Tensor:
        if self._plain_class is nn.Linear:
            return super().forward(input)
        plain = object.__new__(self._plain_class)  # the same layer as one of its own class,
        plain.__dict__ = self.__dict__  # which its super() calls need
        return plain.forward(input)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if _STATE in self._buffers:
            amaxes_of(self).zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Linear":
        before = amaxes_of(self) if _STATE in self._buffers else None
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
            metadata[prefix[:-1]][_STATE] = amaxes_of(self).detach().clone()

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
            self._buffers[_STATE] = _to(amaxes_of(self), self.weight.device)
            if _STATE in local_metadata:
                _restore(self, prefix + _STATE, local_metadata[_STATE])
            elif prefix + "weight" in state_dict and not self.fp8_state.is_meta:
                self.fp8_state.zero_()  # amaxes of other weights, of what other layers make of x

    def __getstate__(self) -> dict[str, Any]:
        # A copy outlives the contexts that it was made in: nothing would ever end them for it.
        return {name: value for name, value in vars(self).items() if name not in CONTEXT_STATE}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


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
    return {name: amaxes_of(m).detach().clone() for name, m in _with_state(module).items()}


def load_delayed_state_dict(module: nn.Module, states: Mapping[str, Tensor]) -> None:
    """Restore what `delayed_state_dict` returned for a model with the same names.

    A history of another length is resized: the most recent entries are kept.

    Raises:
        ValueError: other names than those of `module`, or a tensor that is no state. Nothing is
            changed if names do not fit.

    Example:
        >>> old, new = (fp8lt.Linear(3, 2, recipe="delayed") for _ in range(2))
        >>> old(torch.ones(1, 3)).sum().backward()
        >>> fp8lt.load_delayed_state_dict(new, fp8lt.delayed_state_dict(old))
        >>> torch.equal(new.fp8_state, old.fp8_state)
        True
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
    states = [amaxes_of(layer) for layer in _with_state(module).values()]
    if states:
        reduce_over_ranks(states, group)


def _with_state(module: nn.Module) -> dict[str, Linear]:
    return {
        f"{name}.{_STATE}" if name else _STATE: layer
        for name, layer in module.named_modules()
        if isinstance(layer, Linear) and _STATE in layer._buffers
    }


def amaxes_of(layer: Linear) -> Tensor:
    """Return the state: this rank's own, though `parallelize_module` makes DTensors of buffers."""
    state: Any = layer._buffers[_STATE]
    if type(state).__name__ == "DTensor":
        state = state._local_tensor
        if not torch.compiler.is_compiling():
            layer._buffers[_STATE] = state
    return state


def drop_state(layer: Linear) -> None:
    layer._buffers.pop(_STATE, None)
    layer._non_persistent_buffers_set.discard(_STATE)


def _restore(layer: Linear, name: str, saved: Tensor) -> None:
    try:
        amaxes = resized(saved, layer.fp8_state.shape[1] - 2)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not layer.fp8_state.is_meta:
        amaxes_of(layer).copy_(amaxes)


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
