"""Which devices the tests run on.

Every test that takes `on` runs on the CPU (emulated) and on the GPU (native, mark `gpu`). Without
an FP8 GPU the latter are skipped and the summary says why; a GPU whose extension does not build
fails them.

A docstring with "BUG-48" names a kind of bug that such libraries have had, by its number in our
catalogue of them: the test would fail if we had it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import RunPython
from ranks import Ranks

import fp8lt.device
from fp8lt import build

LOAD = "import fp8lt; from fp8lt import build; print(build.loaded_library()); print(build.ensure())"


def _no_gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU in this machine"
    support = fp8lt.device.support(torch.device("cuda", 0))
    return None if support.way == "native" else support.reason


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test's tensors."""
    return torch.device(request.param)


@pytest.fixture
def opcheck_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.library.opcheck` take FP8 tensors.

    It looks for mutated inputs with allclose, which PyTorch lacks for FP8: compare bytes.
    """
    allclose = torch.allclose
    monkeypatch.setattr(
        torch,
        "allclose",
        lambda a, b, **options: (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if a.dtype in fp8lt.device.OCP
            else allclose(a, b, **options)
        ),
    )


@pytest.fixture(scope="session")
def extension_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache folder of `run_python`: compiling takes most of a minute, so it is done once.

    Its name has what a shell, ninja or make would take for something else.
    """
    return tmp_path_factory.mktemp("a $cache, so 'ödd'")


@pytest.fixture
def run_python(extension_cache: Path) -> RunPython:
    """Run Python code in a process whose extension is built whether it has a GPU or not."""

    def call(code: str = LOAD, wait: bool = True, **env: str) -> subprocess.CompletedProcess:
        environment = {
            **os.environ,
            "FP8LT_BUILD": "force",
            "FP8LT_CACHE_DIR": str(extension_cache),
            "TORCH_CUDA_ARCH_LIST": "9.0a",
            **env,
        }
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        if not wait:
            return child  # type: ignore[return-value]
        out, err = child.communicate(timeout=300)
        assert child.returncode == 0, err
        return subprocess.CompletedProcess(code, 0, out, err)

    return call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process not have tried to load the extension."""
    for name, value in (("_outcome", None), ("_module", None), ("_when_loaded", [])):
        monkeypatch.setattr(build, name, value)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors are small: where cores are busy, threads would wait for each other most of all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def started() -> Iterator[dict[torch.device, Ranks]]:
    started: dict[torch.device, Ranks] = {}
    yield started
    for ranks in started.values():
        ranks.end()


@pytest.fixture
def ranks(on: torch.device, started: dict[torch.device, Ranks], tmp_path: Path) -> Ranks:
    """Processes whose tensors are on `on`; new ones after a test that failed."""
    if on not in started or started[on].ended:
        started[on] = Ranks(tmp_path / "store", on)
    return started[on]
