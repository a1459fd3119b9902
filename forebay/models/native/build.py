"""The library of `stage.c` (`forebay.compiled`)."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

from forebay.compiled import NotCompiled, Sources

NoKernels = NotCompiled  # PyTorch's kernels do the same work
SOURCES = Sources(
    Path(__file__).parent, ("stage.c", "stage.h", "kernels.h", "pool.h", "vec.h"), "kernels"
)


@cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises `NoKernels`."""
    return SOURCES.load()


if __name__ == "__main__":  # set-up: so that the first server need not
    try:
        library()
    except NoKernels as error:
        print(
            f"forebay: no compiled kernels: {error}; PyTorch's will be used, which is slower",
            file=sys.stderr,
        )
