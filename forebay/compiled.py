"""C sources of ours, compiled once for this machine and kept in the cache directory.

    sources + compiler + flags + CPU --SHA-256--> <cache>/native/<digest>.so
        found: use it; else say so in a line, compile, try it in a child process, rename

Units are compiled side by side. A library with a trial (`Sources.trial`) is first loaded and tried by a
process of its own, so that an instruction that traps ends that one; what came out is kept beside it in
<digest>.trial. Processes that start together wait for one that compiles (flock); a process killed
meanwhile leaves temporary files that the next compilation overwrites. Everything that is compiled has
another implementation, in Python, for where there is no compiler.
"""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forebay.cache import NoCache, cache_directory

FLAGS = ("-std=gnu11", "-fPIC", "-fvisibility=hidden", "-pthread")
FOR_THIS_CPU = ("-O3", "-march=native")
COMPILERS = ("cc", "gcc", "clang")
_COMPILE_S = 120
_TRIAL_S = 30
_FAILED = "failed: "
_TRIAL = (
    "import ctypes, sys; f = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2]); "
    "f.restype = ctypes.c_int64; print(f())"
)

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
    """``names`` in ``directory``: the first ``units`` of them are compiled, the others included.
    ``what``: what the line that is printed while it is compiled calls it. ``trial``: a function of
    the library without arguments that tries what it can do, and returns how long that took, in ns,
    or a negative number for results that are wrong; "" for none."""

    directory: Path
    names: tuple[str, ...]
    what: str
    units: int = 1
    flags: tuple[str, ...] = FOR_THIS_CPU
    trial: str = ""

    def load(self) -> ctypes.CDLL:
        """The loaded library. Raises `NotCompiled`."""
        path = self._path(_compiler())
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            raise NotCompiled(f"{path} cannot be loaded ({error})") from error

    def trial_ns(self) -> int:
        """How long the trial of the library took that is compiled now if need be. Raises `NotCompiled`."""
        path = self._path(_compiler())
        try:
            return int(path.with_suffix(".trial").read_text())
        except (OSError, ValueError) as error:
            raise NotCompiled(f"{path} has no trial that can be read ({error})") from error

    def _path(self, compiler: list[str]) -> Path:
        """Where the library is, compiled and tried."""
        path = _cache() / f"{self._digest(compiler)}.so"
        if not self._is_there(path):
            self._refuse_failed(path)
            if not _may_compile:
                raise NotCompiled("--kernels torch compiles nothing")
            self._build(compiler, path)
        return path

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
        digest.update(
            repr((compiler, version, self._flags(), self.units, self.trial, _cpu())).encode()
        )
        return digest.hexdigest()[:32]

    def _is_there(self, path: Path) -> bool:
        return path.exists() and (not self.trial or path.with_suffix(".trial").exists())

    def _flags(self) -> list[str]:
        return [*FLAGS, *self.flags]

    def _build(self, compiler: list[str], path: Path) -> None:
        """Compile to a temporary name and rename: whoever finds the file finds all of it."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if self._is_there(path):  # another process was faster
                    return
                self._refuse_failed(path)
                print(
                    f"forebay: compiling {self.what} for this machine (once)",
                    file=sys.stderr,
                    flush=True,
                )
                unfinished = path.with_suffix(".tmp")
                self._compile(compiler, unfinished)
                if self.trial:
                    self._try(unfinished, path.with_suffix(".trial"))
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

    def _compile(self, compiler: list[str], to: Path) -> None:
        """Every unit, as many at a time as there are cores, and then the library of them."""
        directory = to.with_suffix(".units")
        directory.mkdir(exist_ok=True)
        objects = [directory / f"{index}.o" for index in range(self.units)]

        def compile_unit(index: int) -> None:
            source = str(self.directory / self.names[index])
            _run([*compiler, *self._flags(), "-c", source, "-o", str(objects[index])])

        try:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(compile_unit, range(self.units)))
            linked = [*compiler, *self._flags(), "-shared", *map(str, objects), "-o", str(to)]
            _run([*linked, "-lm"])
        finally:
            shutil.rmtree(directory)

    def _try(self, library: Path, result: Path) -> None:
        """Run the trial in a process of its own, and keep what came out. Raises `NotCompiled`."""
        command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library), self.trial]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, text=True)
        except subprocess.TimeoutExpired:
            failed = f"has not ended within {_TRIAL_S} s"
        else:
            if done.returncode == 0 and int(done.stdout) >= 0:
                failed = ""
            elif done.returncode == 0:
                failed = "computes wrong numbers"
            elif done.returncode < 0:
                failed = f"ends with {signal.Signals(-done.returncode).name}"
            else:
                failed = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        unfinished = result.with_suffix(".tmp-trial")
        unfinished.write_text(f"{_FAILED}{failed}" if failed else done.stdout)
        unfinished.rename(result)
        if failed:
            library.unlink()
            self._refuse_failed(library.with_suffix(".so"))

    def _refuse_failed(self, path: Path) -> None:
        """Raise `NotCompiled` if a trial of this very library failed, now or at an earlier start."""
        try:
            text = path.with_suffix(".trial").read_text()
        except OSError:
            return
        if text.startswith(_FAILED):
            raise NotCompiled(f"{self.what}, tried on this CPU, {text.removeprefix(_FAILED)}")


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, timeout=_COMPILE_S, check=True, text=True)


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
    starts = ("vendor_id", "model", "stepping", "flags", "Features")
    return "\n".join(sorted({line for line in _cpuinfo() if line.startswith(starts)}))


def cpu_flags() -> frozenset[str]:
    """Of all cores alike; empty where Linux does not show them."""
    words = [line.partition(":")[2].split() for line in _cpuinfo() if line.startswith("flags")]
    return frozenset.intersection(*map(frozenset, words)) if words else frozenset()


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
