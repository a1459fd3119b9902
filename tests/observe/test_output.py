"""What a process says never stops it and never fails, whoever reads it."""

import os
import subprocess
import sys

from forebay.observe.output import WRITES_MAX, Stream, Writer

SAYS = """
import sys
from forebay.observe.output import unhurried_output
before = sys.stdout, sys.stderr
with unhurried_output():
    for number in range(100):
        print("line", number, flush=True)
        print("error", number, file=sys.stderr)
    print("caf\\u00e9 \\udc80")
assert (sys.stdout, sys.stderr) == before
print("after")
"""


def test_everything_comes_in_order_and_the_streams_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAYS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    )
    lines = [word for number in range(100) for word in (f"line {number}", f"error {number}")]
    assert done.stdout.decode().splitlines() == [*lines, "café \\udc80", "after"]


def test_a_reader_that_does_not_read_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    writer = Writer()
    stream = Stream(writer, writing)
    for number in range(2 * WRITES_MAX):  # far more than a pipe and the queue hold
        print(f"{number:<100}", file=stream, flush=True)
    writer.drain(0.01)
    os.set_blocking(reading, False)
    first = os.read(reading, 101)
    assert first.split() == [b"0"]
    os.close(reading)
    writer.drain(10)  # to nobody: each write fails, and the next is tried
    os.close(writing)


def test_a_reader_that_has_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = Writer()
    print("who is there?", file=Stream(writer, writing), flush=True)
    writer.drain(10)
    os.close(writing)
