"""The environment variables of fp8lt, read in one place. README lists them in its table.

They are read at every call, so a test or a notebook can change them; only `FP8LT_BUILD` matters
at import, and to autotuning when the extension is loaded and at a call of `autotune`.
"""

import os
from typing import Literal, NamedTuple, get_args

BuildPolicy = Literal["auto", "lazy", "force", "off"]


class Settings(NamedTuple):
    """What the user asked for through `FP8LT_*`."""

    build: BuildPolicy  # FP8LT_BUILD: when the extension is compiled
    emulate: bool  # FP8LT_EMULATE: CUDA tensors run emulated where they would be refused
    cache_dir: str | None  # FP8LT_CACHE_DIR: where compiled extensions are kept
    verbose: bool  # FP8LT_VERBOSE: the whole log of a build, and autotune's choices, on stderr
    autotune: bool  # FP8LT_AUTOTUNE: choose GEMM kernels by time


def read() -> Settings:
    """Read the environment. Raises ValueError naming the variable, its value and what is wanted."""
    build = os.environ.get("FP8LT_BUILD") or "auto"
    if build not in get_args(BuildPolicy):
        want = ", ".join(get_args(BuildPolicy))
        raise ValueError(f"FP8LT_BUILD: want one of {want}; got {build!r}")
    return Settings(
        build=build,  # type: ignore[arg-type]
        emulate=_flag("FP8LT_EMULATE"),
        cache_dir=os.environ.get("FP8LT_CACHE_DIR") or None,
        verbose=_flag("FP8LT_VERBOSE"),
        autotune=_flag("FP8LT_AUTOTUNE"),
    )


def _flag(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{name}: want 1 or 0, got {value!r}")
