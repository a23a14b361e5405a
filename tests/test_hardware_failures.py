"""Kinds of bugs that such libraries have had on hardware that is not theirs."""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import state_for
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8lt
from fp8lt import build, device, ops, recipe

CUDA = torch.device("cuda", 0)
NAMES = pytest.mark.parametrize("name", recipe.NAMES)


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
        assert ops.backend(CUDA) == ops.EMULATED
        assert fp8lt.linear(torch.ones(2, 32), torch.ones(4, 32)).shape == (2, 4)
    (warning,) = caught
    assert "fp8lt runs without its CUDA extension: no nvcc of CUDA 97" in str(warning.message)
    assert "Run: pip install 'fp8lt[toolkit]'" in str(warning.message)
