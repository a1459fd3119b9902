"""Host pages in staging mode, by stories: there for the time of a transfer. Pages hold 4 tokens, a plan's chunk 8."""

from forebay.core.messages import Abort, Plan, PlanDone, Sample, Store, StoreDone, TransferDone
from forebay.core.residency import STAGING
from forebay.core.transfers.backup import WritePolicy
from forebay.core.transfers.lookup import QueryDone
from forebay.core.tree import Tier
from tests.core.test_tickets import (
    StoreDesk,
    ask,
    host_in_use,
    issue,
    progress,
    run_plans,
    store_desk,
)


def staging_desk(**config: object) -> StoreDesk:
    return store_desk(residency=STAGING, **config)


def save(desk: StoreDesk, plan: Plan) -> list[Store]:
    """Run ``plan`` and its backup; the STOREs that follow."""
    samples = tuple(Sample(piece.slot, 9) for piece in plan.pieces if piece.sample)
    desk.take(PlanDone(1, 0, plan.number, samples))
    assert plan.backup is not None
    effects = desk.take(TransferDone(1, 0, plan.backup.transfer, len(plan.backup.copies)))
    return [order for order in effects.orders if isinstance(order, Store)]


def write_through() -> tuple[StoreDesk, Store]:
    """A desk whose first two pages are on their way from the host to the store."""
    desk = staging_desk(write_policy=WritePolicy.WRITE_THROUGH)
    (query,) = ask(desk).queries
    desk.take(QueryDone(query.number, 0))
    (order,) = save(desk, desk.plans[0])
    return desk, order


def test_a_page_leaves_the_host_once_it_is_stored() -> None:
    desk, order = write_through()
    cache = desk.planner.replica.cache
    assert cache is not None
    nodes = [cache.tree.get(page.hash) for page in order.pages]
    assert all(node is not None and node.pins[Tier.HOST] == 1 for node in nodes)
    desk.take(StoreDone(1, 0, order.transfer, b"\1" * len(order.pages)))
    assert all(node is not None and node.stored and node.pages[Tier.HOST] == -1 for node in nodes)


def test_what_the_store_has_is_not_saved_again() -> None:
    desk, order = write_through()
    desk.take(StoreDone(1, 0, order.transfer, b"\1" * len(order.pages)))
    desk.take(Abort("a"))
    run_plans(desk)
    plans = len(desk.plans)
    ask(desk, "b")
    copies = [copy for plan in desk.plans[plans:] if plan.backup for copy in plan.backup.copies]
    stored = {page.hash for page in order.pages}
    cache = desk.planner.replica.cache
    assert cache is not None
    assert (
        not {
            node.hash
            for node in cache.tree
            for copy in copies
            if node.pages[Tier.DEVICE] == copy.device
        }
        & stored
    )


def test_what_a_ticket_brings_is_handed_to_the_request_and_gone_after_its_first_plan() -> None:
    desk = staging_desk()
    ticket = issue(desk)
    effects = progress(desk, ticket, 5)
    assert effects.plan is not None and len(effects.plan.loads) == 5
    assert host_in_use(desk) == 5
    run_plans(desk)
    assert host_in_use(desk) == 0
    assert desk.planner.replica.cached_store_tokens == 20


def test_what_nobody_waits_for_any_more_does_not_stay() -> None:
    desk = staging_desk()
    ticket = issue(desk)
    desk.take(Abort("a"))
    progress(desk, ticket, 5)
    assert host_in_use(desk) == 0
