"""How long the steps of a ticket took, from the spans of the planner's effects alone."""

from forebay.core.spans import SpanKind, TimedSpan
from forebay.observe.figures import Meter, StoreState, decode_report
from forebay.runtime.telemetry import Telemetry


def test_queries_and_tickets_are_timed_by_their_spans_and_nothing_else_is() -> None:
    telemetry = Telemetry(Meter())
    telemetry.ended(
        [
            TimedSpan(SpanKind.QUERY, 1.0, 1.25, 1),
            TimedSpan(SpanKind.PLAN, 1.0, 9.0, 1),
            TimedSpan(SpanKind.TICKET, 2.0, 4.5, 2),
        ]
    )
    timings = decode_report(telemetry.report(StoreState())).figures.ticket_seconds
    assert {phase: timing.total_s for phase, timing in timings.items()} == {
        "query": 0.25,
        "fetch": 2.5,
    }
