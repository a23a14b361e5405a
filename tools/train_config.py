"""What `train.py` is told, its flags, and what is wrong with them: found before the training."""

import argparse
import dataclasses
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from train_parallel import SHARDED_BATCH, WAYS
from train_text import Text, default_text, read_text

BF16 = "bf16"  # the one recipe that is not fp8lt's: nothing is converted


@dataclasses.dataclass(frozen=True)
class Config:
    """All that decides a run except the recipe. Each field is a flag."""

    dim: int
    layers: int
    heads: int
    seq: int
    batch: int
    steps: int
    warmup: int
    lr: float
    eval_batches: int
    max_bytes: int
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    tie: bool = False
    fp8_head: bool = False
    compile: bool = False


HELP = {
    "dim": "model width",
    "layers": "transformer blocks",
    "heads": "attention heads",
    "seq": "bytes per sequence",
    "batch": "sequences per step",
    "steps": "optimiser steps",
    "warmup": "steps of linear learning-rate warm-up, before the cosine",
    "lr": "peak learning rate",
    "eval_batches": "batches of validation text",
    "max_bytes": "read this much text at most",
    "weight_decay": "AdamW's weight decay",
    "clip": "largest norm of the whole gradient",
    "seed": "of the weights and the data order",
    "tie": "share the embedding's weight with the head",
    # The head's error goes straight into the loss, and with 256 outputs it is too narrow to gain.
    "fp8_head": "convert the output head too",
    "compile": "run the model under torch.compile",
}
CONFIG = "config.json"  # in a folder of checkpoints
# What has to be the same where a run goes on: the model, and the order of the data.
SAME_RUN = ("dim", "layers", "heads", "tie", "seq", "batch", "seed", "max_bytes")
# What a run in a report is shown by.
RUN_FIELDS = {
    "recipe", "seed", "parallel", "parameters", "fp8_layers", "val_loss_start", "val_loss_end",
    "tokens_per_s", "peak_memory_bytes", "seconds", "train_losses", "grad_norms",
}  # fmt: skip
PRESETS = {
    "cpu": Config(128, 4, 2, 128, 16, 240, 20, 2e-3, 8, 4_000_000),
    "gpu": Config(2048, 8, 16, 1024, 16, 300, 50, 3e-4, 8, 16_000_000),
    "study": Config(1024, 8, 16, 1024, 16, 2000, 200, 6e-4, 16, 40_000_000),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One run of a command: a recipe, and what it has otherwise than the other runs.

    As text: the recipe's name and, after commas, `seed=N` or options of the recipe, as in
    "bf16,seed=1" or "tensorwise,fast_accum_grad_input=true".
    """

    label: str  # the text
    recipe: Any  # BF16, or one of fp8lt's
    seed: int | None = None  # None: that of the command

    def configured(self, config: Config) -> Config:
        return config if self.seed is None else dataclasses.replace(config, seed=self.seed)


def contender(text: str, device: torch.device) -> Contender:
    """Read a contender. Raises ValueError; RuntimeError if `device` lacks what the recipe needs."""
    name, *options = text.split(",")
    pairs = [option.partition("=") for option in options]
    given = {key: value for key, _, value in pairs}
    if len(given) < len(options) or not all(sign for _, sign, _ in pairs):
        raise ValueError(f"{text}: want RECIPE,option=value,... with each option once")
    seed = _parsed("seed", given.pop("seed"), 0) if "seed" in given else None
    if name == BF16:
        if given:
            raise ValueError(f"{text}: {BF16} has no option {next(iter(given))!r}; want seed")
        return Contender(text, BF16, seed)
    # Imported late: the first import may compile an extension, and bf16 does not need it.
    from fp8lt import ops
    from fp8lt.recipe import resolve

    try:
        recipe = resolve(name)
    except ValueError as error:
        raise ValueError(f"{error}; or {BF16}") from None
    have = dataclasses.asdict(recipe)
    for key in given:
        if key not in have:
            raise ValueError(
                f"{text}: {name} has no option {key!r}; want seed or one of {', '.join(have)}"
            )
    parsed = {key: _parsed(key, value, have[key]) for key, value in given.items()}
    recipe = dataclasses.replace(recipe, **parsed)
    ops.backend(device, recipe.emulate, recipe.name)
    return Contender(text, recipe, seed)


def _parsed(name: str, value: str, default: Any) -> Any:
    """Return the value of an option as its default's type."""
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ValueError(f"{name}: want true or false, got {value!r}")
        return value == "true"
    if isinstance(default, int):
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name}: want an integer, got {value!r}") from None
    return value


def check_config(config: Config) -> None:
    """Raise ValueError naming the flag, what came and what is wanted."""
    free = ("seed", "weight_decay", "warmup", "tie", "fp8_head", "compile")
    rules = [
        (name, 0 < value < math.inf, "above 0")
        for name, value in dataclasses.asdict(config).items()
        if name not in free
    ] + [
        ("seed", 0 <= config.seed < 2**63, "in 0 ... 2**63 - 1"),
        ("weight_decay", 0 <= config.weight_decay < math.inf, "0 or above"),
        ("warmup", 0 <= config.warmup <= config.steps, f"in 0 ... --steps {config.steps}"),
        # Rotary positions turn pairs, so each head has an even width.
        ("dim", config.heads > 0 and config.dim % (2 * config.heads) == 0,
         f"a multiple of 2 * --heads = {2 * config.heads}"),
    ]  # fmt: skip
    for name, good, wanted in rules:
        if not good:
            flag = name.replace("_", "-")
            raise ValueError(f"argument --{flag}: got {getattr(config, name)}, want {wanted}")


def choose_config(args: argparse.Namespace) -> Config:
    """Return the preset with the flags that were given in place of its values."""
    preset = PRESETS[args.preset]
    names = [field.name for field in dataclasses.fields(Config)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    # A run shortened by --steps alone warms up for the same part of it.
    warmup = min(preset.warmup, given.get("steps", preset.steps) * preset.warmup // preset.steps)
    config = dataclasses.replace(preset, **{"warmup": warmup, **given})
    check_config(config)
    return config


def choose_text(args: argparse.Namespace, config: Config) -> Text:
    try:
        if args.data:
            source = ", ".join(path.name for path in args.data)
            text = read_text(args.data, config.max_bytes, source)
        else:
            text = default_text(config.max_bytes)
    except (OSError, ValueError) as error:
        raise ValueError(f"argument --data: {error}") from error
    if config.seq >= len(text.val):
        raise ValueError(
            f"argument --seq: got {config.seq}, want below {len(text.val)}, "
            f"the bytes of validation text in {text.source}"
        )
    return text


def check_outputs(args: argparse.Namespace) -> None:
    """Find out before the training what would fail after it."""
    for flag, path in (("--json", args.json), ("--plot", args.plot)):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"argument {flag}: got {path}, want a file in a folder that exists")
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"argument --plot: got {args.plot}, want a .png, .svg or .pdf")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise ValueError("argument --plot: matplotlib is missing; pip install matplotlib")


def check_parallel(args: argparse.Namespace, config: Config) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.parallel and "RANK" not in os.environ:
        raise ValueError(
            f"argument --parallel: {args.parallel} wants several processes: "
            "torchrun --nproc-per-node N tools/train.py ..."
        )
    if world > 1 and not args.parallel:
        raise ValueError(f"argument --parallel: {world} processes want one of {', '.join(WAYS)}")
    if args.parallel in SHARDED_BATCH and config.batch % world:
        raise ValueError(
            f"argument --batch: got {config.batch}, want a multiple of the {world} processes"
        )
    if args.parallel == "tp" and (config.heads % world or world > 64):
        raise ValueError(
            f"argument --heads: got {config.heads}, want a multiple of the {world} processes"
        )
    recipes = {text.split(",")[0] for text in (args.recipe, *args.compare)}
    if args.fp8_all_gather and (args.parallel != "fsdp2" or recipes - {"tensorwise", BF16}):
        raise ValueError(
            "argument --fp8-all-gather: want --parallel fsdp2 and --recipe tensorwise with it"
        )
    for flag, value in (("--save-every", args.save_every), ("--stats", args.stats)):
        if value is not None and value < 1:
            raise ValueError(f"argument {flag}: got {value}, want above 0")
    if args.checkpoint and (args.compare or args.add_to):
        flag = "--compare" if args.compare else "--add-to"
        raise ValueError(f"argument --checkpoint: want no {flag} with it, it is of one run")
    if args.checkpoint and args.checkpoint.exists() and not args.checkpoint.is_dir():
        raise ValueError(f"argument --checkpoint: got {args.checkpoint}, want a folder")


def check_checkpoint(args: argparse.Namespace, config: Config) -> None:
    """Check that a run with this configuration may go on from there."""
    begun = args.checkpoint / CONFIG if args.checkpoint else None
    if begun is not None and begun.exists():
        before = json.loads(begun.read_text())
        for name in SAME_RUN:
            if (got := getattr(config, name)) != before[name]:
                flag, want = name.replace("_", "-"), before[name]
                raise ValueError(f"argument --{flag}: got {got}, want {want}, as in {begun}")


def earlier_runs(args: argparse.Namespace, config: Config, text: Text) -> list[dict[str, Any]]:
    """Return the runs of the report that the command adds to; they must be of the same training."""
    if not args.add_to:
        return []
    try:
        report = json.loads(args.add_to.read_text())
        runs: list[dict[str, Any]] = report["runs"]
        before = {**report["config"], "text": report["text"], **parts_of(report)}
        if not all(set(run) >= RUN_FIELDS for run in runs):
            raise ValueError("its runs lack fields")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"argument --add-to: {args.add_to} is no report: {error!r}") from error
    here = parts_of(provenance(torch.device(args.device)))
    now = {**dataclasses.asdict(config), "text": text.summary(), **here}
    for name, value in now.items():
        if value != before.get(name):
            raise ValueError(
                f"argument --add-to: {args.add_to} has {name} {before.get(name)!r}, here it is "
                f"{value!r}"
            )
    return runs


def parts_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return what of a report's origin has to be the same for its runs to be compared."""
    return {name: report[name] for name in ("device", "torch", "cuda", "commit")}


def choose_contenders(args: argparse.Namespace, config: Config) -> list[Contender]:
    found = []
    for flag, recipes in (("--recipe", [args.recipe]), ("--compare", args.compare)):
        for recipe in recipes:
            try:
                one = contender(recipe, torch.device(args.device))
                check_config(one.configured(config))
                found.append(one)
            except ModuleNotFoundError as error:
                hint = "pip install . or set PYTHONPATH=. in the repository's root"
                raise ValueError(f"argument {flag}: {error}; {hint}") from error
            except ValueError as error:
                raise ValueError(f"argument {flag}: {error}") from error
            except RuntimeError as error:  # the device lacks what the recipe needs
                lines = str(error).splitlines()
                raise ValueError(f"argument {flag}: {recipe}: {lines[0]}") from error
    return found


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return the parser; `doc`: what the program says about itself, its first line first."""
    summary, _, rest = doc.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="train.py", description=summary, epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--recipe", default="tensorwise",
        help="bf16, or a recipe of fp8lt: see README's table; options of a run may follow, as in "
        "bf16,seed=1 or tensorwise,fast_accum_grad_input=true",
    )  # fmt: skip
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="RECIPE", help="then these, e.g. bf16"
    )
    parser.add_argument("--preset", choices=PRESETS, default="gpu" if gpu else "cpu")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--parallel", choices=WAYS, help="how torchrun's processes share the work")
    parser.add_argument(
        "--fp8-all-gather", action="store_true", help="of --parallel fsdp2: gather weights in FP8"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="go on from there, save too")
    parser.add_argument(
        "--save-every", type=int, default=100, metavar="N", help="steps between two (100)"
    )
    parser.add_argument(
        "--stats", type=int, metavar="N",
        help="every N steps, show the tensors that FP8 hurts most (fp8lt.tensor_stats)",
    )  # fmt: skip
    parser.add_argument("--data", nargs="+", type=Path, metavar="FILE", help="train on these files")
    parser.add_argument(
        "--add-to", type=Path, metavar="FILE",
        help="the JSON of an earlier command with the same flags: its runs come first",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON here too")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves here")
    for field in dataclasses.fields(Config):
        flag = "--" + field.name.replace("_", "-")
        values = {name: getattr(config, field.name) for name, config in PRESETS.items()}
        text = f"{HELP[field.name]} ({', '.join(f'{k}: {v}' for k, v in values.items())})"
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            kind = float if field.type is float else int
            parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=text)
    return parser


def prepare(args: argparse.Namespace) -> tuple[Config, Text]:
    """Check all that the user chose, cheapest first."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("argument --device: got cuda, want cpu: torch sees no GPU here")
    if args.compare and not args.plot:
        args.plot = (args.json.parent if args.json else Path()) / "train.png"
    config = choose_config(args)
    check_parallel(args, config)
    check_outputs(args)
    text = choose_text(args, config)
    args.contenders = choose_contenders(args, config)
    check_checkpoint(args, args.contenders[0].configured(config))
    args.earlier = earlier_runs(args, config, text)
    return config, text
