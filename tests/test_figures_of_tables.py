"""The figures in the README's tables are those of the recorded runs."""

import dataclasses
import re
import sys

from readme import README, ROOT, percent, recorded, table

sys.path.insert(0, str(ROOT / "tools"))
import bench_modes
import bench_nanochat
import bench_sizes
import numerics
import train_config

from fp8lt import filters


def test_the_speed_of_a_layer_in_the_readme_is_that_recorded() -> None:
    (_, *shapes), *lines = table("speed-up over bf16")
    told = {
        (line[0].strip("`"), case): cell
        for line in lines
        for case, cell in zip(shapes, line[1:], strict=True)
    }
    all_rows = recorded("bench_h200.json")["modes"]["layer"]["rows"]
    rows = [r for r in all_rows if r["phase"] == "fwd+bwd" and r["contender"] != "bf16"]
    assert told == {(r["contender"], r["case"]): f"{r['ratio']:.2f}x" for r in rows}


def test_the_speed_of_a_model_in_the_readme_is_that_recorded() -> None:
    rows = recorded("bench_model_h200.json")["modes"]["model"]["rows"]
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
    result = recorded("bench_model_h200.json")["modes"]["step"]
    rows = recorded("bench_step_again_h200.json")["modes"]["step"]["rows"]
    again = {r["contender"]: f"{r['ratio']:.2f}x" for r in rows}
    assert table(f"training step, {result['parameters'] / 1e9:.2f} B parameters")[1:] == [
        [
            f"`{r['contender']}`",
            f"{r['us'] / 1e3:.1f}",
            f"{r['ratio']:.2f}x",
            f"{r['backward_gemms_ratio']:.2f}x" if r["backward_gemms_ratio"] else "-",
            again.get(r["contender"], "-"),
        ]
        for r in result["rows"]
    ]


def test_the_speed_of_nanochat_in_the_readme_is_that_recorded() -> None:
    of_12, of_24 = (
        {
            row["contender"]: [f"{row['tokens'] / row['us'] * 1e3:.0f} k", f"{row['ratio']:.2f}x"]
            for row in recorded(f"bench_{mode}_h200.json")["modes"][mode]["rows"]
        }
        for mode in bench_nanochat.SIZES
    )
    assert of_24.keys() < of_12.keys()
    assert table("nanochat's GPT, tokens/s")[1:] == [
        [f"`{name}`", *cells, *of_24.get(name, ["-", "-"])] for name, cells in of_12.items()
    ]


def test_the_least_sizes_are_those_recorded() -> None:
    rules = {
        (rule["contender"], rule["phase"]): rule
        for rule in recorded("bench_sizes_h200.json")["modes"]["sizes"]["rules"]
    }
    lines, sizes = [], {}
    for name in filters.LEAST_SIZES:
        contender = "fp8lt" if name == "tensorwise" else f"fp8lt-{name}"
        both = [rules[contender, phase] for phase in (bench_modes.BOTH, bench_sizes.HIDDEN)]
        sizes[name] = tuple(round(rule["least_size"]) for rule in both)
        told = [[f"{rule['least_size']:.0f}", percent(rule["mean_loss"], 1)] for rule in both]
        lines.append([f"`{name}`", *told[0], *told[1]])
    assert sizes == filters.LEAST_SIZES
    assert table("FP8 from a size on")[1:] == lines


def test_the_runs_on_two_gpus_in_the_readme_are_those_recorded() -> None:
    record = recorded("train_x2_h200.json")
    runs = {
        (run["parallel"]["way"], run["parallel"]["fp8_all_gather"], run["recipe"]): run
        for run in record["runs"]
    }
    assert {run["parallel"]["ranks"] for run in record["runs"]} == {1, 2}
    ways = {
        "none: one GPU": (None, False), "`ddp`": ("ddp", False), "`fsdp2`": ("fsdp2", False),
        "`fsdp2 --fp8-all-gather`": ("fsdp2", True), "`tp`": ("tp", False),
    }  # fmt: skip
    lines = []
    for told, (way, gathers) in ways.items():
        fp8, bf16 = runs[way, gathers, "tensorwise"], runs[way, False, "bf16"]
        speeds = [run["tokens_per_s"] for run in (fp8, bf16)]
        gathered = [run["parallel"]["gathered_bytes_per_step"] for run in (fp8, bf16)]
        lines.append([
            told,
            ", ".join(f"{speed / 1e3:.0f} k" for speed in speeds),
            f"{speeds[0] / speeds[1]:.2f}x",
            ", ".join(f"{run['val_loss_end']:.3f}" for run in (fp8, bf16)),
            ", ".join(f"{size / 1e6:,.0f}" for size in gathered) if all(gathered) else "-",
            ", ".join(f"{run['peak_memory_bytes'] / 2**30:.1f}" for run in (fp8, bf16)),
        ])  # fmt: skip
    assert table("`--parallel`, two H200s")[1:] == lines


def test_the_training_runs_of_the_readme_are_those_of_the_study() -> None:
    study = recorded("study_h200.json")
    *_, bf16 = runs = study["runs"]
    assert table("training run")[1:] == [
        [
            f"`{run['recipe']}`",
            f"{run['val_loss_end']:.4f}",
            f"{100 * (run['val_loss_end'] / bf16['val_loss_end'] - 1):+.2f} %",
            f"{run['tokens_per_s'] / 1e3:.0f} k",
            f"{run['tokens_per_s'] / bf16['tokens_per_s']:.2f}x",
            f"{run['peak_memory_bytes'] / 2**30:.1f}",
        ]
        for run in runs
    ]
    (command,) = re.findall(r"^    python tools/train\.py --preset (.*)$", README, re.MULTILINE)
    preset, _, first, _, *others, _, _, _, _ = command.split()
    assert preset == study["preset"]
    assert [first, *others] == [run["recipe"] for run in runs]
    assert study["config"] == dataclasses.asdict(train_config.PRESETS[preset])


def test_the_decibels_of_the_readme_are_those_recorded() -> None:
    record = recorded("numerics_cpu.json")
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
