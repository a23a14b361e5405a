"""The probe: a table, a document, and an exit code that means what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))

import probe_gpu  # noqa: E402


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, TOOLS / "probe_gpu.py", *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_without_a_gpu_it_reports_emulation_and_exits_with_1() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stderr
    assert "emulation  works" in done.stdout
    assert torch.__version__ in done.stdout
    assert done.stdout.endswith("Only emulation works here.\n")


def test_the_json_document_has_the_same_facts() -> None:
    done = run("--json", CUDA_VISIBLE_DEVICES="")
    report = json.loads(done.stdout)
    assert report["origin"]["torch"] == torch.__version__
    assert report["emulation"] == "works"
    assert report["exit_code"] == done.returncode == 1


@pytest.mark.gpu
def test_on_a_gpu_every_recipe_and_format_is_checked_and_the_exit_code_is_0() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (gpu, *_) = json.loads(done.stdout)["gpus"]
    assert {r["verdict"] for r in gpu["recipes"].values()} == {"native"}
    assert len(gpu["checks"]) == 2
    assert all(check["error"] < 5e-3 and check["tflops"] > 10 for check in gpu["checks"])


def report(*gpus: probe_gpu.Gpu, emulation: str = "works") -> probe_gpu.Report:
    return probe_gpu.Report(
        origin={"python": "", "torch": "", "cuda": None},
        fp8lt="",
        platform="",
        cublaslt_loaded=None,
        cublaslt_compiled=None,
        toolchain="",
        toolchain_missing=None,
        extension=None,
        extension_failure=None,
        emulation=emulation,
        gpus=[*gpus],
    )


def gpu(verdict: str, expected: bool, *checks: probe_gpu.Check) -> probe_gpu.Gpu:
    recipes = {"tensorwise": {"verdict": verdict, "reason": "a reason"}}
    return probe_gpu.Gpu("a GPU", "sm_90", 1.0, None, recipes, expected, [*checks])


GOOD = probe_gpu.Check("e4m3 @ e4m3", 1.7e-3, 1000.0)
WRONG = probe_gpu.Check("e4m3 @ e4m3", float("nan"), 1000.0)


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (report(), 1),
        (report(gpu("native", True, GOOD)), 0),
        (report(gpu("native", True, GOOD), gpu("refused", False)), 0),  # an old GPU beside it
        (report(gpu("refused", False)), 1),
        (report(gpu("refused", True)), 2),  # FP8 hardware, no extension
        (report(gpu("native", True, GOOD, WRONG)), 2),
        (report(gpu("native", True, probe_gpu.Check("e4m3", failure="status 15"))), 2),
        (report(emulation="is wrong"), 2),
    ],
)
def test_exit_codes(found: probe_gpu.Report, code: int) -> None:
    assert probe_gpu.exit_code(found) == code


def test_the_table_is_aligned_and_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(gpu("native", True, GOOD, WRONG))
    found.toolchain_missing, found.exit_code = "no nvcc\nsecond line", 2
    probe_gpu.print_table(found)
    lines = capsys.readouterr().out.splitlines()
    assert "BROKEN: see above." in lines
    assert any("error 1.7e-03: ok" in line for line in lines)
    assert any("error nan: WRONG" in line for line in lines)
    (first,) = {line.index("no nvcc") for line in lines if "no nvcc" in line}
    assert next(line for line in lines if "second line" in line).index("second line") == first
