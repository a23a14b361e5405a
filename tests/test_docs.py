"""What the documentation shows is run, and what it lists is complete."""

import doctest
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import fp8lt
from fp8lt import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MODULES = sorted(p.stem for p in Path(fp8lt.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_right(name: str) -> None:
    full = "fp8lt" if name == "__init__" else f"fp8lt.{name}"
    importlib.import_module(full)
    names = {"fp8lt": fp8lt, "torch": torch, "nn": torch.nn}
    failed, _ = doctest.testmod(sys.modules[full], extraglobs=names)
    assert failed == 0


def test_public_functions_and_classes_have_docstrings() -> None:
    for name in fp8lt.__all__:
        assert getattr(fp8lt, name).__doc__, name


def test_the_code_in_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_readme_lists_every_environment_variable() -> None:
    source = Path(settings.__file__).read_text()
    read = set(re.findall(r'"(FP8LT_\w+)"', source))
    listed = set(re.findall(r"^\| `(FP8LT_\w+)`", README, re.MULTILINE))
    assert read == listed
    package = Path(fp8lt.__file__).parent
    for file in package.glob("*.py"):
        if file.name != "settings.py":
            assert not re.search(r"environ\S*FP8LT_", file.read_text()), file


def test_files_import_from_lower_rows_only() -> None:
    rows = dict(re.findall(r"^\| (\d) \| (.+?) \|$", README, re.MULTILINE))
    row = {f: int(n) for n, files in rows.items() for f in re.findall(r"`(\w+)\.py`", files)}
    assert set(row) == set(MODULES)
    for name in MODULES:
        source = (Path(fp8lt.__file__).parent / f"{name}.py").read_text()
        imported = re.findall(r"^from \.(\w+) import", source, re.MULTILINE)
        for line in re.findall(r"^from \. import (.+)$", source, re.MULTILINE):
            imported += line.split(", ")
        for other in imported:
            assert row[other] < row[name], f"{name}.py imports {other}.py"


def test_the_defaults_are_those_of_the_readme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in os.environ if n.startswith("FP8LT_")]:
        monkeypatch.delenv(name)
    assert settings.read() == ("auto", False, None, False, False)


def test_the_training_figures_of_the_readme_are_those_recorded() -> None:
    record = json.loads((ROOT / "tools" / "results" / "train_h200.json").read_text())
    fp8, bf16 = record["runs"]
    assert (fp8["recipe"], bf16["recipe"]) == ("tensorwise", "bf16")
    assert f"{fp8['parameters'] / 1e6:.0f} M parameter" in README
    assert f"at {fp8['tokens_per_s'] / 1e3:.0f} k tokens/s" in README
    assert f"{bf16['tokens_per_s'] / 1e3:.0f} k with bf16" in README
    assert f"({fp8['tokens_per_s'] / bf16['tokens_per_s']:.2f}x)" in README
    assert f"is {fp8['val_loss_end']:.3f} against {bf16['val_loss_end']:.3f}" in README
