"""The frontend's end of the planner's channel.

        submit() --Submit--> planner --Outputs--> Call.take()      one Call per API request, however many sequences it has
        Call.close() --Abort-->

One DEALER socket, read straight from the event loop's reader callback: no task, future or queue hop per frame. Planner death
(its process ends, or nothing is heard for `SILENCE_S`) and a grid that failed end every open Call with an error, and `death`
says why in one line.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from forebay.core.messages import (
    Abort,
    CancelFlush,
    FinishReason,
    Flush,
    FlushDone,
    GridState,
    Output,
    Snapshot,
    Submit,
    ToPlanner,
    decode_to_frontend,
    encode,
)
from forebay.core.spans import SpanKind, request_number
from forebay.observe.events import Rings
from forebay.observe.figures import Report, decode_report
from forebay.pages.hashing import TOKEN_BYTES

TICK_S = 0.5
SILENCE_S = 5.0
STALE_S = 2.0
# Until the first snapshot: the planner's interpreter starts and imports.
START_SILENCE_S = 60.0
MAX_UNSENT_FRAMES = 10_000


class PlannerProcess(Protocol):
    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


class Planner(Protocol):
    """What the frontend must know of a started planner (`runtime.launch.PlannerHandle`)."""

    @property
    def endpoint(self) -> str: ...
    @property
    def identity(self) -> bytes: ...
    @property
    def process(self) -> PlannerProcess: ...
    @property
    def max_context(self) -> int: ...
    @property
    def rings(self) -> Rings: ...
    @property
    def flight_dir(self) -> Path | None: ...
    def stop(self, timeout_s: float) -> None: ...


class Observer(Protocol):
    """Is told of all that arrives, for metrics. Times are the monotonic clock's."""

    def on_output(
        self, submitted_at: float, last_token_at: float | None, prompt_tokens: int, output: Output
    ) -> None: ...
    def on_snapshot(self, snapshot: Snapshot, report: Report) -> None: ...


class EngineDown(Exception):
    """The engine takes no requests; the text says why in one line."""


@dataclass(slots=True)
class _Open:
    """A sequence that has not ended. ``prompt_tokens``: 0 for further choices of a prompt, which is counted once."""

    call: "Call"
    prompt_tokens: int
    submitted_at: float
    submitted_ns: int
    tokens: int = 0
    last_token_at: float | None = None


class Call:
    """The sequences of one API request, and their Outputs that wait to be read. Close it, or use it as a context manager.

    What waits is bounded by the sequences' ``max_tokens``: a reader that stops reading stops nothing else.
    """

    def __init__(self, engine: "Engine", submits: Sequence[Submit]) -> None:
        self._engine = engine
        self._pending: deque[Output] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._tokens_left = {submit.request_id: submit.params.max_tokens or 0 for submit in submits}

    async def take(self) -> list[Output]:
        """All Outputs that have come since the last call, at least one; empty once every sequence has ended."""
        while not self._pending and self._tokens_left:
            assert self._waiter is None, "a Call has one reader"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken = list(self._pending)
        self._pending.clear()
        return taken

    def abort(self, request_id: str) -> None:
        """Stop one sequence; nothing more of it will be taken."""
        if self._tokens_left.pop(request_id, None) is not None:
            self._engine._abort(request_id)
            self._pending = deque(
                output for output in self._pending if output.request_id != request_id
            )

    def close(self) -> None:
        """Stop what has not ended. Safe to call again."""
        for request_id in list(self._tokens_left):
            self.abort(request_id)

    def __enter__(self) -> "Call":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _deliver(self, output: Output) -> None:
        left = self._tokens_left.get(output.request_id)
        if left is None:
            return
        if len(output.tokens) > left:
            self._tokens_left.pop(output.request_id)
            self._engine._abort(output.request_id)
            message = "the engine sent more tokens than were asked for"
            output = Output(output.request_id, finish=FinishReason.ERROR, message=message)
        elif output.finish is not None:
            self._tokens_left.pop(output.request_id)
        else:
            self._tokens_left[output.request_id] = left - len(output.tokens)
        self._pending.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Engine:
    """``snapshot``: the planner's last word, None before its first; ``report``: what was measured, as it came beside that.
    ``death``: resolves to one line when the planner is gone.

    Made and used on one event loop.
    """

    def __init__(
        self,
        planner: Planner,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = planner
        self._observer = observer
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[str] = self._loop.create_future()
        self.snapshot: Snapshot | None = None
        self.report = Report()
        self.was_ready = False
        self.planner_lost = False
        """Set before ``death`` when the planner's process is gone or says nothing any more."""
        self._open: dict[str, _Open] = {}
        self._ring = planner.rings.rings["frontend"]
        self._flushes: dict[int, asyncio.Future[FlushDone]] = {}
        self._flush_count = 0
        self._unsent: deque[bytes] = deque()
        self._heard_at = clock()
        self._ticks_silent = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, planner.identity)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, MAX_UNSENT_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # read eagerly; what waits is bounded per Call
        self._socket.connect(planner.endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._closed = False
        self._loop.add_reader(self._fd, self._read)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    # ------------------------------------------------------------------------------------------ requests

    def submit(self, submits: Sequence[Submit], choices: int = 1) -> Call:
        """Send the sequences of one API request, of which every ``choices`` share a prompt.

        Raises ``EngineDown`` if the engine is not, or no longer, there.
        """
        self.check_takes_requests()
        if len(self._unsent) + len(submits) > MAX_UNSENT_FRAMES:
            raise EngineDown("the planner is not taking messages; try again later")
        call = Call(self, submits)
        now = self._clock()
        for number, submit in enumerate(submits):
            assert submit.request_id not in self._open, submit.request_id
            counted = 0 if number % choices else len(submit.prompt) // TOKEN_BYTES
            self._open[submit.request_id] = _Open(call, counted, now, time.monotonic_ns())
            self._send(submit)
        return call

    async def flush(self, tiers: Sequence[str], timeout_s: float) -> FlushDone:
        """Forget cached pages. Raises ``EngineDown``, also if the planner dies meanwhile."""
        self.check_takes_requests()
        self._flush_count += 1
        call = self._flush_count
        done = self._flushes[call] = self._loop.create_future()
        self._send(Flush(call, tuple(tiers), timeout_s))
        try:
            result: FlushDone = await done
        except asyncio.CancelledError:
            self._send(CancelFlush(call))  # while a flush is pending nothing is admitted
            raise
        finally:
            self._flushes.pop(call, None)
        return result

    def check_takes_requests(self) -> None:
        """Raises ``EngineDown`` before the grid is ready for the first time, and once the planner is gone."""
        if self.death.done():
            raise EngineDown(self.death.result())
        if not self.was_ready:
            raise EngineDown("the model is still being loaded; try again later")

    async def wait_room(self, sequences: int, places: int) -> None:
        """Until so many sequences more are at most ``places``. Raises ``EngineDown``.

        For one caller at a time, who submits without waiting in between. The planner reads what is sent in order, so whoever was
        aborted before has no place there any more.
        """
        assert sequences <= places, (sequences, places)
        while len(self._open) + sequences > places:
            await self._change()
        self.check_takes_requests()

    def _abort(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is not None and not self._closed:
            self._send(Abort(request_id))
            self._wake_waiters()

    # ------------------------------------------------------------------------------------------ state

    @property
    def rings(self) -> Rings:
        """The spans of all processes of this server."""
        return self._planner.rings

    @property
    def is_ticking(self) -> bool:
        """Whether the planner was heard within the last `STALE_S`."""
        return (
            self.snapshot is not None
            and not self.death.done()
            and self._clock() - self._heard_at < STALE_S
        )

    async def wait_ready(self) -> None:
        """Until the grid serves. Raises ``EngineDown`` with the reason if it cannot be brought up."""
        while not self.was_ready:
            if self.death.done():
                raise EngineDown(self.death.result())
            await self._change()

    def close(self, reason: str = "the server is shutting down") -> None:
        """End open requests and leave the channel. The planner itself is its owner's to stop."""
        if self._closed:
            return
        self._die(reason)
        self._closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    def _die(self, reason: str) -> None:
        if self.death.done():
            return
        self.death.set_result(reason)
        for request_id, sequence in list(self._open.items()):
            sequence.call._deliver(Output(request_id, finish=FinishReason.ERROR, message=reason))
        self._open.clear()
        for done in self._flushes.values():
            if not done.done():
                done.set_exception(EngineDown(reason))
        self._wake_waiters()

    async def _change(self) -> None:
        """Until the engine's state is another, or a sequence has ended."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._ticks_silent += 1
        try:
            self._read()
        finally:  # whatever is wrong with what it said, a planner that is gone must be noticed
            self._watch_planner()

    def _watch_planner(self) -> None:
        status = self._planner.process.poll()
        # Counted in ticks, not by the clock: when this very process was stopped for a while, that is not the planner's silence.
        allowed_s = START_SILENCE_S if self.snapshot is None else SILENCE_S
        if status is not None:
            self._lose_planner(f"the planner process ended with status {status}")
        elif self._ticks_silent * TICK_S > allowed_s:
            self._lose_planner(f"the planner has not been heard for {allowed_s:.0f} s")

    def _lose_planner(self, reason: str) -> None:
        if not self.death.done():
            self.planner_lost = True
            self._die(reason)

    # ------------------------------------------------------------------------------------------ the channel

    def _send(self, message: ToPlanner) -> None:
        self._unsent.append(encode(message))
        self._write()

    def _write(self) -> None:
        """Send what the socket takes; the rest waits for the next word of the planner, which comes twice a second."""
        before = len(self._unsent)
        while self._unsent:
            try:
                self._socket.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                break
            self._unsent.popleft()
        if len(self._unsent) < before:
            # The socket's file descriptor is edge-triggered and sending may swallow the edge, so look again soon.
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._closed:
            return
        while True:
            try:
                frame, *beside = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._heard_at = self._clock()
            self._ticks_silent = 0
            self._take(frame, beside)
            if self._closed:
                return
        if self._unsent:
            self._write()

    def _take(self, frame: bytes, beside: Sequence[bytes]) -> None:
        try:
            message = decode_to_frontend(frame)
            if beside:
                self.report = decode_report(beside[0])
        except ValueError as error:
            self._die(f"the planner sent what is no message: {error}")
            return
        if isinstance(message, Snapshot):
            self._take_snapshot(message)
        elif isinstance(message, FlushDone):
            done = self._flushes.get(message.call)
            if done is not None and not done.done():
                done.set_result(message)
        else:
            for output in message.outputs:
                self._route(output)

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if self._observer is not None:
            self._observer.on_snapshot(snapshot, self.report)
        if snapshot.state is GridState.READY and not self.was_ready:
            self.was_ready = True
            self._wake_waiters()
        elif snapshot.state is GridState.FAILED:
            self._die(snapshot.detail or "the engine failed")

    def _route(self, output: Output) -> None:
        sequence = self._open.get(output.request_id)
        if sequence is None:  # aborted a moment ago
            return
        if output.finish is not None:
            del self._open[output.request_id]
            self._wake_waiters()
        if self._observer is not None:
            self._observer.on_output(
                sequence.submitted_at, sequence.last_token_at, sequence.prompt_tokens, output
            )
        self._record(sequence, output)
        if output.tokens:
            sequence.last_token_at = self._clock()
        sequence.call._deliver(output)

    def _record(self, sequence: _Open, output: Output) -> None:
        """What a client waits for: the first token, and the last."""
        if output.tokens and not sequence.tokens:
            self._ring.record(
                SpanKind.TTFT, sequence.submitted_ns, request=request_number(output.request_id)
            )
        sequence.tokens += len(output.tokens)
        if output.finish is not None:
            self._ring.record(
                SpanKind.REQUEST,
                sequence.submitted_ns,
                value=sequence.tokens,
                request=request_number(output.request_id),
            )
