"""FP8 linear layer: three GEMMs, each on freshly quantised operands. Start reading here.

    y  = x  @ w.T + b   rows of x, rows of w            [M, K] @ [N, K].T
    dx = dy @ w         rows of dy, columns of w        [M, N] @ [K, N].T   (w_t)
    dw = dy.T @ x       columns of dy, columns of x     [N, M] @ [K, M].T   (dy_t, x_t)
    db = dy.sum(0)      from the unquantised dy, in f32, while it is quantised

Every GEMM is the K-major form, so each tensor is read once, into the layouts that its GEMMs need;
what shares a scale in them is the recipe's matter (`operands.py`). Forward keeps FP8 copies only
(x_t, w_t and their scales: a byte per element instead of two or four), and only those whose
gradient somebody wants. A weight is in memory anyway: a recipe may ask for it to be quantised once
more in backward instead (`recompute_weight`; a compiler then makes x_t there, too), and one recipe
computes dw from x itself.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import gradients, operands, ops
from .checks import check, check_quantized, check_state, refuse_forward_mode
from .main_grad import NO_MAIN_GRAD, MainGrad, in_place_of_dw, main_grad_of
from .recipe import Recipe, resolve
from .state import DelayedState, Histories, History


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str | Recipe = "tensorwise",
    out_dtype: torch.dtype | None = None,
    w_quantized: ops.Quantized | None = None,
    state: DelayedState | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return `y = x @ w.T + bias` with FP8 operands; differentiable once.

    Args:
        x: [..., K] bf16, f16 or f32, any strides; `...` may be nothing, or hold a 0.
        w: [N, K] bf16, f16 or f32; f32 master weights may meet bf16 activations.
        bias: [N] bf16, f16 or f32, or None. With a 16-bit result it is rounded to that dtype.
        recipe: "tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "rowwise_folded",
            "blockwise", or a recipe object (`DynamicScaling`, `DelayedScaling`, `RowwiseScaling`,
            `BlockScaling`).
        out_dtype: dtype of y; by default x's, or autocast's inside `torch.autocast`.
        w_quantized: `quantize_weight(w)` of this very `w`, for the same recipe, to save quantising
            it again; gradients still go to `w`. Nothing checks that it is up to date: see
            `reuse_weights`. Without the transposed copy, which needs one scale for all of `w`,
            backward makes it.
        state: for the recipe "delayed" alone: the amax histories of this layer, which change.
        main_grad: [N, K] f32, contiguous: backward adds dw to it, in the GEMM, and `w.grad` stays
            as it is. As in Megatron, a `w` with the attribute `grad_added_to_main_grad` has that
            set, and gets a gradient of its dtype for hooks that wait for one: not initialised, or
            zeros if its `zero_out_wgrad` is true.

    Returns:
        y: [..., N]. Gradients have the dtype of what they belong to: an f32 `w` gets an f32 `dw`,
        unrounded.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, as `F.linear` does; CUDA tensors
            where native FP8, or the recipe's scales, do not exist; `w_quantized` that does not fit
            `w` or the recipe; `main_grad` that does not fit `w`; a second or a forward-mode
            derivative.
        TypeError: `x`, `w` or `bias` is not a tensor, `recipe` neither a name nor a recipe.
        ValueError: no recipe has that name; `state` is missing or is not for this recipe.

    Example:
        >>> x, w = torch.ones(2, 3), torch.eye(4, 3)
        >>> fp8lt.linear(x, w, torch.tensor([0., 1., 2., 3.]))
        tensor([[1.0000, 2.0000, 3.0000, 3.0000],
                [1.0000, 2.0000, 3.0000, 3.0000]])
    """
    check(x, w, bias, out_dtype)
    recipe = resolve(recipe)
    if w_quantized is not None:
        check_quantized(w_quantized, x, w, recipe)
    check_state(state, w, recipe)
    return run(x, w, bias, w_quantized, recipe, out_dtype, state, main_grad)


def run(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_quantized: ops.Quantized | None,
    recipe: Recipe,
    out_dtype: torch.dtype | None = None,
    state: DelayedState | None = None,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Do what `linear` does, with arguments that are known to fit."""
    refuse_forward_mode(x, w, bias)
    sums = NO_MAIN_GRAD if main_grad is None else main_grad_of(w, main_grad)
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # autocast raises for meta
        x = x.to(torch.get_autocast_dtype(kind))
    backend = ops.backend(x.device, recipe.emulate, recipe.name)
    out_dtype = out_dtype or x.dtype
    histories = None
    if state is not None:
        histories, w_quantized = state.histories(_wants_gradients(x, w, bias), w_quantized)
    native = not (backend.emulated or backend.scaled_mm)  # Dynamo cannot compare the tuples
    if native and x.is_cuda and not torch.compiler.is_compiling():
        return ops.linear(x, w, bias, w_quantized, recipe, out_dtype, histories, sums)
    args = (x, w, bias, w_quantized, recipe, out_dtype, backend, histories)
    if not _wants_gradients(x, w, bias):
        of_x, of_w = (histories.x, histories.w) if histories else (None, None)
        return _forward(*args[:-1], of_x, of_w, need_x=False, need_w=False)[0]
    y: Tensor = _Linear.apply(*args, sums)
    return y


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def quantize_weight(
    w: Tensor,
    *,
    recipe: str | Recipe = "tensorwise",
    transposed: bool = True,
    state: DelayedState | None = None,
) -> ops.Quantized:
    """Quantise `w` [N, K] for several calls of `linear` with the same recipe.

    `transposed=False` saves a byte per element: where no gradient of `x` is wanted or, with one
    scale for all of `w`, where backward shall make the transposed copy. `state`, for the
    recipe "delayed": that of the layer. The amax of `w` is recorded here, and in none of the calls;
    not in `no_grad`, nor inside of a backward pass.

    Example:
        >>> w = torch.ones(1, 3)
        >>> once = fp8lt.quantize_weight(w)
        >>> [round(fp8lt.linear(x, w, w_quantized=once).item(), 3) for x in torch.eye(3)]
        [1.0, 1.0, 1.0]
    """
    recipe = resolve(recipe)
    check_state(state, w, recipe)
    emulated = ops.backend(w.device, recipe.emulate, recipe.name).emulated
    history = None if state is None else state.history_of_w()
    with torch.no_grad():
        return operands.quantize_w(w, recipe, history, transposed=transposed, emulated=emulated)


def _forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_quantized: ops.Quantized | None,
    recipe: Recipe,
    out_dtype: torch.dtype,
    backend: ops.Backend,
    x_history: History | None,
    w_history: History | None,
    *,
    need_x: bool,
    need_w: bool,
) -> tuple[Tensor, ops.Quantized, ops.Quantized]:
    """Return y and the FP8 x and w, transposed where a gradient will need that."""
    *lead, k = x.shape
    x = x.reshape(math.prod(lead), k)
    emulated = backend.emulated
    xq = operands.quantize_x(x, recipe, x_history, transposed=need_w, emulated=emulated)
    wq = w_quantized or operands.quantize_w(
        w, recipe, w_history, transposed=need_x, emulated=emulated
    )
    y = ops.gemm_nt(
        xq.data, wq.data, xq.scale_inv, wq.scale_inv, x.shape[0], w.shape[0],
        bias=bias, out_dtype=out_dtype, scaling=operands.scalings(recipe).output,
        fast_accum=recipe.fast_accum_output, emulated=emulated, scaled_mm=backend.scaled_mm,
    )  # fmt: skip
    if len(lead) != 1:
        # A view would forbid to change the result in place (nn.ReLU(inplace=True), y += residual).
        y = torch.ops.aten._unsafe_view(y, (*lead, w.shape[0]))
    return y, xq, wq


class _Refuse(torch.autograd.Function):
    """A gradient, unchanged, that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        raise RuntimeError(
            "fp8lt.linear cannot be differentiated twice: backward has only FP8 copies of x and w. "
            "Run the layers of a gradient penalty in high precision (fp8lt.disable_fp8, or "
            "fp8lt.fp8_autocast(enabled=False))"
        )


def _differentiable_once(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Make a second derivative an error, also where `dy` itself is a constant.

    torch's own decorator lets that case pass: the second derivative would silently lack the part
    through x and w.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, dy: Tensor | None) -> tuple:
        with torch.no_grad():
            gradients = backward(ctx, dy)
        if not torch.is_grad_enabled():  # it is with create_graph=True only
            return gradients
        anchor = torch.empty(0, requires_grad=True)
        return tuple(g if g is None else _Refuse.apply(g, anchor) for g in gradients)

    return wrapped


class _Linear(torch.autograd.Function):
    """Plumbing: what backward needs rides on `ctx`, because it may run on another thread.

    `csrc/linear.cpp` is its twin for native eager CUDA.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., K]; reshaped in here, where that costs no autograd nodes
        w: Tensor,  # [N, K]
        bias: Tensor | None,
        w_quantized: ops.Quantized | None,
        recipe: Recipe,
        out_dtype: torch.dtype,
        backend: ops.Backend,
        histories: Histories | None,
        main_grad: MainGrad,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        need_x, need_w, *_ = ctx.needs_input_grad
        ctx.recompute_w = need_x and recipe.recompute_weight and w_quantized is None
        ctx.transpose_w = need_x and w_quantized is not None and not w_quantized.data_t.numel()
        ctx.recompute_x = need_w and operands.recomputes_x(recipe)
        ctx.high_precision_dw = need_w and operands.keeps_x(recipe)
        keep_x = ctx.recompute_x or ctx.high_precision_dw
        x_history, w_history = (histories.x, histories.w) if histories else (None, None)
        ctx.history_of_w = None
        if ctx.recompute_w:
            w_history, ctx.history_of_w = operands.histories_of_w(w, recipe, w_history)
        y, xq, wq = _forward(
            x, w, bias, w_quantized, recipe, out_dtype, backend, x_history, w_history,
            need_x=need_x and not ctx.recompute_w, need_w=need_w and not keep_x,
        )  # fmt: skip
        ctx.save_for_backward(
            *_saved(need_w, x if keep_x else None, xq, ctx.recompute_x),
            *_saved(need_x, w if ctx.recompute_w else None, _rows(wq) if ctx.transpose_w else wq),
        )
        ctx.recipe, ctx.backend, ctx.x_shape = recipe, backend, x.shape
        ctx.main_grad = main_grad
        ctx.history_of_dy = histories.dy if histories else None
        ctx.dtypes = gradients.Dtypes(x.dtype, w.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # what y went into has no gradient for it
            return (None,) * 9
        x, x_t, x_scale_inv, x_fold, w, w_t, w_scale_inv, w_fold = ctx.saved_tensors
        need_x, need_w, need_bias, *_ = ctx.needs_input_grad
        recipe, dtypes = ctx.recipe, ctx.dtypes
        emulated = ctx.backend.emulated
        *lead, k = ctx.x_shape
        m, n = math.prod(lead), dy.shape[-1]
        dy = dy.reshape(m, n)
        dx = dw = db = None
        if need_x and ctx.recompute_w:
            w_t, w_scale_inv, w_fold = operands.columns_of_w(
                w, recipe, ctx.history_of_w, emulated=emulated
            )
        if need_x and ctx.transpose_w:
            w_t = ops.transposed(w_t, emulated=emulated)
        if need_w and ctx.recompute_x:
            x_t, _, _ = operands.columns_of_x(x.reshape(m, k), x_scale_inv, recipe)
        x_columns = w_columns = None
        if need_w and not ctx.high_precision_dw:
            x_columns = operands.Columns(x_t, x_scale_inv, x_fold)
        if need_x:
            w_columns = operands.Columns(w_t, w_scale_inv, w_fold)
        total, _ = ctx.main_grad
        if need_x or x_columns is not None:
            given = gradients.Backward(
                dy, x_columns, w_columns, k, recipe, ctx.history_of_dy, dtypes, need_bias
            )
            dx, dw, db = gradients.of(given, ctx.backend, total)
            dx = None if dx is None else dx.view(ctx.x_shape)
        elif need_bias:
            db = dy.sum(0, dtype=torch.float32).to(dtypes.bias)
        if need_w and ctx.high_precision_dw:
            dtype = dtypes.w if total is None else torch.float32
            dw = operands.grad_weight_in_high_precision(dy, x.reshape(m, k), dtype)
            if total is not None:
                total += dw
        if need_w and total is not None:
            dw = in_place_of_dw(ctx.main_grad, dtypes.w)
        return dx, dw, db, None, None, None, None, None, None


def _rows(q: ops.Quantized) -> ops.Quantized:
    """Return a tensor with its rows in place of columns that there are not."""
    return q._replace(data_t=q.data)


def _saved(
    needed: bool, itself: Tensor | None, q: ops.Quantized, with_scale: bool = False
) -> tuple[Tensor | None, ...]:
    """Return what backward gets of x or w: itself, or its columns; nothing if not needed."""
    if needed and itself is None:
        return None, *operands.columns(q)
    return itself, None, q.scale_inv if needed and with_scale else None, None
