"""Measure fp8lt against bf16 and against other FP8 linear layers, on one GPU.

    python tools/bench.py layer                    # one linear layer, about two minutes
    python tools/bench.py all --json FILE --plot FILE
    python tools/bench.py layer --shapes 4096x4096x4096 --contenders fp8lt te-delayed

Modes: layer (forward, and with backward), quantize (that of every recipe, against the floors of one
and two reads), gemm (the layer's GEMMs by themselves), host (wall time per call at small shapes),
decode (inference of few tokens with a quantised weight), sizes (from which size on a layer gains
from FP8), model (four Llama-like blocks, eager and compiled, and peak memory), step (a training
step of a whole decoder, eager, compiled and graphed), nanochat12, nanochat24 (a training step of
examples/nanochat.py at that depth, eager and compiled), all. fp8lt's contenders are its recipes,
and `fp8lt` is tensorwise.

Peers that are not installed are listed as missing; one that raises is listed as failed with the
reason; one whose results are not close to float64 is marked WRONG and not timed. How it is
measured: bench_timing.py. The last line of stdout is everything as one JSON document; with --json
it is also kept in a file, after every mode. Exit codes: 0 done, 2 a bad argument, 130 interrupted.
"""

import argparse
import importlib
import importlib.util
import json
import math
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import bench_blocks
import bench_core
import bench_linear
import bench_model
import bench_modes
import bench_nanochat
import bench_sizes
import bench_step
import torch
from bench_core import Bench, Result, Shape
from bench_peers import INFERENCE, TRAINING, versions
from bench_plot import plot
from bench_report import mode_report
from bench_targets import judge
from bench_timing import LEAST_ROUNDS, LOOP, Timer, reason
from provenance import provenance
from tqdm import tqdm  # type: ignore[import-untyped]

MODES = {
    "layer": bench_modes.layer,
    "quantize": bench_modes.quantize,
    "gemm": bench_modes.gemm,
    "host": bench_modes.host,
    "decode": bench_modes.decode,
    "sizes": bench_sizes.sizes,
    "model": bench_model.model,  # last: these take longest
    "step": bench_step.step,
    **{mode: partial(bench_nanochat.measure, mode) for mode in bench_nanochat.SIZES},
}
ROUNDS = 7


def contender_names() -> list[str]:
    line_ups = (
        TRAINING, INFERENCE, bench_blocks.VARIANTS, bench_step.VARIANTS, bench_nanochat.VARIANTS
    )  # fmt: skip
    return list(dict.fromkeys(one.name for line_up in line_ups for one in line_up))


def shape(text: str) -> Shape:
    """Read MxKxN."""
    try:
        sizes = Shape(*map(int, text.split("x")))
    except (TypeError, ValueError):
        sizes = Shape(0, 0, 0)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want MxKxN, such as 8192x4096x4096")
    return sizes


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, want a whole number above 0")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="bench.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    modes = (*MODES, "all")
    add("modes", nargs="+", choices=modes, metavar="MODE", help=", ".join(modes))
    add("--json", type=Path, metavar="FILE", help="keep everything here, too")
    add("--plot", type=Path, metavar="FILE", help="draw the result of `layer` here")
    add("--rounds", type=positive, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    add("--within", type=positive, metavar="SECONDS",
        help=f"after so long, {LEAST_ROUNDS} rounds are enough for what is left")  # fmt: skip
    add("--shapes", nargs="+", type=shape, metavar="MxKxN",
        help="tokens x in x out, in place of each mode's own; `quantize` takes M and K; `model`, "
        "`step` and those of nanochat have their own sizes")  # fmt: skip
    add("--contenders", nargs="+", choices=contender_names(), metavar="NAME",
        help="only these, and always bf16: " + ", ".join(contender_names()))  # fmt: skip
    add(
        "--autotune",
        action="store_true",
        help="in `layer`, `host`, `gemm`, `model` also measure fp8lt with kernels chosen by time",
    )
    add("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu",
        help="cpu is for trying the tool: tiny shapes, emulated FP8, perf_counter in place of "
        "CUDA events, no Inductor; its numbers say nothing about speed")  # fmt: skip
    return parser


def check(args: argparse.Namespace) -> None:
    """Find out before the measurements what would fail after them. Raises ValueError."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("argument --device: got cuda, want cpu: torch sees no GPU here")
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"argument {flag}: got {path}, want a file in a folder that exists")
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"argument --plot: got {args.plot}, want a .png, .svg or .pdf")
    if args.plot and not {"layer", "all"} & set(args.modes):
        raise ValueError("argument --plot: it shows the mode layer, which is not among the modes")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError("argument --plot: matplotlib is missing; pip install matplotlib")
    if not importlib.util.find_spec("fp8lt"):
        raise ValueError("fp8lt is missing; pip install . or set PYTHONPATH=. in the root")


def describe(device: torch.device) -> dict[str, Any] | None:
    """Return what the GPU is; provenance has its name."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    return {
        "multiprocessors": gpu.multi_processor_count,
        "capability": [gpu.major, gpu.minor],
        "l2_bytes": gpu.L2_cache_size,
        "memory_bytes": gpu.total_memory,
    }


def start(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Return the head of the report."""
    return {
        **provenance(bench.device),
        "gpu": describe(bench.device),
        "versions": versions(),
        "method": {
            **bench.timer.method(),
            "rounds": args.rounds,
            "within_s": args.within,
            "calls_per_run": {
                "layer": LOOP,
                "model": 1,
                "step": bench_step.LOOP,
                **dict.fromkeys(bench_nanochat.SIZES, bench_step.LOOP),
            },
            "runs_per_round": {
                "layer": bench_core.RUNS,
                "model": bench_model.RUNS,
                "step": bench_step.RUNS,
                **dict.fromkeys(bench_nanochat.SIZES, bench_step.RUNS),
            },
            "input_sets": bench_linear.INPUT_SETS,
            "autotune": args.autotune,
            "ratio": "median over rounds of time of bf16 / time; in host: time / time of bf16",
            "bounds": {
                "tensorwise": bench_linear.BOUNDS,
                "finer scales": bench_linear.BOUNDS_E4M3,
                "bf16": bench_linear.BOUNDS_BF16,
            },
        },
        "modes": {},
    }


def rounded(value: Any) -> Any:
    """Keep six digits of every float; JSON has no NaN, so that becomes a word."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < float("inf") else str(value)
    return value


def run_mode(mode: str, bench: Bench) -> Result:
    """Run one mode. What even it cannot handle becomes its result, and the next mode runs."""
    begin = time.perf_counter()
    try:
        with tqdm(total=0, desc=mode, unit="round", dynamic_ncols=True) as bench.bar:
            result = MODES[mode](bench)
    except Exception as error:
        result = {"rows": [], "missing": {}, "failure": reason(error)}
    result["seconds"] = time.perf_counter() - begin
    # On a CPU the numbers say nothing about the targets.
    result["targets"] = judge(mode, result) if bench.device.type == "cuda" else []
    return result


def measure(args: argparse.Namespace) -> None:
    """Run the modes one by one; show and keep each as soon as it is done."""
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    names = set(args.contenders) if args.contenders else None
    importlib.import_module("fp8lt").autotune(False)  # whatever FP8LT_AUTOTUNE says
    end = time.monotonic() + (args.within or math.inf)
    bench = Bench(device, args.rounds, Timer(device), args.shapes, names, args.autotune, end)
    report = start(args, bench)
    gpu = report["device"]
    print(f"{gpu}, torch {report['torch']}, {report['versions']}, {args.rounds} rounds")
    for mode in MODES if "all" in args.modes else dict.fromkeys(args.modes):
        result = report["modes"][mode] = run_mode(mode, bench)
        print(f"\n{mode_report(mode, result)}", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rounded(report), indent=1, allow_nan=False) + "\n")
        if args.plot and mode == "layer":
            plot(result, gpu, args.plot)
            print(f"\nplot: {args.plot}")
    print()
    print(json.dumps(rounded(report), allow_nan=False))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))  # exits with 2
    try:
        measure(args)
    except KeyboardInterrupt:
        print("bench.py: interrupted; --json has the modes that were done", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
