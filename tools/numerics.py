"""Measure how exact every recipe is: the SQNR of y, dx and dw, and of plain bf16, in decibels.

    python tools/numerics.py                 # on a GPU, if there is one
    python tools/numerics.py --device cpu --json tools/results/numerics_cpu.json

    SQNR = 20 log10(|want| / |got - want|)   want: float64 products of the same bf16 x, w, dy

+6 dB is half the error; 28.5 dB is a relative error of 0.038. w is normal; x and dy are of families
that training shows:

    Gaussian           normal numbers
    gradient-like      and every row and column has a magnitude of its own, exp(normal)
    token outliers     every row has one, exp(2 normal)
    channel outliers   every column has one, exp(2 normal)
    element outliers   one element in 10,000 is 100 times larger

The last line of stdout is the same and more as one JSON document. A recipe that the device lacks is
listed with the reason. Exit codes: 0 done, 2 a bad argument.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from bench_core import Shape
from bench_report import aligned
from provenance import provenance
from torch import Tensor, nn

SHAPE = Shape(2048, 1024, 1024)
PAIRS = [  # families of x and of dy
    ("Gaussian", "Gaussian"),
    ("Gaussian", "gradient-like"),
    ("token outliers", "gradient-like"),
    ("channel outliers", "gradient-like"),
    ("element outliers", "gradient-like"),
]
RESULTS = ("y", "dx", "dw")


def drawn(family: str, rows: int, cols: int, seed: int) -> Tensor:
    """Return a tensor of that family, [rows, cols] bf16, on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x = normal(rows, cols)
    if family == "gradient-like":
        x *= 1e-4 * normal(rows, 1).exp() * normal(1, cols).exp()
    if family == "token outliers":
        x *= (2 * normal(rows, 1)).exp()
    if family == "channel outliers":
        x *= (2 * normal(1, cols)).exp()
    if family == "element outliers":
        x[torch.rand(rows, cols, generator=generator) < 1e-4] *= 100
    return x.bfloat16()


def sqnr(want: Tensor, got: Tensor) -> float:
    """Return signal over noise in dB; NaN if anything is."""
    return 20 * math.log10((want.norm() / (got.double() - want).norm()).item())


def decibels(
    x: Tensor, w: Tensor, dy: Tensor, wants: tuple[Tensor, ...], recipe: str
) -> dict[str, float]:
    """Return the SQNR of y, dx and dw of one layer."""
    import fp8lt

    n, k = w.shape
    options: dict[str, Any] = {"bias": False, "device": w.device, "dtype": w.dtype}
    plain = recipe == "bf16"
    layer = nn.Linear(k, n, **options) if plain else fp8lt.Linear(k, n, **options, recipe=recipe)
    layer.weight.data.copy_(w)
    x = x.detach().requires_grad_()
    y = layer(x)
    got = (y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy))
    return {name: sqnr(*pair) for name, *pair in zip(RESULTS, wants, got, strict=True)}


def measure(device: torch.device, shape: Shape) -> list[dict[str, Any]]:
    """Return a row for every recipe and pair of families."""
    from fp8lt.recipe import NAMES

    rows = []
    for of_x, of_dy in PAIRS:
        x, dy = drawn(of_x, shape.m, shape.k, 0), drawn(of_dy, shape.m, shape.n, 1)
        w = drawn("Gaussian", shape.n, shape.k, 2) / math.sqrt(shape.k)
        x, w, dy = (t.to(device) for t in (x, w, dy))
        exact = [t.double() for t in (x, w, dy)]
        wants = exact[0] @ exact[1].t(), exact[2] @ exact[1], exact[2].t() @ exact[0]
        for recipe in ("bf16", *NAMES):
            row: dict[str, Any] = {"x": of_x, "dy": of_dy, "recipe": recipe, "reason": None}
            try:
                row |= decibels(x, w, dy, wants, recipe)
            except RuntimeError as error:  # the device lacks what the recipe needs
                row |= dict.fromkeys(RESULTS) | {"reason": str(error).splitlines()[0]}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return recipes x families, y, dx and dw in each cell, then why anything is missing."""
    at = {(row["recipe"], row["x"], row["dy"]): row for row in rows}
    lines = [("x / dy; y dx dw in dB", *(f"{of_x} / {of_dy}" for of_x, of_dy in PAIRS))]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lines += [(recipe, *(cell(at[(recipe, *pair)]) for pair in PAIRS)) for recipe in recipes]
    reasons = {row["reason"]: row["recipe"] for row in rows if row["reason"]}
    return "\n".join([*aligned(lines), *(f"{name}: {why}" for why, name in reasons.items())])


def cell(row: dict[str, Any]) -> str:
    return "-" if row["reason"] else " ".join(f"{row[name]:.1f}" for name in RESULTS)


def main(argv: list[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="numerics.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("M", "K", "N"), default=SHAPE)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here too")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not gpu:
        parser.error("argument --device: got cuda, want cpu: torch sees no GPU here")
    if min(args.shape) < 1:
        parser.error(f"argument --shape: got {' '.join(map(str, args.shape))}, want all above 0")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"argument --json: got {args.json}, want a file in a folder that exists")
    device, shape = torch.device(args.device), Shape(*args.shape)
    report = {**provenance(device), "shape": shape._asdict(), "rows": measure(device, shape)}
    print(f"{report['device']}, torch {report['torch']}, {shape} (tokens x in x out)\n")
    print(table(report["rows"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
