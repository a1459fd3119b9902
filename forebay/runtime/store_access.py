"""How planner and ranks of one grid reach the same store, each behind circuit breakers of its own: one for each master.

A private (``embedded``) store is one process that the planner starts and ends; ranks are told its address and secret. Every other URL
is opened by each process for itself. A store that does not answer when the server starts ends it; from then on it may come and go.
"""

import math
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue

import msgspec

from forebay.core.messages import StoreHealth
from forebay.core.transfers.lookup import QUERY_S, Hint, Query, QueryDone
from forebay.models.config import ModelConfig
from forebay.models.shard import split_layers
from forebay.observe.figures import Meter, StoreState
from forebay.pages.layouts import Layout, Manifest, match_prefix
from forebay.runtime.metered_store import MeteredStore
from forebay.store.address import AddressError, StoreUrl, shown
from forebay.store.backend import PageStore
from forebay.store.backends.embedded import EmbeddedStore
from forebay.store.backends.grouped import GroupedStore
from forebay.store.backends.guarded import GuardedStore, WatchedStore
from forebay.store.backends.open import StoreURLError, open_store, url_for_ranks
from forebay.store.breaker import State
from forebay.store.client.lent import Lent

QUERY_THREADS = 2
LOOK_S = 2.0
ADD_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class StoreCleared:
    """``pages`` of this model were removed for flush ``call``; ``in_time`` False: maybe not all."""

    call: int
    pages: int
    in_time: bool


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """What a rank needs to open the store: ``secret`` is None where there is none; ``lent``: its host pages."""

    url: str
    secret: str | None
    lent: Lent | None = None


class StoreDesk:
    """The planner's end: asks the store for it, off its loop. ``wake``: called on a query thread when an answer is there."""

    def __init__(self, url: str, own: Layout, meter: Meter) -> None:
        """``own``: this grid's layout. Call `name_model` before anything is asked.

        Raises ``StoreURLError`` if there is no such store or it does not answer.
        """
        self._store, self.address = _opened_first(url, meter)
        self._capabilities = self._store.capabilities
        self._own = own
        self._of_model: Manifest | None = None
        self._threads = ThreadPoolExecutor(QUERY_THREADS, "query")
        self._keeper = ThreadPoolExecutor(1, "store-keeper")
        self._look_due = 0.0
        self.answers: SimpleQueue[QueryDone] = SimpleQueue()
        self.cleared: SimpleQueue[StoreCleared] = SimpleQueue()
        self.state = StoreState(shown(url), lost=self._capabilities.lost())

    def name_model(self, namespace: bytes) -> None:
        """``namespace`` as in `Manifest`: whose pages are asked for from now on."""
        self._of_model = Manifest(self._store, namespace, self._own)
        self._threads.submit(self._manifest.add_own, ADD_TIMEOUT_S)

    def ask(self, query: Query, wake: Callable[[], None]) -> None:
        """Answer a query later; never blocks. A store that is not asked now is a miss at once: the threads may hang in calls to it."""
        if self._store.is_open:
            self.answers.put(QueryDone(query.number, 0))
            wake()
        else:
            self._threads.submit(self._answer, query, time.monotonic(), wake)

    def hint(self, hint: Hint) -> None:
        """What the store has of these pages will be read soon. Never blocks; a store that cannot bring it nearer is not told."""
        if self._capabilities.hints and not self._store.is_open:
            self._threads.submit(self._hint, hint)

    @property
    def health(self) -> StoreHealth:
        return self._store.figures

    def look(self, now: float) -> None:
        """Bring ``state`` up to date, at most every `LOOK_S`; never blocks."""
        if now >= self._look_due:
            self._look_due = math.inf
            self._keeper.submit(self._look)

    def clear(self, call: int, timeout_s: float, wake: Callable[[], None]) -> None:
        """Remove all pages of this model that any grid has written; `cleared` says when that is done. Never blocks."""
        self._keeper.submit(self._clear, call, time.monotonic() + timeout_s, wake)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._keeper.shutdown(cancel_futures=True)
        self._store.close()

    @property
    def _manifest(self) -> Manifest:
        assert self._of_model is not None, "the store is asked before the model has a name"
        return self._of_model

    def _answer(self, query: Query, asked_at: float, wake: Callable[[], None]) -> None:
        """One that has waited its time out in the queue is late already, and a slow store need not be asked."""
        pages = 0
        try:
            if time.monotonic() - asked_at < QUERY_S:
                pages = match_prefix(
                    self._store, query.hashes, query.group, self._own, self._manifest, QUERY_S
                )
        except Exception:  # a store should answer with a number; whatever it does instead is a miss
            traceback.print_exc()
        finally:
            self.answers.put(QueryDone(query.number, pages))
            wake()
            self._manifest.add_own(ADD_TIMEOUT_S)  # looks only now and then

    def _hint(self, hint: Hint) -> None:
        try:
            match_prefix(
                self._store, hint.hashes, hint.group, self._own, self._manifest, QUERY_S, hint=True
            )
        except Exception:  # whatever a store does, it was only a hint
            traceback.print_exc()

    def _look(self) -> None:
        try:
            use = self._store.use()
            self.state = msgspec.structs.replace(
                self.state,
                use=dict(use.sizes),
                counters=dict(use.counters),
                throttle=dict(use.throttle),
            )
        except Exception:  # whatever a store does on a bad day, serving goes on
            traceback.print_exc()
        finally:
            self._look_due = time.monotonic() + LOOK_S

    def _clear(self, call: int, deadline: float, wake: Callable[[], None]) -> None:
        objects = 0
        try:
            layouts = (self._own, *self._manifest.others(max(deadline - time.monotonic(), 0.0)))
            names = [name for layout in layouts for name in self._manifest.names(layout)]
            objects = self._store.clear(names, max(deadline - time.monotonic(), 0.0))
        except Exception:
            traceback.print_exc()
            deadline = 0.0
        finally:
            self._look_due = 0.0
            self.cleared.put(
                StoreCleared(call, objects // len(self._own.parts), time.monotonic() < deadline)
            )
            wake()


def layout_of(config: ModelConfig, pp: int, tp: int) -> Layout:
    """How the ranks of a `pp x tp` grid cut the model's pages."""
    layers, share = split_layers(config.layers, pp), config.kv_heads // tp
    return Layout((0, *(part.stop for part in layers)), tuple(range(0, config.kv_heads + 1, share)))


def open_for_rank(address: StoreAddress, rank: int, meter: Meter) -> WatchedStore:
    """Never fails: it answered the planner a moment ago, and a rank that starts again must not need it."""
    return _guarded(address, f"rank {rank}", meter)


class StoreView:
    """What planner and ranks say of the store, folded into one: the worst state, and figures that only rise."""

    def __init__(self) -> None:
        self._ranks: dict[int, StoreHealth] = {}
        self._openings = 0  # of ranks that are gone
        self._refused = 0

    def heard(self, rank: int, health: StoreHealth) -> None:
        self._ranks[rank] = health

    def forget_ranks(self) -> None:
        self._openings += sum(health.openings for health in self._ranks.values())
        self._refused += sum(health.refused for health in self._ranks.values())
        self._ranks.clear()

    def fold(self, planner: StoreHealth) -> StoreHealth:
        known = [planner, *self._ranks.values()]
        worst = next(
            (health for health in known if health.state not in ("none", State.CLOSED)), planner
        )
        openings = self._openings + sum(health.openings for health in known)
        return StoreHealth(
            worst.state,
            worst.detail,
            openings,
            self._refused + sum(health.refused for health in known),
        )


def _opened_first(url: str, meter: Meter) -> tuple[WatchedStore, StoreAddress]:
    """The planner's, and what to tell ranks. Raises ``StoreURLError`` if the store does not answer: of several masters, none."""
    if len(_masters(url)) > 1:
        grouped = _guarded(StoreAddress(url, None), "forebay planner", meter)
        if grouped.is_open:
            grouped.close()
            raise StoreURLError(
                f"store {url!r} does not answer: {grouped.figures.detail}; --store none does without"
            )
        return grouped, StoreAddress(url, None)
    store = open_store(url)
    assert store is not None
    metered = MeteredStore(store, meter)

    def revived(_: PageStore | None) -> PageStore:
        """A private store whose process has ended is started again where it was."""
        if isinstance(store, EmbeddedStore):
            store.start_again_if_dead()
        return metered

    address = (
        StoreAddress(store.url, store.secret)
        if isinstance(store, EmbeddedStore)
        else StoreAddress(url_for_ranks(url), None)
    )
    return GuardedStore(metered, _say("forebay planner"), revived), address


def _guarded(address: StoreAddress, who: str, meter: Meter) -> WatchedStore:
    """A store that may be away, now and later, behind one breaker; one of several masters behind one for each."""
    masters = _masters(address.url)
    if len(masters) > 1:
        with ThreadPoolExecutor(len(masters)) as threads:
            opened = threads.map(
                lambda name: _guarded_one(
                    replace(address, url=masters[name]), f"{who}, {name}", meter, patient=False
                ),
                masters,
            )
            return GroupedStore(dict(zip(masters, opened, strict=True)))
    return _guarded_one(address, who, meter, patient=True)


def _guarded_one(address: StoreAddress, who: str, meter: Meter, *, patient: bool) -> GuardedStore:
    def opened() -> PageStore:
        store = open_store(address.url, secret=address.secret, patient=patient, lent=address.lent)
        assert store is not None
        return MeteredStore(store, meter)

    try:
        return GuardedStore(opened(), _say(who))
    except StoreURLError as error:
        return GuardedStore(None, _say(who), lambda store: store or opened(), str(error))


def _masters(url: str) -> dict[str, str]:
    """A URL for every master of a store by their addresses; {} for what has none. Raises ``StoreURLError`` for a bad URL."""
    if not url.startswith(("forebay://", "forebay+tls://")):
        return {}
    try:
        return StoreUrl.parse(url).each()
    except AddressError as error:
        raise StoreURLError(f"store {shown(url)!r}: {error}; --store none does without") from error


def _say(who: str) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(f"{who}: {line}", file=sys.stderr, flush=True)

    return say
