"""The store's compiled loops against their twins in numpy; what a segment gives and refuses; how its memory is mapped."""

import os
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.store.backend import Status
from forebay.store.crc import crc32c
from forebay.store.holder.mapping import HUGE_PAGE_BYTES, Mapping, Staging
from forebay.store.holder.segment import HEADER_BYTES, MappedSegment, Segment
from forebay.store.native import library
from forebay.store.native.library import Slice, copy_crc32c

RANDOM = np.random.default_rng(5).integers(0, 255, 200_000, dtype=np.uint8)


@pytest.fixture(params=["compiled", "numpy"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(library, "_copy_out", lambda: None)
        monkeypatch.setattr(library, "_copy_crc32c", lambda: None)
    return str(request.param)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(1 << 20)
    yield made
    made.close()


def put(segment: Segment, offset: int, stamp: int, value: bytes) -> None:
    segment.begin(offset, stamp, len(value))
    segment.data(offset, len(value))[:] = value
    segment.publish(offset)


def mapped(segment: Segment) -> MappedSegment:
    return MappedSegment(os.dup(segment.fd), segment.capacity)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 130_000), st.integers(0, 200), st.integers(0, 200), st.booleans())
def test_a_copy_with_its_checksum(count: int, source_at: int, target_at: int, stream: bool) -> None:
    source = RANDOM[source_at : source_at + count]
    around = np.full(count + target_at + 64, 7, np.uint8)
    target = around[target_at : target_at + count]
    assert copy_crc32c(target, source, stream=stream) == crc32c(source.data)
    assert np.array_equal(target, source)
    assert (around[:target_at] == 7).all() and (around[target_at + count :] == 7).all()


@pytest.mark.parametrize("length", [1, 63, 64, 4096, 100_003])
@pytest.mark.parametrize("start", [0, 1, 77])
@pytest.mark.parametrize("stream_from", [0, 1 << 40])
def test_slices_of_live_objects(
    segment: Segment, kind: str, monkeypatch, length: int, start: int, stream_from: int
) -> None:
    monkeypatch.setattr(library, "STREAM_FROM_BYTES", stream_from)
    values = [RANDOM[at : at + length + start].tobytes() for at in (0, 1000)]
    for number, value in enumerate(values):
        put(segment, number * (512 << 10), 9 + number, value)
    client = mapped(segment)
    around = np.zeros((2, length + 130), np.uint8)
    targets = [row[65 : 65 + length] for row in around]
    wanted = [
        Slice(number * (512 << 10), 9 + number, start, target)
        for number, target in enumerate(targets)
    ]
    assert client.copy_out(wanted) == [Status.OK, Status.OK]
    assert [target.tobytes() for target in targets] == [value[start:] for value in values]
    assert not around[:, :65].any() and not around[:, 65 + length :].any()
    client.close()


def test_what_is_not_there_is_refused_one_by_one(segment: Segment, kind: str) -> None:
    put(segment, 0, 5, b"x" * 1000)
    put(segment, 4096, 6, b"y" * 1000)
    put(segment, 8192, 7, b"z" * 1000)
    segment.retire(8192)
    segment.begin(16384, 8, 1000)
    client = mapped(segment)
    target = np.zeros(1000, np.uint8)
    bad = {
        "another stamp": Slice(0, 6, 0, target),
        "too long": Slice(0, 5, 1, target),
        "retired": Slice(8192, 7, 0, target),
        "being written": Slice(16384, 8, 0, target),
        "nothing ever": Slice(32768, 0, 0, target),
        "before the segment": Slice(-4096, 5, 0, target),
        "before the object": Slice(4096, 6, -8, target),
        "at the end": Slice((1 << 20) - HEADER_BYTES, 5, 0, target),
        "beyond the end": Slice(1 << 20, 5, 0, target),
        "far beyond": Slice(1 << 62, 5, 0, target),
        "no number of a holder's": Slice(1 << 70, 5, 0, target),
        "overflowing start": Slice(0, 5, (1 << 63) - 1, target),
    }
    for name, one in bad.items():
        assert client.copy_out([one]) == [Status.NOT_FOUND], name
    good = np.zeros(1000, np.uint8)
    statuses = client.copy_out(
        [
            *(bad[name] for name in ("another stamp", "retired")),
            Slice(4096, 6, 0, good),
            bad["too long"],
        ]
    )
    assert statuses == [Status.NOT_FOUND, Status.NOT_FOUND, Status.OK, Status.NOT_FOUND]
    assert good.tobytes() == b"y" * 1000
    client.close()


def test_a_range_that_is_reused_meanwhile_never_gives_a_mixture(
    segment: Segment, kind: str
) -> None:
    """A writer reuses one range as fast as it can; a copy that is said to be good holds one value from end to end."""
    length = 200_000
    client = mapped(segment)
    stopped = threading.Event()
    newest = [0]

    def rewrite() -> None:
        stamp = 0
        while not stopped.is_set():
            stamp += 1
            segment.retire(0)
            segment.begin(0, stamp, length)
            np.frombuffer(segment.data(0, length), np.uint8)[:] = stamp & 255
            segment.publish(0)
            newest[0] = stamp

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        target = np.zeros(length, np.uint8)
        for _ in range(400):
            stamp = newest[0]
            if client.copy_out([Slice(0, stamp, 0, target)]) == [Status.OK]:
                assert (target == (stamp & 255)).all()
    finally:
        stopped.set()
        writer.join()
        client.close()


def test_a_memfd_is_mapped_where_huge_pages_can_be() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 3 * HUGE_PAGE_BYTES + 4096)
    one, other = (
        Mapping(os.dup(fd), 3 * HUGE_PAGE_BYTES + 4096, writable=writable)
        for writable in (True, False)
    )
    try:
        assert one.address % HUGE_PAGE_BYTES == other.address % HUGE_PAGE_BYTES == 0
        assert other.view.readonly and not one.view.readonly
        one.view[-4:] = struct.pack("<I", 77)
        assert bytes(other.view[-4:]) == struct.pack("<I", 77)
    finally:
        one.close()
        other.close()
        os.close(fd)


def test_mapping_what_is_no_memory_says_so() -> None:
    reading, writing = os.pipe()
    with pytest.raises(OSError):
        Mapping(reading, HUGE_PAGE_BYTES, writable=False)
    os.close(reading)
    os.close(writing)


def test_staging_memory_is_fast_where_a_page_begins_and_nowhere_outside() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * HUGE_PAGE_BYTES)
    staging = Staging(fd, 2 * HUGE_PAGE_BYTES)
    os.close(fd)
    staging.view[4096:4100] = b"kept"
    here = staging.is_fast(0, 4096)  # an old kernel, or one without a huge page to spare, says no
    assert staging.is_fast(4096, HUGE_PAGE_BYTES - 4096) is here
    assert bytes(staging.view[4096:4100]) == b"kept"
    assert not any(
        staging.is_fast(at, count)
        for at, count in [(1, 1), (-4096, 4096), (0, 1 << 62), (2 * HUGE_PAGE_BYTES, 1)]
    )
