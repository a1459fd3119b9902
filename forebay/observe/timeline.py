"""Flight records as one trace in Chrome's Trace Event Format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

    process  = one process of the server          thread = one track: its compute loop, or one kind of span beside it

Spans that overlap on a track are laid on numbered lanes, since slices of one thread must nest. Arrows (flow events) lead from a
ticket to the fetches of all ranks, and from stage to stage through a plan. Source of the format: "Trace Event Format", Google,
2016 (events X, M, s, f; times in microseconds).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.core.spans import SpanKind
from forebay.observe.events import FlightRecord, Span, spans_of

NS_PER_US = 1000
_COMPUTE = "compute"
# One thread does these one after the other, with a load-wait inside its forward: they nest as they are.
_ON_COMPUTE = frozenset(
    {SpanKind.APPLY, SpanKind.RECEIVE, SpanKind.FORWARD, SpanKind.LOAD_WAIT, SpanKind.SAMPLE}
)
_LANES_PER_TRACK = 10_000
_ID_NAMES = {
    SpanKind.QUERY: "query",
    SpanKind.TICKET: "transfer",
    SpanKind.BACKUP: "transfer",
    SpanKind.STAGED: "transfer",
    SpanKind.FETCH: "transfer",
    SpanKind.STORE: "transfer",
}
_VALUE_NAMES = {
    SpanKind.QUEUE: "cached_tokens",
    SpanKind.QUERY: "pages",
    SpanKind.TICKET: "pages",
    SpanKind.LOAD: "pages",
    SpanKind.BACKUP: "pages",
    SpanKind.STAGED: "pages",
    SpanKind.FETCH: "pages",
    SpanKind.STORE: "pages",
    SpanKind.APPLY: "pieces",
}
_WITHOUT_VALUE = frozenset({SpanKind.ACK, SpanKind.LOAD_WAIT, SpanKind.TTFT})
_PART_NAMES = {SpanKind.ACK: "rank", SpanKind.FORWARD: "stage"}

Event = dict[str, Any]


def chrome_trace(records: Sequence[FlightRecord]) -> dict[str, Any]:
    """The trace of all records together, times from the first span on. Spans that several records hold are drawn once."""
    tracks = _collect(records)
    events: list[Event] = []
    slices: list[tuple[Span, Event]] = []
    for index, (name, pid) in enumerate(sorted(tracks, key=_order)):
        spans = tracks[name, pid]
        events += _process(name, pid, index)
        for track, kind_spans in _by_track(spans):
            for lane, on_lane in enumerate(_lanes(kind_spans)):
                tid = _tid(track, lane)
                events.append(
                    _metadata(
                        "thread_name",
                        pid,
                        tid,
                        {"name": track if not lane else f"{track} {lane + 1}"},
                    )
                )
                events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
                slices += [(span, _slice(span, pid, tid)) for span in on_lane]
    slices.sort(key=lambda pair: pair[1]["ts"])
    first = slices[0][1]["ts"] if slices else 0
    for _, event in slices:
        event["ts"] = (event["ts"] - first) / NS_PER_US
        event["dur"] = event["dur"] / NS_PER_US
    events += [event for _, event in slices]
    events += _flows(slices)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"reasons": [record.reason for record in records]},
    }


def _collect(records: Sequence[FlightRecord]) -> dict[tuple[str, int], list[Span]]:
    """Spans by (process name, process id), on one clock, each once."""
    shared_clock = len({record.boot_id for record in records}) <= 1
    found: dict[tuple[str, int], set[Span]] = {}
    for number, record in enumerate(records):
        offset = 0 if shared_clock else record.wall_ns - record.monotonic_ns
        for process, spans in spans_of(record).items():
            name = process if shared_clock else f"{process} ({record.boot_id[:8] or number})"
            for span in spans:
                moved = Span(span.kind, span.start_ns + offset, *_rest(span))
                found.setdefault((name, span.pid), set()).add(moved)
    return {
        key: sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns))
        for key, spans in found.items()
    }


def _rest(span: Span) -> tuple[int, int, int, int, int, int]:
    return span.duration_ns, span.id, span.value, span.part, span.request, span.pid


def _order(track: tuple[str, int]) -> tuple[int, int, str, int]:
    """Frontend, planner, then ranks by number; a process that took another's place below it."""
    name, pid = track
    head, _, number = name.partition(" ")
    places = {"frontend": 0, "planner": 1, "rank": 2}
    digits = number.partition(" ")[0]
    return places.get(head, 3), int(digits) if digits.isdecimal() else 0, name, pid


def _process(name: str, pid: int, index: int) -> list[Event]:
    return [
        _metadata("process_name", pid, 0, {"name": f"{name} (process {pid})"}),
        _metadata("process_sort_index", pid, 0, {"sort_index": index}),
    ]


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _by_track(spans: Iterable[Span]) -> Iterator[tuple[str, list[Span]]]:
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(_COMPUTE if span.kind in _ON_COMPUTE else span.kind, []).append(span)
    yield from sorted(tracks.items(), key=lambda item: _track_number(item[0]))


def _track_number(track: str) -> int:
    """In the order of `SpanKind`, the compute loop first."""
    kinds = [kind.value for kind in SpanKind]
    return kinds.index(track) + 1 if track in kinds else 0 if track == _COMPUTE else len(kinds) + 1


def _tid(track: str, lane: int) -> int:
    return _track_number(track) * _LANES_PER_TRACK + lane + 1


@dataclass(slots=True)
class _Lane:
    """``open_ends``: ends of the spans that enclose the next one, innermost last."""

    spans: list[Span] = field(default_factory=list)
    open_ends: list[int] = field(default_factory=list)

    def takes(self, span: Span) -> bool:
        """Whether the span comes after those before it, or lies inside the innermost."""
        while self.open_ends and self.open_ends[-1] <= span.start_ns:
            self.open_ends.pop()
        if not self.open_ends:
            return True
        return span.kind in _ON_COMPUTE and span.start_ns + span.duration_ns <= self.open_ends[-1]

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.open_ends.append(span.start_ns + span.duration_ns)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in order of their starts, on as few lanes as keep those of one lane nested or apart."""
    lanes: list[_Lane] = []
    for span in spans:
        lane = next((lane for lane in lanes if lane.takes(span)), None)
        if lane is None:
            lanes.append(lane := _Lane())
        lane.add(span)
    return [lane.spans for lane in lanes]


def _slice(span: Span, pid: int, tid: int) -> Event:
    kind = span.kind
    args: dict[str, Any] = {}
    if span.id:
        args[_ID_NAMES.get(kind, "plan")] = span.id  # type: ignore[call-overload]
    if kind not in _WITHOUT_VALUE:
        args[_VALUE_NAMES.get(kind, "tokens")] = span.value  # type: ignore[call-overload]
    if span.part >= 0:
        args[_PART_NAMES.get(kind, "layer")] = span.part  # type: ignore[call-overload]
    if span.request:
        args["request"] = f"{span.request:016x}"  # a JSON number would lose bits in a browser
    return {
        "name": kind, "cat": "forebay", "ph": "X", "ts": span.start_ns, "dur": span.duration_ns, "pid": pid, "tid": tid, "args": args,
    }  # fmt: skip


def _flows(slices: Sequence[tuple[Span, Event]]) -> list[Event]:
    """Ticket -> the fetches of all ranks; a plan's forward passes from stage to stage."""
    flows: list[Event] = []
    tickets = {span.id: event for span, event in slices if span.kind == SpanKind.TICKET}
    last_stage: dict[tuple[int, int], Event] = {}
    for span, event in slices:
        if span.kind == SpanKind.FETCH and span.id in tickets:
            _arrow(flows, "ticket", tickets[span.id], event)
        elif span.kind == SpanKind.FORWARD:
            before = last_stage.get((span.id, span.part - 1))
            if before is not None:
                _arrow(flows, "activations", before, event)
            last_stage[span.id, span.part] = event
    return flows


def _arrow(flows: list[Event], name: str, source: Event, target: Event) -> None:
    common = {"name": name, "cat": "forebay", "id": len(flows) // 2 + 1}
    start = {**common, "ph": "s", "ts": source["ts"], "pid": source["pid"], "tid": source["tid"]}
    flows += [
        start,
        {
            **common,
            "ph": "f",
            "bp": "e",
            "ts": target["ts"],
            "pid": target["pid"],
            "tid": target["tid"],
        },
    ]
