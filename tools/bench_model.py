"""The mode `model`: four Llama-like blocks, forward + backward, eager and compiled, and memory.

Blocks without embedding, head and rotary positions: RMSNorm, causal attention with fewer key and
value heads, SwiGLU, all projections separate and unfused, bf16 parameters. Every contender is a
copy of the same weights with its linear layers replaced. One contender at a time stands beside the
bf16 model of its case, and the two are timed in alternating rounds; then it is freed.

Peak memory is of one forward + backward: parameters, gradients, activations, its input and dy;
what stood in memory before the contender was built does not count.
"""

import copy
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import bench_peers as peers
import torch
from bench_core import REFERENCE, Bench, Result, Row, add_ratios, make_row
from bench_linear import INPUT_SETS, WARM_UP
from bench_scaled_mm import ScaledMMLinear
from bench_timing import Entry, reason, relative_error, run_rounds, wrong
from torch import Tensor, nn
from torch.nn import functional as F

RUNS = 3  # fewer than for a layer: each takes much longer
PHASE = "fwd+bwd"
# Measured on small models in emulation: fp8 y 0.028, dx 0.035, dw 0.053; bf16 0.004, 0.004, 0.005.
BOUNDS = {"y": 0.06, "dx": 0.09, "dw": 0.12}
BOUNDS_BF16 = {"y": 0.01, "dx": 0.015, "dw": 0.015}


@dataclass(frozen=True)
class Size:
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    batch: int
    seq: int


SIZE = Size(4096, 14336, 32, 8, 4, 2, 4096)
SIZE_CPU = Size(64, 128, 4, 2, 2, 2, 32)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        head_dim = size.dim // size.heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        linear = functools.partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(size.dim, eps=1e-5) for _ in range(2))
        self.q = linear(size.dim, size.dim)
        self.k, self.v = (linear(size.dim, size.kv_heads * head_dim) for _ in range(2))
        self.o = linear(size.dim, size.dim)
        self.gate, self.up = (linear(size.dim, size.ffn) for _ in range(2))
        self.down = linear(size.ffn, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            project(h).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for project in (self.k, self.v)
        )
        if h.dtype == torch.float32:
            # For the reference alone: no fused f32 kernel takes grouped heads, and the unfused
            # path would hold every head's attention matrix.
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def blocks(size: Size, device: torch.device) -> nn.Sequential:
    """Return the model; linear weights have the variance 1 / in, so that x keeps its size."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
    return model.bfloat16()


# -------------------------------------------------------------------------------------- contenders

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """A contender: it changes a bf16 model in place and returns how to run it."""

    name: str
    case: str
    convert: Callable[[nn.Module], Forward]
    needs: Callable[[], Any] = bool  # raises where the contender cannot be had


def convert_fp8lt(model: nn.Module) -> Forward:
    import fp8lt

    return fp8lt.convert_to_float8_training(model)


def convert_scaled_mm(model: nn.Module) -> Forward:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ScaledMMLinear
    return model


def convert_te(model: nn.Module, recipe: str) -> Forward:
    context = peers.te_context(recipe)
    for block in model.children():
        for name, module in list(block.named_children()):
            if type(module) is nn.Linear:
                setattr(block, name, peers.te_module(module.weight.detach()))

    def forward(x: Tensor) -> Tensor:
        with context():
            return model(x)

    return forward


def then_compile(convert: Callable[[nn.Module], Forward]) -> Callable[[nn.Module], Forward]:
    return lambda model: peers.compiled(convert(model), next(model.parameters()).device)


def unchanged(model: nn.Module) -> Forward:
    return model


VARIANTS = [
    Variant("bf16", "eager", unchanged),
    Variant("fp8lt", "eager", convert_fp8lt),
    *(
        Variant(f"te-{recipe}", "eager", partial(convert_te, recipe=recipe), peers.needs_te)
        for recipe in ("delayed", "current", "block")
    ),
    Variant("bf16-compiled", "compiled", then_compile(unchanged)),
    Variant("fp8lt-compiled", "compiled", then_compile(convert_fp8lt)),
    Variant("scaled_mm-compiled", "compiled", then_compile(convert_scaled_mm)),
    *(
        Variant(
            f"torchao-{recipe}-compiled", "compiled",
            then_compile(partial(peers.torchao_convert, recipe=recipe)), peers.needs_torchao,
        )
        for recipe in ("tensorwise", "rowwise")
    ),
]  # fmt: skip


# -------------------------------------------------------------------------------------- measuring


@dataclass
class Prepared:
    """A model that was built, warmed up and checked; or why not."""

    name: str
    model: nn.Module | None = None
    forward: Forward | None = None
    errors: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    failure: str | None = None
    wrong: str | None = None


class Workload:
    """The source of all weights, the inputs, and what f32 makes of the first."""

    def __init__(self, bench: Bench, size: Size) -> None:
        self.bench, self.source = bench, blocks(size, bench.device)
        draw = torch.Generator(bench.device).manual_seed(1)
        shape = size.batch, size.seq, size.dim
        self.sets = [
            tuple(
                torch.randn(shape, generator=draw, device=bench.device).bfloat16()
                for _ in range(2)
            )
            for _ in range(INPUT_SETS)
        ]  # fmt: skip
        exact = copy.deepcopy(self.source).float()
        self.want = self.results(exact, exact, *(t.float() for t in self.sets[0]))

    def results(self, model: nn.Module, forward: Forward, x: Tensor, dy: Tensor) -> dict:
        """Run once; return y, dx, and the gradient that passed through everything: the first q's.

        The model is left without gradients.
        """
        x = x.detach().requires_grad_()
        y = forward(x)
        y.backward(dy)
        got = {"y": y.detach(), "dx": x.grad, "dw": model[0].q.weight.grad}
        clear(model)
        return got

    def call(self, made: Prepared) -> Callable[[], None]:
        """Return what runs the model on the next inputs, and leaves no gradients behind."""
        sets = itertools.cycle(self.sets)

        def run() -> None:
            x, dy = next(sets)
            made.forward(x.detach().requires_grad_()).backward(dy)  # type: ignore[misc]
            clear(made.model)  # type: ignore[arg-type]

        return run

    def peak(self, call: Callable[[], None], before: int) -> int | None:
        """Return the peak of one run above `before`, its input and dy counted."""
        device = self.bench.device
        if device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        inputs = sum(t.nbytes for t in self.sets[0])
        return torch.cuda.max_memory_allocated(device) - before + inputs

    def prepare(self, variant: Variant) -> Prepared:
        """Build, compile, warm up, check. Never raises for what the contender does."""
        self.bench.say(f"{variant.name}: prepare")
        made = Prepared(variant.name)
        device = self.bench.device
        self.bench.free(code=False)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        try:
            made.model = copy.deepcopy(self.source)
            made.forward = variant.convert(made.model)
            call = self.call(made)
            for _ in range(WARM_UP):
                call()
            made.peak_bytes = self.peak(call, before)
            got = self.results(made.model, made.forward, *self.sets[0])
            made.errors = {name: relative_error(self.want[name], got[name]) for name in got}
        except Exception as error:  # whatever a peer throws
            made.failure = reason(error)
            return made
        bounds = BOUNDS_BF16 if variant.name.startswith(REFERENCE) else BOUNDS
        made.wrong = wrong(made.errors, bounds)
        return made

    def entry(self, made: Prepared) -> Entry:
        call = self.call(made)
        return Entry(made.name, partial(self.bench.timer.measure, call, "layer", RUNS))


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def row_of(made: Prepared, case: str, entry: Entry | None) -> Row:
    row = make_row(
        case, PHASE, made.name, made.errors, entry.rounds_us if entry else [],
        failure=made.failure or (entry.failure if entry else None), wrong=made.wrong,
    )  # fmt: skip
    return {**row, "peak_bytes": made.peak_bytes}


def measure_pair(work: Workload, base: Prepared, made: Prepared, case: str) -> tuple[Row, Row]:
    """Time a contender and the reference of its case alternately; return both rows."""
    entries = [
        work.entry(one) if not one.failure and not one.wrong else None for one in (base, made)
    ]
    work.bench.say(made.name)
    run_rounds([entry for entry in entries if entry], work.bench.rounds, work.bench.tick)
    work.bench.tick(entries.count(None) * work.bench.rounds)
    rows = row_of(base, case, entries[0]), row_of(made, case, entries[1])
    add_ratios(rows, rows[0])
    return rows


def model(bench: Bench) -> Result:
    """Measure every variant beside the bf16 model of its case."""
    variants, lost = bench.choose(VARIANTS)
    bench.expect(2 * (len(variants) - 2))
    bench.free()
    work = Workload(bench, SIZE if bench.device.type == "cuda" else SIZE_CPU)
    rows: list[Row] = []
    for case in ("eager", "compiled"):
        first, *others = [v for v in variants if v.case == case]
        if not others:
            continue
        base = work.prepare(first)
        base_rows = []
        for variant in others:
            made = work.prepare(variant)
            base_row, row = measure_pair(work, base, made, case)
            row["reference_rounds_us"] = base_row["rounds_us"]
            base_rows.append(base_row)
            rows.append(row)
            del made
        rows += base_rows[:1]
        del base
    bench.free()
    return {"rows": rows, "missing": lost}
