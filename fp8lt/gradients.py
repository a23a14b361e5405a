"""Gradients of the layer, from dy and the columns of x and w that forward kept.

    dx = dy @ w         rows of dy, columns of w        [M, N] @ [K, N].T
    dw = dy.T @ x       columns of dy, columns of x     [N, M] @ [K, M].T
    db = dy.sum(0)      from the unquantised dy

That is a quantise and two GEMMs. In a compiler's graph each is a call from Python and a check of
every result, which a host has no time for where GEMMs are short: there one operator,
`fp8lt::linear_backward`, does all three. While it runs, dy and the columns of both are alive, which
three calls would let go one by one: where GEMMs are long, they stay three.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import device, operands, ops, schemas
from .operands import Columns
from .operators import define
from .recipe import NAMES, DelayedScaling, Recipe, resolve
from .state import History

# N * K up to which GEMMs count as short: 4096 x 4096. M has no say, as no graph shall depend on it.
SHORT = 1 << 24


class Dtypes(NamedTuple):
    """What the gradients have: the dtypes of what they belong to."""

    x: torch.dtype
    w: torch.dtype
    bias: torch.dtype | None


class Backward(NamedTuple):
    """What gradients are made of: dx is wanted if there are columns of w, dw if some of x."""

    dy: Tensor  # [M, N]
    x: Columns | None
    w: Columns | None
    k: int  # columns of x and w before they were padded
    recipe: Recipe
    history: History | None  # that of dy, for recipe "delayed"
    dtypes: Dtypes
    need_bias: bool


class Gradients(NamedTuple):
    """Those that were asked for."""

    dx: Tensor | None = None  # [M, K]
    dw: Tensor | None = None  # [N, K]
    db: Tensor | None = None  # [N]


def of(given: Backward, backend: ops.Backend, main_grad: Tensor | None) -> Gradients:
    """Return the gradients. main_grad: what dw is added to, in place of being returned."""
    native = not (backend.emulated or backend.scaled_mm)
    short = given.dy.shape[1] * given.k <= SHORT
    if torch.compiler.is_compiling() and native and short and main_grad is None:
        return _in_one_operator(given)
    return _in_parts(given, backend, main_grad)


def _in_parts(
    given: Backward, backend: ops.Backend = ops.OPERATORS, main_grad: Tensor | None = None
) -> Gradients:
    dy, x, w, k, recipe, history, dtypes, need_bias = given
    m, n = dy.shape
    scalings = operands.scalings(recipe)
    how: dict[str, Any] = {"emulated": backend.emulated, "scaled_mm": backend.scaled_mm}
    dyq = operands.quantize_dy(
        dy, recipe, history, row_major=w is not None, transposed=x is not None,
        fold_cols=w.fold if w else None, fold_rows=x.fold if x else None,
        sums_dtype=dtypes.bias if need_bias else None, emulated=backend.emulated,
    )  # fmt: skip
    dx = dw = None
    if w is not None:
        dx = ops.gemm_nt(
            dyq.data, w.data_t, dyq.scale_inv, w.scale_inv_t, m, k, out_dtype=dtypes.x,
            scaling=scalings.grad_input, fast_accum=recipe.fast_accum_grad_input, **how,
        )  # fmt: skip
    if x is not None:
        factors = (dyq.data_t, x.data_t, dyq.scale_inv_t, x.scale_inv_t)
        how |= {"scaling": scalings.grad_weight, "fast_accum": recipe.fast_accum_grad_weight}
        if main_grad is None:
            dw = ops.gemm_nt(*factors, n, k, out_dtype=dtypes.w, **how)
        else:
            ops.gemm_nt_add(*factors, main_grad, **how)
    return Gradients(dx, dw, dyq.sums if need_bias else None)


def _in_one_operator(given: Backward) -> Gradients:
    dy, x, w, k, recipe, history, dtypes, need_bias = given
    columns = (*(x or _NO_COLUMNS), *(w or _NO_COLUMNS))
    options = (
        k, dtypes.x, dtypes.w, dtypes.bias if need_bias else None,
        recipe.backward_dtype(device.formats(dy.device)), recipe.fast_accum_grad_input,
        recipe.fast_accum_grad_weight, recipe.power_of_two_scales,
    )  # fmt: skip
    if isinstance(recipe, DelayedScaling) and history is not None:
        most_recent = recipe.amax_compute_algo == "most_recent"
        dx, dw, db = torch.ops.fp8lt.linear_backward_delayed.default(
            dy, *columns, history.amaxes, recipe.margin, most_recent, *options
        )
    else:
        kind = NAMES.index(recipe.name)
        dx, dw, db = torch.ops.fp8lt.linear_backward.default(dy, *columns, kind, *options)
    return Gradients(dx if w else None, dw if x else None, db if need_bias else None)


_NO_COLUMNS = (None, None, None)

# ---------------------------------------------------------------------------------- the operators

_OPERANDS = (
    "Tensor dy, Tensor? x_t, Tensor? x_scale_inv, Tensor? x_fold,"
    " Tensor? w_t, Tensor? w_scale_inv, Tensor? w_fold"
)
_OPTIONS = (
    "SymInt k, ScalarType x_dtype, ScalarType w_dtype, ScalarType? bias_dtype,"
    " ScalarType backward_fp8, bool fast_grad_input, bool fast_grad_weight, bool power_of_two"
)
_RETURNS = "(Tensor dx, Tensor dw, Tensor db)"  # what was not asked for has no elements


def _linear_backward(*args: Any) -> tuple[Tensor, ...]:
    *given, kind = args[:8]
    if not 0 <= kind < len(NAMES) or NAMES[kind] == "delayed":
        raise RuntimeError(f"fp8lt: want recipe an index of {NAMES}, not delayed, got {kind}")
    return _computed(given, resolve(NAMES[kind]), None, *args[8:])


def _linear_backward_delayed(*args: Any) -> tuple[Tensor, ...]:
    *given, state, margin, most_recent = args[:10]
    recipe = DelayedScaling(
        margin=margin, amax_compute_algo="most_recent" if most_recent else "max"
    )
    return _computed(given, recipe, History(state, True), *args[10:])


def _computed(
    given: list[Any],
    recipe: Recipe,
    history: History | None,
    k: int,
    x_dtype: torch.dtype,
    w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    backward_fp8: torch.dtype,
    fast_grad_input: bool,
    fast_grad_weight: bool,
    power_of_two: bool,
) -> tuple[Tensor, ...]:
    dy, *columns = given
    recipe = dataclasses.replace(
        recipe, fp8_format="hybrid" if backward_fp8 in schemas.E5M2 else "e4m3",
        fast_accum_grad_input=fast_grad_input, fast_accum_grad_weight=fast_grad_weight,
        power_of_two_scales=power_of_two,
    )  # fmt: skip
    x, w = (None if c[0] is None else Columns(*c) for c in (columns[:3], columns[3:]))
    dtypes = Dtypes(x_dtype, w_dtype, bias_dtype)
    need_bias = bias_dtype is not None
    found = _in_parts(Backward(dy, x, w, k, recipe, history, dtypes, need_bias))
    return tuple(dy.new_empty(0) if g is None else g for g in found)


def _check(
    dy: Tensor,
    x_t: Tensor | None,
    x_scale_inv: Tensor | None,
    x_fold: Tensor | None,
    w_t: Tensor | None,
    w_scale_inv: Tensor | None,
    *rest: Any,
) -> None:
    """Check what the operators that this is made of do not."""
    *_, backward_fp8, _fast_grad_input, _fast_grad_weight, _power_of_two = rest
    if dy.dim() != 2:
        raise RuntimeError(f"fp8lt: want dy [M, N], got {list(dy.shape)}")
    if backward_fp8 not in schemas.FP8_DTYPES:
        raise RuntimeError(
            f"fp8lt: want backward_fp8 float8_e4m3fn or float8_e5m2, got {backward_fp8}"
        )
    if (x_t is None) != (x_scale_inv is None) or (w_t is None) != (w_scale_inv is None):
        raise RuntimeError(
            "fp8lt: want x_t and x_scale_inv, and w_t and w_scale_inv, both or neither"
        )


# Fake tensors go the same way as a CPU's: what it is made of has fakes.
define(
    f"linear_backward({_OPERANDS}, int recipe, {_OPTIONS}) -> {_RETURNS}",
    _check, _linear_backward, _linear_backward,
)  # fmt: skip
define(
    f"linear_backward_delayed({_OPERANDS}, Tensor(a!) state, int margin, bool most_recent,"
    f" {_OPTIONS}) -> {_RETURNS}",
    _check, _linear_backward_delayed, _linear_backward_delayed,
)  # fmt: skip
