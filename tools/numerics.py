"""Measure how exact every recipe is, beside bf16 and torchao: the SQNR of y, dx and dw in decibels.

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
    SwiGLU             silu(2 a) * 2 b of normal a and b: what goes into an MLP's second layer

A second table has the share of the elements of x and dy that are not zero and become zero in FP8,
in the rows that y and dx take (`fp8lt.tensor_stats`). Nothing saturates here: the scales are the
tensors' own. Without a GPU torchao emulates, too.

The last line of stdout is the same and more as one JSON document. A recipe that the device lacks is
listed with the reason. Exit codes: 0 done, 2 a bad argument.
"""

import argparse
import contextlib
import dataclasses
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
from torch.nn import functional as F

SHAPE = Shape(2048, 1024, 1024)
PAIRS = [  # families of x and of dy
    ("Gaussian", "Gaussian"),
    ("Gaussian", "gradient-like"),
    ("token outliers", "gradient-like"),
    ("channel outliers", "gradient-like"),
    ("element outliers", "gradient-like"),
    ("SwiGLU", "gradient-like"),
]
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RESULTS = ("y", "dx", "dw")


def drawn(family: str, rows: int, cols: int, seed: int) -> Tensor:
    """Return a tensor of that family, [rows, cols] bf16, on the CPU: the same for every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x = normal(rows, cols)
    if family == "SwiGLU":
        x = F.silu(2 * x) * 2 * normal(rows, cols)
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


def layer_of(contender: str, w: Tensor) -> nn.Linear:
    """Return a layer without bias, with this weight."""
    import fp8lt

    n, k = w.shape
    options: dict[str, Any] = {"bias": False, "device": w.device, "dtype": w.dtype}
    kind, _, recipe = contender.rpartition("torchao-")
    if kind or contender == "bf16":
        layer = nn.Linear(k, n, **options)
    else:
        layer = fp8lt.Linear(k, n, **options, recipe=recipe)
    layer.weight.data.copy_(w)
    return by_torchao(layer, recipe) if contender != recipe else layer


def by_torchao(layer: nn.Linear, recipe: str) -> nn.Linear:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(f"torchao: {error}") from error
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=layer.weight.device.type == "cpu")
    return convert_to_float8_training(nn.Sequential(layer), config=config)[0]


def decibels(
    x: Tensor, w: Tensor, dy: Tensor, wants: tuple[Tensor, ...], contender: str
) -> dict[str, Any]:
    """Return the SQNR of y, dx and dw of one layer; of fp8lt's what is flushed of x and dy, too."""
    import fp8lt

    layer, x = layer_of(contender, w), x.detach().requires_grad_()
    ours = isinstance(layer, fp8lt.Linear)
    with fp8lt.tensor_stats(layer) if ours else contextlib.nullcontext() as stats:
        y = layer(x)
        got = (y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy))
    flushed = {row.tensor: row.flushed for row in stats.rows} if ours else None
    found = {name: sqnr(*pair) for name, *pair in zip(RESULTS, wants, got, strict=True)}
    return {**found, "flushed": flushed}


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
        for recipe in ("bf16", *NAMES, *(f"torchao-{name}" for name in TORCHAO)):
            row: dict[str, Any] = {"x": of_x, "dy": of_dy, "recipe": recipe, "reason": None}
            try:
                row |= decibels(x, w, dy, wants, recipe)
            except RuntimeError as error:  # the device lacks what the recipe needs
                nothing = dict.fromkeys((*RESULTS, "flushed"))
                row |= nothing | {"reason": str(error).splitlines()[0]}
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return recipes x families: decibels, what is flushed, and why anything is missing."""
    at = {(row["recipe"], row["x"], row["dy"]): row for row in rows}
    lines = [("x / dy; y dx dw in dB", *(f"{of_x} / {of_dy}" for of_x, of_dy in PAIRS))]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lines += [(recipe, *(cell(at[(recipe, *pair)]) for pair in PAIRS)) for recipe in recipes]
    ours = [recipe for recipe in recipes if any(at[(recipe, *pair)]["flushed"] for pair in PAIRS)]
    shares = [("flushed; x dy in %", *lines[0][1:])]
    shares += [(recipe, *(flushed(at[(recipe, *pair)]) for pair in PAIRS)) for recipe in ours]
    reasons = {row["reason"]: row["recipe"] for row in rows if row["reason"]}
    why = [f"{name}: {reason}" for reason, name in reasons.items()]
    return "\n".join([*aligned(lines), "", *aligned(shares), *why])


def cell(row: dict[str, Any]) -> str:
    return "-" if row["reason"] else " ".join(f"{row[name]:.1f}" for name in RESULTS)


def flushed(row: dict[str, Any]) -> str:
    shares = row["flushed"] or {}
    return " ".join(f"{100 * shares[name]:.2f}" for name in ("x", "dy") if name in shares) or "-"


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
