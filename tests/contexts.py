"""What the tests of `fp8_autocast` share: a small model, plain and converted, and its steps."""

import copy
from collections.abc import Callable

import torch
from cases import randn
from torch import Tensor, nn

import fp8lt

CPU = torch.device("cpu")


def model(on: torch.device = CPU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 40)).to(on)


def converted(plain: nn.Module, name: str = "tensorwise") -> nn.Module:
    same = fp8lt.convert_to_float8_training(copy.deepcopy(plain))
    for module in same.modules():
        if isinstance(module, fp8lt.Linear):
            module.recipe = name  # type: ignore[assignment]
    return same


def steps(layers: nn.Module, run: Callable[[Tensor], Tensor], on: torch.device) -> list[Tensor]:
    """Return the result of each of three steps, and its gradients."""
    results = []
    for step in range(3):
        x = (randn(7, 48, on=on, dtype=torch.float32, seed=step) * (step + 1)).requires_grad_()
        layers.zero_grad()
        y = run(x)
        y.square().sum().backward()
        assert x.grad is not None
        results += [y.detach(), x.grad, *(p.grad for p in layers.parameters())]
    return results


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
