"""Coverage-guided fuzzing of everything that reads bytes of a stranger: `python -m tests.store.fuzz_frames --minutes 10`.

    corpus line -> [mutate bytes, lengths, msgpack values, order of frames] -> target -> new lines of code reached? -> corpus

A target is a real server (master, holder with memory, log and door staging) fed through a transport that is only a list, or one of
the readers that a client, a holder or a start uses. After each input: no exception but the target's own, the peer at most dropped;
now and then: the invariants hold, and what a good tenant stored is intact. What it finds goes to ``corpus/TARGET.txt`` as a failing
line first; `test_fuzz_corpus.py` replays the corpus in the fast suite.
"""

import argparse
import asyncio
import base64
import itertools
import os
import random
import sys
import tempfile
import time
import types
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from forebay.store.address import Address
from forebay.store.backend import Status
from forebay.store.client.store import StoreClient
from forebay.store.crc import crc32c
from forebay.store.holder.data import Peer
from forebay.store.holder.log.files import Directory
from forebay.store.holder.log.log import Item, SsdLog
from forebay.store.holder.mapping import Staging
from forebay.store.holder.memory import Entry
from forebay.store.holder.node import Holder, HolderConfig
from forebay.store.master import claims, invariants, puts
from forebay.store.master.records import MasterConfig
from forebay.store.master.server import MasterServer
from forebay.store.wire import auth, frames, messages
from forebay.store.wire.connection import Connection
from forebay.store.wire.frames import PREFIX, FrameError, encode
from forebay.store.wire.messages import Role

CORPUS = Path(__file__).parent / "corpus"
LOCALHOST = Address("127.0.0.1", 0)
MAX_INPUT_BYTES = 4096
SERVES_AGAIN_S = 10.0
MAX_LOG_BYTES = 24 << 10
CHECK_EVERY = 50
STAGING_BYTES = 64 << 10
GOOD = b"good value " * 100
_BORDERS = (2**31, 2**32 - 1, 2**50, 2**60, 2**61, 2**62, 2**63 - 1, 2**64 - 1)
_INTERESTING = (
    0,
    1,
    -1,
    63,
    64,
    4096,
    *_BORDERS,
    b"",
    b"k",
    "",
    "default",
    [],
    None,
    True,
    1.5,
    [b"k"],
)


@cache
def staging_memory() -> Staging:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, STAGING_BYTES)
    try:
        return Staging(fd, STAGING_BYTES)
    finally:
        os.close(fd)


class Target(Protocol):
    """``run`` feeds one input; ``check`` looks whether anything else was harmed. Both raise if something is wrong."""

    seeds: list[bytes]

    async def run(self, data: bytes, cut: random.Random) -> None: ...
    async def check(self) -> None: ...


class ListTransport(asyncio.Transport):
    """What a connection writes goes to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.written += [bytes(data) for data in list_of_data]

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


class ServerTarget:
    """Frames of one role to one server, after a good opening (``role`` None: the opening itself)."""

    def __init__(
        self,
        accept: Callable[[], Connection],
        role: Role | None,
        seeds: list[bytes],
        check: Callable[[], Awaitable[None]],
    ):
        self.seeds = seeds
        self._accept = accept
        self._role = role
        self._check = check

    async def run(self, data: bytes, cut: random.Random) -> None:
        connection, transport = self._accept(), ListTransport()
        connection.connection_made(transport)
        if self._role is not None:
            tenant = auth.HOLDER_TENANT if self._role is Role.HOLDER else "stranger"
            feed(
                connection,
                transport,
                encode(auth.hello(connection._challenge, self._role, tenant, b"")),
                None,
            )
            if isinstance(connection.state, Peer):
                connection.state.staging = staging_memory()
                connection.state.lent = memoryview(bytes(STAGING_BYTES))
        feed(connection, transport, data, cut)
        for _ in range(3):
            await asyncio.sleep(0)
        tasks = list(connection.state.tasks) if isinstance(connection.state, Peer) else []
        await asyncio.gather(*tasks)
        connection.connection_lost(None)

    async def check(self) -> None:
        await self._check()


class ReaderTarget:
    """A pure reader of bytes; ``FrameError`` is its way to say no."""

    def __init__(self, read: Callable[[bytes], object], seeds: list[bytes]) -> None:
        self.seeds = seeds
        self._read = read

    async def run(self, data: bytes, cut: random.Random) -> None:
        with suppress(FrameError):
            self._read(data)

    async def check(self) -> None: ...


def feed(
    connection: Connection, transport: ListTransport, data: bytes, cut: random.Random | None
) -> None:
    """As a socket would, in pieces of any size, for as long as the connection is not dropped."""
    at = 0
    while at < len(data) and not transport.is_closing():
        room = connection.get_buffer(-1)
        count = min(
            len(room),
            len(data) - at,
            cut.choice((1, 7, 16, 100, 1 << 20)) if cut is not None else 1 << 20,
        )
        room[:count] = data[at : at + count]
        connection.buffer_updated(count)
        at += count


# ------------------------------------------------------------------------------------------ targets


@asynccontextmanager
async def targets(directory: Path, promotes: bool = True) -> Any:
    """All targets by name, around one real store that is up meanwhile. ``promotes``: on hit; else a master answers gets without a
    step of its machine."""
    config = MasterConfig(
        settle_s=0.0, ssd_prefetch=True, promotion_on_hit=promotes, put_wait_s=0.1
    )
    master = MasterServer(config, LOCALHOST)
    await master.start()
    holder = Holder(
        HolderConfig(master.address, LOCALHOST, 8 << 20, directory / "log", 64 << 20), None
    )
    await holder.start()
    try:
        while not holder.serving:
            await asyncio.sleep(0.01)
        yield make_targets(master, holder, directory)
    finally:
        await holder.stop()
        await master.stop()


def make_targets(master: MasterServer, holder: Holder, directory: Path) -> dict[str, Target]:
    good = store_good(master, holder)

    async def master_is_well() -> None:
        invariants.check(master.machine.state)
        await asyncio.sleep(0)

    async def holder_is_well() -> None:
        deadline = time.monotonic() + SERVES_AGAIN_S
        while (
            not holder.serving and time.monotonic() < deadline
        ):  # on a busy machine it stood still, and registers again
            await asyncio.sleep(0.01)
        assert holder.serving, holder.why_not
        assert bytes(holder.segment.data(good.offset, good.length)) == GOOD, (
            "a good tenant's bytes were overwritten"
        )
        assert holder.memory.at(good.offset, good.stamp) is good, "a good tenant's object is gone"

    async def others_are_well() -> None:
        """A holder that says the truth comes back to the master, and what a client does there still works."""
        await master_is_well()
        holder._link.reconnect()
        while holder.serving:
            await asyncio.sleep(0)
        await holder_is_well()
        assert await asyncio.to_thread(come_and_go, master.address) == [Status.OK, Status.OK]
        await holder_is_well()

    def read_log(data: bytes) -> None:
        where = Path(tempfile.mkdtemp(dir=directory))
        (where / "0000000001.log").write_bytes(data)
        SsdLog(Directory(where), 64 << 20).close()
        for file in where.iterdir():
            file.unlink()
        where.rmdir()

    def read_all(*decoders: frames.BodyDecoder[Any]) -> Callable[[bytes], None]:
        def read(data: bytes) -> None:
            if len(data) >= PREFIX.size:
                prefix = frames.read_prefix(data)
                for decode in decoders:
                    with suppress(FrameError):
                        decode(data[PREFIX.size : PREFIX.size + prefix.body_bytes])

        return read

    answers = read_all(
        frames.decode_master_to_client, frames.decode_holder_to_client, frames.decode_opening
    )
    return {
        "opening": ServerTarget(master._accept, None, seeds(messages.Opening), master_is_well),
        "client-to-master": ServerTarget(
            master._accept, Role.CLIENT, seeds(messages.ClientToMaster), master_is_well
        ),
        "holder-to-master": ServerTarget(
            master._accept, Role.HOLDER, seeds(messages.HolderToMaster) + boasts(), others_are_well
        ),
        "client-to-holder": ServerTarget(
            holder._accept,
            Role.CLIENT,
            seeds(messages.ClientToHolder) + written(holder, good),
            holder_is_well,
        ),
        "answers-to-client": ReaderTarget(
            answers, seeds(messages.MasterToClient) + seeds(messages.HolderToClient)
        ),
        "master-to-holder": ReaderTarget(
            read_all(frames.decode_master_to_holder), seeds(messages.MasterToHolder)
        ),
        "log-file": ReaderTarget(read_log, [a_log_file(directory)]),
    }


def come_and_go(master: Address) -> list[Status]:
    """What a put and its removal say."""
    with StoreClient.connect(
        f"forebay://{master}", tenant="another", timeout_s=SERVES_AGAIN_S
    ) as client:
        return [client.put(b"fleeting", b"value"), *client.remove([b"fleeting"])]


def store_good(master: MasterServer, holder: Holder) -> Entry:
    """An object of another tenant, which no stranger may touch."""
    state = master.machine.state
    place = next(iter(state.holders.values())).extents.take(8192)
    assert place is not None
    entry = Entry(
        "good",
        b"good",
        1,
        1 << 61,
        place,  # newer than all others; generations go on from it if the holder registers again
        len(GOOD),
        crc32c(GOOD),
    )
    assert holder.memory.begin(entry)
    holder.segment.data(place, len(GOOD))[:] = GOOD
    holder.memory.publish(entry)
    next(iter(state.holders.values())).extents.give(place, 8192)
    return entry


def written(holder: Holder, good: Entry) -> list[bytes]:
    """Writes and reads that the holder takes, with tokens of its own key."""
    made = []
    for number, offset in enumerate((1 << 20, 2 << 20)):
        value = b"x" * 100
        token = puts.room_token(holder.token_key, "stranger", b"k", 10 + number, offset, len(value))
        piece = messages.Piece(b"k", 10 + number, offset, len(value), crc32c(value), token)
        made.append(encode(messages.Write(1, [piece]), len(value)) + value)
        made.append(encode(messages.CopyIn(2, [piece], [0])))
        made.append(encode(messages.ReadMemory(3, [messages.Slice(offset, 10 + number, 0, 100)])))
    made.append(
        encode(messages.ReadMemory(4, [messages.Slice(good.offset, good.stamp, 0, good.length)]))
    )
    made.append(
        encode(messages.ReadSsd(5, [messages.Cut(b"k", 10, 0, 100)]))
        + encode(messages.CopyOut(6, [messages.Cut(b"k", 10, 0, 100)], [0]))
        + encode(messages.Touched([(b"k", 10)], 100), optional=True)
    )
    return made


def boasts() -> list[bytes]:
    """Claims of the highest generations that the wire allows, and of those that a master just believes."""
    made = []
    now_ms = time.time_ns() // 1_000_000
    for generation in (2**63 - 1, 2**62, claims.first_generation(now_ms + claims.MARGIN_MS)):
        register = messages.Register("boaster", "i", "h", 1, "", "m", 1 << 20, 1 << 30, generation)
        held = messages.HeldSsd("another", b"fleeting", generation, 1)
        memory = messages.HeldMemory("another", b"fleeting", generation, 1, 0, generation)
        grave = messages.Grave("another", b"fleeting", generation, behalf="somebody")
        said = [
            messages.Inventory(0, [memory], [], [], True),
            messages.Inventory(0, [], [held], [], True),
            messages.Inventory(0, [], [], [grave], True),
            messages.Persisted([held]),
        ]
        made += [
            encode(register),
            *(
                encode(msgspec.structs.replace(register, highest_generation=1)) + encode(one)
                for one in said
            ),
        ]
    return made


def a_log_file(directory: Path) -> bytes:
    where = Path(tempfile.mkdtemp(dir=directory))
    log = SsdLog(Directory(where), 64 << 20)
    log.append([Item("t", b"key", 1, crc32c(b"value"), memoryview(b"value"))])
    log.bury([messages.Grave("t", b"key", 5, behalf="h")], [])
    log.append([Item("t", b"key", 6, crc32c(b"newer"), memoryview(b"newer"))])
    log.close()
    return (where / "0000000001.log").read_bytes()


def seeds(union: Any) -> list[bytes]:
    """One frame of every message of a channel, and all of them one after another."""
    frames_ = [encode(example(kind)) for kind in union.__args__]
    return [*frames_, b"".join(frames_)]


def example(kind: Any) -> Any:
    """Some value of a message type, by its fields' types."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(*(example(field.type) for field in msgspec.structs.fields(kind)))
    plain: dict[Any, Any] = {int: 1, float: 0.5, bytes: b"k", str: "s", bool: True}
    if kind in plain:
        return plain[kind]
    origin = getattr(kind, "__origin__", None)
    if hasattr(kind, "__metadata__"):
        return example(origin)  # with limits
    if origin is list:
        return [example(kind.__args__[0])]
    if origin is tuple:
        return tuple(example(part) for part in kind.__args__ if part is not Ellipsis)
    if origin is dict:
        return {example(kind.__args__[0]): example(kind.__args__[1])}
    return next(iter(kind))  # an enum


# ------------------------------------------------------------------------------------------ mutation


class Mutator:
    """Damage of every kind that bytes on a wire may have."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, data: bytes, others: list[bytes]) -> bytes:
        for _ in range(self.random.choice((1, 1, 2, 4))):
            data = self.random.choice(self._KINDS)(self, data, others)
        return data[:MAX_LOG_BYTES]

    def _flip(self, data: bytes, others: list[bytes]) -> bytes:
        changed = bytearray(data or b"\0")
        changed[self._somewhere(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _somewhere(self, count: int) -> int:
        """Any place, but rather at the front of a block, where heads are."""
        block = self.random.randrange(0, count, 4096)
        return min(count - 1, block + self.random.randrange(self.random.choice((64, 4096))))

    def _overwrite(self, data: bytes, others: list[bytes]) -> bytes:
        at = self._somewhere(len(data) + 1)
        return data[:at] + self.random.randbytes(self.random.choice((1, 2, 4, 8))) + data[at + 4 :]

    def _cut(self, data: bytes, others: list[bytes]) -> bytes:
        first, last = sorted(self.random.randrange(len(data) + 1) for _ in range(2))
        return data[:first] + data[last:]

    def _splice(self, data: bytes, others: list[bytes]) -> bytes:
        other = self.random.choice(others)
        return (
            data[: self.random.randrange(len(data) + 1)]
            + other[self.random.randrange(len(other) + 1) :]
        )

    def _chain(self, data: bytes, others: list[bytes]) -> bytes:
        return data + self.random.choice(others)

    def _prefix(self, data: bytes, others: list[bytes]) -> bytes:
        fields = [
            self.random.choice((1, 1, 1, 0, 2, 255)),
            self.random.choice((0, 1, 255)),
            self.random.choice((0, 0, 0, 1)),
        ]
        body = self.random.choice((len(data) - PREFIX.size, 0, 1, 100, 65536, 2**24, 2**32 - 1))
        payload = self.random.choice((0, 1, 100, 2**20, 2**40, 2**64 - 1))
        return PREFIX.pack(*fields, max(0, body), payload) + data[PREFIX.size :]

    def _value(self, data: bytes, others: list[bytes]) -> bytes:
        """One value somewhere in the body is another; the frame around it is right."""
        if (
            not PREFIX.size <= len(data) <= MAX_INPUT_BYTES
        ):  # a list that was made 9000 times as long is not to be so once more
            return data
        body_bytes, payload_bytes = PREFIX.unpack_from(data)[3:]
        try:
            body = msgspec.msgpack.decode(data[PREFIX.size : PREFIX.size + body_bytes])
            changed = msgspec.msgpack.encode(self._change(body))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
            return data
        return (
            PREFIX.pack(1, 0, 0, len(changed), payload_bytes)
            + changed
            + data[PREFIX.size + body_bytes :]
        )

    def _change(self, value: Any) -> Any:
        if isinstance(value, list) and value and self.random.random() < 0.9:
            at = self.random.randrange(len(value))
            match self.random.randrange(8):
                case 0:
                    return value[:at] + value[at + 1 :]
                case 1:
                    return (
                        value[:at]
                        + [value[at]] * self.random.choice((2, 3, 9000))
                        + value[at + 1 :]
                    )
                case _:
                    return [*value[:at], self._change(value[at]), *value[at + 1 :]]
        if isinstance(value, bytes) and self.random.random() < 0.5:
            return value * self.random.choice((0, 2, 500, 2000))
        if isinstance(value, int) and self.random.random() < 0.5:
            return value + self.random.choice((-1, 1, 64, -64, 4096))
        return self.random.choice(_INTERESTING)

    _KINDS = (_flip, _overwrite, _cut, _splice, _chain, _prefix, _value, _value, _value)


# ------------------------------------------------------------------------------------------ coverage


class Coverage:
    """Which lines of the store, and from which line before, an input reaches: only the loop's thread, only while it runs."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, int]] = set()
        self._fresh: set[tuple[str, int, int]] = set()

    def __enter__(self) -> "Coverage":
        self._fresh = set()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def gained(self) -> int:
        """How many steps the last input was the first to take."""
        new = self._fresh - self.seen
        self.seen |= new
        return len(new)

    def _call(self, frame: types.FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if "forebay/store" not in name:
            return None
        before = [0]

        def step(frame: types.FrameType, event: str, arg: object) -> Any:
            self._fresh.add((name, before[0], frame.f_lineno))
            before[0] = frame.f_lineno
            return step

        return step


# ------------------------------------------------------------------------------------------ the program


def read_corpus(name: str) -> list[bytes]:
    """A line for each input: base64 of its zlib form."""
    file = CORPUS / f"{name}.txt"
    return (
        [zlib.decompress(base64.b64decode(line)) for line in file.read_text().split()]
        if file.exists()
        else []
    )


def write_corpus(name: str, inputs: list[bytes]) -> None:
    ordered = sorted(set(inputs), key=lambda one: (len(one), one))
    lines = [base64.b64encode(zlib.compress(one, 9)).decode() for one in ordered]
    (CORPUS / f"{name}.txt").write_text("".join(line + "\n" for line in lines))


class Campaign:
    """Targets take turns until the time is over. A failing input is kept in the corpus and raised."""

    def __init__(self, seed: int) -> None:
        self.mutate = Mutator(seed)
        self.promotes = seed % 2 == 0
        self.cut = random.Random(seed + 1)
        self.runs: dict[str, int] = {}
        self.kept: dict[str, list[bytes]] = {}
        self.coverage: dict[str, Coverage] = {}
        self.failed: list[object] = []

    async def run(self, deadline: float, directory: Path) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.failed.append(context))
        async with targets(directory, self.promotes) as all_targets:
            self.coverage = {name: Coverage() for name in all_targets}
            for name, target in all_targets.items():
                self.kept[name] = []
                for data in read_corpus(name) + target.seeds:
                    await self._one(name, target, data)
            for name in itertools.cycle(all_targets):
                if time.monotonic() >= deadline:
                    return
                for _ in range(CHECK_EVERY):
                    pool = self.kept[name]
                    await self._one(
                        name, all_targets[name], self.mutate(self.mutate.random.choice(pool), pool)
                    )
                await all_targets[name].check()

    async def _one(self, name: str, target: Target, data: bytes) -> None:
        coverage = self.coverage[name]
        try:
            with coverage:
                await target.run(data, self.cut)
            if self.failed:
                raise AssertionError(f"an error in the background: {self.failed}")
        except BaseException:
            write_corpus(name, [*read_corpus(name), data])
            print(f"{name}: input {data.hex()} failed; it is in the corpus now", file=sys.stderr)
            raise
        self.runs[name] = self.runs.get(name, 0) + 1
        if coverage.gained() and len(data) <= (
            MAX_LOG_BYTES if name == "log-file" else MAX_INPUT_BYTES
        ):
            self.kept[name].append(data)


def progress(campaign: Campaign) -> Iterator[str]:
    for name, count in campaign.runs.items():
        yield f"{name}: {count} inputs, {len(campaign.coverage[name].seen)} steps of code, {len(campaign.kept[name])} kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", action="store_true", help="write what reached new code to the corpus"
    )
    given = parser.parse_args()
    campaign = Campaign(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(campaign.run(time.monotonic() + given.minutes * 60, Path(directory)))
    if given.keep:
        for name, kept in campaign.kept.items():
            write_corpus(name, [*read_corpus(name), *kept])
    print("\n".join(progress(campaign)))


if __name__ == "__main__":
    main()
