"""What a holder that has the secret may claim, and that whoever claims more is dropped, and harms nobody else."""

import fcntl
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.store import app as store_commands
from forebay.store import Status
from forebay.store.address import Address
from forebay.store.client import one_master
from forebay.store.client.channel import Channel, ChannelError
from forebay.store.holder.log.hints import LogView
from forebay.store.master import claims
from forebay.store.master.machine import FromHolder, Master
from forebay.store.master.records import MasterConfig
from forebay.store.wire.frames import PREFIX as FRAME_PREFIX
from forebay.store.wire.frames import (
    FrameError,
    decode_holder_to_master,
    decode_master_to_client,
    encode,
)
from forebay.store.wire.messages import (
    MAX_ENTRIES,
    MAX_KEY_BYTES,
    MAX_PEERS,
    AskHolders,
    AskStats,
    Beat,
    Buried,
    Codes,
    Dropped,
    Grave,
    HeldMemory,
    HeldSsd,
    HolderTable,
    HolderToMaster,
    Inventory,
    Message,
    Persisted,
    Register,
    Remove,
    StoreStats,
)
from tests.store.store_cluster import cluster, wait_for
from tests.store.store_fakes import FakeHolder, World
from tests.store.test_master import OK, exists, put

YEAR_MS = 365 * 86_400_000
NOW_MS = 56 * YEAR_MS  # on the wall
TOP = (1 << 63) - 1


def world_at(wall_ms: int) -> World:
    world = World()
    world.master = Master(
        world.config, world.now, epoch=1, first_generation=claims.first_generation(wall_ms)
    )
    return world


def body(message: Message) -> bytes:
    return encode(message)[FRAME_PREFIX.size :]


LIES: dict[str, HolderToMaster] = {
    "memory": Inventory(0, [HeldMemory("t", b"k", TOP, 10, 0, 1)], [], [], True),
    "stamp": Inventory(0, [HeldMemory("t", b"k", 1, 10, 0, TOP)], [], [], True),
    "log": Inventory(0, [], [HeldSsd("t", b"k", TOP, 10)], [], True),
    "grave": Inventory(0, [], [], [Grave("t", b"k", TOP, behalf="honest")], True),
    "persisted": Persisted([HeldSsd("t", b"k", TOP, 10)]),
    "dropped": Dropped([HeldSsd("t", b"k", TOP, 10)]),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_holder_that_claims_what_no_master_gave_out_is_dropped_and_nothing_of_it_is_kept(
    lie: HolderToMaster,
) -> None:
    world = world_at(NOW_MS)
    honest, client = world.holder(FakeHolder("honest")), world.client()
    assert put(world, client, b"mine") == OK
    liar = world.holder(FakeHolder("liar", tells=not isinstance(lie, Inventory)))
    before = world.master.state.next_generation
    world.step(FromHolder(liar.session, lie))
    assert world.closed == [liar.session] and world.master.state.next_generation == before
    assert exists(world, client, b"mine") == [OK] and honest.serving
    assert not world.master.state.graves and "t" not in world.master.state.tenants


def test_a_registration_of_what_no_master_gave_out_is_refused() -> None:
    world = world_at(NOW_MS)
    liar = FakeHolder("liar", graves=[Grave("t", b"k", TOP)])
    world.holder(liar)
    assert world.closed == [liar.session] and not world.master.state.holders


def test_the_highest_lie_that_is_believed_shuts_nobody_out_whatever_is_restarted() -> None:
    """It costs half of the generations; who tells the truth afterwards has higher ones, and later masters must believe them."""
    world = world_at(NOW_MS)
    liar = FakeHolder(
        "liar",
        graves=[
            Grave("t", b"k", claims.Bound(world.now, claims.first_generation(NOW_MS)).at(world.now))
        ],
    )
    world.holder(liar)
    assert not world.closed
    world.lose(liar.session)
    honest, client = world.holder(FakeHolder("honest")), world.client()
    for index in range(20):
        world.later(0.001)
        assert put(world, client, b"%d" % index) == OK
    assert world.call(client, Remove(1, [b"3"])) == Codes(1, bytes([OK]))
    world.master = Master(
        world.config, world.now, epoch=2, first_generation=claims.first_generation(NOW_MS + 20)
    )
    world.holders.clear()
    world.holder(honest)
    client = world.client()
    assert not world.closed and honest.serving
    assert exists(world, client, b"2", b"3") == [OK, Status.NOT_FOUND]
    assert put(world, client, b"new") == OK
    assert all(grave.generation <= TOP for grave in honest.graves)
    decode_holder_to_master(body(Persisted(list(honest.ssd.values()))))


@pytest.mark.parametrize("years", [-99, -56, 50, 99])
def test_whoever_tells_the_truth_is_believed_by_a_master_with_another_clock(years: int) -> None:
    world = world_at(NOW_MS)
    honest, client = world.holder(FakeHolder("honest")), world.client()
    assert put(world, client, b"k") == OK
    world.master = Master(
        world.config,
        world.now,
        epoch=2,
        first_generation=claims.first_generation(max(0, NOW_MS + years * YEAR_MS)),
    )
    world.holders.clear()
    world.holder(honest)
    assert not world.closed and exists(world, world.client(), b"k") == [OK]


REGISTER = Register("n", "i", "h", 1, "u", "m", 2, 3, 4)
OVERSIZED: dict[str, HolderToMaster] = {
    "name": msgspec.structs.replace(REGISTER, name="x" * 65),
    "a name of two lines": msgspec.structs.replace(REGISTER, name="x\ny"),
    "a name with a line's end": msgspec.structs.replace(REGISTER, name="x\n"),
    "no name": msgspec.structs.replace(REGISTER, name=""),
    "instance": msgspec.structs.replace(REGISTER, instance="x" * 65),
    "host": msgspec.structs.replace(REGISTER, host="x" * 256),
    "a host with a terminal's escape": msgspec.structs.replace(REGISTER, host="\x1b[2J"),
    "port": msgspec.structs.replace(REGISTER, port=65536),
    "door": msgspec.structs.replace(REGISTER, unix="x" * 256),
    "machine": msgspec.structs.replace(REGISTER, machine="x" * 256),
    "memory": msgspec.structs.replace(REGISTER, memory_bytes=1 << 51),
    "ssd": msgspec.structs.replace(REGISTER, ssd_bytes=1 << 51),
    "peers": msgspec.structs.replace(REGISTER, peers=["p"] * (MAX_PEERS + 1)),
    "a peer's name": msgspec.structs.replace(REGISTER, peers=["two words"]),
    "state": Beat(0, "x" * 201, True),
    "a state with a terminal's escape": Beat(0, "\x1b[2J", True),
    "key": Persisted([HeldSsd("t", b"k" * (MAX_KEY_BYTES + 1), 1, 1)]),
    "tenant": Persisted([HeldSsd("t" * 65, b"k", 1, 1)]),
    "length": Persisted([HeldSsd("t", b"k", 1, (1 << 40) + 1)]),
    "entries": Dropped([HeldSsd("t", b"k", 1, 1)] * (MAX_ENTRIES + 1)),
    "whom a grave is for": Inventory(0, [], [], [Grave("t", b"k", 1, behalf="a b")], True),
}


@pytest.mark.parametrize("message", OVERSIZED.values(), ids=OVERSIZED)
def test_what_others_could_not_take_is_not_taken_from_a_holder(message: HolderToMaster) -> None:
    with pytest.raises(FrameError, match=re.escape("not a message of this channel")):
        decode_holder_to_master(body(message))


def test_what_the_largest_claims_come_to_is_a_message_that_others_can_read() -> None:
    world = World(MasterConfig(settle_s=0.0), check=False)
    client = world.client()
    for index in range(MAX_PEERS + 50):
        gone = world.holder(FakeHolder(f"{index}.".rjust(64, "g")))
        world.step(FromHolder(gone.session, Persisted([HeldSsd(f"{index}".rjust(64), b"k", 1, 1)])))
        world.lose(gone.session)
    for index in range(4):
        peers = [f"{index}-{number}".rjust(64, "p") for number in range(MAX_PEERS)]
        liar = FakeHolder(
            str(index).rjust(64, "x"), memory_bytes=1 << 50, ssd_bytes=1 << 50, peers=peers
        )
        world.holder(liar)
        world.step(FromHolder(liar.session, Beat(1 << 50, "\U0001f600" * 200, True)))
    table, stats = world.call(client, AskHolders(1)), world.call(client, AskStats(2))
    assert isinstance(table, HolderTable) and isinstance(stats, StoreStats)
    assert (
        len(table.holders) == 4 + MAX_PEERS
        and sum(entry.ssd_used == 1 << 50 for entry in table.holders) == 4
    )
    for answer in (table, stats):
        decode_master_to_client(body(answer))
    assert len(world.holder(FakeHolder("honest")).peers) < 2 * MAX_PEERS


def test_any_number_of_removals_reaches_a_holder_that_was_away_in_messages_that_it_can_read() -> (
    None
):
    """Each of them is below the limits of a frame, and it serves once all of them are logged."""
    world = World(MasterConfig(settle_s=0.0), check=False)
    keeper = world.holder(FakeHolder("keeper"))
    count = 2 * MAX_ENTRIES + 5
    away = FakeHolder("away", acks=False)
    world.holder(away)
    world.lose(away.session)
    graves = [
        Grave("default", b"%d" % number, number + 1, behalf="away") for number in range(count)
    ]
    world.lose(keeper.session)
    keeper.graves = graves
    world.holder(keeper)
    world.holder(away)
    buries = [burial for burial in world.master.state.burials.values() if burial.delivers == "away"]
    sent = [some for burial in buries for _, some in burial.missing.values()]
    assert sum(map(len, sent)) == count and max(map(len, sent)) <= MAX_ENTRIES
    for number in away.unacked:
        world.step(FromHolder(away.session, Buried(number)))
    assert not world.master.state.graves and not keeper.graves


SHORT, UNSEALED = "less memory than was said", "memory that may be taken away"


@pytest.mark.parametrize("kind", [SHORT, UNSEALED])
def test_a_holder_whose_memory_is_not_safe_to_map_is_read_over_tcp(
    tmp_path: Path, kind: str
) -> None:
    """Whoever touches memory that is not there is killed by the kernel."""
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20 if kind == SHORT else 16 << 20)
    if kind == SHORT:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with cluster(MasterConfig(settle_s=0.0)) as nodes:
        holder = nodes.holder(16 << 20, tmp_path)
        assert holder._door is not None
        holder._door._segment = SimpleNamespace(fd=fd, capacity=16 << 20)  # type: ignore[assignment]
        client = nodes.client()
        assert client.put(b"k", b"value") is Status.OK and client.get(b"k") == b"value"
        assert holder.data.bytes_out == len(b"value"), "not read from mapped memory"
    os.close(fd)


def test_a_table_of_hints_that_may_be_taken_away_is_not_used(tmp_path: Path) -> None:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    with pytest.raises(OSError, match="sealed"):
        LogView([fd, os.open(tmp_path, os.O_PATH | os.O_CLOEXEC)])


@pytest.mark.parametrize("host", ["x" * 100, "a..b"])
def test_a_holder_at_a_host_that_cannot_be_is_not_reached_and_that_is_all(host: str) -> None:
    with pytest.raises(ChannelError):
        Channel.connect(Address(host, 1), "default", b"", time.monotonic() + 1.0)


def test_a_keeper_is_told_to_forget_only_when_it_has_told_all_that_it_keeps() -> None:
    """The removal in the first of two pieces of its inventory is delivered before the second piece comes."""
    world = World(MasterConfig(settle_s=0.0))
    keeper, away = FakeHolder("keeper", tells=False), FakeHolder("away")
    graves = [Grave("default", b"%d" % number, number + 1, behalf="away") for number in range(2)]
    keeper.graves = list(graves)
    world.holder(keeper)
    world.step(FromHolder(keeper.session, Inventory(0, [], [], graves[:1], False)))
    world.holder(away)
    assert away.serving and keeper.graves == graves
    world.step(FromHolder(keeper.session, Inventory(1, [], [], graves[1:], True)))
    assert keeper.graves == [] and keeper.serving


@pytest.mark.parametrize("local", [True, False])
def test_a_holder_that_answers_with_no_code_at_all_costs_its_keys_and_no_exception(
    local: bool,
) -> None:
    with cluster(MasterConfig(settle_s=0.0)) as nodes:
        holder = nodes.holder(16 << 20)
        client, hasty = (
            nodes.client(allow_local=local),
            nodes.client(allow_local=local, timeout_s=0.5),
        )
        assert client.put(b"k", b"value") is Status.OK
        holder.data._finish_write = lambda connection, call, entries, intact: connection.answer(
            Codes(call, b"\x63")
        )  # type: ignore[method-assign]
        assert hasty.put(b"l", b"value") is not Status.OK
        holder.data._read_memory = lambda connection, message: connection.answer(
            Codes(message.call, b"\x63")
        )  # type: ignore[method-assign]
        assert client.get(b"k") == (b"value" if local else None)


def test_a_holders_words_are_shown_as_they_are(tmp_path: Path) -> None:
    with cluster(MasterConfig(settle_s=0.0)) as nodes:
        holder = nodes.holder(16 << 20, tmp_path)
        assert holder._writer is not None
        holder._writer.state = "DRAM only: [/no] [red]markup"
        client = nodes.client()
        wait_for(lambda: client.holders().holders[0].ssd_state != "ok")
        shown = CliRunner().invoke(store_commands, ["status", nodes.url], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "[/no] [red]markup" in shown.output, shown.output


def test_a_value_larger_than_memory_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(MasterConfig(settle_s=0.0)) as nodes:
        nodes.holder(16 << 20, tmp_path)
        client = nodes.client()
        assert client.put(b"k", b"value") is Status.OK

        def too_much(length: int) -> None:
            raise MemoryError(length)

        monkeypatch.setattr(one_master, "_new_bytes", too_much)
        assert client.get(b"k") is None


def test_a_holder_that_beats_and_never_tells_what_it_has_keeps_nobody_waiting() -> None:
    world = World(MasterConfig(settle_s=0.0))
    world.holder(FakeHolder("honest"))
    client, liar = world.client(), world.holder(FakeHolder("liar", tells=False))
    assert exists(world, client, b"nowhere") == [Status.UNAVAILABLE], "it may have it"
    for number in range(8):
        world.later(1.0)
        world.step(FromHolder(liar.session, Inventory(number, [], [], [], False)))
        assert world.closed == [], "it may take its time"
    records = [HeldSsd("default", b"%d" % number, 1, 1) for number in range(5000)]
    world.step(FromHolder(liar.session, Inventory(8, [], records, [], False)))
    for number in range(9, 16):
        world.later(1.0)
        world.step(FromHolder(liar.session, Inventory(number, [], [], [], False)))
        assert world.closed == [], "it told something"
    world.later(1.0)
    assert world.closed == [liar.session], "telling nothing, however often, buys no time"
    assert exists(world, client, b"nowhere") == [Status.NOT_FOUND]
