"""The modes `nanochat12`, `nanochat24`: training steps of the GPT in `examples/nanochat.py`.

Depth 12 (768 wide) with 16 x 2048 tokens and depth 24 (1536 wide) with 8 x 2048, each eager and
compiled: f32 weights, autocast to bf16, cross-entropy over 50304 words, AdamW. `scaled_mm` is FP8
by hand, over `torch._scaled_mm`; every contender of FP8 has it in the layers that nanochat would
convert, `fp8lt-filtered` in those among them that `fp8lt.gains_from_fp8` chooses, where these are
some and not all. A first step is compared with one in bf16, since the model has its autocast
inside.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from bench_core import Bench, Result, Row
from bench_step import Loss, Model, Variant, Workload, measure_case
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import nanochat

import fp8lt

# The first of a block's layers that has a gradient in the first step: those before it begin at 0.
PROBED = "blocks.0.out.weight"


class Size(NamedTuple):
    depth: int
    batch: int
    seq: int
    vocabulary: int

    def __str__(self) -> str:
        return f"depth {self.depth}"


SIZES = {"nanochat12": Size(12, 16, 2048, 50304), "nanochat24": Size(24, 8, 2048, 50304)}
SIZES_CPU = {"nanochat12": Size(2, 2, 16, 256), "nanochat24": Size(3, 2, 16, 256)}


class GPT(nanochat.GPT):
    tokens = 0  # in a step

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self(tokens, targets)
        return loss


def converted(model: Model, precision: str, recipe: str = "tensorwise") -> Loss:
    nanochat.convert(model, precision, recipe)
    loss: Loss = model.loss
    return loss


def chosen(model: Model) -> tuple[set[str], set[str]]:
    """Return the names of the layers that nanochat would convert, and of those that gain."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    gains = fp8lt.gains_from_fp8(model.tokens, host_hidden=True)
    every = {name for name, layer in layers.items() if nanochat.nanochat_converts(layer, name)}
    return every, {name for name in every if gains(layers[name], name)}


def filtered(model: Model) -> Loss:
    _, names = chosen(model)
    fp8lt.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names)
    loss: Loss = model.loss
    return loss


FILTERED = "fp8lt-filtered"
WAYS: dict[str, Callable[[Model], Loss]] = {
    "bf16": partial(converted, precision="bf16"),
    "fp8lt": partial(converted, precision="fp8"),
    FILTERED: filtered,
    "fp8lt-delayed": partial(converted, precision="fp8", recipe="delayed"),
    "scaled_mm": partial(converted, precision="scaled_mm"),
}
VARIANTS = [
    Variant(f"{name}-compiled" if case == "compiled" else name, case, convert)
    for case in ("eager", "compiled")
    for name, convert in WAYS.items()
]


def measure(mode: str, bench: Bench) -> Result:
    """Measure every contender beside the others, eager and compiled, at a mode's depth."""
    variants, lost = bench.choose(VARIANTS)
    size = (SIZES if bench.device.type == "cuda" else SIZES_CPU)[mode]
    bench.free()
    torch.manual_seed(0)
    with bench.device:
        source = GPT(size.depth, size.vocabulary, size.seq)
    source.tokens = size.batch * size.seq
    every, some = chosen(source)
    if not some or some == every:
        variants = [variant for variant in variants if not variant.name.startswith(FILTERED)]
    bench.expect(len(variants))
    work = Workload(bench, source, size.vocabulary, (size.batch, size.seq), PROBED)
    rows: list[Row] = []
    for case in ("eager", "compiled"):
        mine = [variant for variant in variants if variant.case == case]
        if len(mine) > 1:
            rows += [
                {**row, "case": f"{size}, {case}", "tokens": source.tokens}
                for row in measure_case(work, mine)
            ]
        bench.free()
    parameters = sum(p.numel() for p in source.parameters())
    return {"rows": rows, "missing": lost, "parameters": parameters}
