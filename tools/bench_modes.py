"""The modes around one linear layer: `layer`, `gemm`, `host`, `decode` and `quantize`.

    layer     forward, forward + backward (dx and dw) of the training contenders, and where the
              time of fp8lt's layer goes: GEMMs, quantise, host gap
    gemm      the layer's GEMMs by themselves, fp8lt's choice of kernels against others
    host      wall time of asynchronous calls, at shapes too small for the GPU's time to count
    decode    forward without gradients of the inference contenders, also with the host hidden
    quantize  fp8lt's quantise into both layouts against the floors of one and two reads

Forward in `layer` and `host` is training's: it keeps what backward needs.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import bench_gemm
import torch
from bench_core import RUNS, Bench, Result, Row, Shape, make_row
from bench_linear import INPUT_SETS, Case, Phase, measure_case
from bench_parts import part_row, parts_of
from bench_peers import INFERENCE, TRAINING, Contender
from bench_timing import Entry, ratios, reason, relative_error, run_rounds, wrong
from torch import Tensor

FORWARD, BOTH, HIDDEN = "fwd", "fwd+bwd", "fwd, host hidden"
COPY_BYTES = 512 << 20  # large enough for the copy's start and end not to count


def shapes(text: str) -> list[Shape]:
    return [Shape(*map(int, word.split("x"))) for word in text.split()]


SHAPES = {
    "layer": shapes(
        "8192x4096x4096 8192x4096x14336 8192x14336x4096 16384x1536x6144 512x4096x4096"
    ),
    "host": shapes("16x512x512 1x512x512"),
    "decode": [
        Shape(m, k, n) for k, n in ((8192, 8192), (4096, 14336)) for m in (1, 16, 64, 256)
    ],
    # Of these the first two numbers count.
    "quantize": shapes("8192x4096x0 8192x14336x0 16384x1536x0 4096x4096x0"),
}  # fmt: skip
SHAPES_CPU = {
    "layer": shapes("64x32x48 32x48x32"),
    "host": shapes("16x32x32"),
    "decode": shapes("16x32x32"),
    "quantize": shapes("64x32x0"),
}


def shapes_of(mode: str, bench: Bench) -> list[Shape]:
    return bench.shapes or (SHAPES if bench.device.type == "cuda" else SHAPES_CPU)[mode]


def linear_mode(
    bench: Bench, mode: str, line_up: Sequence[Contender], phases: Sequence[Phase],
) -> Result:  # fmt: skip
    """Measure every shape of a mode; with `layer`, fp8lt's parts, too."""
    contenders, lost = bench.choose(line_up)
    with_parts = mode == "layer" and any(c.name == "fp8lt" for c in contenders)
    wanted = shapes_of(mode, bench)
    bench.expect(len(wanted) * (len(phases) * len(contenders) + with_parts))
    rows: list[Row] = []
    parts: list[Row] = []
    for shape in wanted:
        try:
            bench.free()
            case = Case(shape, bench.device, backward=any(phase.backward for phase in phases))
            extra = parts_of(bench, case) if with_parts else None
            entries = {BOTH: [extra.entry]} if extra else {}
            new = measure_case(bench, contenders, case, phases, entries)
        except Exception as error:  # no contender's fault: such as too little memory for the shape
            rows += [
                make_row(str(shape), phase.name, "every contender", {}, (), failure=reason(error))
                for phase in phases
            ]
            continue
        if extra:
            parts.append(part_row(new, extra))
        rows += new
    return {"rows": rows, "missing": lost, **({"parts": parts} if with_parts else {})}


def layer(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "layer"), Phase(BOTH, True, "layer")]
    return linear_mode(bench, "layer", TRAINING, phases)


def gemm(bench: Bench) -> Result:
    return bench_gemm.gemm(bench, shapes_of("layer", bench))


def host(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "host"), Phase(BOTH, True, "host")]
    return linear_mode(bench, "host", TRAINING, phases)


def decode(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "layer"), Phase(HIDDEN, False, "device")]
    return linear_mode(bench, "decode", INFERENCE, phases)


# ---------------------------------------------------------------------------------- quantise alone


def quantize(bench: Bench) -> Result:
    """Time fp8lt's quantise, and a copy in the same rounds that tells the floors."""
    contenders, lost = bench.choose([c for c in TRAINING if c.name == "fp8lt"])
    if not contenders:
        return {"rows": [], "missing": lost}
    sizes = [(s.m, s.k, torch.bfloat16) for s in shapes_of("quantize", bench)]
    sizes.append((*sizes[0][:2], torch.float32))
    bench.expect(2 * len(sizes))
    on_gpu = bench.device.type == "cuda"
    source = torch.randn((COPY_BYTES if on_gpu else 1 << 16) // 4, device=bench.device)
    target = torch.empty_like(source)
    rows = []
    for size in sizes:
        bench.say(f"{size[0]}x{size[1]}")
        copy = Entry("copy", partial(bench.timer.measure, lambda: target.copy_(source), "device",
                                     RUNS))  # fmt: skip
        rows.append(quantize_case(bench, *size, copy, 2 * source.nbytes))
    return {"rows": rows, "missing": lost}


def quantize_case(
    bench: Bench, rows: int, cols: int, dtype: torch.dtype, copy: Entry, copy_bytes: int
) -> Row:
    """Check and time one matrix; ratios are times over the floors of the same round."""
    name = f"{rows}x{cols} {str(dtype).removeprefix('torch.')}"
    failure, errors = None, {}
    quantise = Entry("fp8lt", bool)
    try:
        sets = [torch.randn(rows, cols, device=bench.device).to(dtype) for _ in range(INPUT_SETS)]
        errors, call = check_quantise(sets)
        quantise.measure = partial(bench.timer.measure, call, "device", RUNS)
        run_rounds([quantise, copy], bench.rounds, bench.tick)
        failure = quantise.failure or copy.failure
    except Exception as error:  # whatever the operator throws
        failure = reason(error)
    bounds = {"data": 0.06, "data_t": 0.0}
    row = make_row(name, "both layouts", "fp8lt", errors, quantise.rounds_us,
                   failure=failure, wrong=wrong(errors, bounds))  # fmt: skip
    if row["status"] == "ok":
        add_floors(row, rows * cols, dtype.itemsize, [copy_bytes / us for us in copy.rounds_us])
    return row


def check_quantise(sets: Sequence[Tensor]) -> tuple[dict[str, float], Callable[[], Any]]:
    from fp8lt import device, ops

    x, (rows, cols) = sets[0], sets[0].shape
    e4m3 = device.formats(x.device).e4m3
    q = ops.quantize_tensorwise(x, e4m3)
    data = q.data.float()
    errors = {
        "data": relative_error(x, data[:rows, :cols] * q.scale_inv.flatten()[0]),
        "data_t": relative_error(data, q.data_t.float().t()),
    }
    inputs = itertools.cycle(sets)
    return errors, lambda: ops.quantize_tensorwise(next(inputs), e4m3)


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
