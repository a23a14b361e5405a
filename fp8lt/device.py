"""What a device is: its FP8 formats, and whether it multiplies FP8 natively.

    NVIDIA, OCP AMD chips, CPU    e4m3fn   (max 448)    e5m2     (max 57344)
    AMD gfx94x (MI300 family)     e4m3fnuz (max 240)    e5m2fnuz (max 57344)

The answer always comes from the device of a tensor, never from "the" GPU of the machine. Nothing
here touches a GPU until it is asked about a device, and `gpus` asks the driver, not CUDA, so that
a process may still fork afterwards.
"""

from functools import cache
from typing import NamedTuple

import torch

NATIVE_SINCE = (8, 9)  # Ada: the first with FP8 tensor cores
# More scales than one per tensor: cuBLASLt has its modes OUTER_VEC (a scale per row) and VEC128,
# BLK128x128 (a scale per block) on Hopper alone, since 12.9.
SCALES_ON = (9, 0)
SCALES_SINCE_CUBLASLT = 120900
ONE_SCALE = ("tensorwise", "delayed")  # the recipes that need no more than one per tensor


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
    """Whether FP8 GEMMs of a device can run natively, and the reason in words."""

    native: bool
    reason: str


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
    """Say whether `device` has what native FP8 needs; whether that is built is `build`'s matter.

    recipe: the name of one, since not every GPU with FP8 has every recipe's scales.
    """
    if device.type == "cpu":
        return Support(False, "a CPU has no FP8 units")
    if device.type == "meta":
        return Support(False, "meta tensors hold no data")
    if device.type != "cuda":
        return Support(False, f"no FP8 GEMM is known for devices of type {device.type!r}")
    architecture = amd_architecture(device)
    if architecture is not None:
        return Support(False, f"the native path calls cuBLASLt; {device} is an AMD {architecture}")
    name = torch.cuda.get_device_name(device)
    return capability_support(name, torch.cuda.get_device_capability(device), recipe)


def capability_support(
    name: str, capability: tuple[int, int], recipe: str = "tensorwise"
) -> Support:
    """The same for an NVIDIA GPU known by name and compute capability."""
    found = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability < NATIVE_SINCE:
        need = f"{NATIVE_SINCE[0]}.{NATIVE_SINCE[1]}"
        return Support(False, f"{found}; FP8 needs {need} or newer (Ada, Hopper, Blackwell)")
    if recipe not in ONE_SCALE and capability != SCALES_ON:
        need = f"{SCALES_ON[0]}.{SCALES_ON[1]} (Hopper)"
        scales = "a scale per block" if recipe == "blockwise" else "a scale per row"
        reason = f"recipe {recipe!r} needs {scales}, which cuBLASLt has for {need} alone"
        return Support(False, f"{found}; {reason}")
    return Support(True, found)


def cublaslt_reason(loaded: int, recipe: str) -> str | None:
    """Return why this version of cuBLASLt (130101 is 13.1.1) cannot run a recipe, or None."""
    if recipe in ONE_SCALE or loaded >= SCALES_SINCE_CUBLASLT:
        return None
    return (
        f"recipe {recipe!r} needs cuBLASLt {SCALES_SINCE_CUBLASLT} (12.9) or newer; "
        f"torch has loaded {loaded}"
    )


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
