"""The mode `gemm`: the three GEMMs of a layer, each by itself, on quantised operands.

    y = x @ w.T  (fast accumulation)      dx = dy @ w      dw = dy.T @ x

Contenders are ways to choose a cuBLASLt kernel: its first heuristic, which is what
`torch._scaled_mm` runs, the rule of fp8lt, and with --autotune the fastest of all that cuBLASLt
proposes. Device time, the L2 cache flushed; ratios are to the first heuristic.
"""

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_core import RUNS, Bench, Result, Row, Shape, add_ratios, make_row
from bench_linear import INPUT_SETS, WARM_UP
from bench_peers import autotuned
from bench_timing import Entry, reason, relative_error, run_rounds, wrong
from torch import Tensor

FIRST = "first heuristic"
# Against the products of the same FP8 operands in f64. Measured on an H200: 3.3e-3 with fast
# accumulation, 1.7e-3 without, which is rounding to bf16 alone.
BOUNDS = {"d": 0.005}
Operands = tuple[Any, Any]  # two ops.Quantized: a [m, K] and b [n, K]


def operands(shape: Shape, device: torch.device, seed: int) -> dict[str, tuple[Tensor, ...]]:
    """Return (a, b, their scale_inv) for each GEMM of a layer with normal x, w and dy."""
    from fp8lt import device as fp8lt_device
    from fp8lt import ops

    draw = torch.Generator(device).manual_seed(seed)

    def quantised(rows: int, cols: int, fp8: torch.dtype) -> Any:
        x = torch.randn(rows, cols, generator=draw, device=device).bfloat16()
        return ops.quantize_tensorwise(x, fp8)

    e4m3, e5m2 = fp8lt_device.formats(device)
    x, w = quantised(shape.m, shape.k, e4m3), quantised(shape.n, shape.k, e4m3)
    dy = quantised(shape.m, shape.n, e5m2)
    return {
        "y": (x.data, w.data, x.scale_inv, w.scale_inv),
        "dx": (dy.data, w.data_t, dy.scale_inv, w.scale_inv),
        "dw": (dy.data_t, x.data_t, dy.scale_inv, x.scale_inv),
    }


def first_heuristic(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, fast: bool) -> Tensor:
    return torch._scaled_mm(
        a, b.t(), scale_a=a_inv[0], scale_b=b_inv[0], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def by_rule(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor, fast: bool) -> Tensor:
    from fp8lt import ops

    return ops.gemm_nt(a, b, a_inv, b_inv, a.shape[0], b.shape[0], fast_accum=fast)


def exact(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    return (a.double() @ b.double().t()) * (a_inv[0].double() * b_inv[0].double())


def measure_gemm(
    bench: Bench, shape: Shape, name: str, sets: list[dict[str, tuple[Tensor, ...]]]
) -> list[Row]:
    """Check and time every contender on one GEMM."""
    contenders: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
        FIRST: (first_heuristic, contextlib.nullcontext),
        "fp8lt": (by_rule, contextlib.nullcontext),
    }
    if bench.wants_autotuned:
        contenders["fp8lt-autotuned"] = (by_rule, autotuned)
    fast, want = name == "y", exact(*sets[0][name])
    entries, errors, wrongs = [], {}, {}
    for contender, (gemm, context) in contenders.items():
        entry = Entry(contender, bool)
        errors[contender] = {}
        try:
            with context():
                for i in range(WARM_UP):
                    gemm(*sets[i % INPUT_SETS][name], fast)
                got = gemm(*sets[0][name], fast)
            errors[contender] = {"d": relative_error(want, got)}
            inputs = itertools.cycle(sets)
            call = partial(lambda g, i: g(*next(i)[name], fast), gemm, inputs)
            entry.measure = partial(measure_inside, context, bench, call)
        except Exception as error:  # whatever a library throws
            entry.failure = reason(error)
        wrongs[contender] = wrong(errors[contender], BOUNDS)
        entries.append(entry)
    run_rounds([e for e in entries if not wrongs[e.name]], bench.rounds, bench.tick, bench.is_late)
    rows = [
        make_row(str(shape), name, e.name, errors[e.name], e.rounds_us,
                 failure=e.failure, wrong=wrongs[e.name])
        for e in entries
    ]  # fmt: skip
    add_ratios(rows, rows[0])
    return rows


def measure_inside(context: Callable[[], Any], bench: Bench, call: Callable[[], Any]) -> float:
    with context():
        return bench.timer.measure(call, "device", RUNS)


def gemm(bench: Bench, shapes: list[Shape]) -> Result:
    """Measure the GEMMs of every shape."""
    rows: list[Row] = []
    bench.expect(len(shapes) * 3 * (2 + bench.wants_autotuned))
    for shape in shapes:
        bench.say(str(shape))
        try:
            bench.free(code=False)
            sets = [operands(shape, bench.device, seed) for seed in range(INPUT_SETS)]
        except Exception as error:  # such as too little memory for the shape
            rows.append(make_row(str(shape), "y", "fp8lt", {}, (), failure=reason(error)))
            continue
        for name in ("y", "dx", "dw"):
            rows += measure_gemm(bench, shape, name, sets)
    return {"rows": rows, "missing": {}}
