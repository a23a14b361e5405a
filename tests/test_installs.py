"""The wheel and the sdist: what is in them, and that they run as they were installed."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = """
import pathlib, torch, fp8lt
assert pathlib.Path(fp8lt.__file__).is_relative_to({place!r}), fp8lt.__file__
for name in fp8lt.recipe.NAMES:
    layer = fp8lt.Linear(40, 24, recipe=name)
    layer(torch.randn(3, 40)).sum().backward()
    assert layer.weight.grad.isfinite().all()
with fp8lt.fp8_autocast():
    torch.nn.Linear(40, 24)(torch.randn(3, 40))
assert fp8lt.is_available(device="cpu") == (False, "a CPU has no FP8 units")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, as for an index."""
    out = tmp_path_factory.mktemp("dist")
    # A setuptools that is new enough for pyproject.toml saves fetching one.
    new = int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    command = [sys.executable, "-m", "build", "-q", *["--no-isolation"] * new, "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True, text=True, timeout=300)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place)]
    subprocess.run([*pip, str(built[0])], check=True, capture_output=True, timeout=300)
    return place


def use(place: Path, where: Path, *, code: str = USE, **env: str) -> subprocess.CompletedProcess:
    """Run a user's program, in a folder of its own, with the package from `place`."""
    home = where / "home"
    home.mkdir(exist_ok=True)
    own = {"PYTHONPATH": str(place), "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code.format(place=str(place))], cwd=where, text=True,
        env={**os.environ, **own, **env}, capture_output=True, check=False, timeout=400,
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}


def test_the_wheel_has_the_whole_package_and_the_sdist_the_tests_too(
    built: tuple[Path, Path],
) -> None:
    wheel, sdist = built
    package = contents(ROOT / "fp8lt")
    with zipfile.ZipFile(wheel) as file:
        got = {n.removeprefix("fp8lt/"): file.read(n) for n in file.namelist()
               if n.startswith("fp8lt/")}  # fmt: skip
        others = {n.split("/")[0] for n in file.namelist()} - {"fp8lt"}
    assert got == package
    assert {name.split("-")[0] for name in others} == {"fp8lt"}  # fp8lt-0.1.0.dist-info
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    tests = {f"tests/{name}" for name in contents(ROOT / "tests")}
    assert {f"fp8lt/{name}" for name in package} | tests <= names


@pytest.mark.parametrize("optimised", ["", "2"])
def test_the_wheel_computes_where_it_is_installed(
    installed: Path, tmp_path: Path, optimised: str
) -> None:
    """PYTHONOPTIMIZE=2 leaves out assertions and docstrings."""
    code = USE if not optimised else USE.replace("assert ", "assert_ = ")
    done = use(installed, tmp_path, code=code, PYTHONOPTIMIZE=optimised)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_from_a_zip_file_it_computes_and_says_why_it_cannot_build(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel = built[0]
    done = use(wheel, tmp_path, FP8LT_BUILD="force")
    assert done.returncode == 0, done.stderr
    assert (
        "without its CUDA extension: the extension's sources are no files of their" in done.stderr
    )
    assert "Install fp8lt unpacked, with pip" in done.stderr
