"""What the documentation shows is run, and what it lists is complete."""

import dataclasses
import doctest
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from readme import README, table

import fp8lt
from fp8lt import device, settings
from fp8lt.recipe import NAMES, Recipe, resolve

MODULES = sorted(p.stem for p in Path(fp8lt.__file__).parent.glob("*.py"))


def spans(cell: str) -> list[str]:
    """Return what stands in backquotes."""
    return re.findall("`(.+?)`", cell)


def words(cell: str) -> set[str]:
    """Return the identifiers in the backquotes of a cell, without values."""
    code = re.sub(r'"\w+"|True|False', "", " ".join(spans(cell)))
    return set(re.findall(r"[A-Za-z_]\w+", code))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_right(name: str) -> None:
    full = "fp8lt" if name == "__init__" else f"fp8lt.{name}"
    importlib.import_module(full)
    names = {"fp8lt": fp8lt, "torch": torch, "nn": torch.nn}
    failed, _ = doctest.testmod(sys.modules[full], extraglobs=names)
    assert failed == 0


def test_public_functions_and_classes_have_docstrings_with_an_example() -> None:
    for name in fp8lt.__all__:
        assert ">>> " in (getattr(fp8lt, name).__doc__ or ""), name


def test_the_code_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """And it does what its comments say."""
    first, *others = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    space: dict[str, Any] = {}
    exec(first, space)
    assert f"  # {list(space['y'].shape)}; differentiable" in first
    for block in others:
        exec(block, {})
        for printed in re.findall(r"^print\(.*\)  # (too small .*)$", block, re.MULTILINE):
            assert printed in capsys.readouterr().out.splitlines()


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
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", README, re.MULTILINE))
    row = {f: int(n) for n, files in rows.items() for f in re.findall(r"`(\w+)\.py`", files)}
    assert set(row) == set(MODULES)
    for name in MODULES:
        source = (Path(fp8lt.__file__).parent / f"{name}.py").read_text()
        imported = re.findall(r"^from \.(\w+) import", source, re.MULTILINE)
        for line in re.findall(r"^from \. import (.+)$", source, re.MULTILINE):
            imported += [module.split()[0] for module in line.split(", ")]  # less "as ..."
        for other in imported:
            assert row[other] < row[name], f"{name}.py imports {other}.py"


def test_the_defaults_are_those_of_the_readme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [n for n in os.environ if n.startswith("FP8LT_")]:
        monkeypatch.delenv(name)
    assert settings.read() == ("auto", False, None, False, False)


# ---------------------------------------------------------------------------------------- recipes


def test_the_hardware_table_of_the_readme_is_that_of_the_device_layer() -> None:
    told = {line[0]: tuple(line[2:]) for line in table("GPU")[1:]}
    formats = {line[0]: line[1] for line in table("GPU")[1:]}
    want = {"NVIDIA, compute capability below 8.9": ("refused",) * 3, "other AMD": ("refused",) * 3}
    for (major, minor), ways in device.NVIDIA.items():
        newest = (major, minor) == max(device.NVIDIA)
        name = f"NVIDIA {major}.{minor}" + " or newer" * newest
        (line,) = (gpu for gpu in told if gpu.startswith(name))
        want[line] = ways
    for architecture, ways in device.AMD.items():
        (line,) = (gpu for gpu in told if architecture in gpu)
        want[line] = ways
        assert ("fnuz" in formats[line]) == architecture.startswith("gfx94")
    assert told == want


def test_the_messages_of_the_readme_are_those_there_are() -> None:
    sources = "".join(p.read_text() for p in sorted(Path(fp8lt.__file__).parent.glob("*.py")))
    messages = [part for message, _ in table("message")[1:] for part in spans(message)]
    assert len(messages) > 12
    assert all(part in sources for part in messages)


def test_the_recipes_of_the_readme_are_those_there_are() -> None:
    listed = {}
    for name, made, *_ in table("recipe")[1:]:
        listed[name.strip("`")] = eval(made.strip("`"), vars(fp8lt))
    assert set(listed) == set(NAMES)
    assert all(recipe == resolve(name) for name, recipe in listed.items())


def test_the_formats_in_the_readme_are_those_of_the_recipes() -> None:
    for name, _, _, formats, *_ in table("recipe")[1:]:
        ours = {"hybrid": "e4m3, e4m3, e5m2", "e4m3": "e4m3"}
        assert formats == ours[resolve(name.strip("`")).fp8_format]


def test_the_options_of_recipes_in_the_readme_have_their_defaults() -> None:
    kinds = [
        fp8lt.DynamicScaling, fp8lt.DelayedScaling, fp8lt.RowwiseScaling, fp8lt.BlockScaling
    ]  # fmt: skip
    listed = set()
    for names, defaults, _ in table("option of a recipe")[1:]:
        general, *exceptions = (spans(part) for part in defaults.split("; "))
        values = {kind: value for *some, value in exceptions for kind in some}
        for name in spans(names):
            listed.add(name)
            for kind in kinds:
                if hasattr(kind(), name):
                    want = eval(values.get(kind.__name__, general[0]))
                    assert getattr(kind(), name) == want, (kind, name)
    assert listed == {field.name for kind in kinds for field in dataclasses.fields(kind)}


def test_what_the_migration_table_names_exists() -> None:
    import torchao.float8 as theirs

    ours, of_torchao = table("fp8lt")[1:], set()
    known = {*fp8lt.__all__, "scale_inv", "model", "config", "recipe", "w"}
    for public in (fp8lt.Linear, fp8lt.linear):
        known |= set(inspect.signature(public).parameters)
    for kind in (Recipe, fp8lt.DelayedScaling, fp8lt.RowwiseScaling):
        known |= {field.name for field in dataclasses.fields(kind)}
    config = {field.name for field in dataclasses.fields(theirs.Float8LinearConfig)}
    of_torchao = config | {"config", "from_recipe_name", "target_dtype", "Float8Linear"}
    for line in ours:
        assert words(line[0]) <= known, line
        assert words(line[1]) <= of_torchao, line
    assert hasattr(theirs.Float8LinearConfig, "from_recipe_name")
    (listed,) = re.findall(r"takes all fields of torchao's.*?recipes alone\.", README, re.DOTALL)
    named = set(spans(listed)) - {"..._for_grad_weight", "..._for_grad_input"}
    named = {re.sub("=.*", "", name) for name in named}
    assert named == {name for name in config if "_for_" not in name}
    assert config == {field.name for field in dataclasses.fields(fp8lt.Float8LinearConfig)}
