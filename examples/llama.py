"""Train a Llama of Hugging Face's transformers with FP8 layers, then evaluate it with and without.

    pip install transformers
    python examples/llama.py                               # sized for a GPU if there is one
    python examples/llama.py --recipe rowwise --steps 300
    python examples/llama.py --recipe bf16 --compile       # the same weights and text, to compare

The model is built from a `LlamaConfig` with random weights; nothing is downloaded. One call
converts its linear layers in place, so a model by `from_pretrained`, its checkpoints and its
trainer stay what they are:

    fp8lt.convert_to_float8_training(model, config="tensorwise", module_filter_fn=...)

The filter leaves the head in high precision: its error goes straight into the loss. Weights are
f32, and what is not FP8 runs in bf16 (autocast), as with `bf16=True` in transformers' `Trainer`.

The text is the source of Python's standard library, a token per byte; the last twentieth is for
validation. Its loss is given twice, in FP8 and inside of `fp8lt.disable_fp8`. tokens/s is from the
median step after a warm-up. The last line of stdout is the result as one JSON document. Exit codes:
0 trained, 1 the loss stopped being finite or the memory did not suffice, 2 a bad argument or no
transformers, 130 interrupted.
"""

import argparse
import importlib.util
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
from torch import Tensor, nn

import fp8lt

BF16 = "bf16"  # the one recipe that is not fp8lt's: nothing is converted
WARM_UP = 10  # steps that are not timed, and of rising learning rate
REPORT_EVERY = 10
VAL_BATCHES = 4
# On a GPU the widths of TinyLlama.
PRESETS = {
    "cpu": {"dim": 128, "hidden": 384, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 128,
            "batch": 4, "steps": 50, "lr": 2e-3},
    "cuda": {"dim": 2048, "hidden": 5632, "layers": 8, "heads": 16, "kv_heads": 4, "seq": 1024,
             "batch": 8, "steps": 200, "lr": 3e-4},
}  # fmt: skip
HELP = {
    "dim": "model width",
    "hidden": "width inside of the MLP",
    "layers": "decoder layers",
    "heads": "attention heads",
    "kv_heads": "heads of keys and values",
    "seq": "bytes per sequence",
    "batch": "sequences per step",
    "steps": "optimiser steps",
    "lr": "learning rate of AdamW",
}


class TrainingError(RuntimeError):
    """The run cannot go on."""


def build(args: argparse.Namespace) -> nn.Module:
    """Return a Llama with random f32 weights, its layers converted."""
    from transformers import LlamaConfig, LlamaForCausalLM  # late: it takes seconds

    config = LlamaConfig(
        vocab_size=256, hidden_size=args.dim, intermediate_size=args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads, max_position_embeddings=args.seq,
        bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(config).to(args.device)
    if args.recipe != BF16:
        fp8lt.convert_to_float8_training(
            model, config=args.recipe, module_filter_fn=lambda _, name: name != "lm_head"
        )
    return model


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats per byte; tokens: [B, T], each predicts its next."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss  # it shifts the labels itself
    return loss


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """Return the mean loss over evenly spaced sequences, in the precision that layers have now."""
    model.eval()
    index = torch.arange(VAL_BATCHES * args.batch, device=text.device)
    starts = index * (len(text) - args.seq) // len(index)
    losses = [loss_of(model, windows(text, at, args.seq)) for at in starts.split(args.batch)]
    model.train()
    return torch.stack(losses).mean().item()


def train_steps(
    model: nn.Module, text: Tensor, args: argparse.Namespace
) -> Iterator[tuple[float, float]]:
    """Train; yield each step's loss and its time in seconds."""
    device = text.device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    draw = torch.Generator().manual_seed(args.seed)
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - args.seq, (args.batch,), generator=draw).to(device)
        begin = clock(device)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / WARM_UP)
        loss = loss_of(model, windows(text, starts, args.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value, seconds = loss.item(), clock(device) - begin
        if not math.isfinite(value):
            raise TrainingError(f"the loss of step {step} is {value}; try a smaller --lr")
        yield value, seconds


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def read_text() -> Tensor:
    """Return the standard library's modules in the order of their names, [bytes] uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(map(Path.read_bytes, files))), dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    """Return text[start : start + seq] for each start, [B, seq] int64."""
    return text[starts[:, None] + torch.arange(seq, device=text.device)].long()


def run(args: argparse.Namespace, text: Tensor) -> dict[str, Any]:
    """Build, train, evaluate, print how it goes; return the measurements."""
    device = torch.device(args.device)
    train, val = text.to(device).split([len(text) - len(text) // 20, len(text) // 20])
    model = build(args)
    parameters = sum(p.numel() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    fp8_layers = sum(isinstance(layer, fp8lt.Linear) for layer in layers)
    print(f"{parameters:,} parameters, {fp8_layers} of {len(layers)} linear layers in FP8")
    if args.compile:
        model.compile()
    tokens, losses, times = args.batch * args.seq, [], []
    for step, (loss, seconds) in enumerate(train_steps(model, train, args), 1):
        losses.append(loss)
        times.append(seconds)
        if step == 1 or step % REPORT_EVERY == 0 or step == args.steps:
            print(f"step {step:4}   loss {loss:.4f}   {tokens / seconds:,.0f} tokens/s", flush=True)
    step_s = statistics.median(times[min(WARM_UP, args.steps // 2) :])
    val_loss = evaluate(model, val, args)
    with fp8lt.disable_fp8(model):
        val_loss_bf16 = evaluate(model, val, args)
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "recipe": args.recipe,
        "compile": args.compile,
        **{name: getattr(args, name) for name in (*HELP, "seed")},
        "parameters": parameters,
        "fp8_layers": fp8_layers,
        "step_ms": step_s * 1e3,
        "tokens_per_s": tokens / step_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "loss_start": losses[0],
        "loss_end": losses[-1],
        "val_loss": val_loss,
        "val_loss_bf16": val_loss_bf16,
        "losses": losses,
    }


# ----------------------------------------------------------------------------------- command line


def make_parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="llama.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--recipe", default="tensorwise", help=f"one of fp8lt's, or {BF16} (default: tensorwise)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    add("--compile", action="store_true", help="run the model under torch.compile")
    for name, text in HELP.items():
        values = ", ".join(f"{device}: {preset[name]}" for device, preset in PRESETS.items())
        kind = float if name == "lr" else int
        flag = "--" + name.replace("_", "-")
        add(flag, type=kind, metavar=kind.__name__.upper(), help=f"{text} ({values})")
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
    rules = [(name, 0 < getattr(args, name) < math.inf, "above 0") for name in HELP] + [
        ("seed", 0 <= args.seed < 2**63, "in 0 ... 2**63 - 1"),
        # A prediction needs a next byte, and validation text as many as a sequence has.
        ("seq", 1 < args.seq < len(text) // 20, f"in 2 ... {len(text) // 20 - 1}"),
        # Rotary positions turn pairs, so each head has an even width.
        ("dim", args.heads > 0 and args.dim % (2 * args.heads) == 0,
         f"a multiple of 2 * --heads = {2 * args.heads}"),
        ("kv_heads", args.kv_heads > 0 and args.heads % args.kv_heads == 0,
         f"a divisor of --heads {args.heads}"),
    ]  # fmt: skip
    for name, good, wanted in rules:
        if not good:
            flag = name.replace("_", "-")
            raise ValueError(f"argument --{flag}: got {getattr(args, name)}, want {wanted}")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ValueError(f"argument --json: got {args.json}, want a file in a folder that exists")
    if args.recipe != BF16:
        check_recipe(args.recipe, args.device)
    if not importlib.util.find_spec("transformers"):
        raise ValueError("transformers is missing; pip install transformers")


def check_recipe(recipe: str, device: str) -> None:
    try:
        found, why = fp8lt.is_available(recipe, device)
    except ValueError as error:
        raise ValueError(f"argument --{error}; or {BF16}") from error
    if not found and device == "cuda":  # a CPU has no FP8 either; there layers run emulated
        raise ValueError(f"argument --recipe: got {recipe}, want {BF16} on this GPU: {why}")


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
        print(f"llama.py: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"llama.py: {error}; try a smaller --batch", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("llama.py: interrupted", file=sys.stderr)
        return 130
    memory = report["peak_memory_bytes"]
    print(
        f"{report['tokens_per_s']:,.0f} tokens/s, {report['step_ms']:.1f} ms per step"
        + (f", peak memory {memory / 2**30:.2f} GiB" if memory else "")
    )
    print(
        f"validation loss {report['val_loss']:.4f}, {report['val_loss_bf16']:.4f} with FP8 disabled"
    )
    line = json.dumps(report)
    if args.json:
        args.json.write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
