"""What a conversion made of the linear layers of a model, and why; as a table for people."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from torch import nn

from .module import Linear
from .recipe import Recipe, resolve


@dataclass(frozen=True)
class LinearReport:
    """What a conversion made of one linear layer: a line of `ConversionReport.layers`.

    Attributes:
        name: its qualified name, "" for the root; that of the parameter where a weight belongs to
            no linear layer (`nn.MultiheadAttention`).
        shape: (in, out); (in1, in2, out) of an `nn.Bilinear`.
        recipe: the recipe object with which it computes in FP8; None if it does not.
        reason: why it does not; None if it does.
        note: what is to be known of a layer in FP8, such as who else has its weight; or None.

    Example:
        >>> report = fp8lt.ConversionReport()
        >>> layer = fp8lt.convert_to_float8_training(nn.Linear(64, 32), report=report)
        >>> [line] = report.layers
        >>> line.name, line.shape, line.recipe == layer.recipe, line.reason
        ('', (64, 32), True, None)
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str | None = None
    note: str | None = None


@dataclass
class ConversionReport:
    """What `convert_to_float8_training` made of every linear layer; `print` shows it as a table.

    An empty one is passed as `report`, and filled. A conversion with the same one starts it anew.
    It tells what the layers are; whether a device has FP8 units tells `is_available`.

    Attributes:
        layers: a `LinearReport` for each `nn.Linear`, subclasses too, in the order of
            `named_modules`, once for a layer with several names. `nn.Bilinear` and the input
            projections of `nn.MultiheadAttention` have lines as well, and are never in FP8.
            Other products (convolutions, `nn.LSTM`, parameters that a model multiplies itself) are
            not looked for.

    Example:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 8))
        >>> report = fp8lt.ConversionReport()
        >>> model = fp8lt.convert_to_float8_training(
        ...     model, module_filter_fn=lambda layer, name: name != "4", report=report
        ... )
        >>> print(report)
        layer  count  in x out  recipe      note
        {0-3}      4  64 x 64   tensorwise
        4          1  64 x 8    -           module_filter_fn returned False
        in FP8: 4 of 5 linears, 97.0 % of their weights
        >>> report.skipped
        {'4': 'module_filter_fn returned False'}
    """

    layers: list[LinearReport] = field(default_factory=list)

    @property
    def converted(self) -> dict[str, Recipe]:
        """The recipe of each layer in FP8, by name: those converted before, too."""
        return {line.name: line.recipe for line in self.layers if line.recipe is not None}

    @property
    def skipped(self) -> dict[str, str]:
        """The reason of each layer that is not in FP8, by name."""
        return {line.name: line.reason or "" for line in self.layers if line.recipe is None}

    @property
    def share(self) -> float:
        """The fraction of the weights of all these layers that is in FP8; 0 if there are none.

        A weight counts once for every layer that multiplies by it.
        """
        every = sum(math.prod(line.shape) for line in self.layers)
        of_fp8 = sum(math.prod(line.shape) for line in self.layers if line.recipe is not None)
        return of_fp8 / every if every else 0.0

    def __str__(self) -> str:
        """Return a table, one line for layers that differ in the numbers of their names alone."""
        if not self.layers:
            return "no linear layer found"
        rows = [("layer", "count", "in x out", "recipe", "note")]
        for name, count, line in _folded(self.layers):
            recipe = "-" if line.recipe is None else _with_options(line.recipe)
            shape = " x ".join(map(str, line.shape))
            rows.append((name, str(count), shape, recipe, line.reason or line.note or ""))
        names, counts, shapes, recipes, _ = (
            max(map(len, cells)) for cells in zip(*rows, strict=True)
        )
        table = [
            f"{n:{names}}  {c:>{counts}}  {s:{shapes}}  {r:{recipes}}  {note}".rstrip()
            for n, c, s, r, note in rows
        ]
        told = f"in FP8: {len(self.converted)} of {len(self.layers)} linears"
        return "\n".join([*table, f"{told}, {100 * self.share:.1f} % of their weights"])


_READ = "nn.MultiheadAttention reads the weight and calls no layer: see fp8_autocast"
_FUSED = "nn.TransformerEncoderLayer may read the weight in evaluation without gradients"


def lines_of(module: nn.Module, reasons: dict[str, str]) -> list[LinearReport]:
    """Return the lines of a model just converted; `reasons` has those of layers left as is."""
    found: list[LinearReport] = []
    notes = _notes(module)
    attentions = [m for m in module.modules() if _reads_weights(m)]
    read = {id(getattr(m, "out_proj", None)) for m in attentions}  # subclasses may lack parts
    for name, m in module.named_modules():
        if isinstance(m, nn.MultiheadAttention) and _reads_weights(m):
            prefix = f"{name}." if name else ""
            for weight, shape in _in_proj(m).items():
                found.append(LinearReport(prefix + weight, shape, None, _READ))
        elif isinstance(m, nn.Bilinear):
            sizes = (m.in1_features, m.in2_features, m.out_features)
            found.append(LinearReport(name, sizes, None, "nn.Bilinear has no FP8 form"))
        elif isinstance(m, nn.Linear):
            shape = (m.in_features, m.out_features)
            # What is read stays in high precision even if the layer was converted.
            reason = _READ if id(m) in read else reasons.get(name)
            if isinstance(m, Linear) and reason is None:
                found.append(LinearReport(name, shape, m.recipe, None, notes.get(id(m))))
            else:
                found.append(LinearReport(name, shape, None, reason))
    return found


def _reads_weights(m: nn.Module) -> bool:
    forward = nn.MultiheadAttention.forward
    return isinstance(m, nn.MultiheadAttention) and type(m).forward is forward


def _in_proj(m: nn.MultiheadAttention) -> dict[str, tuple[int, int]]:
    """Return the shapes, (in, out), of its weights that belong to no layer; by their names."""
    # Not from the weights: a shard's may be flat.
    shapes = {
        "in_proj_weight": (m.embed_dim, 3 * m.embed_dim),
        "q_proj_weight": (m.embed_dim, m.embed_dim),
        "k_proj_weight": (m.kdim, m.embed_dim),
        "v_proj_weight": (m.vdim, m.embed_dim),
    }
    return {name: shape for name, shape in shapes.items() if getattr(m, name, None) is not None}


def _notes(module: nn.Module) -> dict[int, str]:
    """Return what is to be known of linear layers in FP8, by the ids of the layers."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, m in module.named_modules():
        for _, parameter in m.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append((name, m))
    notes: dict[int, list[str]] = {}
    for m in module.modules():
        if isinstance(m, nn.TransformerEncoderLayer):
            for part in ("linear1", "linear2"):
                notes.setdefault(id(getattr(m, part, None)), []).append(_FUSED)
        if isinstance(m, Linear) and (
            "forward" in vars(m) or type(m).forward is not Linear.forward
        ):
            notes.setdefault(id(m), []).append("it has a forward of its own, which may not use FP8")
        weight = dict(m.named_parameters(recurse=False)).get("weight")
        if isinstance(m, nn.Linear) and weight is not None:
            others = [
                f"{name or _ROOT} ({type(other).__name__})"
                for name, other in users[id(weight)]
                if other is not m
            ]
            if others:
                told = f"FP8 here; its weight is also that of {', '.join(others)}"
                notes.setdefault(id(m), []).append(told)
    return {layer: "; ".join(several) for layer, several in notes.items()}


_ROOT = "(root)"  # has no name
# Not "007": a number that is written back differs from it.
_NUMBER = re.compile("(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")


def _folded(lines: list[LinearReport]) -> Iterator[tuple[str, int, LinearReport]]:
    """Join lines that differ in the numbers of their names alone: name, how many, one of them.

    A name with several braces stands for every combination of their numbers. So lines of which some
    combinations are missing become several.
    """
    alike: dict[tuple[object, ...], list[LinearReport]] = {}
    for line in lines:
        words = tuple(_NUMBER.split(line.name))
        key = (words, line.shape, line.recipe, line.reason, line.note)
        alike.setdefault(key, []).append(line)
    for group in alike.values():
        words = tuple(_NUMBER.split(group[0].name))
        boxes: list[tuple[tuple[int, ...], ...]]
        boxes = [tuple((int(n),) for n in _NUMBER.findall(line.name)) for line in group]
        for place in reversed(range(len(words) - 1)):
            joined: dict[tuple[tuple[int, ...], ...], list[int]] = {}
            for box in boxes:
                joined.setdefault(box[:place] + box[place + 1 :], []).extend(box[place])
            boxes = [
                (*rest[:place], tuple(sorted(numbers)), *rest[place:])
                for rest, numbers in joined.items()
            ]
        for box in boxes:
            braces = [*map(_braces, box), ""]
            name = "".join(word + brace for word, brace in zip(words, braces, strict=True))
            yield name or _ROOT, math.prod(map(len, box)), group[0]


def _braces(numbers: tuple[int, ...]) -> str:
    """Return "7" for one number, "{0-3,5}" for several, which are in order."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    told = ",".join("-".join(map(str, run)) for run in runs)
    return told if len(numbers) == 1 else f"{{{told}}}"


def _with_options(recipe: Recipe) -> str:
    """Return the recipe's name, and the options that are not those of the name."""
    named = resolve(recipe.name)
    options = [
        f"{one.name}={getattr(recipe, one.name)!r}"
        for one in fields(recipe)
        if getattr(recipe, one.name) != getattr(named, one.name)
    ]
    return ", ".join([recipe.name, *options])
