"""tools/bench.py: it times fairly, checks before it times, and outlives whatever a peer does."""

import json
import os
import re
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8lt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bench
import bench_blocks
import bench_core
import bench_linear
import bench_model
import bench_modes
import bench_nanochat
import bench_peers
from bench_peers import Contender, Layer

ROOT = Path(__file__).resolve().parents[1]
ONE_BLOCK = bench_blocks.Size(32, 64, 4, 2, layers=1, batch=2, seq=16)


def run_main(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict, str]:
    """Return the report and the tables."""
    assert bench.main(["--device=cpu", "--rounds=3", *flags]) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(tables)


def rows_of(report: dict, mode: str, **wanted: str) -> list[dict]:
    rows = report["modes"][mode]["rows"]
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def line_up(monkeypatch: pytest.MonkeyPatch, *extra: Contender) -> None:
    """Let the mode `layer` run bf16 and these."""
    reference = bench_peers.TRAINING[0]
    monkeypatch.setattr(bench_modes, "TRAINING", [reference, *extra])


def layer_of(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Layer]:
    """Return a factory of a layer that computes function(x, w)."""

    def build(w: Tensor) -> Layer:
        weight = bench_peers.leaf(w)
        return Layer(lambda x: function(x, weight), weight)

    return build


def test_the_command_shows_tables_and_ends_with_one_line_of_json(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "tools/bench.py", "layer", "quantize", "--device=cpu", "--rounds=2",
         "--contenders=fp8lt", "--shapes=32x16x48", "--json", str(tmp_path / "bench.json"),
         "--plot", str(tmp_path / "bench.png")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    report = json.loads(last)
    assert json.loads((tmp_path / "bench.json").read_text()) == report
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert {row["case"] for row in rows_of(report, "layer")} == {"32x16x48"}
    assert {row["contender"] for row in rows_of(report, "layer")} == {"bf16", "fp8lt"}
    assert [row["case"] for row in rows_of(report, "quantize")] == [
        "32x16 bfloat16", "32x16 float32",
    ]  # fmt: skip
    assert all(row["status"] == "ok" for mode in report["modes"] for row in rows_of(report, mode))
    assert any(line.startswith("where the time goes, us") for line in tables)
    assert re.search(r"layer: 100%", done.stderr)  # the progress bar reached its end
    assert report["torch"] == torch.__version__
    assert report["method"]["clock"] == "perf_counter"


def test_a_ratio_is_the_median_of_the_ratios_of_each_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report, _ = run_main(capsys, "layer", "host", "--contenders", "scaled_mm")
    for mode in ("layer", "host"):
        cases = {(row["case"], row["phase"]) for row in rows_of(report, mode)}
        assert cases
        for case, phase in cases:
            base, row = rows_of(report, mode, case=case, phase=phase)
            pairs = list(zip(base["rounds_us"], row["rounds_us"], strict=True))
            over = mode == "host"  # there, the time over bf16's
            want = [theirs / us if not over else us / theirs for theirs, us in pairs]
            assert row["ratios"] == pytest.approx(want, rel=1e-4)
            assert row["ratio"] == statistics.median(row["ratios"])
            assert row["us"] == statistics.median(row["rounds_us"])
            assert len(row["rounds_us"]) == 3
            assert base["ratio"] == 1


def test_a_contender_that_raises_is_reported_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_build(w: Tensor) -> Layer:
        raise RuntimeError("no such kernel\nand a long trace")

    class NoBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor, w: Tensor) -> Tensor:
            return x @ w.t()

        @staticmethod
        def backward(ctx: object, dy: Tensor) -> Tensor:
            raise AssertionError

    line_up(
        monkeypatch,
        Contender("broken", no_build),
        Contender("half", layer_of(NoBackward.apply)),
        Contender("fine", layer_of(lambda x, w: x @ w.t())),
    )
    report, tables = run_main(capsys, "layer", "--shapes", "16x16x16")
    broken = rows_of(report, "layer", contender="broken")
    assert [row["status"] for row in broken] == ["failed"] * 2
    assert {row["reason"] for row in broken} == {"RuntimeError: no such kernel"}
    assert {row["ratio"] for row in broken} == {None}
    assert "broken FAILED at 16x16x16 fwd, 16x16x16 fwd+bwd: RuntimeError: no such kernel" in tables
    half = rows_of(report, "layer", contender="half")
    assert [row["status"] for row in half] == ["ok", "failed"]
    assert half[1]["reason"] == "AssertionError"
    assert all(row["ratio"] > 0 for row in rows_of(report, "layer", contender="fine"))


def test_a_contender_that_fails_in_the_middle_of_the_rounds_has_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = iter(range(bench_linear.WARM_UP + 1 + bench_core.RUNS))

    def tires(x: Tensor, w: Tensor) -> Tensor:
        if next(calls, None) is None:
            raise RuntimeError("tired")
        return x @ w.t()

    monkeypatch.setattr(bench_modes, "INFERENCE", [
        bench_peers.INFERENCE[0], Contender("tires", layer_of(tires)),
    ])  # fmt: skip
    report, _ = run_main(capsys, "decode", "--shapes", "16x16x16")
    row = rows_of(report, "decode", contender="tires", phase="fwd")[0]
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: tired")
    assert row["rounds_us"] == row["ratios"] == []
    base = rows_of(report, "decode", contender="bf16", phase="fwd")[0]
    assert len(base["rounds_us"]) == 3


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return 1.1 * (x @ w.t())


def constant_gradient(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t().detach() + 0 * w.sum()  # y and dx are right, dw is not


def not_a_number(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t() * float("nan")


@pytest.mark.parametrize(
    ("function", "statuses", "name"),
    [
        (scaled, ["wrong", "wrong"], "y"),
        (constant_gradient, ["ok", "wrong"], "dw"),
        (not_a_number, ["wrong", "wrong"], "y"),
    ],
)
def test_a_contender_that_is_wrong_is_marked_and_not_timed(
    function: Callable, statuses: list[str], name: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    line_up(monkeypatch, Contender("liar", layer_of(function)))
    report, tables = run_main(capsys, "layer", "--shapes", "32x32x32")
    rows = rows_of(report, "layer", contender="liar")
    assert [row["status"] for row in rows] == statuses
    assert f"error of {name} " in rows[1]["reason"]
    assert rows[1]["us"] is rows[1]["ratio"] is None
    assert "liar WRONG at 32x32x32 fwd" in tables


def test_a_wrong_reference_leaves_no_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_modes, "TRAINING", [
        Contender("bf16", layer_of(scaled)), Contender("fine", layer_of(lambda x, w: x @ w.t())),
    ])  # fmt: skip
    report, _ = run_main(capsys, "layer", "--shapes", "32x32x32")
    assert {row["status"] for row in rows_of(report, "layer", contender="fine")} == {"ok"}
    assert {row["ratio"] for row in rows_of(report, "layer")} == {None}


def test_a_missing_peer_is_said_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs() -> None:
        import no_such_peer  # noqa: F401

    line_up(monkeypatch, Contender("absent", layer_of(scaled), needs))
    report, tables = run_main(capsys, "layer", "--shapes", "16x16x16")
    why = "ModuleNotFoundError: No module named 'no_such_peer'"
    assert report["modes"]["layer"]["missing"] == {"absent": why}
    assert f"absent is missing: {why}" in tables
    assert rows_of(report, "layer", contender="absent") == []


def test_every_line_up_begins_with_the_reference_and_has_each_name_once() -> None:
    for names in (
        [one.name for one in bench_peers.TRAINING],
        [one.name for one in bench_peers.INFERENCE],
        [one.name for one in bench_blocks.VARIANTS if one.case == "eager"],
        [one.name for one in bench_blocks.VARIANTS if one.case == "compiled"],
    ):
        assert names[0] in ("bf16", "bf16-compiled")
        assert len(set(names)) == len(names)


def test_the_model_mode_measures_eager_and_compiled_against_their_own_bf16(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_model, "SIZE_CPU", ONE_BLOCK)
    names = "fp8lt", "fp8lt-autotuned", "scaled_mm-compiled"
    report, _ = run_main(capsys, "model", "--rounds", "1", "--contenders", *names)
    found = [(r["case"], r["contender"], r["status"]) for r in rows_of(report, "model")]
    assert found == [
        ("eager", "bf16", "ok"), ("eager", "fp8lt", "ok"), ("eager", "fp8lt-autotuned", "ok"),
        ("compiled", "bf16-compiled", "ok"), ("compiled", "scaled_mm-compiled", "ok"),
    ]  # fmt: skip
    for row in rows_of(report, "model"):
        if not row["contender"].startswith("bf16"):
            want = row["reference_rounds_us"][0] / row["rounds_us"][0]
            assert row["ratio"] == pytest.approx(want, rel=1e-4)


def test_the_step_mode_trains_a_decoder_in_every_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["fp8lt", "fp8lt-context", "fp8lt-compiled"]
    report, tables = run_main(capsys, "step", "--rounds", "1", "--contenders", *names)
    rows = rows_of(report, "step")
    assert [(row["case"], row["contender"], row["status"]) for row in rows] == [
        ("eager", "bf16", "ok"), ("eager", "fp8lt", "ok"), ("eager", "fp8lt-context", "ok"),
        ("compiled", "bf16-compiled", "ok"), ("compiled", "fp8lt-compiled", "ok"),
    ]  # fmt: skip
    assert all(0 < row["errors"]["dw"] < 0.3 for row in rows)
    assert rows[1]["errors"] == rows[2]["errors"] != rows[0]["errors"]
    assert report["modes"]["step"]["parameters"] > 10_000
    assert "fp8lt-context" in tables


def test_the_nanochat_modes_train_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    modes, names = bench_nanochat.SIZES, ("fp8lt", "fp8lt-compiled")
    report, tables = run_main(capsys, *modes, "--rounds", "1", "--contenders", *names)
    for mode, depth, width in (("nanochat12", 2, 128), ("nanochat24", 3, 256)):
        rows = rows_of(report, mode)
        assert [(row["case"], row["contender"], row["status"]) for row in rows] == [
            (f"depth {depth}, {case}", name if case == "eager" else f"{name}-compiled", "ok")
            for case in ("eager", "compiled")
            for name in ("bf16", "fp8lt")
        ]
        for case in (rows[:2], rows[2:]):
            bf16, fp8 = (row["errors"]["dw"] for row in case)
            assert bf16 < 0.02 < fp8 < 0.3  # measured 0.0035 and 0.075 at depth 2
        # A block has 4 square layers and 2 of 4 times the width; embedding and head have 256 words.
        parameters = depth * 12 * width**2 + 2 * 256 * width
        assert report["modes"][mode]["parameters"] == parameters
    assert "tokens/s" in tables


def test_the_filter_leaves_out_the_attention_of_the_small_nanochat_alone() -> None:
    kept = []
    for size in bench_nanochat.SIZES.values():
        with torch.device("meta"):
            model = bench_nanochat.GPT(size.depth, size.vocabulary, size.seq)
        model.tokens = size.batch * size.seq
        every, some = bench_nanochat.chosen(model)
        assert len(every) == 6 * size.depth + 1
        kept.append({name.rpartition(".")[2] for name in some})
    assert kept == [{"up", "down", "head"}, {"q", "k", "v", "out", "up", "down", "head"}]


class FakeLinear(nn.Linear):
    """Stands in for TransformerEngine's layer: same arguments, and it notes its contexts."""

    inside: list[str] = []  # noqa: RUF012

    def __init__(self, n: int, m: int, bias: bool, device: object, params_dtype: object) -> None:
        super().__init__(n, m, bias, device, params_dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert self.inside, "forward outside of autocast"
        y = super().forward(x)
        y.register_hook(lambda dy: assert_outside(dy, self.inside))
        return y


def assert_outside(dy: Tensor, inside: list[str]) -> None:
    assert not inside, "backward inside of autocast"


class FakeAutocast:
    def __init__(self, enabled: bool, recipe: object) -> None:
        assert enabled
        self.recipe = type(recipe).__name__

    def __enter__(self) -> None:
        FakeLinear.inside.append(self.recipe)

    def __exit__(self, *error: object) -> None:
        FakeLinear.inside.pop()


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a package of that name in place, with what the benchmark uses of it."""
    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
    recipe = types.SimpleNamespace(**{name: type(name, (), {}) for name in names})
    te = types.SimpleNamespace(Linear=FakeLinear, autocast=FakeAutocast)
    parts = {"": types.ModuleType("transformer_engine"), ".pytorch": te,
             ".common": types.SimpleNamespace(recipe=recipe)}  # fmt: skip
    parts[""].pytorch, parts[""].common = te, parts[".common"]  # type: ignore[attr-defined]
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    bench_peers.missing.cache_clear()
    yield
    bench_peers.missing.cache_clear()


@pytest.mark.usefixtures("transformer_engine")
def test_transformer_engine_runs_forward_in_its_context_and_backward_outside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_model, "SIZE_CPU", ONE_BLOCK)
    names = ["te-delayed", "te-current", "te-block"]
    report, _ = run_main(capsys, "layer", "model", "--rounds", "1", "--contenders", *names)
    for mode in ("layer", "model"):
        for name in names:
            rows = rows_of(report, mode, contender=name)
            assert rows
            assert [row["reason"] for row in rows] == [None] * len(rows)
            assert all(max(row["errors"].values()) < 0.03 for row in rows)  # it is bf16


def test_the_weight_of_the_contender_that_reuses_it_is_quantised_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, used = [], []
    quantize, linear = fp8lt.quantize_weight, fp8lt.linear
    monkeypatch.setattr(fp8lt, "quantize_weight", lambda w: (made.append(quantize(w)), made[-1])[1])
    monkeypatch.setattr(
        fp8lt,
        "linear",
        lambda x, w, w_quantized=None: (
            used.append(w_quantized),
            linear(x, w, w_quantized=w_quantized),
        )[1],
    )
    bench_peers.missing.cache_clear()
    report, _ = run_main(capsys, "decode", "--contenders", "fp8lt-reused", "--rounds", "1")
    bench_peers.missing.cache_clear()
    assert {r["status"] for r in rows_of(report, "decode", contender="fp8lt-reused")} == {"ok"}
    assert len(made) == 1  # one shape
    assert len(used) > 5
    assert all(one is made[0] for one in used)


# ------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("nonsense", "argument MODE: invalid choice: 'nonsense'"),
        ("layer --rounds 0", "argument --rounds: got '0', want a whole number above 0"),
        ("layer --shapes 8x8", "argument --shapes: got '8x8', want MxKxN"),
        ("layer --shapes 8x8x0", "argument --shapes: got '8x8x0', want MxKxN"),
        ("layer --contenders apex", "argument --contenders: invalid choice: 'apex'"),
        ("layer --json nowhere/x.json", "argument --json: got nowhere/x.json, want a file in"),
        ("layer --plot x.txt", "argument --plot: got x.txt, want a .png, .svg or .pdf"),
        ("host --plot x.png", "argument --plot: it shows the mode layer"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_wanted(
    flags: str, wanted: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--device=cpu", *flags.split()])
    out, err = capsys.readouterr()
    assert wanted in err.splitlines()[-1]
    assert out == ""


def test_a_mode_that_breaks_is_reported_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> dict:
        raise RuntimeError("the device is lost")

    monkeypatch.setitem(bench.MODES, "host", broken)
    report, tables = run_main(capsys, "host", "quantize")
    assert report["modes"]["host"]["failure"] == "RuntimeError: the device is lost"
    assert "FAILED: RuntimeError: the device is lost" in tables
    assert rows_of(report, "quantize")
