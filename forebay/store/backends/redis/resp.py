"""RESP2, the protocol of Redis and Valkey: a command is a list of byte strings, a value goes where the reader says.

    *3 $3 SET $3 key $5 value  -->  +OK | -ERR ... | :12 | $5 value | $-1 | *2 ...   (each ends in \\r\\n)

Large arguments and bulk replies are never copied by us: they are sent from, and received into, the caller's memory.
https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

LINE_BYTES_MAX = 64 << 10
ITEMS_MAX = 1 << 20
DEPTH_MAX = 8
SMALL_BYTES = 4096


class ProtocolError(Exception):
    """What came is no RESP2. The connection is of no more use."""


class ReplyError(Exception):
    """The server refused a command: ``code`` is the first word, as in ``OOM command not allowed``."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.code = line.split(" ", 1)[0]


Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"
Piece: TypeAlias = "bytes | memoryview"
Argument: TypeAlias = "Piece | tuple[Piece, ...]"
Target: TypeAlias = "Callable[[int, Reader], Reply]"


def encode(command: Sequence[Argument], out: list[Piece]) -> None:
    """Append the command's bytes to ``out``; neighbours that are small become one piece.

    An argument that is a tuple is one argument, given in pieces.
    """
    small = bytearray(b"*%d\r\n" % len(command))
    if out and isinstance(out[-1], bytes) and len(out[-1]) < SMALL_BYTES:
        small[:0] = out.pop()
    for argument in command:
        pieces = argument if isinstance(argument, tuple) else (argument,)
        small += b"$%d\r\n" % sum(map(len, pieces))
        for piece in pieces:
            if len(piece) < SMALL_BYTES:
                small += piece
            else:
                out += [bytes(small), piece]
                small = bytearray()
        small += b"\r\n"
    out.append(bytes(small))


class Reader:
    """Replies from a stream of bytes. ``receive(view)`` fills some of ``view`` and says how much; it raises at the end."""

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._buffer = bytearray(64 << 10)
        self._view = memoryview(self._buffer)
        self._at = 0
        self._end = 0

    def reply(self, target: Target | None = None, depth: int = 0) -> Reply:
        """The next reply. ``target``: takes a bulk reply's length and reads the value by ``read_into``.

        Raises ``ProtocolError``; an error of the server's is a value.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode(errors="replace"))
        if kind == b":":
            return self._number(rest)
        if kind == b"$":
            return self._bulk(self._number(rest), target)
        if kind == b"*":
            return self._array(self._number(rest), depth)
        raise ProtocolError(f"a reply begins with {line[:20]!r}, which is no RESP2")

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next: first from what was read ahead, then straight from the stream."""
        ahead = min(self._end - self._at, len(view))
        view[:ahead] = self._view[self._at : self._at + ahead]
        self._at += ahead
        done = ahead
        while done < len(view):
            done += self._receive(view[done:])

    def skip(self, length: int) -> None:
        while length:
            part = min(length, len(self._buffer))
            if self._at == self._end:
                self._fill()
            part = min(part, self._end - self._at)
            self._at += part
            length -= part

    def _bulk(self, length: int, target: Target | None) -> Reply:
        if length == -1:
            return None
        if not 0 <= length <= 512 << 20:
            raise ProtocolError(f"a value of {length} bytes; allowed are 0 to 512 MiB")
        value: Reply
        if target is not None:
            value = target(length, self)
        else:
            taken = bytearray(length)
            self.read_into(memoryview(taken))
            value = bytes(taken)
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            raise ProtocolError("a value does not end where its length says")
        return value

    def _array(self, length: int, depth: int) -> Reply:
        if length == -1:
            return None
        if not 0 <= length <= ITEMS_MAX or depth >= DEPTH_MAX:
            raise ProtocolError(f"an array of {length} items, {depth} deep")
        return [self.reply(None, depth + 1) for _ in range(length)]

    def _number(self, text: bytes) -> int:
        if not text.removeprefix(b"-").isdigit() or len(text) > 20:
            raise ProtocolError(f"{text[:20]!r} is no number")
        return int(text)

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._at, self._end)) < 0:
            if self._end - self._at >= LINE_BYTES_MAX - 2:
                raise ProtocolError("a line without an end")
            self._fill()
        line = bytes(self._view[self._at : end])
        self._at = end + 2
        return line

    def _fill(self) -> None:
        """More bytes behind those that are there; the front is reused."""
        if self._at:
            left = self._end - self._at
            self._view[:left] = bytes(self._view[self._at : self._end])
            self._at, self._end = 0, left
        self._end += self._receive(self._view[self._end :])
