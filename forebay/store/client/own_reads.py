"""One small value that only the SSD of this machine has, read by the client itself while it asks the master where the value is.

    log.hints: where it ought to lie --> begin to read -- ask the master --> does the head of what was read name the generation that
                                                                             the master named, and are its checksums right?

Nothing is believed before that. The bytes of a generation never change, so it does not matter when they were read. In any other case
the holder is asked, as it is for large values and for several at once, which it reads quicker.
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
from forebay.store.holder.log.record import BLOCK_BYTES, Kind, RecordError, read_head
from forebay.store.native.library import copy_crc32c
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
    """A read that was begun. Take it with ``settle``, or leave it."""

    def __init__(self, view: LogView, holder: int, tenant: str, key: bytes, hint: Hint, file: OpenFile, reader: _Reader) -> None:
        self._view, self._holder, self._tenant, self._key = view, holder, tenant, key
        self._hint, self._file, self._reader = hint, file, reader

    @staticmethod
    def begin(view: LogView, holder: int, tenant: str, key: bytes) -> "OwnRead | None":
        """None if there is nothing to be read, or no way to."""
        hint = view.find(tenant, key)
        count = hint.blocks * BLOCK_BYTES if hint is not None else 0
        if hint is None or not BLOCK_BYTES < count <= LARGEST_BYTES:
            return None
        reader, file = _reader(), view.file(hint.file)
        if reader is None or file is None or not reader.read.begin(file.fd, hint.first * BLOCK_BYTES, count):
            return None
        return OwnRead(view, holder, tenant, key, hint, file, reader)

    def settle(self, want: Want, deadline: float) -> bool:
        """Whether ``want``, which was located since, is filled."""
        if not any(spot.holder == self._holder and spot.tier is Tier.SSD for spot in want.spots) or want.spots[0].tier is not Tier.SSD:
            return False
        count = self._reader.read.end(min(deadline, time.monotonic() + FAILOVER_S))
        if count != self._hint.blocks * BLOCK_BYTES or not self._take(want, count):
            self._view.forget(self._hint.file)
            return False
        want.status, want.spots, want.tier = Status.OK, [], Tier.SSD
        self._view.note(want.key, want.generation, len(want.target))
        return True

    def _take(self, want: Want, count: int) -> bool:
        """Whether the record is what is wanted, and whole: then its bytes are in the target."""
        try:
            head = read_head(self._reader.block[:BLOCK_BYTES])
        except RecordError:
            return False
        wanted = (Kind.VALUE, self._tenant, want.key, want.generation)
        if (head.kind, head.tenant, head.key, head.generation) != wanted or head.record_bytes != count:
            return False
        value = self._reader.bytes[BLOCK_BYTES : BLOCK_BYTES + head.value_bytes]
        if len(want.target) == len(value):
            return copy_crc32c(want.target, value) == head.value_crc
        if want.offset + len(want.target) > len(value) or crc32c(value.data) != head.value_crc:
            return False
        want.target[:] = value[want.offset : want.offset + len(want.target)]
        return True


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
