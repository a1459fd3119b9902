"""A store behind a circuit breaker: a dead, slow or lying one costs whoever asks nothing but the pages.

caller --call--> [breaker closed?] --yes--> backend --statuses--> breaker
                      '--no--> UNAVAILABLE (or 0 pages) at once
probe thread --due--> revive, health, put and get a few bytes of our own --> breaker
"""

import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from forebay.core.messages import StoreHealth
from forebay.store.backend import (
    Capabilities,
    GetItem,
    Health,
    PageStore,
    PutItem,
    Status,
    StoreUse,
)
from forebay.store.breaker import Breaker, Outcome, State, Transition

PROBE_TIMEOUT_S = 1.0
LATE_S = 0.1
PATIENT_S = 1.0
CLOSE_S = 1.0
_FULL = (Status.NO_SPACE, Status.QUOTA_EXCEEDED)
_THERE = (Status.OK, Status.EXISTS)
_BROKEN = (Status.UNAVAILABLE, Status.CHECKSUM)
T = TypeVar("T")


class WatchedStore(PageStore, Protocol):
    """A store that is not asked while it is not well."""

    @property
    def is_open(self) -> bool:
        """The store is not asked now: calls are refused at once."""
        ...

    @property
    def figures(self) -> StoreHealth:
        """For whoever reports on it. Also notices calls that do not return."""
        ...


class GuardedStore:
    """A `WatchedStore`. Owns what it guards.

    ``store`` None: it could not be opened yet. ``revive``: called by probes with what there is, gives a store that may answer, raises
    ``OSError`` or ``ValueError`` if there is none. ``say``: gets one line when the store is given up or asked again; from any thread.
    """

    def __init__(
        self,
        store: PageStore | None,
        say: Callable[[str], None],
        revive: Callable[[PageStore | None], PageStore] | None = None,
        why_not: str = "",
    ) -> None:
        self._store = store
        self._say = say
        self._revive = revive
        self._breaker = Breaker()
        self._changed = threading.Condition()
        self._closed = False
        self._probe_key = b"forebay-probe" + secrets.token_bytes(16)
        self._thread: threading.Thread | None = None
        if store is None:
            with self._changed:
                self._breaker.open(time.monotonic(), why_not)
            self._after()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities() if self._store is None else self._store.capabilities

    @property
    def is_open(self) -> bool:
        return self.figures.state != State.CLOSED

    @property
    def figures(self) -> StoreHealth:
        with self._changed:
            breaker = self._breaker
            breaker.look(time.monotonic())
            detail = "" if breaker.state is State.CLOSED else breaker.reason
            figures = StoreHealth(breaker.state, detail, breaker.openings, breaker.refused)
        self._after()
        return figures

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        def judge(matched: int, took_s: float) -> tuple[Outcome, str]:
            if took_s >= max(timeout_s, LATE_S):
                return Outcome.FAILED, f"no answer to a query within {timeout_s:.1f} s"
            return (Outcome.GOOD if matched else Outcome.UNSURE), ""

        def match(store: PageStore) -> int:
            return store.match_prefix(keys, parts, hint=hint, timeout_s=timeout_s, group=group)

        return self._call(match, judge, timeout_s, 0)

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        nothing = [Status.UNAVAILABLE] * len(items)

        def judge(statuses: list[Status], took_s: float) -> tuple[Outcome, str]:
            if Status.TIMEOUT not in statuses:
                return _judge_put(statuses, took_s)
            # A request waits for it, so one is too many; unless it was given hardly any time.
            outcome = Outcome.TIMED_OUT if timeout_s >= PATIENT_S else Outcome.FAILED
            return outcome, f"no answer to a get within {took_s:.1f} s"

        return self._call(
            lambda store: _whole(store.get_into(items, timeout_s), nothing),
            judge,
            timeout_s,
            nothing,
        )

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        nothing = [Status.UNAVAILABLE] * len(items)
        return self._call(
            lambda store: _whole(store.put_from(items, timeout_s), nothing),
            _judge_put,
            timeout_s,
            nothing,
        )

    def health(self) -> Health:
        figures = self.figures
        if figures.detail or self._store is None:
            return Health(False, figures.detail)
        return self._store.health()

    def use(self) -> StoreUse:
        return StoreUse() if self._store is None or self.is_open else self._store.use()

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        """Nothing is removed from a store that is not asked now."""
        return 0 if self._store is None or self.is_open else self._store.clear(parts, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # a probe that hangs is a daemon thread's
        if self._store is not None:
            self._store.close()

    # ------------------------------------------------------------------------------------------ calls

    def _call(
        self,
        call: Callable[[PageStore], T],
        judge: Callable[[T, float], tuple[Outcome, str]],
        timeout_s: float,
        refusal: T,
    ) -> T:
        began = time.monotonic()
        with self._changed:
            number = self._breaker.begin(began, timeout_s)
        if number is None or self._store is None:
            self._after()
            return refusal
        answer, outcome, why = refusal, Outcome.FAILED, ""
        try:
            answer = call(self._store)
            outcome, why = judge(answer, time.monotonic() - began)
        except Exception as error:  # it should answer with statuses
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}"
        with self._changed:
            self._breaker.end(time.monotonic(), number, outcome, why)
        self._after()
        return answer

    def _after(self) -> None:
        """Tell of what has changed, and have a thread see to probes while some are due."""
        with self._changed:
            transitions = self._breaker.take_transitions()
            if self._breaker.next_probe() is not None and not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run_probes, name="store-probe", daemon=True
                    )
                    self._thread.start()
                self._changed.notify_all()
        for transition in transitions:
            self._say(_line(transition))

    # ------------------------------------------------------------------------------------------ probes

    def _run_probes(self) -> None:
        while self._wait_due():
            with self._changed:
                self._breaker.begin_probe(time.monotonic())
                is_check = self._breaker.state is State.CLOSED
            why = self._probe(is_check)
            with self._changed:
                self._breaker.end_probe(time.monotonic(), not why, why)
            self._after()

    def _wait_due(self) -> bool:
        """Until a probe is due; False once this is closed."""
        with self._changed:
            while not self._closed:
                due, now = self._breaker.next_probe(), time.monotonic()
                if due is not None and due <= now:
                    return True
                self._changed.wait(None if due is None else due - now)
        return False

    def _probe(self, is_check: bool) -> str:
        """Why the store is not well; nothing if it is. A mere check moves no bytes, and revives nothing."""
        try:
            if self._revive is not None and not is_check:
                self._store = self._revive(self._store)
            assert self._store is not None
            health = self._store.health()
            if not health.ok:
                return health.detail
            return "" if is_check else self._round_trip(self._store)
        except Exception as error:  # of a backend on a bad day; the next probe tries again
            return str(error) or type(error).__name__

    def _round_trip(self, store: PageStore) -> str:
        """A few bytes there and back: a store may answer and yet have no data path, or other people's data."""
        value = bytearray(self._probe_key)
        status = store.put_from([PutItem(self._probe_key, bytes(value))], PROBE_TIMEOUT_S)[0]
        if status in _FULL:
            return ""
        if status in _THERE:
            value[:] = bytes(len(value))
            status = store.get_into(
                [GetItem(self._probe_key, 0, len(value), value)], PROBE_TIMEOUT_S
            )[0]
            if status is Status.OK:
                return (
                    ""
                    if bytes(value) == self._probe_key
                    else "it returned other bytes than were put"
                )
        return f"a probe of {len(value)} bytes ended with {status.name}"


def _whole(statuses: list[Status], otherwise: list[Status]) -> list[Status]:
    """An answer of another length is no answer."""
    return statuses if len(statuses) == len(otherwise) else otherwise


def _judge_put(statuses: list[Status], took_s: float) -> tuple[Outcome, str]:
    if statuses and all(status in _BROKEN for status in statuses):
        return Outcome.FAILED, statuses[-1].name
    if Status.TIMEOUT in statuses:
        return Outcome.FAILED, f"no answer to a put within {took_s:.1f} s"
    return Outcome.GOOD, ""


def _line(transition: Transition) -> str:
    if transition.is_closed:
        return f"the store is asked again after {transition.down_s:.1f} s"
    return f"the store is not asked any more until it is well again ({transition.reason}); requests go on without it"
