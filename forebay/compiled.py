"""C sources of ours, compiled once for this machine and kept in the cache directory.

    sources + compiler + flags + CPU --SHA-256--> <cache>/native/<digest>.so    found: use it; else compile, rename, say so in a line

Processes that start together wait for one that compiles (flock); a process killed meanwhile leaves a temporary file that the next
compilation overwrites. Everything that is compiled has another implementation, in Python, for where there is no compiler.
"""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forebay.cache import NoCache, cache_directory

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120

_may_compile = True


class NotCompiled(Exception):
    """The library cannot be had here. One line; there is another implementation of what it does."""


def compile_nothing() -> None:
    """From now on this process takes what has been compiled before, and compiles nothing itself
    (`--kernels torch`). Its parent says so to every process of a server, before it loads anything."""
    global _may_compile
    _may_compile = False


def may_compile() -> bool:
    """Whether this process compiles what it does not find; what its children are told."""
    return _may_compile


@dataclass(frozen=True)
class Sources:
    """``names`` in ``directory``: the file to compile first, then what it includes. ``what``: what
    the line that is printed while it is compiled calls it."""

    directory: Path
    names: tuple[str, ...]
    what: str

    def load(self) -> ctypes.CDLL:
        """The loaded library. Raises `NotCompiled`."""
        compiler = _compiler()
        path = _cache() / f"{self._digest(compiler)}.so"
        if not path.exists():
            if not _may_compile:
                raise NotCompiled("--kernels torch compiles nothing")
            self._build(compiler, path)
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise NotCompiled(f"{path} cannot be loaded ({error})") from error

    def _digest(self, compiler: list[str]) -> str:
        """Names the library: different for anything that could make it another one, or one for another machine."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update((self.directory / name).read_bytes())
        try:
            version = subprocess.run(
                [*compiler, "--version"], capture_output=True, timeout=_COMPILE_S, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise NotCompiled(f"{shlex.join(compiler)} --version fails ({error})") from error
        digest.update(repr((compiler, version, FLAGS, _cpu())).encode())
        return digest.hexdigest()[:32]

    def _build(self, compiler: list[str], path: Path) -> None:
        """Compile to a temporary name and rename: whoever finds the file finds all of it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if path.exists():  # another process was faster
                    return
                print(
                    f"forebay: compiling {self.what} for this machine (once)",
                    file=sys.stderr,
                    flush=True,
                )
                unfinished = path.with_suffix(".tmp")
                command = [
                    *compiler,
                    *FLAGS,
                    str(self.directory / self.names[0]),
                    "-o",
                    str(unfinished),
                    "-lm",
                ]
                subprocess.run(
                    command, capture_output=True, timeout=_COMPILE_S, check=True, text=True
                )
                unfinished.rename(path)
        except subprocess.CalledProcessError as error:
            first = next(
                (line for line in str(error.stderr).splitlines() if "error" in line),
                f"status {error.returncode}",
            )
            raise NotCompiled(
                f"{shlex.join(compiler)} does not compile them ({first.strip()})"
            ) from error
        except (OSError, subprocess.SubprocessError) as error:
            raise NotCompiled(f"they cannot be compiled into {path.parent} ({error})") from error


def _cache() -> Path:
    """In the cache directory, as converted models are. Raises `NotCompiled`."""
    try:
        return cache_directory() / "native"
    except NoCache as error:
        raise NotCompiled(str(error)) from error


def _compiler() -> list[str]:
    """`CC` if it is set, else the first that is there."""
    names = [os.environ["CC"]] if os.environ.get("CC") else list(COMPILERS)
    for name in names:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise NotCompiled(f"no C compiler ({', '.join(names)}) is there")


def _cpu() -> str:
    """What -march=native looks at, as far as Linux shows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(
        sorted(
            {
                line
                for line in lines
                if line.startswith(("vendor_id", "model", "stepping", "flags", "Features"))
            }
        )
    )
