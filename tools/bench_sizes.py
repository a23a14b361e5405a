"""The mode `sizes`: from which size on a layer gains from FP8, for every recipe.

Forward and backward of many shapes, once as in eager mode and once with the host hidden, which is
what a compiled or graphed model has. FP8 saves time in the GEMMs, in proportion to M * K * N, and
takes some to quantise, in proportion to M * K + K * N + M * N. So one number says most of a shape:

    size = M * K * N / (M * K + K * N + M * N) = 1 / (1 / M + 1 / K + 1 / N)

The rule is: FP8 from a size on. Of each recipe and phase that size is the one which loses the least
time over all shapes, in the mean, against always choosing right.
"""

import itertools
import math
from typing import Any

from bench_core import Bench, Result, Row, Shape
from bench_linear import Phase
from bench_modes import BOTH, linear_mode
from bench_peers import TRAINING

HIDDEN = f"{BOTH}, host hidden"
CONTENDERS = ("bf16", "fp8lt", "fp8lt-delayed", "fp8lt-rowwise", "fp8lt-blockwise")
TOKENS = (1024, 4096, 16384)
# Square ones, and those of MLPs.
WIDTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
WIDE = ((768, 3072), (1024, 4096), (2048, 8192), (4096, 14336))
SHAPES = [
    Shape(m, k, n)
    for m in TOKENS
    for k, n in (*((w, w) for w in WIDTHS), *itertools.chain(*((s, s[::-1]) for s in WIDE)))
]
SHAPES_CPU = [Shape(m, n, n) for m, n in itertools.product((16, 64), (32, 64))]


def size_of(shape: Shape) -> float:
    return 1 / (1 / shape.m + 1 / shape.k + 1 / shape.n)


def loss(points: list[tuple[float, float]], least: float) -> tuple[float, float, int]:
    """Return what the rule loses on (size, speed-up) pairs: in the mean, at worst, how often."""
    lost = [
        max(speed_up, 1.0) / (speed_up if size >= least else 1.0) - 1 for size, speed_up in points
    ]
    return sum(lost) / len(lost), max(lost), sum(each > 0 for each in lost)


def fit(points: list[tuple[float, float]]) -> float:
    """Return the least size that loses least: between two sizes, or below or above all."""
    sizes = sorted({size for size, _ in points})
    between = [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]
    return min((sizes[0], *between, math.inf), key=lambda least: loss(points, least)[0])


def rules(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rule of every contender and phase."""
    found = []
    measured = [row for row in rows if row["ratio"] is not None and row["contender"] != "bf16"]
    for contender, phase in dict.fromkeys((row["contender"], row["phase"]) for row in measured):
        points = [
            (row["size"], row["ratio"])
            for row in measured
            if (row["contender"], row["phase"]) == (contender, phase)
        ]
        least = fit(points)
        mean, worst, wrong = loss(points, least)
        found.append({
            "contender": contender, "phase": phase, "shapes": len(points), "least_size": least,
            "mean_loss": mean, "worst_loss": worst, "wrong": wrong,
        })  # fmt: skip
    return found


def sizes(bench: Bench) -> Result:
    """Measure every shape, and derive the rules."""
    names = {*CONTENDERS} if bench.names is None else bench.names
    line_up = [contender for contender in TRAINING if contender.name in names | {"bf16"}]
    phases = [Phase(BOTH, True, "layer"), Phase(HIDDEN, True, "device")]
    own = SHAPES if bench.device.type == "cuda" else SHAPES_CPU
    result = linear_mode(bench, bench.shapes or own, line_up, phases)
    for row in result["rows"]:
        row["size"] = size_of(Shape(*map(int, row["case"].split("x"))))
    return {**result, "rules": rules(result["rows"])}
