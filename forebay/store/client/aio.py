"""The client's methods as coroutines: the blocking client on threads of its own, since its calls are bounded and its copies run
without the GIL."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from typing_extensions import Buffer

from forebay.store.backend import Status
from forebay.store.client.prefetcher import PrefetchOptions
from forebay.store.client.store import StoreClient
from forebay.store.wire import auth
from forebay.store.wire.messages import StoreStats

THREADS = 8
T = TypeVar("T")


class AsyncStoreClient:
    """At most ``THREADS`` calls run at once; more wait. A cancelled call still runs to its end: keep its buffers until then."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, "store-client")

    @classmethod
    async def connect(
        cls,
        url: str,
        tenant: str = auth.DEFAULT_TENANT,
        secret: str | bytes | Path | None = None,
        *,
        timeout_s: float = 5.0,
        allow_local: bool = True,
        prefetch: PrefetchOptions | None = None,
    ) -> Self:
        """As `StoreClient.connect`."""

        def connect() -> StoreClient:
            return StoreClient.connect(
                url, tenant, secret, timeout_s=timeout_s, allow_local=allow_local, prefetch=prefetch
            )

        return cls(await asyncio.get_running_loop().run_in_executor(None, connect))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._run(self._client.close)
        self._threads.shutdown(wait=False)

    async def put(self, key: bytes, buf: Buffer, group: bytes | None = None) -> Status:
        return await self._run(lambda: self._client.put(key, buf, group))

    async def put_from(
        self, keys: Sequence[bytes], bufs: Sequence[Buffer], groups: Sequence[bytes] | None = None
    ) -> list[Status]:
        return await self._run(lambda: self._client.put_from(keys, bufs, groups=groups))

    async def get(self, key: bytes, group: bytes | None = None) -> bytes | None:
        return await self._run(lambda: self._client.get(key, group=group))

    async def get_into(
        self,
        keys: Sequence[bytes],
        bufs: Sequence[Buffer],
        offsets: Sequence[int] | None = None,
        groups: Sequence[bytes] | None = None,
    ) -> list[Status]:
        return await self._run(lambda: self._client.get_into(keys, bufs, offsets, groups=groups))

    async def exists(
        self, keys: Sequence[bytes], prefetch: bool = False, groups: Sequence[bytes] | None = None
    ) -> list[bool]:
        return await self._run(lambda: self._client.exists(keys, prefetch, groups=groups))

    async def match_prefix(
        self,
        keys: Sequence[bytes],
        parts: Sequence[bytes] = (),
        prefetch: bool = False,
        group: bytes | None = None,
    ) -> int:
        return await self._run(
            lambda: self._client.match_prefix(keys, parts, prefetch, group=group)
        )

    async def prefetch(self, keys: Sequence[bytes]) -> int:
        return await self._run(lambda: self._client.prefetch(keys))

    async def remove(
        self, keys: Sequence[bytes], groups: Sequence[bytes] | None = None
    ) -> list[Status]:
        return await self._run(lambda: self._client.remove(keys, groups=groups))

    async def stats(self) -> StoreStats:
        return await self._run(self._client.stats)

    async def list(self, prefix: bytes = b"") -> AsyncIterator[tuple[bytes, int]]:
        entries = self._client.list(prefix)
        while (entry := await self._run(lambda: next(entries, None))) is not None:
            yield entry

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
