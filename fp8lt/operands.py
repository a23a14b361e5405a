"""Operands: how each recipe quantises x, w and dy, and what scales its GEMMs undo.

                          y = x @ w.T        dx = dy @ w         dw = dy.T @ x
    tensorwise, delayed   a scale a tensor   the same            the same
    rowwise               rows of x, w       rows of dy, w.T     rows of dy.T, x.T
    rowwise_with_gw_hp    rows of x, w       rows of dy, all w   no FP8
    rowwise_folded        rows of x, w       rows of dy * sw     rows of (dy * sx).T
    blockwise             1x128, 128x128     1x128, 128x128      1x128, 1x128

For y the rows of x and w are contracted, in backward the columns of both, that is the rows of their
transposed copies. Folded, these copies are the same bytes as for y; their scales (sw, sx: one per
row of w and x) vary along the contraction, so dy takes them over: it is multiplied by them before
it is quantised, and the second factor of the GEMM has scales of one.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import device, emulate, ops
from .emulate import Scaling
from .ops import Quantized
from .recipe import BlockScaling, DelayedScaling, DynamicScaling, Recipe, RowwiseScaling
from .state import History


class Scalings(NamedTuple):
    """The scalings of both operands of each GEMM, as `ops.gemm_nt` takes them."""

    output: tuple[Scaling, Scaling]
    grad_input: tuple[Scaling, Scaling]
    grad_weight: tuple[Scaling, Scaling]


_TENSORWISE = Scalings(*[(Scaling.TENSORWISE, Scaling.TENSORWISE)] * 3)
# One number is written out for every row, and so are the ones of folded: both are rowwise here.
_ROWWISE = Scalings(*[(Scaling.ROWWISE, Scaling.ROWWISE)] * 3)
_ROW_BLOCKS, _SQUARES = Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128
_BLOCKWISE = Scalings((_ROW_BLOCKS, _SQUARES), (_ROW_BLOCKS, _SQUARES), (_ROW_BLOCKS, _ROW_BLOCKS))


def scalings(recipe: Recipe) -> Scalings:
    """Return what the three GEMMs of a recipe undo."""
    if isinstance(recipe, BlockScaling):
        return _BLOCKWISE
    return _ROWWISE if isinstance(recipe, RowwiseScaling) else _TENSORWISE


def weight_scaling(recipe: Recipe) -> tuple[Scaling, Scaling | None]:
    """Return `scaling` and `scaling_t` of a quantised weight.

    No two recipes have the same but tensorwise and delayed, which may take each other's.
    """
    return {
        "tensorwise": (Scaling.TENSORWISE, Scaling.TENSORWISE),
        "delayed": (Scaling.TENSORWISE, Scaling.TENSORWISE),
        "rowwise": (Scaling.ROWWISE, Scaling.ROWWISE),
        "rowwise_with_gw_hp": (Scaling.ROWWISE, Scaling.TENSORWISE),
        "rowwise_folded": (Scaling.ROWWISE, None),
        "blockwise": (_SQUARES, _SQUARES),
    }[recipe.name]


def keeps_x(recipe: Recipe) -> bool:
    """Say whether dw is computed from x itself."""
    return isinstance(recipe, RowwiseScaling) and recipe.high_precision_grad_weight


def recomputes_x(recipe: Recipe) -> bool:
    """Say whether a compiler shall quantise the columns of x, where it likes.

    It can where the rows' scale is the columns', too, and then keeps what costs the least memory:
    the columns, x, or what x is made from.
    """
    compiling = torch.compiler.is_compiling()
    return compiling and recipe.recompute_weight and scalings(recipe) == _TENSORWISE


def quantize_x(
    x: Tensor, recipe: Recipe, history: History | None, *, transposed: bool, emulated: bool
) -> Quantized:
    """Quantise x [M, K]: its rows for y and, `transposed`, its columns for dw.

    history: of this role, for a recipe that has one.
    """
    return _quantize_forward(x, recipe, history, transposed=transposed, emulated=emulated)


def quantize_w(
    w: Tensor, recipe: Recipe, history: History | None, *, transposed: bool, emulated: bool
) -> Quantized:
    """Quantise w [N, K]: its rows for y and, `transposed`, its columns for dx."""
    if not keeps_x(recipe):
        return _quantize_forward(
            w, recipe, history, square=True, transposed=transposed, emulated=emulated
        )
    rows = _quantize_forward(w, recipe, None, transposed=False, emulated=emulated)
    columns = _columns_under_one_scale(w, recipe, emulated) if transposed else rows
    return rows._replace(
        data_t=columns.data_t, scale_inv_t=columns.scale_inv_t, scaling_t=Scaling.TENSORWISE
    )


def quantize_dy(
    dy: Tensor,
    recipe: Recipe,
    history: History | None,
    *,
    row_major: bool,
    transposed: bool,
    fold_cols: Tensor | None,
    fold_rows: Tensor | None,
    sums_dtype: torch.dtype | None,
    emulated: bool,
) -> Quantized:
    """Quantise dy [M, N]: `row_major` its rows for dx, `transposed` its columns for dw.

    fold_cols, fold_rows: `fold` of w's and x's `Columns`, None where that is.
    """
    return _quantize(
        dy, recipe, history, recipe.backward_dtype(device.formats(dy.device)),
        row_major=row_major, transposed=transposed, fold_cols=fold_cols, fold_rows=fold_rows,
        sums_dtype=sums_dtype, emulated=emulated,
    )  # fmt: skip


class Columns(NamedTuple):
    """What backward needs of x or w: its columns, and their scales or those for dy to take over."""

    data_t: Tensor  # fp8, K-major for its GEMM in backward
    scale_inv_t: Tensor
    fold: Tensor | None  # f32, one per column of `data_t`


def columns(q: Quantized) -> Columns:
    """Return the columns of x or w, quantised with `transposed=True`."""
    return Columns(q.data_t, q.scale_inv_t, q.scale_inv if q.scaling_t is None else None)


def columns_of_x(x: Tensor, scale_inv: Tensor, recipe: Recipe) -> Columns:
    """Quantise the columns of x [M, K] under the scale of its rows, in plain PyTorch."""
    scale, dtype = scale_inv[:1].reciprocal(), recipe.forward_dtype(device.formats(x.device))
    return Columns(emulate.cast_columns(x, scale, dtype), scale_inv, None)


def histories_of_w(
    w: Tensor, recipe: Recipe, history: History | None
) -> tuple[History | None, History | None]:
    """Return a history for w in forward, and one for the same scale in backward."""
    if history is not None:
        return history, history.kept()
    if not isinstance(recipe, DynamicScaling):
        return None, None  # quantised as if for the first time: its columns have other scales
    fresh = History(w.new_zeros(3, dtype=torch.float32), record=True)  # of one amax
    return fresh, fresh._replace(record=False)


def columns_of_w(w: Tensor, recipe: Recipe, history: History | None, *, emulated: bool) -> Columns:
    """Quantise the columns of w [N, K] alone."""
    if keeps_x(recipe):
        return columns(_columns_under_one_scale(w, recipe, emulated))
    return columns(
        _quantize_forward(w, recipe, history, square=True, row_major=False, emulated=emulated)
    )


def grad_weight_in_high_precision(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `dy.T @ x`, [N, K] in `dtype`, of the factors as they are, whatever autocast says."""
    kind = dy.device.type
    factors = torch.promote_types(dy.dtype, x.dtype)
    wide = dtype == torch.float32 != factors  # a 16-bit product would round what is wanted in f32
    if wide and kind != "cuda":
        factors = dtype
    # autocast raises for meta
    plain = contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
    with plain:
        dy_t, x = dy.to(factors).t(), x.to(factors)
        if wide and kind == "cuda":
            return torch.mm(dy_t, x, out_dtype=dtype)
        return (dy_t @ x).to(dtype)


def _columns_under_one_scale(w: Tensor, recipe: Recipe, emulated: bool) -> Quantized:
    return ops.quantize_tensorwise(
        w, recipe.forward_dtype(device.formats(w.device)), row_major=False,
        power_of_two=recipe.power_of_two_scales, emulated=emulated,
    )  # fmt: skip


def _quantize_forward(
    t: Tensor, recipe: Recipe, history: History | None, **options: Any
) -> Quantized:
    folded = isinstance(recipe, RowwiseScaling) and recipe.folded
    dtype = recipe.forward_dtype(device.formats(t.device))
    return _quantize(t, recipe, history, dtype, folded=folded, **options)


def _quantize(
    t: Tensor,
    recipe: Recipe,
    history: History | None,
    dtype: torch.dtype,
    *,
    square: bool = False,
    folded: bool = False,
    fold_cols: Tensor | None = None,
    fold_rows: Tensor | None = None,
    **options: Any,
) -> Quantized:
    options["power_of_two"] = recipe.power_of_two_scales
    if isinstance(recipe, BlockScaling):
        return ops.quantize_blockwise(t, dtype, square=square, **options)
    if isinstance(recipe, RowwiseScaling):
        return ops.quantize_rowwise(
            t, dtype, folded=folded, fold_cols=fold_cols, fold_rows=fold_rows, **options
        )
    if history is not None:
        if isinstance(recipe, DelayedScaling):
            options["margin"] = recipe.margin
            options["most_recent"] = recipe.amax_compute_algo == "most_recent"
        return ops.quantize_delayed(t, dtype, history.amaxes, record=history.record, **options)
    assert not isinstance(recipe, DelayedScaling)  # `linear` saw to a history
    # A compiler could take the amax where it makes `t`. Measured on an H200, on four Llama-8B-like
    # blocks: quantise takes 1.1 ms less, everything else 0.7 to 1.1 more, of 52. With
    # `recompute_weight` all takes 4 ms more: the amax of dy, the columns of x and what makes both
    # become one slow kernel.
    return ops.quantize_tensorwise(t, dtype, **options)
