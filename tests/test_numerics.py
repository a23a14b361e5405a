"""tools/numerics.py: what it measures is so, and what it prints is what it measured."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

import fp8lt
from fp8lt import ops
from fp8lt.recipe import NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import numerics

SMALL = ["--device=cpu", "--shape", "96", "64", "80"]


def test_every_recipe_and_bf16_has_decibels_for_every_pair_of_families(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert numerics.main([*SMALL, "--json", str(tmp_path / "x.json")]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert json.loads((tmp_path / "x.json").read_text()) == report
    assert report["shape"] == {"m": 96, "k": 64, "n": 80}
    assert report["torch"] == torch.__version__
    found = [(row["x"], row["dy"], row["recipe"]) for row in report["rows"]]
    names = ("bf16", *NAMES, *(f"torchao-{name}" for name in numerics.TORCHAO))
    assert found == [(*pair, name) for pair in numerics.PAIRS for name in names]
    at = {tuple(row[key] for key in ("x", "dy", "recipe")): row for row in report["rows"]}
    for row in report["rows"]:
        low, high = (50, 60) if row["recipe"] == "bf16" else (15, 60)
        assert all(low < row[name] < high for name in numerics.RESULTS)
        assert any(line.startswith(row["recipe"]) and numerics.cell(row) in line for line in shown)
        if row["recipe"] in NAMES:
            assert any(
                line.startswith(row["recipe"]) and numerics.flushed(row) in line for line in shown
            )
            twin = at.get((row["x"], row["dy"], f"torchao-{row['recipe']}"))
            for name in numerics.RESULTS if twin else ():
                assert row[name] > twin[name] - 0.01  # measured -0.0002 at worst
        else:
            assert row["flushed"] is None
    # An outlier in the tensor takes the rest of the range.
    outliers = at["token outliers", "gradient-like", "tensorwise"]["flushed"]
    # Measured 0.0049, 0 and, by row, 0.
    assert outliers["x"] > 1e-3 > at["Gaussian", "Gaussian", "tensorwise"]["flushed"]["x"]
    assert outliers["x"] > 5 * at["token outliers", "gradient-like", "rowwise"]["flushed"]["x"]


def test_sqnr_is_twenty_decibels_for_a_tenth_of_the_norm() -> None:
    want = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert numerics.sqnr(want, torch.tensor([3.0, 4.5])) == pytest.approx(20)
    assert math.isnan(numerics.sqnr(want, torch.tensor([3.0, float("nan")])))


def test_families_have_their_outliers() -> None:
    token, channel, element = (
        numerics.drawn(f"{kind} outliers", 400, 300, 0).float()
        for kind in ("token", "channel", "element")
    )
    assert token.abs().mean(1).log().std() > 1.5  # measured 1.9
    assert channel.abs().mean(0).log().std() > 1.5
    assert token.abs().mean(0).log().std() < 1 > channel.abs().mean(1).log().std()
    assert 1 <= (element.abs() > 30).sum() <= 40
    assert numerics.drawn("gradient-like", 400, 300, 0).abs().mean() < 1e-2
    gated = numerics.drawn("SwiGLU", 400, 300, 0).float()
    assert gated.abs().quantile(0.25) < 0.2 < 10 < gated.abs().max()  # many small, few large
    assert numerics.drawn("Gaussian", 4, 3, 0).equal(numerics.drawn("Gaussian", 4, 3, 0))


def test_a_recipe_that_the_device_lacks_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(where: torch.device, emulated: bool = False, recipe: str = "") -> ops.Backend:
        if recipe == "blockwise":
            raise RuntimeError("no scales per block\nand more")
        return ops.OPERATORS

    monkeypatch.setattr(fp8lt.ops, "backend", lacks)
    assert numerics.main(SMALL) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "blockwise: no scales per block" in shown
    assert any(line.split() == ["blockwise", *"------"] for line in shown)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--shape 8 8 0", "argument --shape: got 8 8 0, want all above 0"),
        ("--json nowhere/x.json", "argument --json: got nowhere/x.json, want a file in"),
    ],
)
def test_a_bad_argument_is_named(
    flags: str, wanted: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        numerics.main(["--device=cpu", *flags.split()])
    assert wanted in capsys.readouterr().err.splitlines()[-1]
