"""Ranks of a distributed run, each beside a twin that is not wrapped.

With a GPU for each they talk by NCCL. Else they share one, or have none: by gloo.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import error, randn
from delayed_models import same, states
from torch import Tensor, distributed, nn

GPUS = torch.cuda.device_count()
WORLD = 2 if GPUS == 2 else 3
SECONDS = 60  # for a job; measured at most 3
ROUNDING = 1e-6  # of a mean over the ranks, in f32; measured 2e-7


_on = torch.device("cpu")


def here() -> torch.device:
    """Return where the tensors of this process are: a rank's, where it was told to have them."""
    return _on


class Ranks:
    """Processes of one group. They run what a test sends them; a test that fails ends them."""

    def __init__(self, store: Path, on: torch.device) -> None:
        spawn = torch.multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            here, there = spawn.Pipe()
            args = (rank, there)
            self.pipes.append(here)
            self.processes.append(spawn.Process(target=_be_a_rank, args=args, daemon=True))
            self.processes[-1].start()
            there.close()  # it is the rank's: when that dies, `here` tells
        self.run(_join, str(store), on)

    def run(self, job: Callable[..., None], *args: Any) -> None:
        """Run `job(rank, *args)` in every rank; it is a function of this file."""
        waiting, end = list(self.pipes), time.monotonic() + SECONDS
        failures: list[str] = []
        for pipe in waiting:
            pipe.send((job, args))
        while waiting and not failures:
            ready = multiprocessing.connection.wait(waiting, max(0, end - time.monotonic()))
            waiting = [pipe for pipe in waiting if pipe not in ready]
            answers = [_answer(pipe) for pipe in ready] or [f"a rank still runs after {SECONDS} s"]
            failures += [answer for answer in answers if answer]
        if failures:
            self.end()
            pytest.fail(failures[0])

    def end(self) -> None:
        self.ended = True
        for process in self.processes:
            process.kill()
            process.join()

    ended = False


def _answer(pipe: Any) -> str:
    try:
        return pipe.recv()
    except EOFError:
        return "a rank died"


def _be_a_rank(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that crashes says where
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            job, args = pipe.recv()
            try:
                job(rank, *args)
            except BaseException:
                pipe.send(f"rank {rank}: {traceback.format_exc()}")
            else:
                pipe.send("")


def _join(rank: int, store: str, on: torch.device) -> None:
    global _on
    _on = on
    backend = "gloo"
    if on.type == "cuda" and GPUS >= WORLD:
        _on, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(_on)
    elif on.type == "cuda":
        _collectives_by_the_cpu()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=SECONDS / 2)  # for a rank that waits for another
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=limit
    )


_library = torch.library.Library("_c10d_functional", "IMPL")  # it lasts as long as this object


def _collectives_by_the_cpu() -> None:
    """Give DTensor collectives on a GPU that gloo can do.

    With those of PyTorch 2.11, `full_tensor` of CUDA tensors in a gloo group is a segmentation
    fault in `wait_tensor`.
    """
    functional = torch.ops._c10d_functional

    def by_the_cpu(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(t: Tensor, *args: Any) -> Tensor:
            return functional.wait_tensor(call(t.cpu(), *args)).to(t.device)

        return run

    for name in (
        "all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"
    ):  # fmt: skip
        _library.impl(name, by_the_cpu(getattr(functional, name).default), "CUDA")


Whole = Callable[[], "contextlib.AbstractContextManager[list[Tensor]]"]  # of a wrapped model


def train_beside_a_twin(
    wrapped: nn.Module,
    twin: nn.Module,
    optimizer: torch.optim.Optimizer,  # SGD, lr 1, of what is wrapped
    whole: Whole,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Check each step; every rank has data of its own, and as many rows as it likes."""
    rank = distributed.get_rank()
    for step in range(3):
        prepare()
        width = next(m.in_features for m in twin.modules() if isinstance(m, nn.Linear))
        x = randn(5 + rank, width, on=here(), dtype=torch.float32, seed=10 * step + rank)
        inputs = [(x * (1 + rank)).requires_grad_() for _ in range(2)]
        optimizer.zero_grad()
        twin.zero_grad()
        got, want = wrapped(inputs[0]), twin(inputs[1])
        assert torch.equal(got, want)
        dy = randn(*want.shape, on=here(), dtype=torch.float32, seed=100 * step + rank) / 10
        got.backward(dy)
        want.backward(dy)
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        optimizer.step()
        with torch.no_grad(), whole() as parameters:
            for p, q in zip(parameters, twin.parameters(), strict=True):
                distributed.all_reduce(q.grad)
                assert error(p, q - q.grad / WORLD) < ROUNDING
                q.copy_(p)
        assert same(states(wrapped), states(twin))
