"""Say what fp8lt can do on this machine, and check it with real FP8 GEMMs.

    python tools/probe_gpu.py             a table for people
    python tools/probe_gpu.py --report    the same in Markdown, for a bug report: nothing private
    python tools/probe_gpu.py --json      one JSON document for programs

A recipe is "native", by cuBLASLt and the extension's kernels; or "scaled_mm", by PyTorch's own FP8
GEMM; or refused, for the reason given. Exit code: 0 where FP8 works, 1 where only emulation does, 2
where something that should work is broken (a GPU with FP8 whose extension does not build, or whose
products are wrong).
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from oracle import spread, undone
from probe_report import (
    BOUND_LAYER,
    LAYER,
    SHAPE,
    Check,
    Gpu,
    Report,
    print_markdown,
    print_table,
    without_names,
)
from provenance import provenance
from torch import Tensor

import fp8lt
from fp8lt import build, device, ops, recipe, settings, toolchain
from fp8lt.ops import Quantized
from fp8lt.recipe import BlockScaling, Recipe, RowwiseScaling

RUNS, WARM_UP = 20, 5
# What a build and a choice of a GPU depend on, beside what is installed.
VARIABLES = (
    "FP8LT_BUILD", "FP8LT_EMULATE", "FP8LT_AUTOTUNE", "FP8LT_CACHE_DIR", "FP8LT_VERBOSE",
    "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CXX", "CC", "TORCH_CUDA_ARCH_LIST",
    "MAX_JOBS", "PYTORCH_NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "TORCH_EXTENSIONS_DIR",
    "XDG_CACHE_HOME", "LD_LIBRARY_PATH",
)  # fmt: skip


def main() -> int:
    """Probe, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document instead")
    form.add_argument("--report", action="store_true", help="print Markdown for a bug report")
    args = parser.parse_args()
    report = probe()
    if args.json:
        print(json.dumps(asdict(report), indent=2))
    elif args.report:
        print_markdown(report)
    else:
        print_table(report)
    return report.exit_code


def probe() -> Report:
    """Look at everything; build the extension if a GPU here could use it."""
    visible = torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0
    gpus = [describe(index) for index in range(visible)] or unseen_gpus()
    found, missing = find_toolchain()
    library = build.loaded_library()
    report = Report(
        origin=provenance(torch.device("cuda" if visible else "cpu")),
        fp8lt=fp8lt.__version__,
        platform=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        cublaslt_loaded=loaded_cublaslt(),
        cublaslt_compiled=compiled_cublaslt(),
        toolchain=found,
        toolchain_missing=missing,
        extension=None if library is None else without_names(str(library)),
        extension_failure=build.failure(),
        cache=describe_cache(library),
        emulation=check_emulation(),
        environment={n: without_names(os.environ[n]) for n in VARIABLES if n in os.environ},
        gpus=gpus,
    )
    report.exit_code = exit_code(report)
    return report


def exit_code(report: Report) -> int:
    """Return 2 if anything is broken, else 0 if any GPU runs FP8, else 1."""
    gpus = report.gpus
    able = [gpu for gpu in gpus if any(r["verdict"] != "refused" for r in gpu.recipes.values())]
    lost = [gpu for gpu in gpus if gpu.expected and gpu not in able]
    wrong = [check for gpu in gpus for check in gpu.checks if not check.ok]
    if lost or wrong or report.emulation != "works":
        return 2
    return 0 if able else 1


def describe(index: int) -> Gpu:
    """Describe and check the GPU that torch calls cuda:`index`."""
    where = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(where)
    expected = device.support(where).way == "native" and settings.read().build != "off"
    recipes = {name: verdict_on(where, name) for name in recipe.NAMES}
    able = [name for name, found in recipes.items() if found["verdict"] != "refused"]
    architecture = device.amd_architecture(where) or f"sm_{properties.major}{properties.minor}"
    return Gpu(
        name=properties.name,
        architecture=architecture,
        memory_gib=round(properties.total_memory / 2**30, 1),
        driver=driver_version(),
        recipes=recipes,
        expected=expected,
        checks=[check for name in able for check in check_recipe(where, name)],
    )


def verdict_on(where: torch.device, name: str) -> dict[str, str]:
    """Say by which way a recipe runs there, or what is lacking: GPU, extension, cuBLASLt."""
    way, reason = ops.support(where, name)
    return {"verdict": way, "reason": reason}


def unseen_gpus() -> list[Gpu]:
    """Describe the GPUs that the driver has and torch cannot use."""
    hidden = torch.version.cuda is not None
    why = "hidden from CUDA (CUDA_VISIBLE_DEVICES)" if hidden else "this torch has no CUDA"
    gpus = []
    for gpu in device.gpus():
        supports = {
            name: device.capability_support(gpu.name, gpu.capability, name) for name in recipe.NAMES
        }
        gpus.append(
            Gpu(
                name=gpu.name,
                architecture=f"sm_{gpu.capability[0]}{gpu.capability[1]}",
                memory_gib=round(gpu.memory_bytes / 2**30, 1),
                driver=gpu.driver,
                recipes={
                    name: {
                        "verdict": "refused",
                        "reason": found.reason if found.way == "refused" else why,
                    }
                    for name, found in supports.items()
                },
                expected=supports["tensorwise"].way == "native" and not hidden,
            )
        )
    return gpus


class Operand(NamedTuple):
    """One factor of a GEMM, K-major."""

    data: Tensor
    scale_inv: Tensor
    scaling: int


def check_recipe(where: torch.device, name: str) -> list[Check]:
    """Run a layer by a recipe, then each of its FP8 GEMMs, large, on what it quantises."""
    chosen, layer = recipe.resolve(name), Check(name, "layer", "", bound=BOUND_LAYER)
    try:
        layer.error = layer_error(where, name)
        factors = gemms_of(chosen, where)
    except Exception as failure:  # whatever a library that nobody has tried throws
        layer.failure = first_line(failure)
        return [layer]
    m, n, k = SHAPE
    sizes = {"y": (m, n), "dx": (m, k), "dw": (n, k)}
    fast = {
        "y": chosen.fast_accum_output,
        "dx": chosen.fast_accum_grad_input,
        "dw": chosen.fast_accum_grad_weight,
    }
    return [layer] + [
        check_gemm(name, gemm, *pair, *sizes[gemm], fast[gemm]) for gemm, pair in factors.items()
    ]


def layer_error(where: torch.device, name: str) -> float:
    """Return the largest relative error of y, dx and dw; NaN if there is one."""
    m, n, k = LAYER
    x, w, dy = (spread(*size, where, i) for i, size in enumerate(((m, k), (n, k), (m, n))))
    layer = fp8lt.Linear(k, n, bias=False, device=where, dtype=w.dtype, recipe=name)
    layer.weight.data.copy_(w)
    y = layer(x.requires_grad_())
    got = (y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy))
    x, w, dy = (t.detach().double() for t in (x, w, dy))
    pairs = zip(got, (x @ w.t(), dy @ w, dy.t() @ x), strict=True)
    return torch.stack([(g.double() - want).norm() / want.norm() for g, want in pairs]).max().item()


def quantised(chosen: Recipe, where: torch.device) -> tuple[Quantized, Quantized, Quantized]:
    """Return x, w and dy, quantised as a layer does; their rows differ in size."""
    m, n, k = SHAPE
    x, w, dy = (spread(*size, where, i) for i, size in enumerate(((m, k), (n, k), (m, n))))
    formats = device.formats(where)
    e4m3, of_dy = chosen.forward_dtype(formats), chosen.backward_dtype(formats)
    options = {
        "power_of_two": chosen.power_of_two_scales,
        "emulated": ops.backend(where, recipe=chosen.name).emulated,
    }
    if isinstance(chosen, BlockScaling):
        rows, squares = (
            partial(ops.quantize_blockwise, square=s, **options) for s in (False, True)
        )
        return rows(x, e4m3), squares(w, e4m3), rows(dy, of_dy)
    if not isinstance(chosen, RowwiseScaling):
        one = partial(ops.quantize_tensorwise, **options)
        return one(x, e4m3), one(w, e4m3), one(dy, of_dy)
    quantise = partial(ops.quantize_rowwise, **options)
    xq, wq = (quantise(t, e4m3, folded=chosen.folded) for t in (x, w))
    folds = {"fold_cols": wq.scale_inv, "fold_rows": xq.scale_inv} if chosen.folded else {}
    if chosen.high_precision_grad_weight:  # one number for the columns, written out for every one
        columns = ops.quantize_tensorwise(w, e4m3, row_major=False, **options)
        wq = wq._replace(data_t=columns.data_t, scale_inv_t=columns.scale_inv_t)
    return xq, wq, quantise(dy, of_dy, **folds)


def gemms_of(chosen: Recipe, where: torch.device) -> dict[str, tuple[Operand, Operand]]:
    """Return both factors of every FP8 GEMM of a layer."""
    (x, x_t), (w, w_t), (dy, dy_t) = (
        # Folded, the columns have scales of one, for every row of the copy.
        (Operand(q.data, q.scale_inv, q.scaling),
         Operand(q.data_t, q.scale_inv_t, q.scaling if q.scaling_t is None else q.scaling_t))
        for q in quantised(chosen, where)
    )  # fmt: skip
    found = {"y": (x, w), "dx": (dy, w_t), "dw": (dy_t, x_t)}
    if isinstance(chosen, RowwiseScaling) and chosen.high_precision_grad_weight:
        del found["dw"]
    return found


def check_gemm(
    name: str, gemm: str, a: Operand, b: Operand, rows: int, cols: int, fast: bool
) -> Check:
    """Multiply, compare with float64, time."""
    check = Check(name, gemm, f"{format_of(a.data)} @ {format_of(b.data)}")
    try:

        def multiply() -> Tensor:
            return ops.gemm_nt(
                a.data, b.data, a.scale_inv, b.scale_inv, rows, cols, fast_accum=fast,
                scaling=(a.scaling, b.scaling), **ops.backend(a.data.device, recipe=name)._asdict(),
            )  # fmt: skip

        some = slice(0, rows, 64)  # enough of the float64 product to trust the rest
        want = (undone(*a)[some] @ undone(*b).t())[:, :cols]
        check.error = ((multiply()[some].double() - want).norm() / want.norm()).item()
        seconds = median_seconds(multiply)
        check.tflops = round(2 * rows * cols * a.data.shape[1] / seconds / 1e12, 1)
    except Exception as failure:  # whatever a library that nobody has tried throws
        check.failure = first_line(failure)
    return check


def first_line(failure: Exception) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


def format_of(data: Tensor) -> str:
    """Return "e4m3" or "e5m2"."""
    return str(data.dtype).removeprefix("torch.float8_")[:4]


def median_seconds(call: Callable[[], Tensor]) -> float:
    """Time `call` on the current GPU with events."""
    times = []
    for run in range(WARM_UP + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if run >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def check_emulation() -> str:
    """Run a layer on the CPU by every recipe; return "works" or what is wrong."""
    for name in recipe.NAMES:
        error = layer_error(torch.device("cpu"), name)
        if not error <= BOUND_LAYER:
            return f"is wrong: recipe {name!r} has a relative error of {error:.2g}"
    return "works"


def describe_cache(library: Path | None) -> str:
    """Say where compiled extensions are, and how many."""
    if library is None:
        return "no extension is loaded"
    folder = library.parent.parent
    builds = len([*folder.glob("*/fp8lt.so")])
    failed = len([*folder.glob("*.log")])
    return without_names(f"{folder}: {builds} built, {failed} failed")


def find_toolchain() -> tuple[str, str | None]:
    """Return the toolchain in words, and what is missing of it."""
    try:
        tools = toolchain.find()
    except toolchain.ToolchainError as error:
        return "incomplete", str(error)
    return f"nvcc {tools.nvcc_version} in {tools.cuda_home}; {tools.cxx_version}", None


def loaded_cublaslt() -> int | None:
    """Return the version of the cuBLASLt that torch has loaded, such as 130101."""
    try:
        library = toolchain.loaded_library("libcublasLt.so")
    except toolchain.ToolchainError:
        return None
    version = ctypes.CDLL(str(library)).cublasLtGetVersion
    version.restype = ctypes.c_size_t
    return int(version())


def compiled_cublaslt() -> int | None:
    """Return the version of the header that the extension was compiled with."""
    if build.loaded_library() is None:
        return None
    return int(torch.ops.fp8lt.cublaslt_versions()[0])


def driver_version() -> str | None:
    """Return the NVIDIA driver's version."""
    gpus = device.gpus()
    return gpus[0].driver if gpus else None


if __name__ == "__main__":
    sys.exit(main())
