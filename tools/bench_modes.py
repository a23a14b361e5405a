"""The modes around one linear layer: `layer`, `gemm`, `host`, `decode` and `quantize`.

    layer     forward, forward + backward (dx and dw) of the training contenders, and where the
              time of fp8lt's layers goes: GEMMs, quantise, host gap
    gemm      the layer's GEMMs by themselves, fp8lt's choice of kernels against others
    host      wall time of asynchronous calls, at shapes too small for the GPU's time to count
    decode    forward without gradients of the inference contenders, also with the host hidden
    quantize  fp8lt's quantise of every recipe against the floors of one and two reads

Forward in `layer` and `host` is training's: it keeps what backward needs.
"""

from collections.abc import Sequence

import bench_gemm
import bench_quantize
from bench_core import Bench, Result, Row, Shape, make_row
from bench_linear import Case, Phase, measure_case
from bench_parts import PROFILED, part_row, parts_of
from bench_peers import INFERENCE, TRAINING, Contender
from bench_timing import reason

FORWARD, BOTH, HIDDEN = "fwd", "fwd+bwd", "fwd, host hidden"


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
    bench: Bench, wanted: Sequence[Shape], line_up: Sequence[Contender], phases: Sequence[Phase],
    *, parts_too: bool = False,
) -> Result:  # fmt: skip
    """Measure the wanted shapes; the parts of fp8lt's layers, too, where they are asked for."""
    contenders, lost = bench.choose(line_up)
    profiled = [c for c in contenders if c.name in PROFILED] if parts_too else []
    bench.expect(len(wanted) * (len(phases) * len(contenders) + len(profiled)))
    rows: list[Row] = []
    parts: list[Row] = []
    for shape in wanted:
        try:
            bench.free()
            case = Case(shape, bench.device, backward=any(phase.backward for phase in phases))
            extra = {one.name: parts_of(bench, case, one) for one in profiled}
            entries = {BOTH: [one.entry for one in extra.values()]}
            new = measure_case(bench, contenders, case, phases, entries)
        except Exception as error:  # no contender's fault: such as too little memory for the shape
            rows += [
                make_row(str(shape), phase.name, "every contender", {}, (), failure=reason(error))
                for phase in phases
            ]
            continue
        parts += [part_row(new, name, one) for name, one in extra.items()]
        rows += new
    return {"rows": rows, "missing": lost, **({"parts": parts} if profiled else {})}


def layer(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "layer"), Phase(BOTH, True, "layer")]
    return linear_mode(bench, shapes_of("layer", bench), TRAINING, phases, parts_too=True)


def gemm(bench: Bench) -> Result:
    return bench_gemm.gemm(bench, shapes_of("layer", bench))


def host(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "host"), Phase(BOTH, True, "host")]
    return linear_mode(bench, shapes_of("host", bench), TRAINING, phases)


def quantize(bench: Bench) -> Result:
    return bench_quantize.quantize(bench, shapes_of("quantize", bench))


def decode(bench: Bench) -> Result:
    phases = [Phase(FORWARD, False, "layer"), Phase(HIDDEN, False, "device")]
    return linear_mode(bench, shapes_of("decode", bench), INFERENCE, phases)
