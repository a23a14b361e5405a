"""A compact byte-level GPT, the model that `train.py` trains.

    x = embed(tokens)                                  B sequences of T bytes, D features
    x = x + out(attention(qkv(norm(x))))               causal, rotary positions, H heads
    x = x + down(silu(gate(norm(x))) * up(norm(x)))    SwiGLU; once per layer, as is the line above
    logits = head(norm(x))                             [B, T, 256]

The norms have no gains and the linear layers no biases: every parameter is a matrix, so one
optimiser group serves all. The price is a model slightly less expressive than it could be.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # one token per byte value: no tokeniser to ship or to trust
ROTARY_BASE = 10_000.0
INIT_STD = 0.02


def norm(x: Tensor) -> Tensor:
    """Return `x / rms(x)` along the last dimension, in the dtype of x."""
    # CUDA autocast would return f32 and double the traffic; the kernel sums in f32 anyway.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, (x.shape[-1],))


def rotary_angles(seq: int, head_dim: int) -> Tensor:
    """Return position times frequency, [seq, head_dim / 2] f32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.outer(torch.arange(seq, dtype=torch.float32), ROTARY_BASE**-exponent)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its position's angle.

    x: [B, H, T, d]; cos, sin: [T, d/2]
    """
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        # 8/3 D keeps a SwiGLU as large as a plain 4 D layer; multiples of 64 keep the GEMMs whole.
        hidden = -(-8 * dim // (3 * 64)) * 64
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # [B, T, H, 3, d], of as many heads as are here: ranks of a parallel run may share them.
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = heads.permute(3, 0, 2, 1, 4).unbind(0)  # each [B, H, T, d]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    cos: Tensor  # [seq, d/2] f32
    sin: Tensor  # [seq, d/2] f32

    def __init__(self, dim: int, layers: int, heads: int, seq: int, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        angles = rotary_angles(seq, dim // heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        for name, weight in self.named_parameters():
            # The residual stream sums 2 outputs per layer: shrink them so that its size does not
            # grow with depth (GPT-2's rule).
            writes_residual = name.endswith(("out.weight", "down.weight"))
            weight.normal_(0, INIT_STD / (2 * len(self.blocks)) ** (0.5 * writes_residual))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [B, T] int64, T <= seq. Returns: logits [B, T, 256]."""
        x = self.embed(tokens)  # [B, T, D]
        if torch.is_autocast_enabled(x.device.type):
            # Autocast leaves an embedding f32, and the whole residual stream would follow it.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(norm(x))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss in nats per byte; tokens: [B, T + 1], each predicts its next."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
