"""What the probe has found, and how it is shown: a table for people, Markdown for a bug report."""

import contextlib
import getpass
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHAPE = (8192, 4096, 4096)  # M, N, K: a projection of an 8B model over 8192 tokens
BOUND = 5e-3  # relative error; bf16 results of exact products have 1.7e-3
LAYER = (272, 200, 300)  # M, N, K of a whole layer: several blocks, none of them full
BOUND_LAYER = 0.09  # against float64 on x, w and dy themselves; up to 0.061 on a CPU


@dataclass
class Check:
    """One FP8 GEMM of a recipe, against float64 on the same FP8 operands; or its whole layer."""

    recipe: str
    gemm: str  # y, dx or dw; or layer
    formats: str
    error: float | None = None
    tflops: float | None = None
    failure: str | None = None
    bound: float = BOUND

    @property
    def ok(self) -> bool:
        """Whether it ran and is right; NaN is not."""
        return self.failure is None and self.error is not None and self.error <= self.bound


@dataclass
class Gpu:
    """One GPU that this process can use, or that only the driver sees."""

    name: str
    architecture: str
    memory_gib: float
    driver: str | None
    recipes: dict[str, dict[str, str]]  # name -> verdict, a `device.Way`, and reason
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
    cache: str
    emulation: str
    environment: dict[str, str]  # variables that are set
    gpus: list[Gpu]
    exit_code: int = 1


NO_GPU = "none found; CPU tensors run emulated"
VERDICTS = ("FP8 works.", "Only emulation works here.", "BROKEN: see above.")


def print_table(report: Report) -> None:
    """Print the report in two aligned columns."""
    rows = [*machine(report)]
    for index, gpu in enumerate(report.gpus):
        rows.append((f"GPU {index}", summary(gpu)))
        for name, found in gpu.recipes.items():
            rows.append((f"  {name}", f"{found['verdict']}: {found['reason']}"))
            rows += [(f"    {c.gemm}  {c.formats}", describe_check(c)) for c in checks(gpu, name)]
    if not report.gpus:
        rows.append(("GPU", NO_GPU))
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        for line in text.splitlines():
            print(f"{name:<{width}}{line}")
            name = ""
    print(f"\n{VERDICTS[report.exit_code]}")


def print_markdown(report: Report) -> None:
    """Print the report as Markdown that can be shown to anybody."""
    verdict = VERDICTS[report.exit_code].rstrip(".").replace("above", "below")
    lines = [f"**probe_gpu: {verdict}** ({report.origin['date']})"]
    lines += table(("what", "found"), [(name or "lacks", text) for name, text in machine(report)])
    for index, gpu in enumerate(report.gpus):
        lines += ["", f"GPU {index}: {summary(gpu)}"]
        rows = []
        for name, found in gpu.recipes.items():
            done = "\n".join(f"{c.gemm} {c.formats} {describe_check(c)}" for c in checks(gpu, name))
            rows.append((name, found["verdict"], found["reason"], done or "none"))
        lines += table(("recipe", "runs", "reason", "checks"), rows)
    if not report.gpus:
        lines += ["", f"GPU: {NO_GPU}"]
    print(without_names("\n".join(lines)))


def machine(report: Report) -> Iterator[tuple[str, str]]:
    """Yield what is no GPU's: names and texts; one without a name goes on with that before it."""
    origin = report.origin
    commit = f" at {origin['commit']}" if origin["commit"] else ""
    yield "fp8lt", f"{report.fp8lt}{commit} on Python {origin['python']}, {report.platform}"
    yield "torch", f"{origin['torch']}, CUDA {origin['cuda'] or 'none'}"
    loaded, compiled = version(report.cublaslt_loaded), version(report.cublaslt_compiled)
    yield "cuBLASLt", f"{loaded} loaded, {compiled} compiled with"
    yield "toolchain", report.toolchain
    if report.toolchain_missing:
        yield "", report.toolchain_missing
    yield "extension", report.extension or "not built"
    if report.extension_failure:
        yield "", report.extension_failure
    yield "cache", report.cache
    yield "emulation", report.emulation
    said = "\n".join(f"{name}={value}" for name, value in report.environment.items())
    yield "variables", said or "none set"


def summary(gpu: Gpu) -> str:
    return f"{gpu.name}, {gpu.architecture}, {gpu.memory_gib} GiB, driver {gpu.driver}"


def checks(gpu: Gpu, recipe: str) -> list[Check]:
    return [check for check in gpu.checks if check.recipe == recipe]


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table in Markdown, an empty one before them."""

    def line(cells: tuple[str, ...]) -> str:
        escaped = (
            c.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
            for c in cells
        )
        return f"| {' | '.join(escaped)} |"

    return ["", line(head), "|" + "---|" * len(head), *map(line, rows)]


NOT_PRIVATE = ("root", "user", "ubuntu", "admin", "localhost", "cuda", "torch", "python")


def without_names(text: str) -> str:
    """Leave out whose machine it is: the home folder, and the names of user and machine."""
    with contextlib.suppress(RuntimeError):  # no home
        home = str(Path.home())
        if len(home) > 1:  # in some containers it is the root
            text = re.sub(re.escape(home) + r"(?![\w-])", "$HOME", text)
    names = {platform.node(): "HOST", platform.node().split(".")[0]: "HOST"}
    with contextlib.suppress(KeyError, OSError):  # a user without a name
        names[getpass.getuser()] = "USER"
    for name, instead in names.items():
        if len(name) > 2 and name.lower() not in NOT_PRIVATE:
            domain = r"(\.[a-z][\w-]*)*" if instead == "HOST" else ""
            text = re.sub(re.escape(name) + domain, instead, text, flags=re.IGNORECASE)
    return text


def describe_check(check: Check) -> str:
    """Say one check in words."""
    if check.failure is not None:
        return f"FAILED: {check.failure}"
    m, n, k = LAYER if check.gemm == "layer" else SHAPE
    speed = "" if check.tflops is None else f"{check.tflops} TFLOP/s, "
    verdict = "ok" if check.ok else f"WRONG, want at most {check.bound}"
    return f"{speed}{m}x{k}x{n} (MxKxN), error {check.error:.1e}: {verdict}"


def version(number: int | None) -> str:
    """Write 130101 as 13.1.1."""
    if number is None:
        return "none"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
