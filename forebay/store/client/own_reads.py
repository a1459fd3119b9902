"""One small value that only the SSD of this machine has, read by the client itself while it asks the master where the value is.

    log.hints: where it ought to lie --> begin to read -- ask the master --> does the head of what was read name the generation that
                                             |                               the master named, and are its checksums right?
                                             '- the holder gives its word, and lives --> ... the generation that the hint named?

Nothing is believed before that. The bytes of a generation never change, so it does not matter when they were read. In any other case
the holder is asked, as it is for large values and for several at once, which it reads quicker. A holder that runs beside its master
gives its word for what its hints show (`log.hints`); then nobody is asked for a whole value.
"""

import threading
import time

import numpy as np

from forebay.store.backend import Status
from forebay.store.client.channel import Bytes
from forebay.store.client.gets import FAILOVER_S, Want
from forebay.store.crc import crc32c
from forebay.store.holder.log.files import aligned_buffer
from forebay.store.holder.log.hints import LARGEST_BYTES, Hint, LogView, OpenFile
from forebay.store.holder.log.record import BLOCK_BYTES, is_head, padded
from forebay.store.native.library import address_of, copy_crc32c
from forebay.store.native.reads import OneRead
from forebay.store.wire.messages import Tier

_threads = threading.local()


class _Reader:
    """One thread's: a read at a time into memory of its own. Raises ``OSError`` where there are no such reads."""

    def __init__(self) -> None:
        self.block = aligned_buffer(LARGEST_BYTES)
        self.bytes: Bytes = np.frombuffer(self.block, np.uint8)
        self.read = OneRead(self.bytes.ctypes.data, LARGEST_BYTES)


class OwnRead:
    """A read to be begun beside the question to the master (``read``). Take it with ``settle``, or leave it."""

    __slots__ = ("_file", "_hint", "_holder", "_reader", "_tenant", "read", "view")

    def __init__(
        self, view: LogView, holder: int, tenant: str, hint: Hint, file: OpenFile, reader: _Reader
    ) -> None:
        self.view, self._holder, self._tenant = view, holder, tenant
        self._hint, self._file, self._reader = hint, file, reader
        self.read = reader.read

    @staticmethod
    def prepare(
        view: LogView, holder: int, tenant: str, key: bytes, target: Bytes | None = None
    ) -> "OwnRead | None":
        """None if there is nothing to be read, or no way to. ``target``: where the whole value goes if it is as long."""
        hint = view.find(tenant, key)
        count = hint.blocks * BLOCK_BYTES if hint is not None else 0
        if hint is None or not BLOCK_BYTES < count <= LARGEST_BYTES:
            return None
        reader, file = _reader(), view.file(hint.file)
        if reader is None or file is None:
            return None
        fits = target is not None and BLOCK_BYTES + padded(len(target)) == count
        copy_to, copied = (
            (address_of(target), len(target)) if fits and target is not None else (0, 0)
        )
        if not reader.read.prepare(
            file.fd, hint.first * BLOCK_BYTES, count, copy_to, BLOCK_BYTES, copied
        ):
            return None
        return OwnRead(view, holder, tenant, hint, file, reader)

    def unasked(self, want: Want, deadline: float) -> bool:
        """Whether ``want``, which nobody was asked about, is filled. If not, ask, and ``settle``."""
        hint, lock, count = self._hint, self.view.lock, self._hint.blocks * BLOCK_BYTES
        if (
            not hint.word
            or lock is None
            or want.offset
            or BLOCK_BYTES + padded(len(want.target)) != count
        ):
            return False
        if (
            self.read.while_locked(
                lock.fd, self.view.mark, min(deadline, time.monotonic() + FAILOVER_S)
            )
            != count
        ):
            return False
        want.generation, want.length = hint.generation, len(want.target)
        if not self._take(want, count):
            return False
        want.status, want.tier = Status.OK, Tier.SSD
        self.view.note(want.key, want.generation, want.length, unasked=True)
        return True

    def settle(self, want: Want, deadline: float) -> bool:
        """Whether ``want``, which was located since, is filled."""
        spots = want.spots  # memory first
        if (
            not spots
            or spots[0].tier is not Tier.SSD
            or self._holder not in [spot.holder for spot in spots]
        ):
            return False
        count = self.read.end(min(deadline, time.monotonic() + FAILOVER_S))
        if count != self._hint.blocks * BLOCK_BYTES or not self._take(want, count):
            self.view.forget(self._hint.file)
            return False
        want.status, want.spots, want.tier = Status.OK, [], Tier.SSD
        self.view.note(want.key, want.generation, len(want.target))
        return True

    def _take(self, want: Want, count: int) -> bool:
        """Whether the record is what is wanted, and whole: then its bytes are in the target."""
        length = want.length
        if BLOCK_BYTES + padded(length) != count:
            return False
        whole = len(want.target) == length
        crc = self.read.copied_crc() if whole else None
        if crc is None:
            value = self._reader.bytes[BLOCK_BYTES : BLOCK_BYTES + length]
            if whole:
                crc = copy_crc32c(want.target, value)
            else:
                crc = crc32c(value.data)
                want.target[:] = value[want.offset : want.offset + len(want.target)]
        return is_head(self._reader.block, want.generation, length, crc, self._tenant, want.key)


def _reader() -> _Reader | None:
    """This thread's, if there can be one."""
    try:
        known: _Reader | None = _threads.reader
    except AttributeError:
        try:
            known = _Reader()
        except OSError:
            known = None
        _threads.reader = known
    return known
