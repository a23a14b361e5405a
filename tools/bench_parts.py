"""Where the time goes: GEMMs, quantise, and the rest, of fp8lt's layers and of whole models.

A profiler times the kernels inside the running layer, in the rounds in which the layer itself is
timed without it. GEMMs are all kernels that are not fp8lt's: cuBLASLt clears a few bytes before
some. A launch that begins while the one before it ends is not counted twice. On a CPU the operators
take the kernels' place. The rest of a layer is the host gap; a model has other kernels, too.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from bench_core import RUNS, Bench, Row
from bench_linear import WARM_UP, Case
from bench_peers import Contender
from bench_timing import LOOP, Entry, ratios, reason
from torch.profiler import ProfilerActivity, profile

PROFILED = (
    "fp8lt", "fp8lt-delayed", "fp8lt-rowwise", "fp8lt-rowwise_with_gw_hp", "fp8lt-rowwise_folded",
    "fp8lt-blockwise",
)  # fmt: skip


class Span(NamedTuple):
    """One kernel or operator, in us."""

    name: str
    start: float
    end: float


@dataclass
class Parts:
    """A measurement of the rounds, and what it found in each."""

    entry: Entry
    gemms_us: list[float] = field(default_factory=list)
    quantise_us: list[float] = field(default_factory=list)


def parts_of(bench: Bench, case: Case, contender: Contender) -> Parts:
    """Return what profiles a layer of fp8lt's, forward and backward."""
    try:
        layer = contender.build(case.w)
        call = case.call(layer, backward=True)
        for _ in range(WARM_UP):
            call()
    except Exception as error:  # then the layer has failed, too, or will say why
        return Parts(Entry("parts", bool, failure=reason(error)))
    on_gpu = bench.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU

    def measure() -> float:
        with profile(activities=[activity]) as profiler:
            us = bench.timer.measure(call, "layer", RUNS)
            bench.timer.synchronize()
        spans = spans_of(profiler.events(), on_gpu)
        runs = kernels_of_runs(spans) if on_gpu else operators_of_runs(spans)
        calls = LOOP if on_gpu else 1
        gemms, quantise = zip(*map(split, runs), strict=True)
        parts.gemms_us.append(statistics.median(gemms) / calls)
        parts.quantise_us.append(statistics.median(quantise) / calls)
        return us

    parts = Parts(Entry("parts", measure))
    return parts


def spans_of(events: Iterable[Any], on_gpu: bool) -> list[Span]:
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    spans = [
        Span(e.name, e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == wanted
    ]
    return sorted(spans, key=lambda span: span.start)


def kernels_of_runs(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the kernels of each run, which are those of a timed loop: they follow a flush.

    A flush fills memory. Before each come the kernels of the call that is not timed; after the last
    come those of a loop alone.
    """
    runs: list[list[Span]] = []
    for span in spans:
        if "fill" in span.name.lower():
            runs.append([])
        elif runs:
            runs[-1].append(span)
    return [run[: len(runs[-1])] for run in runs]


def operators_of_runs(spans: Sequence[Span]) -> list[list[Span]]:
    """Return the operators of each run, which all have the same."""
    ours = [span for span in spans if span.name.startswith("fp8lt::")]
    each = len(ours) // RUNS
    return [ours[i * each : (i + 1) * each] for i in range(RUNS)]


def split(spans: Sequence[Span]) -> tuple[float, float]:
    """Return how long any GEMM, and how long any quantise was running."""
    gemms = [s for s in spans if not is_quantise(s.name)]
    return busy(gemms), busy([s for s in spans if is_quantise(s.name)])


def is_quantise(name: str) -> bool:
    return "fp8lt::" in name and "fp8lt::gemm" not in name


def busy(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans that are in order."""
    total, until = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def part_row(rows: Sequence[Row], contender: str, parts: Parts) -> Row:
    """Return the parts of one of fp8lt's layers in one shape: medians, shares, all rounds."""
    whole = next(r for r in rows if (r["contender"], r["phase"]) == (contender, "fwd+bwd"))
    head = {"case": whole["case"], "contender": contender}
    failure = parts.entry.failure or whole["reason"]
    if failure:
        return {**head, "status": "failed", "reason": failure}
    layer_us, gemms_us, quantise_us = whole["rounds_us"], parts.gemms_us, parts.quantise_us
    # The layer was timed in other runs of a round: at a small gap noise may make it negative.
    gap = [max(0.0, a - b - c) for a, b, c in zip(layer_us, gemms_us, quantise_us, strict=True)]
    shares = ratios(gemms_us, layer_us)
    return {
        **head,
        "status": "ok",
        "gemms_us": statistics.median(gemms_us),
        "quantise_us": statistics.median(quantise_us),
        "host_gap_us": statistics.median(gap),
        "gemm_share": statistics.median(shares),
        "rounds_us": {"gemms": gemms_us, "quantise": quantise_us, "host_gap": gap},
        "gemm_shares": shares,
    }


# How cuBLAS, cuBLASLt and CUTLASS name their kernels, and how those who quantise name theirs. What
# Inductor makes of a quantise is fused with other work, and counted with it, also where its name
# has that of the GEMM it is for.
FUSED = re.compile("^triton_(poi|red|per)_")
GEMM = re.compile("nvjet|gemm|cutlass::device_kernel")
QUANTISE = re.compile("fp8lt::|transformer_engine::|cast_transpose")


def model_parts(bench: Bench, call: Callable[[], Any], runs: int) -> dict[str, float] | None:
    """Return the us of each kind of kernel in a call of a model, and of no kernel at all.

    The profiler runs beside it, on a chip that such calls have heated; None on a CPU. Then the us
    of the host, without a profiler: where they are more than the GPU's, the GPU waits.
    """
    if bench.device.type != "cuda":
        return None
    bench.timer.measure(call, "layer", runs, loop=1)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            call()
        bench.timer.synchronize()
    times = times_by_kind(spans_of(profiler.events(), on_gpu=True), runs)
    return {**times, "host_us": bench.timer.host_of_one(call)}


def times_by_kind(spans: Sequence[Span], runs: int) -> dict[str, float]:
    kinds: dict[str, list[Span]] = {"gemms_us": [], "quantise_us": [], "other_us": []}
    for span in spans:
        kinds[kind_of(span.name)].append(span)
    times = {kind: busy(some) / runs for kind, some in kinds.items()}
    whole = (max(s.end for s in spans) - spans[0].start) / runs
    return {**times, "idle_us": max(0.0, whole - busy(spans) / runs)}


def kind_of(kernel: str) -> str:
    if FUSED.search(kernel):
        return "other_us"
    if GEMM.search(kernel):
        return "gemms_us"
    return "quantise_us" if QUANTISE.search(kernel) else "other_us"
