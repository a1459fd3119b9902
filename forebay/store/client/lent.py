"""Memory of this process that stores on this machine may read for themselves, so that a put of it copies nothing on our side.

It is a memfd that can no longer shrink (a reader would get a SIGBUS), mapped here. What a put hands over of it may change under the
holder's hands if the put has been given up meanwhile: the holder checks what it has copied against the checksum that came with the put.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass

import numpy as np

from forebay.store.client.channel import Bytes


@dataclass(frozen=True, slots=True)
class Lent:
    """``size`` bytes of memfd ``fd``, mapped at ``address``."""

    fd: int
    address: int
    size: int

    def place(self, source: Bytes) -> int | None:
        """Where in the memory ``source`` lies; None if it does not."""
        at = source.ctypes.data - self.address
        return at if 0 <= at <= self.size - source.nbytes else None


def lendable(name: str, size: int) -> tuple[Lent, mmap.mmap]:
    """Fresh memory of ``size`` bytes, at least one, that may be lent; its pages are there once they are written. Raises ``OSError``."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = mmap.mmap(fd, size)
    return Lent(fd, np.frombuffer(memory, np.uint8).ctypes.data, size), memory
