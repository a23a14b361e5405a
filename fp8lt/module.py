"""Modules: convert a model's `nn.Linear` layers to FP8, and back.

Conversion changes a module's class and gives it a recipe, nothing else. So parameters, buffers,
hooks, names, flags, ties and optimizers made before are the same objects as before, no memory is
allocated, and checkpoints are those of the plain model.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from .linear import linear
from .recipe import Float8LinearConfig, Recipe, resolve


class Linear(nn.Linear):
    """`nn.Linear` that computes `y = x @ weight.T + bias` with FP8 operands.

    Args: those of `nn.Linear`, and
        recipe: a name ("tensorwise") or a recipe object.

    Example:
        >>> layer = fp8lt.Linear(64, 32)
        >>> layer(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 32])
    """

    recipe: Recipe
    _plain_class: type[nn.Linear] = nn.Linear  # what `revert` turns this module into

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

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, recipe=self.recipe)

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
    `nn.Linear` is left alone unless asked for, since its own forward would be lost.

    Args:
        module: any module, on any device, `meta` too.
        config: a `Float8LinearConfig`, a recipe, or its name; default "tensorwise".
        module_filter_fn: called with (layer, its qualified name, "" for the root) for every layer
            that could be converted; those for which it returns False stay as they are.
        convert_subclasses: also convert subclasses of `nn.Linear`; `forward` becomes
            `fp8lt.Linear`'s until `revert`.
    """
    recipe = _recipe(config)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: want an nn.Module, got {type(module).__name__}")
    for name, layer in module.named_modules():
        plain: type[nn.Module] = type(layer)
        if isinstance(layer, Linear) or not issubclass(plain, nn.Linear):
            continue
        if plain is not nn.Linear and not convert_subclasses:
            continue
        if module_filter_fn is not None and not module_filter_fn(layer, name):
            continue
        layer.__class__ = Linear
        layer.recipe = recipe
        if plain is not nn.Linear:
            layer._plain_class = plain
    return module


def revert(module: nn.Module) -> nn.Module:
    """Undo `convert_to_float8_training` in place; return `module`.

    `fp8lt.Linear` layers that were built as such become `nn.Linear`.
    """
    for layer in module.modules():
        if isinstance(layer, Linear):
            plain = layer._plain_class
            layer.__dict__.pop("_plain_class", None)
            del layer.recipe
            layer.__class__ = plain  # type: ignore[assignment] # that is how it is undone
    return module


@contextlib.contextmanager
def disable_fp8(module: nn.Module) -> Iterator[nn.Module]:
    """Run `module` in high precision inside the `with`, for evaluation; not for other threads.

    Every `fp8lt.Linear` in it is the plain layer meanwhile. Contexts may nest, and the layers come
    back when one is left by an exception.

    Example:
        >>> model = fp8lt.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
        >>> with fp8lt.disable_fp8(model):
        ...     type(model[0]).__module__
        'torch.nn.modules.linear'
    """
    swapped = [(layer, type(layer)) for layer in module.modules() if isinstance(layer, Linear)]
    for layer, _ in swapped:
        layer.__class__ = layer._plain_class  # type: ignore[assignment]
    try:
        yield module
    finally:
        for layer, converted in swapped:
            layer.__class__ = converted


def _recipe(config: Float8LinearConfig | Recipe | str | None) -> Recipe:
    if config is None:
        return resolve("tensorwise")
    if isinstance(config, Float8LinearConfig):
        return config.recipe()
    try:
        return resolve(config)
    except TypeError:
        raise TypeError(
            f"config: want a Float8LinearConfig, a recipe or its name, got {type(config).__name__}"
        ) from None
