"""Large tensors, and what ran before: neither matters."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import T_BACKWARD, T_FORWARD, error, randn, raw, state_for
from torch import Tensor

import fp8lt
from fp8lt import build, device, ops, recipe

GPU = torch.device("cuda", 0)
E4M3 = device.OCP.e4m3
NAMES = pytest.mark.parametrize("name", recipe.NAMES)


DIGEST = """
import hashlib, torch, fp8lt
def digest(m, n, k):
    draw = torch.Generator().manual_seed(m)
    x, w, dy = (torch.randn(*s, generator=draw).bfloat16().cuda() for s in ((m, k), (n, k), (m, n)))
    x.requires_grad_(), w.requires_grad_()
    y = fp8lt.linear(x, w)
    whole = torch.cat([t.flatten() for t in (y, *torch.autograd.grad(y, (x, w), dy))])
    return hashlib.sha256(whole.detach().view(torch.uint8).cpu().numpy()).hexdigest()
"""


def test_the_workspace_is_as_large_as_nvidia_recommends() -> None:
    """BUG-39: for sm_90; a smaller one has other kernels."""
    source = (build.SOURCE_DIR / "gemm.h").read_text()
    (mebibytes,) = re.findall(r"kWorkspaceBytes = (\d+) << 20;", source)
    assert int(mebibytes) >= 32


@pytest.mark.gpu
def test_a_fresh_process_gives_the_same_bits() -> None:
    """BUG-39: nor do other shapes before it, or the memory that is left, change a kernel."""
    shapes = [(1, 64, 4096), (333, 512, 1040), (2048, 4096, 2048), (64, 64, 65536)]
    here: dict[str, Callable[..., str]] = {}
    exec(DIGEST, here)
    here["digest"](100, 200, 300)
    first = [here["digest"](*shape) for shape in shapes]
    rest = int(torch.cuda.mem_get_info()[0] * 0.9)
    torch.cuda.empty_cache()
    held = torch.empty(rest, dtype=torch.uint8, device=GPU)
    again = [here["digest"](*shape) for shape in reversed(shapes)][::-1]
    del held
    torch.cuda.empty_cache()
    code = f"{DIGEST}\nfor shape in {shapes}: print(digest(*shape))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert first == again == done.stdout.split()


# Whole blocks of 128 rows, and one row more.
LARGE, TAIL = (512 * 128 + 1, 32784), 129  # 2.15e9 elements


@pytest.fixture
def large() -> Iterator[Tensor]:
    """Zeros, but for the last rows."""
    x = torch.zeros(LARGE, dtype=torch.bfloat16, device=GPU)
    x[-TAIL:] = randn(TAIL, LARGE[1], on=GPU, dtype=torch.bfloat16)
    yield x
    del x
    torch.cuda.empty_cache()


QUANTISE: dict[str, Callable[[Tensor], ops.Quantized]] = {
    "delayed": lambda x: ops.quantize_delayed(x, E4M3, torch.zeros(18, device=x.device)),
    "rowwise": lambda x: ops.quantize_rowwise(x, E4M3),
    "rowwise folded": lambda x: ops.quantize_rowwise(x, E4M3, folded=True),
    "blocks of a row": lambda x: ops.quantize_blockwise(x, E4M3, square=False),
    "square blocks": lambda x: ops.quantize_blockwise(x, E4M3, square=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", QUANTISE)
def test_large_tensors_are_quantised_to_their_end(large: Tensor, kind: str) -> None:
    """BUG-85: more than 2**31 elements."""
    begin = LARGE[0] - TAIL
    q, want = QUANTISE[kind](large), QUANTISE[kind](large[begin:].clone())
    assert torch.equal(raw(q.data[begin:]), raw(want.data))
    assert torch.equal(raw(q.data_t[:, begin:]), raw(want.data_t))
    assert not q.data[:begin].view(torch.uint8).any()
    assert not q.data_t[:, :begin].view(torch.uint8).any()


@pytest.mark.gpu
@NAMES
def test_large_results_and_gradients_are_right_to_their_end(large: Tensor, name: str) -> None:
    """BUG-85: y and dy of more than 2**31 elements."""
    (m, n), k = LARGE, 64
    x = randn(m, k, on=GPU, dtype=torch.bfloat16, seed=1).requires_grad_()
    w = randn(n, k, on=GPU, dtype=torch.bfloat16, seed=2).requires_grad_()
    y = fp8lt.linear(x, w, recipe=name, state=state_for(name, GPU))
    ends = torch.arange(m - TAIL, m, device=GPU)
    assert error(y[ends], x.detach()[ends].double() @ w.detach().double().t()) <= T_FORWARD
    dx, dw = torch.autograd.grad(y, (x, w), large)
    dy = large[ends].double()
    assert not dx[: m - TAIL].any()
    assert error(dx[ends], dy @ w.detach().double()) <= T_BACKWARD
    assert error(dw, dy.t() @ x.detach()[ends].double()) <= T_BACKWARD
