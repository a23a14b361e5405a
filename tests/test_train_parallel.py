"""tools/train.py under torchrun: every way to share the work gives the losses of one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import train

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "--dim": 64, "--layers": 2, "--heads": 2, "--seq": 32, "--batch": 8, "--steps": 8,
    "--lr": 1e-2, "--eval-batches": 2, "--max-bytes": 300_000, "--save-every": 4,
}  # fmt: skip
TINY = ["--preset=cpu", "--device=cpu", *(f"{flag}={value}" for flag, value in SIZES.items())]


def run(*flags: str, ranks: int = 1) -> dict:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *(launch if ranks > 1 else []), "tools/train.py", *TINY, *flags],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[00:00<?") == 1  # rank 0's progress bar begins
    (report,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return report["runs"][0]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Return the checkpoint of a run in one process after half of its steps, and the whole run."""
    folder = tmp_path_factory.mktemp("one")
    whole = run("--checkpoint", str(folder))
    shutil.rmtree(folder / "step-00000008")
    return folder, whole


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2 --fp8-all-gather", "tp"])
def test_every_way_goes_on_from_a_checkpoint_of_one_process(
    tmp_path: Path, begun: tuple[Path, dict], way: str
) -> None:
    folder, want = begun
    shutil.copytree(folder, tmp_path / "run")
    got = run("--parallel", *way.split(), "--checkpoint", str(tmp_path / "run"), ranks=2)
    assert got["train_losses"][:4] == want["train_losses"][:4]
    assert got["grad_norms"][:4] == want["grad_norms"][:4]
    # Measured 9e-4.
    assert got["grad_norms"][4:] == pytest.approx(want["grad_norms"][4:], rel=5e-3)
    assert got["parameters"] == want["parameters"]
    told = got["parallel"]
    assert (told["way"], told["ranks"]) == (way.split()[0], 2)
    assert told["fp8_all_gather"] == ("--fp8-all-gather" in way)
    # The weights of the blocks' linears, for forward and for backward; the rest is gathered once.
    inside = 2 * 2 * (4 * 64 * 64 + 3 * 64 * 192)
    gathered = told["gathered_bytes_per_step"]
    if told["way"] != "fsdp2":
        assert gathered is None
    elif told["fp8_all_gather"]:
        assert inside < gathered < 1.5 * inside
    else:
        assert 2 * inside < gathered < 2.5 * inside
    for ours, theirs in zip(got["train_losses"][4:], want["train_losses"][4:], strict=True):
        assert abs(ours - theirs) < 2e-3  # measured 5e-4; a step changes it by 0.1 to 0.8
    assert abs(got["val_loss_end"] - want["val_loss_end"]) < 1e-3  # measured 2e-4
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "config.json", "step-00000004", "step-00000008",
    ]  # fmt: skip


def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(
    tmp_path: Path, begun: tuple[Path, dict]
) -> None:
    folder, want = begun
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "step-00000006.part").mkdir()  # of a run that was killed
    got = run("--checkpoint", str(tmp_path / "run"))
    assert got["train_losses"] == want["train_losses"]
    assert got["grad_norms"] == want["grad_norms"]
    assert got["val_loss_end"] == want["val_loss_end"]


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--parallel=ddp"], {}, "--parallel: ddp wants several processes: torchrun --nproc"),
        ([], {"WORLD_SIZE": "3"}, "--parallel: 3 processes want one of ddp, fsdp2, tp"),
        (["--parallel=fsdp2"], {"RANK": "0", "WORLD_SIZE": "3"}, "--batch: got 8, want a multiple"),
        (["--parallel=tp"], {"RANK": "0", "WORLD_SIZE": "3"}, "--heads: got 2, want a multiple of"),
        (["--fp8-all-gather"], {}, "--fp8-all-gather: want --parallel fsdp2 and --recipe tensor"),
        (["--save-every=0"], {}, "--save-every: got 0, want above 0"),
        (["--checkpoint=x", "--compare=bf16"], {}, "--checkpoint: want no --compare with it"),
        (["--checkpoint=README.md"], {}, "--checkpoint: got README.md, want a folder"),
    ],
)
def test_what_does_not_go_together_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str],
    variables: dict[str, str], message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(ROOT)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit_:
        train.main([*TINY, *flags])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(
    begun: tuple[Path, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = begun
    with pytest.raises(SystemExit):
        train.main([*TINY, "--dim=32", "--checkpoint", str(folder)])
    assert f"--dim: got 32, want 64, as in {folder}/config.json" in capsys.readouterr().err
    assert train.main([*TINY, "--steps=4", "--checkpoint", str(folder)]) == 1
    assert "has all 4 steps; give another --checkpoint" in capsys.readouterr().err
