"""The ring: what it keeps, who may read it, and files of it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from forebay.core.spans import SpanKind
from forebay.observe.events import (
    CAPACITY,
    RECORD_BYTES,
    Rings,
    SpanRing,
    read_flight_record,
    spans_of,
    write_flight_record,
)
from forebay.observe.flight import KEPT, save_incident, save_timeline

WRITER = """
import os, signal, sys
from forebay.core.spans import SpanKind
from forebay.observe.events import SpanRing
ring = SpanRing.at("rank 0", int(sys.argv[1]))
for number in range(5):
    ring.record(SpanKind.FORWARD, 10 * number, id=number, end_ns=10 * number + 7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def ids(ring: SpanRing) -> list[int]:
    return [span.id for span in ring]


def test_a_ring_keeps_the_newest_in_order() -> None:
    ring = SpanRing("x")
    assert list(ring) == []
    for number in range(CAPACITY + 10):
        ring.record(SpanKind.PLAN, 1000, id=number, value=2, part=3, request=4, end_ns=1500)
    assert ids(ring) == list(range(10, CAPACITY + 10))
    last = list(ring)[-1]
    assert (last.kind, last.start_ns, last.duration_ns, last.value, last.part, last.request, last.pid) == (
        "plan", 1000, 500, 2, 3, 4, os.getpid(),
    )  # fmt: skip


def test_threads_that_record_at_once_lose_nothing() -> None:
    ring, each = SpanRing("x"), CAPACITY // 8
    threads = [
        threading.Thread(
            target=lambda base=base: [
                ring.record(SpanKind.STORE, 0, id=base + n) for n in range(each)
            ]
        )
        for base in range(0, 8 * each, each)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids(ring)) == list(range(8 * each))


def test_what_a_killed_process_recorded_is_read_and_its_successor_goes_on() -> None:
    rings = Rings.create(["rank 0"])
    try:
        for times in (1, 2):
            writer = subprocess.run(
                [sys.executable, "-c", WRITER, str(rings.fds[0])], pass_fds=rings.fds, check=False
            )
            assert writer.returncode == -9
            assert ids(rings.rings["rank 0"]) == [0, 1, 2, 3, 4] * times
        assert len({span.pid for span in rings.rings["rank 0"]}) == 2
    finally:
        rings.close()


def test_a_record_that_is_just_being_written_is_left_out() -> None:
    rings = Rings.create(["x"])
    try:
        ring = rings.rings["x"]
        for number in range(3):
            ring.record(SpanKind.PLAN, 0, id=number)
        os.pwrite(
            rings.fds[0], (99).to_bytes(8, "little"), 2 * RECORD_BYTES
        )  # its end still has the old number
        assert ids(ring) == [0, 2]
    finally:
        rings.close()


def test_a_flight_record_holds_all_rings_and_comes_back_from_disk(tmp_path: Path) -> None:
    rings = Rings.create(["planner", "rank 0"])
    rings.close()  # the maps stay
    rings.rings["planner"].record(SpanKind.QUEUE, 100, request=1 << 62, end_ns=200)
    rings.rings["rank 0"].record(SpanKind.FORWARD, 300, id=7, end_ns=400)
    path = save_timeline(rings, tmp_path / "made", "test")
    record = read_flight_record(path)
    assert record.reason == "test"
    assert {name: list(rings.rings[name]) for name in rings.rings} == spans_of(record)
    later = spans_of(rings.flight_record("later", since_ns=250))
    assert later["planner"] == [] and len(later["rank 0"]) == 1


def test_only_the_newest_incidents_are_kept_and_timelines_all(tmp_path: Path) -> None:
    rings = Rings.create(["planner"])
    rings.close()
    timeline = save_timeline(rings, tmp_path, "the end")
    paths = [
        save_incident(rings, tmp_path, f"epoch-{number:03}", "a rank was lost")
        for number in range(KEPT + 3)
    ]
    assert sorted(tmp_path.iterdir()) == sorted([*paths[3:], timeline])


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "version", "kind"])
def test_a_file_that_is_no_flight_record_is_named(tmp_path: Path, damage: str) -> None:
    ring = Rings.create(["planner"])
    ring.close()
    ring.rings["planner"].record(SpanKind.STORE, 0)
    record = ring.flight_record("x")
    path = tmp_path / "it.flight"
    if damage == "version":
        record = msgspec.structs.replace(record, version=9)
    if damage == "kind":
        record = msgspec.structs.replace(record, kinds=("plan",))
    write_flight_record(record, path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"hello", "cut": data[:-9]}.get(damage, data))
    with pytest.raises(ValueError, match=r"it\.flight"):
        read_flight_record(path)
