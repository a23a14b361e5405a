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
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from cases import state_for
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8lt
from fp8lt import build, device, ops, recipe, toolchain
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


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process not have tried to load the extension."""
    for name, value in (("_outcome", None), ("_module", None), ("_when_loaded", [])):
        monkeypatch.setattr(build, name, value)


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


# ---------------------------------------------------------------------------- the wrong hardware


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, tuple[int, int]], None]]:
    """Have the first GPU be one of that name and compute capability."""

    def pretend(name: str, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
        found = device.Gpu(name, capability, 0, "580")
        monkeypatch.setattr(device, "gpus", lambda: (found,))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        device.support.cache_clear()
        device.amd_architecture.cache_clear()

    monkeypatch.delenv("FP8LT_EMULATE", raising=False)
    monkeypatch.delenv("FP8LT_BUILD", raising=False)
    yield pretend
    device.support.cache_clear()
    device.amd_architecture.cache_clear()


@NAMES
@pytest.mark.parametrize(
    ("model", "capability"),
    [("NVIDIA T4", (7, 5)), ("NVIDIA A100", (8, 0)), ("NVIDIA A10", (8, 6))],
)
def test_every_way_in_refuses_an_old_gpu_at_once_and_emulates_on_request(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Callable[[str, tuple[int, int]], None],
    name: str,
    model: str,
    capability: tuple[int, int],
) -> None:
    """BUG-87: the error names the GPU, what it has and what is needed."""
    gpu(model, capability)
    monkeypatch.setattr(build, "ensure", lambda: "nobody should build")
    found = rf"{model} has compute capability {capability[0]}\.{capability[1]}"
    refused = rf"cuda:0: {found}; FP8 needs 8\.9 or newer.*\n.*FP8LT_EMULATE=1"
    with FakeTensorMode():  # of the GPU in name alone
        x, w = torch.empty(4, 32, device=CUDA), torch.empty(16, 32, device=CUDA)
        layer = fp8lt.Linear(32, 16, device=CUDA, recipe=name)
        plain = torch.nn.Linear(32, 16, device=CUDA)

        def rerouted() -> torch.Tensor:
            with fp8lt.fp8_autocast(recipe=name):
                return plain(x)

        ways = (
            lambda: fp8lt.linear(x, w, recipe=name, state=state_for(name, CUDA)),
            lambda: layer(x),
            rerouted,
        )[: 2 if name == "delayed" else 3]  # fake tensors cannot begin a history
        for way in ways:
            with pytest.raises(RuntimeError, match=refused):
                way()
        monkeypatch.setenv("FP8LT_EMULATE", "1")
        with torch.no_grad():
            assert all(way().shape == (4, 16) for way in ways)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_import_builds_for_gpus_with_fp8_alone(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Callable[[str, tuple[int, int]], None],
    capability: tuple[int, int],
) -> None:
    """BUG-87: an old GPU costs no compile, and no warning about one."""
    gpu("a GPU", capability)
    called: list[None] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(build, "ensure", lambda: called.append(None))
    build.on_import()
    assert len(called) == (capability >= (8, 9))


@pytest.mark.usefixtures("undecided")
def test_a_cublaslt_of_another_major_version_is_refused_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, stub: Stub, gpu: Callable[[str, tuple[int, int]], None]
) -> None:
    """BUG-88: compiled with one toolkit's header, run with the library of another."""
    gpu("NVIDIA L4", (8, 9))
    monkeypatch.setattr(torch.ops.fp8lt, "cublaslt_versions", lambda: (120100, 130000))
    message = "compiled with cuBLASLt 120100's header, but torch has loaded version 130000"
    with pytest.raises(RuntimeError, match=message):
        ops.backend(CUDA)
    assert ops.backend(CUDA, emulated=True)


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
    monkeypatch.setattr(build.fcntl, "flock", lambda *_: None)
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

    monkeypatch.setattr(build.fcntl, "flock", no_locks)
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
    with build._locked(tmp_path / "lock") as alone:
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


def test_the_cache_is_the_first_folder_that_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-97: those asked for, then the user's; a file, /proc and /dev/null are none."""
    (tmp_path / "file").touch()
    folders = {
        "FP8LT_CACHE_DIR": "asked",
        "TORCH_EXTENSIONS_DIR": "torch/fp8lt",
        "XDG_CACHE_HOME": "user/fp8lt",
        "HOME": "home/.cache/fp8lt",
    }
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder.split("/")[0]))
    for (name, folder), bad in zip(
        folders.items(), ("/proc/fp8lt", str(tmp_path / "file"), None, "/dev/null"), strict=True
    ):
        assert build._cache_dir() == tmp_path / folder
        monkeypatch.delenv(name) if bad is None else monkeypatch.setenv(name, bad)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(build.BuildError, match="set FP8LT_CACHE_DIR") as caught:
        build._cache_dir()
    for tried in ("/proc/fp8lt", f"{tmp_path}/file/fp8lt", "/dev/null/.cache/fp8lt"):
        assert f"\n  {tried}: " in str(caught.value)


def test_a_folder_that_another_user_owns_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUG-97: it is there, can be read, and not be written to."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        theirs, ours = top / "theirs", top / "ours"
        theirs.mkdir(mode=0o555)
        ours.mkdir()
        ours.chmod(0o777)
        monkeypatch.setenv("FP8LT_CACHE_DIR", str(theirs))
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ours))
        user = os.geteuid()
        if user == 0:  # whom no mode stops
            os.seteuid(65534)
        try:
            assert build._cache_dir() == (ours / "fp8lt").resolve()
        finally:
            os.seteuid(user)


@pytest.mark.parametrize("kind", ["ours", "open to all", "a link"])
def test_without_a_home_the_cache_is_a_private_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """BUG-97: code is loaded from there."""
    for name in ("FP8LT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"fp8lt-{os.getuid()}"
    if kind == "ours":
        assert build._cache_dir() == build._cache_dir() == folder
        assert folder.stat().st_mode & 0o077 == 0
        return
    if kind == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        (tmp_path / "other").mkdir()
        folder.symlink_to(tmp_path / "other")
    with pytest.raises(build.BuildError, match="is not a folder that this user alone may use"):
        build._cache_dir()


# -------------------------------------------------------------------------------- missing tools


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


def test_a_ninja_that_happens_to_lie_here_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-99."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ninja").mkdir()
    assert toolchain.ninja_dir().is_absolute()


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


def fake_toolkit(home: Path, version: str = "97.1.2") -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho release {version.rsplit('.', 1)[0]}, V{version}\n")
    nvcc.chmod(0o755)
    return home


def test_a_cuda_home_that_does_not_exist_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-100: wheels of the runtime alone are no toolkit; the error says where it looked."""
    wheels = tmp_path / "nvidia" / "cu97"
    (wheels / "include").mkdir(parents=True)
    (wheels / "include" / "cublasLt.h").touch()
    monkeypatch.setattr(toolchain, "wheel_dirs", lambda: [wheels])
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("CUDA_PATH", str(fake_toolkit(tmp_path / "old", "96.0.1")))
    with pytest.raises(ToolchainError, match=r"pip install 'fp8lt\[toolkit\]'") as caught:
        toolchain._cuda_home("97")
    assert "CUDA_HOME: no working bin/nvcc in /nowhere\n" in str(caught.value)
    assert f"CUDA_PATH: {tmp_path}/old is CUDA 96.0.1\n" in str(caught.value)
    assert f"wheels: no working bin/nvcc in {wheels}" in str(caught.value)
    fake_toolkit(tmp_path / "new")
    monkeypatch.setattr(toolchain, "wheel_dirs", lambda: [wheels, tmp_path / "new"])
    assert toolchain._cuda_home("97") == (tmp_path / "new", "97.1.2")


@pytest.mark.usefixtures("undecided")
def test_without_a_toolkit_an_import_warns_once_and_emulation_works(
    monkeypatch: pytest.MonkeyPatch, gpu: Callable[[str, tuple[int, int]], None]
) -> None:
    """BUG-100: layers on the GPU say the same when they are called, and are emulated on request."""
    gpu("NVIDIA H200", (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "97.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build.on_import()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"(?s)no nvcc of CUDA 97.*FP8LT_EMULATE=1"):
                ops.backend(CUDA)
        monkeypatch.setenv("FP8LT_EMULATE", "1")
        assert ops.backend(CUDA)
        assert fp8lt.linear(torch.ones(2, 32), torch.ones(4, 32)).shape == (2, 4)
    (warning,) = caught
    assert "fp8lt runs without its CUDA extension: no nvcc of CUDA 97" in str(warning.message)
    assert "Run: pip install 'fp8lt[toolkit]'" in str(warning.message)
