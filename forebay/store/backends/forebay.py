"""This store as the engine's L3."""

import time
from collections.abc import Sequence

from forebay.store.backend import Capabilities, GetItem, Health, PutItem, Status, StoreUse
from forebay.store.client.store import StoreClient

HEALTH_S = 1.0


class ForebayStore:
    """A `PageStore` over a client, which it closes."""

    capabilities = Capabilities()

    def __init__(self, client: StoreClient) -> None:
        self.client = client

    def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes],
        *,
        hint: bool,
        timeout_s: float,
        group: bytes = b"",
    ) -> int:
        return self.client.match_prefix(
            keys, parts, prefetch=hint, timeout_s=timeout_s, group=group
        )

    def get_into(self, items: Sequence[GetItem], timeout_s: float) -> list[Status]:
        bufs, bad = [], set()
        for index, item in enumerate(items):
            try:
                view = memoryview(item.buffer).cast("B")[: item.length]
            except (TypeError, ValueError):
                view = memoryview(b"")
            if len(view) != item.length:
                bad.add(index)
            bufs.append(view)
        keys, offsets, groups = (
            [i.key for i in items],
            [i.offset for i in items],
            [i.group for i in items],
        )
        statuses = self.client.get_into(keys, bufs, offsets, timeout_s=timeout_s, groups=groups)
        return [Status.INVALID if index in bad else status for index, status in enumerate(statuses)]

    def put_from(self, items: Sequence[PutItem], timeout_s: float) -> list[Status]:
        keys, bufs, groups = (
            [i.key for i in items],
            [i.buffer for i in items],
            [i.group for i in items],
        )
        return self.client.put_from(keys, bufs, timeout_s=timeout_s, groups=groups)

    def health(self) -> Health:
        try:
            stats = self.client.stats(timeout_s=HEALTH_S)
        except ConnectionError as error:
            return Health(False, str(error))
        if not stats.holders_usable:
            return Health(
                False, f"the master answers, but none of its {stats.holders} holders serves"
            )
        return Health(
            True,
            f"{stats.objects} objects, {stats.holders_usable} of {stats.holders} holders serve",
        )

    def use(self) -> StoreUse:
        try:
            stats = self.client.stats(timeout_s=HEALTH_S)
        except ConnectionError:
            return StoreUse()
        names = ("objects", "memory_bytes", "memory_used", "ssd_bytes", "ssd_used")
        counted = self.client.prefetched
        throttle = {
            "delegated": counted.sent,
            "already_resident": counted.resident,
            "failed": counted.missing + counted.declined + counted.failed,
        }
        return StoreUse({name: getattr(stats, name) for name in names}, stats.counters, throttle)

    def clear(self, parts: Sequence[bytes], timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        removed = 0
        for (
            master
        ) in self.client.masters:  # each is asked for what it has: a key does not tell its group
            left_s = max(deadline - time.monotonic(), 0.0)
            found = [key for key, _ in master.list(timeout_s=left_s) if key.endswith(tuple(parts))]
            left_s = max(deadline - time.monotonic(), 0.0)
            removed += sum(status is Status.OK for status in master.remove(found, timeout_s=left_s))
        return removed

    def close(self) -> None:
        self.client.close()
