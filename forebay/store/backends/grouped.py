"""A store of several masters (rule ST5) with a circuit breaker for each: one that is dead or slow costs its own groups and no others.

items --by group (rendezvous hashing)--> guarded store of one master, several of them at once --> one answer in the items' order
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forebay.core.messages import StoreHealth
from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.backends.guarded import WatchedStore
from forebay.store.breaker import State
from forebay.store.rendezvous import place_of

CALLS_AT_ONCE = 8  # for each master
Item = TypeVar("Item", GetItem, PutItem)


class GroupedStore:
    """A `WatchedStore` of others, by their masters' addresses, which it closes."""

    def __init__(self, stores: Mapping[str, WatchedStore]) -> None:
        self._stores = dict(stores)
        self._names = [name.encode() for name in stores]
        self._all = list(stores.values())
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE * len(stores), "store-groups")

    @property
    def capabilities(self) -> Capabilities:
        return self._all[0].capabilities

    @property
    def is_open(self) -> bool:
        """None of them is asked now."""
        return all(store.is_open for store in self._all)

    @property
    def figures(self) -> StoreHealth:
        """The state of the first that is not well, and which ones are not."""
        each = {name: store.figures for name, store in self._stores.items()}
        ill = {name: health for name, health in each.items() if health.state != State.CLOSED}
        detail = f"{len(ill)} of {len(each)} masters: " + "; ".join(
            f"{name}: {health.detail}" for name, health in ill.items()
        )
        return StoreHealth(
            next((health.state for health in ill.values()), State.CLOSED),
            detail if ill else "",
            sum(health.openings for health in each.values()),
            sum(health.refused for health in each.values()),
        )

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        return self._all[place_of(self._names, group)].match_prefix(
            keys, parts, hint=hint, timeout_s=timeout_s, group=group
        )

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        return self._divided(items, lambda store, some: store.get_into(some, timeout_s))

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        return self._divided(items, lambda store, some: store.put_from(some, timeout_s))

    def health(self) -> Health:
        """``ok``: one of them at least."""
        each = {name: store.health() for name, store in self._stores.items()}
        return Health(
            any(health.ok for health in each.values()),
            "; ".join(f"{name}: {h.detail}" for name, h in each.items()),
        )

    def use(self) -> StoreUse:
        each = [store.use() for store in self._all]
        return StoreUse(
            _summed([use.sizes for use in each]),
            _summed([use.counters for use in each]),
            _summed([use.throttle for use in each]),
        )

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        return sum(self._threads.map(lambda store: store.clear(parts, timeout_s), self._all))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for store in self._all:
            store.close()

    def _divided(
        self, items: Sequence[Item], call: Callable[[WatchedStore, list[Item]], list[Status]]
    ) -> list[Status]:
        """Each item's status from its group's store."""
        places: dict[bytes, int] = {}
        work: dict[int, list[int]] = {}
        for index, item in enumerate(items):
            place = places.setdefault(item.group, -1)
            if place < 0:
                place = places[item.group] = place_of(self._names, item.group)
            work.setdefault(place, []).append(index)
        if len(work) == 1:
            return call(self._all[next(iter(work))], list(items))
        statuses = [Status.UNAVAILABLE] * len(items)
        calls = {
            place: self._threads.submit(call, self._all[place], [items[index] for index in indices])
            for place, indices in work.items()
        }
        for place, indices in work.items():
            for index, status in zip(indices, calls[place].result(), strict=True):
                statuses[index] = status
        return statuses


def _summed(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for some in each for name in some)
    return {name: sum(some.get(name, 0) for some in each) for name in names}
