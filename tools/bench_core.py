"""What all modes of the benchmark share: settings, contenders to run, rows of results, ratios."""

import gc
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from bench_peers import forget_compiled, missing
from bench_timing import Timer, ratios
from tqdm import tqdm  # type: ignore[import-untyped]

REFERENCE = "bf16"
AUTOTUNED = "-autotuned"  # how the names of contenders end that need --autotune
RUNS = 5  # timed runs of a contender in one round

# What the names of contenders contain whose scales are finer than a tensor's.
FINER = {"rowwise": "rowwise", "block": "blockwise"}

Row = dict[str, Any]  # one measurement; what is in it: `make_row`
Result = dict[str, Any]  # one mode: rows, the missing contenders, and what only it has


class Shape(NamedTuple):
    """Tokens, in and out of a linear layer."""

    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


def family(contender: str) -> str:
    """Return what shares a scale: "tensorwise", "rowwise" or "blockwise"."""
    return next((kind for part, kind in FINER.items() if part in contender), "tensorwise")


@dataclass
class Bench:
    """What the user chose, and the instruments."""

    device: torch.device
    rounds: int
    timer: Timer
    shapes: list[Shape] | None = None  # None: each mode's own
    names: set[str] | None = None  # None: all contenders
    autotune: bool = False  # --autotune
    end: float = math.inf  # by time.monotonic
    bar: Any = field(default_factory=lambda: tqdm(disable=True))

    def choose(self, contenders: Sequence[Any]) -> tuple[list[Any], dict[str, str]]:
        """Return the contenders that run, and of those asked for the missing with the reason."""
        run, lost = [], {}
        for contender in contenders:
            # References always run; their names begin alike: bf16, bf16-compiled.
            always = contender.name.startswith(REFERENCE)
            if contender.name.endswith(AUTOTUNED) and not self.wants_autotuned:
                continue
            if self.names is None or contender.name in self.names or always:
                why = missing(contender.needs)
                if why is None:
                    run.append(contender)
                else:
                    lost[contender.name] = why
        return run, lost

    @property
    def wants_autotuned(self) -> bool:
        """Say whether fp8lt is also to be measured with its kernels chosen by time."""
        return self.autotune or "fp8lt" + AUTOTUNED in (self.names or ())

    def is_late(self) -> bool:
        return time.monotonic() > self.end

    def expect(self, measurements: int) -> None:
        """Tell the progress bar how many measurements will come, each in every round."""
        self.bar.total = (self.bar.total or 0) + measurements * self.rounds
        self.bar.refresh()

    def tick(self, measurements: int = 1) -> None:
        self.bar.update(measurements)

    def say(self, text: str) -> None:
        self.bar.set_postfix_str(text)

    def free(self, code: bool = True) -> None:
        """Give back the memory, and the compiled code, of what has been measured."""
        if code:
            forget_compiled()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def make_row(
    case: str, phase: str, contender: str, errors: dict[str, float], rounds_us: Sequence[float],
    *, failure: str | None = None, wrong: str | None = None,
) -> Row:  # fmt: skip
    """Record one measurement; what failed or is wrong has a reason and no times."""
    status = "failed" if failure else "wrong" if wrong else "ok"
    times = list(rounds_us) if status == "ok" else []
    return {
        "case": case,
        "phase": phase,
        "contender": contender,
        "status": status,
        "reason": failure or wrong,
        "errors": errors,
        "us": statistics.median(times) if times else None,
        "ratio": None,
        "rounds_us": times,
        "ratios": [],
    }


def add_ratios(rows: Sequence[Row], reference: Row, *, over: bool = False) -> None:
    """Add the ratios to the reference, round by round, and their median.

    The ratio is the speed-up, reference / contender; or with `over` the time over the reference's.
    """
    for row in rows:
        if row["rounds_us"] and reference["rounds_us"]:
            pair = reference["rounds_us"], row["rounds_us"]
            row["ratios"] = ratios(*(reversed(pair) if over else pair))
            row["ratio"] = statistics.median(row["ratios"])
