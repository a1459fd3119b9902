"""What each process did during one hit, out of the span rings that the servers write down when they end."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay.bench.ttft.server import ArmServer
from forebay.bench.ttft.summary import Sample
from forebay.core.spans import SpanKind, request_number
from forebay.observe.events import Span, read_flight_record, spans_of

MARGIN_NS = 2_000_000
# Whose id is a transfer, and whose is a plan.
_OF_TRANSFER = (SpanKind.FETCH, SpanKind.STAGED)
_OF_PLAN = (
    SpanKind.APPLY,
    SpanKind.RECEIVE,
    SpanKind.FORWARD,
    SpanKind.SAMPLE,
    SpanKind.LOAD,
    SpanKind.LOAD_WAIT,
    SpanKind.PLAN,
)

Process = tuple[str, list[Span]]

PHASES = {
    "arrives": "sent, until the planner has it",
    "asks": "the store is asked (by ticket; else each stage asks for itself)",
    "fetches": "the ticket, until the last rank's word",
    "is admitted": "from there until its plan is built",
    "computes": "its own forward passes, all stages",
    "waits": "its plan, while no stage computes it: for other requests' passes, copies, the way from stage to stage",
    "is answered": "its token's way to the client",
}
"""What the time to first token of a hit is made of, in order."""


def median_hits(started: Sequence[ArmServer], samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For each arm that has left its rings, the hit of median TTFT in the last round of one group, and the spans around it.

    Times in ms from when the request was sent; ``own`` spans are the hit's, the others those of requests that ran meanwhile.
    """
    found = []
    for server in started:
        processes = _processes(server.timeline)
        hit = _median_hit([sample for sample in samples if sample.route == server.arm.name])
        if processes and hit is not None:
            spans = list(_spans(processes, hit))
            shares = phases(spans, hit.ttft_ms)
            found.append(
                {
                    "route": hit.route,
                    "group": hit.group,
                    "ttft_ms": hit.ttft_ms,
                    "phases_ms": shares,
                    "spans": spans,
                }
            )
    return found


def phases(spans: Sequence[dict[str, Any]], ttft_ms: float) -> dict[str, float]:
    """`PHASES` of the request whose ``own`` spans these are, ms; their sum is ``ttft_ms``. Empty if spans are missing."""
    own = [span for span in spans if span["own"]]
    queue, ticket, prefill = (
        next((s for s in own if s["kind"] == kind), None) for kind in ("queue", "ticket", "prefill")
    )
    if queue is None or ticket is None or prefill is None:
        return {}
    fetched = ticket["start_ms"] + ticket["ms"]
    computes = sum(
        span["ms"] for span in own if span["kind"] == "forward" and span["id"] == prefill["id"]
    )
    answered = prefill["start_ms"] + prefill["ms"]
    times = (
        queue["start_ms"],
        ticket["start_ms"] - queue["start_ms"],
        ticket["ms"],
        prefill["start_ms"] - fetched,
        computes,
        prefill["ms"] - computes,
        ttft_ms - answered,
    )
    return dict(zip(PHASES, times, strict=True))


def _processes(directory: Path) -> list[Process]:
    found: list[Process] = []
    for path in sorted(directory.glob("*.flight")) if directory.is_dir() else []:
        try:
            found += spans_of(read_flight_record(path)).items()
        except (OSError, ValueError):  # a picture less, not a failed measurement
            continue
    return found


def _median_hit(samples: Sequence[Sample]) -> Sample | None:
    """Of the mixed group if there is one: there a hit meets other work."""
    hits = [sample for sample in samples if sample.is_hit]
    if not hits:
        return None
    last = max(sample.round for sample in hits)
    group = "mixed" if any(sample.group == "mixed" for sample in hits) else hits[-1].group
    some = sorted(
        (sample for sample in hits if sample.round == last and sample.group == group),
        key=lambda sample: sample.ttft_ms,
    )
    return some[(len(some) - 1) // 2] if some else None


def _spans(processes: Sequence[Process], hit: Sample) -> Iterator[dict[str, Any]]:
    number = request_number(f"{hit.request_id}-0")
    begin = hit.sent_ns - MARGIN_NS
    end = hit.sent_ns + int(1e6 * hit.ttft_ms) + MARGIN_NS
    near = [
        (name, span)
        for name, spans in processes
        for span in spans
        if span.start_ns < end and span.start_ns + span.duration_ns > begin
    ]
    transfers = {
        span.id for _, span in near if span.kind == SpanKind.TICKET and span.request == number
    }
    plans = {
        span.id for _, span in near if span.kind == SpanKind.PREFILL and span.request == number
    }
    for name, span in near:
        is_own = span.request == number
        is_own |= (span.kind in _OF_TRANSFER and span.id in transfers) or (
            span.kind in _OF_PLAN and span.id in plans
        )
        yield {
            "process": name,
            "kind": str(span.kind),
            "start_ms": (span.start_ns - hit.sent_ns) / 1e6,
            "ms": span.duration_ns / 1e6,
            "id": span.id,
            "value": span.value,
            "own": is_own,
        }
