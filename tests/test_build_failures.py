"""Kinds of bugs that builds at first use have had: locks, races, caches, missing tools.

Processes, locks and folders are real here; the compiler is a stub, and so is what it makes.
"""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fp8lt import build, cache, recipe, toolchain
from fp8lt.toolchain import ToolchainError

CUDA = torch.device("cuda", 0)
NAMES = pytest.mark.parametrize("name", recipe.NAMES)

# In place of build._CHILD: half a library, then, once it may go on, an error or the other half.
COMPILER = """
import json, os, pathlib, sys, time
work, stub = pathlib.Path(json.load(sys.stdin)["build_directory"]), pathlib.Path(os.environ["STUB"])
(work / "fp8lt.so").write_bytes(b"libstdc++.so.6\\0")
(stub / f"started-{os.getpid()}").touch()
for _ in range(3000):
    if (stub / "go").exists():
        break
    time.sleep(0.01)
if (stub / "fail").exists():
    sys.exit("gemm.cpp:1: error: out of memory")
with (work / "fp8lt.so").open("ab") as library:
    library.write(b"whole")
"""
WHOLE = b"libstdc++.so.6\0whole"
TOOLS = toolchain.Toolchain(
    Path("/cuda"), "13.0.88", "c++", "12", (), Path("/blas.so"), Path("/rt.so")
)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "waited for 20 s"
        time.sleep(0.01)


class Stub(NamedTuple):
    cache: Path
    sources: Path
    folder: Path  # what tells the compiler "go" and "fail", and what it leaves

    def started(self) -> int:
        return len([*self.folder.glob("started-*")])

    def libraries(self) -> list[Path]:
        """Check that nothing but complete builds, their locks and logs is left; return those."""
        assert not [*self.cache.glob("*.build-*")]
        return sorted(path for path in self.cache.iterdir() if path.is_dir())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stub:
    """Let a build take what `COMPILER` makes for an extension, and keep it in an empty cache."""
    stub = Stub(tmp_path / "cache", tmp_path / "csrc", tmp_path / "stub")
    stub.sources.mkdir()
    for name in ("gemm.cpp", "gemm.h"):
        (stub.sources / name).touch()
    stub.folder.mkdir()
    (stub.folder / "go").touch()

    def load(library: str) -> None:
        if Path(library).read_bytes() != WHOLE:
            raise OSError(f"{library}: file too short")

    monkeypatch.setenv("STUB", str(stub.folder))
    monkeypatch.setenv("FP8LT_CACHE_DIR", str(stub.cache))
    monkeypatch.delenv("FP8LT_BUILD", raising=False)
    monkeypatch.setattr(build, "SOURCE_DIR", stub.sources)
    monkeypatch.setattr(build, "_CHILD", COMPILER)
    monkeypatch.setattr(toolchain, "find", lambda: TOOLS)
    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(torch.ops.fp8lt, "cublaslt_versions", lambda: (130000, 130101))
    return stub


class Child:
    """A forked process that calls `work`, with the state of this one."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._stderr = os.fdopen(os.memfd_create("stderr"), "w")
        self._ours, self._theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=(work,))
        self.process.start()
        self._theirs.close()

    def _run(self, work: Callable[[], object]) -> None:
        with contextlib.redirect_stderr(self._stderr):
            self._theirs.send(work())

    def said(self) -> str:
        return os.pread(self._stderr.fileno(), 1 << 16, 0).decode()

    def waits(self) -> bool:
        return "waiting for another process that compiles" in self.said()

    def result(self) -> object:
        assert self._ours.poll(20), "waited for 20 s"
        return self._ours.recv()


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[], object]], Child]]:
    children: list[Child] = []

    def call(work: Callable[[], object]) -> Child:
        children.append(Child(work))
        return children[-1]

    yield call
    for child in children:
        child.process.kill()
        child.process.join()


def loaded_bytes() -> bytes:
    return build._load().read_bytes()


# --------------------------------------------------------------------------- locks and processes


def test_a_lock_file_that_nobody_holds_blocks_nobody(
    stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-93: nor does torch's own, in the folder that a build has left."""
    folder = build._load().parent
    shutil.rmtree(folder)
    left = folder.with_name(f"{folder.name}.build-{os.uname().nodename}-left")
    left.mkdir()
    (left / "lock").touch()
    folder.with_suffix(".lock").write_text("12345")
    builder = start(loaded_bytes)
    assert builder.result() == WHOLE
    assert not builder.waits()
    assert stub.libraries() == [folder]


def test_a_killed_builder_lets_the_next_one_build(
    stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-93, BUG-94: what waits says for what; the compiler itself outlives its builder."""
    (stub.folder / "go").unlink()
    builder = start(loaded_bytes)
    until(lambda: stub.started() == 1)
    other = start(loaded_bytes)
    until(other.waits)
    assert f"(lock: {stub.cache}/" in other.said()
    os.kill(builder.process.pid, signal.SIGKILL)
    until(lambda: stub.started() == 2)  # while the first compiler still runs
    (stub.folder / "go").touch()
    assert other.result() == WHOLE
    assert len(stub.libraries()) == 1


def test_eight_ranks_that_start_cold_compile_once(
    stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-94."""
    (stub.folder / "go").unlink()
    ranks = [start(loaded_bytes) for _ in range(8)]
    until(lambda: sum(rank.waits() for rank in ranks) == 7)
    (stub.folder / "go").touch()
    assert [rank.result() for rank in ranks] == [WHOLE] * 8
    assert stub.started() == 1
    assert len(stub.libraries()) == 1


@pytest.mark.usefixtures("undecided")
def test_ranks_that_waited_for_a_failed_build_say_why_it_failed(
    stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-94: the compiler's error, for each; nothing half-made is left, and a repair is seen."""
    (stub.folder / "fail").touch()
    ranks = [start(build.ensure) for _ in range(3)]
    for rank in ranks:
        failure = str(rank.result())
        assert "gemm.cpp:1: error: out of memory" in failure
        assert "The whole log: " in failure
    assert stub.libraries() == []
    (stub.folder / "fail").unlink()
    assert start(loaded_bytes).result() == WHOLE


def test_machines_whose_locks_do_not_reach_each_other_build_beside_each_other(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-95: a shared home; one of them publishes, and both load a whole library."""
    monkeypatch.setattr(cache.fcntl, "flock", lambda *_: None)
    (stub.folder / "go").unlink()
    machines = []
    for name in ("node-1", "node-2"):
        monkeypatch.setattr(build.platform, "node", lambda name=name: name)
        machines.append(start(loaded_bytes))
    until(lambda: stub.started() == 2)
    (stub.folder / "go").touch()
    assert [machine.result() for machine in machines] == [WHOLE] * 2
    assert len(stub.libraries()) == 1


def test_builders_of_one_machine_leave_each_other_alone_where_there_are_no_locks(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-95."""

    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", no_locks)
    (stub.folder / "go").unlink()
    builders = []
    for count in (1, 2):  # the second begins while the first is at work
        builders.append(start(loaded_bytes))
        until(lambda count=count: stub.started() == count)
    (stub.folder / "go").touch()
    assert [builder.result() for builder in builders] == [WHOLE] * 2
    assert len(stub.libraries()) == 1


def test_who_cannot_see_what_a_faster_machine_built_loads_its_own(
    monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    """BUG-95: attributes of a network's files are seen late."""

    def refuse(self: Path, target: Path) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(Path, "rename", refuse)
    assert build._load().read_bytes() == WHOLE


def test_what_is_forked_during_a_build_does_not_keep_the_lock(
    tmp_path: Path, start: Callable[[Callable[[], object]], Child]
) -> None:
    """BUG-93: a worker of a DataLoader, say."""
    with cache.locked(tmp_path / "lock") as alone:
        assert alone
        start(lambda: time.sleep(20))
    with (tmp_path / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held


# -------------------------------------------------------------------------------------- the cache


def _another_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "99.1.0")


def _another_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "99.1")


def _another_python(patch: pytest.MonkeyPatch) -> None:
    names = {name: getattr(sys, name) for name in ("executable", "path", "stderr")}
    other = SimpleNamespace(implementation=SimpleNamespace(cache_tag="cpython-399"), **names)
    patch.setattr(build, "sys", other)


def _another_tool(**change: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(toolchain, "find", lambda: TOOLS._replace(**change))


@pytest.mark.parametrize(
    "change",
    [
        _another_torch,
        _another_cuda,
        _another_python,
        pytest.param(_another_tool(nvcc_version="13.1.0"), id="_another_nvcc"),
        pytest.param(_another_tool(cxx="clang++"), id="_another_compiler"),
        pytest.param(_another_tool(cxx_version="14"), id="_another_compiler_version"),
        pytest.param(_another_tool(include_dirs=(Path("/i"),)), id="_another_flag"),
    ],
)
def test_a_binary_of_other_inputs_is_not_loaded_but_built_beside(
    monkeypatch: pytest.MonkeyPatch,
    stub: Stub,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """BUG-96: an upgrade; the way back finds what was built before."""
    before = build._load()
    with monkeypatch.context() as patch:
        change(patch)
        after = build._load()
        assert after == build._load() != before
    assert build._load() == before
    assert stub.started() == 2


def test_an_edited_header_is_compiled(stub: Stub) -> None:
    """BUG-96: a file that no compiler is given by name."""
    before = build._load()
    header = stub.sources / "gemm.h"
    header.write_text("// changed")
    assert build._load() != before
    header.write_text("")
    assert build._load() == before
    assert stub.started() == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "gone", "no digest", "not for here"])
def test_a_damaged_folder_of_the_cache_is_built_once_more(stub: Stub, damage: str) -> None:
    """BUG-96."""
    library = build._load()
    if damage == "gone":
        library.unlink()
    elif damage == "no digest":
        build._digest_file(library).unlink()
    elif damage == "not for here":  # whole, but of a machine with another C library
        library.write_bytes(b"libstdc++.so.6\0other")
        build._digest_file(library).write_text(build._digest(library))
    else:
        library.write_bytes(WHOLE[:9] if damage == "truncated" else b"")
    assert [build._load().read_bytes() for _ in range(2)] == [WHOLE] * 2
    assert stub.started() == 2


def test_what_others_have_put_into_the_cache_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, stub: Stub
) -> None:
    """It may have been open to them before."""
    assert build._load().read_bytes() == WHOLE
    (folder,) = stub.libraries()
    folder.chmod(0o777)
    assert not build._is_intact(folder / "fp8lt.so")
    assert build._load().read_bytes() == WHOLE
    assert stub.started() == 2
    (folder,) = stub.libraries()
    assert folder.stat().st_mode & 0o077 == 0


def test_what_is_compiled_needs_no_ninja(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    """BUG-99."""

    def missing() -> Path:
        raise ToolchainError("ninja is missing")

    library = build._load()
    monkeypatch.setattr(toolchain, "ninja_dir", missing)
    assert build._load() == library
    (stub.sources / "gemm.h").write_text("// changed")
    with pytest.raises(ToolchainError, match="ninja is missing"):
        build._load()
    assert stub.libraries() == [library.parent]


def test_ninja_is_found_where_it_is_not_on_the_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-99: a real compile of a small file, by a Python that is run by its full path."""
    broken = tmp_path / "bin" / "ninja"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:/usr/bin:/bin")
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int fp8lt_answer() { return 42; }\n')
    spec = {
        "name": "small",
        "sources": [str(source)],
        "build_directory": str(tmp_path),
        "with_cuda": False,
        "is_python_module": False,
    }
    log = tmp_path / "log"
    code = build._run_child(json.dumps(spec), build._child_environment(TOOLS, "9.0"), tmp_path, log)
    assert code == 0, log.read_text()
    assert b"fp8lt_answer" in (tmp_path / "small.so").read_bytes()
