"""The library of `stage.c`, compiled once for this machine and kept in the cache directory.

    sources + compiler + flags + CPU --SHA-256--> <cache>/native/<digest>.so    found: use it; else compile, rename, say so in a line

Processes that start together wait for one that compiles (flock); a process killed meanwhile leaves a temporary file that the next
compilation overwrites.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import platformdirs

SOURCES = ("stage.c", "stage.h", "kernels.h", "pool.h", "vec.h")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120
_HERE = Path(__file__).parent


class NoKernels(Exception):
    """The library cannot be had here. One line; PyTorch's kernels do the same work."""


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises `NoKernels`."""
    compiler = _compiler()
    path = _directory() / f"{_digest(compiler)}.so"
    if not path.exists():
        _build(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"{path} cannot be loaded ({error})") from error


def _directory() -> Path:
    """In the cache directory, as converted models are (FOREBAY_CACHE_DIR)."""
    override = os.environ.get("FOREBAY_CACHE_DIR")
    return Path(override or platformdirs.user_cache_dir("forebay", appauthor=False)) / "native"


def _compiler() -> list[str]:
    """`CC` if it is set, else the first that is there."""
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    for name in names:
        command = shlex.split(name)
        if shutil.which(command[0]):
            return command
    raise NoKernels(f"no C compiler ({', '.join(names)}) is there")


def _digest(compiler: list[str]) -> str:
    """Names the library: different for anything that could make it another one, or one for another machine."""
    digest = hashlib.sha256()
    for part in (*(_HERE / name for name in SOURCES),):
        digest.update(part.read_bytes())
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_COMPILE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"{shlex.join(compiler)} --version fails ({error})") from error
    digest.update(repr((compiler, version, FLAGS, _cpu())).encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """What -march=native looks at, as far as Linux shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("vendor_id", "model", "stepping", "flags", "Features"))}))


def _build(compiler: list[str], path: Path) -> None:
    """Compile to a temporary name and rename: whoever finds the file finds all of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():  # another process was faster
                return
            print("forebay: compiling kernels for this machine (once)", file=sys.stderr, flush=True)
            unfinished = path.with_suffix(".tmp")
            command = [*compiler, *FLAGS, str(_HERE / SOURCES[0]), "-o", str(unfinished), "-lm"]
            subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=True, text=True)
            unfinished.rename(path)
    except subprocess.CalledProcessError as error:
        first = next((line for line in str(error.stderr).splitlines() if "error" in line), f"status {error.returncode}")
        raise NoKernels(f"{shlex.join(compiler)} does not compile them ({first.strip()})") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernels(f"they cannot be compiled into {path.parent} ({error})") from error


if __name__ == "__main__":  # set-up: so that the first server need not
    try:
        library()
    except NoKernels as error:
        print(f"forebay: no compiled kernels: {error}; PyTorch's will be used, which is slower", file=sys.stderr)
