"""The master as a process: an event loop that feeds connections' frames and the clock to the state machine.

One thread, no locks: whatever a message needs, it gets in one step. Effects go out in order.
"""

import asyncio
import contextlib
import secrets as random_bytes
import ssl
import time
from collections.abc import Callable, Sequence

from forebay.store.address import Address
from forebay.store.master import claims
from forebay.store.master.machine import (
    Connected,
    Disconnected,
    Event,
    FromClient,
    FromHolder,
    Master,
    Ticked,
)
from forebay.store.master.records import Close, Effect, MasterConfig, Send
from forebay.store.wire import auth
from forebay.store.wire.connection import Connection, watch
from forebay.store.wire.frames import (
    FrameError,
    Prefix,
    decode_client_to_master,
    decode_holder_to_master,
    encode,
)
from forebay.store.wire.listener import Listener
from forebay.store.wire.messages import Bury, Challenge, Grave, Hello, Role, Welcome

TICK_S = 0.05
Witness = Callable[[bool, int, Sequence[tuple[int, Sequence[Grave]]]], None]


class MasterServer:
    """``await start()``, then it serves until ``await stop()``. ``address`` has the real port after the start."""

    def __init__(
        self,
        config: MasterConfig,
        listen: Address,
        secrets: auth.Secrets | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = listen
        self._secrets = secrets or auth.Secrets()
        self._tls = tls
        self.machine = Master(
            config,
            time.monotonic(),
            epoch=time.time_ns() >> 10,
            first_generation=claims.first_generation(time.time_ns() // 1_000_000),
            secret=random_bytes.token_bytes(32),
        )
        self._connections: dict[int, Connection] = {}
        self._witnesses: dict[str, tuple[str, Witness]] = {}
        self._numbers = 0
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises ``OSError`` if the address cannot be listened on."""
        self._listener = await Listener.open(
            self.address, self._accept, self._connections, self._tls
        )
        self.address = Address(self.address.host, self._listener.port)
        self._tasks = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(watch(self._connections)),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._listener is not None:
            await self._listener.close()
            for connection in list(self._connections.values()):
                connection.abort()
            await asyncio.sleep(0)

    def watch(self, name: str, instance: str, witness: Witness) -> bool:
        """A holder in this process, ``instance`` of the one called ``name``, hears of each step before anybody else can notice it:
        whether it is usable as that instance, its connection's number, and what it is told to bury, by number of the Bury. To be called
        before it registers. False: it could not answer reads in the master's place, since here they promote."""
        if self.machine.state.config.promotion_on_hit:
            return False
        self._witnesses[name] = (instance, witness)
        return True

    def unwatch(self, name: str) -> None:
        self._witnesses.pop(name, None)

    def logged_at(self, name: str, tenant: str, key: bytes) -> int | None:
        """The generation that ``key`` has now, if the holder called ``name`` has said that its log has it."""
        owner = self.machine.state.tenants.get(tenant)
        found = owner.objects.get(key) if owner is not None else None
        if found is None or name not in [copy.holder.register.name for copy in found.ssd]:
            return None
        return found.generation

    def _accept(self) -> Connection:
        self._numbers += 1
        return Connection(self, self._numbers, self._connections)

    # ------------------------------------------------------------------------------------------ Handler

    def opened(self, connection: Connection, given: Challenge, hello: Hello) -> Welcome:
        auth.verify_hello(given, hello, self._secrets)
        self._step(Connected(connection.number, hello.tenant))
        return auth.welcome(given, hello, self._secrets, self.machine.state.epoch)

    def frame(
        self, connection: Connection, body: memoryview, prefix: Prefix
    ) -> Sequence[memoryview]:
        assert connection.peer is not None
        if prefix.payload_bytes:
            raise FrameError("a master takes no payload")
        if connection.peer.role is Role.HOLDER:
            self._step(FromHolder(connection.number, decode_holder_to_master(body)))
            return ()
        message = decode_client_to_master(body)
        now = time.monotonic()
        quick = self.machine.answer(now, connection.number, message)
        if quick is not None:
            connection.answer(quick)
        else:
            self._step(FromClient(connection.number, message))
        return ()

    def payload(self, connection: Connection) -> None:
        raise AssertionError("a master takes no payload")

    def closed(self, connection: Connection) -> None:
        self._step(Disconnected(connection.number))

    # ------------------------------------------------------------------------------------------ machine

    def _step(self, event: Event) -> None:
        effects = self.machine.step(time.monotonic(), event)
        for name, (instance, witness) in self._witnesses.items():
            self._tell_witness(name, instance, witness, effects)
        for effect in effects:
            connection = self._connections.get(effect.session)
            if connection is None:
                continue
            if isinstance(effect, Close):
                connection.drop(effect.reason)
            else:
                connection.send(encode(effect.message))

    def _tell_witness(
        self, name: str, instance: str, witness: Witness, effects: Sequence[Effect]
    ) -> None:
        holder = self.machine.state.by_name.get(name)
        if holder is None or holder.register.instance != instance:
            witness(False, 0, ())
            return
        told = [
            (effect.message.op, effect.message.graves)
            for effect in effects
            if isinstance(effect, Send)
            and effect.session == holder.session
            and isinstance(effect.message, Bury)
        ]
        witness(holder.usable, holder.session, told)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._step(Ticked())
