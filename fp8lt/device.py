"""What a device is: its FP8 formats, and by which way its FP8 GEMMs run.

    NVIDIA, OCP AMD chips, CPU    e4m3fn   (max 448)    e5m2     (max 57344)
    AMD gfx94x (MI300 family)     e4m3fnuz (max 240)    e5m2fnuz (max 57344)

Where a GPU has FP8 but its library lacks what the extension calls, `torch._scaled_mm` multiplies.

The answer always comes from the device of a tensor, never from "the" GPU of the machine. Nothing
here touches a GPU until it is asked about a device, and `gpus` asks the driver, not CUDA, so that
a process may still fork afterwards.
"""

from functools import cache
from typing import Literal, NamedTuple

import torch

# "native": kernels and cuBLASLt of the extension. "scaled_mm": GEMMs by `torch._scaled_mm`.
Way = Literal["native", "scaled_mm", "refused"]


class Ways(NamedTuple):
    """How GPUs of one kind run recipes, by what shares a scale in them."""

    tensor: Way
    row: Way
    block: Way


NATIVE_SINCE = (8, 9)  # Ada: the first with FP8 tensor cores
# More scales than one per tensor: cuBLASLt has its modes OUTER_VEC (a scale per row) and VEC128,
# BLK128x128 (a scale per block) on Hopper alone, since 12.9. PyTorch has a kernel of its own for
# scales per row on Ada, Blackwell, and Hopper with an older library.
NVIDIA = {  # from a compute capability on
    (8, 9): Ways("native", "scaled_mm", "refused"),  # Ada
    (9, 0): Ways("native", "native", "native"),  # Hopper
    (10, 0): Ways("native", "scaled_mm", "refused"),  # Blackwell
}
SCALES_SINCE_CUBLASLT = 120900
# hipBLASLt has scales per row, and none per block.
AMD = dict.fromkeys(
    ("gfx942", "gfx950", "gfx1200", "gfx1201"), Ways("scaled_mm", "scaled_mm", "refused")
)
_SCALES: dict[str, Literal["tensor", "row", "block"]] = {
    "tensorwise": "tensor",
    "delayed": "tensor",
    "rowwise": "row",
    "rowwise_with_gw_hp": "row",
    "rowwise_folded": "row",
    "blockwise": "block",
}


class Formats(NamedTuple):
    """The two FP8 dtypes of a device; `torch.finfo(dtype).max` is what a scale maps amax onto."""

    e4m3: torch.dtype  # more mantissa: x, w
    e5m2: torch.dtype  # more range: dy


OCP = Formats(torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = Formats(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Gpu(NamedTuple):
    """One GPU as the driver reports it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    driver: str


class Support(NamedTuple):
    """By which way a device runs the FP8 GEMMs of a recipe, and the reason in words."""

    way: Way
    reason: str


def indexed(device: torch.device | str | int) -> torch.device:
    """Return a device with its number: "cuda" alone is the current GPU, which may change."""
    found = torch.device(device)
    if found.type == "cuda" and found.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found


@cache
def amd_architecture(device: torch.device) -> str | None:
    """Return an AMD GPU's architecture, such as "gfx942", or None for any other device."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return name.split(":")[0]  # "gfx942:sramecc+:xnack-"


def formats(device: torch.device) -> Formats:
    """Return the FP8 dtypes that `device` computes in."""
    architecture = amd_architecture(device)
    return FNUZ if architecture is not None and architecture.startswith("gfx94") else OCP


formats._dynamo_marked_constant = True  # type: ignore[attr-defined] # see ops.backend


@cache
def support(device: torch.device, recipe: str = "tensorwise") -> Support:
    """Say what `device` can do by itself; whether the extension is built is `build`'s matter.

    recipe: the name of one, since not every GPU with FP8 has every recipe's scales.
    """
    if device.type == "cpu":
        return Support("refused", "a CPU has no FP8 units")
    if device.type == "meta":
        return Support("refused", "meta tensors hold no data")
    if device.type != "cuda":
        return Support("refused", f"no FP8 GEMM is known for devices of type {device.type!r}")
    architecture = amd_architecture(device)
    if architecture is not None:
        return amd_support(f"{device} is an AMD {architecture}", architecture, recipe)
    name = torch.cuda.get_device_name(device)
    return capability_support(name, torch.cuda.get_device_capability(device), recipe)


def amd_support(found: str, architecture: str, recipe: str = "tensorwise") -> Support:
    """The same for an AMD GPU; `found` says which it is."""
    if architecture not in AMD:
        return Support("refused", f"{found}; FP8 needs one of {', '.join(AMD)}")
    way: Way = getattr(AMD[architecture], _SCALES[recipe])
    if way == "refused":
        return Support(way, f"{found}; {_need(recipe)}, which hipBLASLt does not have")
    return Support(way, f"{found}; GEMMs by torch._scaled_mm, quantise in plain PyTorch")


def capability_support(
    name: str, capability: tuple[int, int], recipe: str = "tensorwise"
) -> Support:
    """The same for an NVIDIA GPU known by name and compute capability."""
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < NATIVE_SINCE:
        need = f"{NATIVE_SINCE[0]}.{NATIVE_SINCE[1]}"
        return Support("refused", f"{found}; FP8 needs {need} or newer (Ada, Hopper, Blackwell)")
    kind = max(since for since in NVIDIA if since <= capability)
    way: Way = getattr(NVIDIA[kind], _SCALES[recipe])
    if way == "native":
        return Support(way, found)
    reason = f"{found}; {_need(recipe)}, which cuBLASLt has for 9.0 (Hopper) alone"
    return Support(way, reason if way == "refused" else f"{reason}: GEMMs by torch._scaled_mm")


def with_cublaslt(found: Support, loaded: int, recipe: str) -> Support:
    """Return what is left of support by the version of cuBLASLt (130101 is 13.1.1)."""
    scales = _SCALES[recipe]
    if found.way != "native" or scales == "tensor" or loaded >= SCALES_SINCE_CUBLASLT:
        return found
    reason = (
        f"recipe {recipe!r} needs cuBLASLt {SCALES_SINCE_CUBLASLT} (12.9) or newer; "
        f"torch has loaded {loaded}"
    )
    if scales == "block":
        return Support("refused", reason)
    return Support("scaled_mm", f"{reason}: GEMMs by torch._scaled_mm")


def without_extension(found: Support, why: str, recipe: str) -> Support:
    """Return what is left of an NVIDIA GPU's support where nobody wants the extension."""
    if found.way == "refused" or _SCALES[recipe] == "block":
        return Support("refused", why)
    return Support("scaled_mm", f"{why}: GEMMs by torch._scaled_mm, quantise in plain PyTorch")


def _need(recipe: str) -> str:
    return f"recipe {recipe!r} needs a scale per {_SCALES[recipe]}"


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs of this machine, through NVML; empty where there is none.

    All of them, also those hidden by CUDA_VISIBLE_DEVICES, so that one build serves every process.
    """
    import pynvml

    try:
        pynvml.nvmlInit()  # loads the driver's library
    except pynvml.NVMLError:  # no driver
        return ()
    try:
        found = [_describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return tuple(gpu for gpu in found if gpu is not None)


def _describe(index: int) -> Gpu | None:
    import pynvml

    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = pynvml.nvmlDeviceGetName(handle)
        capability = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    except pynvml.NVMLError:  # a GPU that this process may not look at
        return None
    try:
        memory_bytes = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    except pynvml.NVMLError:  # one that shares the CPU's memory does not say
        memory_bytes = 0
    return Gpu(name, capability, memory_bytes, pynvml.nvmlSystemGetDriverVersion())
