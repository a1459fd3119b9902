"""One holder: its parts, and how they come and go.

    master <--link--> Holder --memory, segment--> DataServer <--TCP, Door--> clients
                         '--writer--> SsdLog <--reads-- (get, promotion)

It serves only while it is registered and its loop has not stood still for longer than a lease (rule ST6).
"""

import asyncio
import contextlib
import re
import secrets as random_bytes
import ssl
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forebay.store.address import Address, this_machine
from forebay.store.holder.data import DataServer, Receipt
from forebay.store.holder.door import Door
from forebay.store.holder.log.files import Directory, Files, Lock, salt_of, write_whole
from forebay.store.holder.log.hints import LogHints
from forebay.store.holder.log.index import covers
from forebay.store.holder.log.log import SsdLog
from forebay.store.holder.master_link import MasterLink
from forebay.store.holder.memory import Entry, Memory
from forebay.store.holder.promoter import Promoter
from forebay.store.holder.reads import LogReads
from forebay.store.holder.segment import Segment
from forebay.store.holder.writer import Append, BuryJob, ForgetJob, Fsync, LogWriter, Report
from forebay.store.master.server import MasterServer
from forebay.store.wire import auth
from forebay.store.wire.connection import Connection, watch
from forebay.store.wire.listener import Listener
from forebay.store.wire.messages import (
    MAX_ENTRIES,
    MAX_LINE_CHARS,
    MAX_PEERS,
    Beat,
    Buried,
    Bury,
    Dropped,
    Forget,
    Grave,
    HeldMemory,
    HeldSsd,
    MasterToHolder,
    Peers,
    Persisted,
    Promote,
    Register,
    Registered,
    Retire,
    Serving,
    batched,
)

BEAT_S = 0.5
DRAIN_S = 10.0
_NAME = re.compile(r"[!-~]{1,64}")


class HolderError(Exception):
    """The holder cannot start; one line that says why and what to do."""


@dataclass(frozen=True)
class HolderConfig:
    """``dram`` and ``ssd_bytes`` in bytes. ``ssd``: directory of the log, None for DRAM only. ``tls``: for those who connect to it,
    ``master_tls``: for its connection to the master; both or neither, since clients use TLS for all or for nothing."""

    master: Address
    listen: Address
    dram: int
    ssd: Path | None = None
    ssd_bytes: int = 0
    fsync: Fsync = Fsync.BATCH
    tls: ssl.SSLContext | None = None
    master_tls: ssl.SSLContext | None = None


def slices(whole: HolderConfig, masters: Sequence[Address]) -> list[HolderConfig]:
    """Rule S5: for each master a holder of its own, with its share of DRAM and SSD, the next port, and a log in a sub-directory that
    is named for the master; so each allocates and evicts only what is its own. One master has all, in the directory itself."""
    count = len(masters)
    if count == 1:
        return [replace(whole, master=masters[0])]
    port = whole.listen.port
    return [
        replace(
            whole,
            master=master,
            listen=Address(whole.listen.host, port + number if port else 0),
            dram=whole.dram // count,
            ssd=whole.ssd / str(master).replace(":", "_").strip("[]")
            if whole.ssd is not None
            else None,
            ssd_bytes=whole.ssd_bytes // count,
        )
        for number, master in enumerate(masters)
    ]


class Holder:
    """``await start()``, then it serves until ``await stop()``."""

    def __init__(
        self,
        config: HolderConfig,
        secrets: auth.Secrets | None = None,
        files: Files | None = None,
        *,
        beside: MasterServer | None = None,
    ) -> None:
        """``beside``: its master, if that is in this process and on this thread."""
        self.config = config
        self.address = config.listen
        self.instance = uuid.uuid4().hex
        self.token_key = random_bytes.token_bytes(32)
        self.lease_s = 5.0
        self.serving = False
        self.why_not = "starting"
        self._secrets = secrets or auth.Secrets()
        self._files = files
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._beaten = time.monotonic()
        self._kept_graves: dict[Grave, None] = {}  # without a log
        self._burying: list[Bury] = []  # handed to the log's writer, and not yet logged
        self._receipts: dict[int, Receipt] = {}  # by id of entry
        self._beside = beside
        self._foreseen: dict[
            int, set[tuple[str, bytes]]
        ] = {}  # number of a Bury of the master beside us -> what is not yet buried
        self._foreseen_session = 0
        self._is_usable = False  # as the master beside us sees it
        self._is_level = (
            False  # all that the master told us to bury before it let us serve is buried
        )
        self._was_broken = False
        self.failed = asyncio.Event()
        self.peers: list[str] = []
        self._peers_unsaved = False
        self._lock: Lock | None = None
        self.log: SsdLog | None = None
        self._writer: LogWriter | None = None
        self._reads: LogReads | None = None
        self._promoter: Promoter | None = None
        self._door: Door | None = None
        self._hints: LogHints | None = None
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def promoter(self) -> Promoter | None:
        return self._promoter

    @property
    def ssd_ok(self) -> bool:
        """Whether there is a log and it takes writes."""
        return self._writer is not None and self._writer.state == "ok"

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Raises ``HolderError``, ``SegmentError`` or ``OSError``."""
        if self.address.host in ("", "0.0.0.0", "::"):
            raise HolderError(
                f"--listen {self.address}: clients are told this address; give one that they can reach"
            )
        if (self.config.tls is None) != (self.config.master_tls is None):
            raise HolderError(
                "clients use TLS for the master and its holders or for neither: give --master forebay+tls://... and "
                "--tls-cert and --tls-key, or none of them"
            )
        loop = self._loop = asyncio.get_running_loop()
        self.name = uuid.uuid4().hex
        if self.config.ssd is not None:
            await loop.run_in_executor(None, self._open_log, self.config.ssd)
        self.segment = await loop.run_in_executor(None, Segment, self.config.dram)
        self.memory = Memory(self.segment, self._noticed)
        self._link = MasterLink(
            self.config.master, self._secrets.of(auth.HOLDER_TENANT), self, self.config.master_tls
        )
        if self.log is not None:
            self._writer = LogWriter(self.log, self.config.fsync, self._report)
            self._reads = LogReads(self.log, self._damaged)
            self._promoter = Promoter(self.memory, self.segment, self._reads, self._link, self)
        self.data = DataServer(self, self._reads, self._promoter, self._secrets)
        self._listener = await Listener.open(
            self.address, self._accept, self._connections, self.config.tls
        )
        self.address = Address(self.address.host, self._listener.port)
        if self._beside is not None and self._hints is not None:
            self._beside.watch(self.name, self.instance, self._foresee)
        if self._secrets.tenants <= 1:
            self._door = Door(
                self.data, self.segment, self._secrets, self._connections, self._hints
            )
        self._tasks = [
            asyncio.create_task(self._link.run()),
            asyncio.create_task(self._beat()),
            asyncio.create_task(watch(self._connections)),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """They run for as long as the holder does: one that fails would leave a holder that only looks alive."""
        if not task.cancelled() and task.exception() is not None:
            self.master_lost(f"internal error: {task.exception()!r}")
            self._loop.call_exception_handler(
                {"message": "a holder's task failed", "exception": task.exception(), "task": task}
            )
            self.failed.set()

    async def stop(self) -> None:
        """Stop serving, write what the log has not got yet (at most ``DRAIN_S``), let everything go."""
        self.serving = False
        self._vouch()
        if self._beside is not None:
            self._beside.unwatch(self.name)
        if self._door is not None:
            await self._door.close()
        if self._listener is not None:
            await self._listener.close()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for connection in list(self._connections.values()):
            connection.abort()
        if self._promoter is not None:
            await self._promoter.close()
        loop = asyncio.get_running_loop()
        if self._writer is not None:
            await loop.run_in_executor(None, self._writer.close, DRAIN_S)
        if self._reads is not None:
            await loop.run_in_executor(None, self._reads.close)
        if self.log is not None:
            self.log.close()
        if self._hints is not None:
            self._hints.close()
        if self._lock is not None:
            self._lock.release()
        await asyncio.sleep(0)  # aborted connections let go of the segment
        with contextlib.suppress(
            BufferError
        ):  # a transport may still hold a view; the memory goes with it
            self.segment.close()

    def _open_log(self, directory: Path) -> None:
        try:
            self._lock = Lock(directory)
        except BlockingIOError as error:
            raise HolderError(
                f"SSD directory {directory} is in use by another holder; give each its own"
            ) from error
        self.name, salt = self._names_of(directory)
        with contextlib.suppress(FileNotFoundError):
            self.peers = (directory / "peers").read_text().split()
        files = self._files or Directory(directory)
        self.log = SsdLog(files, self.config.ssd_bytes, salt)
        if self._secrets.tenants <= 1 and isinstance(files, Directory) and files.direct:
            self._hints = LogHints(directory, self.config.ssd_bytes, self._lock.mark)
            self.log.tell(self._hints)

    def _names_of(self, directory: Path) -> tuple[str, int]:
        """The holder's name and the log's salt, made with the log and kept with it. An empty file is of a start that was cut off before
        anybody was told."""
        file = directory / "name"
        known = file.read_text().splitlines() if file.exists() else []
        if not known and not any(directory.glob("*.log")):
            made = random_bytes.randbits(32)
            write_whole(file, f"{self.name}\n{made:08x}\n")
            return self.name, made
        try:
            name, salt = known[0].strip(), salt_of(known)
        except (IndexError, ValueError):
            name, salt = "", 0
        if not _NAME.fullmatch(name):
            raise HolderError(
                f"{file} holds no name (1 to 64 printable characters) of a log: restore it, or empty the whole directory"
            )
        return name, salt

    def _accept(self) -> Connection:
        self._numbers += 1
        return Connection(self.data, self._numbers, self._connections)

    async def _beat(self) -> None:
        while True:
            now = time.monotonic()
            self._check_stood_still(now)
            self._beaten = now
            self._save_peers()
            used = self.log.used_bytes if self.log is not None else 0
            state = self._writer.state if self._writer is not None else "none"
            beat = Beat(
                used,
                state[:MAX_LINE_CHARS],
                state == "ok",
                self.data.unasked,
                self.data.unasked_bytes,
            )
            if self._link.send(beat):
                self.data.unasked = self.data.unasked_bytes = 0
            await asyncio.sleep(min(BEAT_S, self.lease_s / 4))

    # ------------------------------------------------------------------------------------------ Keeper

    def awake(self, now: float) -> bool:
        self._check_stood_still(now)
        return self.serving

    def waits_for_log(self) -> bool:
        return self.log is not None and self.config.fsync is Fsync.ALWAYS

    def written(self, entry: Entry, done: Receipt | None) -> None:
        if self._writer is None:
            return
        if done is not None and id(entry) in done.missing:
            self._receipts[id(entry)] = done
        entry.logging = True
        self._writer.submit(Append(entry, self.segment.data(entry.offset, entry.length)))

    def _noticed(self, entry: Entry) -> None:
        self._show_or_hide(entry.tenant, entry.key)

    def _show_or_hide(self, tenant: str, key: bytes) -> None:
        """``log.hints`` tells of what is in the log, not in memory, and not to be buried; beside the master, of what that knows to be
        there: a put that was given up, or an object that it has let go unlogged, may have got into the log since."""
        if self.log is None:
            return
        dying = any((tenant, key) in places for places in self._foreseen.values())
        if dying or any(other.live for other in self.memory.of(tenant, key)):
            self.log.hide(tenant, key)
        elif self._beside is None:
            self.log.show(tenant, key)
        elif (generation := self._beside.logged_at(self.name, tenant, key)) is not None:
            self.log.show(tenant, key, generation)
        else:
            self.log.hide(tenant, key)

    # ------------------------------------------------------------------------------------------ our word for what the log shows

    def _foresee(
        self, usable: bool, session: int, told: Sequence[tuple[int, Sequence[Grave]]]
    ) -> None:
        """The master beside us has taken a step that nobody else can have noticed yet (`MasterServer.watch`): the hints show nothing of
        what it lets go."""
        if session != self._foreseen_session:
            known = {message.op for message in self._burying}
            self._foreseen = {
                op: places for op, places in self._foreseen.items() if op in known
            }  # others will never come
            self._foreseen_session = session
        for op, graves in told:
            places = self._foreseen[op] = {
                (grave.tenant, grave.key) for grave in graves if not grave.behalf
            }
            for place in places:
                self._show_or_hide(*place)
        if usable != self._is_usable:
            self._is_usable = usable
            self._vouch()

    def _vouch(self) -> None:
        """Give our word for the hints while we serve, the master beside us says so, and no removal of the past waits to be logged."""
        if self._hints is not None:
            self._hints.vouch(self.serving and self._is_usable and self._is_level)

    def _buried(self, op: int) -> None:
        for place in self._foreseen.pop(op, ()):
            self._show_or_hide(*place)  # an older value may live on, where a put was given up

    def length_of(self, tenant: str, key: bytes) -> int | None:
        return self.log.newest_length(tenant, key) if self.log is not None else None

    def _check_stood_still(self, now: float) -> None:
        """Rule S6: if leases may have run out while we were not looking, we register again before we serve."""
        if self.serving and now - self._beaten > self.lease_s:
            self.master_lost("stood still for longer than a lease")
            self._link.reconnect()

    # ------------------------------------------------------------------------------------------ LinkOwner

    def register(self) -> Register:
        highest = max((entry.stamp for entry in self.memory), default=0)
        return Register(
            self.name,
            self.instance,
            self.address.host,
            self.address.port,
            self._door.name if self._door is not None else "",
            this_machine(),
            self.segment.capacity,
            self.config.ssd_bytes if self.log is not None else 0,
            max(highest, self.log.highest_generation if self.log is not None else 0),
            self.peers,
        )

    def registered(self, message: Registered) -> None:
        self.token_key, self.lease_s = message.token_key, message.lease_s

    def inventory(self) -> tuple[list[HeldMemory], list[HeldSsd], list[Grave]]:
        memory = [
            HeldMemory(
                one.tenant, one.key, one.generation, one.length, one.offset, one.stamp, one.buried
            )
            for one in self.memory
            if one.live
        ]
        if self.log is None:
            return memory, [], list(self._kept_graves)
        return (
            memory,
            not_being_buried(self.log.entries(), self._burying),
            list(self.log.kept_graves),
        )

    def from_master(self, message: MasterToHolder) -> None:
        match message:
            case Retire(ranges):
                for offset, stamp in ranges:
                    self.memory.retire(offset, stamp)
            case Bury():
                self._bury(message)
            case Forget(behalf):
                self._kept_graves = {
                    grave: None for grave in self._kept_graves if grave.behalf != behalf
                }
                if self._writer is not None:
                    self._writer.submit(ForgetJob(behalf))
            case Promote(task, tenant, key):
                if self._promoter is not None:
                    self._promoter.run(task, tenant, key)
            case Peers(names):
                self._remember_peers(names)
            case Serving():
                self._beaten = time.monotonic()
                self.serving, self.why_not = True, ""
                self._is_level = not self._burying
                self._vouch()
                if self._writer is not None and self._writer.state == "ok":
                    self._log_what_is_missing()

    def master_lost(self, why: str) -> None:
        """Neither reads nor writes are served before the next registration: rooms that were given before it count no more."""
        self.serving, self.why_not, self._is_level = False, why, False
        self._vouch()
        self.token_key = random_bytes.token_bytes(32)

    def _remember_peers(self, names: list[str]) -> None:
        """Before we serve: whoever was absent when a key was removed must be told, even by a master that never saw it."""
        known = sorted(
            [name for name in dict.fromkeys((*names, *self.peers)) if name != self.name][:MAX_PEERS]
        )
        if known == self.peers:
            return
        self.peers = known
        self._peers_unsaved = self.config.ssd is not None
        self._save_peers()

    def _save_peers(self) -> None:
        """What a full disk refuses is tried again with every beat."""
        if self._peers_unsaved and self.config.ssd is not None:
            with contextlib.suppress(OSError):
                write_whole(self.config.ssd / "peers", "\n".join(self.peers) + "\n")
                self._peers_unsaved = False

    def _bury(self, message: Bury) -> None:
        for grave in message.graves:
            if not grave.behalf:
                for entry in self.memory.of(grave.tenant, grave.key):
                    if covers(grave, entry.generation):
                        entry.buried = True
        if self._writer is not None:
            self._burying.append(message)
            self._writer.submit(BuryJob(message.op, message.graves))
            return
        self._kept_graves |= {grave: None for grave in message.graves if grave.behalf}
        if message.op:
            self._link.send(Buried(message.op))

    # ------------------------------------------------------------------------------------------ reports of the log

    def _report(self, report: Report) -> None:
        """Called in the writer's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending
            self._loop.call_soon_threadsafe(self._reported, report)

    def _reported(self, report: Report) -> None:
        for entries, logged in ((report.logged, True), (report.failed, False)):
            for entry in entries:
                entry.logging = False
                receipt = self._receipts.pop(id(entry), None)
                if receipt is not None:
                    receipt.settle(entry, logged)
        hopeless = (
            [one for one in report.failed if one.live and not one.buried]
            if report.state == "ok"
            else []
        )
        lost = report.lost + [
            HeldSsd(one.tenant, one.key, one.generation, one.length) for one in hopeless
        ]
        held = [HeldSsd(one.tenant, one.key, one.generation, one.length) for one in report.logged]
        for some in batched(held, MAX_ENTRIES):
            self._link.send(Persisted(some))
        for some in batched(lost, MAX_ENTRIES):
            self._link.send(Dropped(some))
        for op in report.buried:
            self._burying.remove(next(message for message in self._burying if message.op == op))
            self._buried(op)
            self._link.send(Buried(op))
        if report.buried and self.serving and not self._burying:
            self._is_level = True
            self._vouch()
        if report.state == "ok" and self._was_broken:
            self._log_what_is_missing()
        self._was_broken = report.state != "ok"

    def _damaged(self, held: HeldSsd) -> None:
        """A read found a record bad. If memory still has the object it is logged anew. Else it must not be there again after a restart,
        if the next read does not find it bad (EIO may pass): the key may have been removed or replaced meanwhile, and nobody would say
        so here."""
        self._link.send(Dropped([held]))
        here = [one for one in self.memory.of(held.tenant, held.key) if one.live and not one.buried]
        alive = next((one for one in here if one.generation == held.generation), None)
        if alive is not None:
            self.written(alive, None)
        elif self._writer is not None:
            self._writer.submit(BuryJob(0, [Grave(held.tenant, held.key, held.generation, True)]))

    def _log_what_is_missing(self) -> None:
        """What is in memory alone and on its way to no log: it came while the disk failed, or its file was evicted before the master
        restarted, which now takes it for not yet durable."""
        assert self.log is not None
        for entry in self.memory:
            logged = entry.logging or self.log.has(entry.tenant, entry.key, entry.generation)
            if entry.live and not entry.buried and not logged:
                self.written(entry, None)


def not_being_buried(held: list[HeldSsd], burying: list[Bury]) -> list[HeldSsd]:
    """Records without those that will be gone as soon as the log has the removals that it was given: a master that came meanwhile must
    not take them for alive, as it would never hear of their end."""
    graves: dict[tuple[str, bytes], list[Grave]] = {}
    for message in burying:
        for grave in message.graves:
            if not grave.behalf:
                graves.setdefault((grave.tenant, grave.key), []).append(grave)
    if not graves:
        return held
    return [
        one
        for one in held
        if not any(covers(grave, one.generation) for grave in graves.get((one.tenant, one.key), ()))
    ]
