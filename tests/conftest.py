"""Which devices the tests run on.

Every test that takes `on` runs on the CPU (emulated) and on the GPU (native, mark `gpu`). Without
an FP8 GPU the latter are skipped and the summary says why; a GPU whose extension does not build
fails them.
"""

import pytest
import torch

import fp8lt.device


def _no_gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA GPU in this machine"
    support = fp8lt.device.support(torch.device("cuda", 0))
    return None if support.native else support.reason


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest) -> torch.device:
    """The device of a test's tensors."""
    return torch.device(request.param)


@pytest.fixture
def opcheck_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.library.opcheck` take FP8 tensors.

    It looks for mutated inputs with allclose, which PyTorch lacks for FP8: compare bytes.
    """
    allclose = torch.allclose
    monkeypatch.setattr(
        torch,
        "allclose",
        lambda a, b, **options: (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if a.dtype in fp8lt.device.OCP
            else allclose(a, b, **options)
        ),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
