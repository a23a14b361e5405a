"""Kinds of bugs that such libraries have had, for which no other file has a place."""

from collections.abc import Callable

import pytest
import torch
from cases import (
    T_BACKWARD,
    T_FORWARD,
    T_SAME,
    CountOps,
    RunPython,
    error,
    randn,
    run,
    state_for,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp8lt
from fp8lt import device, ops, recipe

CPU = torch.device("cpu")
NAMES = pytest.mark.parametrize("name", recipe.NAMES)


def layer_of(name: str, on: torch.device) -> Callable[..., Tensor]:
    """Return `fp8lt.linear` in that recipe, with a state where it wants one."""
    state = fp8lt.DelayedState(device=on) if name == "delayed" else None
    return lambda x, w, bias=None: fp8lt.linear(x, w, bias, recipe=name, state=state)


def leaf(
    *shape: int, on: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    return randn(*shape, on=on, dtype=dtype, seed=seed).requires_grad_()


@NAMES
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2, 3, 4)], ids=str)
def test_leading_dimensions_are_rows(on: torch.device, name: str, lead: tuple[int, ...]) -> None:
    """BUG-05: a vector, one row and many dimensions, with their gradients."""
    results = []
    for flat in (False, True):
        x, w, b = leaf(*lead, 48, on=on), leaf(40, 48, on=on, seed=1), leaf(40, on=on, seed=2)
        y = layer_of(name, on)(x.reshape(-1, 48) if flat else x, w, b).reshape(*lead, 40)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, w.grad, b.grad])
    assert all(map(torch.equal, *results))


@NAMES
@pytest.mark.parametrize(
    ("x_shape", "n"), [((0, 64), 40), ((2, 0, 64), 40), ((3, 64), 0), ((3, 0), 40)], ids=str
)
def test_what_is_empty_has_empty_or_zero_results(
    on: torch.device, name: str, x_shape: tuple[int, ...], n: int
) -> None:
    """BUG-08, BUG-09: no rows, no columns, nothing to sum over: then y is exactly the bias."""
    x, w = leaf(*x_shape, on=on, dtype=torch.bfloat16), leaf(n, x_shape[-1], on=on)
    b = leaf(n, on=on, seed=2)
    y = layer_of(name, on)(x, w, b)
    assert (y.dtype, y.shape) == (torch.bfloat16, (*x_shape[:-1], n))
    if x_shape[-1] == 0:
        assert torch.equal(y, b.bfloat16().expand(y.shape))
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
    assert not x.grad.any()
    for t in (w, b):
        assert t.grad is not None
        assert (t.grad.dtype, t.grad.shape) == (t.dtype, t.shape)
    assert not w.grad.any()
    if y.numel() == 0:
        assert not b.grad.any()


@NAMES
@pytest.mark.parametrize(("m", "n"), [(1, 1), (50, 1), (1, 50)])
def test_one_row_or_one_column_is_right(on: torch.device, name: str, m: int, n: int) -> None:
    """BUG-15: a scale per row and a scale of all are as many then."""
    x, w = randn(m, 512, on=on, dtype=torch.float32), randn(n, 512, on=on, dtype=torch.float32)
    x, w = x.abs() * 10, w.abs() / 7  # nothing cancels
    assert error(layer_of(name, on)(x, w), x.double() @ w.double().t()) <= T_FORWARD


@NAMES
@pytest.mark.parametrize("zero", ["x", "w", "dy", "row", "block"])
def test_zeros_give_zeros_and_nothing_else(on: torch.device, name: str, zero: str) -> None:
    """BUG-26."""
    x, w = randn(9, 256, on=on, dtype=torch.float32), randn(40, 256, on=on, dtype=torch.float32)
    dy = randn(9, 40, on=on, dtype=torch.float32)
    {"x": x, "w": w, "dy": dy, "row": x[3:4], "block": x[:, 128:]}[zero].zero_()
    x, w = x.requires_grad_(), w.requires_grad_()
    y = layer_of(name, on)(x, w)
    y.backward(dy)
    results = {"y": y, "dx": x.grad, "dw": w.grad}
    assert all(t.isfinite().all() for t in results.values())
    none = {"x": ("y", "dw"), "w": ("y", "dx"), "dy": ("dx", "dw"), "row": (), "block": ()}[zero]
    assert all((results[name] == 0).all() for name in none)
    if zero == "row":
        assert (y[3] == 0).all()
    if zero == "block":
        assert (w.grad[:, 128:] == 0).all()


@NAMES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible_and_is_forgotten(
    on: torch.device, name: str, bad: float
) -> None:
    """BUG-31: where rows have scales of their own, in its row alone."""
    run, w = layer_of(name, on), randn(40, 48, on=on, dtype=torch.float32)
    x = randn(20, 48, on=on, dtype=torch.float32)
    before = run(x, w)
    spoilt = x.clone()
    spoilt[7, 5] = bad
    y = run(spoilt, w)
    assert not y[7].isfinite().any()
    if name not in ("tensorwise", "delayed"):
        others = torch.arange(20, device=on) != 7
        assert torch.equal(y[others], before[others])
    assert torch.equal(run(x, w), before)


@NAMES
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_the_size_of_numbers_does_not_matter(on: torch.device, name: str, size: float) -> None:
    """BUG-32."""
    x, w = randn(64, 320, on=on, dtype=torch.float32), randn(40, 320, on=on, dtype=torch.float32)
    x = x * size
    assert error(layer_of(name, on)(x, w), x.double() @ w.double().t()) <= T_FORWARD


@NAMES
def test_autocast_forward_and_plain_backward(on: torch.device, name: str) -> None:
    """BUG-56: odd shapes, f32 weights, and backward where autocast is off."""
    x, w, b = leaf(37, 45, on=on), leaf(29, 45, on=on, seed=1), leaf(29, on=on, seed=2)
    with torch.autocast(on.type, torch.bfloat16):
        y = layer_of(name, on)(x, w, b)
    y.backward(randn(37, 29, on=on, dtype=torch.bfloat16, seed=3))
    dy = randn(37, 29, on=on, dtype=torch.bfloat16, seed=3).double()
    want = {"x": dy @ w.double(), "w": dy.t() @ x.double(), "b": dy.sum(0)}
    for t, name_of in ((x, "x"), (w, "w"), (b, "b")):
        assert t.grad is not None
        assert t.grad.dtype == torch.float32
        assert error(t.grad, want[name_of]) <= T_BACKWARD


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_layout_is_refused_everywhere_or_nowhere(where: str) -> None:
    """BUG-24."""
    q = ops.quantize_tensorwise(torch.zeros(32, 48, device=where), torch.float8_e4m3fn)
    crooked = q.data.t().contiguous().t()
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.gemm_nt(crooked, q.data, q.scale_inv, q.scale_inv, 32, 32)
    with pytest.raises(RuntimeError, match="contiguous"):
        ops.gemm_nt(q.data, crooked, q.scale_inv, q.scale_inv, 32, 32)


@pytest.mark.parametrize("m", [1, 129, 255, 257])
def test_what_lies_behind_the_scales_is_not_used(on: torch.device, m: int) -> None:
    """BUG-10: M fills no tile."""
    x, w = (randn(rows, 112, on=on, dtype=torch.bfloat16) for rows in (m, 40))
    xq, wq = (ops.quantize_rowwise(t, device.OCP.e4m3) for t in (x, w))
    scales = []
    for q, rows in ((xq, m), (wq, 40)):
        scales.append(q.scale_inv.new_full((1024,), torch.nan))
        scales[-1][:rows] = q.scale_inv[:rows]
    want = ops.gemm_nt(xq.data, wq.data, xq.scale_inv, wq.scale_inv, m, 40, scaling=(1, 1))
    got = ops.gemm_nt(xq.data, wq.data, *scales, m, 40, scaling=(1, 1))
    assert torch.equal(got, want)


# Every tensor ends where mapped memory does: a read of what is behind it is an illegal access.
AT_THE_END = """
import ctypes, math, torch, fp8lt
from fp8lt import device, ops

cuda, PAGE = ctypes.CDLL("libcuda.so.1"), 2 << 20
Where = ctypes.c_int * 2

class Memory(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("where", Where),
                ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]

class Access(ctypes.Structure):
    _fields_ = [("where", Where), ("flags", ctypes.c_int)]

class Bytes:
    def __init__(self, at, count):
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (at, False), "version": 3}

def call(name, *args):
    status = getattr(cuda, name)(*args)
    assert status == 0, (name, status)

def at_the_end(t):
    size = ctypes.c_size_t(math.ceil(t.nbytes / PAGE) * PAGE)
    at, handle = ctypes.c_uint64(), ctypes.c_uint64()
    zero, page = ctypes.c_uint64(0), ctypes.c_size_t(PAGE)
    gpu = Where(1, torch.cuda.current_device())
    reserved = ctypes.c_size_t(size.value + PAGE)
    call("cuMemAddressReserve", ctypes.byref(at), reserved, page, zero, zero)
    memory, access = Memory(1, 0, gpu), Access(gpu, 3)
    call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(memory), zero)
    call("cuMemMap", at, size, ctypes.c_size_t(0), handle, zero)
    call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
    inside = torch.as_tensor(Bytes(at.value + size.value - t.nbytes, t.nbytes), device="cuda")
    inside.copy_(t.contiguous().view(-1).view(torch.uint8))
    return inside.view(t.dtype).view(t.shape)

def check(got, want):
    assert (got - want).norm() <= 5e-3 * want.norm()

w, e4m3 = torch.randn(1536, 4096, device="cuda", dtype=torch.bfloat16), device.OCP.e4m3
for m in (1, 129, 255, 257, 8352):
    x = torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(m, 1536, device="cuda", dtype=torch.bfloat16)
    kept = [ops.quantize_rowwise(t, e4m3) for t in (x, w, dy)]
    xq, wq, dyq = (ops.quantize_rowwise(at_the_end(t), e4m3) for t in (x, w, dy))
    for got, want in zip((xq, wq, dyq), kept, strict=True):
        for name in ("data", "data_t", "scale_inv", "scale_inv_t"):
            a, b = (getattr(q, name).view(torch.uint8) for q in (got, want))
            assert torch.equal(a, b), (m, name)
    y = (xq.data, wq.data, xq.scale_inv, wq.scale_inv)
    dx = (dyq.data, wq.data_t, dyq.scale_inv, wq.scale_inv_t)
    dw = (dyq.data_t, xq.data_t, dyq.scale_inv_t, xq.scale_inv_t)
    for operands, shape in ((y, (m, 1536)), (dx, (m, 4096)), (dw, (1536, 4096))):
        want = ops.gemm_nt(*operands, *shape, scaling=(1, 1), out_dtype=torch.float32)
        ended = map(at_the_end, operands)
        check(ops.gemm_nt(*ended, *shape, scaling=(1, 1), out_dtype=torch.float32), want)
    torch.cuda.synchronize()
print("right")
"""


@pytest.mark.gpu
def test_no_kernel_reads_past_its_operands(run_python: RunPython) -> None:
    """BUG-10."""
    done = run_python(AT_THE_END, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert done.stdout.split()[-1] == "right"


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "of a sum": lambda dy: dy[:1, :1].expand_as(dy),
    "one row": lambda dy: dy[:1].expand_as(dy),
    "one column": lambda dy: dy[:, :1].expand_as(dy),
    "transposed": lambda dy: dy.t().contiguous().t(),
}


@NAMES
@pytest.mark.parametrize("layout", GRADIENTS)
def test_a_gradient_in_any_layout_equals_a_contiguous_one(
    on: torch.device, name: str, layout: str
) -> None:
    """BUG-17, BUG-18."""
    x, w, b = (randn(*s, on=on, dtype=torch.float32) for s in ((17, 45), (40, 45), (40,)))
    # Whole numbers: their sums, for the bias, are exact in any order.
    dy = GRADIENTS[layout]((3 * randn(17, 40, on=on, dtype=torch.float32, seed=7)).round())
    assert not dy.is_contiguous()
    want = run(x, w, b, dy.contiguous(), recipe=name)
    got = run(x, w, b, dy, recipe=name)
    equal = [*map(torch.equal, got, want)]
    if name == "rowwise_with_gw_hp":  # its dw is PyTorch's product, summed in any order
        equal[2] = error(got[2], want[2]) < 1e-6  # measured 0 on a CPU
    assert all(equal)
    assert want[3].any()


class Formats(TorchDispatchMode):
    """Collects the FP8 dtypes that tensors are quantised to, and counts the elements."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.__name__.startswith("quantize_"):
            self.dtypes |= {t.dtype for t in results[:2]}
            self.elements += sum(t.numel() for t in results[:2])
        return results


@NAMES
@pytest.mark.parametrize("formats", [device.OCP, device.FNUZ], ids=["ocp", "fnuz"])
def test_a_recipe_takes_the_formats_of_its_device_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, formats: device.Formats
) -> None:
    """BUG-42: also for a weight that was quantised elsewhere, and for minus zero."""
    x, w, dy = (randn(*s, on=CPU, dtype=torch.float32) for s in ((20, 48), (32, 48), (20, 32)))
    x[3], x[4, ::2] = -0.0, -1e-30
    other = device.OCP if formats is device.FNUZ else device.FNUZ
    monkeypatch.setattr(device, "formats", lambda where: other)
    foreign = fp8lt.quantize_weight(w, recipe=name, state=state_for(name, CPU))
    monkeypatch.setattr(device, "formats", lambda where: formats)
    with Formats() as seen:
        y, dx, dw = run(x, w, None, dy, recipe=name)
    assert seen.dtypes == {formats.e4m3, recipe.resolve(name).backward_dtype(formats)}
    assert error(y, x.double() @ w.double().t()) <= T_FORWARD
    assert error(dx, dy.double() @ w.double()) <= T_BACKWARD
    assert error(dw, dy.double().t() @ x.double()) <= T_BACKWARD
    with pytest.raises(RuntimeError, match=f"in {formats.e4m3} on cpu.* in {other.e4m3} on cpu"):
        fp8lt.linear(x, w, recipe=name, w_quantized=foreign, state=state_for(name, CPU))
    ours = fp8lt.convert_quantized(foreign, CPU)
    assert fp8lt.convert_quantized(ours, CPU) is ours
    y, dx, _ = run(x, w, None, dy, recipe=name, w_quantized=ours)
    assert error(y, x.double() @ w.double().t()) <= T_FORWARD
    assert error(dx, dy.double() @ w.double()) <= T_BACKWARD


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])  # the others: test_recipes.py
@pytest.mark.parametrize("need_x", [True, False])
@pytest.mark.parametrize("need_w", [True, False])
@pytest.mark.parametrize("need_b", [True, False])
def test_what_is_frozen_costs_no_gemm_and_keeps_nothing(
    on: torch.device, name: str, need_x: bool, need_w: bool, need_b: bool
) -> None:
    """BUG-53."""
    shapes, needs = ((32, 64), (48, 64), (48,)), (need_x, need_w, need_b)
    x, w, b = (randn(*s, on=on, dtype=torch.bfloat16) for s in shapes)
    dy = randn(32, 48, on=on, dtype=torch.bfloat16, seed=3)
    want = run(x, w, b, dy, recipe=name)[1:]
    for t, need in zip((x, w, b), needs, strict=True):
        t.requires_grad_(need)
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, Formats() as seen:
        y = layer_of(name, on)(x, w, b)
    assert seen.elements == (1 + need_w) * x.numel() + (1 + need_x) * w.numel()
    fp8 = sum(t.nbytes for t in saved if t.dtype == device.OCP.e4m3)
    assert fp8 == need_w * x.numel() + need_x * w.numel()  # a byte an element
    assert sum(t.nbytes for t in saved) - fp8 <= 1024  # scales, of 512; x has 4096
    if not any(needs):
        assert not y.requires_grad
        return
    with CountOps() as count:
        y.backward(dy)
    assert count.counts["gemm_nt"] == need_x + need_w
    assert count.quantised == (need_x or need_w)
    for t, need, gradient in zip((x, w, b), needs, want, strict=True):
        assert (t.grad is not None) == need
        if need:  # a sum is rounded to bf16
            assert error(t.grad, gradient) <= (T_SAME if t is b else 0)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "one row": lambda x: x[:1].expand_as(x),
    "one column": lambda x: x[:, :1].expand_as(x),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
}
OPTIONS = {  # of operator quantize_..., after x, the dtype and both layouts
    "tensorwise": ("tensorwise", (torch.float32,)),
    "delayed": ("delayed", (torch.zeros(6), 0, False, True, torch.bfloat16)),
    "rowwise": ("rowwise", (True, False, None, None, torch.float32)),
    "folded": ("rowwise", (True, True, None, None)),
    "blockwise": ("blockwise", (False, False, torch.float32)),
    "squares": ("blockwise", (False, True)),
}


def outlines(results: tuple[Tensor, ...]) -> list[tuple]:
    assert all(t.is_contiguous() for t in results)  # so their shapes tell their strides
    return [(t.shape, t.dtype, t.device) for t in results]


@pytest.mark.parametrize("which", OPTIONS)
@pytest.mark.parametrize("layout", VIEWS)
def test_fake_results_have_the_strides_of_real_ones(
    on: torch.device, which: str, layout: str, opcheck_fp8: None
) -> None:
    """BUG-69: whatever those of x are; `opcheck` has not always looked."""
    operator, options = OPTIONS[which]
    operator = getattr(torch.ops.fp8lt, f"quantize_{operator}").default
    x = VIEWS[layout](randn(32, 144, on=on, dtype=torch.bfloat16))  # needs no padding
    options = [o.to(on).clone() if isinstance(o, Tensor) else o for o in options]
    args = (x, device.OCP.e4m3, True, True, *options)
    torch.library.opcheck(operator, args)
    utils = ("test_schema", "test_faketensor")  # FP8 results have no gradient to register
    torch.library.opcheck(operator, (x.detach().requires_grad_(), *args[1:]), test_utils=utils)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = operator(mode.from_tensor(x), *args[1:])
    assert outlines(fake) == outlines(operator(*args))
    assert outlines(fake) == outlines(operator(x.contiguous(), *args[1:]))


@pytest.mark.parametrize("layout", ["contiguous", "expanded", "every other", "no rows"])
def test_a_fake_product_has_the_strides_of_a_real_one(
    on: torch.device, layout: str, opcheck_fp8: None
) -> None:
    """BUG-69: with a bias in any layout; operands in others are refused."""
    rows = 0 if layout == "no rows" else 17
    x, w = (randn(r, 40, on=on, dtype=torch.bfloat16) for r in (rows, 24))
    bias = randn(48, on=on, dtype=torch.bfloat16)
    bias = {"expanded": bias[:1].expand(24), "every other": bias[::2]}.get(layout, bias[:24])
    gemm = torch.ops.fp8lt.gemm_nt.default
    for scaling, quantise in enumerate((ops.quantize_tensorwise, ops.quantize_rowwise)):
        xq, wq = (quantise(t, device.OCP.e4m3) for t in (x, w))
        args = (xq.data, wq.data, xq.scale_inv, wq.scale_inv, rows, 24, bias, torch.bfloat16)
        torch.library.opcheck(gemm, (*args, False, scaling, scaling))
        y = gemm(*args, False, scaling, scaling)
        assert y.is_contiguous()
        assert torch.equal(y, gemm(*args[:6], bias.clone(), *args[7:], False, scaling, scaling))
