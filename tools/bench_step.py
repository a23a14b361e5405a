"""The mode `step`: a whole training step of a decoder, eager, compiled and as a CUDA graph.

The decoder has token embedding, the blocks of the mode `model`, a last RMSNorm and a head of its
own: the widths of TinyLlama (2048, 5632 in the MLP, 32000 words), 12 layers, 16 heads and 4 of keys
and values, 0.67 billion bf16 parameters. A step is forward, cross-entropy, backward and AdamW on
4 x 1024 tokens, and every contender is compared with bf16 in its own case. For FP8 all linears are
converted, the head too; `fp8lt-context` is the unconverted model inside of `fp8_autocast`.

Steps are timed as they follow each other in a training: several in a row, after one that is not
timed, so that a host may be ahead of the GPU or fall behind as it would there.

The GEMMs of backward are those of forward and backward less those of forward, by the profiler.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench_blocks import Block, Size, convert_fp8lt
from bench_core import REFERENCE, Bench, Result, Row, add_ratios, make_row
from bench_linear import INPUT_SETS, WARM_UP
from bench_parts import model_parts
from bench_peers import compiled
from bench_timing import Entry, reason, relative_error, run_rounds, wrong
from torch import Tensor, nn
from torch.nn import functional as F

RUNS, LOOP = 2, 8  # runs of a round, steps of each
PHASE = "step"
VOCABULARY, VOCABULARY_CPU = 32000, 96
SIZE = Size(dim=2048, ffn=5632, heads=16, kv_heads=4, layers=12, batch=4, seq=1024)
SIZE_CPU = Size(32, 64, 4, 2, layers=2, batch=2, seq=16)
# Of the first step against f32: the loss, and the gradient that passed through everything.
BOUNDS = {"loss": 0.02, "dw": 0.6}
BOUNDS_BF16 = {"loss": 0.01, "dw": 0.2}
CASES = ("eager", "compiled", "graphed")
CASES_CPU = CASES[:2]

Loss = Callable[[Tensor, Tensor], Tensor]
Model = Any  # a module that has `loss(tokens, targets)`


class Decoder(nn.Module):
    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size.dim)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.RMSNorm(size.dim, eps=1e-5)
        self.head = nn.Linear(size.dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())


def decoder(size: Size, vocabulary: int, device: torch.device) -> Decoder:
    """Return the model; linear weights have the variance 1 / in, as `bench_blocks.blocks`."""
    draw = torch.Generator(device).manual_seed(0)
    with device:
        model = Decoder(size, vocabulary)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=draw)
    nn.init.normal_(model.embedding.weight, generator=draw)
    return model.bfloat16()


# -------------------------------------------------------------------------------------- contenders


@dataclass(frozen=True)
class Variant:
    """A contender: it changes a model in place and returns its loss."""

    name: str
    case: str
    convert: Callable[[Model], Loss]
    needs: Callable[[], Any] = bool


def plain(model: Model) -> Loss:
    return model.loss


def converted(model: Model, recipe: str) -> Loss:
    convert_fp8lt(model, recipe)
    return model.loss


def in_context(model: Model) -> Loss:
    import fp8lt

    return fp8lt.fp8_autocast()(model.loss)


WAYS: dict[str, Callable[[Model], Loss]] = {
    "bf16": plain,
    "fp8lt": partial(converted, recipe="tensorwise"),
    "fp8lt-delayed": partial(converted, recipe="delayed"),
    "fp8lt-context": in_context,
}
VARIANTS = [
    Variant(name if case == "eager" else f"{name}-{case}", case, convert)
    for case in CASES
    for name, convert in WAYS.items()
]


# ------------------------------------------------------------------------------------------ steps


@dataclass
class Trained:
    """A contender that was built, warmed up and checked; or why not."""

    variant: Variant
    forward: Callable[[], Tensor] | None = None  # the loss of the next tokens
    backward: Callable[[], None] | None = None  # ... and gradients
    step: Callable[[], None] | None = None  # ... and an update
    errors: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] | None = None  # of a step
    backward_gemms_us: float | None = None
    failure: str | None = None
    wrong: str | None = None


class Workload:
    """The source of all weights, the tokens, and what f32 makes of the first.

    probed: the weight whose gradient is compared, by its name.
    """

    def __init__(
        self, bench: Bench, source: Model, vocabulary: int, tokens: tuple[int, int], probed: str
    ) -> None:
        self.bench, self.source, self.probed = bench, source, probed
        draw = torch.Generator(bench.device).manual_seed(1)
        shape = (INPUT_SETS, 2, *tokens)
        self.tokens = torch.randint(vocabulary, shape, generator=draw, device=bench.device)
        exact = copy.deepcopy(source).float()
        loss = exact.loss(*self.tokens[0])
        loss.backward()
        self.want = self.results(exact, loss)

    def results(self, model: Model, loss: Tensor) -> dict[str, Tensor]:
        gradient = model.get_parameter(self.probed).grad
        return {"loss": loss.detach().reshape(1), "dw": gradient}

    def train(self, variant: Variant) -> Trained:
        """Build, warm up, check. Never raises for what the contender does."""
        self.bench.say(f"{variant.name}: prepare")
        made = Trained(variant)
        try:
            self._train(made)
        except Exception as error:  # whatever may go wrong in somebody's capture or compiler
            made.failure = reason(error)
            return made
        reference = variant.name.startswith(REFERENCE)
        made.wrong = wrong(made.errors, BOUNDS_BF16 if reference else BOUNDS)
        return made

    def _train(self, made: Trained) -> None:
        case, device = made.variant.case, self.bench.device
        model = copy.deepcopy(self.source)
        loss = made.variant.convert(model)
        if case == "compiled":
            loss = compiled(loss, device)  # type: ignore[assignment]
        graphed = case == "graphed"
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-5, fused=device.type == "cuda", capturable=graphed
        )
        held = self.tokens[0].clone()  # a graph reads here
        sets = itertools.cycle(self.tokens)

        def forward() -> Tensor:
            held.copy_(next(sets))
            return loss(*held)

        def backward() -> None:
            optimizer.zero_grad()
            forward().backward()

        def step() -> None:
            backward()
            optimizer.step()

        self._check(made, model, loss)
        if graphed:
            step = self._captured(loss, held, sets, optimizer)
        for _ in range(WARM_UP):
            step()
        made.forward, made.backward, made.step = forward, backward, step

    def _check(self, made: Trained, model: Model, loss: Loss) -> None:
        """Compare a first step, and keep nothing of its graph: a capture would meet its streams."""
        value = loss(*self.tokens[0])
        value.backward()
        got = self.results(model, value)
        made.errors = {name: relative_error(self.want[name], got[name]) for name in got}

    def _captured(
        self, loss: Loss, held: Tensor, sets: Any, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        def step() -> None:
            loss(*held).backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                optimizer.zero_grad()
                step()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def replay() -> None:
            held.copy_(next(sets))
            graph.replay()

        return replay

    def entry(self, made: Trained) -> Entry:
        measure = partial(self.bench.timer.measure, made.step, "layer", RUNS, loop=LOOP)
        return Entry(made.variant.name, measure)  # type: ignore[arg-type]

    def profile(self, made: Trained) -> None:
        made.parts = model_parts(self.bench, made.step, RUNS)  # type: ignore[arg-type]
        made.backward_gemms_us = self._backward_gemms(made)

    def _backward_gemms(self, made: Trained) -> float | None:
        """Return the us of the GEMMs of one backward; None in a graph, which is not divided."""
        if made.variant.case == "graphed" or made.forward is None or made.backward is None:
            return None
        both, alone = (
            model_parts(self.bench, call, RUNS) for call in (made.backward, made.forward)
        )
        return None if both is None or alone is None else both["gemms_us"] - alone["gemms_us"]


def row_of(made: Trained, entry: Entry | None) -> Row:
    row = make_row(
        made.variant.case, PHASE, made.variant.name, made.errors,
        entry.rounds_us if entry else [], failure=made.failure or (entry and entry.failure),
        wrong=made.wrong,
    )  # fmt: skip
    return {
        **row, "parts": made.parts, "backward_gemms_us": made.backward_gemms_us,
        "backward_gemms_ratio": None,
    }  # fmt: skip


def measure_case(work: Workload, variants: list[Variant]) -> list[Row]:
    all_made = [work.train(variant) for variant in variants]
    entries = {
        made.variant.name: work.entry(made)
        for made in all_made
        if not made.failure and not made.wrong
    }
    work.bench.say(variants[0].case)
    run_rounds(list(entries.values()), work.bench.rounds, work.bench.tick, work.bench.is_late)
    for made in all_made:
        entry = entries.get(made.variant.name)
        if entry and not entry.failure:
            work.profile(made)
    rows = [row_of(made, entries.get(made.variant.name)) for made in all_made]
    add_ratios(rows, rows[0])
    base = rows[0]["backward_gemms_us"]
    for row in rows:
        if base and row["backward_gemms_us"]:
            row["backward_gemms_ratio"] = base / row["backward_gemms_us"]
    return rows


def step(bench: Bench) -> Result:
    """Measure every contender of every case beside the others of its case."""
    variants, lost = bench.choose(VARIANTS)
    variants_of = {
        case: [variant for variant in variants if variant.case == case]
        for case in (CASES if bench.device.type == "cuda" else CASES_CPU)
    }
    asked_for = {case: mine for case, mine in variants_of.items() if len(mine) > 1}
    bench.expect(len(asked_for))
    bench.free()
    on_gpu = bench.device.type == "cuda"
    size, vocabulary = (SIZE, VOCABULARY) if on_gpu else (SIZE_CPU, VOCABULARY_CPU)
    source = decoder(size, vocabulary, bench.device)
    work = Workload(bench, source, vocabulary, (size.batch, size.seq), "blocks.0.q.weight")
    rows: list[Row] = []
    for mine in asked_for.values():
        rows += measure_case(work, mine)
        bench.free()
    parameters = sum(p.numel() for p in work.source.parameters())
    return {"rows": rows, "missing": lost, "parameters": parameters}
