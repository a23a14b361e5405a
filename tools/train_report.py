"""How `train.py` shows its measurements: a table and a plot, both from the JSON document alone."""

from pathlib import Path
from typing import Any

Report = dict[str, Any]


def name_of(run: dict[str, Any]) -> str:
    """Return what a run is called beside others: its recipe, and how ranks shared the work."""
    parallel = run["parallel"]
    if parallel["way"] is None:
        return str(run["recipe"])
    gather = " with FP8 gathers" if parallel["fp8_all_gather"] else ""
    return f"{run['recipe']}, {parallel['way']} x {parallel['ranks']}{gather}"


def table(report: Report) -> str:
    """Return the table for people, and how each run differs from the last."""
    runs = report["runs"]
    head = ["recipe", "fp8 layers", "val before", "val after", "tokens/s", "peak GiB", "seconds"]
    gathers = any(run["parallel"]["gathered_bytes_per_step"] for run in runs)
    rows = [[*head, *["gathered MB a step"] * gathers]]
    for run in runs:
        peak = run["peak_memory_bytes"]
        gathered = run["parallel"]["gathered_bytes_per_step"]
        rows.append([
            name_of(run),
            str(run["fp8_layers"]),
            f"{run['val_loss_start']:.4f}",
            f"{run['val_loss_end']:.4f}",
            f"{run['tokens_per_s']:,.0f}",
            "-" if peak is None else f"{peak / 2**30:.1f}",
            f"{run['seconds']:.1f}",
            *["-" if gathered is None else f"{gathered / 1e6:,.1f}"] * gathers,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    for run in runs[:-1]:
        loss = run["val_loss_end"] - runs[-1]["val_loss_end"]
        speed = run["tokens_per_s"] / runs[-1]["tokens_per_s"]
        lines.append(
            f"{name_of(run)} against {name_of(runs[-1])}: "
            f"validation loss {loss:+.4f} nats per byte, speed {speed:.2f}x"
        )
    text = report["text"]
    where = f"{report['device']}, torch {report['torch']}, {runs[0]['parameters']:,} parameters"
    what = f"{text['source']}, {text['train_bytes']:,} + {text['val_bytes']:,} bytes"
    return "\n".join([where, what, "", *lines])


def smooth(values: list[float], width: int) -> list[float]:
    """Return the mean of the `width` values on either side, fewer at the ends."""
    out = []
    for i in range(len(values)):
        # As few on the right as there are on the left: the first losses fall steeply.
        near = values[max(i - width, 0) : i + min(width, i) + 1]
        out.append(sum(near) / len(near))
    return out


def draw_run(axis: Any, run: dict[str, Any], index: int, smoothed: list[float]) -> None:
    """Draw one run's raw and smoothed training loss, and its two validation losses."""
    losses, color = run["train_losses"], f"C{index}"
    # Later runs dashed: where two curves agree, both stay visible.
    style: dict[str, Any] = {"color": color, "linestyle": "--" if index else "-"}
    marker: dict[str, Any] = {"marker": "sD^v"[index % 4], "markersize": 8, "fillstyle": "none"}
    steps, ends = range(1, len(losses) + 1), [run["val_loss_start"], run["val_loss_end"]]
    axis.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
    axis.plot(steps, smoothed, **style)
    axis.plot([0, len(losses)], ends, color=color, linestyle="", **marker)
    speed = f"{run['tokens_per_s']:,.0f} tokens/s"
    label = f"{name_of(run)}: {speed}, validation loss {run['val_loss_end']:.3f}"
    axis.plot([], [], label=label, **style, **marker)


def plot(report: Report, path: Path) -> None:
    """Draw the training losses, how far each run is from the last one, and the gradient's norms."""
    import matplotlib

    matplotlib.use("Agg")  # a file is wanted, no window
    from matplotlib import pyplot as plt

    runs, config = report["runs"], report["config"]
    curves = [smooth(run["train_losses"], config["steps"] // 40) for run in runs]
    gaps = len(runs) > 1
    figure, axes = plt.subplots(
        2 + gaps, 1, figsize=(9, 6 + 1.5 * gaps + len(runs) / 4), sharex=True,
        height_ratios=[3, *[1] * gaps, 1], layout="constrained",
    )  # fmt: skip
    top, middle, bottom = axes[0], axes[1], axes[-1]
    for i, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        draw_run(top, run, i, curve)
    size = f"{runs[0]['parameters'] / 1e6:,.1f} M parameters"
    top.set_title(f"Byte-level GPT, {size}, on {report['device']}")
    top.set_ylabel("loss (nats per byte)")
    figure.legend(
        title="lines: training loss, smoothed and raw; markers: validation loss",
        loc="outside lower center", fontsize="small",
    )  # fmt: skip
    for i, curve in enumerate(curves[:-1]):
        if runs[i]["seed"] != runs[-1]["seed"]:
            continue  # it saw other text in the same step
        gap = [a - b for a, b in zip(curve, curves[-1], strict=True)]
        middle.plot(range(1, len(gap) + 1), gap, color=f"C{i}")
        middle.axhline(0, color="0.6", linewidth=0.8)
        middle.set_ylabel(f"minus {name_of(runs[-1])}\n(nats, smoothed)")
    for i, run in enumerate(runs):
        norms = smooth(run["grad_norms"], config["steps"] // 40)
        bottom.plot(range(1, len(norms) + 1), norms, color=f"C{i}", linestyle="--" if i else "-")
    bottom.set_yscale("log")
    bottom.set_ylabel("gradient norm\n(smoothed)")
    bottom.set_xlabel(f"step ({config['batch'] * config['seq']:,} tokens)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
