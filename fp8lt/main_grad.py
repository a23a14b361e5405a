"""Gradients of weights that are added up in f32 beside autograd, as Megatron-LM does."""

from typing import NamedTuple

import torch
from torch import Tensor


class MainGrad(NamedTuple):
    """Where dw is added up, if anywhere, and what autograd gets in its place."""

    sum: Tensor | None  # f32 [N, K]
    returns: int  # `NOTHING`, an `EMPTY` gradient or one of `ZEROS`


NOTHING, EMPTY, ZEROS = range(3)
NO_MAIN_GRAD = MainGrad(None, NOTHING)


def main_grad_of(w: Tensor, main_grad: Tensor) -> MainGrad:
    """Check what a user gave for a weight, and tell a weight of Megatron's that it is used."""
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"main_grad: want a tensor, got {type(main_grad).__name__}")
    if (
        main_grad.shape != w.shape
        or main_grad.dtype != torch.float32
        or main_grad.device != w.device
        or not main_grad.is_contiguous()
        or main_grad.requires_grad
    ):
        raise RuntimeError(
            f"main_grad: want {list(w.shape)}, float32 on {w.device}, contiguous, without a "
            f"gradient; got {list(main_grad.shape)}, {main_grad.dtype} on {main_grad.device}, "
            f"strides {main_grad.stride()}, requires_grad={main_grad.requires_grad}"
        )
    if not hasattr(w, "grad_added_to_main_grad"):
        return MainGrad(main_grad, NOTHING)
    if torch.is_grad_enabled() and w.requires_grad:
        w.grad_added_to_main_grad = True
    return MainGrad(main_grad, ZEROS if getattr(w, "zero_out_wgrad", False) else EMPTY)


def in_place_of_dw(main_grad: MainGrad, dtype: torch.dtype) -> Tensor | None:
    """Return something for hooks that wait for a gradient, where they are told of."""
    total, returns = main_grad
    if returns == NOTHING or total is None:
        return None
    make = torch.empty_like if returns == EMPTY else torch.zeros_like
    return make(total, dtype=dtype)
