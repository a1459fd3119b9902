"""A holder's connection to its master: opened again whenever it is lost, registered anew each time, inventory first.

What the log reports while an inventory is on its way is held back until the last piece is sent, for the master must know an object
before it hears that it is durable.
"""

import asyncio
import contextlib
import itertools
import ssl
from typing import Protocol, TypeVar

from forebay.store.address import Address
from forebay.store.wire import auth
from forebay.store.wire.frames import (
    PREFIX,
    BodyDecoder,
    FrameError,
    decode_master_to_holder,
    decode_opening,
    encode,
    read_prefix,
)
from forebay.store.wire.messages import (
    Allocated,
    Challenge,
    Dropped,
    Grave,
    HeldMemory,
    HeldSsd,
    HolderToMaster,
    Inventory,
    MasterToHolder,
    Persisted,
    Prefetchable,
    Refused,
    Register,
    Registered,
    Role,
    Welcome,
    batched,
)

PIECE_ENTRIES = 1000
CONNECT_S = 2.0
RETRY_FIRST_S = 0.05
RETRY_MOST_S = 0.5
T = TypeVar("T")


class LinkOwner(Protocol):
    def register(self) -> Register: ...
    def registered(self, message: Registered) -> None: ...
    def inventory(self) -> tuple[list[HeldMemory], list[HeldSsd], list[Grave]]: ...
    def from_master(self, message: MasterToHolder) -> None: ...
    def master_lost(self, why: str) -> None: ...


class MasterLink:
    """``run()`` until cancelled. ``send`` drops what is said while there is no master: the next inventory says it all."""

    def __init__(
        self, master: Address, secret: bytes, owner: LinkOwner, tls: ssl.SSLContext | None = None
    ) -> None:
        self._master = master
        self._secret = secret
        self._owner = owner
        self._tls = tls
        self._writer: asyncio.StreamWriter | None = None
        self._opening: asyncio.StreamWriter | None = None
        self._held_back: list[HolderToMaster] | None = None
        self._calls: dict[int, asyncio.Future[Prefetchable | Allocated]] = {}
        self._call_numbers = itertools.count(1)

    async def run(self) -> None:
        patience = RETRY_FIRST_S
        while True:
            why = "connection ended"
            try:
                await self._serve()
                patience = RETRY_FIRST_S
            except (OSError, EOFError, TimeoutError, FrameError, auth.AuthError) as error:
                why = str(error) or type(error).__name__
            finally:
                self._drop()
            self._owner.master_lost(f"master {self._master}: {why}")
            await asyncio.sleep(patience)
            patience = min(RETRY_MOST_S, patience * 2)

    def send(self, message: HolderToMaster) -> bool:
        """False: it was dropped."""
        if self._writer is None or self._writer.transport.is_closing():
            return False
        if self._held_back is not None and isinstance(message, Persisted | Dropped):
            self._held_back.append(message)
        else:
            self._writer.write(encode(message))
        return True

    def new_call(self) -> int:
        return next(self._call_numbers)

    async def call(
        self, message: HolderToMaster, number: int, timeout_s: float
    ) -> Prefetchable | Allocated | None:
        """The answer to call ``number``; None if there is none in time."""
        if self._writer is None or self._writer.transport.is_closing():
            return None
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode(message))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if answer.cancelled():
                return None  # the link was lost
            raise
        finally:
            self._calls.pop(number, None)

    def reconnect(self) -> None:
        """Start over with a new registration."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _serve(self) -> None:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(
                self._master.host, self._master.port, ssl=self._tls
            )
            self._opening = writer
            await self._open(reader, writer)
        self._writer, self._held_back = writer, []
        writer.write(encode(self._owner.register()))
        while True:
            message = await _read(reader, decode_master_to_holder)
            if isinstance(message, Refused):
                raise auth.AuthError(message.reason)
            if isinstance(message, Registered):
                self._owner.registered(message)
                await self._send_inventory(writer)
            elif isinstance(message, Prefetchable | Allocated):
                waiting = self._calls.get(message.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
            else:
                self._owner.from_master(message)

    async def _open(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        given = await _read(reader, decode_opening)
        if not isinstance(given, Challenge):
            raise FrameError("no challenge came")
        hello = auth.hello(given, Role.HOLDER, auth.HOLDER_TENANT, self._secret)
        writer.write(encode(hello))
        answer = await _read(reader, decode_opening)
        if isinstance(answer, Refused):
            raise auth.AuthError(answer.reason)
        if not isinstance(answer, Welcome):
            raise FrameError("no welcome came")
        auth.verify_welcome(given, hello, answer, self._secret)

    async def _send_inventory(self, writer: asyncio.StreamWriter) -> None:
        memory, ssd, graves = self._owner.inventory()
        cut = (
            batched(memory, PIECE_ENTRIES),
            batched(ssd, PIECE_ENTRIES),
            batched(graves, PIECE_ENTRIES),
        )
        pieces = list(itertools.zip_longest(*cut, fillvalue=())) or [((), (), ())]
        for sequence, (some_memory, some_ssd, some_graves) in enumerate(pieces):
            last = sequence == len(pieces) - 1
            writer.write(
                encode(
                    Inventory(sequence, list(some_memory), list(some_ssd), list(some_graves), last)
                )
            )
            await writer.drain()
        held, self._held_back = self._held_back or [], None
        for message in held:
            self.send(message)

    def _drop(self) -> None:
        writer = self._writer or self._opening
        self._writer, self._held_back = None, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.transport.abort()
        for waiting in self._calls.values():
            waiting.cancel()
        self._calls.clear()


async def _read(reader: asyncio.StreamReader, decode: BodyDecoder[T]) -> T:
    """Raises ``EOFError`` (IncompleteReadError), ``FrameError``."""
    prefix = read_prefix(await reader.readexactly(PREFIX.size))
    return decode(await reader.readexactly(prefix.body_bytes))
