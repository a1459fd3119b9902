"""What one replica reports beside its Snapshots: its own measurements, those of its ranks, and how its store is."""

from collections.abc import Iterable

from forebay.core.messages import FetchProgress, StagedTicket, Ticket
from forebay.core.planner import Effects, Event
from forebay.core.tickets import QueryDone
from forebay.observe.figures import FiguresOfRanks, Meter, Report, StoreState, encode_report


class TicketClock:
    """Times the two steps of a ticket: until the store answers, and until the last rank has said its final word."""

    def __init__(self, meter: Meter, pp: int, tp: int) -> None:
        self._meter = meter
        self._pp, self._tp = pp, tp
        self._asked: dict[int, float] = {}
        self._fetching: dict[int, tuple[float, set[int]]] = {}

    def began(self, effects: Effects, now: float) -> None:
        for query in effects.queries:
            self._asked[query.number] = now
        for order in effects.orders:
            if isinstance(order, Ticket):
                self._fetching[order.transfer] = (now, set(range(self._pp * self._tp)))
            elif isinstance(
                order, StagedTicket
            ):  # the first stage is told first and has the last word
                _, told = self._fetching.setdefault(order.transfer, (now, set()))
                told |= set(range(order.stage * self._tp, (order.stage + 1) * self._tp))

    def ended(self, events: Iterable[Event], now: float) -> None:
        for event in events:
            if isinstance(event, QueryDone) and event.number in self._asked:
                self._meter.ticket("query", now - self._asked.pop(event.number))
            elif (
                isinstance(event, FetchProgress)
                and event.final
                and event.transfer in self._fetching
            ):
                began, left = self._fetching[event.transfer]
                left.discard(event.rank)
                if not left:
                    del self._fetching[event.transfer]
                    self._meter.ticket("fetch", now - began)

    def end_epoch(self) -> None:
        """Final words of lost ranks never come; numbers go on."""
        self._fetching.clear()


class Telemetry:
    """Collects on the planner's loop; ``meter`` also takes what other threads of this process measure."""

    def __init__(self, meter: Meter, pp: int, tp: int) -> None:
        self.meter = meter
        self.tickets = TicketClock(meter, pp, tp)
        self._of_ranks = FiguresOfRanks()

    def heard(self, rank: int, figures: bytes) -> None:
        """Raises ``ValueError`` if these are no figures."""
        self._of_ranks.heard(rank, figures)

    def end_epoch(self) -> None:
        self._of_ranks.end_epoch()
        self.tickets.end_epoch()

    def report(self, store: StoreState) -> bytes:
        return encode_report(Report(self._of_ranks.total(self.meter.encoded()), store))
