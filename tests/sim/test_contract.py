"""The simulated grid does what a real one does: one script against two processes and against fake ranks, effects and words compared.

Both are driven in lock step: all that is outstanding is acknowledged before the planner's next step, rank by rank, so that nothing
depends on time. The real grid's tokens are told to the fake one, so plans must be equal to the last byte, digests included.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import zmq

from forebay.core.messages import (
    Abort,
    Allocate,
    Cancel,
    FetchProgress,
    Flush,
    Heartbeat,
    Loaded,
    Plan,
    PlanDone,
    Ready,
    Store,
    StoreDone,
    Submit,
    Ticket,
    TransferDone,
    decode_from_worker,
    encode,
    pack_tokens,
)
from forebay.core.planner import Effects, Event, GridReady, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.sampling import SamplingParams
from forebay.core.transfers.lookup import QueryDone
from forebay.core.transfers.policy import FetchPolicy
from forebay.sim.fake_store import FakeStore
from forebay.sim.grid import Acknowledgement, FakeGrid, Reports, Timing
from forebay.sim.heap import EventHeap
from forebay.sim.model import stamps
from forebay.sim.rank import Truth
from tests.runtime.scripted_planner import (
    DEADLINE_S,
    EPOCH,
    PAGE_SIZE,
    PAGES,
    START_DEADLINE_S,
    ScriptedPlanner,
)
from tests.runtime.tiny_llama import make

HOST_PAGES = 32
HOST_BYTES = 1 << 20
LONG = list(range(1, 22))  # five full pages and one token
Order = Ticket | Cancel | Store


class Grid(Protocol):
    def send(self, plan: Plan) -> None: ...
    def order(self, order: Order) -> None: ...
    def next(self) -> Acknowledgement: ...


class RealGrid:
    """Two processes of a tiny model over a directory as store."""

    def __init__(self, model: Path, store: Path) -> None:
        self._ranks = ScriptedPlanner(
            model, pp=2, host_memory=HOST_BYTES, store_url=f"file:{store}"
        )

    def start(self) -> None:
        self._ranks.spawn()
        loaded: dict[int, Loaded] = {}
        while len(loaded) < 2:
            message = self._receive(START_DEADLINE_S)
            if isinstance(message, Loaded):
                loaded[message.rank] = message
        assert min(message.host_pages for message in loaded.values()) >= HOST_PAGES
        self._ranks.broadcast(Allocate(EPOCH, PAGES, loaded[0].rendezvous, HOST_PAGES))
        ready = 0
        while ready < 2:
            ready += isinstance(self._receive(START_DEADLINE_S), Ready)

    def end(self) -> None:
        self._ranks.close()

    def send(self, plan: Plan) -> None:
        self._ranks.broadcast(plan)

    def order(self, order: Order) -> None:
        for boot in self._ranks._boots:
            self._ranks._sockets["io"].send_multipart([boot.io_identity, encode(order)])

    def next(self) -> Acknowledgement:
        while True:
            message = self._receive(DEADLINE_S)
            if isinstance(message, PlanDone | TransferDone | StoreDone | FetchProgress):
                return message
            assert isinstance(message, Heartbeat), message

    def _receive(self, seconds: float) -> object:
        poller = zmq.Poller()
        for socket in self._ranks._sockets.values():
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for socket, _ in poller.poll(1000):
                return decode_from_worker(socket.recv_multipart()[1])
        raise TimeoutError("a rank says nothing")


class Told(Truth):
    """The real grid's tokens, by request: ``texts`` are prompt and output."""

    def __init__(self, texts: dict[str, list[int]]) -> None:
        super().__init__()
        self._texts = texts
        for request_id, tokens in texts.items():
            self.add(request_id, stamps(b"", tokens), 0)

    def token_after(self, request_id: str, position: int) -> int:
        return self._texts[request_id][position + 1]


class SimulatedGrid:
    def __init__(self, texts: dict[str, list[int]]) -> None:
        self._heap = EventHeap()
        self._said: list[Acknowledgement] = []
        randomness = random.Random(0)
        shape, pages, timing = (
            (2, 1),
            (PAGES, HOST_PAGES, PAGE_SIZE),
            Timing(0.01, 0.02, 0.001, 0.002, fetch_high=0.01),
        )
        store, reports = FakeStore(randomness), Reports(self._said.append, lambda poison: None)
        self._grid = FakeGrid(
            self._heap, randomness, timing, shape, pages, EPOCH, Told(texts), store, reports
        )

    def send(self, plan: Plan) -> None:
        self._grid.send(plan)

    def order(self, order: Order) -> None:
        self._grid.order(order)

    def next(self) -> Acknowledgement:
        while True:
            while not self._said:
                assert len(self._heap), "nothing more will be said"
                self._heap.run_next()
            message = self._said.pop(0)
            if not isinstance(message, Heartbeat):
                return message


class Driver:
    """``trace``: everything that the planner ordered and the ranks answered, in order."""

    def __init__(self, grid: Grid) -> None:
        config = PlannerConfig(
            pp=2, page_size=PAGE_SIZE, chunk_size=8, max_context=128, max_running=4, max_waiting=8, has_store=True,
            fetch_policy=FetchPolicy.WAIT, fetch_threshold=8, load_back_threshold=0,
        )  # fmt: skip
        self.planner = Planner(config)
        self.planner.epoch = EPOCH
        self.trace: list[object] = []
        self.texts: dict[str, list[int]] = {}
        self._grid = grid
        self._owed: set[tuple[type, int, int]] = set()  # (what, rank, number)
        self._stored: set[bytes] = set()
        self._storing: dict[int, Store] = {}
        self.step(GridReady(EPOCH, PAGES, 0.001, HOST_PAGES))

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.texts[request_id] = list(prompt)
        params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True, temperature=0.0)
        self.step(Submit(request_id, pack_tokens(prompt), params))

    def settle(self) -> None:
        """Until nothing is outstanding, round by round."""
        while self._owed:
            heard: list[Acknowledgement] = []
            while self._owed:
                message = self._grid.next()
                if isinstance(message, FetchProgress) and not message.final:
                    continue  # how often progress is told is each side's own affair
                number = message.number if isinstance(message, PlanDone) else message.transfer  # type: ignore[union-attr]
                self._owed.remove((type(message), message.rank, number))
                heard.append(message)
            heard.sort(
                key=lambda message: (
                    type(message).__name__,
                    getattr(message, "number", 0),
                    message.rank,
                )
            )
            self.trace += [_plain(message) for message in heard]
            self.step(*heard)

    def step(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, StoreDone):
                self._note_stored(event)
        effects = self.planner.step(0.0, events)
        while True:
            self._carry_out(effects)
            answers = [
                QueryDone(query.number, self._found(query.hashes)) for query in effects.queries
            ]
            if effects.plan is None and not answers:
                return
            effects = self.planner.step(0.0, answers)

    def _carry_out(self, effects: Effects) -> None:
        assert effects.restart is None, effects.restart
        if effects.plan is not None:
            self.trace.append(effects.plan)
            self._grid.send(effects.plan)
            self._owe(PlanDone, effects.plan.number)
            if effects.plan.backup is not None:
                self._owe(TransferDone, effects.plan.backup.transfer)
        for order in effects.orders:
            assert isinstance(order, Ticket | Cancel | Store)
            self.trace.append(order)
            self._grid.order(order)
            if isinstance(order, Store):
                self._storing[order.transfer] = order
            if not isinstance(order, Cancel):
                self._owe(StoreDone if isinstance(order, Store) else FetchProgress, order.transfer)
        for output in effects.outputs:
            self.trace.append(
                (
                    output.request_id,
                    output.tokens,
                    output.finish,
                    output.usage and output.usage.cached_store,
                )
            )
            self.texts[output.request_id] += output.tokens

    def _owe(self, what: type, number: int) -> None:
        self._owed |= {(what, rank, number) for rank in range(2)}

    def _note_stored(self, done: StoreDone) -> None:
        pages = self._storing[done.transfer].pages
        self._stored |= {
            page.hash for page, stored in zip(pages, done.stored, strict=True) if stored
        }

    def _found(self, hashes: tuple[bytes, ...]) -> int:
        return next(
            (index for index, hash in enumerate(hashes) if hash not in self._stored), len(hashes)
        )


def _plain(message: Acknowledgement) -> tuple[object, ...]:
    """What a word says, without how long it took or how likely a token was."""
    match message:
        case PlanDone(_, rank, number, samples):
            return ("done", rank, number, tuple((sample.slot, sample.token) for sample in samples))
        case TransferDone(_, rank, transfer, pages):
            return ("saved", rank, transfer, pages)
        case StoreDone(_, rank, transfer, stored):
            return ("stored", rank, transfer, stored)
        case FetchProgress(_, rank, transfer, pages, final):
            return ("fetched", rank, transfer, pages, final)
    raise AssertionError(message)


def play(driver: Driver) -> None:
    """Cold, a hit on the device, from the host, from the store, two at once, and an abort with plans in flight."""
    driver.submit("cold", LONG, 3)
    driver.settle()
    driver.submit("device", [*LONG, 30], 2)
    driver.settle()
    driver.step(Flush(1, ("device",), 0.0))
    driver.submit("host", [*LONG, 31], 2)
    driver.settle()
    driver.step(Flush(2, ("device", "host"), 0.0))
    driver.submit("store", [*LONG, 32], 2)
    driver.settle()
    driver.submit("left", list(range(40, 70)), 4)
    driver.submit("right", [*LONG[:8], *range(70, 80)], 4)
    driver.step(Abort("left"))
    driver.settle()


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("contract")
    grid = RealGrid(make(folder / "model"), folder / "store")
    try:
        grid.start()
        driver = Driver(grid)
        play(driver)
        yield driver
    finally:
        grid.end()


def test_a_real_grid_and_the_simulated_one_do_the_same(real: Driver) -> None:
    simulated = Driver(SimulatedGrid(real.texts))
    play(simulated)
    for number, (wanted, got) in enumerate(zip(real.trace, simulated.trace, strict=False)):
        assert wanted == got, f"they part at {number} of {len(real.trace)}"
    assert len(real.trace) == len(simulated.trace)


def test_the_script_goes_through_every_tier(real: Driver) -> None:
    plans = [entry for entry in real.trace if isinstance(entry, Plan)]
    assert any(plan.loads for plan in plans) and any(plan.backup for plan in plans)
    assert any(isinstance(entry, Ticket) for entry in real.trace) and any(
        isinstance(entry, Store) for entry in real.trace
    )
    assert any(
        entry[0] == "store" and entry[3]
        for entry in real.trace
        if isinstance(entry, tuple) and entry[0] in real.texts
    )
