"""How one linear layer is measured: inputs, float64 reference, checks, rounds.

Every contender is built, warmed up and compared with float64 products of its bf16 inputs. One that
raises or is wrong gets a row that says so and is not timed; the others are.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_core import REFERENCE, RUNS, Bench, Row, Shape, add_ratios, family, make_row
from bench_peers import Contender, Layer
from bench_timing import LEAST_MS, Entry, How, reason, relative_error, run_rounds, wrong
from torch import Tensor

INPUT_SETS = 3  # no contender meets the same tensors twice in a row
WARM_UP = 3  # a multiple of INPUT_SETS; TransformerEngine's delayed scales need some steps, too
# One e4m3 operand has an error of 0.027 on such data, one e5m2 operand (dy) 0.053.
BOUNDS = {"y": 0.06, "dx": 0.09, "dw": 0.09}
# All e4m3: 0.035 to 0.038 on a CPU, up to 0.042 at tiny shapes. A grid of 128x128 scales of w in
# the wrong order gives 0.09, rows or blocks of 1x128 in the wrong order 0.2 and more.
BOUNDS_E4M3 = dict.fromkeys(BOUNDS, 0.05)
BOUNDS_BF16 = dict.fromkeys(BOUNDS, 0.01)


def bounds_of(contender: str) -> dict[str, float]:
    """Return the largest errors that a contender may have."""
    if contender == REFERENCE:
        return BOUNDS_BF16
    if family(contender) == "tensorwise":
        return BOUNDS
    return BOUNDS_E4M3 | ({"dw": BOUNDS_BF16["dw"]} if "gw_hp" in contender else {})


class Phase(NamedTuple):
    """What is run, and what of its time counts."""

    name: str
    backward: bool
    how: How


def normal(rows: int, cols: int, draw: torch.Generator) -> Tensor:
    """Return normal numbers, f32, every third row and every fifth column doubled.

    Rows of normal numbers alone have much the same amax, and often the same power of two as scale:
    one in another's place would not be seen.
    """
    x = torch.randn(rows, cols, generator=draw, device=draw.device)
    x[::3] *= 2
    x[:, ::5] *= 2
    return x


class Case:
    """One shape: inputs, weight, and what float64 makes of them."""

    def __init__(self, shape: Shape, device: torch.device, backward: bool) -> None:
        self.shape, self.backward = shape, backward
        draw = torch.Generator(device).manual_seed(0)
        self.w = normal(shape.n, shape.k, draw).bfloat16() / math.sqrt(shape.k)
        self.sets = [
            (
                normal(shape.m, shape.k, draw).bfloat16().requires_grad_(backward),
                normal(shape.m, shape.n, draw).bfloat16(),
            )
            for _ in range(INPUT_SETS)
        ]
        x, dy = (t.detach().double() for t in self.sets[0])
        w = self.w.double()
        self.want = {"y": x @ w.t()}
        if backward:
            self.want |= {"dx": dy @ w, "dw": dy.t() @ x}

    def call(self, layer: Layer, backward: bool) -> Callable[[], Any]:
        """Return what runs the layer on the next inputs, and returns y or (dx, dw)."""
        sets = itertools.cycle(self.sets)

        def run() -> Any:
            x, dy = next(sets)
            with torch.set_grad_enabled(self.backward):
                y = layer.forward(x)
            # Not y.backward(): adding into .grad would be one more kernel for each gradient.
            return torch.autograd.grad(y, (x, layer.weight), dy) if backward else y

        return run

    def check(self, layer: Layer, backward: bool) -> tuple[dict[str, float], int | None]:
        """Warm the layer up, run it on the first inputs; return the errors and the peak memory.

        The peak is above what was there before the call: w, x and dy.
        """
        run, device = self.call(layer, backward), self.w.device
        with layer.context():
            for _ in range(WARM_UP):
                run()
            before, peak = 0, None
            if device.type == "cuda":
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
            result = run()
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) - before + layer.held_bytes
        got = dict(zip(("dx", "dw"), result, strict=True)) if backward else {"y": result}
        errors = {name: relative_error(self.want[name], t.detach()) for name, t in got.items()}
        return errors, peak


@dataclass
class Prepared:
    """A contender that was built and checked; or why not, each for (forward, with backward)."""

    name: str
    layer: Layer | None = None
    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str | None] = field(default_factory=lambda: [None, None])
    wrongs: list[str | None] = field(default_factory=lambda: [None, None])
    peaks: list[int | None] = field(default_factory=lambda: [None, None])

    def good(self, backward: bool) -> bool:
        return self.failures[backward] is None and self.wrongs[backward] is None


def prepare(contender: Contender, case: Case) -> Prepared:
    """Build, warm up, check. Never raises for what the contender does."""
    made = Prepared(contender.name)
    bounds = bounds_of(contender.name)
    for backward in (False, True)[: 1 + case.backward]:
        try:
            if made.layer is None:
                made.layer = contender.build(case.w)
            errors, made.peaks[backward] = case.check(made.layer, backward)
            made.errors |= errors
        except Exception as error:  # whatever a peer throws
            made.failures[backward:] = [reason(error)] * (2 - backward)
            return made
        # A wrong y is wrong with backward, too.
        made.wrongs[backward:] = [wrong(made.errors, bounds)] * (2 - backward)
    return made


def measure_layer(bench: Bench, case: Case, layer: Layer, phase: Phase) -> float:
    with layer.context():
        call = case.call(layer, phase.backward)
        return bench.timer.measure(call, phase.how, RUNS, least_ms=LEAST_MS)


def measure_phase(
    bench: Bench, case: Case, all_made: Sequence[Prepared], phase: Phase, extra: Sequence[Entry]
) -> list[Row]:
    """Time what is good in interleaved rounds, `extra` among them; return every contender's row."""
    entries = {}
    for made in all_made:
        if made.layer is not None and made.good(phase.backward):
            measure = partial(measure_layer, bench, case, made.layer, phase)
            entries[made.name] = Entry(made.name, measure)
    run_rounds([*entries.values(), *extra], bench.rounds, bench.tick, bench.is_late)
    bench.tick((len(all_made) - len(entries)) * bench.rounds)
    rows = []
    for made in all_made:
        entry = entries.get(made.name)
        row = make_row(
            str(case.shape), phase.name, made.name, made.errors, entry.rounds_us if entry else [],
            failure=made.failures[phase.backward] or (entry.failure if entry else None),
            wrong=made.wrongs[phase.backward],
        )  # fmt: skip
        rows.append({**row, "peak_bytes": made.peaks[phase.backward]})
    add_ratios(rows, rows[0], over=phase.how == "host")
    return rows


def measure_case(
    bench: Bench, contenders: Sequence[Contender], case: Case, phases: Sequence[Phase],
    extra: dict[str, Sequence[Entry]] | None = None,
) -> list[Row]:  # fmt: skip
    """Prepare all contenders of one shape, the reference first, and measure each phase."""
    all_made = []
    for contender in contenders:
        bench.say(f"{case.shape} {contender.name}: prepare")
        all_made.append(prepare(contender, case))
    rows: list[Row] = []
    for phase in phases:
        bench.say(f"{case.shape} {phase.name}")
        rows += measure_phase(bench, case, all_made, phase, (extra or {}).get(phase.name, ()))
    return rows
