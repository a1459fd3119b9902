"""Says whether a grammar compiles, before anything is queued, and never holds up the event loop.

    check(grammar) --known?--> answer
                   '--one at a time--> child process (`grammar_child`), ended where it takes too
                   long

The child starts with the first grammar and lives on; one that was ended, or died for want of
memory, is replaced.
"""

import asyncio
import contextlib
import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from forebay.core.sampling import Grammar
from forebay.frontend.grammar_child import Start

MEMORY_BYTES = 1 << 30
START_TIMEOUT_S = 30.0
_KNOWN = 256
_PROBE = msgspec.json.encode({"kind": "regex", "text": "a"}) + b"\n"


class GrammarBusy(Exception):
    """Other grammars are being tried out; this one had no turn in time."""


class GrammarCheck:
    """``timeout_s``: what one grammar may take, and how long one waits for its turn."""

    def __init__(self, model: Path, timeout_s: float) -> None:
        self._start = Start(str(model), MEMORY_BYTES)
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._known: OrderedDict[Grammar, str] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """The child, while there is one."""
        return None if self._child is None else self._child.pid

    async def problem(self, grammar: Grammar) -> str:
        """What is wrong with ``grammar``, "" if nothing is. Raises ``GrammarBusy``."""
        if grammar not in self._known:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._turn.acquire()
            except TimeoutError:
                raise GrammarBusy("too many grammars are being compiled; try again later") from None
            try:
                if grammar not in self._known:
                    self._known[grammar] = await self._ask(grammar)
            finally:
                self._turn.release()
            while len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return self._known[grammar]

    async def close(self) -> None:
        child = self._child
        self._end()
        if child is not None:
            await child.wait()

    async def _ask(self, grammar: Grammar) -> str:
        child = await self._started()
        try:
            answer = await self._exchange(
                child, msgspec.json.encode(grammar) + b"\n", self._timeout_s
            )
        except TimeoutError:
            self._end()
            return f"it takes more than {self._timeout_s:g} s to compile"
        except BaseException:  # a caller that left: what the child says next is nobody's answer
            self._end()
            raise
        if answer is None:
            self._end()
            return "it takes too much memory to compile"
        return answer

    async def _started(self) -> asyncio.subprocess.Process:
        """A child that has loaded its tokenizer. Raises ``GrammarBusy`` if none comes up."""
        if self._child is not None and self._child.returncode is None:
            return self._child
        # -P: a file called msgspec.py in the user's directory must not become the child's.
        command = [sys.executable, "-P", "-m", "forebay.frontend.grammar_child"]
        pipe = asyncio.subprocess.PIPE
        self._child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, start_new_session=True
        )
        try:
            first = msgspec.json.encode(self._start) + b"\n" + _PROBE
            if await self._exchange(self._child, first, START_TIMEOUT_S) is not None:
                return self._child
        except TimeoutError:
            pass
        except BaseException:
            self._end()
            raise
        self._end()
        raise GrammarBusy("the process that compiles grammars does not start; see the log")

    async def _exchange(
        self, child: asyncio.subprocess.Process, said: bytes, timeout_s: float
    ) -> str | None:
        """The child's answer, None if it has died. Raises ``TimeoutError``."""
        assert child.stdin is not None and child.stdout is not None
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                child.stdin.write(said)
                await child.stdin.drain()
            line = await child.stdout.readline()
        return msgspec.json.decode(line, type=str) if line else None

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
