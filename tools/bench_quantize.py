"""The mode `quantize`: every quantise of fp8lt by itself, into both layouts.

    tensorwise        one scale, from the matrix's own amax
    rowwise           a scale per row of each copy, two quantisations
    rowwise, folded   a scale per row, the same bytes transposed: x and w of `rowwise_folded`
    rowwise, folds    rowwise of what x's and w's scales were folded into: dy of `rowwise_folded`
    1x128, 128x128    a scale per block: x and dy, and w, of `blockwise`

Each is checked, then timed among the others and a copy, which tells the floors: what one or two
reads of the matrix and one write of both layouts take at the copy's speed. Scales are too few to
count.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench_core import RUNS, Bench, Result, Row, Shape, make_row
from bench_linear import INPUT_SETS, normal
from bench_peers import TRAINING
from bench_timing import Entry, ratios, reason, relative_error, run_rounds, wrong
from oracle import both_undone, same_bytes
from torch import Tensor

COPY_BYTES = 512 << 20  # large enough for the copy's start and end not to count
# 0.025 to 0.027 on a CPU, up to 0.031 for tiny matrices. A 128x128 grid of scales in the wrong
# order gives 0.09, rows or blocks of 1x128 more.
BOUNDS = {"data": 0.035, "data_t": 0.035, "bytes": 0.0}


@dataclass(frozen=True)
class Kind:
    """A way to quantise: its name, the contender whose recipe has it, and how it is called."""

    name: str
    contender: str
    operator: str  # of fp8lt.ops
    options: dict[str, Any] = field(default_factory=dict)
    folds: bool = False  # vectors to fold in


KINDS = [
    Kind("tensorwise", "fp8lt", "quantize_tensorwise"),
    Kind("rowwise", "fp8lt-rowwise", "quantize_rowwise", {"power_of_two": True}),
    Kind("rowwise, folded", "fp8lt-rowwise_folded", "quantize_rowwise",
         {"power_of_two": True, "folded": True}),
    Kind("rowwise, folds", "fp8lt-rowwise_folded", "quantize_rowwise", {"power_of_two": True},
         folds=True),
    Kind("1x128", "fp8lt-blockwise", "quantize_blockwise", {"square": False}),
    Kind("128x128", "fp8lt-blockwise", "quantize_blockwise", {"square": True}),
]  # fmt: skip


def quantize(bench: Bench, shapes: Sequence[Shape]) -> Result:
    """Measure the kinds of the contenders that were chosen, on every matrix."""
    run, lost = bench.choose([c for c in TRAINING if c.name.startswith("fp8lt")])
    names = {contender.name for contender in run}
    kinds = [kind for kind in KINDS if kind.contender in names]
    if not kinds:
        return {"rows": [], "missing": lost}
    sizes = [(s.m, s.k, torch.bfloat16) for s in shapes]
    sizes.append((*sizes[0][:2], torch.float32))
    bench.expect((len(kinds) + 1) * len(sizes))
    on_gpu = bench.device.type == "cuda"
    source = torch.randn((COPY_BYTES if on_gpu else 1 << 16) // 4, device=bench.device)
    target = torch.empty_like(source)
    rows = []
    for size in sizes:
        bench.say(f"{size[0]}x{size[1]}")
        copy = Entry("copy", partial(bench.timer.measure, lambda: target.copy_(source), "device",
                                     RUNS))  # fmt: skip
        rows += measure_matrix(bench, kinds, *size, copy, 2 * source.nbytes)
    return {"rows": rows, "missing": lost}


def measure_matrix(
    bench: Bench, kinds: Sequence[Kind], rows: int, cols: int, dtype: torch.dtype,
    copy: Entry, copy_bytes: int,
) -> list[Row]:  # fmt: skip
    """Check and time every kind on one matrix; ratios are times over the floors of the round."""
    name = f"{rows}x{cols} {str(dtype).removeprefix('torch.')}"
    all_errors: list[dict[str, float]] = []
    entries = []
    try:
        draw = torch.Generator(bench.device).manual_seed(0)
        sets = [normal(rows, cols, draw).to(dtype) for _ in range(INPUT_SETS)]
        common = None
    except Exception as error:  # such as too little memory for the matrix
        sets, common = [], reason(error)
    for kind in kinds:
        entry = Entry(kind.name, bool, failure=common)
        all_errors.append({})
        if common is None:
            try:
                call = caller(kind, sets)
                all_errors[-1] = errors_of(kind, sets[0], call)
                entry.measure = partial(bench.timer.measure, call, "device", RUNS)
            except Exception as error:  # whatever the operator throws
                entry.failure = reason(error)
        entries.append(entry)
    wrongs = [wrong(errors, BOUNDS) for errors in all_errors]
    good = [entry for entry, why in zip(entries, wrongs, strict=True) if why is None]
    run_rounds([*good, copy], bench.rounds, bench.tick, bench.is_late)
    bench.tick((len(entries) - len(good)) * bench.rounds)
    found = []
    for kind, entry, errors, why in zip(kinds, entries, all_errors, wrongs, strict=True):
        failure = entry.failure or copy.failure
        row = make_row(name, kind.name, kind.contender, errors, entry.rounds_us,
                       failure=failure, wrong=why)  # fmt: skip
        if row["status"] == "ok":
            add_floors(row, rows * cols, dtype.itemsize, [copy_bytes / us for us in copy.rounds_us])
        found.append(row)
    return found


def caller(kind: Kind, sets: Sequence[Tensor]) -> Callable[[], Any]:
    """Return what quantises the next matrix, the first one first."""
    from fp8lt import device, ops

    quantise, e4m3 = getattr(ops, kind.operator), device.formats(sets[0].device).e4m3
    options, inputs = kind.options | folds_of(kind, sets[0]), itertools.cycle(sets)
    return lambda: quantise(next(inputs), e4m3, **options)


def folds_of(kind: Kind, x: Tensor) -> dict[str, Tensor]:
    """Return the vectors to fold in: powers of two, as rowwise scales are."""
    if not kind.folds:
        return {}
    from fp8lt.emulate import padded

    rows, cols = x.shape
    vectors = [2.0 ** (torch.arange(padded(n), device=x.device) % 5 - 2) for n in (cols, rows)]
    return dict(zip(("fold_cols", "fold_rows"), vectors, strict=True))


def errors_of(kind: Kind, x: Tensor, call: Callable[[], Any]) -> dict[str, float]:
    """Quantise x; return how far both copies, their scales undone, are from it.

    And how far from each other, where they have the same bytes.
    """
    (rows, cols), folds, q = x.shape, folds_of(kind, x), call()
    want = {"data": x.double(), "data_t": x.double()}
    if folds:
        want["data"] = want["data"] * folds["fold_cols"][:cols]
        want["data_t"] = want["data_t"] * folds["fold_rows"][:rows, None]
    copies = zip(want, both_undone(q), strict=True)
    errors = {name: relative_error(want[name], copy[:rows, :cols]) for name, copy in copies}
    if same_bytes(q):
        errors["bytes"] = relative_error(q.data.float(), q.data_t.float().t())
    return errors


def add_floors(row: Row, elements: int, item_bytes: int, bandwidths: Sequence[float]) -> None:
    """Add what one and two reads and one write of both layouts take at a copy's bytes per us."""
    for name, reads in (("one_read", 1), ("two_reads", 2)):
        size = elements * (reads * item_bytes + 2)
        floors = [size / bandwidth for bandwidth in bandwidths]
        row[f"{name}_us"] = statistics.median(floors)
        row[f"over_{name}_rounds"] = ratios(row["rounds_us"], floors)
        row[f"over_{name}"] = statistics.median(row[f"over_{name}_rounds"])
    row["copy_gb_per_s"] = statistics.median(bandwidths) / 1e3
    # What the kernel must move at least, once each, over its time.
    row["gb_per_s"] = elements * (item_bytes + 2) / row["us"] / 1e3
