"""How `train.py --stats N` shows what FP8 does to the tensors of a model, every N steps.

The tensors that it hurts most are printed above the progress bar; the JSON document has all of
them. What a column means: `fp8lt.tensor_stats`. Such a step takes longer, and trains the same.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

SHOWN = 5


class Watch:
    """Looks at every `every`-th step of a run; None: at none. The first rank alone speaks."""

    def __init__(self, every: int | None, rank: int) -> None:
        self.every, self.rank = every, rank
        self.taken: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def step(self, model: nn.Module, number: int) -> Iterator[None]:
        """Take the statistics of a forward and its backward, if it is their turn."""
        if self.every is None or number % self.every:
            yield
            return
        import fp8lt  # late: bf16 does not need it, whose first import may compile an extension

        with fp8lt.tensor_stats(model) as stats:
            yield
        rows = [
            {name: finite(value) for name, value in row._asdict().items()} for row in stats.rows
        ]
        self.taken.append({"step": number, "tensors": rows})
        if self.rank == 0:
            told = f"step {number}, the {SHOWN} tensors with the lowest SQNR"
            tqdm.write(f"{told}\n{stats.table(worst=SHOWN)}\n")


def finite(value: Any) -> Any:
    """Return a number that JSON has, or None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
