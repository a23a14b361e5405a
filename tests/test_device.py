"""Devices: formats by architecture, support with reasons, nothing asked at import."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fp8lt
from fp8lt import device, ops, settings

GPU0 = torch.device("cuda", 0)


def pretend_amd(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: properties)
    device.amd_architecture.cache_clear()
    device.support.cache_clear()


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    device.amd_architecture.cache_clear()
    device.support.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "formats", "e4m3_max"),
    [
        ("gfx942:sramecc+:xnack-", device.FNUZ, 240),
        ("gfx940", device.FNUZ, 240),
        ("gfx950:sramecc+:xnack-", device.OCP, 448),
        ("gfx1200", device.OCP, 448),
    ],
)
def test_amd_formats_follow_the_architecture(
    monkeypatch: pytest.MonkeyPatch, architecture: str, formats: device.Formats, e4m3_max: float
) -> None:
    pretend_amd(monkeypatch, architecture)
    assert device.formats(GPU0) == formats
    assert torch.finfo(device.formats(GPU0).e4m3).max == e4m3_max
    assert torch.finfo(device.formats(GPU0).e5m2).max == 57344
    with pytest.raises(RuntimeError, match=rf"cuda:0 is an AMD {architecture.split(':')[0]}\n"):
        ops.backend(GPU0)
    assert device.formats(torch.device("cpu")) == device.OCP


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_a_whole_layer_runs_emulated_in_an_amd_chips_formats(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    pretend_amd(monkeypatch, architecture)
    formats = device.formats(GPU0)
    monkeypatch.setattr(device, "formats", lambda where: formats)
    x, w = torch.randn(20, 40, requires_grad=True), torch.randn(30, 40, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fp8lt.linear(x, w)
    assert {t.dtype for t in saved if t.dim() == 2} == {formats.e4m3}
    y.backward(torch.randn(20, 30))
    want = x.detach() @ w.detach().t()
    assert (y - want).norm() / want.norm() < 0.05  # measured up to 0.039 over five seeds


@pytest.mark.parametrize(
    ("name", "capability", "native"),
    [
        ("NVIDIA T4", (7, 5), False),
        ("NVIDIA A100", (8, 0), False),
        ("NVIDIA A10", (8, 6), False),
        ("NVIDIA L4", (8, 9), True),
        ("NVIDIA H200", (9, 0), True),
        ("NVIDIA B200", (10, 0), True),
        ("NVIDIA GeForce RTX 5090", (12, 0), True),
    ],
)
def test_support_follows_the_compute_capability(
    name: str, capability: tuple[int, int], native: bool
) -> None:
    support = device.capability_support(name, capability)
    assert support.native == native
    assert name in support.reason
    assert native or "FP8 needs 8.9 or newer" in support.reason


@pytest.mark.parametrize("recipe", fp8lt.recipe.NAMES)
@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA A100", (8, 0)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
    ],
)
def test_scales_finer_than_a_tensor_are_hoppers_alone(
    name: str, capability: tuple[int, int], recipe: str
) -> None:
    """BUG-11."""
    support = device.capability_support(name, capability, recipe)
    assert support.native == (
        capability == (9, 0) or (recipe in device.ONE_SCALE and capability > (8, 0))
    )
    assert name in support.reason
    if not support.native and capability > (8, 0):
        scales = "a scale per block" if recipe == "blockwise" else "a scale per row"
        assert f"recipe '{recipe}' needs {scales}, which cuBLASLt has for 9.0" in support.reason


@pytest.mark.parametrize("recipe", fp8lt.recipe.NAMES)
def test_a_recipe_without_its_scales_is_refused_or_emulated_on_request(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """BUG-11."""
    support, loaded = device.Support(True, ""), [130101]
    monkeypatch.setattr(device, "support", lambda where, recipe: support)
    monkeypatch.setattr(fp8lt.build, "ensure", lambda: None)
    monkeypatch.setattr(ops, "_loaded_cublaslt", lambda: loaded[0])
    monkeypatch.delenv("FP8LT_EMULATE", raising=False)
    assert not ops.backend(GPU0, recipe=recipe)
    loaded[0] = 120804
    if recipe in device.ONE_SCALE:
        assert not ops.backend(GPU0, recipe=recipe)
        return
    message = rf"recipe '{recipe}' needs cuBLASLt 120900 .* has loaded 120804\n.*FP8LT_EMULATE=1"
    with pytest.raises(RuntimeError, match=message):
        ops.backend(GPU0, recipe=recipe)
    assert ops.backend(GPU0, emulated=True, recipe=recipe)
    monkeypatch.setenv("FP8LT_EMULATE", "1")
    assert ops.backend(GPU0, recipe=recipe)


def test_other_devices_are_refused_with_a_reason() -> None:
    with pytest.raises(RuntimeError, match="devices of type 'mps'"):
        ops.backend(torch.device("mps"))


def test_settings_refuse_values_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8LT_BUILD", "yes")
    with pytest.raises(ValueError, match=r"FP8LT_BUILD: want one of auto, .*; got 'yes'"):
        settings.read()
    monkeypatch.setenv("FP8LT_BUILD", "off")
    monkeypatch.setenv("FP8LT_EMULATE", "maybe")
    with pytest.raises(ValueError, match="FP8LT_EMULATE: want 1 or 0, got 'maybe'"):
        settings.read()
    monkeypatch.setenv("FP8LT_EMULATE", "1")
    monkeypatch.setenv("FP8LT_CACHE_DIR", "there")
    monkeypatch.setenv("FP8LT_VERBOSE", "0")
    assert settings.read() == ("off", True, "there", False, False)


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True,
        check=True, timeout=120,
    )  # fmt: skip


def test_import_without_a_gpu_or_compiler_works_and_says_nothing() -> None:
    """BUG-101."""
    code = (
        "import torch, fp8lt\n"
        "assert fp8lt.linear(torch.ones(2, 3), torch.ones(4, 3)).shape == (2, 4)"
    )
    done = run_python(code, CUDA_VISIBLE_DEVICES="", PATH="/nowhere", CXX="", CUDA_HOME="")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.gpu
def test_import_does_not_initialise_cuda_so_that_a_process_may_fork() -> None:
    run_python("import fp8lt, torch; assert not torch.cuda.is_initialized()")


def test_import_adds_less_than_three_tenths_of_a_second_to_torch() -> None:
    code = "import time, torch; t = time.time(); import fp8lt; print(time.time() - t)"
    assert min(float(run_python(code).stdout) for _ in range(3)) < 0.3  # measured 0.02 here
