"""The build: found tools, cache keys, one builder, messages. Real compilers, real processes.

It needs a CUDA build of torch and an nvcc, and is skipped, with the reason, where there is none.
"""

import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from cases import RunPython, needs_toolchain

from fp8lt import build, cache, toolchain


@needs_toolchain
def test_two_processes_starting_cold_build_once_and_both_load(
    run_python: RunPython, extension_cache: Path
) -> None:
    for built in extension_cache.iterdir():  # by another file's tests
        shutil.rmtree(built) if built.is_dir() else built.unlink()
    start = time.monotonic()
    children = [run_python(wait=False), run_python(wait=False)]
    outputs = [child.communicate(timeout=300) for child in children]  # type: ignore[attr-defined]
    seconds = time.monotonic() - start
    (library,) = extension_cache.glob("*/fp8lt.so")
    assert [out.splitlines() for out, _ in outputs] == [[str(library), "None"]] * 2
    errors = "".join(err for _, err in outputs)
    assert errors.count("compiling the CUDA extension") == 1
    assert errors.count("waiting for another process") == 1
    assert not list(extension_cache.glob("*.build-*"))
    print(f"cold build: {seconds:.0f} s")


@needs_toolchain
def test_a_second_import_loads_from_the_cache_quietly_and_fast(run_python: RunPython) -> None:
    run_python()  # built by the test before, or now
    done = run_python(
        "import time, torch; t = time.perf_counter(); import fp8lt\n"
        "print(time.perf_counter() - t); from fp8lt import build; assert build.loaded_library()"
    )
    assert done.stderr == ""
    assert float(done.stdout) < 0.3  # measured 0.04 on two cores


@needs_toolchain
def test_the_binary_holds_code_for_hopper_and_links_the_libraries_of_torch(
    run_python: RunPython, extension_cache: Path
) -> None:
    run_python()
    binary = next(extension_cache.glob("*/fp8lt.so")).read_bytes()
    assert b"sm_90a" in binary
    assert b"libcublasLt.so.1" in binary
    code = (
        "import torch, fp8lt, re\n"
        "maps = open('/proc/self/maps').read()\n"
        "for name in ('libcublasLt.so', 'libcudart.so'):\n"
        "    files = {f for f in maps.split() if '/' + name in f}\n"
        "    assert len(files) == 1, files\n"
        "compiled, loaded = torch.ops.fp8lt.cublaslt_versions()\n"
        "assert compiled // 10000 == loaded // 10000 >= 12"
    )
    run_python(code)


@needs_toolchain
def test_a_failed_compile_is_one_warning_with_the_reason_and_the_log(
    run_python: RunPython, tmp_path: Path
) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*|*-v*|*-dump*) exec c++ "$@";; esac\n'
        'echo "gemm.cpp:1: error: this compiler is broken" >&2; exit 1\n'
    )
    compiler.chmod(0o755)
    done = run_python(CXX=str(compiler))
    assert done.stdout.splitlines()[0] == "None"
    assert done.stderr.count("error: this compiler is broken") == 1
    assert "without its CUDA extension: compiling the CUDA extension failed" in done.stderr
    log = Path(done.stdout.splitlines()[-1].removeprefix("The whole log: "))
    assert "this compiler is broken" in log.read_text()


def test_a_missing_nvcc_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain.torch.version, "cuda", "97.1")
    with pytest.raises(
        toolchain.ToolchainError, match=r"no nvcc of CUDA 97.*\n?.*fp8lt\[toolkit\]"
    ):
        toolchain.find()


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.torch.version, "cuda", None)
    with pytest.raises(toolchain.ToolchainError, match="built without CUDA"):
        toolchain.find()


def test_a_missing_compiler_or_one_with_arguments_is_named() -> None:
    for cxx in ("no-such-compiler", "c++ -m64"):
        with pytest.raises(toolchain.ToolchainError, match=f"{re.escape(repr(cxx))} does not run"):
            toolchain._cxx_version(cxx)


def test_build_off_neither_compiles_nor_loads(run_python: RunPython) -> None:
    done = run_python(FP8LT_BUILD="off")
    assert done.stdout.splitlines()[0] == "None"
    assert "FP8LT_BUILD=off" in done.stdout
    assert done.stderr == ""


def test_nowhere_to_write_is_an_error_that_lists_what_was_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8LT_CACHE_DIR", "/dev/null/a")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/dev/null/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/c")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/d")
    with pytest.raises(build.BuildError, match="set FP8LT_CACHE_DIR") as caught:
        cache.folder()
    assert all(f"/dev/null/{name}" in str(caught.value) for name in "abcd")


def test_any_failure_is_kept_and_does_not_break_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full_disk() -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_load", full_disk)
    monkeypatch.setattr(build, "_outcome", None)
    assert build.ensure() == "OSError: [Errno 28] No space left on device"
    monkeypatch.setattr(build, "_load", lambda: 1 / 0)
    assert build.ensure() == build.failure() == "OSError: [Errno 28] No space left on device"


def test_a_file_system_without_locks_does_not_stop_a_build(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    with cache.locked(tmp_path / "lock") as alone:
        assert not alone


def test_flags_that_nvcc_takes_from_the_environment_are_in_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = toolchain.Toolchain(Path(), "13.0.88", "c++", "12", (), Path(), Path())
    keys = {tuple(build._versions(tools))}
    for name in ("CC", "PYTORCH_NVCC", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "changed")
        keys.add(tuple(build._versions(tools)))
    assert len(keys) == 5


def test_every_source_is_compiled_once() -> None:
    units = build._translation_units()
    lines = [line for unit in units for line in unit.read_text().splitlines()]
    compiled = [unit.name for unit in units if not unit.name.startswith("unit_")]
    compiled += re.findall(r'^#include "(\w+\.cpp)"$', "\n".join(lines), re.MULTILINE)
    sources = [f.name for f in build.SOURCE_DIR.iterdir() if f.suffix in (".cpp", ".cu")]
    assert sorted(compiled) == sorted(name for name in sources if not name.startswith("unit_"))


def test_everything_that_changes_the_binary_changes_the_key() -> None:
    base = ({"a.cu": "x"}, "-O3", ["torch 1", "nvcc 13"])
    others = [
        ({"a.cu": "y"}, *base[1:]),
        ({"b.cu": "x"}, *base[1:]),
        (base[0], "-O2", base[2]),
        (*base[:2], ["torch 2", "nvcc 13"]),
    ]
    keys = {build.cache_key(*inputs) for inputs in (base, *others)}
    assert len(keys) == 5
    assert build.cache_key(*base) == build.cache_key(*base)
    assert all(len(key) == 16 for key in keys)


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        ("7.5 8.0;9.0a", "9.0a"),
        ("8.9;9.0+PTX", "8.9;9.0+PTX"),
        ("8.0", "9.0"),
        ("", "9.0"),
        ("Hopper", "9.0"),
    ],
)
def test_architectures_are_those_asked_for_that_have_fp8(
    monkeypatch: pytest.MonkeyPatch, asked: str, got: str
) -> None:
    """BUG-101."""
    monkeypatch.setattr(build.device, "gpus", lambda: ())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert build.architectures() == got


def test_architectures_default_to_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = build.device.Gpu("a GPU", (8, 9), 0, "580")
    old = gpu._replace(capability=(8, 0))
    monkeypatch.setattr(build.device, "gpus", lambda: (gpu._replace(capability=(9, 0)), gpu, old))
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert build.architectures() == "8.9;9.0"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a;10.0")  # lacks one of the GPUs here
    assert build.architectures() == "9.0a;10.0;8.9"
