"""How long the steps of a ticket took, from the planner's effects and events alone."""

from forebay.core.messages import FetchProgress, PageKey, StagedTicket, Ticket
from forebay.core.planner import Effects
from forebay.core.tickets import Query, QueryDone
from forebay.observe.figures import Meter, StoreState, Timing, decode_report
from forebay.runtime.telemetry import Telemetry

PAGES = (PageKey(0, b"hash"),)


def timings(telemetry: Telemetry) -> dict[str, Timing]:
    return decode_report(telemetry.report(StoreState())).figures.ticket_seconds


def test_a_ticket_lasts_until_the_last_rank_has_said_its_final_word() -> None:
    telemetry = Telemetry(Meter(), 2, 1)
    telemetry.tickets.began(Effects(queries=[Query(1, (b"hash",))]), 1.0)
    telemetry.tickets.ended([QueryDone(1, 1)], 1.25)
    telemetry.tickets.began(Effects(orders=[Ticket(1, 9, PAGES)]), 2.0)
    telemetry.tickets.ended(
        [FetchProgress(1, 0, 9, 1, True), FetchProgress(1, 1, 9, 0, False)], 3.0
    )
    assert timings(telemetry).keys() == {"query"}
    telemetry.tickets.ended([FetchProgress(1, 1, 9, 1, True)], 4.5)
    assert {phase: timing.total_s for phase, timing in timings(telemetry).items()} == {
        "query": 0.25,
        "fetch": 2.5,
    }


def test_on_the_staged_route_it_lasts_from_the_first_stage_told_to_its_answer() -> None:
    telemetry = Telemetry(Meter(), 2, 2)
    telemetry.tickets.began(Effects(orders=[StagedTicket(1, 4, 0, PAGES)]), 1.0)
    telemetry.tickets.began(Effects(orders=[StagedTicket(1, 4, 1, PAGES)]), 2.0)
    telemetry.tickets.ended([FetchProgress(1, rank, 4, 1, True) for rank in (2, 3, 0)], 3.0)
    assert not timings(telemetry)
    telemetry.tickets.ended([FetchProgress(1, 1, 4, 1, True)], 4.0)
    assert timings(telemetry)["fetch"].total_s == 3.0


def test_a_lost_grid_leaves_no_ticket_behind() -> None:
    telemetry = Telemetry(Meter(), 1, 1)
    telemetry.tickets.began(Effects(orders=[Ticket(1, 9, PAGES)]), 2.0)
    telemetry.end_epoch()
    telemetry.tickets.ended([FetchProgress(1, 0, 9, 1, True)], 3.0)
    assert not timings(telemetry)
