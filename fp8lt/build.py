"""Compile the extension once, keep it, load it.

A build is named by a hash of everything that can change the binary: source text, flags, compiler,
Python, torch and CUDA. It happens in a private folder of the cache and is published by one rename,
so a folder of that name is always complete. An OS lock makes one process of many build; it dies
with its holder, so a killed builder blocks nobody.

Compiling runs in a child process, which also loads the result: the environment that
`torch.utils.cpp_extension.load` needs (CUDA_HOME, PATH, architectures) never leaks into this one,
and a binary that cannot be loaded is found there.
"""

import contextlib
import glob
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from . import cache, device, settings, toolchain
from .cache import say
from .toolchain import BuildError, Toolchain

SOURCE_DIR = Path(__file__).parent / "csrc"
_DEFAULT_ARCH = "9.0"
_CHILD = """
import json, sys
from torch.utils import cpp_extension
cpp_extension.load(**json.load(sys.stdin))
"""


# ------------------------------------------------------------------------------- the only state

_lock = threading.RLock()
_outcome: tuple[Path | None, str | None] | None = None  # (library, failure) once decided
_module: ModuleType | None = None
_when_loaded: list[Callable[[], None]] = []


def ensure() -> str | None:
    """Load the extension, compiling it if it must be; return None, or why it cannot be had.

    Decided once per process: a failure is remembered, not tried again.
    """
    global _outcome, _module
    with _lock:
        if _outcome is None:
            try:
                library = _load()
                _module = _python_module(library)
                _outcome = (library, None)
                for tell in _when_loaded:
                    tell()
            except BuildError as error:
                _outcome = (None, str(error))
            except Exception as error:  # a full disk, say: never a reason for an import to fail
                _outcome = (None, f"{type(error).__name__}: {error}")
        return _outcome[1]


def when_loaded(tell: Callable[[], None]) -> None:
    """Have `tell` called once the extension is loaded."""
    _when_loaded.append(tell)


def loaded_library() -> Path | None:
    """Return the file of the loaded extension, or None."""
    return _outcome[0] if _outcome is not None else None


def module() -> ModuleType | None:
    """Return the loaded extension's Python functions; None where it was built without any."""
    return _module


def failure() -> str | None:
    """Return why the extension could not be had, or None if it was, or was not tried yet."""
    return _outcome[1] if _outcome is not None else None


def on_import() -> None:
    """Do what FP8LT_BUILD says at import: load or compile, or nothing. Never raises for a build."""
    policy = settings.read().build
    if policy == "force" or (policy == "auto" and _has_native_gpu()):
        reason = ensure()
        if reason is not None:
            warnings.warn(f"fp8lt runs without its CUDA extension: {reason}", stacklevel=3)


def _has_native_gpu() -> bool:
    """Say whether a GPU that this process may use has FP8, without initialising CUDA."""
    return (
        torch.version.cuda is not None
        and any(gpu.capability >= device.NATIVE_SINCE for gpu in device.gpus())
        and torch.cuda.device_count() > 0  # honours CUDA_VISIBLE_DEVICES
    )


# ------------------------------------------------------------------------------------ the build


def _load() -> Path:
    if settings.read().build == "off":
        raise BuildError("FP8LT_BUILD=off: the extension is neither compiled nor loaded")
    if not SOURCE_DIR.is_dir():  # imported from a zip file
        raise BuildError(
            f"the extension's sources are no files of their own: {SOURCE_DIR} is no folder. "
            "Install fp8lt unpacked, with pip"
        )
    tools = toolchain.find()
    spec = _compile_spec(tools)
    folder = cache.folder()
    key = cache_key(_sources(), json.dumps(spec, sort_keys=True), _versions(tools))
    library = folder / key / "fp8lt.so"

    def build() -> Path:
        with cache.locked(folder / f"{key}.lock") as alone:
            if _is_intact(library):  # another process has built it meanwhile
                return library
            return _build(tools, spec, library.parent, alone)

    if not _is_intact(library):
        library = build()
        error = _why_not_loaded(library)
    elif error := _why_not_loaded(library):  # made where another C library is, say
        _digest_file(library).unlink(missing_ok=True)
        library = build()
        error = _why_not_loaded(library)
    if error:
        raise BuildError(f"the compiled extension {library} does not load: {error}") from error
    compiled, loaded = torch.ops.fp8lt.cublaslt_versions()
    if compiled // 10000 != loaded // 10000:
        raise BuildError(
            f"compiled with cuBLASLt {compiled}'s header, but torch has loaded version {loaded}"
        )
    return library


def _why_not_loaded(library: Path) -> OSError | None:
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return error
    return None


def _python_module(library: Path) -> ModuleType | None:
    """Return the module in a loaded library; see csrc/python.cpp for when there is none."""
    loader = importlib.machinery.ExtensionFileLoader("fp8lt_native", str(library))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    try:
        native = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    except ImportError:
        return None
    loader.exec_module(native)
    return native


def cache_key(files: dict[str, str], flags: str, versions: list[str]) -> str:
    """Name the build by everything that can change the binary; 16 hex digits."""
    inputs = repr((sorted(files.items()), flags, versions))
    return hashlib.sha256(inputs.encode()).hexdigest()[:16]


def _sources() -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted(SOURCE_DIR.iterdir()) if file.is_file()}


def _versions(tools: Toolchain) -> list[str]:
    variables = ("CC", "PYTORCH_NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return [
        f"{platform.machine()} {sys.implementation.cache_tag}",
        torch.__version__,
        str(torch.version.cuda),
        f"nvcc {tools.nvcc_version}",
        f"{tools.cxx} {tools.cxx_version}",
        *(f"{name}={os.environ.get(name)}" for name in variables),
        architectures(),
    ]


def _compile_spec(tools: Toolchain) -> dict[str, object]:
    """Return the arguments of `cpp_extension.load`, less the folder to build in."""
    after = [f"-idirafter {_in_ninja(directory)}" for directory in tools.include_dirs]
    return {
        "name": "fp8lt",
        "sources": [str(file) for file in _translation_units()],
        "extra_cflags": ["-O3", *after],
        "extra_cuda_cflags": ["-O3"],
        "extra_ldflags": [_in_ninja(tools.cublaslt)],
        "with_cuda": True,
        "is_python_module": False,
        "verbose": True,
    }


def _in_ninja(path: Path) -> str:
    return shlex.quote(str(path)).replace("$", "$$")  # for a shell, by way of a ninja file


def _translation_units() -> list[Path]:
    """Return the files to compile; what takes longest comes first, and should not begin last."""
    texts = _sources()
    included = re.findall(r'^#include "(\w+\.cpp)"$', "\n".join(texts.values()), re.MULTILINE)
    units = [name for name in texts if name.endswith((".cpp", ".cu")) and name not in included]
    units.sort(key=lambda name: (not name.startswith("unit_"), -len(texts[name]), name))
    return [SOURCE_DIR / name for name in units]


def architectures() -> str:
    """Return the architectures to compile for, in TORCH_CUDA_ARCH_LIST's form.

    That variable's FP8-capable entries (it is often set for other extensions), and the GPUs of this
    machine that they leave out; Hopper if that is nothing.
    """
    asked = re.split(r"[;\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    listed = {arch: _arch_number(arch) for arch in asked}
    listed = {arch: number for arch, number in listed.items() if number >= device.NATIVE_SINCE}
    present = {gpu.capability for gpu in device.gpus()}
    if torch.cuda.is_initialized():  # NVML is not everywhere; do not initialise CUDA for this
        present |= {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    missing = {c for c in present if c >= device.NATIVE_SINCE} - set(listed.values())
    return ";".join([*listed, *(f"{c[0]}.{c[1]}" for c in sorted(missing))]) or _DEFAULT_ARCH


def _arch_number(arch: str) -> tuple[int, int]:
    number = re.match(r"(\d+)\.(\d+)", arch)  # "9.0a", "9.0+PTX"; not torch's names
    return (int(number.group(1)), int(number.group(2))) if number else (0, 0)


def _build(tools: Toolchain, spec: dict[str, object], target: Path, alone: bool) -> Path:
    """Compile into a private folder beside `target`, rename it to `target`, return the library.

    alone: no other process of this machine is at work there.
    """
    arch = architectures()
    environment = _child_environment(tools, arch)
    prefix = f"{target.name}.build-{platform.node()}-"
    if alone:  # of builders that were killed
        for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    say(
        f"compiling the CUDA extension (compute capability {arch}, nvcc {tools.nvcc_version}), "
        f"once, in less than a minute; it is kept in {target}"
    )
    start = time.monotonic()
    # The linker, which runs there, wants this name; wheels have only the versioned one.
    (work / "libcudart.so").symlink_to(tools.cudart)
    here = {
        "build_directory": str(work),
        "extra_ldflags": ["-L.", *spec["extra_ldflags"]],  # type: ignore[misc]
    }
    log = work / "build.log"
    code = _run_child(json.dumps({**spec, **here}), environment, work, log)
    if code != 0:
        kept = target.with_suffix(".log")
        shutil.move(log, kept)
        shutil.rmtree(work, ignore_errors=True)
        raise BuildError(_explain(kept))
    try:
        _check_binary(work / "fp8lt.so", tools)
    except BuildError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    _digest_file(work / "fp8lt.so").write_text(_digest(work / "fp8lt.so"))
    for intermediate in (*work.glob("*.o"), *work.glob(".ninja*"), work / "libcudart.so"):
        intermediate.unlink()
    say(f"compiled in {time.monotonic() - start:.0f} s")
    return _publish(work, target)


def _publish(work: Path, target: Path) -> Path:
    """Rename the folder to `target` and return the library to load.

    Others may have been faster, where the lock does not reach: another machine on a shared disk.
    """
    for _ in range(2):
        with contextlib.suppress(OSError):
            work.rename(target)
            return target / "fp8lt.so"
        if _is_intact(target / "fp8lt.so"):
            shutil.rmtree(work, ignore_errors=True)
            return target / "fp8lt.so"
        shutil.rmtree(target, ignore_errors=True)  # damaged
    return work / "fp8lt.so"  # what is there cannot be seen from here yet


def _run_child(spec: str, env: dict[str, str], work: Path, log: Path) -> int:
    with log.open("w") as out:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], input=spec, text=True, cwd=work, env=env,
            stdout=out, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    if settings.read().verbose:
        sys.stderr.write(log.read_text(errors="replace"))
    return child.returncode


def _child_environment(tools: Toolchain, arch: str) -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_HOME": str(tools.cuda_home),
        "CXX": tools.cxx,
        "TORCH_CUDA_ARCH_LIST": arch,
        "PATH": os.pathsep.join([str(toolchain.ninja_dir()), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(os.fspath(path) for path in sys.path if path),
    }


def _explain(log: Path) -> str:
    """Say why a compile failed: the first lines of the log that are errors, and where it is."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"\berror\b|Error:|cannot find|not found", line)]
    unique = list(dict.fromkeys(errors or lines[-5:]))
    said = "\n".join(f"  {line}" for line in unique[:5])
    return f"compiling the CUDA extension failed:\n{said}\nThe whole log: {log}"


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _is_intact(library: Path) -> bool:
    """Say whether the library is there as it was published: loading a truncated one is a SIGBUS.

    And by whom: the cache may have been open to others once.
    """
    try:
        if cache.why_not_ours(library.parent):
            return False
        return _digest_file(library).read_text() == _digest(library)
    except OSError:
        return False


def _check_binary(library: Path, tools: Toolchain) -> None:
    # With a second, static copy of libstdc++ every C++ error with a number in it crashes.
    if b"libstdc++.so.6\0" not in library.read_bytes():
        raise BuildError(
            f"the compiler {tools.cxx!r} links libstdc++ statically, which crashes inside torch. "
            "Set CXX=g++ (and CC=gcc), or another compiler that links it dynamically"
        )
