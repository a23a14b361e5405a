"""What the documentation shows is run, and what it lists is complete."""

import dataclasses
import doctest
import importlib
import inspect
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8lt
from fp8lt import device, settings
from fp8lt.recipe import NAMES, Recipe, resolve

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import numerics  # noqa: E402

README = (ROOT / "README.md").read_text()
PLAIN = " ".join(README.split())
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


def test_the_training_figures_of_the_readme_are_those_recorded() -> None:
    record = json.loads((ROOT / "tools" / "results" / "train_h200.json").read_text())
    fp8, bf16 = record["runs"]
    assert (fp8["recipe"], bf16["recipe"]) == ("tensorwise", "bf16")
    assert f"{fp8['parameters'] / 1e6:.0f} M parameter" in README
    assert f"at {fp8['tokens_per_s'] / 1e3:.0f} k tokens/s" in README
    assert f"{bf16['tokens_per_s'] / 1e3:.0f} k with bf16" in README
    assert f"({fp8['tokens_per_s'] / bf16['tokens_per_s']:.2f}x)" in README
    assert f"is {fp8['val_loss_end']:.3f} against {bf16['val_loss_end']:.3f}" in README


# ------------------------------------------------------------------------------------------ speed


def recorded(name: str, mode: str) -> dict[str, Any]:
    record = json.loads((ROOT / "tools" / "results" / name).read_text())
    return record["modes"][mode]


def test_the_speed_of_a_layer_in_the_readme_is_that_recorded() -> None:
    layer = recorded("bench_h200.json", "layer")
    (_, *cases), *lines = table("speed-up over bf16")
    told = {
        (line[0].strip("`"), case): cell
        for line in lines
        for case, cell in zip(cases, line[1:], strict=True)
    }
    rows = [r for r in layer["rows"] if r["phase"] == "fwd+bwd" and r["contender"] != "bf16"]
    assert told == {(r["contender"], r["case"]): f"{r['ratio']:.2f}x" for r in rows}

    first = layer["parts"][0]
    total = first["gemms_us"] + first["quantise_us"] + first["host_gap_us"]
    floors = {r["case"]: r["two_reads_us"] for r in recorded("bench_h200.json", "quantize")["rows"]}
    floor = 2 * floors["8192x4096 bfloat16"] + floors["4096x4096 bfloat16"]
    assert (
        f"At {first['case']} the GEMMs take {first['gemms_us'] / total:.0%} of the layer, quantise "
        f"{first['quantise_us'] / total:.0%}".replace("%", " %")
    ) in PLAIN
    assert f"would take {floor / total:.0%} by themselves".replace("%", " %") in PLAIN

    again = {
        (r["contender"], r["case"]): f"{r['ratio']:.2f}x"
        for r in recorded("bench_again_h200.json", "layer")["rows"]
        if r["phase"] == "fwd+bwd"
    }
    *large, little = (again["fp8lt", case] for case in cases)
    assert f"is at {', '.join(large)} and, with a slower host, {little}" in PLAIN
    assert f"`fp8lt-rowwise` at {again['fp8lt-rowwise', cases[0]]}" in PLAIN

    small = [
        r for r in recorded("bench_h200.json", "host")["rows"]
        if (r["case"], r["phase"], r["status"]) == ("16x512x512", "fwd+bwd", "ok")
    ]  # fmt: skip
    (own,) = [r["ratio"] for r in small if r["contender"] == "fp8lt"]
    best = min(r["ratio"] for r in small if not r["contender"].startswith(("fp8lt", "bf16")))
    assert f"{own:.2f}x of bf16's time" in PLAIN
    assert f"(the next best takes {best:.2f}x)" in PLAIN


def test_the_speed_of_a_model_in_the_readme_is_that_recorded() -> None:
    rows = recorded("bench_model_h200.json", "model")["rows"]
    assert table("four Llama-like blocks")[1:] == [
        [
            f"`{r['contender']}`",
            f"{r['us'] / 1e3:.1f}",
            f"{r['ratio']:.2f}x",
            f"{r['peak_bytes'] / 2**30:.2f}",
        ]
        for r in rows
    ]


def test_the_speed_of_a_training_step_in_the_readme_is_that_recorded() -> None:
    result = recorded("bench_model_h200.json", "step")
    assert table(f"training step, {result['parameters'] / 1e9:.2f} B parameters")[1:] == [
        [
            f"`{r['contender']}`",
            f"{r['us'] / 1e3:.1f}",
            f"{r['ratio']:.2f}x",
            f"{r['backward_gemms_ratio']:.2f}x" if r["backward_gemms_ratio"] else "-",
        ]
        for r in result["rows"]
    ]
    spread = {
        r["contender"]: f"{min(r['rounds_us']) / 1e3:.1f} to {max(r['rounds_us']) / 1e3:.1f}"
        for r in result["rows"]
    }
    assert f"the rounds of `fp8lt-compiled` took {spread['fp8lt-compiled']} ms" in PLAIN
    assert f"which needs none, {spread['fp8lt-graphed']}:" in PLAIN


# ---------------------------------------------------------------------------------------- recipes


def table(heading: str) -> list[list[str]]:
    """Return the cells of the README's table whose first heading is that, its head first."""
    (found,) = re.findall(rf"^(\| {re.escape(heading)} \|.*\n(?:\|.*\n)+)", README, re.MULTILINE)
    lines = [line.strip("|\n ").split(" | ") for line in found.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if "---" not in line[0]]


def spans(cell: str) -> list[str]:
    """Return what stands in backquotes."""
    return re.findall("`(.+?)`", cell)


def words(cell: str) -> set[str]:
    """Return the identifiers in the backquotes of a cell, without values."""
    code = re.sub(r'"\w+"|True|False', "", " ".join(spans(cell)))
    return set(re.findall(r"[A-Za-z_]\w+", code))


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


def test_the_decibels_of_the_readme_are_those_recorded() -> None:
    record = json.loads((ROOT / "tools" / "results" / "numerics_cpu.json").read_text())
    head, *lines = table("y dx dw, dB")
    assert head[1:] == [f"{of_x} / {of_dy}" for of_x, of_dy in numerics.PAIRS]
    rows = {(row["recipe"], row["x"], row["dy"]): row for row in record["rows"]}
    shown = {
        (name.strip("`"), *pair): cell
        for name, *cells in lines
        for pair, cell in zip(numerics.PAIRS, cells, strict=True)
    }
    assert shown == {key: numerics.cell(row) for key, row in rows.items()}
    assert "{m} tokens, {k} in, {n} out".format(**record["shape"]) in README


def test_the_errors_beside_an_outlier_in_the_readme_are_those_of_its_test() -> None:
    source = (ROOT / "tests" / "test_recipes.py").read_text()
    (measured,) = re.findall(r"# Measured on a CPU: (0\.129.*?)assert", source, re.DOTALL)
    for figure in ("0.129", "0.136", "0.037", "0.038", "0.036", "0.069"):
        assert figure in measured
        assert figure in README


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
