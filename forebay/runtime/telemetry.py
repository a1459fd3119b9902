"""What one replica reports beside its Snapshots: its own measurements, those of its ranks, and how its store is."""

from collections.abc import Iterable, Sequence

from forebay.core.spans import SpanKind, TimedSpan
from forebay.observe.figures import FiguresOfRanks, Meter, Report, StoreState, encode_report

_STEPS = {SpanKind.QUERY: "query", SpanKind.TICKET: "fetch"}


class Telemetry:
    """Collects on the planner's loop; ``meter`` also takes what other threads of this process measure."""

    def __init__(self, meter: Meter, without: Iterable[str] = ()) -> None:
        """``without``: what this server does without, a line each."""
        self.meter = meter
        self.identity_s = 0.0
        """How long it took to identify the model, beside loading."""
        self._without = tuple(without)
        self._of_ranks = FiguresOfRanks()

    def heard(self, rank: int, figures: bytes) -> None:
        """Raises ``ValueError`` if these are no figures."""
        self._of_ranks.heard(rank, figures)

    def end_epoch(self) -> None:
        self._of_ranks.end_epoch()

    def ended(self, spans: Iterable[TimedSpan]) -> None:
        """The two steps of a ticket: until the store answers, and until the last final word."""
        for span in spans:
            if span.kind in _STEPS:
                self.meter.ticket(_STEPS[span.kind], span.end - span.start)

    def report(self, store: StoreState, ranks_without: Sequence[str] = ()) -> bytes:
        figures = self._of_ranks.total(self.meter.encoded())
        without = (*self._without, *ranks_without)
        return encode_report(Report(figures, store, self.identity_s, without))
