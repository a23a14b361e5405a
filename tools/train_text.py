"""The text that `train.py` trains on: where it comes from, its two parts, and the sequences.

By default the text is the Python source of the running interpreter's standard library, some 8 MB,
and then of the installed torch, in the order of the file names. It is cut into blocks of 16 KiB;
every 20th is validation text, the rest is training text, each joined up again. Nothing is shuffled
but the beginnings of the sequences.
"""

import dataclasses
import hashlib
import platform
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VAL_EVERY = 20  # 5 % of the text, spread over all of it
BLOCK = 1 << 14  # bytes; long enough that few sequences cross a seam between blocks
# Tests dwarf the library; code pages and the build's own variables are tables, not text.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@dataclasses.dataclass(frozen=True)
class Text:
    train: Tensor  # [bytes] uint8
    val: Tensor  # [bytes] uint8
    source: str
    sha256: str  # of all the text: equal sums, equal runs

    def summary(self) -> dict[str, str | int]:
        sizes = {"train_bytes": len(self.train), "val_bytes": len(self.val)}
        return {"source": self.source, **sizes, "sha256": self.sha256}


def default_text(max_bytes: int) -> Text:
    """Return up to max_bytes of the default text; its source names what is in there."""
    source = f"Python {platform.python_version()} standard library"
    files = files_in(Path(sysconfig.get_path("stdlib")))
    if sum(path.stat().st_size for path in files) < max_bytes:
        source += f", torch {torch.__version__}"
        files += files_in(Path(torch.__file__).parent)
    return read_text(files, max_bytes, source)


def files_in(root: Path) -> list[Path]:
    """Return the Python files that are text below a folder, in the order of their names."""
    found = {path.relative_to(root): path for path in root.rglob("*.py")}
    return [
        found[name]
        for name in sorted(found, key=Path.as_posix)
        if not SKIPPED & set(name.parts) and not name.name.startswith("_sysconfigdata")
    ]


def read_text(files: list[Path], max_bytes: int, source: str) -> Text:
    """Read the files in the order given, up to max_bytes in all, and split the text."""
    data = bytearray()
    for path in files:
        data += path.read_bytes()[: max_bytes - len(data)]
        if len(data) >= max_bytes:
            break
    if len(data) < VAL_EVERY:
        raise ValueError(f"got {len(data)} bytes in {source}, want at least {VAL_EVERY}")
    # A short text gets short blocks, so that one of them is for validation.
    blocks = torch.frombuffer(data, dtype=torch.uint8).split(min(BLOCK, len(data) // VAL_EVERY))
    train = [block for i, block in enumerate(blocks, 1) if i % VAL_EVERY]
    val = blocks[VAL_EVERY - 1 :: VAL_EVERY]
    return Text(torch.cat(train), torch.cat(val), source, hashlib.sha256(data).hexdigest())


def windows(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    """Return text[start : start + seq + 1] for each start, [B, seq + 1] int64."""
    return text[starts[:, None] + torch.arange(seq + 1, device=text.device)].long()


def train_starts(text: Tensor, seq: int, steps: int, batch: int, seed: int) -> Tensor:
    """Return where each training sequence begins, [steps, batch]; the seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - seq, (steps, batch), generator=generator)
    return starts.to(text.device)


def val_starts(text: Tensor, seq: int, batches: int, batch: int) -> Tensor:
    """Return evenly spaced beginnings, [batches, batch]; the same whatever the seed."""
    index = torch.arange(batches * batch, device=text.device)
    return (index * (len(text) - seq) // len(index)).view(batches, batch)
