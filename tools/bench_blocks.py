"""The model of the mode `model`, and its contenders: Llama-like blocks with their layers replaced.

Blocks without embedding, head and rotary positions: RMSNorm, causal attention with fewer key and
value heads, SwiGLU, all projections separate and unfused, bf16 parameters.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import bench_peers as peers
import torch
from bench_scaled_mm import ScaledMMLinear
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    layers: int
    batch: int
    seq: int


SIZE = Size(4096, 14336, 32, 8, 4, 2, 4096)
SIZE_CPU = Size(64, 128, 4, 2, 2, 2, 32)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        head_dim = size.dim // size.heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        linear = partial(nn.Linear, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(size.dim, eps=1e-5) for _ in range(2))
        self.q = linear(size.dim, size.dim)
        self.k, self.v = (linear(size.dim, size.kv_heads * head_dim) for _ in range(2))
        self.o = linear(size.dim, size.dim)
        self.gate, self.up = (linear(size.dim, size.ffn) for _ in range(2))
        self.down = linear(size.ffn, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            project(h).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
            for project in (self.k, self.v)
        )
        grouped = h.dtype != torch.float32
        if not grouped:
            # For the reference alone: no fused f32 kernel takes grouped heads, and the unfused
            # path would hold every head's attention matrix.
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def blocks(size: Size, device: torch.device) -> nn.Sequential:
    """Return the model; linear weights have the variance 1 / in, so that x keeps its size."""
    draw = torch.Generator(device).manual_seed(0)
    with device:
        model = nn.Sequential(*(Block(size) for _ in range(size.layers)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=draw)
    return model.bfloat16()


# -------------------------------------------------------------------------------------- contenders

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """A contender: it changes a bf16 model in place and returns how to run it, inside `context`."""

    name: str
    case: str
    convert: Callable[[nn.Module], Forward]
    needs: Callable[[], Any] = bool  # raises where the contender cannot be had
    context: Callable[[], Any] = contextlib.nullcontext


def convert_fp8lt(model: nn.Module, recipe: str = "tensorwise", **options: Any) -> Forward:
    import fp8lt

    scaling = dataclasses.replace(fp8lt.recipe.resolve(recipe), **options)
    return fp8lt.convert_to_float8_training(model, config=scaling)


convert_fp8lt_delayed = partial(convert_fp8lt, recipe="delayed")
convert_fp8lt_lean = partial(convert_fp8lt, recompute_weight=True)


def convert_scaled_mm(model: nn.Module) -> Forward:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = ScaledMMLinear
    return model


def convert_te(model: nn.Module, recipe: str) -> Forward:
    context = peers.te_context(recipe)
    for block in model.children():
        for name, module in list(block.named_children()):
            if type(module) is nn.Linear:
                setattr(block, name, peers.te_module(module.weight.detach()))

    def forward(x: Tensor) -> Tensor:
        with context():
            return model(x)

    return forward


def then_compile(convert: Callable[[nn.Module], Forward]) -> Callable[[nn.Module], Forward]:
    return lambda model: peers.compiled(convert(model), next(model.parameters()).device)


def unchanged(model: nn.Module) -> Forward:
    return model


VARIANTS = [
    Variant("bf16", "eager", unchanged),
    Variant("fp8lt", "eager", convert_fp8lt),
    Variant("fp8lt-delayed", "eager", convert_fp8lt_delayed),
    Variant("fp8lt-recomputed", "eager", convert_fp8lt_lean),
    Variant("fp8lt-autotuned", "eager", convert_fp8lt, context=peers.autotuned),
    *(
        Variant(f"te-{recipe}", "eager", partial(convert_te, recipe=recipe), peers.needs_te)
        for recipe in ("delayed", "current", "block")
    ),
    Variant("bf16-compiled", "compiled", then_compile(unchanged)),
    Variant("fp8lt-compiled", "compiled", then_compile(convert_fp8lt)),
    Variant("fp8lt-delayed-compiled", "compiled", then_compile(convert_fp8lt_delayed)),
    Variant("fp8lt-recomputed-compiled", "compiled", then_compile(convert_fp8lt_lean)),
    Variant("scaled_mm-compiled", "compiled", then_compile(convert_scaled_mm)),
    *(
        Variant(
            f"torchao-{recipe}-compiled", "compiled",
            then_compile(partial(peers.torchao_convert, recipe=recipe)), peers.needs_torchao,
        )
        for recipe in ("tensorwise", "rowwise")
    ),
]  # fmt: skip
