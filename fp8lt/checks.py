"""What the layer refuses: arguments that do not fit. Messages name what came and what is wanted."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import device, operands, ops
from .emulate import Scaling, padded
from .recipe import DelayedScaling, Recipe
from .state import DelayedState


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Make forward-mode AD an error: the operators would drop the tangents, a derivative of 0."""
    if forward_ad._current_level < 0:
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "fp8lt.linear has no forward-mode derivative (torch.func.jvp, forward_ad); "
            "use reverse mode, or run in high precision (fp8lt.disable_fp8, or "
            "fp8lt.fp8_autocast(enabled=False))"
        )


def check(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
    """Check once, at the public edge: what came and what is wanted."""
    for name, t in (("x", x), ("w", w), ("bias", bias)):
        if t is None and name == "bias":
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"fp8lt.linear: want {name} to be a tensor, got {type(t).__name__}")
        if t.dtype not in ops.REAL_DTYPES:
            raise RuntimeError(
                f"fp8lt.linear: want {name} of bfloat16, float16 or float32, got {t.dtype}"
            )
        if t.device != x.device:
            raise RuntimeError(
                f"fp8lt.linear: want all tensors on one device, got x on {x.device} and "
                f"{name} on {t.device}"
            )
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise RuntimeError(
            "fp8lt.linear: want x [..., K] and w [N, K], "
            f"got x {list(x.shape)} and w {list(w.shape)}"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise RuntimeError(
            f"fp8lt.linear: want bias [{w.shape[0]}], one per row of w {list(w.shape)}, "
            f"got {list(bias.shape)}"
        )
    if out_dtype is not None and out_dtype not in ops.REAL_DTYPES:
        raise RuntimeError(
            f"fp8lt.linear: want out_dtype bfloat16, float16 or float32, got {out_dtype}"
        )


def check_state(state: DelayedState | None, w: Tensor, recipe: Recipe) -> None:
    if not isinstance(recipe, DelayedScaling):
        if state is not None:
            raise ValueError(f"state: want None with recipe {recipe.name!r}, which has no state")
        return
    if state is None:
        raise ValueError(
            "state: recipe 'delayed' needs one: make fp8lt.DelayedState(recipe, device) once for "
            "each layer and pass it in every step, or use fp8lt.Linear, which has its own"
        )
    if not isinstance(state, DelayedState):
        raise TypeError(f"state: want a fp8lt.DelayedState, got {type(state).__name__}")
    length = state.amaxes.shape[1] - 2
    if length != recipe.amax_history_len or state.amaxes.device != w.device:
        raise ValueError(
            f"state: want a history of {recipe.amax_history_len} on {w.device}, "
            f"got {length} on {state.amaxes.device}"
        )


def check_quantized(w_quantized: ops.Quantized, x: Tensor, w: Tensor, recipe: Recipe) -> None:
    if not isinstance(w_quantized, ops.Quantized):
        raise TypeError(
            "fp8lt.linear: want w_quantized from fp8lt.quantize_weight, "
            f"got {type(w_quantized).__name__}"
        )
    n, k = map(padded, w.shape)
    data, data_t = w_quantized.data, w_quantized.data_t
    needs_t = torch.is_grad_enabled() and x.requires_grad
    scalings = w_quantized.scaling, w_quantized.scaling_t
    rows_do = not data_t.numel() and scalings == (Scaling.TENSORWISE, Scaling.TENSORWISE)
    fits = data.shape == (n, k) and (not needs_t or rows_do or data_t.shape == (k, n))
    e4m3 = device.formats(w.device).e4m3
    if not fits or data.device != w.device or data.dtype != e4m3:
        raise RuntimeError(
            f"fp8lt.linear: want w_quantized of w {list(w.shape)} in {e4m3} on {w.device}"
            f"{', with its transposed copy' if needs_t else ''}; "
            f"got {list(data.shape)} and {list(data_t.shape)} in {data.dtype} on {data.device}"
            f"{_other_family(data.dtype, e4m3)}"
        )
    want, got = operands.weight_scaling(recipe), (w_quantized.scaling, w_quantized.scaling_t)
    if got != want:
        raise RuntimeError(
            f"fp8lt.linear: want w_quantized for recipe {recipe.name!r}, with the scalings "
            f"{_words(want)}, got {_words(got)}: call quantize_weight with the same recipe"
        )


def _other_family(got: torch.dtype, want: torch.dtype) -> str:
    if got == want or got not in (device.OCP.e4m3, device.FNUZ.e4m3):
        return ""
    return ": fp8lt.convert_quantized gives it the formats of a device"


def _words(scalings: tuple[Scaling | None, ...]) -> str:
    return " and ".join("folded" if s is None else s.name.lower() for s in scalings)
