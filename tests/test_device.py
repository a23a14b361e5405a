"""Devices: formats by architecture, support with reasons, nothing asked at import."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8lt
from fp8lt import build, device, ops, settings

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


@pytest.mark.parametrize("kind", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("wanted", [device.OCP, device.FNUZ], ids=["ocp", "fnuz"])
def test_conversion_between_the_families_keeps_every_value(
    monkeypatch: pytest.MonkeyPatch, wanted: device.Formats, kind: int
) -> None:
    """BUG-42: all bytes; to OCP the smallest are rounded."""
    monkeypatch.setattr(device, "formats", lambda where: wanted)
    other = device.OCP if wanted is device.FNUZ else device.FNUZ
    data = torch.arange(256, dtype=torch.uint8).view(16, 16).view(other[kind])
    q = ops.quantize_tensorwise(torch.ones(16, 16), device.OCP.e4m3)
    scale_inv = torch.full((16,), 3.0)
    q = q._replace(data=data, data_t=data.view(torch.uint8).t().contiguous().view(other[kind]),
                   scale_inv=scale_inv, scale_inv_t=scale_inv)  # fmt: skip
    got = fp8lt.convert_quantized(q, "cpu")
    assert got.data.dtype == got.data_t.dtype == wanted[kind]
    assert got.scale_inv is got.scale_inv_t
    for new, old in ((got.data, q.data), (got.data_t, q.data_t)):
        value, want = new.float() * got.scale_inv, old.float() * 3
        finite = want.isfinite()
        assert torch.equal(value.isnan(), ~finite)
        off = (value - want)[finite].abs().max()
        assert off <= (0 if wanted is device.FNUZ else 3 * 2.0 ** (-10, -17)[kind])


NATIVE, SCALED_MM, REFUSED = "native", "scaled_mm", "refused"
NO_FP8 = (REFUSED, REFUSED, REFUSED)
TENSORS_NATIVE = (NATIVE, SCALED_MM, REFUSED)
BY_PYTORCH = (SCALED_MM, SCALED_MM, REFUSED)
# A GPU, and its way with one scale per tensor, per row, per block.
GPUS = [
    ("NVIDIA T4", (7, 5), NO_FP8),
    ("NVIDIA A100", (8, 0), NO_FP8),
    ("NVIDIA A10", (8, 6), NO_FP8),
    ("NVIDIA L4", (8, 9), TENSORS_NATIVE),
    ("NVIDIA H200", (9, 0), (NATIVE, NATIVE, NATIVE)),
    ("NVIDIA B200", (10, 0), TENSORS_NATIVE),
    ("NVIDIA B300", (10, 3), TENSORS_NATIVE),
    ("NVIDIA Thor", (11, 0), TENSORS_NATIVE),
    ("NVIDIA GeForce RTX 5090", (12, 0), TENSORS_NATIVE),
    ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-", NO_FP8),
    ("AMD Radeon RX 7900 XTX", "gfx1100", NO_FP8),
    ("AMD Instinct MI300A", "gfx940", NO_FP8),
    ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", BY_PYTORCH),
    ("AMD Instinct MI350X", "gfx950:sramecc+:xnack-", BY_PYTORCH),
    ("AMD Radeon RX 9070 XT", "gfx1201", BY_PYTORCH),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, tuple[int, int] | str], None]:
    """Have the first GPU be one of that name and kind, and the extension be there."""

    def pretend(name: str, kind: tuple[int, int] | str) -> None:
        if isinstance(kind, str):
            pretend_amd(monkeypatch, kind)
            monkeypatch.setattr(build, "ensure", lambda: pytest.fail("no CUDA here"))
            return
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: kind)
        monkeypatch.setattr(build, "ensure", lambda: None)
        monkeypatch.setattr(build, "loaded_library", lambda: Path("fp8lt.so"))
        device.support.cache_clear()

    monkeypatch.setattr(ops, "_loaded_cublaslt", lambda: 130101)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("FP8LT_EMULATE", raising=False)
    monkeypatch.delenv("FP8LT_BUILD", raising=False)
    return pretend


@pytest.mark.parametrize("recipe", fp8lt.recipe.NAMES)
@pytest.mark.parametrize(("name", "kind", "ways"), GPUS, ids=[one[0] for one in GPUS])
def test_every_gpu_has_an_answer_for_every_recipe(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Callable[[str, tuple[int, int] | str], None],
    recipe: str,
    name: str,
    kind: tuple[int, int] | str,
    ways: tuple[str, str, str],
) -> None:
    """BUG-11, BUG-87."""
    gpu(name, kind)
    way = ways[2 if recipe == "blockwise" else recipe.startswith("rowwise")]
    available, reason = fp8lt.is_available(recipe, GPU0)
    assert ops.support(GPU0, recipe) == (way, reason)
    assert available == (way != REFUSED)
    amd = isinstance(kind, str)
    named = f"cuda:0 is an AMD {kind.split(':')[0]}" if amd else (
        f"{name} has compute capability {kind[0]}.{kind[1]}"
    )  # fmt: skip
    assert reason.startswith(named)
    if way != REFUSED:
        assert ("torch._scaled_mm" in reason) == (way == SCALED_MM)
        assert ops.backend(GPU0, recipe=recipe) == (amd, way == SCALED_MM)
        return
    if ways == NO_FP8:
        assert ("FP8 needs one of gfx942" if amd else "FP8 needs 8.9 or newer") in reason
    else:
        assert "recipe 'blockwise' needs a scale per block, which" in reason
    with pytest.raises(RuntimeError, match=f"tensors on cuda:0: {re.escape(reason)}\n.*EMULATE=1"):
        ops.backend(GPU0, recipe=recipe)
    assert ops.backend(GPU0, emulated=True, recipe=recipe) == ops.EMULATED
    monkeypatch.setenv("FP8LT_EMULATE", "1")
    assert ops.backend(GPU0, recipe=recipe) == ops.EMULATED


@pytest.mark.parametrize("recipe", fp8lt.recipe.NAMES)
def test_an_older_cublaslt_leaves_scales_per_row_to_pytorch_and_refuses_blocks(
    gpu: Callable[[str, tuple[int, int] | str], None],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
) -> None:
    """BUG-11."""
    gpu("NVIDIA H200", (9, 0))
    monkeypatch.setattr(ops, "_loaded_cublaslt", lambda: 120804)
    way, reason = ops.support(GPU0, recipe)
    if recipe in ("tensorwise", "delayed"):
        assert way == NATIVE
        return
    assert way == (REFUSED if recipe == "blockwise" else SCALED_MM)
    assert (
        f"recipe '{recipe}' needs cuBLASLt 120900 (12.9) or newer; torch has loaded 120804"
        in reason
    )


@pytest.mark.parametrize("recipe", fp8lt.recipe.NAMES)
def test_a_gpu_whose_extension_is_not_wanted_multiplies_by_pytorch_one_that_failed_says_why(
    gpu: Callable[[str, tuple[int, int] | str], None],
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
) -> None:
    gpu("NVIDIA H200", (9, 0))
    monkeypatch.setattr(build, "ensure", lambda: "no nvcc")
    monkeypatch.setattr(build, "loaded_library", lambda: None)
    assert ops.support(GPU0, recipe) == (REFUSED, "no nvcc")
    with pytest.raises(RuntimeError, match="no nvcc"):
        ops.backend(GPU0, recipe=recipe)
    monkeypatch.setenv("FP8LT_BUILD", "off")
    if recipe == "blockwise":
        assert ops.support(GPU0, recipe) == (REFUSED, "no nvcc")
        return
    assert ops.support(GPU0, recipe).reason.startswith("no nvcc: GEMMs by torch._scaled_mm")
    assert ops.backend(GPU0, recipe=recipe) == ops.Backend(emulated=True, scaled_mm=True)


def test_the_current_gpu_is_meant_by_its_type_alone(
    gpu: Callable[[str, tuple[int, int] | str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu("a GPU", (9, 0))
    kinds, current = [(7, 5), (9, 0)], [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: kinds[where.index])
    for current[0] in (0, 1):
        answers = [fp8lt.is_available(device=d).available for d in ("cuda", None, 0, 1)]
        assert answers == [bool(current[0])] * 2 + [False, True]
    emulated = fp8lt.DynamicScaling(emulate=True)
    assert fp8lt.is_available(emulated) == (False, "the recipe asks for emulation")
    assert fp8lt.is_available(device=2) == (False, "there is no cuda:2: torch sees 2 GPUs")


def test_what_is_available_here_and_what_is_asked_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device_name in ("cuda", "cuda:0", 0):
        available, reason = fp8lt.is_available("rowwise", device_name)
        assert not available
        assert reason.startswith("there is no cuda")
    assert fp8lt.is_available() == (False, "a CPU has no FP8 units")
    assert not fp8lt.is_available(fp8lt.BlockScaling(), "meta").available
    with pytest.raises(ValueError, match=r"recipe: want one of tensorwise, .*; got 'fine'"):
        fp8lt.is_available("fine")
    with pytest.raises(TypeError, match="recipe: want a name or a recipe object, got int"):
        fp8lt.is_available(3)  # type: ignore[arg-type]


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
