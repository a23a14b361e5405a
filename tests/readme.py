"""The README as tests read it, and the recorded runs that its figures are from."""

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLAIN = " ".join(README.split())
RESULTS = ROOT / "tools" / "results"


def table(heading: str) -> list[list[str]]:
    """Return the cells of the README's table whose first heading is that, its head first."""
    (found,) = re.findall(rf"^(\| {re.escape(heading)} \|.*\n(?:\|.*\n)+)", README, re.MULTILINE)
    lines = [line.strip("|\n ").split(" | ") for line in found.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if "---" not in line[0]]


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def at_least(number: float, digits: int) -> float:
    """Round up: what is said to be a bound is one."""
    return math.ceil(number * 10**digits) / 10**digits


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio:.{digits}%}".replace("%", " %")
