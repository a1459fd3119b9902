"""The planner's rules, each as a short story. Pages hold 4 tokens, a plan's chunk 8."""

import pytest

from forebay.core.invariants import check
from forebay.core.messages import (
    Abort,
    CancelFlush,
    FinishReason,
    Flush,
    GridState,
    Heartbeat,
    PlanDone,
    Sample,
    Submit,
    pack_tokens,
    unpack_tokens,
)
from forebay.core.planner import GridLost, GridReady
from forebay.core.sampling import SamplingParams
from forebay.core.tree import Tier
from tests.core.conftest import PAGE, Desk, make_desk, spans

PROMPT = list(range(1, 13))  # three full pages


def test_a_prompt_is_prefilled_in_chunks_that_end_on_page_borders_and_then_decoded(
    desk: Desk,
) -> None:
    (first,) = desk.submit("a", PROMPT[:11], max_tokens=3)
    assert spans(first) == [(0, 8)] and not first.pieces[0].sample
    (second,) = desk.run(first)
    assert spans(second) == [(8, 11)] and second.pieces[0].sample
    (third,) = desk.run(second, token=7)
    assert spans(third) == [(11, 12)] and unpack_tokens(third.pieces[0].tokens).tolist() == [7]
    desk.run_all([third], token=7)
    assert desk.tokens("a") == [7, 7, 7] and desk.finish("a") is FinishReason.LENGTH


def test_the_next_chunk_enters_stage_0_while_the_last_is_in_stage_1() -> None:
    desk = make_desk(pp=2)
    first, second = desk.submit("a", PROMPT + PROMPT)
    assert spans(first) == [(0, 8)] and spans(second) == [(8, 16)]
    assert desk.done(first, 0) == [], "two plans are in flight, as many as stages"
    (third,) = desk.done(first, 1)
    assert spans(third) == [(16, 24)]


def test_decodes_ride_with_chunks_and_outside_their_budget(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2])
    desk.submit("b", PROMPT + PROMPT)
    (mixed,) = desk.run(plan)
    assert spans(mixed) == [(2, 3), (0, 8)]


def test_a_remainder_of_at_most_a_page_goes_ahead_of_chunks_in_a_plan_of_its_own(
    desk: Desk,
) -> None:
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    (long,) = desk.submit("long", [50] * 24)
    desk.submit("hit", [*PROMPT, 60, 61], max_tokens=1)
    ahead, chunk = desk.run(long)
    assert spans(ahead) == [(12, 14)], "in no stage does it wait for a chunk that is not there yet"
    assert spans(chunk) == [(8, 16)], (
        "which may follow at once: what goes ahead is not one of the pp plans in flight"
    )
    check(desk.planner.replica)


def test_hits_go_ahead_of_a_short_prompt_once_and_then_ride_with_its_chunks(desk: Desk) -> None:
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    (long,) = desk.submit("long", [50] * 32)
    for number in range(3):
        desk.submit(f"hit {number}", [*PROMPT, 60 + number], max_tokens=1)
    ahead, chunk = desk.run(long)
    assert spans(ahead) == [(12, 13)] * 3, "all that are ready go together"
    desk.submit("late hit", [*PROMPT, 70], max_tokens=1)
    assert [spans(plan) for plan in desk.run(ahead)] == [], (
        "a plan with a chunk is in flight, as many as stages"
    )
    assert [spans(plan) for plan in desk.run(chunk)] == [[(12, 13), (16, 24)]]


def test_hits_go_ahead_of_a_long_prompt_once_for_every_begun_512_tokens_that_it_computes() -> None:
    desk = make_desk(pages=256, chunk_size=64, max_context=1024)
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    (chunk,) = desk.submit("long", [*PROMPT, *[50] * 588])
    rode = []
    for number in range(4):
        desk.submit(f"hit {number}", [*PROMPT, 60 + number], max_tokens=1)
        *ahead, chunk = desk.run(chunk)
        for plan in ahead:
            assert spans(plan) == [(12, 13)] and desk.run(plan) == []
        rode.append(spans(chunk)[:-1])
    assert rode == [[], [], [(12, 13)], [(12, 13)]], (
        "588 tokens, of which 512 are begun twice; the cached ones do not count"
    )


def test_a_prompt_that_has_been_overtaken_often_enough_holds_hits_to_its_chunks_for_all() -> None:
    desk = make_desk()
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    (long,) = desk.submit("long", [50] * 32)
    desk.submit("hit", [*PROMPT, 60], max_tokens=1)
    ahead, chunk = desk.run(long)
    desk.submit("newcomer", [70] * 32)
    desk.submit("late hit", [*PROMPT, 61], max_tokens=1)
    desk.run(ahead)
    (mixed,) = desk.run(chunk)
    assert spans(mixed) == [(12, 13), (16, 24)], "the newcomer would bear it"


def test_plans_that_go_ahead_have_a_limit_too() -> None:
    """Though the chunk that they went ahead of is aborted before it has a plan."""
    desk = make_desk(pages=64, max_running=16, max_waiting=16)
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    sampling = SamplingParams(max_tokens=1, seed=0)
    for number in range(4):
        hit = Submit(f"hit {number}", pack_tokens([*PROMPT, 60 + number]), sampling, (0,))
        long = Submit(f"long {number}", pack_tokens([100 + number] * 24), sampling, (0,))
        desk.planner.step(desk.now, [hit, long])
        desk.planner.step(desk.now, [Abort(f"long {number}")])
        check(desk.planner.replica)
    assert [record.is_ahead for record in desk.planner.replica.in_flight] == [True, True]


def test_where_hits_ride_they_come_before_the_chunk_and_outside_its_budget() -> None:
    desk = make_desk(hits_ahead=False)
    desk.run_all(desk.submit("first", PROMPT, max_tokens=1))
    (long,) = desk.submit("long", [50] * 24)
    desk.submit("hit", [*PROMPT, 60, 61], max_tokens=1)
    (mixed,) = desk.run(long)
    assert spans(mixed) == [(12, 14), (8, 16)], "the hit first, and a whole chunk besides"


def test_r5_pages_of_an_aborted_request_wait_for_the_plans_that_name_them() -> None:
    desk = make_desk(pp=2, pages=8)
    first, second = desk.submit("a", [*PROMPT, 13], max_tokens=4)
    free = desk.free
    desk.abort("a")
    assert desk.finish("a") is FinishReason.ABORT and desk.free == free
    desk.done(first, 0), desk.done(second, 0), desk.done(first, 1)
    assert desk.free == free, "plan 2 is still in stage 1"
    desk.done(second, 1)
    assert desk.free == free + 1, "its own page; the full ones stay cached"


def test_r6_a_page_is_matched_by_later_plans_once_the_plan_that_fills_it_is_built() -> None:
    desk = make_desk(pp=2)
    (first,) = desk.submit("a", PROMPT[:8])
    (second,) = desk.submit("b", [*PROMPT[:8], 20])
    assert spans(second) == [(8, 9)], "b reads a's pages although plan 1 has not retired"
    assert second.pieces[0].pages[:2] == first.pieces[0].pages


def test_r6_the_chain_goes_on_over_generated_tokens(desk: Desk) -> None:
    desk.run_all(desk.submit("a", [1, 2, 3], max_tokens=6), token=7)
    (plan,) = desk.submit("b", [1, 2, 3, 7, 7, 7, 7, 7, 7])
    assert spans(plan) == [(8, 9)], (
        "positions 3 to 7 were inputs of a, so its first two pages are full"
    )


def test_r7_a_full_hit_runs_one_token_that_reads_all_pages_and_writes_none(desk: Desk) -> None:
    desk.run_all(desk.submit("a", PROMPT, max_tokens=1))
    (plan,) = desk.submit("b", PROMPT, max_tokens=1)
    piece = plan.pieces[0]
    assert spans(plan) == [(11, 12)] and len(piece.pages) == 3
    assert piece.write_from == 12, "its own K/V write is suppressed"
    desk.run_all([plan])
    usage = next(
        output.usage for output in desk.outputs if output.request_id == "b" and output.usage
    )
    assert usage.cached_device == 11, "the last prompt token is always computed"


def test_r8_a_request_whose_next_page_is_being_computed_waits_a_plan_and_holds_nobody_up(
    desk: Desk,
) -> None:
    (first,) = desk.submit("a", [*PROMPT, 30])
    desk.submit("same", [*PROMPT, 31])
    desk.submit("other", [40, 41])
    other, second = desk.run(first)
    assert [spans(other), spans(second)] == [[(0, 2)], [(8, 13)]], (
        "`other` and a's tail run; `same` waits for a's third page"
    )
    desk.run(other)
    (third,) = desk.run(second)
    assert spans(third) == [(2, 3), (13, 14), (12, 13)], "`same` has only its own token to compute"


def test_r8_twins_fill_the_same_page_and_the_second_is_remapped_to_the_firsts(desk: Desk) -> None:
    (first,) = desk.submit("a", [1, 2, 3], max_tokens=8)
    desk.submit("b", [1, 2, 3], max_tokens=8)
    (second,) = desk.run(
        first
    )  # a decodes its 4th position; b prefills, as page 0 is a's and not full yet
    free = desk.free
    (third,) = desk.run(second)
    (fourth,) = desk.run(third)
    remaps = [remap for plan in (third, fourth) for remap in plan.remaps]
    assert [remap.index for remap in remaps] == [0] and remaps[0].page == first.pieces[0].pages[0]
    desk.run_all([fourth])
    assert desk.tokens("a") == desk.tokens("b")
    assert desk.free >= free


def test_r9_and_r12_when_pages_run_short_the_least_recently_used_leaf_goes(desk: Desk) -> None:
    desk = make_desk(pages=6)
    desk.run_all(desk.submit("old", PROMPT[:8], max_tokens=1))
    desk.run_all(desk.submit("new", [50] * 8, max_tokens=1))
    desk.run_all(desk.submit("big", [60] * 11, max_tokens=1))
    (plan,) = desk.submit("old again", [*PROMPT[:8], 9], max_tokens=1)
    assert spans(plan)[0][0] == 4, (
        "only the leaf of `old` was evicted, its root page is still there"
    )


def test_r12_the_youngest_idle_request_is_retracted_and_both_finish_right() -> None:
    desk = make_desk(pages=6, pp=1)
    (plan,) = desk.submit("a", [1, 2, 3, 4, 5, 6, 7], max_tokens=13)
    desk.submit("b", [11, 12, 13, 14, 15, 16, 17], max_tokens=13)
    desk.run_all([plan])
    assert desk.planner.replica.retractions > 0
    assert len(desk.tokens("a")) == len(desk.tokens("b")) == 13
    assert desk.finish("a") is desk.finish("b") is FinishReason.LENGTH


def test_r12_what_can_never_fit_is_refused_with_the_numbers() -> None:
    desk = make_desk(pages=4)
    desk.submit("a", PROMPT, max_tokens=6)
    assert desk.finish("a") is FinishReason.REJECTED_TOO_LONG
    assert "need 5 pages" in desk.outputs[-1].message and "has 4" in desk.outputs[-1].message
    desk.run_all(desk.submit("b", PROMPT, max_tokens=5))
    assert desk.finish("b") is FinishReason.LENGTH, "exactly all pages is not too much"


def test_a_full_queue_is_told_so_at_once(desk: Desk) -> None:
    desk = make_desk(max_running=1, max_waiting=1)
    for name in ("a", "b", "c"):
        desk.submit(name, [1, 2])
    assert desk.finish("c") is FinishReason.REJECTED_FULL and desk.finish("b") is None


def test_priority_goes_first_then_arrival() -> None:
    desk = make_desk(max_running=1)
    (plan,) = desk.submit("a", [1], max_tokens=1)
    desk.submit("b", [2], max_tokens=1)
    desk.step(
        Submit("urgent", pack_tokens([3]), SamplingParams(max_tokens=1, seed=0), (0,), priority=1)
    )
    desk.run_all([plan])
    order = [output.request_id for output in desk.outputs if output.finish]
    assert order == ["a", "urgent", "b"]


def test_salts_never_share_pages(desk: Desk) -> None:
    desk.run_all(desk.submit("a", PROMPT, max_tokens=1, salt=b"x"))
    (plan,) = desk.submit("b", PROMPT, max_tokens=1, salt=b"y")
    assert spans(plan) == [(0, 8)]


def test_decodes_are_spread_over_the_stages() -> None:
    desk = make_desk(pp=2)
    waiting = desk.submit("a", [1], max_tokens=30)
    for name in ("b", "c", "d"):
        waiting += desk.submit(name, [ord(name)], max_tokens=30)
    for _ in range(12):
        waiting += desk.run(waiting.pop(0))
    assert [len(plan.pieces) for plan in waiting] == [2, 2], (
        "four decodes over two stages: two in each plan"
    )


def test_a_stop_token_ends_and_is_named_but_eos_is_not(desk: Desk) -> None:
    desk.run_all(desk.submit("a", [1], stop_token_ids=(9,)))
    desk.run_all(desk.submit("b", [1]), token=0)
    stopped = {
        output.request_id: output.stop_token
        for output in desk.outputs
        if output.finish is FinishReason.STOP
    }
    assert stopped == {"a": 9, "b": None}


def test_tokens_that_arrive_after_an_abort_are_dropped(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2])
    desk.abort("a")
    desk.run_all([plan])
    assert desk.tokens("a") == [] and not desk.planner.replica.requests


def test_an_id_may_be_used_again_while_its_old_plan_is_in_flight(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2])
    desk.abort("a")
    desk.outputs.clear()
    desk.submit("a", [5, 6], max_tokens=1)
    desk.run_all(desk.run(plan, token=8), token=7)
    assert desk.tokens("a") == [7]


# ---------------------------------------------------------------------------------------------- the grid


def test_r1_messages_of_another_epoch_are_dropped(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2])
    desk.step(PlanDone(plan.epoch - 1, 0, plan.number, (Sample(0, 9),)))
    assert desk.tokens("a") == [] and len(desk.planner.replica.in_flight) == 1


def test_r3_a_lost_grid_keeps_requests_and_repeats_no_token(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2, 3], max_tokens=4)
    desk.run(plan, token=7)
    effects = desk.planner.step(desk.now, [GridLost(1, "rank 0 was killed")])
    assert effects.restart == "rank 0 was killed" and desk.planner.state is GridState.RESTARTING
    (again,) = desk.step(GridReady(2, 32, 0.001))
    assert again.epoch == 2 and unpack_tokens(again.pieces[0].tokens).tolist() == [1, 2, 3, 7]
    assert again.openings[0].outputs == 1, "sampling goes on at output index 1"
    desk.run_all([again], token=7)
    assert desk.tokens("a") == [7, 7, 7, 7]


def test_r3_a_silent_rank_means_a_new_grid(desk: Desk) -> None:
    desk.now = 4.0
    desk.step(Heartbeat(1, 0, 0))
    desk.now = 8.9
    desk.step()
    assert desk.planner.state is GridState.READY
    desk.now = 9.1
    assert (desk.planner.step(desk.now).restart or "").startswith(
        "rank 0 has been silent for 5.1 s"
    )


def test_r3_a_plan_far_later_than_predicted_means_a_new_grid() -> None:
    desk = make_desk(silence_s=1e9)
    desk.submit("a", [1, 2])
    desk.now = 10.0
    assert desk.planner.step(desk.now).restart is None
    desk.now = 10.5
    assert "plan 1 waits for ranks [0]" in (desk.planner.step(desk.now).restart or "")


def test_r3_restarts_without_progress_are_bounded_and_then_said(desk: Desk) -> None:
    desk.submit("a", [1, 2])
    for epoch in range(1, 4):
        desk.step(GridLost(epoch, "again"))
        desk.step(GridReady(epoch + 1, 32, 0.001))
    desk.step(GridLost(4, "again"))
    assert desk.planner.state is GridState.FAILED and desk.finish("a") is FinishReason.ERROR
    desk.submit("b", [1])
    assert desk.finish("b") is FinishReason.ERROR and "again" in desk.outputs[-1].message


def test_r3_a_grid_that_is_lost_while_it_stands_idle_may_be_lost_again_and_again(
    desk: Desk,
) -> None:
    for epoch in range(1, 10):
        desk.step(GridLost(epoch, "killed"))
        desk.step(GridReady(epoch + 1, 32, 0.001))
    assert desk.planner.state is GridState.READY


def test_r3_chunks_that_retire_are_no_progress_of_a_grid_that_is_lost_at_the_last_one(
    desk: Desk,
) -> None:
    """The chunk size is 8: the first plan of each epoch retires, and is lost with it."""
    (plan,) = desk.submit("a", [*range(1, 13)])
    losses = 0
    while desk.planner.state is not GridState.FAILED:
        desk.run(plan)
        losses += 1
        desk.step(GridLost(losses, "killed"))
        if desk.planner.state is not GridState.FAILED:
            (plan,) = desk.step(GridReady(losses + 1, 32, 0.001))
    assert losses == 4 and desk.finish("a") is FinishReason.ERROR


def test_r3_others_tokens_are_no_progress_of_a_request_that_the_grid_is_lost_on(desk: Desk) -> None:
    """Killed, not at fault: as by a kernel that is out of memory. After four losses it is given up, the server is not."""
    plans = desk.submit("good", [1, 2], max_tokens=30)
    desk.submit("poison", [*range(1, 13)])
    for epoch in range(1, 5):
        while len(desk.tokens("good")) < epoch:
            plans += desk.run(plans.pop(0))
        assert desk.finish("poison") is None
        desk.step(GridLost(epoch, "killed"))
        plans = desk.step(GridReady(epoch + 1, 32, 0.001))
    assert desk.finish("poison") is FinishReason.ERROR
    assert desk.planner.state is GridState.READY


def test_a_request_that_ranks_fail_at_is_given_up_and_the_others_finish(desk: Desk) -> None:
    """One poisonous request must not take the server with it: suspects run alone, and what fails alone twice is ended."""
    desk.submit("poison", [1, 2], max_tokens=2)
    plans = desk.submit("good", [3, 4], max_tokens=2) or desk.plans[-1:]
    epoch = 1
    for _ in range(8):
        if not plans:
            break
        plan = plans.pop(0)
        names = {
            request.request_id
            for record in desk.planner.replica.in_flight
            for request in record.requests
        }
        if "poison" in names:
            desk.step(GridLost(epoch, "ValueError", faulted=True))
            epoch += 1
            plans = desk.step(GridReady(epoch, 32, 0.001))
        else:
            plans += desk.run(plan)
    assert desk.finish("poison") is FinishReason.ERROR
    assert desk.finish("good") is FinishReason.LENGTH and len(desk.tokens("good")) == 2
    assert desk.planner.state is GridState.READY


def test_a_suspect_is_not_passed_by_those_behind_it_and_is_cleared_once_it_has_run_alone(
    desk: Desk,
) -> None:
    (plan,) = desk.submit("a", [1, 2], max_tokens=3)
    desk.submit("b", [3, 4], max_tokens=20)
    desk.step(GridLost(1, "ValueError", faulted=True))
    (alone,) = desk.step(GridReady(2, 32, 0.001))
    assert len(alone.pieces) == 1 and plan.number == 1
    desk.submit("c", [5, 6], max_tokens=3)
    assert len(desk.planner.replica.running) == 1, "nobody joins a suspect"
    desk.run(alone)
    assert len(desk.planner.replica.running) == 3, "its plan retired: it was not to blame"


def test_a_hopeless_start_fails_at_once_and_a_killed_rank_is_started_again() -> None:
    desk = make_desk()
    for hopeless, state in ((True, GridState.FAILED), (False, GridState.STARTING)):
        planner = type(desk.planner)(desk.planner.config)
        planner.step(0.0, [GridLost(1, "no such file", hopeless)])
        assert planner.state is state


def test_a_smaller_new_grid_refuses_what_no_longer_fits(desk: Desk) -> None:
    desk.submit("a", PROMPT, max_tokens=12)
    desk.step(GridLost(1, "killed"))
    desk.step(GridReady(2, 3, 0.001))
    assert desk.finish("a") is FinishReason.REJECTED_TOO_LONG


@pytest.mark.parametrize("number", [0, 2, 99])
def test_an_acknowledgement_out_of_order_ends_the_epoch(desk: Desk, number: int) -> None:
    desk.submit("a", [1, 2])
    effects = desk.planner.step(desk.now, [PlanDone(1, 0, number, ())])
    assert effects.restart is not None and f"acknowledged plan {number}, not 1" in effects.restart


def test_samples_that_no_piece_asked_for_end_the_epoch(desk: Desk) -> None:
    (plan,) = desk.submit("a", [1, 2])
    effects = desk.planner.step(desk.now, [PlanDone(1, 0, plan.number, (Sample(5, 9),))])
    assert effects.restart is not None and "other slots" in effects.restart


# ---------------------------------------------------------------------------------------------- flush


def test_a_flush_of_an_idle_replica_frees_everything_at_once(desk: Desk) -> None:
    desk.run_all(desk.submit("a", PROMPT, max_tokens=1))
    effects = desk.planner.step(desk.now, [Flush(1, ("device",), 1.0)])
    assert [done.busy for done in effects.flushed] == [()] and effects.flushed[0].freed_pages == 3
    assert desk.free == 32


def test_a_flush_waits_for_what_is_in_flight_and_admits_nothing_meanwhile(desk: Desk) -> None:
    (plan,) = desk.submit("a", PROMPT, max_tokens=1)
    desk.step(Flush(1, ("device",), 1.0))
    desk.submit("b", [1, 2], max_tokens=1)
    assert len(desk.planner.replica.running) == 1
    (tail,) = desk.run(plan)
    effects = desk.planner.step(
        desk.now, [PlanDone(1, 0, tail.number, (Sample(tail.pieces[0].slot, 9),))]
    )
    assert effects.flushed and not effects.flushed[0].busy
    assert effects.plan is not None, "and then b is admitted"


def test_a_flush_of_the_device_waits_for_what_is_still_to_be_stored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With staging that pins pages, also before it is on its way (found by equality sequences on a slow store)."""
    desk.run_all(desk.submit("a", PROMPT, max_tokens=1))
    replica = desk.planner.replica
    assert replica.is_idle
    monkeypatch.setattr(type(replica.stores), "is_busy", property(lambda _: True))
    assert not replica.stores.in_flight and not replica.is_idle


def test_a_flush_at_its_time_says_what_is_busy(desk: Desk) -> None:
    desk.submit("a", PROMPT)
    desk.step(Flush(1, ("device",), 1.0))
    desk.now = 1.0
    effects = desk.planner.step(desk.now)
    assert "1 running requests" in effects.flushed[0].busy[0]


def test_a_flush_that_nobody_waits_for_any_more_holds_up_nobody(desk: Desk) -> None:
    (plan,) = desk.submit("a", PROMPT, max_tokens=1)
    desk.step(Flush(1, ("device",), 600.0))
    desk.submit("b", [1, 2], max_tokens=1)
    assert len(desk.planner.replica.running) == 1
    desk.step(CancelFlush(1))
    assert len(desk.planner.replica.running) == 2 and plan.number == 1


def test_aborting_everywhere_brings_pages_back_to_baseline(desk: Desk) -> None:
    desk = make_desk(max_running=2)
    (plan,) = desk.submit("running", [*PROMPT, 1])
    desk.submit("decoding", [9])
    desk.submit("waiting", [7])
    plans = desk.run(plan)
    desk.step(*(Abort(name) for name in ("running", "decoding", "waiting", "unknown")))
    desk.run_all(plans)
    desk.planner.step(desk.now, [Flush(1, ("device",), 0.0)])
    assert desk.free == 32 and PAGE == 4


def test_a_planner_that_finds_its_books_wrong_goes_on_no_step(desk: Desk) -> None:
    desk.submit("a", [1, 2, 3])
    desk.planner.replica.ledger.wanted += 1
    with pytest.raises(AssertionError, match="I17"):
        desk.step()


def test_all_books_are_checked_every_so_many_steps_if_asked() -> None:
    desk = make_desk(check_every=3)
    desk.submit("a", [1, 2, 3, 4, 5])
    desk.step()
    replica = desk.planner.replica
    assert replica.cache is not None
    (node,) = replica.running[0].nodes
    node.pins[Tier.DEVICE] += 1
    with pytest.raises(AssertionError, match="I2: a node has 2 DEVICE pins"):
        for _ in range(3):
            desk.planner.step(desk.now, [])
