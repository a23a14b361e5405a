"""tools/train.py: it trains, compares fairly and explains what is wrong; its model is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8lt
from fp8lt import ops
from fp8lt.recipe import NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import gpt
import train
import train_config
import train_text
from train_parallel import Parallel
from train_stats import Watch

ROOT = Path(__file__).resolve().parents[1]
SIZES = {
    "--dim": 32, "--layers": 1, "--heads": 2, "--seq": 32, "--batch": 8, "--steps": 30,
    "--lr": 1e-2, "--eval-batches": 2, "--max-bytes": 300_000,
}  # fmt: skip
TINY = ["--preset=cpu", "--device=cpu", *(f"{flag}={value}" for flag, value in SIZES.items())]
GUESSING = 5.545  # ln 256, nats per byte


def run_main(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert train.main([*TINY, *flags]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_command_trains_in_fp8_and_ends_with_one_line_of_json(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tools/train.py", *TINY, "--json", str(tmp_path / "run.json")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, table, last = done.stdout.splitlines()
    report = json.loads(last)
    (run,) = report["runs"]
    assert table.startswith("tensorwise")
    assert "30/30" in done.stderr  # the progress bar
    assert json.loads((tmp_path / "run.json").read_text()) == report
    assert run["fp8_layers"] == 5
    assert len(run["train_losses"]) == len(run["grad_norms"]) == 30
    assert run["stats"] == []
    assert abs(run["val_loss_start"] - GUESSING) < 0.3  # measured -0.03
    assert run["val_loss_end"] < run["val_loss_start"] - 0.8  # measured -2.2
    assert run["tokens_per_s"] > 0


def test_comparing_starts_both_runs_alike_and_draws_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_main(capsys, "--compare", "bf16", "--json", str(tmp_path / "run.json"))
    fp8, bf16 = report["runs"]
    assert [fp8["recipe"], bf16["recipe"]] == ["tensorwise", "bf16"]
    assert [fp8["fp8_layers"], bf16["fp8_layers"]] == [5, 0]
    # Not equal: each is evaluated in its own precision.
    assert abs(fp8["val_loss_start"] - bf16["val_loss_start"]) < 0.02  # measured 0.0003
    assert abs(fp8["val_loss_end"] - bf16["val_loss_end"]) < 0.1  # measured 0.003
    assert fp8["train_losses"] != bf16["train_losses"]
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_the_seed_alone_decides_the_losses(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_main(capsys, "--steps", "4", "--seed", seed)["runs"][0] for seed in ("1", "1", "2")]
    assert runs[0]["train_losses"] == runs[1]["train_losses"]
    assert runs[0]["val_loss_end"] == runs[1]["val_loss_end"]
    assert runs[0]["train_losses"] != runs[2]["train_losses"]


def test_a_run_may_have_a_seed_and_options_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--steps", "4", "--plot", str(tmp_path / "train.png")]
    runs = run_main(
        capsys, *few, "--compare", "tensorwise,seed=1,power_of_two_scales=true", "tensorwise,seed=1"
    )["runs"]  # fmt: skip
    assert [run["seed"] for run in runs] == [0, 1, 1]
    assert runs[1]["recipe"] == "tensorwise,seed=1,power_of_two_scales=true"
    assert len({tuple(run["train_losses"]) for run in runs}) == 3
    (alone,) = run_main(capsys, *few, "--seed", "1")["runs"]
    assert alone["train_losses"] == runs[2]["train_losses"]


def test_a_command_may_add_to_the_report_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, few = tmp_path / "first.json", ["--steps=4", f"--plot={tmp_path / 'train.png'}"]
    before = run_main(capsys, *few, "--compare", "rowwise", "--json", str(first))
    report = run_main(capsys, *few, "--recipe", "bf16", "--add-to", str(first))
    assert [run["recipe"] for run in report["runs"]] == ["tensorwise", "rowwise", "bf16"]
    assert report["runs"][:2] == before["runs"]

    def refused(*flags: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            train.main([*TINY, *few, "--add-to", str(first), *flags])
        return capsys.readouterr().err.splitlines()[-1]

    assert refused("--lr=0.5").endswith("first.json has lr 0.01, here it is 0.5")
    assert refused(f"--checkpoint={tmp_path}").endswith(
        "want no --add-to with it, it is of one run"
    )
    monkeypatch.setenv("GIT_COMMIT", "other")
    assert refused().endswith("here it is 'other'")
    del before["runs"][0]["grad_norms"]
    for bad in ([], before, {**before, "runs": [3]}):
        first.write_text(json.dumps(bad))
        assert "first.json is no report" in refused()


def test_a_run_goes_on_with_its_own_seed_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--recipe=bf16,seed=1", f"--checkpoint={tmp_path / 'run'}"]
    run_main(capsys, *flags, "--steps=2")
    with pytest.raises(SystemExit, match="2"):
        train.main([*TINY, *flags, "--recipe=bf16", "--steps=4"])
    assert "argument --seed: got 0, want 1, as in" in capsys.readouterr().err
    (run,) = run_main(capsys, *flags, "--steps=4")["runs"]
    assert len(run["train_losses"]) == len(run["grad_norms"]) == 4


def test_norms_are_those_of_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    text = torch.randint(256, (4000,), dtype=torch.uint8)
    config = train_config.Config(32, 1, 2, 16, 4, 3, 0, 1e-3, 1, 4000, clip=1e-3)
    torch.manual_seed(0)
    model, parallel = gpt.GPT(32, 1, 2, 16, False), Parallel(torch.device("cpu"))
    optimizer = train.make_optimizer(model, config, parallel)
    norms: list[float] = []
    clip = parallel.clip
    monkeypatch.setattr(
        parallel, "clip", lambda *args: norms.append(whole_norm(model)) or clip(*args)
    )
    steps = train.train_steps(model, optimizer, text, config, parallel, Watch(None, 0))
    got = [norm.item() for _, norm in steps]
    assert got == pytest.approx(norms, rel=1e-5)  # measured 5e-7
    assert min(got) > 1e-2  # measured 1.0: not what is left of it


def whole_norm(model: torch.nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def test_statistics_are_taken_now_and_then_and_change_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = ["--steps", "6", "--recipe", "delayed", "--plot", str(tmp_path / "train.png")]
    assert train.main([*TINY, *few, "--compare", "bf16", "--stats", "3"]) == 0
    out = capsys.readouterr().out
    fp8, bf16 = json.loads(out.splitlines()[-1])["runs"]
    assert [taken["step"] for taken in fp8["stats"]] == [3, 6]
    assert bf16["stats"] == []
    tensors = fp8["stats"][0]["tensors"]
    assert len(tensors) == 15  # x, w, dy of five layers
    assert {t["layer"] for t in tensors if t["tensor"] == "dy"} == {
        f"blocks.0.{name}" for name in ("qkv", "out", "gate", "up", "down")
    }
    assert all(t["calls"] == 1 and t["sqnr"] > 10 for t in tensors)
    shown = out.split("step 6, the 5 tensors with the lowest SQNR\n")[1].splitlines()
    assert len(shown[1:6]) == sum("blocks.0." in line for line in shown[1:6]) == 5
    (alone,) = run_main(capsys, *few)["runs"]
    assert alone["train_losses"] == fp8["train_losses"]


def test_every_recipe_trains_and_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = NAMES
    flags = ["--recipe", first, "--compare", *others, "--plot", str(tmp_path / "train.png")]
    runs = run_main(capsys, "--steps", "12", *flags)["runs"]
    assert [run["recipe"] for run in runs] == list(NAMES)
    assert {run["fp8_layers"] for run in runs} == {5}
    ends = [run["val_loss_end"] for run in runs]
    assert max(ends) - min(ends) < 0.05  # measured 0.003
    assert max(ends) < GUESSING - 0.5  # measured -1.4


@pytest.mark.parametrize("name", NAMES)
def test_converting_gives_the_layers_the_recipe(name: str) -> None:
    model = gpt.GPT(32, 1, 2, 16)
    train.convert(model, name, fp8_head=True)
    assert {m.recipe.name for m in model.modules() if isinstance(m, fp8lt.Linear)} == {name}


def test_a_recipe_that_the_device_lacks_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(where: torch.device, emulated: bool = False, recipe: str = "") -> ops.Backend:
        if recipe == "blockwise":
            raise RuntimeError("fp8lt: no native FP8 for tensors on cuda: why\nWhat to set.")
        return ops.OPERATORS

    monkeypatch.setattr(fp8lt.ops, "backend", lacks)
    with pytest.raises(SystemExit, match="2"):
        train.main([*TINY, "--compare", "rowwise", "blockwise"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("argument --compare: blockwise: fp8lt: no native FP8 for tensors on "
                         "cuda: why")  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--dim 30 --heads 4", "argument --dim: got 30, want a multiple of 2 * --heads = 8"),
        ("--heads 0", "argument --heads: got 0, want above 0"),
        ("--lr nan", "argument --lr: got nan, want above 0"),
        ("--warmup 31", "argument --warmup: got 31, want in 0 ... --steps 30"),
        ("--seed -1", "argument --seed: got -1"),
        ("--steps x", "argument --steps: invalid int value: 'x'"),
        ("--seq 100000", "argument --seq: got 100000, want below"),
        ("--data missing.txt", "missing.txt"),
        ("--data empty.txt", "argument --data: got 0 bytes in empty.txt, want at least 20"),
        ("--recipe nonsense", "argument --recipe: recipe: want one of tensorwise, "),
        ("--recipe nonsense", "got 'nonsense'; or bf16"),
        ("--compare nonsense", "argument --compare: recipe: want one of"),
        ("--compare bf16,seed", "--compare: bf16,seed: want RECIPE,option=value,... with each"),
        ("--recipe bf16,seed=1,seed=2", "bf16,seed=1,seed=2: want RECIPE,option=value,... with e"),
        ("--recipe bf16,margin=1", "--recipe: bf16,margin=1: bf16 has no option 'margin'; want se"),
        ("--recipe rowwise,margin=1", "rowwise has no option 'margin'; want seed or one of fp8_fo"),
        ("--recipe delayed,margin=x", "--recipe: margin: want an integer, got 'x'"),
        ("--recipe delayed,margin=99", "--recipe: margin: want an integer of -32 to 32, got 99"),
        ("--recipe tensorwise,emulate=1", "--recipe: emulate: want true or false, got '1'"),
        ("--compare bf16,seed=-1", "argument --compare: argument --seed: got -1, want in 0"),
        ("--stats 0", "argument --stats: got 0, want above 0"),
        ("--json nowhere/run.json", "argument --json: got nowhere/run.json, want a file in"),
        ("--plot curves.txt", "argument --plot: got curves.txt, want a .png, .svg or .pdf"),
    ],
)
def test_a_bad_argument_is_named_with_what_came_and_what_is_wanted(
    flags: str,
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(SystemExit, match="2"):
        train.main([*TINY, *flags.split()])
    out, err = capsys.readouterr()
    assert wanted in err.splitlines()[-1]
    assert out == ""


def test_a_loss_that_is_not_finite_stops_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*TINY, "--recipe", "bf16", "--lr", "1e30"]) == 1
    out, err = capsys.readouterr()
    assert "train.py: the loss of step" in err.splitlines()[-1]
    assert out == ""


def test_an_interrupt_leaves_one_clean_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupted)
    assert train.main(TINY) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("train.py: interrupted")


@pytest.mark.parametrize(("fp8_head", "count"), [(False, 10), (True, 11)])
def test_converting_reaches_every_linear_layer_but_the_head(fp8_head: bool, count: int) -> None:
    model = gpt.GPT(32, 2, 2, 16)
    assert train.convert(model, "tensorwise", fp8_head) == count
    assert isinstance(model.head, fp8lt.Linear) == fp8_head
    assert isinstance(model.blocks[1].down, fp8lt.Linear)


def test_bf16_converts_nothing() -> None:
    model = gpt.GPT(32, 2, 2, 16)
    assert train.convert(model, "bf16", True) == 0
    assert not any(isinstance(module, fp8lt.Linear) for module in model.modules())


@pytest.mark.parametrize("tie", [False, True])
def test_a_tied_head_shares_the_embedding_also_when_converted(tie: bool) -> None:
    model = gpt.GPT(32, 1, 2, 16, tie=tie)
    train.convert(model, "tensorwise", fp8_head=True)
    assert (model.head.weight is model.embed.weight) == tie
    gpt.loss_of(model, torch.arange(12).view(1, 12)).backward()
    used = torch.zeros(256, dtype=torch.bool)
    used[:11] = True
    # The embedding alone touches the bytes that came; the head touches every byte.
    touched = model.embed.weight.grad.abs().sum(1) > 0
    assert torch.equal(touched, torch.ones_like(used) if tie else used)


def test_a_token_changes_its_own_logits_and_later_ones_but_none_before() -> None:
    torch.manual_seed(0)
    model = gpt.GPT(32, 2, 2, 16)
    before = torch.randint(256, (1, 16))
    after = before.clone()
    after[0, 9] += 1
    with torch.no_grad():
        change = (model(after % 256) - model(before)).abs().amax(-1)[0]  # [T]
    assert change[:9].max() < 1e-6  # measured 0
    assert change[9:].min() > 1e-5  # measured 7e-3


def test_rotary_positions_make_a_score_depend_on_the_distance_alone() -> None:
    angles = gpt.rotary_angles(20, 16).double()
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).double()

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [20, 16]: x at each position
        return gpt.rotate(x.expand(1, 1, 20, 16), angles.cos(), angles.sin())[0, 0]

    scores = rotated(q) @ rotated(k).T
    for distance in range(-3, 4):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
    assert abs(scores[0, 0] - scores[0, 1]) > 1e-2


def test_validation_text_is_every_twentieth_block_and_never_trained_on(tmp_path: Path) -> None:
    block = 1 << 14
    file = tmp_path / "text"
    file.write_bytes(b"".join(bytes([i]) * block for i in range(45)))
    text = train_text.read_text([file], 10**9, "text")
    assert text.val.unique().tolist() == [19, 39]
    assert len(text.val) == 2 * block
    assert text.train.unique().tolist() == [i for i in range(45) if i not in (19, 39)]
    assert len(text.train) == 43 * block


def test_the_default_text_goes_on_with_the_source_of_torch() -> None:
    little, much = (train_text.default_text(size) for size in (1_000_000, 12_000_000))
    assert "torch" not in little.source
    assert f"library, torch {torch.__version__}" in much.source
    assert len(much.train) + len(much.val) == 12_000_000


def test_sequences_reach_both_ends_of_the_text() -> None:
    text = torch.arange(40, dtype=torch.uint8)
    starts = train_text.val_starts(text, 4, 9, 4).flatten()  # as many as there are places
    assert starts.tolist() == list(range(36))
    assert train_text.windows(text, starts, 4)[-1].tolist() == [35, 36, 37, 38, 39]
    drawn = train_text.train_starts(text, 4, 500, 2, seed=0)
    assert [drawn.min().item(), drawn.max().item()] == [0, 35]
    assert not torch.equal(drawn, train_text.train_starts(text, 4, 500, 2, seed=1))


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth() -> None:
    config = train_config.PRESETS["cpu"]
    rates = [train.learning_rate(step, config) for step in range(config.steps)]
    assert rates[config.warmup - 1] == max(rates) == config.lr
    assert rates[: config.warmup] == sorted(rates[: config.warmup])
    assert rates[config.warmup :] == sorted(rates[config.warmup :], reverse=True)
    assert rates[-1] == pytest.approx(config.lr / 10, rel=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_run_trains_and_reports_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_main(capsys, "--device", "cuda", "--dim", "128", "--compare", "bf16", "--tie")
    for run in report["runs"]:
        assert run["val_loss_end"] < run["val_loss_start"] - 0.8
        assert run["peak_memory_bytes"] > 4 * run["parameters"]
