"""How `train.py` uses the processes of `torchrun --nproc-per-node N tools/train.py --parallel WAY`.

    ddp     each rank has the whole model and its part of the batch; gradients are averaged
    fsdp2   the same, but each rank has its part of every weight: `fully_shard` gathers them in
            bf16, or in FP8 with --fp8-all-gather, block by block
    tp      each rank has its part of every block's weights, and the whole batch

A checkpoint (`torch.distributed.checkpoint`) can be read by another number of ranks, and by another
way. It is whole once its folder has its last name.
"""

import contextlib
import functools
import gc
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt import GPT
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WAYS = ("ddp", "fsdp2", "tp")
SHARDED_BATCH = ("ddp", "fsdp2")
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # whatever groups there are


class Parallel:
    """One rank's part of a run; of a run in one process all of it."""

    way: str | None = None
    rank, world = 0, 1
    fp8_all_gather = False  # of the model that is prepared
    gathered_bytes = 0  # by all-gathers so far, a rank's own part with the others'

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def facts(self, gathered: float) -> dict[str, Any]:
        """Return what the report says of it; `gathered`: bytes in a step."""
        return {
            "way": self.way,
            "ranks": self.world,
            "fp8_all_gather": self.fp8_all_gather,
            "gathered_bytes_per_step": gathered if self.way == "fsdp2" else None,
        }

    def prepare(self, model: nn.Module) -> None:
        """Shard a model that is converted and initialised, in place."""

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return what to call in training."""
        return model

    def mine(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of a batch."""
        return rows

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks of what each has of its rows."""
        return value

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the parameters for an optimizer, whose calls cannot mix DTensors and others."""
        kinds: dict[bool, list[nn.Parameter]] = {}
        for p in model.parameters():
            kinds.setdefault(isinstance(p, DTensor), []).append(p)
        return [{"params": some} for some in kinds.values()]

    def clip(self, model: nn.Module, most: float) -> Tensor:
        """Scale the gradient so that its norm, over all ranks and parameters, is at most that.

        Return the norm it had, [] f32.
        """
        groups = [group["params"] for group in self.groups(model)]
        norms = []
        for some in groups:
            norm = nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        total = torch.linalg.vector_norm(torch.stack(norms))
        for some in groups:
            nn.utils.clip_grads_with_norm_(some, most, total)
        return total

    def after_backward(self, model: nn.Module) -> None:
        """Do what has to be done with gradients before they are used."""

    def after_step(self, model: nn.Module) -> None:
        """Do what has to be done with weights before they are used."""


class DataParallel(Parallel):
    way = "ddp"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(device.type, (self.world,))

    def wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def mine(self, rows: Tensor) -> Tensor:
        return rows.tensor_split(self.world)[self.rank]

    def mean(self, value: Tensor) -> Tensor:
        value = value.clone()
        distributed.all_reduce(value)
        return value / self.world


class FullyShardedDataParallel(DataParallel):
    way = "fsdp2"

    def __init__(self, device: torch.device, fp8_all_gather: bool) -> None:
        super().__init__(device)
        self._wants_fp8 = fp8_all_gather

    def prepare(self, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        # Not of a bf16 model, beside which one in FP8 is compared.
        converted = any(isinstance(m, nn.Linear) and type(m) is not nn.Linear
                        for m in model.modules())  # fmt: skip
        self.fp8_all_gather = self._wants_fp8 and converted
        if self.fp8_all_gather:
            import fp8lt

            fp8lt.enable_fsdp_float8_all_gather(model.blocks)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, mp_policy=policy)
        fully_shard(model, mesh=self.mesh, mp_policy=policy)
        self.after_step(model)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def after_step(self, model: nn.Module) -> None:
        if self.fp8_all_gather:
            import fp8lt

            fp8lt.precompute_float8_dynamic_scale_for_fsdp(model)


class TensorParallel(DataParallel):
    way = "tp"

    def prepare(self, model: nn.Module) -> None:
        assert isinstance(model, GPT)
        plan = {
            **{name: ColwiseParallel() for name in ("qkv", "gate", "up")},
            **{name: RowwiseParallel() for name in ("out", "down")},
        }
        for block in model.blocks:
            parallelize_module(block, self.mesh, plan)

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def mine(self, rows: Tensor) -> Tensor:
        return rows

    def after_backward(self, model: nn.Module) -> None:
        # Every rank computes these gradients, not all in the same order: weights would drift apart.
        for p in model.parameters():
            if p.grad is not None and not isinstance(p, DTensor):
                distributed.all_reduce(p.grad)
                p.grad /= self.world


@contextlib.contextmanager
def started(way: str | None, device: str, fp8_all_gather: bool) -> Iterator[Parallel]:
    """Join the ranks that torchrun started, for as long as the `with` lasts."""
    if way is None:
        yield Parallel(torch.device(device))
        return
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    backend = "nccl" if where.type == "cuda" else "gloo"
    distributed.init_process_group(backend, device_id=where if where.type == "cuda" else None)
    try:
        if way == "fsdp2":
            sharded = FullyShardedDataParallel(where, fp8_all_gather)
            with counted_gathers(sharded):
                yield sharded
        else:
            yield (DataParallel if way == "ddp" else TensorParallel)(where)
    finally:
        gc.collect()  # what `fully_shard` left: the group's threads end with the last who knows it
        distributed.destroy_process_group()


@contextlib.contextmanager
def counted_gathers(parallel: Parallel) -> Iterator[None]:
    """Count the bytes that `fully_shard` gathers."""
    # It calls one of these, by PyTorch's version, as attributes of the module.
    names = [n for n in ("all_gather_into_tensor", "all_gather_single") if hasattr(distributed, n)]
    calls = {name: getattr(distributed, name) for name in names}

    def counting(call: Any, output: Tensor, *args: Any, **options: Any) -> Any:
        parallel.gathered_bytes += output.nbytes
        return call(output, *args, **options)

    for name, call in calls.items():
        setattr(distributed, name, functools.partial(counting, call))
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(distributed, name, call)


# ------------------------------------------------------------------------------------- checkpoints


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer, options=BY_NAME)
    return {"model": weights, "optimizer": moments, "histories": _histories(model)}


def _histories(model: nn.Module) -> dict[str, Tensor]:
    try:
        import fp8lt
    except ModuleNotFoundError:  # bf16 does not need it
        return {}
    return fp8lt.delayed_state_dict(model)


class Curves(NamedTuple):
    """What a run leaves behind of each of its steps."""

    train_losses: list[float]  # nats per byte
    grad_norms: list[float]  # of the whole gradient, before it is clipped


def save(folder: Path, curves: Curves, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write `folder`/step-N: on all ranks together."""
    step = len(curves.train_losses)
    part = folder / f"step-{step:08d}.part"
    main = not distributed.is_initialized() or distributed.get_rank() == 0
    if main:
        shutil.rmtree(part, ignore_errors=True)
    _wait()
    tensors = {name: torch.tensor(curve) for name, curve in curves._asdict().items()}
    state = {**_state(model, optimizer), **tensors}
    with _quietly():
        checkpoint.save(state, checkpoint_id=part, no_dist=not distributed.is_initialized())
    _wait()
    if main:
        whole = part.with_suffix("")
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
    _wait()


def _wait() -> None:
    if distributed.is_initialized():
        distributed.barrier()


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():  # that one process is told to save alone
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint in a folder."""
    found = [p for p in folder.glob("step-????????") if p.is_dir()]
    return max(found, default=None)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Curves:
    """Restore what `save` wrote there; return the curves until then."""
    step = int(path.name.removeprefix("step-"))
    state = {**_state(model, optimizer), **{name: torch.zeros(step) for name in Curves._fields}}
    with _quietly():
        checkpoint.load(state, checkpoint_id=path, no_dist=not distributed.is_initialized())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )  # fmt: skip
    if state["histories"]:
        import fp8lt

        fp8lt.load_delayed_state_dict(model, state["histories"])
    return Curves(*(state[name].tolist() for name in Curves._fields))
