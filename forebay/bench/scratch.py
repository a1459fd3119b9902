"""Directories for one run that a killed run does not leave behind: they lie under the user's cache directory, each held by a lock of
its process, and whoever makes the next one removes those that nobody holds any more.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forebay.cache import cache_directory

_LOCK = ".lock"


@contextlib.contextmanager
def scratch_directory(purpose: str) -> Iterator[Path]:
    """A fresh directory, removed at the end. Raises ``OSError`` if none can be made."""
    root = cache_directory() / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    with _held(root / _LOCK):  # so that a sweep never meets a directory that has no lock yet
        sweep(root)
        directory = Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=root))
        lock = _lock(directory / _LOCK)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def sweep(root: Path) -> None:
    """Remove the directories of processes that are gone."""
    for directory in root.iterdir():
        if not directory.is_dir():
            continue
        try:
            lock = _lock(directory / _LOCK)
        except BlockingIOError:
            continue
        except OSError:
            lock = -1
        shutil.rmtree(directory, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    lock = _lock(path, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, wait: bool = False) -> int:
    """A descriptor that holds the file's lock until it is closed. Raises ``BlockingIOError`` if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
