"""What compiles the extension: nvcc and its headers, cuBLASLt's header, a C++ compiler, ninja.

Each may come from a CUDA toolkit or from Python wheels (`pip install fp8lt[toolkit]`), in any mix.
cuBLASLt and the CUDA runtime that the extension is linked to are always the copies that torch has
loaded, so that a process never holds two.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch


class Toolchain(NamedTuple):
    """Everything that a build needs, found and checked."""

    cuda_home: Path  # holds bin/nvcc and include/cuda_runtime.h
    nvcc_version: str  # "13.0.88"
    cxx: str  # the C++ compiler's command
    cxx_version: str
    include_dirs: tuple[Path, ...]  # searched after everything else, for what cuda_home lacks
    cublaslt: Path  # the library files that torch has loaded
    cudart: Path


class BuildError(RuntimeError):
    """The extension could not be compiled or loaded; the text leads with the reason."""


class ToolchainError(BuildError):
    """Something needed to compile is missing; the text says what, and which command brings it."""


def find() -> Toolchain:
    """Find the toolchain. Raises ToolchainError."""
    if torch.version.cuda is None:
        raise ToolchainError(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
        )
    cuda_home, nvcc_version = _cuda_home(torch.version.cuda.split(".")[0])
    includes = _include_dirs(cuda_home)
    cxx = os.environ.get("CXX") or "c++"
    return Toolchain(
        cuda_home=cuda_home,
        nvcc_version=nvcc_version,
        cxx=cxx,
        cxx_version=_cxx_version(cxx),
        include_dirs=includes,
        cublaslt=loaded_library("libcublasLt.so"),
        cudart=loaded_library("libcudart.so"),
    )


def _cuda_home(want: str) -> tuple[Path, str]:
    """Return the first CUDA home with a working nvcc of major version `want`, and its version."""
    rejected = []
    for origin, home in _candidates():
        version = _nvcc_version(home / "bin" / "nvcc")
        if version is None:
            rejected.append(f"{origin}: no working bin/nvcc in {home}")
        elif version.split(".")[0] != want:
            rejected.append(f"{origin}: {home} is CUDA {version}")
        elif not (home / "include" / "cuda_runtime.h").exists():
            rejected.append(f"{origin}: no include/cuda_runtime.h in {home}")
        else:
            return home, version
    looked = "\n".join(f"  {line}" for line in rejected) or "  found none"
    raise ToolchainError(
        f"no nvcc of CUDA {want}, which torch {torch.__version__} is built for. "
        "Run: pip install 'fp8lt[toolkit]', or set CUDA_HOME to a toolkit.\n"
        f"Looked at CUDA_HOME, nvcc on PATH, the default folder and wheels:\n{looked}"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield variable, Path(os.environ[variable]).absolute()
    on_path = shutil.which("nvcc")
    if on_path is not None:
        yield "nvcc on PATH", _nvcc_home(on_path)
    default = Path("/usr/local/cuda")
    if default.exists():
        yield "default folder", default
    for wheels in wheel_dirs():
        yield "wheels", wheels


def _nvcc_home(nvcc: str) -> Path:
    """Return nvcc's own idea of its toolkit: the command on PATH may be a script far from it."""
    dry_run = _output([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull])
    top = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    return Path(top.group(1)).resolve() if top else Path(nvcc).resolve().parent.parent


def _nvcc_version(nvcc: Path) -> str | None:
    found = re.search(r"release \d+\.\d+, V(\d+[.\d]*)", _output([str(nvcc), "--version"]))
    return found.group(1) if found else None


def wheel_dirs() -> list[Path]:
    """Return the folders in which NVIDIA's wheels lay out a CUDA home: bin, include, lib."""
    spec = importlib.util.find_spec("nvidia")  # a namespace package, possibly of several folders
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return [home for root in roots for home in sorted(Path(root).glob("cu[0-9]*"))]


def _include_dirs(cuda_home: Path) -> tuple[Path, ...]:
    """Return where the headers are that may be missing from `cuda_home`; check that all exist."""
    homes = [cuda_home, *wheel_dirs()]
    dirs = [d for home in homes for d in (home / "include", home / "include" / "cccl")]
    for header, extra in (
        ("cublasLt.h", "nvidia-cublas"),
        ("crt/host_defines.h", "nvidia-cuda-crt"),
        ("nv/target", "nvidia-cuda-cccl"),
    ):
        if not any((d / header).exists() for d in dirs):
            raise ToolchainError(
                f"the header {header} is in none of {', '.join(str(home) for home in homes)}. "
                f"Run: pip install 'fp8lt[toolkit]' (it is part of {extra})"
            )
    return tuple(d for d in dirs if d.is_dir())


def _cxx_version(cxx: str) -> str:
    version = _output([cxx, "--version"]).splitlines()
    if not version:
        raise ToolchainError(
            f"the C++ compiler {cxx!r} does not run. Install g++, or set CXX to the command of a "
            "compiler, without arguments"
        )
    return version[0]


def loaded_library(name: str) -> Path:
    """Return the file of a shared library that this process has loaded (torch has loaded these)."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split(maxsplit=5)[-1]
        if f"/{name}" in file:
            return Path(file)
    raise ToolchainError(f"torch {torch.__version__} has not loaded a {name} to link with")


def ninja_dir() -> Path:
    """Return the folder that holds the ninja executable. Raises ToolchainError.

    Not a part of `Toolchain`: what is compiled already needs none.
    """
    # The executable may not be on PATH: a venv that is not activated.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("ninja") or ():
            executable = Path(str(file.locate()))
            if file.name == "ninja" and os.access(executable, os.X_OK) and executable.is_file():
                return executable.resolve().parent
    folders = [os.environ.get("PATH", os.defpath), os.path.join(sys.prefix, "bin")]  # conda's
    found = shutil.which("ninja", path=os.pathsep.join(folders))
    if found is None:
        raise ToolchainError("ninja is missing. Run: pip install ninja")
    return Path(found).parent


def _output(command: list[str]) -> str:
    """Return what a command prints on both streams, or "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout + done.stderr
