"""The real master, memory index and throttle of the store under virtual time and faults, and planted bugs that this must find."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from forebay.sim import store_holder
from forebay.sim.fuzz import ENOUGH_STORE_HISTORIES, run_store_campaign
from forebay.sim.preset import Preset
from forebay.sim.store_coverage import STORE, StoreFault
from forebay.sim.store_history import HARMLESS, StoreHistory, draw_store, run_store_history
from forebay.sim.store_holder import SimHolder
from forebay.store.holder.memory import Entry
from forebay.store.master import burial, membership, promotion, puts, reads
from forebay.store.master.records import Holder, Object, Session, State, Task, Trigger
from forebay.store.throttle import PrefetchThrottle
from forebay.store.wire.messages import HeldSsd, HolderToMaster, Persisted, PromotionDone

SEEDS = 2000
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("preset", [None, *Preset])
def test_store_histories(preset: Preset | None) -> None:
    met: Counter[str] = Counter()
    for seed in range(5000, 5050):
        met += run_store_history(seed, preset).met
    wanted = {
        "put acknowledged",
        "put revoked",
        "removed",
        "got from memory",
        "got from SSD",
        "get missed",
        "put EXISTS",
        "stray",
    }
    wanted |= set(StoreFault) if preset is Preset.STORM else set()
    assert not wanted - set(met), "a kind of event never happened"


def test_presets_draw_what_they_say() -> None:
    drawn = {
        preset: [draw_store(random.Random(seed), preset).faults for seed in range(200)]
        for preset in Preset
    }
    assert () in drawn[Preset.LITE] and max(map(len, drawn[Preset.LITE])) == 1
    assert {kind for faults in drawn[Preset.LITE] for kind in faults} == set(HARMLESS)
    assert all(len(set(faults)) == 1 for faults in drawn[Preset.ONE_FAULT])
    assert {kind for faults in drawn[Preset.STORM] for kind in faults} == set(StoreFault)
    assert all(len(set(faults)) >= 2 for faults in drawn[Preset.STORM])


def test_unreachable_cells_are_cells_and_have_a_reason() -> None:
    assert set(STORE.unreachable) <= set(STORE.cells) and all(STORE.unreachable.values())


def test_a_campaign_that_has_gone_blind_somewhere_says_where() -> None:
    campaign = run_store_campaign(0, 1, preset=Preset.STORM)
    campaign.met.update(dict.fromkeys(STORE.cells, 1))
    campaign.totals.update(dict.fromkeys(campaign.wanted, 1))
    assert not campaign.never
    campaign.met[StoreFault.HOLDER_PAUSED, "reading"] = 0
    assert campaign.never == ["holder paused x reading"]


@pytest.mark.slow
def test_a_large_campaign_meets_every_reachable_cell() -> None:
    assert not run_store_campaign(0, ENOUGH_STORE_HISTORIES, preset=Preset.STORM).never


def test_what_is_evicted_while_its_disk_fails_was_not_promised() -> None:
    """Kept: a record got into a log while the master, told that the disk fails, evicted its object. The checker had promised it."""
    run_store_history(812215, Preset.STORM)


def test_what_a_holder_logged_before_its_memory_was_evicted_goes_with_a_removal() -> None:
    """Kept: evicted everywhere because another's log has it, killed before it could say that its own has it too, removed, and back."""
    run_store_history(1031163, Preset.STORM)


def test_one_seed_is_one_history() -> None:
    assert run_store_history(3) == run_store_history(3)


# ---------------------------------------------------------------------------------------------- planted bugs


def lease_at_enqueue_instead_of_commit(patch: pytest.MonkeyPatch) -> None:
    create = promotion._create

    def early(
        state: State, now: float, object: Object, holder: Holder, trigger: Trigger, hint_s: float
    ) -> Task:
        object.lease_until = max(object.lease_until, now + promotion.MAX_COMMIT_LEASE_S)
        return create(state, now, object, holder, trigger, hint_s)

    patch.setattr(promotion, "_create", early)


def announce_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """The holder says Persisted when the bytes have arrived, not when its log has them (field report N1)."""
    log_later = SimHolder._log_later

    def hasty(self: SimHolder, entry: Entry) -> None:
        self.send(Persisted([HeldSsd(entry.tenant, entry.key, entry.generation, entry.length)]))
        log_later(self, entry)

    patch.setattr(SimHolder, "_log_later", hasty)


def reuse_after_the_lease_without_a_stamp(patch: pytest.MonkeyPatch) -> None:
    """A reader whose copy took longer than its lease trusts it (field report E1)."""
    patch.setattr(StoreHistory, "_still_good", lambda self, header, stamp, length, deadline: True)


def evict_under_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reads, "LEASE_SLACK_S", -5.0)


def forget_removals_of_the_absent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(burial.Deaths, "of", lambda *_: None)


def forget_removals_under_way(patch: pytest.MonkeyPatch) -> None:
    """A removal between a holder's registration and its inventory does not count against that inventory."""
    init = burial.Deaths.__init__

    def forgetful(self: burial.Deaths, state: State, holder: Holder) -> None:
        init(self, state, holder)
        self._under_way.clear()

    patch.setattr(burial.Deaths, "__init__", forgetful)


def bury_more_than_the_put_that_was_given_up(patch: pytest.MonkeyPatch) -> None:
    """What an exact grave killed is buried with everything older."""
    of = burial.Deaths.of

    def broad(self: burial.Deaths, tenant: str, key: bytes, generation: int) -> burial.Grave | None:
        death = of(self, tenant, key, generation)
        return death and burial.Grave(tenant, key, generation)

    patch.setattr(burial.Deaths, "of", broad)


def take_the_object_everywhere(patch: pytest.MonkeyPatch) -> None:
    """A put that failed at one of two holders is removed at both when the one returns."""

    def everywhere(state: State, now: float, object: Object, holder: Holder) -> None:
        digger = burial.Digger(state)
        digger.bury(object)
        puts.unlist(state, now, object)
        digger.send(0, None, b"")

    patch.setattr(membership, "_forget_at", everywhere)


def list_records_that_are_being_buried(patch: pytest.MonkeyPatch) -> None:
    """A holder tells a new master of records whose removal waits for the log."""
    patch.setattr(store_holder, "not_being_buried", lambda held, burying: held)


def tell_of_records_before_the_inventory(patch: pytest.MonkeyPatch) -> None:
    def chatty(self: SimHolder, message: HolderToMaster) -> None:
        if self.link is not None:
            self.link(message)

    patch.setattr(SimHolder, "send", chatty)


def keep_a_lost_writers_put(patch: pytest.MonkeyPatch) -> None:
    """Nobody revokes it: its key can never be put again (field report H1)."""

    def lazy(state: State, owner: Session) -> None:
        for put in owner.puts.values():
            put.session = 0
        owner.puts.clear()

    patch.setattr(puts, "writer_lost", lazy)


def believe_a_failed_promotion(patch: pytest.MonkeyPatch) -> None:
    done = promotion.done
    patch.setattr(
        promotion,
        "done",
        lambda state, now, holder, message: done(
            state, now, holder, PromotionDone(message.task, True)
        ),
    )


def reuse_at_once_after_a_master_restart(patch: pytest.MonkeyPatch) -> None:
    """Memory that is found again is not leased, though readers may hold leases of the last epoch (rule ST4)."""
    patch.setattr(membership, "RESTART_GRACE_S", -100.0)
    patch.setattr(StoreHistory, "_check_leases", lambda self, master: None)


def promote_again_and_again(patch: pytest.MonkeyPatch) -> None:
    def eager(
        self: PrefetchThrottle, keys: Sequence[bytes], now: float, *, despite_cooldown: bool = False
    ) -> list[bytes]:
        return list(keys)

    patch.setattr(PrefetchThrottle, "admit", eager)


def forget_what_a_killed_holder_logged(patch: pytest.MonkeyPatch) -> None:
    """Of a put that fails, only holders that still have its room are told: one that was killed and came back keeps its record."""
    patch.setattr(
        puts,
        "_receivers",
        lambda put: dict.fromkeys(replica.holder for replica in put.object.memory),
    )


CANARIES: list[Patch] = [
    lease_at_enqueue_instead_of_commit,
    announce_before_it_is_written,
    evict_under_leases,
    forget_removals_of_the_absent,
    forget_removals_under_way,
    bury_more_than_the_put_that_was_given_up,
    take_the_object_everywhere,
    list_records_that_are_being_buried,
    tell_of_records_before_the_inventory,
    keep_a_lost_writers_put,
    believe_a_failed_promotion,
    promote_again_and_again,
    reuse_after_the_lease_without_a_stamp,
    reuse_at_once_after_a_master_restart,
    forget_what_a_killed_holder_logged,
]


RARE: list[Patch] = [
    reuse_after_the_lease_without_a_stamp,
    forget_removals_under_way,
    bury_more_than_the_put_that_was_given_up,
    take_the_object_everywhere,
    list_records_that_are_being_buried,
    tell_of_records_before_the_inventory,
    believe_a_failed_promotion,
    reuse_at_once_after_a_master_restart,
    forget_what_a_killed_holder_logged,
]


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, marks=pytest.mark.slow if plant in RARE else (), id=plant.__name__)
        for plant in CANARIES
    ],
)
def test_a_planted_bug_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            run_store_history(seed, Preset.STORM if seed % 2 else None)
