"""The mode `model`: four Llama-like blocks, forward + backward, eager and compiled, and memory.

Every contender is a copy of the same weights. One contender at a time stands beside the bf16 model
of its case, and the two are timed in alternating rounds; then it is freed.

Peak memory is of one forward + backward: parameters, gradients, activations, its input and dy;
what stood in memory before the contender was built does not count.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench_blocks import SIZE, SIZE_CPU, VARIANTS, Forward, Size, Variant, blocks
from bench_core import REFERENCE, Bench, Result, Row, add_ratios, make_row
from bench_linear import INPUT_SETS, WARM_UP
from bench_parts import model_parts
from bench_timing import Entry, reason, relative_error, run_rounds, wrong
from torch import Tensor, nn

RUNS = 3  # fewer than for a layer: each takes much longer
PHASE = "fwd+bwd"
# Each block adds its error to the residual stream. Measured on smaller models (dim 512), FP8 and
# bf16: y 0.080 and 0.008, dx 0.14 and 0.011, dw 0.18 and 0.013.
BOUNDS = {"y": 0.11, "dx": 0.2, "dw": 0.25}
BOUNDS_BF16 = dict.fromkeys(BOUNDS, 0.03)


@dataclass
class Prepared:
    """A model that was built, warmed up and checked; or why not."""

    name: str
    model: nn.Module | None = None
    forward: Forward | None = None
    context: Callable[[], Any] = contextlib.nullcontext
    errors: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    parts: dict[str, float] | None = None  # filled when it has been timed
    failure: str | None = None
    wrong: str | None = None


class Workload:
    """The source of all weights, the inputs, and what f32 makes of the first."""

    def __init__(self, bench: Bench, size: Size) -> None:
        self.bench, self.source = bench, blocks(size, bench.device)
        draw = torch.Generator(bench.device).manual_seed(1)
        shape = size.batch, size.seq, size.dim
        self.sets = [
            tuple(
                torch.randn(shape, generator=draw, device=bench.device).bfloat16()
                for _ in range(2)
            )
            for _ in range(INPUT_SETS)
        ]  # fmt: skip
        exact = copy.deepcopy(self.source).float()
        self.want = self.results(exact, exact, *(t.float() for t in self.sets[0]))

    def results(self, model: nn.Module, forward: Forward, x: Tensor, dy: Tensor) -> dict:
        """Run once; return y, dx, and the gradient that passed through everything: the first q's.

        The model is left without gradients.
        """
        x = x.detach().requires_grad_()
        y = forward(x)
        y.backward(dy)
        got = {"y": y.detach(), "dx": x.grad, "dw": model[0].q.weight.grad}
        clear(model)
        return got

    def call(self, made: Prepared) -> Callable[[], None]:
        """Return what runs the model on the next inputs, and leaves no gradients behind."""
        sets = itertools.cycle(self.sets)

        def run() -> None:
            x, dy = next(sets)
            with made.context():
                made.forward(x.detach().requires_grad_()).backward(dy)  # type: ignore[misc]
            clear(made.model)  # type: ignore[arg-type]

        return run

    def peak(self, call: Callable[[], None], before: int) -> int | None:
        """Return the peak of one run above `before`, its input and dy counted."""
        device = self.bench.device
        if device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        inputs = sum(t.nbytes for t in self.sets[0])
        return torch.cuda.max_memory_allocated(device) - before + inputs

    def prepare(self, variant: Variant) -> Prepared:
        """Build, compile, warm up, check. Never raises for what the contender does."""
        self.bench.say(f"{variant.name}: prepare")
        made = Prepared(variant.name, context=variant.context)
        device = self.bench.device
        try:
            self.bench.free(code=False)
            before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            made.model = copy.deepcopy(self.source)
            made.forward = variant.convert(made.model)
            call = self.call(made)
            for _ in range(WARM_UP):
                call()
            made.peak_bytes = self.peak(call, before)
            got = self.results(made.model, made.forward, *self.sets[0])
            made.errors = {name: relative_error(self.want[name], got[name]) for name in got}
        except Exception as error:  # whatever a peer throws
            made.failure = reason(error)
            return made
        bounds = BOUNDS_BF16 if variant.name.startswith(REFERENCE) else BOUNDS
        made.wrong = wrong(made.errors, bounds)
        return made

    def entry(self, made: Prepared) -> Entry:
        call = self.call(made)
        return Entry(made.name, partial(self.bench.timer.measure, call, "layer", RUNS, loop=1))


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def row_of(made: Prepared, case: str, entry: Entry | None) -> Row:
    row = make_row(
        case, PHASE, made.name, made.errors, entry.rounds_us if entry else [],
        failure=made.failure or (entry.failure if entry else None), wrong=made.wrong,
    )  # fmt: skip
    return {**row, "peak_bytes": made.peak_bytes, "parts": made.parts}


def measure_pair(work: Workload, base: Prepared, made: Prepared, case: str) -> tuple[Row, Row]:
    """Time a contender and the reference of its case alternately; return both rows."""
    entries = [
        work.entry(one) if not one.failure and not one.wrong else None for one in (base, made)
    ]
    work.bench.say(made.name)
    run_rounds(
        [entry for entry in entries if entry],
        work.bench.rounds,
        work.bench.tick,
        work.bench.is_late,
    )
    for one, entry in zip((base, made), entries, strict=True):
        if entry and not entry.failure:
            one.parts = model_parts(work.bench, work.call(one), RUNS)
    work.bench.tick(entries.count(None) * work.bench.rounds)
    rows = row_of(base, case, entries[0]), row_of(made, case, entries[1])
    add_ratios(rows, rows[0])
    return rows


def model(bench: Bench) -> Result:
    """Measure every variant beside the bf16 model of its case."""
    variants, lost = bench.choose(VARIANTS)
    bench.expect(2 * (len(variants) - 2))
    bench.free()
    work = Workload(bench, SIZE if bench.device.type == "cuda" else SIZE_CPU)
    rows: list[Row] = []
    for case in ("eager", "compiled"):
        first, *others = [v for v in variants if v.case == case]
        if not others:
            continue
        base = work.prepare(first)
        base_rows = []
        case_rows = []
        for variant in others:
            made = work.prepare(variant)
            base_row, row = measure_pair(work, base, made, case)
            row["reference_rounds_us"] = base_row["rounds_us"]
            base_rows.append(base_row)
            case_rows.append(row)
            del made
        rows += [*base_rows[:1], *case_rows]
        del base
    return {"rows": rows, "missing": lost}
