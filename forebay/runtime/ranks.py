"""The processes of one grid, as the planner sees them: started, joined, watched, ended.

        spawn --Hello--> loading --Loaded from all, model named--> Allocate to all --Ready from all--> GridReady
          '---------'---------'----- death, Fault, or silence ------------------------> GridLost

Every rank is a child of the planner's process and ends with it. A rank's death shows at once
(`runtime.child_end`).
"""

import contextlib
import select
import signal
import subprocess
import time
from dataclasses import dataclass

import msgspec
import zmq

from forebay import machine
from forebay.core.messages import (
    Allocate,
    Fault,
    FetchProgress,
    FromWorker,
    Heartbeat,
    Hello,
    Loaded,
    PlanDone,
    Ready,
    StagedTaken,
    Stop,
    StoreDone,
    ToWorkerIo,
    TransferDone,
    encode,
)
from forebay.core.planner import Event, GridLost, GridReady
from forebay.runtime.boot import PlannerBoot, WorkerBoot, new_identity
from forebay.runtime.child_end import ChildEnd
from forebay.runtime.spawn import is_stopped, spawn_worker
from forebay.settings import format_size

HELLO_S = 120.0  # an interpreter that imports torch from a cold disk
START_SILENCE_S = 60.0  # loading may keep a rank from its heartbeat for a while
STOPPED_S = 5.0  # nothing that starts has a reason to stand still
END_S = 3.0
DEATH_S = 0.2
EXIT_FAULT = 1  # `runtime.worker_loop` ends so after it has said Fault
# Signals that a process earns by what it does itself; SIGKILL comes from outside.
CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
FIRST_RANK_RING = 2  # `runtime.boot.ring_names`


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    end: ChildEnd
    plan_identity: bytes
    io_identity: bytes
    heard_at: float
    stopped_at: float | None = None
    ended_at: float | None = None
    said_hello: bool = False
    loaded: Loaded | None = None
    ready: Ready | None = None


@dataclass(frozen=True, slots=True)
class Endpoints:
    plan: str
    io: str


class Ranks:
    """All ranks of one epoch. ``take`` folds what they say into planner events."""

    def __init__(
        self,
        boot: PlannerBoot,
        worker: WorkerBoot,
        endpoints: Endpoints,
        epoch: int,
        namespace: bytes | None,
        now: float,
    ) -> None:
        """``worker``: what all ranks are told; epoch, rank, endpoints and identities are filled in
        here. ``namespace``: as in `Allocate`, None while it is not known."""
        self.epoch = epoch
        self._namespace = namespace
        self._max_pages = -(-boot.max_context // worker.page_size) * worker.max_running
        self._ranks: list[_Rank] = []
        self._started = False
        self._kills = machine.out_of_memory_kills()
        for rank in range(worker.pp * worker.tp):
            plan_identity, io_identity = new_identity(), new_identity()
            own = _for_rank(worker, rank, epoch, endpoints, plan_identity, io_identity)
            process = spawn_worker(
                msgspec.structs.replace(own, ring_fd=boot.ring_fds[FIRST_RANK_RING + rank])
            )
            self._ranks.append(
                _Rank(process, ChildEnd(process.pid), plan_identity, io_identity, now)
            )
        self._by_identity = {rank.plan_identity: index for index, rank in enumerate(self._ranks)}
        self._by_identity |= {rank.io_identity: index for index, rank in enumerate(self._ranks)}

    @property
    def end_fds(self) -> list[int]:
        """Each readable once its rank has ended."""
        return [rank.end.fileno() for rank in self._ranks]

    @property
    def without(self) -> list[str]:
        """What ranks do without, each line once."""
        said = [rank.loaded.without for rank in self._ranks if rank.loaded is not None]
        return [*dict.fromkeys(filter(None, said))]

    def rank_of(self, identity: bytes) -> int | None:
        """Whose channel this is; None for a stranger or a rank of an earlier epoch."""
        return self._by_identity.get(identity)

    def take(
        self, now: float, rank: int, message: FromWorker, plans: "zmq.Socket[bytes]"
    ) -> Event | None:
        """What a rank's message means to the planner, if anything. Other epochs and borrowed rank numbers are dropped."""
        if message.epoch != self.epoch or message.rank != rank:
            return None
        member = self._ranks[rank]
        member.heard_at = now
        match message:
            case Hello():
                member.said_hello = True
            case Loaded():
                member.loaded = message
                return self._all_loaded(plans)
            case Ready():
                member.ready = message
                return self._all_ready()
            case (
                PlanDone()
                | TransferDone()
                | FetchProgress()
                | StagedTaken()
                | StoreDone()
                | Heartbeat()
            ):
                return message if self._started else None
            case Fault():
                return self._fault(rank, message)
        return None

    def watch(self, now: float) -> GridLost | None:
        """A rank that has died; before the grid stands, also one that says nothing (afterwards the planner watches that)."""
        for index, rank in enumerate(self._ranks):
            code = rank.process.poll()
            if code is not None:
                rank.ended_at = rank.ended_at or now
                if (
                    code != EXIT_FAULT or now - rank.ended_at >= DEATH_S
                ):  # a Fault that it has sent may still be on its way
                    return self._ended(index, rank, code)
            elif not self._started and (late := self._late_start(now, rank)):
                return GridLost(self.epoch, f"rank {index} (process {rank.process.pid}) {late}")
        return None

    def _ended(self, index: int, rank: _Rank, code: int) -> GridLost:
        text = f"rank {index} (process {rank.process.pid}) {_ending(code)}"
        if -code == signal.SIGKILL and machine.out_of_memory_kills() > self._kills:
            memory = machine.memory()
            text += (
                f", since {memory.where}, {format_size(memory.limit)}, was used up; "
                "give it more, or less with --host-memory and --device-memory"
            )
        return GridLost(self.epoch, text, faulted=-code in CRASHES)

    def _late_start(self, now: float, rank: _Rank) -> str:
        """Why a rank that has yet to start is given up; empty if it is not."""
        limit = START_SILENCE_S if rank.said_hello else HELLO_S
        if now - rank.heard_at > limit:
            return f"has been silent for {limit:.0f} s while it started"
        if not is_stopped(rank.process.pid):
            rank.stopped_at = None
            return ""
        rank.stopped_at = rank.stopped_at or now
        return (
            f"has been stopped for {STOPPED_S:.0f} s while it started"
            if now - rank.stopped_at > STOPPED_S
            else ""
        )

    def send(self, frame: bytes, plans: "zmq.Socket[bytes]") -> None:
        """To every rank, in rank order. Raises ``zmq.ZMQError`` if a rank is gone or does not drain its channel."""
        for rank in self._ranks:
            plans.send_multipart((rank.plan_identity, frame), zmq.NOBLOCK)

    def order(self, order: ToWorkerIo, io: "zmq.Socket[bytes]") -> None:
        """On the ticket channel, to the ranks that the order names.

        Raises ``zmq.ZMQError`` if a rank is gone or does not drain its channel.
        """
        frame = encode(order)
        for number in order.ranks or range(len(self._ranks)):
            io.send_multipart((self._ranks[number].io_identity, frame), zmq.NOBLOCK)

    def end(self, reason: str, plans: "zmq.Socket[bytes]", grace_s: float) -> None:
        """End all processes: in good order if they do within ``grace_s``, else by force. Returns when none is left."""
        if self._started:  # a rank that loads reads no Stop
            deadline = time.monotonic() + grace_s
            for rank in self._ranks:
                with contextlib.suppress(zmq.ZMQError):
                    plans.send_multipart(
                        (rank.plan_identity, encode(Stop(self.epoch, reason))), zmq.NOBLOCK
                    )
            for rank in self._ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(max(deadline - time.monotonic(), 0))
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            assert rank.process.stdin is not None
            with contextlib.suppress(OSError):
                rank.process.stdin.close()
            rank.end.close()
        self._ranks.clear()
        self._by_identity.clear()

    def name_model(self, namespace: bytes, plans: "zmq.Socket[bytes]") -> GridLost | None:
        """What pages are named by is known now: ranks that have loaded may go on."""
        self._namespace = namespace
        return self._all_loaded(plans)

    def _all_loaded(self, plans: "zmq.Socket[bytes]") -> GridLost | None:
        """Once all have loaded and the model has a name."""
        loaded = [rank.loaded for rank in self._ranks]
        if self._namespace is None or any(message is None for message in loaded):
            return None
        affordable = min(message.device_pages for message in loaded if message is not None)
        rendezvous = next(message.rendezvous for message in loaded if message is not None)
        try:
            self.send(
                encode(
                    Allocate(
                        self.epoch,
                        min(affordable, self._max_pages),
                        rendezvous,
                        self._host_pages(),
                        self._namespace,
                    )
                ),
                plans,
            )
        except zmq.ZMQError as error:
            return GridLost(self.epoch, f"a rank left while the grid started: {error}")
        return None

    def _all_ready(self) -> GridReady | None:
        ready = [rank.ready for rank in self._ranks]
        if any(message is None for message in ready):
            return None
        self._started = True
        pages = min(rank.loaded.device_pages for rank in self._ranks if rank.loaded is not None)
        seconds = sum(message.s_per_token for message in ready if message is not None)
        return GridReady(self.epoch, min(pages, self._max_pages), seconds, self._host_pages())

    def _host_pages(self) -> int:
        return min(rank.loaded.host_pages for rank in self._ranks if rank.loaded is not None)

    def _fault(self, rank: int, fault: Fault) -> GridLost | None:
        """What a rank complains of, unless a neighbour's death explains it: its sockets close a moment before it counts as dead.

        None: another rank has ended by an error of its own, which it has said or `watch` will.
        """
        if not fault.hopeless:
            select.select(self.end_fds, (), (), DEATH_S)
        for index, other in enumerate(self._ranks):
            code = other.process.poll()
            if code is not None and code < 0:
                return self._ended(index, other, code)
            if code is not None and fault.neighbour and index != rank:
                return None
        return GridLost(self.epoch, f"rank {rank}: {fault.text}", fault.hopeless, faulted=True)


def _for_rank(
    worker: WorkerBoot,
    rank: int,
    epoch: int,
    endpoints: Endpoints,
    plan_identity: bytes,
    io_identity: bytes,
) -> WorkerBoot:
    return msgspec.structs.replace(
        worker,
        epoch=epoch,
        rank=rank,
        plan_endpoint=endpoints.plan,
        plan_identity=plan_identity,
        io_endpoint=endpoints.io,
        io_identity=io_identity,
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
