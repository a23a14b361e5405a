"""The benchmark's plot: speed-up over bf16 for every peer, and where fp8lt's time goes.

A panel has the contenders of similar scales: one per tensor, and finer ones where these ran.
"""

from pathlib import Path
from typing import Any

from bench_core import Result, Row, family
from bench_report import unique

PARTS = {
    "gemms": ("GEMMs", "#35978f"),
    "quantise": ("quantise", "#a6dcd4"),
    "host_gap": ("host gap", "#dfc27d"),
}
# A family has one hue; its compiled form is the lighter one.
COLOURS = {
    "fp8lt": "#d62728", "fp8lt-reused": "#ff9896", "fp8lt-autotuned": "#8c2d2d",
    "fp8lt-delayed": "#e7298a",
    "fp8lt-rowwise": "#e377c2", "fp8lt-rowwise_with_gw_hp": "#f7b6d2",
    "fp8lt-rowwise_folded": "#ad1457", "fp8lt-blockwise": "#ff7f50",
    "scaled_mm": "#1f77b4", "scaled_mm-compiled": "#aec7e8",
    "torchao-tensorwise": "#e08214", "torchao-tensorwise-compiled": "#fdc57f",
    "torchao-rowwise": "#2ca02c", "torchao-rowwise-compiled": "#98df8a",
    "te-delayed": "#542788", "te-current": "#8073ac", "te-block": "#c5b0d5",
}  # fmt: skip
GROUP = 0.85  # of the distance between two shapes, filled with bars
BESIDE: dict[str, Any] = {
    "loc": "center left", "bbox_to_anchor": (1.01, 0.5), "frameon": False, "fontsize": 8,
    "title_fontsize": 8, "alignment": "left",
}  # fmt: skip


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """Return what each panel of speed-ups shows, by its label: forward + backward."""
    rows = [row for row in rows if row["phase"] == "fwd+bwd" and row["contender"] != "bf16"]
    coarse = [row for row in rows if family(row["contender"]) == "tensorwise"]
    fine = [row for row in rows if row not in coarse and row["ratio"] is not None]
    found = {"a scale per tensor": coarse, "a scale per row or block": fine}
    return {label: some for label, some in found.items() if some} or {"": []}


def speedups(axis: Any, rows: list[Row], cases: list[str], label: str) -> None:
    """Draw grouped bars, one group a shape."""
    names = unique(row["contender"] for row in rows if row["ratio"] is not None)
    width = GROUP / max(len(names), 1)
    for index, name in enumerate(names):
        mine = {row["case"]: row["ratio"] for row in rows if row["contender"] == name}
        left = [i - GROUP / 2 + (index + 0.5) * width for i in range(len(cases))]
        heights = [mine.get(case) or 0 for case in cases]
        bars = axis.bar(left, heights, width, label=name, color=COLOURS.get(name, "0.6"))
        labels = [f"{height:.2f}" if height else "" for height in heights]
        # On white, so that the line at 1 does not strike a number through.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}
        axis.bar_label(bars, labels, fontsize=7, rotation=90, padding=2, bbox=box)
    axis.axhline(1, color="0.2", linewidth=1, linestyle="--", label="bf16", zorder=0)
    axis.set_xlim(-0.55, len(cases) - 0.45)
    axis.margins(y=0.15)  # room for the numbers on the bars
    axis.set_ylabel("speed-up over bf16")
    axis.legend(title=label, **BESIDE)


def shares(axis: Any, parts: list[Row], cases: list[str]) -> None:
    """Draw one stacked bar a shape: the parts of fp8lt's layer, as shares of their sum."""
    parts = [p for p in parts if (p["contender"], p["status"]) == ("fp8lt", "ok")]
    totals = [sum(part[f"{key}_us"] for key in PARTS) for part in parts]
    places = [cases.index(part["case"]) for part in parts]
    bottom = [0.0] * len(parts)
    for key, (label, color) in PARTS.items():
        values = [100 * part[f"{key}_us"] / t for part, t in zip(parts, totals, strict=True)]
        bars = axis.bar(places, values, 0.5, bottom=bottom, label=label, color=color)
        texts = [
            f"{value:.0f} %, {part[f'{key}_us']:,.0f} us" if value > 6 else ""
            for value, part in zip(values, parts, strict=True)
        ]
        axis.bar_label(bars, texts, label_type="center", fontsize=8)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    axis.set_ylim(0, 100)
    axis.set_xlabel("tokens x in x out")
    axis.set_ylabel("% of fp8lt's fwd+bwd")
    axis.legend(**BESIDE)


def plot(layer: Result, device: str, path: Path) -> None:
    """Draw the result of the mode `layer`."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, no window
    from matplotlib import pyplot as plt

    cases, shown = unique(row["case"] for row in layer["rows"]), panels(layer["rows"])
    heights = [3] * len(shown) + [2]
    figure, (*tops, bottom) = plt.subplots(
        len(heights), 1, figsize=(13, 1.6 * sum(heights)), sharex=True, height_ratios=heights,
        layout="constrained",
    )  # fmt: skip
    tops[0].set_title(f"One linear layer, forward + backward, on {device}")
    for axis, (label, rows) in zip(tops, shown.items(), strict=True):
        speedups(axis, rows, cases, label)
    shares(bottom, layer.get("parts", []), cases)
    bottom.set_xticks(range(len(cases)), cases)
    figure.savefig(path, dpi=120)
    plt.close(figure)
