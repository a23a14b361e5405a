"""Autotuning: right results, choices that are kept, nothing measured inside a capture."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import T_SAME, dequantised, error, randn

import fp8lt
from fp8lt import build, device, settings

E4M3 = device.OCP.e4m3


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8LT_AUTOTUNE", raising=False)
    assert not settings.read().autotune
    monkeypatch.setenv("FP8LT_AUTOTUNE", "1")
    assert settings.read().autotune
    monkeypatch.setenv("FP8LT_AUTOTUNE", "fast")
    with pytest.raises(ValueError, match="FP8LT_AUTOTUNE: want 1 or 0, got 'fast'"):
        settings.read()


def test_on_a_cpu_it_changes_nothing() -> None:
    x, w = torch.randn(3, 16), torch.randn(5, 16)
    want = fp8lt.linear(x, w)
    fp8lt.autotune()
    try:
        assert torch.equal(fp8lt.linear(x, w), want)
    finally:
        fp8lt.autotune(False)


@pytest.fixture
def choices(tmp_path: Path) -> Iterator[Path]:
    """Autotuning, with its choices in a folder of its own."""
    assert build.ensure() is None
    torch.ops.fp8lt.set_autotune(True, str(tmp_path), False)
    yield tmp_path
    fp8lt.autotune(False)


def lines(folder: Path) -> list[str]:
    return [line for file in folder.iterdir() for line in file.read_text().splitlines()]


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cuda = torch.device("cuda")
    x, w = (randn(r, k, on=cuda, dtype=torch.bfloat16, seed=i) for i, r in enumerate((m, n)))
    return x, w, dequantised(x, E4M3) @ dequantised(w, E4M3).t()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (17, 100, 1027), (300, 512, 768), (2048, 3072, 512)]
)
def test_results_are_right_and_every_problem_is_measured_once(
    choices: Path, shape: tuple[int, int, int]
) -> None:
    x, w, want = operands(*shape)
    x.requires_grad_()
    for bias in (None, torch.zeros(shape[1], device="cuda", dtype=torch.bfloat16)):
        for _ in range(3):
            y = fp8lt.linear(x, w, bias)
            assert error(y, want) <= T_SAME
    y.backward(torch.ones_like(y))
    count = 3  # y with and without a bias, dx
    assert len(lines(choices)) == len({line.split()[0] for line in lines(choices)}) == count
    assert all(line.endswith(" us") for line in lines(choices))


@pytest.mark.gpu
def test_a_choice_is_kept_for_later_processes(tmp_path: Path) -> None:
    program = (
        "import torch, fp8lt; torch.manual_seed(0);"
        "x = torch.randn(640, 1024, device='cuda').bfloat16(); y = fp8lt.linear(x, x);"
        "print(y.view(torch.int16).sum().item())"
    )
    assert build.ensure() is None
    library = build.loaded_library()
    assert library is not None
    cache = tmp_path / "cache"
    shutil.copytree(library.parent, cache / library.parent.name)  # the same build, other choices
    env = {**os.environ, "FP8LT_AUTOTUNE": "1", "FP8LT_CACHE_DIR": str(cache)}

    def run() -> tuple[str, list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""  # prints nothing unless asked
        return done.stdout, lines(cache / "autotune")

    first, kept = run()
    assert len(kept) == 1
    # A line that was cut off does no harm; of two for one problem the first counts.
    file = next((cache / "autotune").iterdir())
    file.write_text(kept[0] + "\n" + kept[0].split()[0] + " 0 0 12ab\n")
    again, still = run()
    assert again == first
    assert still[0] == kept[0]
    assert len(still) == 2
    env["FP8LT_VERBOSE"] = "1"
    file.unlink()
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )
    assert "fp8lt: autotune 640,640,1024," in done.stderr


@pytest.mark.gpu
def test_nothing_is_measured_inside_a_capture(choices: Path) -> None:
    x, w, want = operands(200, 304, 1040)
    fp8lt.linear(x[:100], w)  # the workspace and cuBLASLt itself; another shape
    before = lines(choices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8lt.linear(x, w)
    graph.replay()
    assert error(y, want) <= T_SAME
    assert lines(choices) == before
    fp8lt.linear(x, w)
    assert len(lines(choices)) == len(before) + 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # now that it is known, the choice is captured
        y = fp8lt.linear(x, w)
    graph.replay()
    assert torch.equal(y, fp8lt.linear(x, w))


@pytest.mark.gpu
def test_switched_off_the_rule_chooses_again(choices: Path) -> None:
    fp8lt.autotune(False)
    x, w, _ = operands(1024, 2048, 4096)
    want = fp8lt.linear(x, w)
    torch.ops.fp8lt.set_autotune(True, str(choices), False)
    fp8lt.linear(x, w)
    fp8lt.autotune(False)
    assert torch.equal(fp8lt.linear(x, w), want)


@pytest.mark.gpu
def test_a_folder_that_cannot_be_written_to_does_no_harm() -> None:
    assert build.ensure() is None
    torch.ops.fp8lt.set_autotune(True, "/proc/no/such/folder", False)
    try:
        x, w, want = operands(48, 96, 224)
        assert error(fp8lt.linear(x, w), want) <= T_SAME
    finally:
        fp8lt.autotune(False)
