"""A planner that does what a test says: real processes, real sockets and messages, its own page tables and digest chain."""

import itertools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import (
    Allocate,
    Fault,
    FromWorker,
    Heartbeat,
    Hello,
    Loaded,
    Opening,
    Piece,
    Plan,
    PlanDone,
    Ready,
    Remap,
    Sample,
    Stop,
    ToWorker,
    decode_from_worker,
    encode,
    pack_tokens,
)
from forebay.core.sampling import SamplingParams
from forebay.observe.events import Rings
from forebay.runtime.boot import WorkerBoot, new_endpoint, new_identity
from forebay.runtime.spawn import spawn_worker
from tests.pace import paced

START_DEADLINE_S = paced(90.0)
DEADLINE_S = paced(30.0)
PAGE_SIZE = 4
PAGES = 128
EPOCH = 7
GREEDY = SamplingParams(temperature=0.0)


class WorkerFault(Exception):
    """A worker said Fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.text)
        self.fault = fault


@dataclass
class Request:
    """``computed``: positions that plans have covered; ``sent``: entries of ``table`` that the workers have."""

    slot: int
    tokens: list[int]
    prompt_tokens: int
    params: SamplingParams = GREEDY
    eos: tuple[int, ...] = ()
    table: list[int] = field(default_factory=list)
    sent: int = 0
    computed: int = 0
    opened: bool = False

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


@dataclass(frozen=True)
class Work:
    """``count`` tokens of a request in one plan; ``write_from`` None: all written."""

    request: Request
    count: int
    write_from: int | None = None


class ScriptedPlanner:
    """Use as a context manager: leaving it sends Stop and checks that every rank ends with status 0."""

    def __init__(self, model: Path, pp: int = 1, tp: int = 1, **overrides: object) -> None:
        self.world = pp * tp
        self.sampling_rank = (pp - 1) * tp
        self.processes: list[subprocess.Popen[bytes]] = []
        self.heartbeats: list[Heartbeat] = []
        self.done: dict[int, dict[int, PlanDone]] = {}
        self.ready: dict[int, Ready] = {}
        self.rings = Rings.create([f"rank {rank}" for rank in range(self.world)])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._endpoints = {purpose: new_endpoint(purpose) for purpose in ("plan", "io")}
        self._sockets = {
            purpose: self._bind(endpoint) for purpose, endpoint in self._endpoints.items()
        }
        self._boots = [self._boot(rank, pp, tp, model, overrides) for rank in range(self.world)]
        self._waiting: list[FromWorker] = []
        self._digest = ZERO
        self._free = list(range(PAGES))
        self._numbers = itertools.count()
        self._samplers: dict[int, list[Request]] = {}

    def __enter__(self) -> "ScriptedPlanner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: object
    ) -> None:
        try:
            if error is None and all(process.poll() is None for process in self.processes):
                self.stop()
                assert [process.wait(DEADLINE_S) for process in self.processes] == [0] * self.world
        finally:
            self.close()

    def spawn(self) -> None:
        self.processes = [spawn_worker(boot) for boot in self._boots]

    def start(self, pages: int = PAGES) -> "ScriptedPlanner":
        """Hello, Loaded, Allocate, Ready of all ranks."""
        self.spawn()
        deadline = time.monotonic() + START_DEADLINE_S
        hello: dict[int, Hello] = {}
        loaded: dict[int, Loaded] = {}
        while len(loaded) < self.world:
            match message := self.receive(deadline):
                case Hello():
                    hello[message.rank] = message
                case Loaded():
                    loaded[message.rank] = message
        assert all(message.device_pages >= PAGES for message in loaded.values())
        assert {rank: message.pid for rank, message in hello.items()} == dict(
            enumerate(p.pid for p in self.processes)
        )
        self.broadcast(Allocate(EPOCH, pages, loaded[0].rendezvous))
        while len(self.ready) < self.world:
            message = self.receive(deadline)
            if isinstance(message, Ready):
                self.ready[message.rank] = message
        return self

    def stop(self) -> None:
        self.broadcast(Stop(EPOCH, "test over"))

    def close(self) -> None:
        self.close_sockets()
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self.rings.close()

    def close_sockets(self) -> None:
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def wait_for_fault(self) -> Fault:
        """The next Fault, whatever else is said before it."""
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self.receive(deadline)
            except WorkerFault as fault:
                return fault.fault

    def request(
        self,
        slot: int,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        shared: Sequence[int] = (),
    ) -> Request:
        """A request whose first pages are ``shared`` ones that hold its prompt's beginning already."""
        computed = min(len(shared) * PAGE_SIZE, len(prompt) - 1)
        return Request(
            slot, list(prompt), len(prompt), params, table=list(shared), computed=computed
        )

    def plan(self, *work: Work, remaps: Sequence[Remap] = (), damage: int | None = None) -> int:
        """Build a plan and send it to every rank, or a damaged one to rank ``damage``. Returns its number."""
        number = next(self._numbers)
        digest = PlanDigest(self._digest, number)
        openings = tuple(self._open(item.request) for item in work if not item.request.opened)
        for remap in remaps:
            digest.remap(remap.slot, remap.index, remap.page)
        pieces = tuple(self._piece(item, digest) for item in work)
        self._digest = digest.value
        self._samplers[number] = [
            item.request for item, piece in zip(work, pieces, strict=True) if piece.sample
        ]
        plan = Plan(EPOCH, number, openings, tuple(remaps), pieces, digest.value)
        for rank in range(self.world):
            self.send(rank, damaged(plan) if rank == damage else plan)
        return number

    def finish(self, number: int) -> tuple[Sample, ...]:
        """Wait until all ranks have done plan ``number``; its samples join their requests' tokens."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.done.get(number, {})) < self.world:
            self.receive(deadline)
        done = self.done.pop(number)
        assert all(not done[rank].samples for rank in done if rank != self.sampling_rank)
        samples = done[self.sampling_rank].samples
        requests = self._samplers.pop(number)
        assert [sample.slot for sample in samples] == [request.slot for request in requests]
        for request, sample in zip(requests, samples, strict=True):
            request.tokens.append(sample.token)
        return samples

    def run(self, *work: Work, remaps: Sequence[Remap] = ()) -> tuple[Sample, ...]:
        return self.finish(self.plan(*work, remaps=remaps))

    def decode(self, steps: int, *requests: Request) -> None:
        for _ in range(steps):
            self.run(*(Work(request, 1) for request in requests))

    def broadcast(self, message: ToWorker) -> None:
        for rank in range(self.world):
            self.send(rank, message)

    def send(self, rank: int, message: ToWorker) -> None:
        self._sockets["plan"].send_multipart([self._boots[rank].plan_identity, encode(message)])

    def receive(self, deadline: float) -> FromWorker:
        """The next message; heartbeats and PlanDone are kept too. Raises ``WorkerFault`` or ``TimeoutError``."""
        poller = zmq.Poller()
        for socket in self._sockets.values():
            poller.register(socket, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                identity, frame, *_ = socket.recv_multipart()
                message = decode_from_worker(frame)
                boot = self._boots[message.rank]
                assert identity == (
                    boot.io_identity if isinstance(message, Heartbeat) else boot.plan_identity
                )
                if isinstance(message, Fault):
                    raise WorkerFault(message)
                if isinstance(message, Heartbeat):
                    self.heartbeats.append(message)
                    return message
                if isinstance(message, PlanDone):
                    self.done.setdefault(message.number, {})[message.rank] = message
                return message
            if time.monotonic() >= deadline:
                raise TimeoutError("no message before the deadline")

    def _open(self, request: Request) -> Opening:
        request.opened = True
        history = (
            pack_tokens(request.tokens[: request.computed]) if request.params.has_penalties else b""
        )
        return Opening(
            request.slot,
            f"r{request.slot}",
            request.params,
            request.eos,
            request.prompt_tokens,
            len(request.output),
            history,
        )

    def _piece(self, work: Work, digest: PlanDigest) -> Piece:
        request = work.request
        start, stop = request.computed, request.computed + work.count
        tokens = pack_tokens(request.tokens[start:stop])
        assert len(tokens) == 4 * work.count
        missing = max(0, -(-stop // PAGE_SIZE) - len(request.table))
        request.table += [self._free.pop(0) for _ in range(missing)]
        appended = tuple(request.table[request.sent :])
        request.sent, request.computed = len(request.table), stop
        write_from = start if work.write_from is None else work.write_from
        sample = stop == len(request.tokens)
        digest.piece(request.slot, start, tokens, appended, len(request.table), write_from, sample)
        return Piece(request.slot, start, tokens, appended, write_from, sample)

    def _boot(
        self, rank: int, pp: int, tp: int, model: Path, overrides: Mapping[str, object]
    ) -> WorkerBoot:
        boot = WorkerBoot(
            epoch=EPOCH,
            rank=rank,
            pp=pp,
            tp=tp,
            model_path=str(model),
            dtype="float32",
            device="cpu",
            threads=1,
            page_size=PAGE_SIZE,
            device_memory=1 << 30,
            max_plan_tokens=64,
            max_running=4,
            max_context=256,
            plan_endpoint=self._endpoints["plan"],
            plan_identity=new_identity(),
            io_endpoint=self._endpoints["io"],
            io_identity=new_identity(),
            parent_pid=os.getpid(),
            ring_fd=self.rings.fd(f"rank {rank}"),
        )
        return msgspec.structs.replace(boot, **overrides)

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(endpoint)
        return socket


def damaged(plan: Plan) -> Plan:
    """The same plan but for one bit of one token, as if it had been hurt on its way."""
    first = plan.pieces[0]
    changed = msgspec.structs.replace(first, tokens=bytes([first.tokens[0] ^ 1]) + first.tokens[1:])
    return msgspec.structs.replace(plan, pieces=(changed, *plan.pieces[1:]))
