"""Which grids have written a model's pages, kept in the store itself, so that a grid of any other shape reads them.

    key     "forebay-layouts" | root hash of the namespace (model fingerprint, KV dtype, page size) | slot
    record  magic | layer bounds | head bounds | zeros up to RECORD_BYTES

A store's objects are never changed, so the manifest is a row of ``SLOTS`` slots that is only added to: a writer that does not find its
layout takes the first free slot, and looks again who has it (of two writers of one slot, the loser sees the winner's record there).
Slots may be evicted like everything else: readers pass over holes, and a server that lives adds its layout again.
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.pages.block import Part
from forebay.store.backend import GetItem, PageStore, PutItem, Status

SLOTS = 16
RECORD_BYTES = 2048
TAG_BYTES = 8
READ_AGAIN_S = 1.0
ADD_AGAIN_S = 30.0
TRY_AGAIN_S = 5.0
_HEAD = struct.Struct("<4sHH")
_MAGIC = b"FBL1"
_MAX_BOUNDS = (RECORD_BYTES - _HEAD.size) // 2


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid's cut through a page: stage k has the layers from ``layer_bounds[k]`` to ``layer_bounds[k + 1]``, and TP ranks share the
    key/value heads alike. Bounds begin with 0, rise, and end with the number of layers or heads."""

    layer_bounds: tuple[int, ...]
    head_bounds: tuple[int, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """In rank order: all TP ranks of a stage, then the next stage."""
        return tuple(
            Part(range(*layers), range(*heads))
            for layers in itertools.pairwise(self.layer_bounds)
            for heads in itertools.pairwise(self.head_bounds)
        )

    def covers_as(self, other: "Layout") -> bool:
        """Both cut the same page."""
        return (
            self.layer_bounds[-1] == other.layer_bounds[-1]
            and self.head_bounds[-1] == other.head_bounds[-1]
        )

    def encode(self) -> bytes:
        """A record. Raises ``ValueError`` for more bounds than one holds."""
        bounds = (*self.layer_bounds, *self.head_bounds)
        if len(bounds) > _MAX_BOUNDS:
            raise ValueError(f"a layout of {len(bounds)} bounds; a record holds {_MAX_BOUNDS}")
        head = _HEAD.pack(_MAGIC, len(self.layer_bounds), len(self.head_bounds))
        return (head + struct.pack(f"<{len(bounds)}H", *bounds)).ljust(RECORD_BYTES, b"\0")

    @classmethod
    def decode(cls, record: bytes | bytearray) -> "Layout":
        """Raises ``ValueError`` if the bytes are no layout."""
        if len(record) != RECORD_BYTES:
            raise ValueError(f"a record of {len(record)} bytes; {RECORD_BYTES} are due")
        magic, layers, heads = _HEAD.unpack_from(record)
        if magic != _MAGIC or layers + heads > _MAX_BOUNDS:
            raise ValueError("not a layout record")
        bounds = struct.unpack_from(f"<{layers + heads}H", record, _HEAD.size)
        found = cls(bounds[:layers], bounds[layers:])
        for some in (found.layer_bounds, found.head_bounds):
            if (
                len(some) < 2
                or some[0] != 0
                or any(low >= high for low, high in itertools.pairwise(some))
            ):
                raise ValueError(f"bounds {some} do not rise from 0")
        return found


class Manifest:
    """The layouts of one namespace, as far as they are known here. Thread-safe. ``clock``: monotonic seconds."""

    def __init__(
        self,
        store: PageStore,
        namespace: bytes,
        own: Layout,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tag = namespace[:TAG_BYTES]
        self._keys = [b"forebay-layouts" + namespace + bytes([slot]) for slot in range(SLOTS)]
        self._own = own
        self._clock = clock
        self._lock = threading.Lock()
        self._others: tuple[Layout, ...] = ()
        self._read_at = float("-inf")
        self._add_at = float("-inf")

    def name(self, part: Part) -> bytes:
        """What a part of a page adds to the page's hash in the store: so that pages of one model can be told from those of others."""
        return part.name + self._tag

    def names(self, layout: Layout) -> list[bytes]:
        return [self.name(part) for part in layout.parts]

    def others(self, timeout_s: float) -> tuple[Layout, ...]:
        """Layouts but our own in which pages may be there; read again if that was not done lately."""
        with self._lock:
            if self._clock() - self._read_at < READ_AGAIN_S:
                return self._others
            self._read_at = self._clock()
        found = dict.fromkeys(
            layout for layout in self._slots(timeout_s) if isinstance(layout, Layout)
        )
        self._others = tuple(
            layout for layout in found if layout != self._own and layout.covers_as(self._own)
        )
        return self._others

    def add_own(self, timeout_s: float) -> bool:
        """See to it that our own layout is there; False if that is not known. Costs nothing if it was tried lately."""
        with self._lock:
            if self._clock() < self._add_at:
                return False
            self._add_at = self._clock() + TRY_AGAIN_S
        deadline = self._clock() + timeout_s
        while (left := deadline - self._clock()) > 0:
            slots = self._slots(left)
            if self._own in slots:
                self._add_at = self._clock() + ADD_AGAIN_S
                return True
            if Status.NOT_FOUND not in slots or not self._take(slots.index(Status.NOT_FOUND), left):
                return False
        return False

    def _take(self, slot: int, timeout_s: float) -> bool:
        """Put our layout into a free slot. True: look who has it now."""
        try:
            record = self._own.encode()
        except ValueError:  # grids of that many stages are read by their like alone
            return False
        status = self._store.put_from(
            [PutItem(self._keys[slot], record, self._keys[slot])], timeout_s
        )[0]
        return status in (Status.OK, Status.EXISTS)

    def _slots(self, timeout_s: float) -> list[Layout | Status]:
        """What is in each slot, or why that is not known: ``NOT_FOUND`` where it is free. Of several masters each has some slots."""
        buffers = [bytearray(RECORD_BYTES) for _ in self._keys]
        items = [
            GetItem(key, 0, RECORD_BYTES, buffer, key)
            for key, buffer in zip(self._keys, buffers, strict=True)
        ]
        statuses = self._store.get_into(items, timeout_s)
        return [
            _decoded(buffer) if status is Status.OK else status
            for buffer, status in zip(buffers, statuses, strict=True)
        ]


def match_prefix(
    store: PageStore,
    hashes: Sequence[bytes],
    group: bytes,
    own: Layout,
    manifest: Manifest,
    timeout_s: float,
    needed: Part | None = None,
    hint: bool = False,
) -> int:
    """How many leading pages, all of ``group``, the store has whole, each in our own layout or in any other one.

    ``needed``: only as far as this part of them is concerned; None: all parts, for whoever asks ahead. ``hint``: they will be read, but
    not at once.
    """
    deadline = time.monotonic() + timeout_s

    def count(layout: Layout, start: int) -> int:
        names = [
            manifest.name(part) for part in layout.parts if needed is None or part.overlaps(needed)
        ]
        left = deadline - time.monotonic()
        return (
            store.match_prefix(hashes[start:], names, hint=hint, timeout_s=left, group=group)
            if left > 0
            else 0
        )

    matched = count(own, 0)
    if matched == len(hashes) or not (others := manifest.others(deadline - time.monotonic())):
        return matched
    layouts = itertools.cycle((*others, own))
    misses = 1  # layouts in a row that have no next page: our own is the first
    while matched < len(hashes) and misses <= len(others):
        more = count(next(layouts), matched)
        misses = 1 if more else misses + 1
        matched += more
    return matched


def _decoded(record: bytearray) -> Layout | Status:
    try:
        return Layout.decode(record)
    except ValueError:
        return Status.INVALID
