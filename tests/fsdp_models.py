"""Layers whose weights are gathered in FP8, and how tests shard them."""

import contextlib
import copy
import itertools
from typing import Any

import torch
from ranks import WORLD, here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8lt

CONFIG = fp8lt.Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def layers_of(*sizes: int, bias: bool = True, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return layers whose weights will be gathered in FP8, and a twin that nothing shards."""
    torch.manual_seed(0)
    twin = nn.Sequential(*(nn.Linear(k, n, bias=bias) for k, n in itertools.pairwise(sizes)))
    twin.to(here())
    layers = copy.deepcopy(twin)
    fp8lt.convert_to_float8_training(twin)
    fp8lt.convert_to_float8_training(layers, config=CONFIG)
    return layers, twin


def shard(layers: nn.Module, reshard: bool = True, **options: Any) -> None:
    mesh = init_device_mesh(here().type, (WORLD,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **options)
    fully_shard(layers, mesh=mesh, **options)


def whole(layers: nn.Module) -> Any:
    return lambda: contextlib.nullcontext([p.full_tensor() for p in layers.parameters()])
