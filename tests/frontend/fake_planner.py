"""A planner that speaks the real messages over a real ROUTER socket and says what the test tells it to.

It emits one token per running sequence and turn. `hold()` stops the emitting; `allow(n)` lets n tokens per sequence through.
Everything that a test waits for is a condition with a deadline (`wait_for`).
"""

import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from forebay.core.messages import (
    Abort,
    FinishReason,
    Flush,
    FlushDone,
    GridState,
    Output,
    Outputs,
    Snapshot,
    StoreHealth,
    Submit,
    TierUse,
    TokenLogprobs,
    Usage,
    decode_to_planner,
    encode,
)
from forebay.observe.events import Rings
from forebay.pages.hashing import TOKEN_BYTES
from forebay.runtime.boot import new_endpoint, new_identity, ring_names
from tests.pace import paced

DEADLINE_S = paced(10.0)
SNAPSHOT_TURNS = 20
TURN_MS = 5
Script = Callable[[Submit], Sequence[int]]


@dataclass
class Running:
    submit: Submit
    tokens: Sequence[int]
    sent: int = 0


class FakePlanner:
    """``script`` gives a sequence's tokens; they end with STOP at a token of its `eos` or `stop_token_ids`, else with LENGTH."""

    def __init__(
        self, script: Script, max_context: int, flight_dir: Path = Path("/nowhere")
    ) -> None:
        self.endpoint = new_endpoint("test")
        self.identity = new_identity()
        self.max_context = max_context
        self.rings = Rings.create(ring_names(1))
        self.flight_dir = flight_dir
        # Stands for the planner's process: alive until killed.
        self.process = subprocess.Popen(["sleep", "infinity"], stdin=subprocess.PIPE)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self.reset(script)
        self.state = GridState.READY
        self.detail = ""
        self.mute = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self, script: Script) -> None:
        with self._changed:
            self.script = script
            self.refuse: tuple[FinishReason, str] | None = None
            self.break_after: int | None = None
            self.usage = Usage()
            self.device = TierUse(64, 64)
            self.store = StoreHealth()
            self.busy: tuple[str, ...] = ()
            self.submits: list[Submit] = []
            self.aborts: list[str] = []
            self.flushes: list[Flush] = []
            self._running: dict[str, Running] = {}
            self._allowed: int | None = None

    def hold(self) -> None:
        self._allowed = 0

    def allow(self, tokens: int | None) -> None:
        """Let each sequence come to this many tokens in all; None: to its end."""
        self._allowed = tokens

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_S), "it did not come to pass in time"

    def kill(self) -> None:
        self.process.kill()

    def stop(self, timeout_s: float = 0.0) -> None:
        self._stopping.set()
        self._thread.join()
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.rings.close()

    # ------------------------------------------------------------------------------------------ its own thread

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.endpoint)
        turn = 0
        while not self._stopping.is_set():
            socket.poll(0 if self._can_emit() else TURN_MS)
            self._take_all(socket)
            outputs = self._emit()
            if outputs:
                socket.send_multipart([self.identity, encode(Outputs(tuple(outputs)))])
            if turn % SNAPSHOT_TURNS == 0 and not self.mute:
                socket.send_multipart([self.identity, encode(self._snapshot())])
            turn += 1
        socket.close()
        context.term()

    def _take_all(self, socket: "zmq.Socket[bytes]") -> None:
        while True:
            try:
                identity, frame = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            assert identity == self.identity
            message = decode_to_planner(frame)
            with self._changed:
                if isinstance(message, Submit):
                    self._submit(message, socket)
                elif isinstance(message, Abort):
                    self._abort(message, socket)
                else:
                    self.flushes.append(message)
                    socket.send_multipart(
                        [
                            identity,
                            encode(FlushDone(message.call, 0 if self.busy else 7, self.busy)),
                        ]
                    )
                self._changed.notify_all()

    def _submit(self, submit: Submit, socket: "zmq.Socket[bytes]") -> None:
        self.submits.append(submit)
        if self.refuse is not None:
            reason, text = self.refuse
            refusal = Outputs((Output(submit.request_id, finish=reason, message=text),))
            socket.send_multipart([self.identity, encode(refusal)])
            return
        self._running[submit.request_id] = Running(submit, self.script(submit))

    def _abort(self, abort: Abort, socket: "zmq.Socket[bytes]") -> None:
        self.aborts.append(abort.request_id)
        if self._running.pop(abort.request_id, None) is not None:
            ended = Outputs((Output(abort.request_id, finish=FinishReason.ABORT),))
            socket.send_multipart([self.identity, encode(ended)])

    def _can_emit(self) -> bool:
        with self._changed:
            return any(
                self._allowed is None or running.sent < self._allowed
                for running in self._running.values()
            )

    def _emit(self) -> list[Output]:
        with self._changed:
            ready = [
                one
                for one in self._running.values()
                if self._allowed is None or one.sent < self._allowed
            ]
            outputs = [self._next(running) for running in ready]
            for output in outputs:
                if output.finish is not None:
                    del self._running[output.request_id]
            return outputs

    def _next(self, running: Running) -> Output:
        submit, params = running.submit, running.submit.params
        if self.break_after is not None and running.sent >= self.break_after:
            return Output(submit.request_id, finish=FinishReason.ERROR, message="a rank was lost")
        token = running.tokens[running.sent]
        running.sent += 1
        finish, stop_token = None, None
        if running.sent >= params.min_tokens:
            if token in params.stop_token_ids:
                finish, stop_token = FinishReason.STOP, token
            elif token in submit.eos and not params.ignore_eos:
                finish = FinishReason.STOP
        if finish is None and running.sent == params.max_tokens:
            finish = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if params.logprobs is not None:
            others = tuple(range(65, 65 + params.logprobs))
            logprobs = (
                TokenLogprobs(-0.5, others, tuple(-1.0 - index for index in range(len(others)))),
            )
        return Output(
            submit.request_id,
            (token,),
            logprobs,
            self.usage if running.sent == 1 else None,
            finish,
            stop_token,
            scores=self._scores(submit) if running.sent == 1 else (),
            scored_from=1,
        )

    def _scores(self, submit: Submit) -> tuple[TokenLogprobs, ...]:
        asked = submit.params.prompt_logprobs
        if asked is None:
            return ()
        others = tuple(range(65, 65 + asked))
        one = TokenLogprobs(-0.25, others, tuple(-1.0 - index for index in range(asked)))
        return (one,) * (len(submit.prompt) // TOKEN_BYTES - 1)

    def _snapshot(self) -> Snapshot:
        with self._changed:
            return Snapshot(
                self.state,
                epoch=1,
                running=len(self._running),
                waiting=3,
                device=self.device,
                prompt_tokens=40,
                cached_device_tokens=8,
                plan_s_buckets=(1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1),
                plan_s_sum=9.5,
                detail=self.detail,
                store=self.store,
            )
