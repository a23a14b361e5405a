"""GEMMs by `torch._scaled_mm`: its numbers, how it is called, whole layers by it."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from cases import T_BACKWARD, T_FORWARD, T_SAME, error, randn, run, state_for
from torch import Tensor

import fp8lt
from fp8lt import device, ops
from fp8lt.emulate import Scaling

CPU = torch.device("cpu")
BY_PYTORCH = ops.Backend(emulated=True, scaled_mm=True)
NAMES = pytest.mark.parametrize("name", [n for n in fp8lt.recipe.NAMES if n != "blockwise"])
E4M3, E5M2 = device.OCP
ROWS_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def oracle_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Tensor | None,
    out_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """Multiply as PyTorch's operator does, and insist on what any GPU's library wants of it."""
    (m, k), (_, n) = a.shape, b.shape
    assert all(t.is_contiguous() for t in (a, b.t(), scale_a, scale_b))
    assert (k % 16, n % 16) == (0, 0) != (k, n)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if (scale_a.numel(), scale_b.numel()) != (1, 1):
        assert (scale_a.shape, scale_b.shape) == ((m, 1), (1, n))
        assert (out_dtype, bias) == (torch.bfloat16, None)
        assert a.dtype == b.dtype in (E4M3, device.FNUZ.e4m3)
    y = (a.double() * scale_a) @ (b.double() * scale_b)
    if bias is not None:
        assert (bias.dtype, bias.shape) == (out_dtype, (n,))
        assert out_dtype != torch.float32
        y += bias
    return y.to(out_dtype)


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Have all layers multiply by `torch._scaled_mm`, the oracle's; list the dtypes it gets."""
    seen: list[torch.dtype] = []

    def scaled_mm(a: Tensor, b: Tensor, *args: Tensor, **options: object) -> Tensor:
        seen.extend((a.dtype, b.dtype))
        return oracle_scaled_mm(a, b, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(ops, "backend", lambda *_, **__: BY_PYTORCH)
    return seen


def sizes(rows: int) -> Tensor:
    return torch.arange(1, rows + 1)[:, None]


@pytest.mark.parametrize("real", [True, False], ids=["torch", "oracle"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)])
def test_gemm_equals_that_of_emulation(
    monkeypatch: pytest.MonkeyPatch,
    formats: tuple[torch.dtype, torch.dtype],
    scaling: Scaling,
    out_dtype: torch.dtype,
    real: bool,
) -> None:
    direct = scaling == Scaling.ROWWISE and formats == (E4M3, E4M3)
    if real and direct and out_dtype == torch.bfloat16 and not ROWS_ON_CPU:
        pytest.skip("this PyTorch's operator has no scales per row on a CPU")
    if not real:
        monkeypatch.setattr(torch, "_scaled_mm", oracle_scaled_mm)
    tensorwise = scaling == Scaling.TENSORWISE
    quantise = ops.quantize_tensorwise if tensorwise else ops.quantize_rowwise
    narrow = torch.bfloat16 if out_dtype == torch.float32 else out_dtype
    for m, n, k in ((20, 33, 70), (16, 32, 64), (1, 1, 1), (0, 4, 5), (4, 5, 0), (4, 0, 5)):
        # Rows of very different size: a scale of another row would show.
        x, w = (
            randn(rows, k, on=CPU, dtype=torch.float32, seed=rows) * sizes(rows) for rows in (m, n)
        )
        a, b = (quantise(t, fp8) for t, fp8 in zip((x, w), formats, strict=True))
        for bias in (None, randn(n, on=CPU, dtype=narrow), randn(n, on=CPU, dtype=torch.float32)):
            options = {"bias": bias, "out_dtype": out_dtype, "scaling": (scaling, scaling)}
            args = (a.data, b.data, a.scale_inv, b.scale_inv, m, n)
            got = ops.gemm_nt(*args, **options, scaled_mm=True)
            assert (got.shape, got.dtype) == ((m, n), out_dtype)
            assert got.is_contiguous()
            assert error(got, ops.gemm_nt(*args, **options)) < 1e-4  # measured up to 4e-6


def test_scales_of_blocks_are_not_its() -> None:
    q = ops.quantize_blockwise(torch.ones(16, 128), E4M3, square=False)
    with pytest.raises(RuntimeError, match="not used for scales of blocks"):
        ops.gemm_nt(
            q.data, q.data, q.scale_inv, q.scale_inv, 16, 16,
            scaling=(q.scaling, q.scaling), scaled_mm=True,
        )  # fmt: skip


@NAMES
@pytest.mark.parametrize("formats", [device.OCP, device.FNUZ], ids=["OCP", "FNUZ"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_has_the_formats_of_its_device_and_the_numbers_of_emulation(
    monkeypatch: pytest.MonkeyPatch,
    by_pytorch: list[torch.dtype],
    dtype: torch.dtype,
    formats: device.Formats,
    name: str,
) -> None:
    """BUG-42: with gfx942's formats, and with gfx950's."""
    monkeypatch.setattr(device, "formats", lambda where: formats)
    x, w, b, dy = (
        randn(*shape, on=CPU, dtype=dtype, seed=i)
        for i, shape in enumerate(((20, 40), (35, 40), (35,), (20, 35)))
    )
    got = run(x, w, b, dy, recipe=name, state=state_for(name, CPU))
    gemms = 2 if name == "rowwise_with_gw_hp" else 3
    used = {*formats} if name in ("tensorwise", "delayed") else {formats.e4m3}
    assert (len(by_pytorch), set(by_pytorch)) == (2 * gemms, used)
    monkeypatch.setattr(ops, "backend", lambda *_, **__: ops.EMULATED)
    emulated = run(x, w, b, dy, recipe=name, state=state_for(name, CPU))
    for one, other in zip(got, emulated, strict=True):
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        assert error(one, other) < 1e-4  # measured up to 5e-8
    assert len(by_pytorch) == 2 * gemms
    wide = [t.double() for t in (x, w, dy)]
    y, dx, dw, _ = got
    assert error(y, wide[0] @ wide[1].t() + b.double()) < T_FORWARD
    assert error(dx, wide[2] @ wide[1]) < T_BACKWARD
    assert error(dw, wide[2].t() @ wide[0]) < T_BACKWARD


@NAMES
@pytest.mark.usefixtures("by_pytorch")
def test_dw_is_added_to_main_grad(name: str) -> None:
    x, w, dy = (
        randn(*shape, on=CPU, dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate(((20, 40), (35, 40), (20, 35)))
    )
    _, _, dw = run(x, w.float(), None, dy, recipe=name, state=state_for(name, CPU))
    total = torch.ones(35, 40)
    w.requires_grad_()
    y = fp8lt.linear(x, w, recipe=name, state=state_for(name, CPU), main_grad=total)
    y.backward(dy)
    assert w.grad is None
    assert error(total - 1, dw) < 1e-6  # measured up to 2e-8


@pytest.mark.parametrize("name", ["tensorwise", "rowwise_folded"])
def test_it_is_one_graph_for_a_compiler(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if not ROWS_ON_CPU:
        pytest.skip("this PyTorch's operator has no scales per row on a CPU")

    def backend(*_: object, **__: object) -> ops.Backend:
        return BY_PYTORCH

    backend._dynamo_marked_constant = True  # type: ignore[attr-defined] # as that of `ops`
    monkeypatch.setattr(ops, "backend", backend)
    layer = fp8lt.Linear(40, 35, recipe=name, dtype=torch.bfloat16)
    x = randn(20, 40, on=CPU, dtype=torch.bfloat16).requires_grad_()
    results: list[list[Tensor]] = []
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    forwards: tuple[Callable[[Tensor], Tensor], ...] = (layer, compiled)
    for forward in forwards:
        y = forward(x)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight))])
    assert all(map(torch.equal, *results))


def layer_on_gpu(name: str) -> list[Tensor]:
    x, w, b, dy = (
        randn(*shape, on=torch.device("cuda"), dtype=torch.bfloat16, seed=i)
        for i, shape in enumerate(((200, 1040), (272, 1040), (272,), (200, 272)))
    )
    return run(x, w, b, dy, recipe=name, state=state_for(name, "cuda"))


@pytest.mark.gpu
@NAMES
@pytest.mark.parametrize("emulated", [True, False])
def test_on_a_gpu_it_has_the_numbers_of_cublaslt(
    monkeypatch: pytest.MonkeyPatch, emulated: bool, name: str
) -> None:
    """As on Ada and Blackwell, whose cuBLASLt has no scales per row; and without the extension."""
    native = layer_on_gpu(name)
    monkeypatch.setattr(ops, "backend", lambda *_, **__: ops.Backend(emulated, scaled_mm=True))
    for got, want in zip(layer_on_gpu(name), native, strict=True):
        assert error(got, want) < T_SAME


@pytest.mark.gpu
def test_without_the_extension_by_choice_layers_train_on_a_gpu() -> None:
    code = (
        "import fp8lt, torch\n"
        "assert fp8lt.is_available('rowwise').reason.startswith('FP8LT_BUILD=off')\n"
        "layer = fp8lt.Linear(64, 48, device='cuda', recipe='rowwise')\n"
        "layer(torch.randn(20, 64, device='cuda')).sum().backward()\n"
        "assert layer.weight.grad.isfinite().all()\n"
        "assert fp8lt.build.loaded_library() is None\n"
    )
    env = {**os.environ, "FP8LT_BUILD": "off"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=True, timeout=120)
