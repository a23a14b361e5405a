"""Train a small byte-level GPT with FP8 linear layers on real text, and compare it with bf16.

    python tools/train.py                                  # FP8, sized for what the machine has
    python tools/train.py --compare bf16 --plot train.png  # then the same in bf16, and a plot
    python tools/train.py --recipe bf16,seed=1 --stats 100 --add-to run.json  # one run more
    torchrun --nproc-per-node 2 tools/train.py --parallel fsdp2  # see train_parallel.py

The text is the source code of the running Python's standard library, and of torch where that is too
little (or `--data FILE...`), cut into blocks; every 20th block is validation text that is never
trained on. All runs of one command share seed, initial weights and data order, so the recipe is
all that differs. Matmuls that are not FP8 run in bf16 (autocast) over f32 master weights, on the
CPU too.

The table shows the validation loss in nats per byte before the first step and after the last
(8 bits is 5.55 nats, pure guessing) and the speed in the second half of the steps, when caches and
clocks have settled. Validation uses the precision that was trained. The last line of stdout is the
same and more as one JSON document. With `--checkpoint DIR` a run goes on from the newest checkpoint
in DIR, and leaves others there. Exit codes: 0 trained, 1 the loss stopped being finite, 2 a bad
argument, 130 interrupted.
"""

import argparse
import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, loss_of
from provenance import provenance
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]
from train_config import BF16, CONFIG, Config, Contender, make_parser, prepare
from train_parallel import Curves, Parallel, latest, load, save, started
from train_report import plot, table
from train_stats import Watch
from train_text import Text, train_starts, val_starts, windows

REPORT_EVERY = 10  # steps between two looks at the loss; each look waits for the GPU


class TrainingError(RuntimeError):
    """The run cannot go on."""


def convert(model: nn.Module, recipe: Any, fp8_head: bool) -> int:
    """Convert the linear layers in place; return how many are FP8 now. The embedding is no GEMM."""
    if recipe == BF16:
        return 0
    import fp8lt

    fp8lt.convert_to_float8_training(
        model,
        config=recipe,
        module_filter_fn=lambda _, name: fp8_head or name != "head",
    )
    return sum(isinstance(module, fp8lt.Linear) for module in model.modules())


def autocast(device: torch.device) -> torch.autocast:
    # bf16 on the CPU as well: with AVX512-BF16 its training step took 0.72 to 0.83 of f32's time.
    return torch.autocast(device.type, torch.bfloat16)


def clock(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def learning_rate(step: int, config: Config) -> float:
    """Return lr: a linear warm-up, then a cosine from the peak down to a tenth of it."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / (config.steps - config.warmup)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, config: Config, parallel: Parallel) -> float:
    """Return the mean loss over the validation windows, in the layers' own precision."""
    model.eval()
    total = torch.zeros((), device=text.device)
    for starts in val_starts(text, config.seq, config.eval_batches, config.batch):
        with autocast(text.device):
            total += loss_of(model, windows(text, parallel.mine(starts), config.seq))
    model.train()
    loss = parallel.mean(total).item() / config.eval_batches
    if not math.isfinite(loss):
        raise TrainingError(f"the validation loss is {loss}")
    return loss


def make_optimizer(model: nn.Module, config: Config, parallel: Parallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parallel.groups(model), betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
    )


def train_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    config: Config,
    parallel: Parallel,
    watch: Watch,
    done: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Train from the step `done` on; yield the loss of this rank's rows and the gradient's norm.

    Both are [] f32, on the device.
    """
    call = parallel.wrapped(model)
    all_starts = train_starts(text, config.seq, config.steps, config.batch, config.seed)
    for step, starts in enumerate(all_starts[done:], done):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        with watch.step(model, step + 1):
            with autocast(text.device):
                loss = loss_of(call, windows(text, parallel.mine(starts), config.seq))
            loss.backward()
        parallel.after_backward(model)
        norm = parallel.clip(model, config.clip)
        optimizer.step()
        parallel.after_step(model)
        optimizer.zero_grad()
        yield loss.detach(), norm


@dataclasses.dataclass(frozen=True)
class Keep:
    """Where the checkpoints of a run are, and which steps leave one: the last does, too."""

    folder: Path | None = None
    every: int = 0
    last: int = 0

    def wants(self, step: int) -> bool:
        return self.folder is not None and (step == self.last or step % self.every == 0)

    def save(self, curves: Curves, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.folder is not None and self.wants(len(curves.train_losses)):
            save(self.folder, curves, model, optimizer)

    def restored(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Curves:
        """Go on from the newest; return the curves of its steps."""
        found = latest(self.folder) if self.folder else None
        if found is None:
            return Curves([], [])
        curves = load(found, model, optimizer)
        if len(curves.train_losses) >= self.last:
            raise TrainingError(f"{found} has all {self.last} steps; give another --checkpoint")
        return curves


def check_finite(losses: list[float], first_step: int) -> None:
    for step, loss in enumerate(losses, first_step):
        if not math.isfinite(loss):
            raise TrainingError(f"the loss of step {step} is {loss}; try a smaller --lr")


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Tensor,
    config: Config,
    label: str,
    parallel: Parallel,
    keep: Keep,
    watch: Watch,
) -> tuple[Curves, float, float]:
    """Train with a progress bar.

    Return the curves, tokens/s in the second half, and the bytes that a step gathers.
    """
    device, tokens = text.device, config.batch * config.seq
    curves = keep.restored(model, optimizer)
    parallel.after_step(model)
    done = len(curves.train_losses)
    pending: list[tuple[Tensor, Tensor]] = []
    gathered = parallel.gathered_bytes
    half, half_time = done + (config.steps - done) // 2, clock(device)
    last_time = half_time
    with tqdm(
        total=config.steps, initial=done, desc=label, unit="step", dynamic_ncols=True,
        disable=parallel.rank > 0,
    ) as bar:  # fmt: skip
        steps = train_steps(model, optimizer, text, config, parallel, watch, done)
        for step, values in enumerate(steps, done + 1):
            pending.append(values)
            if step == half:
                half_time = clock(device)
            if step % REPORT_EVERY and step < config.steps and not keep.wants(step):
                continue
            losses, norms = map(torch.stack, zip(*pending, strict=True))
            new, pending = parallel.mean(losses).tolist(), []
            check_finite(new, len(curves.train_losses) + 1)
            curves.train_losses.extend(new)
            curves.grad_norms.extend(norms.tolist())
            keep.save(curves, model, optimizer)
            now = clock(device)
            speed = tokens * len(new) / (now - last_time)
            last_time = now
            bar.set_postfix_str(f"loss {new[-1]:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update(len(new))
    speed = tokens * (config.steps - half) / (clock(device) - half_time)
    return curves, speed, (parallel.gathered_bytes - gathered) / (config.steps - done)


def run(
    contender: Contender,
    config: Config,
    text: Text,
    parallel: Parallel,
    keep: Keep,
    stats_every: int | None,
) -> dict[str, Any]:
    """Train one model from scratch; return the measurements."""
    device, config = parallel.device, contender.configured(config)
    gc.collect()  # the last run's model, so that it does not count towards this one's memory
    begin = clock(device)  # starts CUDA, which the next lines need
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(config.seed)
    with device:
        model = GPT(config.dim, config.layers, config.heads, config.seq, config.tie)
    fp8_layers = convert(model, contender.recipe, config.fp8_head)
    watch = Watch(stats_every if fp8_layers else None, parallel.rank)
    parameters = sum(p.numel() for p in model.parameters())
    parallel.prepare(model)
    # Before any forward: after one, `fully_shard` may leave whole weights in the model.
    optimizer = make_optimizer(model, config, parallel)
    if config.compile:
        model.compile()
    train, val = text.train.to(device), text.val.to(device)
    val_start = evaluate(model, val, config, parallel)
    curves, tokens_per_s, gathered = fit(
        model, optimizer, train, config, contender.label, parallel, keep, watch
    )
    val_end = evaluate(model, val, config, parallel)
    on_cuda = device.type == "cuda"
    return {
        "recipe": contender.label,
        "seed": config.seed,
        "parallel": parallel.facts(gathered),
        "fp8_layers": fp8_layers,
        "parameters": parameters,
        "val_loss_start": val_start,
        "val_loss_end": val_end,
        "tokens_per_s": tokens_per_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "seconds": clock(device) - begin,
        **curves._asdict(),
        "stats": watch.taken,
    }


def train(args: argparse.Namespace, config: Config, text: Text, parallel: Parallel) -> None:
    keep = Keep(args.checkpoint, args.save_every, config.steps)
    if args.checkpoint and parallel.rank == 0:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
        own = args.contenders[0].configured(config)  # it is alone
        (args.checkpoint / CONFIG).write_text(json.dumps(dataclasses.asdict(own)) + "\n")
    origin = provenance(parallel.device)
    done = [
        run(contender, config, text, parallel, keep, args.stats) for contender in args.contenders
    ]
    if parallel.rank > 0:
        return
    report = {
        **origin,
        "preset": args.preset,
        "config": dataclasses.asdict(config),
        "text": text.summary(),
        "runs": [*args.earlier, *done],
    }
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)
        print(f"plot: {args.plot}")
    print(json.dumps(report))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__ or "")
    args = parser.parse_args(argv)
    try:
        try:
            config, text = prepare(args)
        except ValueError as error:
            parser.error(str(error))  # exits with 2
        with started(args.parallel, args.device, args.fp8_all_gather) as parallel:
            train(args, config, text, parallel)
    except TrainingError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        print(f"train.py: {error}; try a smaller --batch", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
