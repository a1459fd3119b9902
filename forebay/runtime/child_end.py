"""When a child process has ended, as a file descriptor that can be polled.

A pidfd where the kernel gives one; some refuse (before Linux 5.3, gVisor, an old seccomp profile).
Then a thread waits for the child and writes to an eventfd: the same to whoever polls.
"""

import contextlib
import os
import threading


class ChildEnd:
    """Readable once child ``pid`` has ended; nothing is reaped. The child must be this process's own."""

    def __init__(self, pid: int) -> None:
        self._waiter: threading.Thread | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # the second: a Python that was built without it
            self._fd = os.eventfd(0, os.EFD_CLOEXEC)
            self._waiter = threading.Thread(
                target=self._wait_for, args=(pid,), name="child-end", daemon=True
            )
            self._waiter.start()

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Only after the child has ended."""
        if self._waiter is not None:
            self._waiter.join()
        os.close(self._fd)

    def _wait_for(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):  # its owner was faster and has reaped it
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.eventfd_write(self._fd, 1)
