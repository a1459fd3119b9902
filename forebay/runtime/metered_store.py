"""A store whose calls are counted by what came of each key."""

from collections import Counter
from collections.abc import Sequence

from forebay.observe.figures import Meter
from forebay.store.backend import (
    Capabilities,
    GetItem,
    Health,
    PageStore,
    PutItem,
    Status,
    StoreUse,
)


class MeteredStore:
    """A `PageStore` over another one, which it closes."""

    def __init__(self, store: PageStore, meter: Meter) -> None:
        self._store = store
        self._meter = meter

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        matched = self._store.match_prefix(keys, parts, hint=hint, timeout_s=timeout_s, group=group)
        self._meter.store_op("match", "ok" if matched else "none")
        return matched

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        return self._counted("get", self._store.get_into(items, timeout_s))

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        return self._counted("put", self._store.put_from(items, timeout_s))

    def health(self) -> Health:
        return self._store.health()

    def use(self) -> StoreUse:
        return self._store.use()

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        return self._store.clear(parts, timeout_s)

    def close(self) -> None:
        self._store.close()

    def _counted(self, op: str, statuses: list[Status]) -> list[Status]:
        for status, count in Counter(statuses).items():
            self._meter.store_op(op, status.name.lower(), count)
        return statuses
