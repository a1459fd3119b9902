"""Planted bugs: each must be found within a few hundred histories, or the simulator has gone blind."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import msgspec
import pytest

from forebay.core import admission, building, planner, request
from forebay.core.digest import PlanDigest
from forebay.core.identity import ModelIdentity
from forebay.core.ledger import FetchLedger
from forebay.core.messages import (
    Copy,
    FinishReason,
    GridState,
    PlanDone,
    Store,
    StoreDone,
    TransferDone,
)
from forebay.core.page_cache import PageCache
from forebay.core.pages import Owner
from forebay.core.replica import InFlight, Replica
from forebay.core.request import Request
from forebay.core.transfers import lookup
from forebay.core.transfers.backup import BackupQueue
from forebay.core.transfers.fetch import Fetch, Fetches
from forebay.core.transfers.load import LoadQueue
from forebay.core.transfers.store import StoreQueue
from forebay.core.transfers.tickets import Tickets
from forebay.core.tree import NONE, Node, PrefixTree, Tier
from forebay.sim import other_models
from forebay.sim.fuzz import CampaignError, run_campaign
from forebay.sim.rank import FakeRank

SEEDS = 400
Patch = Callable[[pytest.MonkeyPatch], None]


def free_at_token_return(patch: pytest.MonkeyPatch) -> None:
    """Pages are freed when the request ends, not when its last plan has retired (rule R5)."""
    release = PageCache.release

    def now(
        self: PageCache,
        path: Sequence[Node],
        pages: Sequence[int],
        after_plan: int,
        loaded: Sequence[Node] = (),
    ) -> None:
        release(self, path, pages, after_plan if loaded else min(after_plan, self.retired), loaded)

    patch.setattr(PageCache, "release", now)


def believe_a_failed_backup(patch: pytest.MonkeyPatch) -> None:
    end = PageCache.end_backup
    patch.setattr(
        PageCache, "end_backup", lambda self, node, page, saved: end(self, node, page, True)
    )


def believe_the_first_rank_that_has_saved(patch: pytest.MonkeyPatch) -> None:
    """A backup counts when one rank is done, not all."""
    done = BackupQueue.done

    def hasty(self: BackupQueue, cache: PageCache, ack: TransferDone) -> list[Node]:
        transfer = self._book.get(ack.transfer)
        if transfer is None:
            return []
        transfer.left = {ack.rank}
        transfer.fold._reached = [ack.pages] * len(transfer.fold._reached)
        return done(self, cache, ack)

    patch.setattr(BackupQueue, "done", hasty)


def evict_a_page_that_is_being_saved(patch: pytest.MonkeyPatch) -> None:
    """A backup does not pin what it reads."""
    begin, end = PageCache.begin_backup, PageCache.end_backup

    def careless(self: PageCache, node: Node) -> int | None:
        page = begin(self, node)
        if page is not None:
            self.tree.unpin((node,))
        return page

    def after(self: PageCache, node: Node, page: int, saved: bool) -> None:
        if node.stale or node.pages[Tier.DEVICE] == NONE:
            self.host.release(page, Owner.TRANSFER)
        else:
            self.tree.pin(node)
            end(self, node, page, saved)

    patch.setattr(PageCache, "begin_backup", careless)
    patch.setattr(PageCache, "end_backup", after)


def load_into_the_plan_after_next(patch: pytest.MonkeyPatch) -> None:
    """Loads ride with a later plan than the first that may read them."""
    carry = LoadQueue.carry

    def late(self: LoadQueue, cache: PageCache, plan: int) -> tuple[Copy, ...]:
        return carry(self, cache, plan) if plan % 2 else ()

    patch.setattr(LoadQueue, "carry", late)


def evict_pinned(patch: pytest.MonkeyPatch) -> None:
    """Pins are forgotten one too early."""
    pin = PrefixTree.pin

    def forgetful(self: PrefixTree, node: Node, tier: Tier = Tier.DEVICE) -> None:
        pin(self, node, tier)
        if tier is Tier.DEVICE and node.pins[tier] == 1:
            self.unpin([node])

    patch.setattr(PrefixTree, "pin", forgetful)


def match_one_page_too_many(patch: pytest.MonkeyPatch) -> None:
    """A request believes that the page after its prefix is cached too."""
    reserve = admission._reserve

    def hopeful(replica: Replica, request: Request) -> int | None:
        reserved = reserve(replica, request)
        if (
            reserved is not None
            and request.computed + replica.config.page_size < request.length - 1
        ):
            request.computed += replica.config.page_size
        return reserved

    patch.setattr(admission, "_reserve", hopeful)


def ignore_the_salt(patch: pytest.MonkeyPatch) -> None:
    root_hash = planner.root_hash
    patch.setattr(planner, "root_hash", lambda *args, salt: root_hash(*args))


def repeat_the_last_token_after_a_retraction(patch: pytest.MonkeyPatch) -> None:
    retract = Replica.retract

    def lossy(self: Replica, request: Request) -> None:
        if request.emitted:
            del request.packed[-4:]
        retract(self, request)

    patch.setattr(Replica, "retract", lossy)


def forget_the_remap(patch: pytest.MonkeyPatch) -> None:
    """A twin's duplicate is freed, but the workers are not told (rule R8)."""
    settle = building._settle_twins

    def silent(replica: Replica, request: Request) -> None:
        settle(replica, request)
        request.remaps.clear()

    patch.setattr(building, "_settle_twins", silent)


def leak_on_abort(patch: pytest.MonkeyPatch) -> None:
    finish = planner.Planner._finish

    def leaky(
        self: planner.Planner, request: Request, reason: FinishReason, message: str = ""
    ) -> None:
        if reason is FinishReason.ABORT and request.table:
            request.table.pop()
        finish(self, request, reason, message)

    patch.setattr(planner.Planner, "_finish", leaky)


def one_token_beyond_the_limit(patch: pytest.MonkeyPatch) -> None:
    accept = request.Request.accept

    def generous(self: Request, token: int, max_context: int) -> FinishReason | None:
        reason = accept(self, token, max_context)
        return (
            None
            if reason is FinishReason.LENGTH and self.emitted == self.params.max_tokens
            else reason
        )

    patch.setattr(request.Request, "accept", generous)


def lose_a_ready_decode(patch: pytest.MonkeyPatch) -> None:
    """A wake-up that gets lost: the request waits with nothing in flight."""
    original = building._ensure_page

    def drop(replica: Replica, request: Request) -> bool:
        ensured = original(replica, request)
        if ensured and len(replica.decodes) > 2:
            replica.decodes.pop()
        return ensured

    patch.setattr(building, "_ensure_page", drop)


def believe_plans_of_the_old_epoch(patch: pytest.MonkeyPatch) -> None:
    """After a restart the tree still holds what the old grid computed."""
    lose = Replica.lose_grid
    start = Replica.start_epoch

    def keep(self: Replica) -> None:
        cache = self.cache
        lose(self)
        self._old = cache  # type: ignore[attr-defined]

    def restore(
        self: Replica,
        epoch: int,
        device_pages: int,
        host_pages: int,
        s_per_token: float,
        now: float,
    ) -> None:
        start(self, epoch, device_pages, host_pages, s_per_token, now)
        old = getattr(self, "_old", None)
        if old is not None and old.device.capacity == device_pages:
            for number in range(old.retired + 1, self.built + 1):
                old.retire(number)
            self.cache = old

    patch.setattr(Replica, "lose_grid", keep)
    patch.setattr(Replica, "start_epoch", restore)


def digest_without_remaps(patch: pytest.MonkeyPatch) -> None:
    class Partial(PlanDigest):
        def remap(self, slot: int, index: int, page: int) -> None:
            pass

    patch.setattr(building, "PlanDigest", Partial)


def believe_the_rank_that_has_fetched_most(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetch, "safe", property(lambda self: max(self.fold._reached)))


def store_a_host_page_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """The page may hold another prefix by the time a rank reads it (field report B3)."""
    start, done = StoreQueue.start, StoreQueue.done

    def careless(self: StoreQueue, cache: PageCache, ranks: int, epoch: int) -> Store | None:
        order = start(self, cache, ranks, epoch)
        if order is not None:
            batch = self._book.get(order.transfer)
            assert batch is not None
            cache.tree.unpin(batch.nodes, Tier.HOST)
        return order

    def after(self: StoreQueue, cache: PageCache, ack: StoreDone) -> None:
        batch = self._book.get(ack.transfer)
        assert batch is not None
        if len(batch.left) == 1:
            for node in batch.nodes:
                if node.pages[Tier.HOST] == NONE or node.stale:
                    node.pages[Tier.HOST] = NONE
                node.pins[Tier.HOST] += 1
                cache.tree._unpinned[Tier.HOST] -= node.pages[Tier.HOST] != NONE
        done(self, cache, ack)

    patch.setattr(StoreQueue, "start", careless)
    patch.setattr(StoreQueue, "done", after)


def forget_a_waiting_request_when_its_ticket_ends(patch: pytest.MonkeyPatch) -> None:
    """Nothing wakes a request whose ticket came short."""
    wake = Tickets._wake

    def sleepy(self: Tickets, fetch: Fetch, cache: PageCache, now: float, ask_again: bool) -> None:
        if fetch.safe == len(fetch.pages):
            wake(self, fetch, cache, now, ask_again)

    patch.setattr(Tickets, "_wake", sleepy)


def believe_a_failed_store(patch: pytest.MonkeyPatch) -> None:
    settle = StoreQueue._settle
    patch.setattr(
        StoreQueue, "_settle", lambda self, cache, node, stored: settle(self, cache, node, True)
    )


def trust_what_exist_said(patch: pytest.MonkeyPatch) -> None:
    """What a ticket has brought is not counted: exist had said that it is all there (field report P16)."""
    patch.setattr(
        Fetch,
        "safe",
        property(lambda self: self.fold.pages if self.left else len(self.pages)),
    )


def believe_words_of_another_epoch(patch: pytest.MonkeyPatch) -> None:
    take = planner.Planner._take

    def credulous(self: planner.Planner, now: float, event: planner.Event) -> None:
        take(
            self,
            now,
            msgspec.structs.replace(event, epoch=self.epoch)
            if isinstance(event, PlanDone)
            else event,
        )

    patch.setattr(planner.Planner, "_take", credulous)


def watch_nobody(patch: pytest.MonkeyPatch) -> None:
    """Neither silence nor a late plan is noticed (rule R3)."""
    patch.setattr(planner.Planner, "_watch", lambda self, now: None)


def blame_nobody(patch: pytest.MonkeyPatch) -> None:
    """A request that makes ranks fail is run again until the grid is given up."""
    patch.setattr(planner.Planner, "_blame", lambda self, faulted: [])


def call_a_retired_plan_progress(patch: pytest.MonkeyPatch) -> None:
    """A rank that dies at a prompt's last chunk, again and again, is started for ever: the chunks before it retire."""
    retire = planner.Planner._retire

    def forgiving(self: planner.Planner, now: float, record: InFlight) -> None:
        retire(self, now, record)
        self._restarts_without_progress = 0
        for each in record.requests:
            each.cleared()

    patch.setattr(planner.Planner, "_retire", forgiving)


def fetch_again_what_ended_a_rank(patch: pytest.MonkeyPatch) -> None:
    """And a request that waits for its ticket is nothing that a grid has to bring forward."""
    lose, blame = Replica.lose_grid, planner.Planner._blame

    def lose_and_ask_again(self: Replica) -> None:
        lose(self)
        for each in self.requests.values():
            each.fetched = False

    def blame_what_runs(self: planner.Planner, faulted: bool) -> list[Request]:
        if not self.replica.in_flight and self.state is GridState.READY:
            self._restarts_without_progress = max(self._restarts_without_progress - 1, 0)
            return []
        return blame(self, faulted)

    patch.setattr(Replica, "lose_grid", lose_and_ask_again)
    patch.setattr(planner.Planner, "_blame", blame_what_runs)


def give_no_reason_for_what_did_not_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetches, "_count_pages", lambda self, fetch, lost=0: None)


def give_no_reason_for_what_a_lost_grid_had(patch: pytest.MonkeyPatch) -> None:
    leave = FetchLedger.leave
    patch.setattr(
        FetchLedger,
        "leave",
        lambda self, why, pages: leave(self, why, 0 if why == "grid_lost" else pages),
    )


def call_what_is_evicted_unused_no_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        FetchLedger,
        "lose",
        lambda self, why, pages=1: setattr(self, "brought", self.brought - pages),
    )


def count_a_refusal_that_is_asked_for_anew(patch: pytest.MonkeyPatch) -> None:
    """What was refused stays wanted though it is asked for again."""

    def doubled(
        self: Tickets,
        request: Request,
        why: str,
        hashes: Sequence[bytes],
        cache: PageCache,
        now: float,
    ) -> None:
        self._ledger.wanted += len(hashes)
        self.ask(request, cache, now)

    patch.setattr(Tickets, "_retry", doubled)


def take_another_keys_page_for_ours(patch: pytest.MonkeyPatch) -> None:
    """A rank does not compare the key that a stored page names with the one that it has asked for."""
    patch.setattr(FakeRank, "_is_asked_for", staticmethod(lambda key, page: True))


def wait_for_a_store_that_is_down(patch: pytest.MonkeyPatch) -> None:
    """A query has no end of its own: who asks a store that is not there waits for ever."""
    patch.setattr(lookup, "QUERY_S", math.inf)


def keep_what_a_tainted_plan_wrote(patch: pytest.MonkeyPatch) -> None:
    """Pages whose numbers are none are matched later."""
    patch.setattr(PrefixTree, "bury", lambda self, nodes: None)


def let_those_go_on_who_built_on_taint(patch: pytest.MonkeyPatch) -> None:
    bury = PrefixTree.bury

    def unmarked(self: PrefixTree, nodes: Sequence[Node]) -> None:
        bury(self, nodes)
        for node in self:
            node.tainted = False

    patch.setattr(PrefixTree, "bury", unmarked)


def take_the_token_of_a_tainted_piece(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner.Planner, "_drop_tainted", lambda self, record, done: True)


def store_what_may_still_turn_out_to_be_tainted(patch: pytest.MonkeyPatch) -> None:
    want = StoreQueue.want

    def hasty(self: StoreQueue, cache: PageCache, node: Node) -> None:
        node.plan = 0
        want(self, cache, node)

    patch.setattr(StoreQueue, "want", hasty)


def leave_out_of_the_key(**part: object) -> Patch:
    """One part of a model's identity does not count: its pages and another model's have one name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = ModelIdentity.fingerprint
        patch.setattr(
            ModelIdentity, "fingerprint", lambda self: whole(dataclasses.replace(self, **part))
        )

    plant.__name__ = f"leave_{next(iter(part))}_out_of_the_key"
    return plant


def forget_how_numbers_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(other_models, "kv_namespace", lambda kept, computed: computed)


def forget_how_numbers_are_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(other_models, "kv_namespace", lambda kept, computed: kept)


CANARIES: list[Patch] = [
    leave_out_of_the_key(config=b""),
    leave_out_of_the_key(tokenizer=b""),
    leave_out_of_the_key(weights=()),
    leave_out_of_the_key(kv_layout=0),
    leave_out_of_the_key(version=0),
    forget_how_numbers_are_kept,
    forget_how_numbers_are_computed,
    keep_what_a_tainted_plan_wrote,
    let_those_go_on_who_built_on_taint,
    take_the_token_of_a_tainted_piece,
    store_what_may_still_turn_out_to_be_tainted,
    give_no_reason_for_what_did_not_come,
    give_no_reason_for_what_a_lost_grid_had,
    call_what_is_evicted_unused_no_page,
    count_a_refusal_that_is_asked_for_anew,
    take_another_keys_page_for_ours,
    wait_for_a_store_that_is_down,
    believe_a_failed_store,
    trust_what_exist_said,
    believe_words_of_another_epoch,
    watch_nobody,
    blame_nobody,
    call_a_retired_plan_progress,
    fetch_again_what_ended_a_rank,
    believe_the_rank_that_has_fetched_most,
    store_a_host_page_that_is_not_pinned,
    forget_a_waiting_request_when_its_ticket_ends,
    free_at_token_return,
    believe_a_failed_backup,
    believe_the_first_rank_that_has_saved,
    evict_a_page_that_is_being_saved,
    load_into_the_plan_after_next,
    evict_pinned,
    match_one_page_too_many,
    ignore_the_salt,
    repeat_the_last_token_after_a_retraction,
    forget_the_remap,
    leak_on_abort,
    one_token_beyond_the_limit,
    lose_a_ready_decode,
    believe_plans_of_the_old_epoch,
    digest_without_remaps,
]


# The first of the histories that are tried for what is rare, so that the search is short today.
FIRST_SEED = {fetch_again_what_ended_a_rank: 320, wait_for_a_store_that_is_down: 180}


@pytest.mark.parametrize("plant", CANARIES, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(CampaignError) as caught:
        run_campaign(FIRST_SEED.get(plant, 0), SEEDS)
    assert isinstance(caught.value.__cause__, AssertionError), (
        "found by a check, not by a canary that no longer fits the code"
    )
