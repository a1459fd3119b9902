"""Threads for calls that may never return: of a file system whose server is gone, of another project's client.

    caller --jobs--> queue --> one of the threads --> answers; the caller waits until its deadline and then gives them up

No time-out reaches into such a call. So a job works on memory of its thread, and touches the caller's only by
`Job.touch`, which a job that was given up does not get any more. Threads are daemons: one that hangs keeps no process
alive.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from forebay.store.client.channel import Bytes

T = TypeVar("T")


class Scratch:
    """Memory of one thread, kept and grown, since fresh pages cost more than copying into old ones."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> Bytes:
        if len(self._bytes) < size:
            self._bytes = np.empty(size, dtype=np.uint8)
        return self._bytes[:size]


class Job(Generic[T]):
    """One piece of work. ``otherwise``: its answer if it is given up or raises."""

    def __init__(self, work: Callable[["Job[T]", Scratch], T], otherwise: T) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._given_up = False
        self._done = threading.Event()
        self.answer = otherwise

    def touch(self, use: Callable[[], None]) -> bool:
        """Do something with the caller's memory; False, and nothing done, if the caller waits no longer."""
        with self._lock:
            if not self._given_up:
                use()
            return not self._given_up

    def run(self, scratch: Scratch) -> None:
        try:
            answer = self._work(self, scratch)
            self.touch(lambda: setattr(self, "answer", answer))
        finally:
            self._done.set()

    def wait(self, deadline: float) -> None:
        """Until it is done, or given up at ``deadline``: then nothing of the caller's is touched any more."""
        if not self._done.wait(max(deadline - time.monotonic(), 0)):
            with self._lock:
                self._given_up = True


class CallThreads:
    """``count`` threads, started when first needed. ``scratch``: makes the memory of each."""

    def __init__(
        self, count: int, name: str = "file", scratch: Callable[[], Scratch] = Scratch
    ) -> None:
        self._count = count
        self._name = name
        self._make_scratch = scratch
        self._queue: SimpleQueue[Job[object] | None] = SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def run(self, jobs: Sequence[Job[T]], timeout_s: float) -> list[T]:
        """The answers, in order; those not there in time are what their jobs have ``otherwise``."""
        self._start()
        deadline = time.monotonic() + timeout_s
        for job in jobs:
            self._queue.put(job)  # type: ignore[arg-type]
        for job in jobs:
            job.wait(deadline)
        return [job.answer for job in jobs]

    def close(self) -> None:
        """Threads end when they have nothing left to do; nobody waits for them."""
        for _ in range(self._count):
            self._queue.put(None)

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                for number in range(self._count):
                    threading.Thread(
                        target=self._serve, name=f"{self._name}-{number}", daemon=True
                    ).start()

    def _serve(self) -> None:
        scratch = self._make_scratch()
        while (job := self._queue.get()) is not None:
            if not job.touch(lambda: None):  # given up while it waited here
                continue
            try:
                job.run(scratch)
            except Exception:  # the job's answer is what it has otherwise
                traceback.print_exc()
