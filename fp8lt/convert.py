"""Whole models: convert their `nn.Linear` layers to FP8, and back.

Conversion changes a module's class and gives it a recipe, nothing else. So parameters, buffers,
hooks, names, flags, ties and optimizers made before are the same objects as before, no memory is
allocated, and checkpoints are those of the plain model.
"""

import warnings
from collections import Counter
from collections.abc import Callable

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from .config import Float8LinearConfig, recipe_of
from .convert_report import ConversionReport, lines_of
from .filters import Gains
from .fsdp import GatheredWeight, gathered_in_fp8, plain, sharded, why_not_in_fp8
from .module import CONTEXT_STATE, Linear, drop_state
from .recipe import Recipe


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    convert_subclasses: bool = False,
    report: ConversionReport | None = None,
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
            that could be converted; those for which it returns False stay as they are. By default
            all are converted, however small: see `gains_from_fp8`.
        convert_subclasses: also convert subclasses of `nn.Linear`; `forward` becomes
            `fp8lt.Linear`'s until `revert`. Not lazy ones, nor those that are parametrized: their
            classes make the weight.
        report: filled with what became of every linear layer, and why.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> model = fp8lt.convert_to_float8_training(model, config="rowwise")
        >>> model
        Sequential(
          (0): Linear(in_features=64, out_features=32, bias=True, recipe=rowwise)
          (1): ReLU()
          (2): Linear(in_features=32, out_features=8, bias=True, recipe=rowwise)
        )
    """
    recipe, converted = recipe_of(config), 0
    left: set[str] = set()  # names of subclasses
    reasons: dict[str, str] = {}  # of layers that stay as they are
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: want an nn.Module, got {type(module).__name__}")
    if report is not None:
        if not isinstance(report, ConversionReport):
            raise TypeError(f"report: want a fp8lt.ConversionReport, got {type(report).__name__}")
        report.layers = []
    for name, layer in module.named_modules():
        plain: type[nn.Module] = type(layer)
        if not issubclass(plain, nn.Linear):
            continue
        if issubclass(plain, Linear):
            converted += 1
            continue
        why_not = _cannot_be_converted(layer)
        if why_not is not None:
            left.add(plain.__name__)
            reasons[name] = why_not
            continue
        if plain is not nn.Linear and not convert_subclasses:
            left.add(plain.__name__)
            reasons[name] = (
                f"a subclass of nn.Linear, {plain.__module__}.{plain.__qualname__}: "
                "convert_subclasses=True converts it"
            )
            continue
        if module_filter_fn is not None and not module_filter_fn(layer, name):
            reasons[name] = (
                module_filter_fn.reason(layer)
                if isinstance(module_filter_fn, Gains)
                else "module_filter_fn returned False"
            )
            continue
        layer.__class__ = Linear
        layer.recipe = recipe
        converted += 1
        if plain is not nn.Linear:
            layer._plain_class = plain
    if report is not None:
        report.layers = lines_of(module, reasons)
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

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(3, 2)))
        >>> fp8lt.revert(model)
        Sequential(
          (0): Linear(in_features=3, out_features=2, bias=True)
        )
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
        drop_state(layer)
        for attribute in ("_recipe", "_plain_class", *CONTEXT_STATE):
            vars(layer).pop(attribute, None)
        layer.__class__ = plain_class  # type: ignore[assignment] # that is how it is undone
    return module


def _cannot_be_converted(layer: nn.Module) -> str | None:
    """Say why a class of its own is needed: another would lose what makes the weight."""
    if isinstance(layer, LazyModuleMixin):
        return "its sizes are not known yet: run the model once before"
    if is_parametrized(layer):
        return "its parameters are computed: convert before it is parametrized"
    return None
