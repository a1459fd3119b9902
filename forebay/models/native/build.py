"""The library of the kernels, for each set of instructions that it is written for (`vec.h`).

    library("auto")   the builds that this CPU says it can run, best first: compiled, tried, loaded
    library("avx2")   that one

A build is tried in a child process before it is loaded here (`forebay.compiled`): it has to get through
without a trap, and a row has to come out the same bit for bit beside others and alone. Where it is not
known beforehand which of two is faster, both are built and their trials decide.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forebay.compiled import NotCompiled, Sources, cpu_flags

NoKernels = NotCompiled  # PyTorch's kernels do the same work
AUTO = "auto"
_UNITS = (
    "layer_bf16.c",
    "attention_f32.c",
    "attention_bf16.c",
    "layer_f32.c",
    "stage.c",
    "trial.c",
    "pool.c",
)
_HEADERS = (
    "attention.h", "engine.h", "lanes16.h", "lanes4.h", "lanes8.h", "layer.h", "numbers.h", "pages.h",
    "pool.h", "stage.h", "tile.h", "vec.h",
)  # fmt: skip
_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])


@dataclass(frozen=True)
class Build:
    """``needs``: flags of the CPU. ``rival``: another build that may turn out to be faster."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    rival: str = ""

    @property
    def sources(self) -> Sources:
        flags = ("-O2", "-ffp-contract=off", *self.flags)
        what = f"kernels ({self.name})"
        return Sources(
            Path(__file__).parent, _UNITS + _HEADERS, what, len(_UNITS), flags, "forebay_trial"
        )

    def runs_here(self) -> bool:
        return (platform.machine() == "x86_64" and self.needs <= cpu_flags()) or not self.needs


BUILDS = (
    Build("avx512bf16", ("-march=x86-64-v4", "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    # Some CPUs lower their clock for 512 bits.
    Build("avx512", ("-march=x86-64-v4",), _AVX512, rival="avx2"),
    Build("avx2", ("-march=x86-64-v3",), _AVX2),
    Build("plain", ()),
)


@cache
def library(build: str = AUTO) -> ctypes.CDLL:
    """The loaded library. Raises `NoKernels`."""
    if build == AUTO:
        return _best().sources.load()
    named = next(one for one in BUILDS if one.name == build)
    if missing := sorted(named.needs - cpu_flags()):
        raise NoKernels(f"{build} needs a CPU with {', '.join(missing)}")
    return named.sources.load()


def _best() -> Build:
    """The first that compiles and gets through its trial, or its rival if that was faster."""
    here = [build for build in BUILDS if build.runs_here()]
    failed: list[NoKernels] = []
    for build in here:
        try:
            own_ns = build.sources.trial_ns()
        except NoKernels as error:
            failed.append(error)
            continue
        for reason in failed:
            _say(f"{reason}; a lesser build is taken")
        for rival in here:
            if rival.name == build.rival and _trial_ns(rival, own_ns) < own_ns:
                return rival
        return build
    raise failed[0]


def _trial_ns(build: Build, otherwise: int) -> int:
    try:
        return build.sources.trial_ns()
    except NoKernels:
        return otherwise


def _say(line: str) -> None:
    print(f"forebay: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":  # set-up: so that the first server need not
    try:
        library()
    except NoKernels as error:
        _say(f"no compiled kernels: {error}; PyTorch's will be used, which is slower")
