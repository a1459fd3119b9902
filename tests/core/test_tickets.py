"""Tickets by stories: a stored prefix comes to the host while its request waits. Pages hold 4 tokens, a plan's chunk 8."""

import pytest

from forebay.core.admission import HEAD_START
from forebay.core.lifecycle import Phase
from forebay.core.messages import (
    Abort,
    Cancel,
    FetchProgress,
    FinishReason,
    Flush,
    PlanDone,
    Sample,
    Store,
    StoreDone,
    Submit,
    Ticket,
    TransferDone,
    pack_tokens,
)
from forebay.core.pace import PASS_WORK, work_of
from forebay.core.planner import Effects, Event, GridLost, GridReady
from forebay.core.request import Request
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.lookup import QueryDone
from forebay.core.transfers.policy import TICKETS_AT_ONCE, FetchPolicy
from forebay.core.transfers.store import StoreEmptied, StoreWell
from forebay.core.transfers.tickets import Tickets
from forebay.core.tree import Tier
from tests.core.conftest import Desk, make_desk, spans

PROMPT = list(range(1, 22))  # five full pages and one token
BUSY = [50, 51]
LATER = list(range(30, 42))


class StoreDesk(Desk):
    """A desk that keeps what a step asks of store and ranks."""

    def take(self, *events: Event) -> Effects:
        """One step; the plan that it built is in ``plans`` too."""
        effects = self.planner.step(self.now, events)
        self.outputs += effects.outputs
        if effects.plan is not None:
            self.plans.append(effects.plan)
        return effects


def store_desk(host_pages: int = 16, **config: object) -> StoreDesk:
    defaults: dict[str, object] = {
        "has_store": True,
        "fetch_threshold": 8,
        "fetch_policy": FetchPolicy.WAIT,
        "load_back_threshold": 0,
        "write_policy": WritePolicy.WRITE_THROUGH_SELECTIVE,  # so that host pages are the tickets' alone
    }
    desk = make_desk(host_pages=host_pages, **(defaults | config))
    return StoreDesk(desk.planner)


def ask(desk: StoreDesk, request_id: str = "a", prompt: list[int] = PROMPT) -> Effects:
    """Submit a request that has nothing in the tree."""
    return desk.take(
        Submit(request_id, pack_tokens(prompt), SamplingParams(max_tokens=2, seed=0), (0,))
    )


def issue(desk: StoreDesk, pages: int = 5, request_id: str = "a") -> Ticket:
    """A request whose query found ``pages``; its ticket."""
    (query,) = ask(desk, request_id).queries
    (ticket,) = desk.take(QueryDone(query.number, pages)).orders
    assert isinstance(ticket, Ticket)
    return ticket


def progress(
    desk: StoreDesk, ticket: Ticket, pages: int, final: bool = True, rank: int = 0
) -> Effects:
    return desk.take(FetchProgress(1, rank, ticket.transfer, pages, final))


def host_in_use(desk: Desk) -> int:
    cache = desk.planner.replica.cache
    assert cache is not None
    return cache.host.capacity - cache.host.free


def test_the_store_is_asked_once_for_the_pages_that_the_tree_has_not() -> None:
    desk = store_desk()
    effects = ask(desk)
    assert len(effects.queries) == 1 and len(effects.queries[0].hashes) == 5
    assert effects.plan is None, "it waits for the answer"
    assert not desk.take().queries


def test_a_miss_is_admitted_at_once_and_holds_no_page() -> None:
    desk = store_desk()
    (query,) = ask(desk).queries
    effects = desk.take(QueryDone(query.number, 1))
    assert effects.plan is not None and not effects.orders and not host_in_use(desk)


def test_a_query_that_is_late_is_a_miss_for_now_and_never_blocks_beyond_its_bound() -> None:
    desk = store_desk()
    ask(desk)
    desk.now = 0.09
    assert desk.take().plan is None
    desk.now = 0.11
    assert desk.take().plan is not None


def test_a_late_query_asks_for_no_step_before_it_is_forgotten() -> None:
    """Or the planner's loop would spin for a second."""
    desk = store_desk()
    ask(desk)
    desk.now += 0.2
    desk.take()
    deadline = desk.planner.next_deadline()
    assert deadline is None or deadline > desk.now


def test_others_pass_a_request_that_waits_for_its_ticket() -> None:
    desk = store_desk()
    issue(desk)
    effects = ask(desk, "short", BUSY)
    assert effects.plan is not None and len(effects.plan.pieces) == 1


def test_a_chunk_gives_way_to_who_came_before_it_and_fetches_for_a_moment_alone() -> None:
    desk = store_desk()
    issue(desk)
    (query,) = ask(desk, "later", LATER).queries
    assert desk.take(QueryDone(query.number, 0)).plan is None
    due = desk.planner.next_deadline()
    assert (
        due is not None
        and desk.now
        < due
        <= desk.now + HEAD_START * desk.planner.replica.first_stage.predict(work_of(8, 0))
    )
    desk.now = due
    plan = desk.take().plan
    assert plan is not None and spans(plan) == [(0, 8)]
    assert desk.planner.next_deadline() != due


def test_the_head_start_is_a_share_of_what_the_first_stage_takes_however_soon_plans_follow_each_other() -> (
    None
):
    desk = store_desk(pp=2)
    (plan,) = desk.submit("slow", BUSY, max_tokens=1)
    desk.take(PlanDone(1, 0, plan.number, forward_s=80.0))
    assert not desk.done(plan, rank=1)
    first_stage = desk.planner.replica.first_stage
    assert first_stage.predict(PASS_WORK) == pytest.approx(0.8 * PASS_WORK * 0.001 / 2 + 0.2 * 80.0)
    issue(desk)
    (query,) = ask(desk, "later", LATER).queries
    desk.take(QueryDone(query.number, 0))
    assert desk.planner.next_deadline() == desk.now + HEAD_START * first_stage.predict(
        work_of(8, 0)
    )


def test_what_gives_way_asks_for_no_step_while_nobody_is_admitted() -> None:
    """Or the planner's loop would spin until the flush is done."""
    desk = store_desk()
    desk.submit("busy", BUSY)
    issue(desk)
    (query,) = ask(desk, "later", LATER).queries
    desk.take(QueryDone(query.number, 0))
    assert desk.planner.replica.gives_way_until is not None
    desk.now += 1.0
    desk.take(Flush(1, ("device",), 30.0))
    assert desk.planner.next_deadline() == desk.now + 30.0


def test_what_is_fetched_in_time_goes_before_the_chunk_that_came_after_it() -> None:
    desk = store_desk()
    ticket = issue(desk)
    (query,) = ask(desk, "later", LATER).queries
    assert desk.take(QueryDone(query.number, 0)).plan is None
    ahead, chunk = progress(desk, ticket, 5).plan, desk.take().plan
    assert ahead is not None and spans(ahead) == [(20, 21)]
    assert chunk is not None and spans(chunk) == [(0, 8)]


@pytest.mark.parametrize(("priority", "at_once"), [(0, []), (1, [[(0, 8)]])])
def test_a_chunk_gives_way_to_what_came_later_but_not_to_lower_priority(
    priority: int, at_once: list[list[tuple[int, int]]]
) -> None:
    desk = store_desk(max_running=1)
    (busy,) = desk.submit("busy", BUSY, max_tokens=1)
    (query,) = desk.take(
        Submit(
            "first",
            pack_tokens(LATER),
            SamplingParams(max_tokens=2, seed=0),
            (0,),
            priority=priority,
        )
    ).queries
    desk.take(QueryDone(query.number, 0))
    issue(desk)
    assert [spans(plan) for plan in desk.run(busy)] == at_once
    desk.now = desk.planner.next_deadline() or 0.0
    assert [spans(plan) for plan in desk.plans[1:] + desk.step()] == [[(0, 8)]]


def test_a_burst_that_gives_way_is_looked_through_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = store_desk(max_waiting=64)
    for number in range(30):
        (query,) = ask(desk, f"chunk {number}", [100 + number, *LATER]).queries
        if number == 0:
            issue(desk)  # from here on all give way to it
        desk.take(QueryDone(query.number, 0))
    assert len(desk.planner.replica.waiting) == 31
    looked, waits = [], Tickets.waits

    def counted(self: Tickets, request: Request) -> bool:
        looked.append(request.request_id)
        return waits(self, request)

    monkeypatch.setattr(Tickets, "waits", counted)
    assert desk.take().plan is None
    assert len(looked) <= 2 * 31


def test_a_ticket_takes_host_pages_for_exactly_the_agreed_hit() -> None:
    desk = store_desk()
    ticket = issue(desk, pages=4)
    assert len(ticket.pages) == 4 and host_in_use(desk) == 4


def test_when_all_ranks_are_done_the_request_runs_next_and_loads_what_came() -> None:
    desk = store_desk(pp=2)
    ticket = issue(desk)
    assert progress(desk, ticket, 5, rank=0).plan is None, "stage 1 is not done"
    plan = progress(desk, ticket, 5, rank=1).plan
    assert plan is not None and spans(plan) == [(20, 21)]
    assert [copy.host for copy in plan.loads] == [page.host for page in ticket.pages]
    request = desk.planner.replica.requests["a"]
    assert request.usage is not None
    assert (request.usage.cached_device, request.usage.cached_host, request.usage.cached_store) == (
        0,
        0,
        20,
    )


def test_what_may_be_used_is_the_minimum_over_ranks() -> None:
    desk = store_desk(pp=2)
    ticket = issue(desk)
    progress(desk, ticket, 5, rank=0)
    plan = progress(desk, ticket, 3, rank=1).plan
    assert plan is not None and len(plan.loads) == 3 and plan.pieces[0].start == 12
    assert host_in_use(desk) == 3, "what did not come everywhere is free again"


def test_a_rank_that_fails_at_once_means_computing() -> None:
    desk = store_desk()
    plan = progress(desk, issue(desk), 0).plan
    assert plan is not None and spans(plan) == [(0, 8)] and not host_in_use(desk)


def test_timeout_uses_what_is_safe_and_the_rest_stays_the_transfers_until_the_last_word() -> None:
    desk = store_desk(fetch_policy=FetchPolicy.TIMEOUT)
    ticket = issue(desk)
    progress(desk, ticket, 3, final=False)
    desk.now = 2.1
    effects = desk.take()
    assert effects.orders == [Cancel(1, ticket.transfer)]
    assert effects.plan is not None and len(effects.plan.loads) == 3
    assert host_in_use(desk) == 5, "a rank may still be writing the other two"
    progress(desk, ticket, 4)
    assert host_in_use(desk) == 3


def test_best_effort_waits_only_while_the_request_could_not_run_anyway() -> None:
    desk = store_desk(fetch_policy=FetchPolicy.BEST_EFFORT, max_running=1)
    busy = ask(desk, "busy", BUSY).plan
    assert busy is not None
    ticket = issue(desk)
    progress(desk, ticket, 2, final=False)
    assert len(desk.planner.replica.running) == 1
    (decode,) = desk.done(busy, 0)
    effects = desk.take(PlanDone(1, 0, decode.number, (Sample(decode.pieces[0].slot, 9),)))
    assert effects.orders == [Cancel(1, ticket.transfer)]
    assert effects.plan is not None and len(effects.plan.loads) == 2


def test_best_effort_keeps_its_ticket_while_there_are_no_pages_to_run_on() -> None:
    desk = store_desk(fetch_policy=FetchPolicy.BEST_EFFORT, pages=7)
    (busy,) = desk.submit("busy", [*range(60, 64), 1], max_tokens=12)
    ticket = issue(desk)
    assert desk.planner.replica.requests["a"].phase is Phase.FETCHING, (
        "a free slot is no reason: it needs 6 pages, and 5 are to be had"
    )
    assert progress(desk, ticket, 3, final=False).plan is None
    desk.abort("busy")
    plans = desk.run(busy)
    assert [spans(plan) for plan in plans] == [[(12, 20)]], "what is safe by now is used"
    assert desk.planner.replica.tickets.outcomes["best_effort"] == 1


def test_an_abort_cancels_and_frees_exactly_once_after_the_last_word() -> None:
    desk = store_desk(pp=2)
    ticket = issue(desk)
    assert desk.take(Abort("a")).orders == [Cancel(1, ticket.transfer)]
    assert host_in_use(desk) == 5
    progress(desk, ticket, 2, rank=0)
    assert host_in_use(desk) == 5, "stage 1 may still write (R11)"
    progress(desk, ticket, 0, rank=1)
    assert host_in_use(desk) == 0
    assert desk.planner.replica.tickets.is_idle


def test_a_later_request_joins_pages_in_flight_and_the_last_user_cancels() -> None:
    desk = store_desk()
    ticket = issue(desk)
    effects = ask(desk, "b")
    assert not effects.queries, "b joins a's ticket"
    assert not desk.take(Abort("a")).orders, "b still waits for it"
    plan = progress(desk, ticket, 5).plan
    assert plan is not None and len(plan.loads) == 5 and spans(plan) == [(20, 21)]


def test_pages_that_the_tree_has_meanwhile_are_covered() -> None:
    desk = store_desk(write_policy=WritePolicy.WRITE_THROUGH)
    (query,) = ask(desk, "computes").queries
    first = desk.take(QueryDone(query.number, 0)).plan
    assert first is not None and spans(first) == [(0, 8)]
    (query,) = ask(desk, "fetches").queries
    assert len(query.hashes) == 3, "two pages are on their way already"
    (ticket,) = desk.take(QueryDone(query.number, 3)).orders
    assert isinstance(ticket, Ticket)
    desk.take(PlanDone(1, 0, first.number))  # the next chunk is built, and its pages will be saved
    progress(desk, ticket, 3)
    assert desk.planner.replica.ledger.unused["covered"] == 2


def test_what_is_saved_goes_to_the_store_and_counts_once_every_rank_has_stored_it() -> None:
    desk = store_desk(write_policy=WritePolicy.WRITE_THROUGH)
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 0))
    orders: list[Store] = []
    index = 0
    while index < len(desk.plans):
        plan = desk.plans[index]
        index += 1
        samples = tuple(Sample(piece.slot, 9) for piece in plan.pieces if piece.sample)
        desk.take(PlanDone(1, 0, plan.number, samples))
        if plan.backup is not None:
            effects = desk.take(TransferDone(1, 0, plan.backup.transfer, len(plan.backup.copies)))
            orders += [order for order in effects.orders if isinstance(order, Store)]
    first = orders[0]
    cache = desk.planner.replica.cache
    assert cache is not None
    node = cache.tree.get(first.pages[0].hash)
    assert node is not None and node.pins[Tier.HOST] == 1 and not node.stored
    retry = desk.take(
        StoreDone(1, 0, first.transfer, b"\1" + b"\0" * (len(first.pages) - 1))
    ).orders
    assert node.stored and node.pins[Tier.HOST] == 0
    again = {page.hash for order in retry if isinstance(order, Store) for page in order.pages}
    assert first.pages[0].hash not in again and {page.hash for page in first.pages[1:]} <= again, (
        "only what failed, once more"
    )


def test_the_store_gets_a_hint_only_for_fetches_that_must_wait() -> None:
    """For those that begin at once it would be one more copy of the same bytes."""
    desk = store_desk(host_pages=64)
    prompts = [
        [number * 100 + offset for offset in range(9)] for number in range(1, TICKETS_AT_ONCE + 2)
    ]
    hints = []
    for number, prompt in enumerate(prompts):
        (query,) = ask(desk, f"r{number}", prompt).queries
        hints.append(desk.take(QueryDone(query.number, 2)).hints)
    assert hints[:-1] == [[]] * TICKETS_AT_ONCE, "ranks read them at the same time"
    (hint,) = hints[-1]
    assert len(hint.hashes) == 2 and hint.group == hint.hashes[0], (
        "ranks come to it once another is done"
    )


def test_a_fetch_that_finds_no_host_pages_leaves_a_hint() -> None:
    desk = store_desk(host_pages=5)
    issue(desk)
    (query,) = ask(desk, "b", list(range(30, 48))).queries
    effects = desk.take(QueryDone(query.number, 4))
    assert not effects.orders and [len(hint.hashes) for hint in effects.hints] == [4], (
        "it is asked for again in a few steps"
    )


def test_a_group_is_the_first_pages_hash_for_what_is_stored_asked_for_and_fetched() -> None:
    """Of a store of several masters, one has all of a prefix."""
    desk, stored = saving()
    first = stored.pages[0].hash
    assert len(stored.pages) == 2 and {page.group for page in stored.pages} == {first}
    (query,) = ask(desk, "longer").queries
    assert len(query.hashes) == 3 and query.group == first, (
        "the first pages are in the tree, and name the group all the same"
    )
    (ticket,) = desk.take(QueryDone(query.number, 3)).orders
    assert isinstance(ticket, Ticket) and [page.hash for page in ticket.pages] == list(query.hashes)
    assert {page.group for page in ticket.pages} == {first}


def test_a_flush_waits_for_what_is_on_its_way_to_the_store() -> None:
    desk, order = saving()
    assert not desk.take(Flush(1, ("device", "host"), 5.0)).flushed
    effects = desk.take(StoreDone(1, 0, order.transfer, b"\1" * len(order.pages)))
    flushed = list(effects.flushed)
    while not flushed:  # later batches
        (order,) = [order for order in effects.orders if isinstance(order, Store)]
        effects = desk.take(StoreDone(1, 0, order.transfer, b"\1" * len(order.pages)))
        flushed += effects.flushed
    assert not flushed[0].busy and host_in_use(desk) == 0


def test_a_flush_that_may_not_wait_does_not() -> None:
    desk, _ = saving()
    (done,) = desk.take(Flush(1, ("host",), 0.0)).flushed
    assert done.busy


def saving() -> tuple[StoreDesk, Store]:
    """A desk whose first plan's pages are on their way to the store, and no plan is in flight."""
    desk = store_desk(write_policy=WritePolicy.WRITE_THROUGH)
    (query,) = ask(desk, prompt=PROMPT[:9]).queries
    desk.take(QueryDone(query.number, 0))
    orders: list[Store] = []
    for plan in desk.plans:
        samples = tuple(
            Sample(piece.slot, 0) for piece in plan.pieces if piece.sample
        )  # its first token is its last
        desk.take(PlanDone(1, 0, plan.number, samples))
        if plan.backup is not None:
            effects = desk.take(TransferDone(1, 0, plan.backup.transfer, len(plan.backup.copies)))
            orders += [order for order in effects.orders if isinstance(order, Store)]
    return desk, orders[0]


def test_a_lost_grid_forgets_tickets_and_asks_again() -> None:
    desk = store_desk()
    issue(desk)
    desk.take(GridLost(1, "killed"))
    effects = desk.take(GridReady(2, 32, 0.001, 16))
    assert len(effects.queries) == 1 and not host_in_use(desk)


def test_no_host_page_means_computing_and_the_reason_is_counted() -> None:
    desk = store_desk(host_pages=1)
    (query,) = ask(desk).queries
    assert desk.take(QueryDone(query.number, 5)).plan is not None
    assert desk.planner.replica.tickets.outcomes["no_host_pages"] == 1


def test_tickets_hold_at_most_four_fifths_of_the_host() -> None:
    desk = store_desk(host_pages=5)
    ticket = issue(desk, pages=5)
    assert len(ticket.pages) == 4
    assert desk.planner.replica.ledger.unused["no_host_pages"] == 1


def test_a_flush_lets_go_of_what_waits_for_admission() -> None:
    desk = store_desk(max_running=1)
    busy = ask(desk, "busy", BUSY).plan
    assert busy is not None
    ticket = issue(desk)
    progress(desk, ticket, 5)
    assert host_in_use(desk) == 5
    (done,) = desk.take(Flush(1, ("host",), 0.0)).flushed
    assert not done.busy and host_in_use(desk) == 0


def run_plans(desk: StoreDesk) -> None:
    """Acknowledge plans and backups until nothing is in flight; the store refuses what is stored, and has nothing."""
    replica = desk.planner.replica
    for _ in range(200):
        record = next(iter(replica.in_flight), None)
        if record is None:
            return
        plan = next(plan for plan in desk.plans if plan.number == record.number)
        samples = tuple(Sample(piece.slot, 9) for piece in plan.pieces if piece.sample)
        effects = [desk.take(PlanDone(1, 0, plan.number, samples))]
        if plan.backup is not None:
            effects.append(
                desk.take(TransferDone(1, 0, plan.backup.transfer, len(plan.backup.copies)))
            )
        for query in [query for effect in effects for query in effect.queries]:
            desk.take(QueryDone(query.number, 0))
        desk.take()
    raise AssertionError("it never ends")


def fetched_below_device_pages(**config: object) -> StoreDesk:
    """Two device-only pages, with pages below them that a ticket has brought for a request that still waits."""
    desk = store_desk(max_running=1, fetch_threshold=4, **config)
    (query,) = ask(desk, "stem", PROMPT[:9]).queries
    desk.take(QueryDone(query.number, 0))
    run_plans(desk)
    busy = ask(desk, "busy", BUSY).plan
    assert busy is not None
    (query,) = ask(desk, "waits").queries
    assert len(query.hashes) == 3
    (ticket,) = desk.take(QueryDone(query.number, 3)).orders
    assert isinstance(ticket, Ticket)
    progress(desk, ticket, 3)
    assert len(desk.planner.replica.requests["waits"].ready) == 3
    return desk


def test_what_waits_for_a_request_is_taken_back_when_one_before_it_needs_the_device_pages_above() -> (
    None
):
    """Otherwise the first in the queue waits for pages that the second's pins keep, and the second waits behind it for ever."""
    desk = fetched_below_device_pages(pages=8)
    submit = Submit(
        "first", pack_tokens([90] * 29), SamplingParams(max_tokens=2, seed=0), (0,), priority=1
    )
    (query,) = desk.take(submit).queries
    desk.take(QueryDone(query.number, 0))
    run_plans(desk)
    assert (
        desk.finish("first") is FinishReason.LENGTH and desk.finish("waits") is FinishReason.LENGTH
    )


def test_a_device_flush_of_an_idle_replica_is_answered_at_once_whatever_hangs_on_its_pages() -> (
    None
):
    desk = fetched_below_device_pages()
    desk.take(Abort("waits"))
    run_plans(desk)
    (done,) = desk.take(Flush(1, ("device",), 600.0)).flushed
    assert not done.busy


@pytest.mark.parametrize(("transfer", "pages"), [(77, 1), (0, 6), (0, -1)])
def test_progress_that_makes_no_sense_ends_the_epoch(transfer: int, pages: int) -> None:
    desk = store_desk()
    ticket = issue(desk)
    effects = desk.take(FetchProgress(1, 0, transfer or ticket.transfer, pages, False))
    assert effects.restart is not None and "was not asked for" in effects.restart


# ------------------------------------------------------------------------------------------ what the store did not take, or has lost


def refused(desk: StoreDesk, order: Store) -> Effects:
    return desk.take(StoreDone(1, 0, order.transfer, bytes(len(order.pages))))


def taken(desk: StoreDesk, order: Store) -> Effects:
    return desk.take(StoreDone(1, 0, order.transfer, b"\1" * len(order.pages)))


def stores(effects: Effects) -> list[set[bytes]]:
    """The pages of each STORE."""
    return [
        {page.hash for page in order.pages} for order in effects.orders if isinstance(order, Store)
    ]


def given_up() -> tuple[StoreDesk, Store]:
    """Pages that the store refused as often as they are tried."""
    desk, order = saving()
    (again,) = refused(desk, order).orders
    assert isinstance(again, Store) and not refused(desk, again).orders
    return desk, order


def test_what_a_store_that_was_away_refused_is_stored_when_it_is_back() -> None:
    desk, order = given_up()
    assert stores(desk.take(StoreWell())) == [{page.hash for page in order.pages}]
    assert not stores(desk.take(StoreWell())), "once"


def test_what_has_left_host_memory_meanwhile_is_not() -> None:
    desk, _ = given_up()
    desk.take(Flush(1, ("device", "host"), 5.0))
    assert not stores(desk.take(StoreWell()))


def test_a_refused_page_is_stored_when_it_is_used_again() -> None:
    desk, order = given_up()
    assert stores(ask(desk, "again", PROMPT[:9])) == [{page.hash for page in order.pages}]


def test_after_a_flush_of_the_store_alone_pages_in_memory_count_as_stored_no_longer() -> None:
    desk, order = saving()
    taken(desk, order)
    assert not stores(ask(desk, "b", PROMPT[:9])), "it is there"
    desk.take(Abort("b"))
    assert not stores(desk.take(StoreEmptied())), (
        "whoever emptied it did not want it filled at once"
    )
    assert stores(ask(desk, "c", PROMPT[:9])) == [{page.hash for page in order.pages}], (
        "but when they are used"
    )


def test_what_was_being_stored_while_the_store_was_emptied_is_stored_again() -> None:
    desk, order = saving()
    desk.take(StoreEmptied())
    assert stores(taken(desk, order)) == [{page.hash for page in order.pages}]
