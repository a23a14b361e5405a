"""Which layers are worth an FP8 product: a measured rule, as a `module_filter_fn`."""

import dataclasses

from torch import nn

from .config import Float8LinearConfig, recipe_of
from .recipe import Recipe

# From which size on forward and backward of a layer took less time than in bf16, on an H200: in
# eager mode, and where the host's time does not count. From tools/results/bench_sizes_h200.json
# (`python tools/bench.py sizes`, which says how they are found).
LEAST_SIZES = {
    "tensorwise": (562, 562),
    "delayed": (708, 523),
    "rowwise": (754, 664),
    "blockwise": (754, 754),
}


@dataclasses.dataclass(frozen=True)
class Gains:
    """What `gains_from_fp8` returns."""

    tokens: int
    least_size: int

    def __call__(self, layer: nn.Module, name: str = "") -> bool:
        return self._size(layer) >= self.least_size

    def reason(self, layer: nn.Module) -> str:
        """Say why a layer stays as it is."""
        return (
            f"too small to gain: with {self.tokens} tokens its size is {self._size(layer):.1f}, "
            f"below {self.least_size}"
        )

    def _size(self, layer: nn.Module) -> float:
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"layer: want an nn.Linear, got {type(layer).__name__}")
        sizes = (self.tokens, layer.in_features, layer.out_features)
        return 1 / sum(1 / size for size in sizes) if all(sizes) else 0.0


def gains_from_fp8(
    tokens: int,
    config: Float8LinearConfig | Recipe | str | None = None,
    *,
    host_hidden: bool = False,
) -> Gains:
    """Return a `module_filter_fn` that leaves out the layers which are too small to gain.

        size = 1 / (1 / tokens + 1 / in_features + 1 / out_features)

    FP8 saves time in proportion to tokens * in * out, and takes some to quantise in proportion to
    tokens * in + in * out + tokens * out: the size is their quotient. A layer is converted from a
    least size on, which was measured for each recipe on an H200, forward and backward of 48 shapes.
    Other GPUs have others; `python tools/bench.py sizes` finds them.

    Args:
        tokens: rows of x that a layer sees in a call: batch size times sequence length.
        config: what `convert_to_float8_training` is given. A recipe's options do not count.
        host_hidden: the time of the host does not count, as in a CUDA graph or a model that keeps
            the GPU busy: the least size is no larger then.

    Raises:
        TypeError: `tokens` is not an int, `config` is none of these.
        ValueError: `tokens` is below 1, or no size was measured for the recipe.

    Example:
        >>> model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 64))
        >>> report = fp8lt.ConversionReport()
        >>> gains = fp8lt.gains_from_fp8(tokens=8192)
        >>> model = fp8lt.convert_to_float8_training(model, module_filter_fn=gains, report=report)
        >>> list(report.converted)
        ['0']
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"tokens: want an int, got {type(tokens).__name__}")
    if tokens < 1:
        raise ValueError(f"tokens: want at least 1, got {tokens}")
    name = recipe_of(config).name
    if name not in LEAST_SIZES:
        raise ValueError(
            f"config: no size was measured for recipe {name!r}; want one of "
            f"{', '.join(LEAST_SIZES)}"
        )
    eager, hidden = LEAST_SIZES[name]
    return Gains(tokens, hidden if host_hidden else eager)
