"""The figures in the README's text are those of the recorded runs, and there are no others."""

import re
import sys
from collections.abc import Iterator

import cases
import pytest
import test_recipes
import torch
from readme import PLAIN, README, RESULTS, ROOT, at_least, percent, recorded, table

sys.path.insert(0, str(ROOT / "tools"))
import bench_blocks
import bench_modes
import bench_nanochat
import bench_sizes
import bench_step
import train_report


def bound(ratio: float, digits: int = 0) -> str:
    return percent(at_least(ratio, digits + 2), digits)


def of_training() -> Iterator[str]:
    """Yield the sentences of the README that have figures, with those that are recorded."""
    study = recorded("study_h200.json")
    runs, config = {run["recipe"]: run for run in study["runs"]}, study["config"]
    bf16, other_seed = runs["bf16"], runs["bf16,seed=1"]
    (fast,) = (name for name in runs if "fast_accum" in name)
    recipes = [name for name in runs if name not in ("bf16", "bf16,seed=1", fast)]
    assert recipes == ["tensorwise", "delayed", "rowwise", "blockwise"]
    yield (
        f"A byte-level GPT of {bf16['parameters'] / 1e6:.0f} M parameters, trained for "
        f"{config['steps']} steps of {config['batch'] * config['seq']:,} bytes on one H200"
    )

    def apart(name: str) -> float:
        return abs(runs[name]["val_loss_end"] / bf16["val_loss_end"] - 1)

    yield (
        f"The recipes end within {bound(max(map(apart, recipes)), 1)} of bf16's validation "
        f"loss, and bf16 with another seed within {bound(apart('bf16,seed=1'), 1)};"
    )
    settled = 500
    smoothed = {
        name: train_report.smooth(run["train_losses"], config["steps"] // 40)[settled:]
        for name, run in runs.items()
    }

    def farthest(name: str) -> float:
        return max(abs(a / b - 1) for a, b in zip(smoothed[name], smoothed["bf16"], strict=True))

    yield (
        f"from step {settled} on the smoothed training losses of the recipes are within "
        f"{bound(max(map(farthest, recipes)), 1)} of bf16's."
    )
    clipped = [
        sum(norm > config["clip"] for norm in run["grad_norms"][settled:])
        for run in (runs["tensorwise"], bf16, other_seed)
    ]
    yield (
        f"Of these {config['steps'] - settled} steps, the gradient's norm is above "
        f"{config['clip']:.0f}, and clipped, in {clipped[0]} of `tensorwise`, in {clipped[1]} of "
        f"bf16, in {clipped[2]} of bf16 with the other seed."
    )
    yield f"is up to {bound(farthest(fast), 1)} away in that loss, ends as near as the others,"
    assert apart(fast) < max(map(apart, recipes))

    wide = recorded("train_h200.json")
    fp8, high = wide["runs"]
    assert (fp8["recipe"], high["recipe"]) == ("tensorwise", "bf16")
    assert wide["config"]["dim"] == 2 * config["dim"]
    yield f"with {fp8['parameters'] / 1e6:.0f} M parameters, in layers twice as wide,"
    yield (
        f"trains at {fp8['tokens_per_s'] / 1e3:.0f} k tokens/s and bf16 at "
        f"{high['tokens_per_s'] / 1e3:.0f} k ({fp8['tokens_per_s'] / high['tokens_per_s']:.2f}x); "
        f"after {wide['config']['steps']} steps the validation loss is {fp8['val_loss_end']:.3f} "
        f"against {high['val_loss_end']:.3f}"
    )
    on_cpu = recorded("train_cpu.json")["runs"][0]
    assert on_cpu["recipe"] == "tensorwise"
    yield (
        f"({on_cpu['seconds']:.0f} seconds on two CPU cores; a larger one in "
        f"{fp8['seconds']:.0f} seconds on an H200)"
    )


def of_a_layer() -> Iterator[str]:
    record = recorded("bench_h200.json")
    modes, versions = record["modes"], record["versions"]
    te, ao = (".".join(versions[name].split(".")[:2]) for name in ("transformer_engine", "torchao"))
    yield f"TransformerEngine {te}, torchao {ao} and `torch._scaled_mm` ran in the same run"
    _, *cases = table("speed-up over bf16")[0]
    first = modes["layer"]["parts"][0]
    total = first["gemms_us"] + first["quantise_us"] + first["host_gap_us"]
    floors = {row["case"]: row["two_reads_us"] for row in modes["quantize"]["rows"]}
    floor = 2 * floors["8192x4096 bfloat16"] + floors["4096x4096 bfloat16"]
    yield (
        f"At {first['case']} the GEMMs take {percent(first['gemms_us'] / total)} of the layer, "
        f"quantise {percent(first['quantise_us'] / total)};"
    )
    yield f"which `tensorwise` needs, would take {percent(floor / total)} by themselves."

    again = {
        (row["contender"], row["case"]): row["ratio"]
        for row in recorded("bench_again_h200.json")["modes"]["layer"]["rows"]
        if row["phase"] == "fwd+bwd" and row["ratio"]
    }
    peers = {name for name, _ in again if not name.startswith(("fp8lt", "bf16"))}
    best = [max(again[name, case] for name in peers) for case in cases]
    *large, little = (f"{again['fp8lt', case]:.2f}x" for case in cases)
    *of_large, of_little = (f"{ratio:.2f}x" for ratio in best)
    yield (
        f"is at {', '.join(large)} and, with a slower host, {little}, the best peer at "
        f"{', '.join(of_large)} and {of_little}, and `fp8lt-rowwise` at "
        f"{again['fp8lt-rowwise', cases[0]]:.2f}x."
    )

    small = [
        row for row in modes["host"]["rows"]
        if (row["case"], row["phase"], row["status"]) == ("16x512x512", "fwd+bwd", "ok")
    ]  # fmt: skip
    (own,) = [row["ratio"] for row in small if row["contender"] == "fp8lt"]
    best = min(r["ratio"] for r in small if not r["contender"].startswith(("fp8lt", "bf16")))
    yield (
        f"{own:.2f}x of bf16's time per forward and backward of 16x512x512 (the next best takes "
        f"{best:.2f}x)."
    )


def of_two_gpus() -> Iterator[str]:
    record = recorded("train_x2_h200.json")
    config, runs = record["config"], record["runs"]
    size = config["batch"] * config["seq"]
    yield f"`tools/train.py --preset gpu` for {config['steps']} steps of {size:,} bytes in all,"
    losses = {
        name: [run["val_loss_end"] for run in runs if run["recipe"] == name]
        for name in ("tensorwise", "bf16")
    }
    apart = {name: at_least(max(some) - min(some), 3) for name, some in losses.items()}
    yield (
        f"The losses of `tensorwise` are within {apart['tensorwise']:.3f} of each other, those of "
        f"bf16 within {apart['bf16']:.3f}."
    )
    yield f"These runs are of an earlier commit ({record['commit']});"


def of_a_model() -> Iterator[str]:
    size = bench_blocks.SIZE
    assert size.layers == 4
    rows = recorded("bench_model_h200.json")["modes"]["model"]["rows"]
    peaks = {row["contender"]: row["peak_bytes"] for row in rows}
    lean = peaks.pop("fp8lt-recomputed-compiled")
    assert all(lean < peak for name, peak in peaks.items() if not name.startswith("fp8lt"))
    yield "is `recompute_weight=True`, with which memory, too, is below that of the peers."
    yield f"Four Llama-8B-like blocks, {size.batch} x {size.seq} tokens"


def of_a_step() -> Iterator[str]:
    size = bench_step.SIZE
    yield (
        f"with TinyLlama's widths and {size.layers} layers, {size.batch} x {size.seq} tokens: "
        "cross-entropy, backward and AdamW"
    )
    rows = {
        name: {row["contender"]: row for row in recorded(name)["modes"]["step"]["rows"]}
        for name in ("bench_step_again_h200.json", "bench_step_slow_h200.json")
    }
    again, slow = rows.values()

    def host_and_whole(name: str) -> tuple[float, float]:
        return again[name]["parts"]["host_us"] / 1e3, again[name]["us"] / 1e3

    yield (
        "the host took {:.1f} ms of a step of `fp8lt-compiled`, which lasted {:.1f} "
        "({:.1f} of {:.1f} in bf16)."
    ).format(*host_and_whole("fp8lt-compiled"), *host_and_whole("bf16-compiled"))
    rounds = [us / 1e3 for us in slow["fp8lt-compiled"]["rounds_us"]]
    at = {name: f"{row['ratio']:.2f}x" for name, row in slow.items()}
    yield (
        f"those of `fp8lt-compiled` took {min(rounds):.1f} to {max(rounds):.1f} ms by rounds, "
        f"{at['fp8lt-compiled']} of bf16, and `fp8lt-delayed-compiled` was at "
        f"{at['fp8lt-delayed-compiled']}, but `fp8lt` at {at['fp8lt']} and `fp8lt-graphed` at "
        f"{at['fp8lt-graphed']}."
    )
    (own,) = (
        row["ratios"]
        for row in recorded("bench_model_h200.json")["modes"]["step"]["rows"]
        if row["contender"] == "fp8lt"
    )
    yield f"the rounds of `fp8lt` vary, from {min(own):.2f}x to {max(own):.2f}x."


def of_nanochat() -> Iterator[str]:
    parts = []
    for mode, size in bench_nanochat.SIZES.items():
        result = recorded(f"bench_{mode}_h200.json")["modes"][mode]
        assert {row["tokens"] for row in result["rows"]} == {size.batch * size.seq}
        parts.append(f"{result['parameters'] / 1e6:.0f} M{{}}{size.batch} x {size.seq}")
    yield (
        f"with AdamW, autocast to bf16 and {size.vocabulary:,} words, at depth 12 "
        f"({parts[0].format(' parameters, ')} tokens) and 24 ({parts[1].format(', ')});"
    )
    left_out = [layers_left_out(size) for size in bench_nanochat.SIZES.values()]
    (k, n) = left_out[0].pop()
    assert left_out == [set(), set()]
    yield (
        f"which at depth 12 are those of attention, {k} x {n}, and at depth 24 none. "
        "It gains less than all layers in FP8:"
    )
    saved, spent = zip(*(of_gemms_and_quantise(mode) for mode in bench_nanochat.SIZES), strict=True)
    yield (
        "At depth 12, where compiled FP8 by hand gains next to nothing, "
        f"the GEMMs of `fp8lt-compiled` take {saved[0]:.1f} ms less than those of bf16, and "
        f"quantising takes {spent[0]:.1f}; at depth 24 it is {saved[1]:.1f} less and "
        f"{spent[1]:.1f}."
    )


def layers_left_out(size: bench_nanochat.Size) -> set[tuple[int, int]]:
    """Return in and out of the layers that the filter keeps from FP8: all are attention's."""
    with torch.device("meta"):
        model = bench_nanochat.GPT(size.depth, size.vocabulary, size.seq)
    model.tokens = size.batch * size.seq
    every, some = bench_nanochat.chosen(model)
    names = every - some
    blocks = {name for name in every if name.split(".")[-1] in ("q", "k", "v", "out")}
    assert names in (set(), blocks)
    layers = [model.get_submodule(name) for name in names]
    return {(layer.in_features, layer.out_features) for layer in layers}


def of_gemms_and_quantise(mode: str) -> tuple[float, float]:
    """Return the milliseconds that compiled FP8 saves in GEMMs, and that it takes to quantise."""
    parts = {
        row["contender"]: row["parts"]
        for row in recorded(f"bench_{mode}_h200.json")["modes"][mode]["rows"]
    }
    fp8, bf16 = parts["fp8lt-compiled"], parts["bf16-compiled"]
    return (bf16["gemms_us"] - fp8["gemms_us"]) / 1e3, fp8["quantise_us"] / 1e3


def of_sizes() -> Iterator[str]:
    rows = recorded("bench_sizes_h200.json")["modes"]["sizes"]["rows"]
    shapes = {tuple(map(int, row["case"].split("x"))) for row in rows}
    tokens, widths = {m for m, _, _ in shapes}, {size for _, *sizes in shapes for size in sizes}
    yield (
        f"with {len(shapes)} shapes of {min(widths)} to {max(widths)} in and out and {min(tokens)} "
        f"to {max(tokens)} tokens"
    )
    rules = recorded("bench_sizes_h200.json")["modes"]["sizes"]["rules"]
    eager, hidden = (
        max(rule["worst_loss"] for rule in rules if rule["phase"] == phase)
        for phase in (bench_modes.BOTH, bench_sizes.HIDDEN)
    )
    yield (
        f"of one shape it is up to {bound(eager)} in eager mode, where a small layer's time "
        f"varies, and up to {bound(hidden)} with the host hidden:"
    )


def of_numbers() -> Iterator[str]:
    rows = {
        (row["recipe"], row["x"], row["dy"]): row for row in recorded("numerics_cpu.json")["rows"]
    }
    pair = ("Gaussian", "Gaussian")
    of_fp8, of_bf16 = (rows[(name, *pair)]["y"] for name in ("tensorwise", "bf16"))
    yield (
        f"(+6 dB is half the error; {of_fp8:.1f} dB is a relative error of "
        f"{10 ** (-of_fp8 / 20):.3f})"
    )
    yield (
        f"within {cases.T_SAME:.0e} at every shape of the test matrix; bf16 rounding alone is "
        f"{10 ** (-of_bf16 / 20):.1e}."
    ).replace("e-0", "e-")
    yield of_an_outlier()
    decibels = [sqnr_of_normal_numbers(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    yield "Normal numbers under one scale have {:.0f} dB in e4m3 and {:.0f} in e5m2,".format(
        *decibels
    )


def of_an_outlier() -> str:
    y, dw = zip(*test_recipes.errors_beside_an_outlier(torch.device("cpu")).values(), strict=True)
    of_y = dict(zip(test_recipes.NAMES, (f"{error:.2g}" for error in y), strict=True))
    of_dw = dict(zip(test_recipes.NAMES, (f"{error:.2g}" for error in dw), strict=True))
    assert {of_y[name] for name in test_recipes.FINE} == {of_y["rowwise"]}
    assert (of_y["delayed"], of_dw["delayed"]) == (of_y["tensorwise"], of_dw["tensorwise"])
    return (
        f"the relative error in the other rows of y is {of_y['tensorwise']} for `tensorwise` and "
        f"`delayed`, and {of_y['rowwise']} for the others; in the other columns of dw it is "
        f"{of_dw['tensorwise']} for these two, {of_dw['blockwise']} to {of_dw['rowwise']} for "
        f"`rowwise` and `blockwise`, and {of_dw['rowwise_folded']} for `rowwise_folded`:"
    )


def sqnr_of_normal_numbers(dtype: torch.dtype) -> float:
    x = cases.randn(512, 512, on=torch.device("cpu"), dtype=torch.float32)
    return cases.sqnr(cases.dequantised(x, dtype), x)


SENTENCES = [
    *of_training(),
    *of_a_layer(),
    *of_a_model(),
    *of_a_step(),
    *of_nanochat(),
    *of_two_gpus(),
    *of_sizes(),
    *of_numbers(),
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_figures_of_a_sentence_of_the_readme_are_those_recorded(sentence: str) -> None:
    assert sentence in PLAIN


def test_the_readme_has_no_other_figures() -> None:
    """Tables have tests of their own; what is in backquotes is code."""
    code = re.compile(r"```.*?```|^ {4}.*?$|^\|.*?$", re.DOTALL | re.MULTILINE)
    rest = " ".join(code.sub("", README).split())
    for sentence in SENTENCES:
        rest = rest.replace(sentence, "")
    rest = re.sub("`[^`]*`", "", rest)
    units = "%|dB|[num]?s|GiB|MB|k tokens/s|M parameters|minutes?|seconds?"
    assert re.findall(rf"(?<![\w.])[\d.,]+(?:e-?\d+)?(?:x| ?(?:{units}))(?!\w)", rest) == []


def test_every_recorded_file_is_listed_with_its_command() -> None:
    listed = re.findall(r"^\| (`.*?) \| ", (RESULTS / "README.md").read_text(), re.MULTILINE)
    names = {name for cell in listed for name in re.findall(r"`(\w+\.json)`", cell)}
    pictures = {
        re.findall(r"`(\w+)\.json`", cell)[0] + ".png" for cell in listed if "`.png`" in cell
    }
    assert names | pictures == {file.name for file in RESULTS.iterdir()} - {"README.md"}
