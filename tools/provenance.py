"""Where a recorded result comes from: date, device, versions, commit."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the facts that every file in tools/results/ begins with."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of this code: what GIT_COMMIT says, as for a copy, or else git."""
    if said := os.environ.get("GIT_COMMIT"):
        return said
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
