"""How the benchmark measures: equal heat, a cold L2 cache, medians of rounds.

    per round     every contender once, in an order drawn anew: heat, then the median of a few
                  runs, one after the other: a wait between them would be a rest for the chip, the
                  longer the slower the host
    ratio         reference's median / contender's median, both of the same round
    reported      the median over the rounds

A card's clocks follow its power: whoever is measured on a cool chip looks up to 15 % faster. So
the same heat, a burst of bf16 GEMMs, comes before each measurement, and only times of one round
are compared. It may not make up for all of the seconds before, in which another may have kept the
chip busy or waited for its host: so nobody always follows the same one. A contender that raises is
out, with its reason, and the others go on.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

# Measured on an H200 after a pause: a bf16 layer of 8192x4096x4096 begins at 1035 us and reaches
# its 1200 after 120 ms, fp8lt's begins at 710 us and reaches its 787 after 80 ms.
HEAT_MS = 100.0
HEAT_DIM = 8192  # of the square bf16 GEMMs that heat
FLUSH_BYTES = 256 << 20  # at least; and at least twice the L2 cache
LOOP = 3  # calls of a timed loop; the cache is cold for the first, and full of others' data later
# A layer is timed for so long, however many runs that takes: what the host does to a small one in a
# few milliseconds says little.
LEAST_MS = 20.0
LEAST_ROUNDS = 3
HOST_BURSTS, HOST_CALLS = 5, 10  # few calls a burst: a full launch queue would stall the host

# What is timed. "layer": device time of a call in a short loop, another one before it: a host that
# is faster than the GPU gets ahead, a slower one shows as gaps, less what the flush hides, some
# 65 us a loop. "device": the host is far ahead, so only the GPU's own time counts. "host": wall
# time of asynchronous calls, the GPU's time does not count.
How = Literal["layer", "device", "host"]


class Timer:
    """Measures calls on one device, in microseconds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"
        if not self.on_gpu:
            return
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2, FLUSH_BYTES), dtype=torch.uint8, device=device)
        self._a, self._b, self._c = (
            torch.randn(HEAT_DIM, HEAT_DIM, device=device).bfloat16() for _ in range(3)
        )
        for _ in range(5):
            self._heat_once()
        pairs = [self._events(self._heat_once) for _ in range(5)]
        self.synchronize()
        one_us = statistics.median(elapsed_us(*pair) for pair in pairs)
        self.heat_gemms = math.ceil(HEAT_MS * 1e3 / one_us)

    def measure(
        self, call: Callable[[], Any], how: How, runs: int, loop: int = LOOP, least_ms: float = 0
    ) -> float:
        """Return the median time of one call, after the heat; in "host" there is none.

        `loop`: how many calls a timed loop has, in "layer"; "host" has one of its own.
        `least_ms`: more than `runs` in "layer", until their times add up to so much.
        """
        if how == "host":
            return statistics.median(self._host_burst(call) for _ in range(HOST_BURSTS))
        if not self.on_gpu:
            return statistics.median(self._wall(call) for _ in range(runs))
        for _ in range(self.heat_gemms):
            self._heat_once()
        self.synchronize()
        loop = loop if how == "layer" else 1
        times: list[float] = []
        while not times or (how == "layer" and sum(times) < least_ms * 1e3):
            pairs = [self._cold_run(call, how, loop) for _ in range(runs)]
            self.synchronize()
            times += [elapsed_us(*pair) for pair in pairs]
        return statistics.median(times) / loop

    def host_of_one(self, call: Callable[[], Any]) -> float:
        """Return the median time in which the host is through with one long call, from idle."""
        return statistics.median(self._host_burst(call, 1) for _ in range(HOST_BURSTS))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def method(self) -> dict[str, Any]:
        """Return the numbers of the method, for the record."""
        if not self.on_gpu:
            return {"clock": "perf_counter", "heat_ms": 0, "flush_bytes": 0}
        heat = {"heat_ms": HEAT_MS, "heat_gemms": self.heat_gemms, "least_ms": LEAST_MS}
        return {"clock": "CUDA events", **heat, "flush_bytes": self._flush.numel()}

    def _heat_once(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def _cold_run(self, call: Callable[[], Any], how: How, loop: int) -> tuple[Any, Any]:
        if how == "layer":
            call()
        else:
            for _ in range(2):  # some 3 ms, in which the host enqueues all that follows
                self._heat_once()
        self._flush.fill_(1)
        return self._events(call, loop)

    def _events(self, call: Callable[[], Any], loop: int = 1) -> tuple[Any, Any]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(loop):
            call()
        end.record()
        return start, end

    def _wall(self, call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    def _host_burst(self, call: Callable[[], Any], calls: int = HOST_CALLS) -> float:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e6 / calls


def elapsed_us(start: Any, end: Any) -> float:
    return start.elapsed_time(end) * 1e3


@dataclass
class Entry:
    """One contender in the rounds of one measurement."""

    name: str
    measure: Callable[[], float]  # one round: heat and the median of a few runs
    rounds_us: list[float] = field(default_factory=list)
    failure: str | None = None


def run_rounds(
    entries: Sequence[Entry],
    rounds: int,
    tick: Callable[[], Any],
    is_late: Callable[[], bool] = lambda: False,
) -> None:
    """Measure every entry once a round, in an order drawn anew: the same orders in every run.

    Once `is_late`, a round is the last after `LEAST_ROUNDS`.
    """
    draw = random.Random(0)
    for done in range(rounds):
        if done >= LEAST_ROUNDS and is_late():
            break
        for entry in draw.sample(entries, len(entries)):
            if entry.failure is None:
                try:
                    entry.rounds_us.append(entry.measure())
                except Exception as error:  # whatever a peer throws
                    entry.failure = reason(error)
            tick()


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return above / below round by round; times of different rounds are never compared."""
    return [a / b for a, b in zip(above, below, strict=True)]


def reason(error: BaseException) -> str:
    """Say an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def relative_error(want: Tensor, got: Tensor) -> float:
    """Return |got - want| / |want|, Frobenius norms in float64; NaN if anything is."""
    if want.shape != got.shape:
        raise ValueError(f"want a result {list(want.shape)}, got {list(got.shape)}")
    want = want.double()
    return ((got.double() - want).norm() / want.norm()).item()


def wrong(errors: dict[str, float], bounds: dict[str, float]) -> str | None:
    """Say which errors are above their bounds, or None; NaN is above every bound."""
    bad = [
        f"error of {name} {errors[name]:.2g}, want at most {bound}"
        for name, bound in bounds.items()
        if name in errors and not errors[name] <= bound
    ]
    return "; ".join(bad) or None
