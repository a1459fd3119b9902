"""The circuit breaker as a state machine, against a dumb twin; then around stores that are dead, slow, lying, or come back."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.store.backend import GetItem, Health, PageStore, PutItem, Status, StoreUse
from forebay.store.backends.directory import DirectoryStore
from forebay.store.backends.guarded import GuardedStore
from forebay.store.breaker import (
    CHECK_EVERY_S,
    FAILURES,
    GRACE_S,
    PAUSE_MAX_S,
    PAUSE_S,
    Breaker,
    Outcome,
    State,
)
from tests.store.store_cluster import wait_for

T = 5.0


def call(breaker: Breaker, now: float, outcome: Outcome) -> None:
    number = breaker.begin(now, 1.0)
    assert number is not None
    breaker.end(now, number, outcome, "why")


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    call(breaker, now, Outcome.TIMED_OUT)
    assert breaker.state is State.OPEN
    return breaker


def test_failures_in_a_row_open_it_and_scattered_ones_do_not() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            call(breaker, 0.0, Outcome.FAILED)
        call(breaker, 0.0, Outcome.GOOD)
    assert breaker.state is State.CLOSED
    for _ in range(FAILURES):
        call(breaker, 0.0, Outcome.FAILED)
    assert breaker.state is State.OPEN and breaker.openings == 1 and "why" in breaker.reason


def test_one_time_out_opens_it() -> None:
    assert opened().begin(0.1, 1.0) is None


def test_a_call_that_never_returns_opens_it_for_the_others_and_means_nothing_when_it_does_return() -> (
    None
):
    breaker = Breaker()
    number = breaker.begin(0.0, 1.0)
    assert number is not None and breaker.begin(1.0 + GRACE_S, 1.0) is not None
    assert breaker.begin(1.01 + GRACE_S, 1.0) is None and "not returned" in breaker.reason
    probe = breaker.next_probe()
    assert probe is not None
    breaker.begin_probe(probe)
    breaker.end_probe(probe, True)
    breaker.end(probe, number, Outcome.TIMED_OUT)
    assert breaker.state is State.CLOSED


def test_probes_come_later_and_later_and_close_it() -> None:
    breaker = opened()
    now, pauses = 0.0, []
    for _ in range(10):
        due = breaker.next_probe()
        assert due is not None
        pauses.append(due - now)
        now = due
        breaker.begin_probe(now)
        assert (
            breaker.state is State.PROBING
            and breaker.next_probe() is None
            and breaker.begin(now, 1.0) is None
        )
        breaker.end_probe(now, False, "still down")
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S] and pauses[-1] == PAUSE_MAX_S
    due = breaker.next_probe()
    assert due is not None
    breaker.begin_probe(due)
    breaker.end_probe(due, True)
    assert breaker.state is State.CLOSED
    assert [(t.is_closed, t.down_s) for t in breaker.take_transitions()] == [
        (False, 0.0),
        (True, due),
    ]


def test_a_store_that_passes_probes_and_fails_calls_is_asked_less_and_less() -> None:
    breaker, now, pauses = Breaker(), 0.0, []
    for _ in range(4):
        call(breaker, now, Outcome.TIMED_OUT)
        due = breaker.next_probe()
        assert due is not None
        pauses.append(due - now)
        now = due
        breaker.begin_probe(now)
        breaker.end_probe(now, True)
    assert pauses == [PAUSE_S * 2**n for n in range(4)]
    call(breaker, now, Outcome.GOOD)
    call(breaker, now, Outcome.TIMED_OUT)
    assert breaker.next_probe() == now + PAUSE_S


def test_an_answer_that_nobody_may_have_given_is_checked_but_not_too_often() -> None:
    breaker = Breaker()
    call(breaker, 10.0, Outcome.UNSURE)
    assert breaker.next_probe() == 10.0
    breaker.begin_probe(10.0)
    assert breaker.state is State.CLOSED, "calls go on meanwhile"
    breaker.end_probe(10.1, True)
    call(breaker, 10.2, Outcome.UNSURE)
    assert breaker.next_probe() == 10.0 + CHECK_EVERY_S
    breaker.begin_probe(10.0 + CHECK_EVERY_S)
    breaker.end_probe(13.0, False, "gone")
    assert breaker.state is State.OPEN and breaker.reason == "gone"


class BreakerTwin(RuleBasedStateMachine):
    """What a caller may rely on, whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker()
        self.now = 0.0
        self.calls: dict[int, float] = {}
        self.failed_in_a_row = 0
        self.probing = False
        self.said: list[bool] = []

    @rule(step=st.sampled_from([0.0, 0.1, 0.5, 3.0, 40.0]))
    def wait(self, step: float) -> None:
        self.now += step

    @rule(timeout_s=st.sampled_from([0.1, 1.0]))
    def begin(self, timeout_s: float) -> None:
        was_closed, refused = self.breaker.state is State.CLOSED, self.breaker.refused
        hangs = was_closed and any(self.now > deadline for deadline in self.calls.values())
        number = self.breaker.begin(self.now, timeout_s)
        assert (number is not None) == (was_closed and not hangs)
        assert self.breaker.refused == refused + (number is None)
        if number is None:
            self.calls = {
                number: deadline for number, deadline in self.calls.items() if self.now <= deadline
            }
            self.failed_in_a_row = 0
        else:
            assert number not in self.calls
            self.calls[number] = self.now + timeout_s + GRACE_S

    @precondition(lambda self: self.calls)
    @rule(outcome=st.sampled_from(list(Outcome)), data=st.data())
    def end(self, outcome: Outcome, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.calls)))
        del self.calls[number]
        was = self.breaker.state
        self.breaker.end(self.now, number, outcome, "why")
        if was is not State.CLOSED:
            assert self.breaker.state is was, "late answers change nothing"
            return
        if outcome is Outcome.FAILED:
            self.failed_in_a_row += 1
        elif outcome is Outcome.GOOD:
            self.failed_in_a_row = 0
        opens = outcome is Outcome.TIMED_OUT or self.failed_in_a_row >= FAILURES
        assert (self.breaker.state is State.OPEN) == opens
        if opens:
            self.failed_in_a_row = 0

    @precondition(lambda self: not self.probing)
    @rule()
    def begin_probe(self) -> None:
        due = self.breaker.next_probe()
        if due is not None:
            self.now = max(self.now, due)
            self.breaker.begin_probe(self.now)
            self.probing = True

    @precondition(lambda self: self.probing)
    @rule(ok=st.booleans())
    def end_probe(self, ok: bool) -> None:
        self.probing = False
        self.breaker.end_probe(self.now, ok, "probe failed")
        assert (self.breaker.state is State.CLOSED) == ok
        self.failed_in_a_row = 0 if not ok else self.failed_in_a_row

    @invariant()
    def it_is_always_on_its_way_back(self) -> None:
        if self.breaker.state is State.OPEN:
            due = self.breaker.next_probe()
            assert due is not None and due <= self.now + PAUSE_MAX_S
        if self.breaker.state is State.PROBING:
            assert self.probing

    @invariant()
    def it_says_each_change_once(self) -> None:
        self.said += [transition.is_closed for transition in self.breaker.take_transitions()]
        assert all(closed == bool(index % 2) for index, closed in enumerate(self.said))
        assert (len(self.said) % 2 == 0) == (self.breaker.state is State.CLOSED)
        assert self.breaker.openings == (len(self.said) + 1) // 2


TestBreakerTwin = BreakerTwin.TestCase
TestBreakerTwin.settings = settings(max_examples=100, stateful_step_count=40)


# ---------------------------------------------------------------------------------------------- around stores


class BadStore:
    """A `PageStore` over a directory that has bad days: `day` is done before each call, and its answer taken if there is one."""

    def __init__(self, path: Path) -> None:
        self.good: PageStore = DirectoryStore(path, 1 << 30)
        self.day: Callable[[int], list[Status] | None] | None = None
        self.is_well = True
        self.calls = 0

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        self.calls += 1
        return (
            self.good.match_prefix(keys, parts, hint=hint, timeout_s=timeout_s, group=group)
            if self.is_well
            else 0
        )

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        return self._on_a_bad_day(len(items)) or self.good.get_into(items, timeout_s)

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        return self._on_a_bad_day(len(items)) or self.good.put_from(items, timeout_s)

    def health(self) -> Health:
        return Health(self.is_well, "ill")

    def use(self) -> StoreUse:
        return self.good.use()

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        return self.good.clear(parts, timeout_s)

    def close(self) -> None:
        self.good.close()

    def _on_a_bad_day(self, count: int) -> list[Status] | None:
        self.calls += 1
        return None if self.day is None else self.day(count)


@pytest.fixture
def bad(tmp_path: Path) -> BadStore:
    return BadStore(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(bad: BadStore, said: list[str]) -> Iterator[GuardedStore]:
    guarded = GuardedStore(bad, said.append)
    assert guarded.put_from([PutItem(b"k", b"value")], T) == [Status.OK]
    yield guarded
    guarded.close()


def get(store: GuardedStore) -> Status:
    buffer = bytearray(5)
    status = store.get_into([GetItem(b"k", 0, 5, buffer)], T)[0]
    assert status is not Status.OK or buffer == b"value"
    return status


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.CHECKSUM])
def test_a_dead_or_lying_store_is_not_asked_and_comes_back_by_itself(
    store: GuardedStore, bad: BadStore, said: list[str], status: Status
) -> None:
    bad.day = lambda count: [status] * count
    assert [get(store) for _ in range(FAILURES)] == [status] * FAILURES
    calls = bad.calls
    assert store.is_open and get(store) is Status.UNAVAILABLE
    assert store.match_prefix([b"k"], [b""], hint=False, timeout_s=T) == 0
    assert bad.calls == calls, "nobody waits for it"
    wait_for(lambda: bad.calls > calls, what="a probe")
    assert store.is_open, "a probe that fails changes nothing"
    bad.day = None
    wait_for(lambda: not store.is_open, what="a probe that goes well")
    assert get(store) is Status.OK
    assert len(said) == 2 and status.name in said[0] and "again" in said[1]


def test_an_answer_of_the_wrong_length_or_an_exception_is_a_failure_and_not_the_callers(
    store: GuardedStore, bad: BadStore
) -> None:
    def raise_it(count: int) -> list[Status]:
        raise RuntimeError("a bug of the backend")

    bad.day = lambda count: [Status.OK] * (count + 1)
    assert get(store) is Status.UNAVAILABLE
    bad.day = raise_it
    assert [get(store) for _ in range(FAILURES - 1)] == [Status.UNAVAILABLE] * (FAILURES - 1)
    assert store.is_open


def test_a_call_that_hangs_is_given_up_by_the_others(bad: BadStore, said: list[str]) -> None:
    store = GuardedStore(bad, said.append)
    entered, release = threading.Event(), threading.Event()

    def hang(count: int) -> None:
        entered.set()
        release.wait(30)

    bad.day = hang
    thread = threading.Thread(
        target=lambda: store.get_into([GetItem(b"k", 0, 5, bytearray(5))], 0.1)
    )
    thread.start()
    assert entered.wait(10)
    wait_for(lambda: store.is_open, what="the call to be overdue")
    assert get(store) is Status.UNAVAILABLE, "at once, while the other one still hangs"
    release.set()
    thread.join()
    store.close()


def test_misses_of_a_store_that_is_gone_are_told_from_misses_of_one_that_is_there(
    store: GuardedStore, bad: BadStore
) -> None:
    assert store.match_prefix([b"none"], [b""], hint=False, timeout_s=T) == 0
    bad.is_well = False

    def ask_and_look() -> bool:
        store.match_prefix([b"none"], [b""], hint=False, timeout_s=T)
        return store.is_open

    wait_for(ask_and_look, what="a check")
    assert store.figures.detail == "ill" and not store.health().ok


def test_a_store_that_was_down_at_the_start_is_opened_when_it_is_there(
    tmp_path: Path, said: list[str]
) -> None:
    there = threading.Event()

    def revive(store: PageStore | None) -> PageStore:
        if not there.is_set():
            raise ConnectionRefusedError("nobody there yet")
        return store or DirectoryStore(tmp_path, 1 << 30)

    store = GuardedStore(None, said.append, revive, "refused")
    assert store.put_from([PutItem(b"k", b"value")], T) == [Status.UNAVAILABLE]
    wait_for(lambda: store.figures.detail == "nobody there yet", what="a first probe")
    there.set()
    wait_for(lambda: not store.is_open, what="a second one")
    assert store.put_from([PutItem(b"k", b"value")], T) == [Status.OK]
    store.close()


def test_closing_does_not_wait_for_a_probe_that_hangs(tmp_path: Path, said: list[str]) -> None:
    probing, release = threading.Event(), threading.Event()

    def revive(store: PageStore | None) -> PageStore:
        probing.set()
        release.wait(30)
        return DirectoryStore(tmp_path, 1 << 30)

    store = GuardedStore(None, said.append, revive, "refused")
    assert probing.wait(10)
    store.close()
    assert not release.is_set()
    release.set()
