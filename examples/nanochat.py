"""Pretrain a GPT of nanochat's architecture: in bf16, in FP8 by fp8lt, in FP8 by hand.

    python examples/nanochat.py                         # fp8; depth 12 on a GPU, 2 on a CPU
    python examples/nanochat.py --precision bf16        # the same weights and text, to compare
    python examples/nanochat.py --depth 24 --batch 8 --compile --json run.json

    x = norm(embed(tokens))                             width = 64 * depth, in heads of 128
    x = x + out(attention(norm(x)))                     q, k: rotated, then normed; causal
    x = x + down(relu(up(norm(x)))**2)                  4 * width in between
    logits = 15 * tanh(head(norm(x)) / 15)              in f32

No biases, no gains in the norms, embedding and head untied: github.com/karpathy/nanochat has that
core. What its later versions add is left out: sliding windows, value embeddings, scalars per layer.
So is Muon, its optimiser for matrices. AdamW updates all here: the time of an optimiser is the same
for all precisions.

`--precision fp8` converts the layers that nanochat would (sizes that are multiples of 16 and at
least 128; the head, too) by `fp8lt.convert_to_float8_training`. `scaled_mm` is what one would write
by hand instead, over `torch._scaled_mm`, and needs an NVIDIA GPU with FP8. Master weights are f32,
and what is not FP8 runs in bf16 (autocast).

The text is the source of Python's standard library, a token per byte: there is no tokeniser to
ship, and the loss falls only if the model learns, which random tokens would not show. It has 256 of
the 50304 words, but the head's GEMMs are as large as with all of them.

tokens/s is from the median step after a warm-up; each step waits for the GPU. The last line of
stdout is the result as one JSON document. Exit codes: 0 trained, 1 the loss stopped being finite or
the memory did not suffice, 2 a bad argument, 130 interrupted.
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8lt

HEAD_DIM = 128
ROTARY_BASE = 10_000.0
SOFT_CAP = 15.0
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WARM_UP = 10  # steps that are not timed, and of rising learning rate
REPORT_EVERY = 10
# On a GPU half of nanochat's batch: without a compiler, f32 logits of 32 x 2048 tokens take 13 GB,
# several times.
PRESETS = {
    "cpu": {"depth": 2, "vocab": 256, "batch": 4, "seq": 128, "steps": 30},
    "cuda": {"depth": 12, "vocab": 50304, "batch": 16, "seq": 2048, "steps": 60},
}


class TrainingError(RuntimeError):
    """The run cannot go on."""


# ------------------------------------------------------------------------------------------- model


def norm(x: Tensor) -> Tensor:
    # CUDA's autocast would return f32: twice the bytes for all that follows.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, (x.shape[-1],))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + d/2]) by their angles; x [B, T, H, d], cos, sin [T, 1, d/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        q, k = norm(rotate(q, cos, sin)), norm(rotate(k, cos, sin))  # [B, T, H, d]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x))
        return self.down(h * h)  # CUDA's autocast would have `square` return f32

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    cos: Tensor  # [seq, 1, d/2] bf16
    sin: Tensor

    def __init__(self, depth: int, vocab: int, seq: int) -> None:
        super().__init__()
        dim = -(-64 * depth // HEAD_DIM) * HEAD_DIM  # whole heads
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)
        frequencies = ROTARY_BASE ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(seq), frequencies)[:, None]
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Blocks begin as the identity: zeros in the layers that write to the residual stream."""
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.head.weight, std=0.001)
        for block in self.blocks:
            for name, layer in block.named_children():
                bound = 0.0 if name in ("out", "down") else (3 / layer.in_features) ** 0.5
                nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats per token; tokens, targets: [B, seq] int64."""
        with torch.autocast(tokens.device.type, torch.bfloat16):
            x = norm(self.embed(tokens).bfloat16())  # [B, T, D]
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            logits = SOFT_CAP * torch.tanh(self.head(norm(x)).float() / SOFT_CAP)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ------------------------------------------------------------------------------------- FP8 by hand


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in FP8, and the f32 number that undoes its one scale, FP8_MAX / amax."""
    fp8_max = torch.finfo(dtype).max
    scale = (fp8_max / x.abs().amax().double().clamp(min=1e-12)).float()
    # Out of range, a bare cast would not saturate.
    return (x.float() * scale).clamp(-fp8_max, fp8_max).to(dtype), scale.reciprocal()


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


class ScaledMM(torch.autograd.Function):
    """`y = x @ w.T` with dynamic scales per tensor: x, w e4m3; dy e5m2.

    `torch._scaled_mm` wants a row-major and a column-major operand, so backward transposes by
    copies. Fast accumulation is for y alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        """x: [M, K] bf16; w: [N, K]. Returns: [M, N], dtype of x. All sizes multiples of 16."""
        xq, x_inv = quantize(x, E4M3)
        wq, w_inv = quantize(w, E4M3)
        ctx.save_for_backward(xq, x_inv, wq, w_inv)
        return torch._scaled_mm(
            xq, wq.t(), scale_a=x_inv, scale_b=w_inv, out_dtype=x.dtype, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        xq, x_inv, wq, w_inv = ctx.saved_tensors
        dyq, dy_inv = quantize(dy.contiguous(), E5M2)
        dyq_t = dyq.t().contiguous()
        dx = torch._scaled_mm(
            dyq, column_major(wq), scale_a=dy_inv, scale_b=w_inv, out_dtype=dy.dtype
        )
        dw = torch._scaled_mm(
            dyq_t, column_major(xq), scale_a=dy_inv, scale_b=x_inv, out_dtype=dy.dtype
        )
        return dx, dw  # autograd gives dw the dtype of w


class ScaledMMLinear(nn.Linear):
    """`nn.Linear` without bias by `ScaledMM`; made by assigning `__class__`."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = ScaledMM.apply(input.flatten(0, -2), self.weight)
        return y.unflatten(0, input.shape[:-1])


# -------------------------------------------------------------------------------------- conversion


def nanochat_converts(layer: nn.Linear, name: str = "") -> bool:
    """Return nanochat's choice: sizes that FP8 GEMMs take, and no small ones."""
    sizes = (layer.in_features, layer.out_features)
    return all(size % 16 == 0 for size in sizes) and min(sizes) >= 128


def convert(model: nn.Module, precision: str, recipe: str) -> int:
    """Give the linear layers their precision, in place; return how many are FP8 now."""
    if precision == "fp8":
        fp8lt.convert_to_float8_training(model, config=recipe, module_filter_fn=nanochat_converts)
    elif precision == "scaled_mm":
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and nanochat_converts(layer):
                layer.__class__ = ScaledMMLinear
    return sum(isinstance(layer, (fp8lt.Linear, ScaledMMLinear)) for layer in model.modules())


# ---------------------------------------------------------------------------------------- training


def read_text() -> Tensor:
    """Return the standard library's modules in the order of their names, [bytes] uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def batches(text: Tensor, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield [batch, seq + 1] int64, once per step; the seed alone decides where they begin."""
    draw = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.seq + 1, device=text.device)
    for _ in range(args.steps):
        starts = torch.randint(len(text) - args.seq, (args.batch, 1), generator=draw)
        yield text[starts.to(text.device) + offsets].long()


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train_steps(
    model: nn.Module, text: Tensor, args: argparse.Namespace
) -> Iterator[tuple[float, float]]:
    """Train; yield each step's loss and its time in seconds."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.8, 0.95), weight_decay=0.0, fused=True
    )
    for step, tokens in enumerate(batches(text, args), 1):
        begin = clock(text.device)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARM_UP)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), clock(text.device) - begin
        if not math.isfinite(value):
            raise TrainingError(f"the loss of step {step} is {value}; try a smaller --lr")
        yield value, seconds


def run(args: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    """Build a model, train it, print how it goes; return the measurements."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    with device:
        model = GPT(args.depth, args.vocab, args.seq)
    fp8_layers = convert(model, args.precision, args.recipe)
    parameters = sum(p.numel() for p in model.parameters())
    layers = sum(isinstance(layer, nn.Linear) for layer in model.modules())
    print(f"{parameters:,} parameters, {fp8_layers} of {layers} linear layers in FP8", flush=True)
    if args.compile:
        model.compile(dynamic=False)
    tokens, losses, times = args.batch * args.seq, [], []
    for step, (loss, seconds) in enumerate(train_steps(model, text.to(device), args), 1):
        losses.append(loss)
        times.append(seconds)
        if step == 1 or step % REPORT_EVERY == 0 or step == args.steps:
            print(f"step {step:4}   loss {loss:.4f}   {tokens / seconds:,.0f} tokens/s", flush=True)
    step_s = statistics.median(times[min(WARM_UP, args.steps // 2) :])
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "precision": args.precision,
        "recipe": args.recipe if args.precision == "fp8" else None,
        "compile": args.compile,
        "depth": args.depth,
        "width": model.embed.embedding_dim,
        **{name: getattr(args, name) for name in ("vocab", "batch", "seq", "steps", "lr", "seed")},
        "parameters": parameters,
        "fp8_layers": fp8_layers,
        "step_ms": step_s * 1e3,
        "tokens_per_s": tokens / step_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "loss_start": losses[0],
        "loss_end": losses[-1],
        "losses": losses,
    }


# ----------------------------------------------------------------------------------- command line


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, want above 0")
    return value


def make_parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="nanochat.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--precision", choices=("bf16", "fp8", "scaled_mm"), default="fp8", help="default: fp8")
    add("--recipe", default="tensorwise", help="fp8lt's, of --precision fp8 (default: tensorwise)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    add("--compile", action="store_true", help="run the model under torch.compile")
    about = {"depth": "blocks; 64 times as many features", "vocab": "rows of embedding and head",
             "batch": "sequences per step", "seq": "tokens per sequence",
             "steps": "optimiser steps"}  # fmt: skip
    for name, text in about.items():
        values = ", ".join(f"{device}: {preset[name]}" for device, preset in PRESETS.items())
        add(f"--{name}", type=count, metavar="N", help=f"{text} ({values})")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW (default: 0.001)")
    add("--seed", type=int, default=0, help="of the weights and the data order (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the JSON here too")
    return parser


def check(args: argparse.Namespace, text: Tensor) -> None:
    """Fill in the preset; raise ValueError that names the flag, what came and what is wanted."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("argument --device: got cuda, want cpu: torch sees no GPU here")
    for name, value in PRESETS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.vocab < 256:
        raise ValueError(f"argument --vocab: got {args.vocab}, want 256 or more: tokens are bytes")
    if args.seq >= len(text):
        raise ValueError(
            f"argument --seq: got {args.seq}, want below {len(text)}, the text's bytes"
        )
    if not 0 < args.lr < math.inf:
        raise ValueError(f"argument --lr: got {args.lr}, want above 0")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"argument --seed: got {args.seed}, want in 0 ... 2**63 - 1")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ValueError(f"argument --json: got {args.json}, want a file in a folder that exists")
    check_precision(args)


def check_precision(args: argparse.Namespace) -> None:
    by_hand = args.precision == "scaled_mm"
    try:
        found, why = fp8lt.is_available("tensorwise" if by_hand else args.recipe, args.device)
    except ValueError as error:
        raise ValueError(f"argument --{error}") from error
    if by_hand and torch.version.hip:
        found, why = False, "its formats are those of NVIDIA's GPUs"
    # On a CPU fp8lt emulates FP8. The layer by hand is there to be timed, which needs FP8 units.
    if not found and (by_hand or (args.precision == "fp8" and args.device == "cuda")):
        others = "bf16 or fp8" if args.device == "cpu" else "bf16"
        raise ValueError(
            f"argument --precision: got {args.precision}, want {others} on {args.device}: {why}"
        )
    if by_hand and args.batch * args.seq % 16:
        tokens = args.batch * args.seq
        raise ValueError(
            f"argument --seq: got {tokens} tokens per step, want a multiple of 16 for scaled_mm"
        )


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args, text = parser.parse_args(argv), read_text()
    try:
        check(args, text)
    except ValueError as error:
        parser.error(str(error))  # exits with 2
    try:
        report = run(args, text)
    except TrainingError as error:
        print(f"nanochat.py: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"nanochat.py: {error}; try a smaller --batch", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nanochat.py: interrupted", file=sys.stderr)
        return 130
    memory = report["peak_memory_bytes"]
    print(
        f"{report['tokens_per_s']:,.0f} tokens/s, {report['step_ms']:.1f} ms per step, "
        f"loss {report['loss_start']:.3f} -> {report['loss_end']:.3f}"
        + (f", peak memory {memory / 2**30:.2f} GiB" if memory else "")
    )
    line = json.dumps(report)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
