"""What the Trace Event Format asks of a trace, as far as ours goes: checked by tests of every trace that they meet."""

from typing import Any

Event = dict[str, Any]


def check_trace(trace: dict[str, Any]) -> list[Event]:
    """Its slices. Fails if any event lacks what its phase needs, slices of a thread overlap without nesting, a thread or process has
    no name, or an arrow has one end or leaves no slice."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    by_phase: dict[str, list[Event]] = {}
    for event in events:
        assert (
            isinstance(event["name"], str)
            and type(event["pid"]) is int
            and type(event["tid"]) is int
        )
        by_phase.setdefault(event["ph"], []).append(event)
    assert set(by_phase) <= {"M", "X", "s", "f"}
    slices = by_phase.get("X", [])
    for event in slices:
        assert (
            event["ts"] >= 0
            and event["dur"] >= 0
            and isinstance(event["args"], dict)
            and event["cat"]
        )
    _check_nesting(slices)
    _check_names(by_phase.get("M", []), slices)
    _check_arrows(by_phase.get("s", []), by_phase.get("f", []), slices)
    return slices


def _check_nesting(slices: list[Event]) -> None:
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for on_thread in threads.values():
        ends: list[float] = []
        for event in on_thread:
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            stop = event["ts"] + event["dur"]
            assert not ends or stop <= ends[-1] + 1e-6, f"{event} overlaps what began before it"
            ends.append(stop)


def _check_names(metadata: list[Event], slices: list[Event]) -> None:
    processes = {
        event["pid"]
        for event in metadata
        if event["name"] == "process_name" and event["args"]["name"]
    }
    threads = {
        (event["pid"], event["tid"])
        for event in metadata
        if event["name"] == "thread_name" and event["args"]["name"]
    }
    assert {event["pid"] for event in slices} <= processes
    assert {(event["pid"], event["tid"]) for event in slices} <= threads


def _check_arrows(starts: list[Event], ends: list[Event], slices: list[Event]) -> None:
    assert sorted(event["id"] for event in starts) == sorted(event["id"] for event in ends)
    assert len({event["id"] for event in starts}) == len(starts)
    places = {(event["pid"], event["tid"], event["ts"]) for event in slices}
    assert {(event["pid"], event["tid"], event["ts"]) for event in (*starts, *ends)} <= places
    assert all(event["bp"] == "e" for event in ends)
