"""State: the amax histories of delayed scaling, all that changes from step to step.

A layer has three roles, x, w and dy, and for each a ring of the last H amaxes. One f32 tensor
[3, H + 2] holds them on the layer's device; `ops.quantize_delayed` says what a row is.

**What is recorded.** Each quantise of a role is an entry of its own: every micro-batch, every call
of a layer in a step. The window is the last H recorded ones. A layer that does not run is not
rolled; an amax of zero, a non-finite one and an empty tensor do not enter. x and w are recorded in
a forward whose gradients are wanted: grad mode is on and x, w or the bias requires one, whatever
`training` says. So `no_grad` and `inference_mode` change nothing. dy is recorded in every backward
that needs it in FP8: for x or w.
A weight in `reuse_weights` is recorded where it is quantised: once.

**Recomputation** (`torch.utils.checkpoint`, `use_reentrant=False`) records nothing and takes the
scales of the first pass, so that gradients have the bits of a run without checkpointing. The calls
of a region keep what their scales came from, in order, as long as the region's graph lives; when it
runs again they are taken in this order. That holds for nested regions, for a layer in several
regions, and for several micro-batches in flight. Outside of a region nothing is kept.

Limits:
- With `use_reentrant=True` the first pass runs without gradients and looks like an evaluation: it
  records nothing, the recomputation does. Bits are those of a run without checkpointing as long as
  nothing else records for the layer in between. If micro-batches overlap, a recomputation may take
  newer scales than its first pass; several recomputations of a layer in one backward are refused.
- `torch.compile` leaves a region out of its graphs, in eager mode, and refuses it with
  `fullgraph=True`; unless `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint` is
  set, which this cannot be used with. What was compiled outside of a region and is then called
  inside of one, in eager mode, records once more in the recomputation.
- What is compiled must run its backward before its next forward: PyTorch refuses a backward whose
  saved history has changed since. Within one graph a layer may run several times.
- Ranks of a distributed run have histories of their own until `reduce_amaxes` is called; but DDP
  gives them those of rank 0 at each forward, as all buffers, unless `broadcast_buffers=False`.
- `torch.cuda.make_graphed_callables` warms up with gradients that nobody has set, and their amaxes
  enter: set `fp8_state` to zero after it.
- What raises after its quantise has been recorded.
- Calls of one layer at the same time, by several threads or streams, may lose an entry.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.utils import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from .recipe import DelayedScaling, Recipe, resolve


class History(NamedTuple):
    """The amaxes that give one role its scale in one call, and whether its own enters."""

    amaxes: Tensor  # f32 [H + 2]
    record: bool

    def kept(self) -> "History":
        """Return the history as it is now, for the same scale later."""
        return History(self.amaxes.clone(), False) if self.record else self


class Histories(NamedTuple):
    """The histories of one call."""

    amaxes: Tensor  # f32 [3, H + 2], the layer's
    scaled_by: Tensor  # f32 [2 or 3, H + 2]: x and w have their scales from here; often `amaxes`
    record: bool  # the amaxes of x and w enter; that of dy does in any case

    @property
    def x(self) -> History:
        return History(self.scaled_by[0], self.record)

    @property
    def w(self) -> History:
        return History(self.scaled_by[1], self.record)

    @property
    def dy(self) -> History:
        return History(self.amaxes[2], True)


class DelayedState:
    """The amax histories of one layer, for `fp8lt.linear(..., recipe="delayed", state=...)`.

    One per layer, kept from step to step. `fp8lt.Linear` has its own.

    Args:
        recipe: "delayed" or a `DelayedScaling`, for the length of its history.
        device: that of the layer's tensors.

    Attributes:
        amaxes: f32 [3, H + 2], the rows of x, w and dy. Save it, or copy into it, as a tensor.

    Example:
        >>> state = fp8lt.DelayedState()
        >>> x, w = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
        >>> fp8lt.linear(x, w, recipe="delayed", state=state).sum().backward()
        >>> state.amaxes[:, 0]
        tensor([1., 1., 1.])
    """

    def __init__(
        self, recipe: str | Recipe = "delayed", device: torch.device | str | None = None
    ) -> None:
        recipe = resolve(recipe)
        if not isinstance(recipe, DelayedScaling):
            raise ValueError(f"recipe: want 'delayed' or a DelayedScaling, got {recipe.name!r}")
        self.amaxes = zeros(recipe, device)

    @classmethod
    def of(cls, amaxes: Tensor) -> "DelayedState":
        """Return the state that is held in a tensor, without a copy of it."""
        state = cls.__new__(cls)
        state.amaxes = amaxes
        return state

    def history_of_w(self) -> History:
        """Return what a weight is scaled by that is quantised for several calls."""
        record = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return History(self.amaxes[1], record)

    def histories(self, wanted: bool, w_quantized: Any = None) -> tuple[Histories, Any]:
        """Begin a call; return what its scales come from, and the quantised weight to use.

        wanted: gradients are. w_quantized: a weight quantised before, or None.
        """
        amaxes = self.amaxes
        live = Histories(amaxes, amaxes, wanted)
        if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true in all threads
            _in_a_graph["delayed"] = True
            if _traced_inside_a_region():
                raise RuntimeError(
                    "fp8lt: recipe 'delayed' cannot be compiled inside of a checkpointed region"
                )
            return live, w_quantized
        *first, again = _running()
        if again is not None:
            call = _next_call(again, amaxes)
        elif first:
            call = _Call(amaxes, amaxes[:2].clone(), w_quantized)
        for region in first:
            _calls.setdefault(region, []).append(call)
        if again is not None:
            return Histories(amaxes, call.scaled_by, False), call.w_quantized
        if wanted:
            _refuse_a_second_recomputation(amaxes)
        return live, w_quantized


def zeros(recipe: DelayedScaling, device: torch.device | str | None = None) -> Tensor:
    """Return the state of a layer for which nothing was recorded."""
    with torch.inference_mode(False):  # of an inference tensor no training could change anything
        return torch.zeros(3, recipe.amax_history_len + 2, dtype=torch.float32, device=device)


def resized(amaxes: Tensor, length: int) -> Tensor:
    """Return a state [3, H + 2] with histories of `length`, of their most recent entries."""
    if amaxes.dim() != 2 or amaxes.shape[0] != 3 or amaxes.shape[1] < 3:
        raise ValueError(f"want the state of a layer, [3, H + 2], got {list(amaxes.shape)}")
    held = amaxes.shape[1] - 2
    position = amaxes[:, held]
    # On the device of what was saved, a CPU mostly; a state on meta holds nothing to check.
    if not amaxes.is_meta and not bool(
        ((position >= 0) & (position < held) & (position == position.floor())).all()
        & (amaxes.isfinite() & (amaxes >= 0)).all()
    ):
        raise ValueError(
            "want amaxes that are finite and not negative, and positions in 0 ... H - 1"
        )
    if held == length:
        return amaxes
    ring, position, recorded = amaxes.split((held, 1, 1), 1)
    oldest_first = (position + torch.arange(held, device=amaxes.device)) % held
    # A negative number of zeros in front takes the oldest away.
    ring = F.pad(ring.gather(1, oldest_first.long()), (length - held, 0))
    return torch.cat([ring, torch.zeros_like(position), recorded], 1)


# ---------------------------------------------------------------------------------- recomputation


class _Call(NamedTuple):
    """What a call in a checkpointed region needs to give the same bits again."""

    amaxes: Tensor  # whose call it was
    scaled_by: Tensor  # f32 [2, H + 2], the rows of x and w before it
    w_quantized: Any


# Of a region's first pass: its calls in order, until its graph is gone.
_calls: "weakref.WeakKeyDictionary[Any, list[_Call]]" = weakref.WeakKeyDictionary()
# Of each recomputation of a region: how many calls it has made.
_repeated: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
# The backward pass in which a recomputation recorded last.
_recorded_in = WeakTensorKeyDictionary()


# torch.compile must leave a checkpointed region out of its graphs: they would recompute a quantise
# from the state after it, silently. Changing an object from outside is what it refuses in one.
_in_a_graph = {"delayed": True}


def _traced_inside_a_region() -> bool:
    return _running() != [None]


_traced_inside_a_region._dynamo_marked_constant = True  # type: ignore[attr-defined] # see ops


class _Recomputation(NamedTuple):
    region: Any
    run: Callable  # an object for each time that it runs


def _running() -> list[Any]:
    """Return the regions that run for the first time, innermost first, then a recomputation.

    The recomputation, or None, is the innermost: what is around it was not there in the first pass.
    PyTorch tells of them by the hooks that take what autograd saves.
    """
    autograd, stack = torch._C._autograd, []
    first: list[Any] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    for hooks in reversed(stack):
        autograd._push_saved_tensors_default_hooks(*hooks)
    for pack, _ in stack:
        region = _region(pack)
        if isinstance(region, _Recomputation):
            return [*first, region]
        if region is not None:
            first.append(region)
    return [*first, None]


def _region(hook: Callable) -> Any:
    """Return the region or `_Recomputation` that a hook is of; None if it is somebody else's."""
    hook_itself = inspect.unwrap(hook)
    if getattr(hook_itself, "__module__", None) != checkpoint.__name__:
        return None
    for cell in getattr(hook_itself, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, checkpoint._CheckpointFrame):
            return held
        # A recomputation does not keep its region alive.
        if isinstance(held, weakref.ref) and isinstance(held(), checkpoint._CheckpointFrame):
            return _Recomputation(held(), hook)
    raise RuntimeError(
        "fp8lt: recipe 'delayed' does not know how this release of PyTorch checkpoints "
        "activations, so it cannot tell a first pass from a recomputation"
    )


def _next_call(again: _Recomputation, amaxes: Tensor) -> _Call:
    calls, index = _calls.get(again.region, []), _repeated.get(again.run, 0)
    _repeated[again.run] = index + 1
    if index >= len(calls) or calls[index].amaxes is not amaxes:
        raise RuntimeError(
            "fp8lt: a checkpointed region called other layers of recipe 'delayed' in its "
            "recomputation than in its first pass, so their scales are not known"
        )
    return calls[index]


def _refuse_a_second_recomputation(amaxes: Tensor) -> None:
    task = torch._C._current_graph_task_id()
    if task == -1:  # not inside of a backward pass
        return
    if _recorded_in.get(amaxes) == task:
        raise RuntimeError(
            "fp8lt: backward runs the forward of a layer of recipe 'delayed' several times, as "
            "torch.utils.checkpoint does with use_reentrant=True where a layer is called several "
            "times; the scales of their first passes are not known: pass use_reentrant=False"
        )
    _recorded_in[amaxes] = task


@torch.no_grad()
def reduce_over_ranks(states: list[Tensor], group: Any = None) -> None:
    """Give each entry of the rings the largest value that it has on a rank: in one reduction.

    Entries of different ranks belong together by their age. A rank without a history gets one.
    """
    lengths: dict[int, list[Tensor]] = {}
    for state in states:
        lengths.setdefault(state.shape[1], []).append(state)
    aged = [_aged(torch.stack(some)) for some in lengths.values()]
    flat = torch.cat([t.flatten() for t in aged])
    distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
    parts = flat.split([t.numel() for t in aged])
    for some, old, part in zip(lengths.values(), aged, parts, strict=True):
        torch._foreach_copy_(some, list(part.view_as(old).unbind()))


def _aged(states: Tensor) -> Tensor:
    """Return states [..., H + 2] with the oldest entry first, so that the next takes its place."""
    rings, positions, recorded = states.split((states.shape[-1] - 2, 1, 1), -1)
    length = rings.shape[-1]
    order = (torch.arange(length, device=rings.device) + positions.long()) % length
    return torch.cat([rings.gather(-1, order), torch.zeros_like(positions), recorded], -1)
