"""Gradients of weights that are added up in f32 beside autograd, as Megatron does."""

import pytest
import torch
from cases import error, randn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8lt
from fp8lt import device, ops, recipe
from fp8lt.emulate import Scaling

E4M3 = device.OCP.e4m3
SHAPES = [(40, 48), (37, 50), (128, 256), (16, 16)]  # [N, K]; rows of 50 are not 16-byte multiples


def accumulated(
    on: torch.device, name: str, dtype: torch.dtype, shape: tuple[int, int], main_grad: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the sum of dw over three calls, in f32, and the gradients of x."""
    n, k = shape
    w = randn(n, k, on=on, dtype=dtype).requires_grad_()
    total = torch.zeros(n, k, device=on)
    state = fp8lt.DelayedState(device=on) if name == "delayed" else None
    gradients = []
    for step in range(3):
        x = (randn(33, k, on=on, dtype=dtype, seed=step) * (step + 1)).requires_grad_()
        y = fp8lt.linear(x, w, recipe=name, state=state, main_grad=total if main_grad else None)
        y.backward(randn(33, n, on=on, dtype=dtype, seed=step + 7))
        assert x.grad is not None
        gradients.append(x.grad)
        if main_grad:
            assert w.grad is None
        else:
            assert w.grad is not None
            total += w.grad
            w.grad = None
    return total, gradients


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", recipe.NAMES)
def test_it_is_the_sum_of_the_gradients(
    on: torch.device, name: str, shape: tuple[int, int]
) -> None:
    got, dx = accumulated(on, name, torch.float32, shape, main_grad=True)
    want, want_dx = accumulated(on, name, torch.float32, shape, main_grad=False)
    assert all(map(torch.equal, dx, want_dx))
    assert error(got, want.double()) <= 1e-6  # 0 on a CPU, where the additions are the same


@pytest.mark.parametrize("name", recipe.NAMES)
def test_16_bit_weights_lose_nothing_on_the_way(on: torch.device, name: str) -> None:
    got, _ = accumulated(on, name, torch.bfloat16, (40, 48), main_grad=True)
    rounded, _ = accumulated(on, name, torch.bfloat16, (40, 48), main_grad=False)
    assert 1e-4 < error(got, rounded.double()) <= 4e-3  # bf16 rounding of each dw


@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCKWISE_1X128])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_operator_adds_in_place(
    on: torch.device, shape: tuple[int, int], offset: int, scaling: Scaling
) -> None:
    """BUG-21."""
    n, k = shape
    a, b = randn(n, 80, on=on, dtype=torch.float32), randn(k, 80, on=on, dtype=torch.float32)
    if scaling == Scaling.TENSORWISE:
        qa, qb = (ops.quantize_tensorwise(t, E4M3) for t in (a, b))
    elif scaling == Scaling.ROWWISE:
        qa, qb = (ops.quantize_rowwise(t, E4M3) for t in (a, b))
    else:
        qa, qb = (ops.quantize_blockwise(t, E4M3, square=False) for t in (a, b))
    operands, pair = (qa.data, qb.data, qa.scale_inv, qb.scale_inv), (scaling, scaling)
    whole = randn(n * k + 1, on=on, dtype=torch.float32)
    before = whole.clone()
    d = whole[offset : offset + n * k].view(n, k)  # of any alignment
    want = d + ops.gemm_nt(*operands, n, k, scaling=pair, out_dtype=torch.float32)
    ops.gemm_nt_add(*operands, d, scaling=pair)
    assert error(d, want.double()) <= 1e-6
    beside = n * k if offset == 0 else 0
    assert whole[beside] == before[beside]


def test_the_operator_passes_opcheck(on: torch.device, opcheck_fp8: None) -> None:
    q = ops.quantize_tensorwise(randn(20, 30, on=on, dtype=torch.float32), E4M3)
    args = (q.data, q.data, q.scale_inv, q.scale_inv, torch.ones(20, 20, device=on), False)
    torch.library.opcheck(torch.ops.fp8lt.gemm_nt_add.default, args)


def test_a_weight_of_megatron_gets_a_gradient_for_its_hooks(on: torch.device) -> None:
    w = randn(8, 16, on=on, dtype=torch.bfloat16).requires_grad_()
    total, x = torch.zeros(8, 16, device=on), randn(4, 16, on=on, dtype=torch.bfloat16)
    called = []
    w.register_post_accumulate_grad_hook(lambda w: called.append(w.grad))
    fp8lt.linear(x, w, main_grad=total).sum().backward()
    assert called == [None]
    w.grad_added_to_main_grad = False
    with torch.no_grad():
        fp8lt.linear(x, w, main_grad=total)
    assert not w.grad_added_to_main_grad
    fp8lt.linear(x, w, main_grad=total).sum().backward()
    assert called[1].dtype == torch.bfloat16
    assert w.grad_added_to_main_grad
    w.grad, w.zero_out_wgrad = None, True
    fp8lt.linear(x, w, main_grad=total).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


def test_a_module_takes_it_from_its_weight(on: torch.device) -> None:
    plain = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 16)).to(on)
    layers = fp8lt.convert_to_float8_training(plain)
    x = randn(9, 48, on=on, dtype=torch.float32)
    layers(x).square().sum().backward()
    want = [p.grad for p in layers.parameters()]
    for checkpointed in (False, True):
        layers.zero_grad()
        for module in layers.modules():
            if isinstance(module, fp8lt.Linear):
                module.fuse_wgrad_accumulation = True
                module.weight.main_grad = torch.zeros_like(module.weight, requires_grad=False)
        y = checkpoint(layers, x, use_reentrant=False) if checkpointed else layers(x)
        y.square().sum().backward()
        for parameter, gradient in zip(layers.parameters(), want, strict=True):
            got = parameter.main_grad if parameter.dim() == 2 else parameter.grad
            assert error(got, gradient.double()) <= 1e-6
            assert parameter.dim() == 1 or parameter.grad is None
    del module.weight.main_grad
    with pytest.raises(RuntimeError, match=r"want a tensor weight.main_grad, \[16, 40\] float32"):
        layers(x)


def test_compiled_it_is_the_same(on: torch.device) -> None:
    torch._dynamo.reset()
    w = randn(40, 48, on=on, dtype=torch.float32).requires_grad_()
    x = randn(9, 48, on=on, dtype=torch.float32).requires_grad_()
    totals = [torch.zeros(40, 48, device=on) for _ in range(2)]

    def run(x: Tensor, total: Tensor) -> Tensor:
        return fp8lt.linear(x, w, main_grad=total)

    for step, total in zip((run, torch.compile(run, fullgraph=True)), totals, strict=True):
        for _ in range(2):
            step(x, total).square().sum().backward()
    assert error(totals[1], totals[0].double()) <= 1e-5


@pytest.mark.parametrize(
    ("main_grad", "got"),
    [
        (torch.zeros(8, 16, dtype=torch.bfloat16), r"got \[8, 16\], torch.bfloat16 on cpu"),
        (torch.zeros(16, 8), r"want \[8, 16\], float32 on cpu.*got \[16, 8\]"),
        (torch.zeros(16, 8).t(), r"got \[8, 16\], .*strides \(1, 8\)"),
        (torch.zeros(8, 16, requires_grad=True), r"without a gradient.*requires_grad=True"),
        (torch.zeros(8, 16, device="meta"), "on meta"),
    ],
)
def test_what_does_not_fit_is_refused(main_grad: Tensor, got: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)main_grad: .*{got}"):
        fp8lt.linear(torch.ones(3, 16), torch.ones(8, 16), main_grad=main_grad)
    with pytest.raises(TypeError, match="main_grad: want a tensor, got float"):
        fp8lt.linear(torch.ones(3, 16), torch.ones(8, 16), main_grad=1.0)  # type: ignore[arg-type]
