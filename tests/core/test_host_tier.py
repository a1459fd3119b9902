"""L2 by stories: pages go to host memory and come back with the plan that needs them. Pages hold 4 tokens, a plan's chunk 8."""

import pytest

from forebay.core.messages import (
    Copy,
    Flush,
    Plan,
    PlanDone,
    Sample,
    Submit,
    TransferDone,
    pack_tokens,
    unpack_tokens,
)
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.backup import WritePolicy
from forebay.core.tree import Tier
from tests.core.conftest import Desk, make_desk, spans

PROMPT = list(range(1, 13))  # three full pages


def run(desk: Desk, plans: list[Plan], saved: int | None = None) -> list[Plan]:
    """Run plans to the end, and their backups; returns all plans."""
    ran = []
    waiting = list(plans)
    while waiting:
        plan = waiting.pop(0)
        ran.append(plan)
        samples = tuple(Sample(piece.slot, 9) for piece in plan.pieces if piece.sample)
        waiting += desk.step(PlanDone(plan.epoch, 0, plan.number, samples))
        if plan.backup is not None:
            pages = len(plan.backup.copies) if saved is None else saved
            waiting += desk.step(TransferDone(plan.epoch, 0, plan.backup.transfer, pages))
    return ran


def flush_device(desk: Desk) -> None:
    effects = desk.planner.step(desk.now, [Flush(1, ("device",), 0.0)])
    assert not effects.flushed[0].busy


def test_full_pages_are_backed_up_with_the_plan_that_fills_them_root_first() -> None:
    desk = make_desk(host_pages=8)
    plans = run(desk, desk.submit("a", PROMPT, max_tokens=1))
    copies = [copy for plan in plans if plan.backup for copy in plan.backup.copies]
    assert [copy.device for copy in copies] == list(
        plans[0].pieces[0].pages + plans[1].pieces[0].pages
    )
    assert len(plans[0].backup.copies) == 2 and len(plans[1].backup.copies) == 1  # type: ignore[union-attr]


def test_a_prefix_that_left_the_device_is_loaded_by_the_plan_that_needs_it() -> None:
    desk = make_desk(host_pages=8)
    saved = [
        copy
        for plan in run(desk, desk.submit("a", PROMPT, max_tokens=1))
        if plan.backup
        for copy in plan.backup.copies
    ]
    flush_device(desk)
    (plan,) = desk.submit("b", [*PROMPT, 20], max_tokens=1)
    assert spans(plan) == [(12, 13)]
    assert plan.loads == tuple(
        Copy(page, copy.host) for page, copy in zip(plan.pieces[0].pages, saved, strict=False)
    )
    run(desk, [plan])
    usage = next(
        output.usage for output in desk.outputs if output.request_id == "b" and output.usage
    )
    assert (usage.cached_device, usage.cached_host) == (0, 12)


def test_a_few_tokens_are_computed_again_rather_than_loaded() -> None:
    desk = make_desk(host_pages=8, load_back_threshold=12)
    run(desk, desk.submit("a", PROMPT, max_tokens=1))
    flush_device(desk)
    (plan,) = desk.submit("b", [*PROMPT, 20], max_tokens=1)
    assert not plan.loads and spans(plan) == [(0, 8)]


def test_what_one_rank_has_not_saved_is_not_saved() -> None:
    desk = make_desk(host_pages=8, pp=2, load_back_threshold=0)
    plans = desk.submit("a", PROMPT[:8], max_tokens=1)
    for rank in (0, 1):
        desk.done(plans[0], rank)
    backup = plans[0].backup
    assert backup is not None and len(backup.copies) == 2
    desk.step(TransferDone(1, 0, backup.transfer, 2), TransferDone(1, 1, backup.transfer, 1))
    flush_device(desk)
    (plan,) = desk.submit("b", PROMPT[:8], max_tokens=1)[:1]
    assert len(plan.loads) == 1


def test_a_page_being_saved_is_not_evicted_from_the_device() -> None:
    desk = make_desk(host_pages=8)
    (plan,) = desk.submit("a", PROMPT[:8], max_tokens=1)
    desk.done(plan, 0)
    effects = desk.planner.step(desk.now, [Flush(1, ("device",), 0.0)])
    assert "2 pages in use" in effects.flushed[0].busy[0]
    assert plan.backup is not None
    desk.step(TransferDone(1, 0, plan.backup.transfer, 2))
    flush_device(desk)


def test_a_page_never_takes_its_own_parents_host_page_and_others_pass_it() -> None:
    desk = make_desk(host_pages=2)
    plans = run(desk, desk.submit("a", PROMPT, max_tokens=1))
    assert [len(plan.backup.copies) if plan.backup else 0 for plan in plans] == [2, 0], (
        "a's third page finds no room and waits"
    )
    (plan,) = run(desk, desk.submit("b", [50, 51, 52, 53], max_tokens=1))
    assert plan.backup is not None and len(plan.backup.copies) == 1, (
        "b's page takes that of a's leaf"
    )


def test_a_hot_prefix_longer_than_the_host_neither_blocks_the_queue_nor_lets_it_grow() -> None:
    desk = make_desk(pages=24, host_pages=3)
    hot = list(range(1, 18))
    saved = 0
    for round in range(40):
        run(desk, desk.submit(f"hot{round}", hot, max_tokens=1))
        plans = run(desk, desk.submit(f"own{round}", [100 + round] * 9, max_tokens=1))
        saved += sum(len(plan.backup.copies) for plan in plans if plan.backup)
    assert len(desk.planner.replica.backups._wanted) <= 24, "only what is still on the device waits"
    assert saved > 0, "others are saved although the hot prefix finds no room"


def test_selective_backup_waits_for_the_second_hit() -> None:
    desk = make_desk(host_pages=8, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    backups = [plan.backup for plan in run(desk, desk.submit("a", PROMPT[:8], max_tokens=1))]
    backups += [plan.backup for plan in run(desk, desk.submit("b", PROMPT[:8], max_tokens=1))]
    assert backups == [None, None]
    (plan,) = run(desk, desk.submit("c", PROMPT[:8], max_tokens=1))
    assert plan.backup is not None and len(plan.backup.copies) == 2


def test_write_back_saves_what_eviction_would_take_once_pages_run_short() -> None:
    desk = make_desk(pages=10, host_pages=8, write_policy=WritePolicy.WRITE_BACK)
    assert not any(plan.backup for plan in run(desk, desk.submit("a", PROMPT, max_tokens=1)))
    plans = run(desk, desk.submit("b", [60] * 28, max_tokens=1))
    assert any(plan.backup for plan in plans)


@pytest.mark.parametrize("policy", WritePolicy)
def test_no_store_never_leaves_device_memory(policy: WritePolicy) -> None:
    desk = make_desk(pages=8, host_pages=8, write_policy=policy)
    for name in ("a", "b", "c"):
        submit = Submit(
            name, pack_tokens(PROMPT), SamplingParams(max_tokens=1, seed=0), (0,), no_store=True
        )
        assert not any(plan.backup for plan in run(desk, desk.step(submit)))
    own = pack_tokens([70] * 28)
    plans = run(
        desk, desk.step(Submit("d", own, SamplingParams(max_tokens=1, seed=0), (0,), no_store=True))
    )
    assert not any(plan.backup for plan in plans), "not even when pages run short"


def test_a_page_that_anyone_may_store_is_stored_once_an_ordinary_request_uses_it() -> None:
    desk = make_desk(host_pages=8)
    run(
        desk,
        desk.step(
            Submit(
                "a", pack_tokens(PROMPT), SamplingParams(max_tokens=1, seed=0), (0,), no_store=True
            )
        ),
    )
    (plan,) = run(desk, desk.submit("b", PROMPT, max_tokens=1))
    assert plan.backup is not None and len(plan.backup.copies) == 3


def test_an_abort_before_the_plan_takes_the_load_back() -> None:
    desk = make_desk(host_pages=8)
    run(desk, desk.submit("a", PROMPT, max_tokens=1))
    flush_device(desk)
    (busy,) = desk.submit("busy", [50, 51], max_tokens=1)
    assert desk.submit("b", [*PROMPT, 20]) == [], (
        "one plan is in flight, so b's load waits for the next"
    )
    assert len(desk.planner.replica.loads) == 3
    desk.abort("b")
    assert not desk.planner.replica.loads
    run(desk, [busy])
    flush_device(desk)


def test_what_was_recomputed_although_it_is_in_host_memory_is_on_the_device_again() -> None:
    desk = make_desk(host_pages=8, load_back_threshold=100)
    run(desk, desk.submit("a", PROMPT, max_tokens=1))
    flush_device(desk)
    run(desk, desk.submit("b", PROMPT, max_tokens=1))
    cache = desk.planner.replica.cache
    assert cache is not None
    assert all(page >= 0 for node in cache.tree for page in node.pages)
    assert len(cache.tree) == 3 and cache.tree.unpinned(Tier.DEVICE) == 3
    assert unpack_tokens(desk.plans[-1].pieces[0].tokens).size


@pytest.mark.parametrize(("transfer", "pages"), [(99, 0), (1, 3), (1, -1)])
def test_an_acknowledgement_that_makes_no_sense_ends_the_epoch(transfer: int, pages: int) -> None:
    desk = make_desk(host_pages=8)
    desk.submit("a", PROMPT[:8])
    effects = desk.planner.step(desk.now, [TransferDone(1, 0, transfer, pages)])
    assert effects.restart is not None and "was not asked for" in effects.restart
