"""What the tests of the state of delayed scaling share: a small model and its steps."""

import torch
from cases import randn
from torch import Tensor, nn

import fp8lt
from fp8lt import DelayedScaling

CPU = torch.device("cpu")
RECIPE = DelayedScaling(amax_history_len=3)


def model(recipe: DelayedScaling = RECIPE, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    return fp8lt.convert_to_float8_training(layers, config=recipe)


def batch(step: int) -> Tensor:
    return randn(8, 32, on=CPU, dtype=torch.float32, seed=step) * (1 + step % 3)


def train(layers: nn.Sequential, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (layers(batch(step)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def states(layers: nn.Module) -> list[Tensor]:
    return list(fp8lt.delayed_state_dict(layers).values())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def used(recipe: DelayedScaling = RECIPE) -> nn.Sequential:
    """Return a model that has run four steps."""
    layers = model(recipe)
    train(layers, torch.optim.SGD(layers.parameters(), lr=0.1), range(4))
    return layers
