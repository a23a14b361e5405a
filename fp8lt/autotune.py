"""Choose cuBLASLt's kernels by time instead of by a rule: opt-in, for the whole process.

By default a rule chooses, the same kernel every time. With autotuning, the first GEMM of a shape
runs all kernels that cuBLASLt proposes for it, against each other; the fastest is kept in memory
and in the cache folder, in a file for this GPU and this version of cuBLASLt. So the first step of a
training run is slow, once, and the same choices are made in later runs. Every new shape pays: it is
not for token counts that change from step to step. Kernels differ in how they sum, so results may
differ in their last bits from those without it.

`csrc/autotune.cpp` measures; here is the switch.
"""

import torch

from . import build, settings

_asked: bool | None = None  # by a call of `autotune`; None: FP8LT_AUTOTUNE decides


def autotune(enabled: bool = True) -> None:
    """Switch autotuning on or off, whatever FP8LT_AUTOTUNE says.

    It applies to every GEMM that is launched from now on, backward's too. While a CUDA graph is
    captured nothing is measured: a shape that is not known by then runs by the rule. On a CPU and
    in emulation there is nothing to choose.

    Example:
        >>> fp8lt.autotune()
        >>> fp8lt.autotune(False)
    """
    global _asked
    _asked = enabled
    if build.loaded_library() is not None:
        _tell_the_extension()


def _tell_the_extension() -> None:
    library = build.loaded_library()
    assert library is not None
    asked = settings.read()
    folder = library.parent.parent / "autotune"
    try:
        folder.mkdir(exist_ok=True)
        where = str(folder)
    except OSError:  # a read-only cache: choices are kept in memory
        where = str(folder) if folder.is_dir() else ""
    enabled = asked.autotune if _asked is None else _asked
    torch.ops.fp8lt.set_autotune(enabled, where, asked.verbose)


build.when_loaded(_tell_the_extension)
