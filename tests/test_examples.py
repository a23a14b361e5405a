"""examples/: both scripts train in every precision, report what they say, explain what is wrong."""

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from cases import error, randn
from torch import nn

import fp8lt

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
TINY = ("--device=cpu", "--steps=12", "--batch=2", "--seq=32")
TINY_ON_GPU = ("--device=cuda", "--steps=12", "--batch=4", "--seq=128")
GUESSING = math.log(256)  # 5.545 nats per byte
SAME_FIELDS = {
    "device", "torch", "recipe", "compile", "batch", "seq", "steps", "lr", "seed", "parameters",
    "fp8_layers", "step_ms", "tokens_per_s", "peak_memory_bytes", "loss_start", "loss_end",
    "losses",
}  # fmt: skip
FIELDS = {
    "nanochat": SAME_FIELDS | {"precision", "depth", "width", "vocab"},
    "llama": SAME_FIELDS
    | {"dim", "hidden", "layers", "heads", "kv_heads", "val_loss", "val_loss_bf16"},
}
# Flags, and how many of its linear layers are FP8 then.
NANOCHAT = {
    "bf16": (("--precision=bf16",), 0),
    "tensorwise": (("--precision=fp8",), 13),
    "rowwise": (("--precision=fp8", "--recipe=rowwise"), 13),
}
LLAMA = {"bf16": 0, "tensorwise": 14, "delayed": 14}


def load(name: str) -> ModuleType:
    """Import a script under a name that no installed package has."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


nanochat, llama = load("nanochat"), load("llama")


def start(name: str, *flags: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    # The sizes are tiny: where cores are busy, threads would wait for each other most of all.
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", *flags],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@functools.cache
def run(name: str, *flags: str) -> dict:
    """Run a script once per session; return its last line."""
    done = start(name, *flags)
    assert done.returncode == 0, done.stderr
    assert "step   12" in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def check_report(name: str, report: dict, fp8_layers: int) -> None:
    assert set(report) == FIELDS[name]
    assert report["fp8_layers"] == fp8_layers
    losses = report["losses"]
    assert len(losses) == report["steps"] == 12
    assert (losses[0], losses[-1]) == (report["loss_start"], report["loss_end"])
    assert all(map(math.isfinite, losses))
    # Measured -0.88 for nanochat, -1.86 for Llama.
    assert losses[-1] < losses[0] - 0.5
    assert report["tokens_per_s"] * report["step_ms"] / 1e3 == pytest.approx(
        report["batch"] * report["seq"]
    )


# ----------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("name", NANOCHAT)
def test_nanochat_trains_in_every_precision_that_a_cpu_has(name: str) -> None:
    flags, fp8_layers = NANOCHAT[name]
    report = run("nanochat", *TINY, *flags)
    check_report("nanochat", report, fp8_layers)
    assert report["recipe"] == (None if name == "bf16" else name)
    assert report["width"] == 128
    assert report["peak_memory_bytes"] is None
    assert abs(report["loss_start"] - GUESSING) < 0.02  # measured 0.0004: the head is near zero
    bf16 = run("nanochat", *TINY, *NANOCHAT["bf16"][0])
    assert abs(report["loss_end"] - bf16["loss_end"]) < 0.05  # measured 0.002
    assert (report["losses"] == bf16["losses"]) == (name == "bf16")


@pytest.mark.parametrize("recipe", LLAMA)
def test_llama_trains_and_is_evaluated_in_both_precisions(recipe: str) -> None:
    pytest.importorskip("transformers", reason="examples/llama.py needs transformers")
    report = run("llama", *TINY, f"--recipe={recipe}")
    check_report("llama", report, LLAMA[recipe])
    assert report["recipe"] == recipe
    assert abs(report["loss_start"] - GUESSING) < 0.2  # measured 0.004
    assert report["val_loss"] < GUESSING - 0.8  # measured -1.94
    assert abs(report["val_loss"] - report["val_loss_bf16"]) < 0.05  # measured 0.0005
    assert (report["val_loss"] == report["val_loss_bf16"]) == (recipe == "bf16")
    bf16 = run("llama", *TINY, "--recipe=bf16")
    assert abs(report["val_loss"] - bf16["val_loss"]) < 0.05  # measured 0.005


def test_the_json_is_written_to_a_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    file = tmp_path / "run.json"
    assert nanochat.main([*TINY, "--steps=2", "--precision=bf16", f"--json={file}"]) == 0
    assert file.read_text() == capsys.readouterr().out.splitlines()[-1] + "\n"


def test_a_loss_that_is_not_finite_stops_the_run(
    capsys: pytest.CaptureFixture[str], one_thread: None
) -> None:
    assert nanochat.main([*TINY, "--precision=bf16", "--lr=1e38"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("nanochat.py: the loss of step ")
    assert "{" not in out


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8", "scaled_mm"])
def test_nanochat_trains_on_a_gpu(precision: str) -> None:
    flags = (*TINY_ON_GPU, "--depth=2", "--vocab=256", f"--precision={precision}")
    report = run("nanochat", *flags)
    check_report("nanochat", report, 0 if precision == "bf16" else 13)
    assert report["peak_memory_bytes"] > 4 * report["parameters"]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", LLAMA)
def test_llama_trains_on_a_gpu(recipe: str) -> None:
    pytest.importorskip("transformers", reason="examples/llama.py needs transformers")
    sizes = {"dim": 256, "hidden": 512, "layers": 2, "heads": 4, "kv-heads": 2, "lr": 2e-3}
    flags = [f"--{name}={value}" for name, value in sizes.items()]
    report = run("llama", *TINY_ON_GPU, *flags, f"--recipe={recipe}")
    check_report("llama", report, LLAMA[recipe])
    assert report["peak_memory_bytes"] > 4 * report["parameters"]


# -------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize("name", ["nanochat", "llama"])
def test_a_bad_flag_ends_the_command_with_exit_code_2_and_its_name(name: str) -> None:
    done = start(name, *TINY, "--recipe=nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{name}.py: error: argument --recipe: want one of tensorwise, ")
    assert "got 'nonsense'" in last


@pytest.mark.parametrize(
    ("script", "flags", "wanted"),
    [
        (nanochat, "--steps 0", "argument --steps: got 0, want above 0"),
        (nanochat, "--depth x", "argument --depth: invalid count value: 'x'"),
        (nanochat, "--vocab 255", "argument --vocab: got 255, want 256 or more"),
        (nanochat, "--seq 1000000000", "argument --seq: got 1000000000, want below"),
        (nanochat, "--lr nan", "argument --lr: got nan, want above 0"),
        (nanochat, "--seed -1", "argument --seed: got -1, want in 0 ... 2**63 - 1"),
        (nanochat, "--precision fp4", "argument --precision: invalid choice: 'fp4'"),
        (nanochat, "--json nowhere/run.json", "argument --json: got nowhere/run.json, want a file"),
        (nanochat, "--precision scaled_mm", "argument --precision: got scaled_mm, want bf16 or "
         "fp8 on cpu: a CPU has no FP8 units"),
        (llama, "--steps 0", "argument --steps: got 0, want above 0"),
        (llama, "--layers x", "argument --layers: invalid int value: 'x'"),
        (llama, "--dim 30", "argument --dim: got 30, want a multiple of 2 * --heads = 8"),
        (llama, "--heads 0", "argument --heads: got 0, want above 0"),
        (llama, "--kv-heads 3", "argument --kv-heads: got 3, want a divisor of --heads 4"),
        (llama, "--seq 1", "argument --seq: got 1, want in 2 ... "),
        (llama, "--lr nan", "argument --lr: got nan, want above 0"),
        (llama, "--seed -1", "argument --seed: got -1, want in 0 ... 2**63 - 1"),
        (llama, "--recipe fp4", "got 'fp4'; or bf16"),
        (llama, "--json nowhere/run.json", "argument --json: got nowhere/run.json, want a file"),
    ],
)  # fmt: skip
def test_a_bad_argument_is_named_with_what_came_and_what_is_wanted(
    script: ModuleType, flags: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main([*TINY, *flags.split()])
    out, err = capsys.readouterr()
    assert wanted in err.splitlines()[-1]
    assert out == ""


@pytest.mark.parametrize("script", [nanochat, llama])
def test_a_gpu_that_torch_does_not_see_is_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        script.main(["--device=cuda"])
    assert "argument --device: got cuda, want cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "flags", "wanted"),
    [
        (nanochat, ["--precision=fp8"], "--precision: got fp8, want bf16 on cuda: it is old"),
        (nanochat, ["--precision=scaled_mm"], "--precision: got scaled_mm, want bf16 on cuda: it "
         "is old"),
        (llama, [], "--recipe: got tensorwise, want bf16 on this GPU: it is old"),
    ],
)  # fmt: skip
def test_a_gpu_without_fp8_is_refused_with_the_reason(
    script: ModuleType,
    flags: list[str],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fp8lt, "is_available", lambda *_: (False, "it is old"))
    with pytest.raises(SystemExit, match="2"):
        script.main(["--device=cuda", *flags])
    assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_llama_says_that_transformers_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        llama.main([*TINY])
    assert capsys.readouterr().err.endswith("transformers is missing; pip install transformers\n")


# ------------------------------------------------------------------------- nanochat's model, layers


def test_the_width_is_64_times_the_depth_in_whole_heads() -> None:
    assert [nanochat.GPT(n, 256, 4).head.in_features for n in (1, 2, 3, 4)] == [128, 128, 256, 256]


def test_a_token_changes_the_loss_of_its_position_and_later_ones_alone() -> None:
    torch.manual_seed(0)
    model = nanochat.GPT(2, 256, 16)
    for weight in model.parameters():  # at first the blocks add nothing
        nn.init.normal_(weight, std=0.1)
    before, targets = torch.randint(256, (2, 1, 16))
    after = before.clone()
    after[0, 9] = (after[0, 9] + 1) % 256
    changes = []
    for position in range(16):
        only = torch.full_like(targets, -100)  # `cross_entropy` leaves these out
        only[0, position] = targets[0, position]
        with torch.no_grad():
            changes.append(abs(model(after, only) - model(before, only)).item())
    assert max(changes[:9]) < 1e-6  # measured 0
    assert min(changes[9:]) > 1e-4  # measured 6e-3


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [((128, 128), True), ((768, 50304), True), ((112, 768), False), ((768, 777), False)],
)
def test_layers_that_are_small_or_no_multiples_of_16_are_left_alone(
    sizes: tuple[int, int], wanted: bool
) -> None:
    assert nanochat.nanochat_converts(nn.Linear(*sizes, device="meta")) == wanted


@pytest.mark.parametrize("precision", ["fp8", "scaled_mm"])
def test_conversion_counts_the_layers_that_it_reached(precision: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 100), nn.Linear(256, 128))
    assert nanochat.convert(model, precision, "tensorwise") == 2
    assert type(model[1]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_by_hand_has_the_gradients_of_a_linear_layer(dtype: torch.dtype) -> None:
    layer = nn.Linear(128, 256, bias=False, dtype=dtype)
    layer.weight.data = randn(256, 128, on=CPU, dtype=dtype, seed=1)
    layer.__class__ = nanochat.ScaledMMLinear
    x = randn(4, 32, 128, on=CPU, dtype=torch.bfloat16, seed=2).requires_grad_()
    dy = randn(4, 32, 256, on=CPU, dtype=torch.bfloat16, seed=3)
    y = layer(x)
    got = [y, *torch.autograd.grad(y, (x, layer.weight), dy)]
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, dtype]
    wide = [t.detach().double().requires_grad_() for t in (x, layer.weight)]
    want = [F.linear(*wide)]
    want += torch.autograd.grad(want[0], wide, dy.double())
    for one, exact in zip(got, want, strict=True):
        assert one.shape == exact.shape
        assert error(one, exact) < 0.1  # measured 0.037, 0.059, 0.059


def test_the_layer_by_hand_computes_what_fp8lt_computes() -> None:
    x, w = (randn(64, 128, on=CPU, dtype=torch.bfloat16, seed=i).requires_grad_() for i in (1, 2))
    dy = randn(64, 64, on=CPU, dtype=torch.bfloat16, seed=3)
    results = []
    for call in (nanochat.ScaledMM.apply, fp8lt.linear):
        y = call(x, w)
        results.append([y, *torch.autograd.grad(y, (x, w), dy)])
    for one, other in zip(*results, strict=True):
        assert error(one, other) < 5e-3  # measured 1e-9: the same operands
