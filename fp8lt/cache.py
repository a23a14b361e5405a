"""The cache folder of compiled extensions, and the lock that lets one process build for all."""

import contextlib
import fcntl
import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import settings
from .toolchain import BuildError


def folder() -> Path:
    """Return the first folder for compiled extensions that this user, and nobody else, may use."""
    tried = [settings.read().cache_dir]
    for variable, otherwise in (("TORCH_EXTENSIONS_DIR", ""), ("XDG_CACHE_HOME", "~/.cache")):
        parent = os.environ.get(variable) or otherwise
        tried.append(parent and os.path.join(parent, "fp8lt"))
    temporary = os.path.join(tempfile.gettempdir(), f"fp8lt-{os.geteuid()}")
    failures: list[str] = []
    refused: list[str] = []  # there, and not this user's alone
    for name in filter(None, (*tried, temporary)):
        found = Path(name)
        try:
            found = found.expanduser()  # an error where there is no home
            found.mkdir(parents=True, exist_ok=True, mode=0o700)
            if reason := why_not_ours(found, linked=name is not temporary):
                refused.append(f"{found}: {reason}")
                failures.append(refused[-1])
                continue
            with tempfile.TemporaryFile(dir=found):
                for text in refused:
                    say(f"not using the cache folder {text}; using {found}")
                return found.resolve()
        except (OSError, RuntimeError) as error:
            failures.append(f"{found}: {error}")
    raise BuildError(
        "no folder to keep the compiled extension in; set FP8LT_CACHE_DIR to one that can be "
        "written to. Tried:\n" + "\n".join(f"  {failure}" for failure in failures)
    )


def why_not_ours(path: Path, linked: bool = False) -> str | None:
    """Say who else could put code there, which would be loaded; None if nobody could.

    linked: the folder may be a link. Anybody can put one among temporary files.
    """
    found = path.stat() if linked else path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a folder"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, who could put code there"
    if found.st_mode & 0o022:
        mode, remedy = stat.S_IMODE(found.st_mode), f"chmod go-w {shlex.quote(str(path))}"
        return f"other users may write to it (mode {mode:o}); run: {remedy}"
    return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock of this machine; False where the file system has none."""
    held = True
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that compiles the extension (lock: {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # build beside others, the first rename wins
            held = False
        try:
            yield held
        finally:
            # Not by closing: what was forked meanwhile has the file open, too, and would hold it.
            if held:
                fcntl.flock(file, fcntl.LOCK_UN)


def say(text: str) -> None:
    """Tell the user about something that takes time, on stderr."""
    print(f"fp8lt: {text}", file=sys.stderr, flush=True)
