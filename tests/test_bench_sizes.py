"""`bench.py sizes`: from which size on a layer gains from FP8."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import bench
import bench_sizes
from bench_core import Shape


def test_the_size_of_a_shape_is_below_its_least_and_grows_with_each() -> None:
    assert bench_sizes.size_of(Shape(30, 30, 30)) == pytest.approx(10)
    assert bench_sizes.size_of(Shape(10**9, 1, 10**9)) == pytest.approx(1)
    size = bench_sizes.size_of(Shape(4096, 1024, 2048))
    assert size == pytest.approx(4096 * 1024 * 2048 / (4096 * 1024 + 1024 * 2048 + 4096 * 2048))


def test_the_rule_loses_what_a_wrong_choice_costs() -> None:
    points = [(1.0, 0.5), (2.0, 2.0)]
    assert bench_sizes.loss(points, 1.5) == (0, 0, 0)
    assert bench_sizes.loss(points, 3.0) == (0.5, 1, 1)  # bf16 at twice FP8's time
    assert bench_sizes.loss(points, 0.5) == (0.5, 1, 1)  # FP8 at twice bf16's


def test_the_rule_begins_where_the_loss_is_least() -> None:
    assert bench_sizes.fit([(4.0, 0.8), (16.0, 1.2), (64.0, 1.5)]) == 8
    # One shape out of order: wrong in one choice, in the cheaper one.
    assert bench_sizes.fit([(4.0, 0.8), (16.0, 1.2), (64.0, 0.9), (256.0, 1.5)]) == 8
    assert bench_sizes.fit([(4.0, 0.8), (16.0, 1.1), (64.0, 0.7), (256.0, 1.5)]) == 128
    assert bench_sizes.fit([(4.0, 1.2), (16.0, 1.5)]) == 4
    assert bench_sizes.fit([(4.0, 0.9), (16.0, 0.8)]) == math.inf


def test_the_mode_gives_a_rule_for_each_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sizes", "--device", "cpu", "--rounds", "1", "--json", str(tmp_path / "run.json")]
    assert bench.main([*argv, "--contenders", "fp8lt", "fp8lt-rowwise"]) == 0
    tables = capsys.readouterr().out
    report = json.loads((tmp_path / "run.json").read_text())["modes"]["sizes"]
    assert [(rule["contender"], rule["phase"], rule["shapes"]) for rule in report["rules"]] == [
        (name, phase, 4)
        for phase in ("fwd+bwd", "fwd+bwd, host hidden")
        for name in ("fp8lt", "fp8lt-rowwise")
    ]
    assert all(row["status"] == "ok" for row in report["rows"])
    for rule in report["rules"]:
        points = [
            (row["size"], row["ratio"])
            for row in report["rows"]
            if (row["contender"], row["phase"]) == (rule["contender"], rule["phase"])
        ]
        assert len(points) == 4
        # Emulated FP8 gains at no size, but for a moment's noise: then at that.
        assert float(rule["least_size"]) == pytest.approx(bench_sizes.fit(points), rel=1e-4)
    lines = [line for line in tables.splitlines() if line.startswith("16x32x32")]
    assert lines
    assert lines[0].count("x (") == 2
