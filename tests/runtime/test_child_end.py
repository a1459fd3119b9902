"""A child's end is seen at once, by a pidfd and where the kernel refuses one (a real seccomp filter)."""

import errno
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from forebay.runtime.child_end import ChildEnd
from tests.seccomp import PIDFD_OPEN, refuse

DEADLINE_S = 30.0
GONE_S = 5.0


def has_ended(end: ChildEnd, timeout_s: float) -> bool:
    return bool(select.select([end], (), (), timeout_s)[0])


def look_at_children() -> None:
    """One that runs, then ends; one that its owner has reaped before anybody looks; no thread or descriptor left."""
    before = len(os.listdir("/proc/self/fd"))
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    end = ChildEnd(child.pid)
    assert not has_ended(end, 0.0)
    assert child.stdin is not None
    child.stdin.close()
    assert has_ended(end, DEADLINE_S)
    assert child.wait(DEADLINE_S) == 0  # its status is still its owner's
    end.close()
    for _ in range(20):
        child = subprocess.Popen(["true"])
        end = ChildEnd(child.pid)
        child.wait(DEADLINE_S)
        assert has_ended(end, DEADLINE_S)
        end.close()
    assert len(os.listdir("/proc/self/fd")) == before
    # A thread that was joined stays in the kernel's list for a moment more.
    deadline = time.monotonic() + GONE_S
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.001)


def in_a_child(work: Callable[[], None]) -> int:
    """Exit status of a fork that does ``work``; a filter can never be taken off again."""
    code = f"from {__name__} import *; {work.__name__}()"
    return subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S).returncode


def refused_with_eperm() -> None:
    look_where_refused(errno.EPERM)


def refused_with_enosys() -> None:
    look_where_refused(errno.ENOSYS)


def look_where_refused(error: int) -> None:
    refuse(PIDFD_OPEN, error)
    try:
        os.pidfd_open(os.getpid())
    except OSError as refusal:
        assert refusal.errno == error
        look_at_children()
    else:
        raise AssertionError("the filter does not work")


@pytest.mark.parametrize("work", [look_at_children, refused_with_eperm, refused_with_enosys])
def test_the_end_of_a_child_shows(work: Callable[[], None]) -> None:
    assert in_a_child(work) == 0
