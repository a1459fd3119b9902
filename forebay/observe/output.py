"""Standard output and error that can neither stop nor end a process.

    print() --> at most `WRITES_MAX` writes that wait --> one daemon thread --> write(2)

A server's lines go wherever its starter has them read. A reader that is gone makes write(2) fail, in the middle of whatever had
something to say; one that has stopped reading makes it wait, and an event loop with it. Here both only cost lines.
"""

import contextlib
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

WRITES_MAX = 10_000
END_S = 1.0


class Writer:
    """Writes to descriptors in the order of the calls, on a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, descriptor: int, text: bytes) -> None:
        """Never waits. What does not fit is dropped."""
        with self._changed:
            if len(self._waiting) < WRITES_MAX:
                self._waiting.append((descriptor, text))
                self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Until everything is written, at most so long."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(deadline - time.monotonic(), 0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                descriptor, text = self._waiting[0]
            with contextlib.suppress(OSError):
                while text:
                    text = text[os.write(descriptor, text) :]
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()


class Stream(io.TextIOBase):
    """In the place of ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, writer: Writer, descriptor: int) -> None:
        self._writer = writer
        self._descriptor = descriptor

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        self._writer.put(self._descriptor, text.encode("utf-8", "backslashreplace"))
        return len(text)


@contextlib.contextmanager
def unhurried_output() -> Iterator[None]:
    """Within it ``sys.stdout`` and ``sys.stderr`` never wait and never fail; what is left is written at its end, for `END_S`."""
    writer = Writer()
    with contextlib.ExitStack() as restore:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            if stream is getattr(sys, f"__{name}__"):  # otherwise it is somebody else's already
                restore.callback(setattr, sys, name, stream)
                with contextlib.suppress(OSError):
                    stream.flush()
                setattr(sys, name, Stream(writer, stream.fileno()))
        try:
            yield
        finally:
            writer.drain(END_S)
