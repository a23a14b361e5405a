"""Say what fp8lt can do on this machine, and check it with real FP8 GEMMs.

    python tools/probe_gpu.py           a table for people
    python tools/probe_gpu.py --json    one JSON document for programs

Exit code: 0 where native FP8 works, 1 where only emulation does, 2 where something that should work
is broken (a GPU with FP8 whose extension does not build, or whose products are wrong).
"""

import argparse
import ctypes
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

import fp8lt
from fp8lt import build, device, ops, recipe, settings, toolchain

SHAPE = (8192, 4096, 4096)  # M, N, K: a projection of an 8B model over 8192 tokens
BOUND = 5e-3  # relative error; bf16 results of exact products have 1.7e-3
RUNS, WARM_UP = 20, 5


@dataclass
class Check:
    """One FP8 GEMM, compared with float64 on the same FP8 operands."""

    formats: str
    error: float | None = None
    tflops: float | None = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and is right; NaN is not."""
        return self.failure is None and self.error is not None and self.error <= BOUND


@dataclass
class Gpu:
    """One GPU that this process can use, or that only the driver sees."""

    name: str
    architecture: str
    memory_gib: float
    driver: str | None
    recipes: dict[str, dict[str, str]]  # name -> verdict ("native" or "refused") and reason
    expected: bool = False  # it has FP8 hardware and nobody switched it off
    checks: list[Check] = field(default_factory=list)


@dataclass
class Report:
    """Everything that the probe found."""

    origin: dict[str, Any]  # date, device, versions, commit
    fp8lt: str
    platform: str
    cublaslt_loaded: int | None
    cublaslt_compiled: int | None
    toolchain: str
    toolchain_missing: str | None
    extension: str | None
    extension_failure: str | None
    emulation: str
    gpus: list[Gpu]
    exit_code: int = 1


def main() -> int:
    """Probe, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    args = parser.parse_args()
    report = probe()
    if args.json:
        print(json.dumps(asdict(report), indent=2))
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
        extension=None if library is None else str(library).replace(str(Path.home()), "~", 1),
        extension_failure=build.failure(),
        emulation=check_emulation(),
        gpus=gpus,
    )
    report.exit_code = exit_code(report)
    return report


def exit_code(report: Report) -> int:
    """Return 2 if anything is broken, else 0 if any GPU is native, else 1."""
    gpus = report.gpus
    native = [gpu for gpu in gpus if any(r["verdict"] == "native" for r in gpu.recipes.values())]
    lost = [gpu for gpu in gpus if gpu.expected and gpu not in native]
    wrong = [check for gpu in gpus for check in gpu.checks if not check.ok]
    if lost or wrong or report.emulation != "works":
        return 2
    return 0 if native else 1


def describe(index: int) -> Gpu:
    """Describe and check the GPU that torch calls cuda:`index`."""
    where = torch.device("cuda", index)
    properties = torch.cuda.get_device_properties(where)
    support = device.support(where)
    expected = support.native and settings.read().build != "off"
    verdict, reason = "refused", support.reason
    if support.native:
        failure = build.ensure()
        verdict, reason = ("native", reason) if failure is None else ("refused", failure)
    architecture = device.amd_architecture(where) or f"sm_{properties.major}{properties.minor}"
    return Gpu(
        name=properties.name,
        architecture=architecture,
        memory_gib=round(properties.total_memory / 2**30, 1),
        driver=driver_version(),
        recipes={name: {"verdict": verdict, "reason": reason} for name in recipe.NAMES},
        expected=expected,
        checks=check_gemms(where) if verdict == "native" else [],
    )


def unseen_gpus() -> list[Gpu]:
    """Describe the GPUs that the driver has and torch cannot use."""
    hidden = torch.version.cuda is not None
    why = "hidden from CUDA (CUDA_VISIBLE_DEVICES)" if hidden else "this torch has no CUDA"
    gpus = []
    for gpu in device.gpus():
        support = device.capability_support(gpu.name, gpu.capability)
        reason = why if support.native else support.reason
        gpus.append(
            Gpu(
                name=gpu.name,
                architecture=f"sm_{gpu.capability[0]}{gpu.capability[1]}",
                memory_gib=round(gpu.memory_bytes / 2**30, 1),
                driver=gpu.driver,
                recipes={n: {"verdict": "refused", "reason": reason} for n in recipe.NAMES},
                expected=support.native and not hidden,
            )
        )
    return gpus


def check_gemms(where: torch.device) -> list[Check]:
    """Run each pair of formats that a layer multiplies."""
    e4m3, e5m2 = device.formats(where)
    pairs = {"e4m3 @ e4m3 (y)": (e4m3, e4m3), "e5m2 @ e4m3 (dx, dw)": (e5m2, e4m3)}
    return [check_gemm(where, name, *pair) for name, pair in pairs.items()]


def check_gemm(
    where: torch.device, formats: str, a_type: torch.dtype, b_type: torch.dtype
) -> Check:
    """Multiply, compare with float64, time."""
    m, n, k = SHAPE
    try:
        a = ops.quantize_tensorwise(torch.randn(m, k, device=where), a_type, transposed=False)
        b = ops.quantize_tensorwise(torch.randn(n, k, device=where), b_type, transposed=False)

        def gemm() -> torch.Tensor:
            fast = a_type == b_type  # as the layer does: fast accumulation in forward only
            return ops.gemm_nt(a.data, b.data, a.scale_inv, b.scale_inv, m, n, fast_accum=fast)

        rows = slice(0, m, 64)  # enough of the float64 product to trust the rest
        want = (a.data[rows].double() * a.scale_inv[0]) @ (b.data.double() * b.scale_inv[0]).t()
        error = ((gemm()[rows].double() - want).norm() / want.norm()).item()
        seconds = median_seconds(gemm)
    except RuntimeError as failure:
        return Check(formats, failure=str(failure).splitlines()[0])
    return Check(formats, error, round(2 * m * n * k / seconds / 1e12, 1))


def median_seconds(call: Callable[[], torch.Tensor]) -> float:
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
    """Multiply on the CPU; return "works" or what is wrong."""
    x, w = torch.randn(16, 64), torch.randn(32, 64)
    want = x.double() @ w.double().t()
    error = ((fp8lt.linear(x, w).double() - want).norm() / want.norm()).item()
    return "works" if error < 0.06 else f"is wrong: relative error {error:.2g}"


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


def print_table(report: Report) -> None:
    """Print the report in two aligned columns."""
    origin = report.origin
    rows = [
        ("fp8lt", f"{report.fp8lt} on Python {origin['python']}, {report.platform}"),
        ("torch", f"{origin['torch']}, CUDA {origin['cuda'] or 'none'}"),
        ("cuBLASLt", f"{version(report.cublaslt_loaded)} loaded, "
                     f"{version(report.cublaslt_compiled)} compiled with"),
        ("toolchain", report.toolchain),
        ("", report.toolchain_missing),
        ("extension", report.extension or "not built"),
        ("", report.extension_failure),
        ("emulation", report.emulation),
    ]  # fmt: skip
    for index, gpu in enumerate(report.gpus):
        summary = f"{gpu.name}, {gpu.architecture}, {gpu.memory_gib} GiB, driver {gpu.driver}"
        rows.append((f"GPU {index}", summary))
        rows += [(f"  {name}", f"{r['verdict']}: {r['reason']}") for name, r in gpu.recipes.items()]
        rows += [(f"  {check.formats}", describe_check(check)) for check in gpu.checks]
    if not report.gpus:
        rows.append(("GPU", "none found; CPU tensors run emulated"))
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        for line in (text or "").splitlines():
            print(f"{name:<{width}}{line}")
            name = ""
    verdicts = ("Native FP8 works.", "Only emulation works here.", "BROKEN: see above.")
    print(f"\n{verdicts[report.exit_code]}")


def describe_check(check: Check) -> str:
    """Say one check in words."""
    if check.failure is not None:
        return f"FAILED: {check.failure}"
    m, n, k = SHAPE
    verdict = "ok" if check.ok else f"WRONG, want at most {BOUND}"
    return f"{check.tflops} TFLOP/s at {m}x{k}x{n} (MxKxN), error {check.error:.1e}: {verdict}"


def version(number: int | None) -> str:
    """Write 130101 as 13.1.1."""
    if number is None:
        return "none"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


if __name__ == "__main__":
    sys.exit(main())
