"""Where a build looks for its tools and keeps what it makes: bugs that such libraries have had."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from fp8lt import build, cache, recipe, toolchain
from fp8lt.toolchain import ToolchainError

CUDA = torch.device("cuda", 0)
NAMES = pytest.mark.parametrize("name", recipe.NAMES)


def test_the_cache_is_the_first_folder_that_can_be_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-97: those asked for, then the user's; a file, /proc and /dev/null are none."""
    (tmp_path / "file").touch()
    folders = {
        "FP8LT_CACHE_DIR": "asked",
        "TORCH_EXTENSIONS_DIR": "torch/fp8lt",
        "XDG_CACHE_HOME": "user/fp8lt",
        "HOME": "home/.cache/fp8lt",
    }
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder.split("/")[0]))
    for (name, folder), bad in zip(
        folders.items(), ("/proc/fp8lt", str(tmp_path / "file"), None, "/dev/null"), strict=True
    ):
        assert cache.folder() == tmp_path / folder
        monkeypatch.delenv(name) if bad is None else monkeypatch.setenv(name, bad)
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(build.BuildError, match="set FP8LT_CACHE_DIR") as caught:
        cache.folder()
    for tried in ("/proc/fp8lt", f"{tmp_path}/file/fp8lt", "/dev/null/.cache/fp8lt"):
        assert f"\n  {tried}: " in str(caught.value)


def test_a_folder_that_cannot_be_written_to_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BUG-97: it is there, and can be read."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        theirs, ours = top / "theirs", top / "ours"
        theirs.mkdir(mode=0o555)
        ours.mkdir()
        ours.chmod(0o777)
        monkeypatch.setenv("FP8LT_CACHE_DIR", str(theirs))
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(ours))
        user = os.geteuid()
        if user == 0:  # whom no mode stops
            os.seteuid(65534)
        try:
            assert cache.folder() == (ours / "fp8lt").resolve()
        finally:
            os.seteuid(user)


def test_a_home_that_cannot_be_found_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user without an entry in the system's list, as in a container."""

    def no_home(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", no_home)
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8LT_CACHE_DIR", str(tmp_path / "asked"))
    assert cache.folder() == tmp_path / "asked"
    monkeypatch.setenv("FP8LT_CACHE_DIR", "~nobody/asked")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache.folder() == tmp_path / f"fp8lt-{os.geteuid()}"


@pytest.mark.parametrize("kind", ["ours", "open to all", "a link"])
def test_without_a_home_the_cache_is_a_private_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """BUG-97: code is loaded from there."""
    for name in ("FP8LT_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"fp8lt-{os.getuid()}"
    if kind == "ours":
        assert cache.folder() == cache.folder() == folder
        assert folder.stat().st_mode & 0o077 == 0
        return
    if kind == "open to all":
        folder.mkdir()
        folder.chmod(0o777)
        why = "other users may write to it"
    else:
        (tmp_path / "other").mkdir()
        folder.symlink_to(tmp_path / "other")
        why = "it is not a folder"
    with pytest.raises(build.BuildError, match=why):
        cache.folder()


@pytest.mark.parametrize("kind", ["open to a group", "open to all", "of another user"])
def test_a_cache_that_others_may_write_to_is_refused_and_a_private_one_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    """Code is loaded from there: whoever can write to it can run theirs."""
    theirs, home = tmp_path / "a cache", tmp_path / "home"
    theirs.mkdir()
    if kind == "of another user":
        if os.geteuid() != 0:
            pytest.skip("root alone can give a folder away")
        os.chown(theirs, 65534, -1)
        why = "it belongs to user 65534, who could put code there"
    else:
        mode = 0o775 if "group" in kind else 0o757
        theirs.chmod(mode)
        why = f"other users may write to it (mode {mode:o}); run: chmod go-w '{theirs}'"
    monkeypatch.setenv("FP8LT_CACHE_DIR", str(theirs))
    monkeypatch.setenv("HOME", str(home))
    for name in ("TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    private = home / ".cache" / "fp8lt"
    assert cache.folder() == private
    assert private.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().err
    assert said == f"fp8lt: not using the cache folder {theirs}: {why}; using {private}\n"
    theirs.chmod(0o755)
    os.chown(theirs, os.geteuid(), -1)
    assert cache.folder() == theirs
    (tmp_path / "link").symlink_to(theirs)
    monkeypatch.setenv("FP8LT_CACHE_DIR", str(tmp_path / "link"))
    assert cache.folder() == theirs
    assert capsys.readouterr().err == ""


# -------------------------------------------------------------------------------- missing tools


def test_a_ninja_that_happens_to_lie_here_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-99."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ninja").mkdir()
    assert toolchain.ninja_dir().is_absolute()


def fake_toolkit(home: Path, version: str = "97.1.2") -> Path:
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho release {version.rsplit('.', 1)[0]}, V{version}\n")
    nvcc.chmod(0o755)
    return home


def test_a_cuda_home_that_does_not_exist_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BUG-100: wheels of the runtime alone are no toolkit; the error says where it looked."""
    wheels = tmp_path / "nvidia" / "cu97"
    (wheels / "include").mkdir(parents=True)
    (wheels / "include" / "cublasLt.h").touch()
    monkeypatch.setattr(toolchain, "wheel_dirs", lambda: [wheels])
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("CUDA_PATH", str(fake_toolkit(tmp_path / "old", "96.0.1")))
    with pytest.raises(ToolchainError, match=r"pip install 'fp8lt\[toolkit\]'") as caught:
        toolchain._cuda_home("97")
    assert "CUDA_HOME: no working bin/nvcc in /nowhere\n" in str(caught.value)
    assert f"CUDA_PATH: {tmp_path}/old is CUDA 96.0.1\n" in str(caught.value)
    assert f"wheels: no working bin/nvcc in {wheels}" in str(caught.value)
    fake_toolkit(tmp_path / "new")
    monkeypatch.setattr(toolchain, "wheel_dirs", lambda: [wheels, tmp_path / "new"])
    assert toolchain._cuda_home("97") == (tmp_path / "new", "97.1.2")
