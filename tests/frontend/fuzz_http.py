"""Fuzzing of the HTTP connection: raw bytes, slow, cut, pipelined and smuggled, against a real server over a scripted planner.

    python -m tests.frontend.fuzz_http --seconds 600 --seed 1

Every good request has a mark of its own as its prompt, and the planner answers a prompt with itself: so an answer tells whose it is.
What must hold on each connection: good requests are answered in their order, until one that is ambiguous or broken ends the
connection; a mark that stands inside a body is never answered; the server lives, says nothing on its error log, and keeps no
connection.
"""

import argparse
import asyncio
import json
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop

from forebay.core.messages import Submit, unpack_tokens
from forebay.frontend.model import load_served_model
from forebay.frontend.server import listen_all, serve_on
from forebay.settings import Settings
from tests.frontend.fake_planner import DEADLINE_S, FakePlanner
from tests.frontend.served import until
from tests.frontend.tiny_text import CONTEXT, EOS, write_text_model

THREADS = 4
ANSWER_S = 5.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
OFFERS = (
    b"",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"Connection: keep-alive\r\n",
)
AMBIGUOUS = (
    b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n",
    b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n",
    b"Content-Length: 0, %d\r\n\r\n",
    b"Content-Length: +%d\r\n\r\n",
    b"Content-Length : %d\r\n\r\n",
    b"X: y\r\n Content-Length: %d\r\n\r\n",
    b"X: y\nContent-Length: %d\r\n\r\n",
    b"Transfer-Encoding: identity, chunked\r\nX: %d\r\n\r\n",
    b"Transfer-Encoding: x, chunked\r\nX: %d\r\n\r\n",
    b"Host: y\r\nX: %d\r\n\r\n",
)
_MARK = re.compile(r"m\d+x\d+\.")
_ANSWER = re.compile(rb'"text":"([^"]*)"')


@dataclass
class Talk:
    """What one connection sends, and what may be answered. ``good``: marks in order; ``must``: how many of them have to be."""

    sent: bytes = b""
    good: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    is_mutated: bool = False
    is_cut: bool = False
    ends: bool = False


class Fuzz:
    """One source of connections. ``failures``: what did not hold, with the bytes that showed it."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.chance = random.Random(seed)
        self.seed = seed
        self.count = 0
        self.answers = 0
        self.marks = 0
        self.failures: list[str] = []

    def run(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            talk = self._talk()
            got = self._say(talk)
            self.count += 1
            if wrong := self._wrong(talk, got):
                self.failures.append(f"seed {self.seed}, connection {self.count}: {wrong}")

    # ------------------------------------------------------------------------------------------ what is sent

    def _talk(self) -> Talk:
        chance, talk = self.chance, Talk()
        for _ in range(chance.randint(1, 5)):
            if talk.ends:
                break
            chance.choice((self._good, self._good, self._good, self._other, self._bad))(talk)
        if chance.random() < 0.25:
            talk.is_mutated = True
            talk.sent = self._mutated(talk.sent)
        if chance.random() < 0.15:
            talk.is_cut = True
            talk.sent = talk.sent[: chance.randrange(len(talk.sent) + 1)]
        return talk

    def _mark(self) -> str:
        self.marks += 1
        return f"m{self.seed}x{self.marks}."

    def _body(self, mark: str) -> bytes:
        fields = {"model": "tiny", "prompt": mark, "max_tokens": 60}
        if self.chance.random() < 0.5:
            hidden = HEAD + b'Content-Length: 41\r\n\r\n{"model":"tiny","prompt":"h%s"}'
            fields["user"] = (hidden % mark.encode()).decode()
        return json.dumps(fields).encode()

    def _good(self, talk: Talk) -> None:
        mark = self._mark()
        body = self._body(mark)
        head = HEAD + self.chance.choice(OFFERS)
        if self.chance.random() < 0.5:
            talk.sent += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            talk.sent += head + b"Transfer-Encoding: chunked\r\n\r\n" + self._chunks(body)
        talk.good.append(mark)

    def _chunks(self, body: bytes) -> bytes:
        out, start = b"", 0
        while start < len(body):
            piece = body[start : start + self.chance.randint(1, len(body))]
            extension = self.chance.choice((b"", b";a=b", b";x"))
            out += b"%x%s\r\n%s\r\n" % (len(piece), extension, piece)
            start += len(piece)
        return out + b"0\r\n\r\n"

    def _other(self, talk: Talk) -> None:
        """Requests without a mark: other methods, a body that is no JSON but a request, an early answer before the body."""
        mark = "h" + self._mark()
        hidden = self._request(mark)
        talk.hidden.append(mark)
        talk.sent += self.chance.choice(
            (
                b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
                HEAD + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden,
                HEAD + OFFERS[1] + b"Content-Length: %d\r\n\r\n" % len(hidden) + hidden,
                b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(hidden)
                + hidden,
                HEAD
                + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(hidden)
                + hidden,
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + self._chunks(hidden),
            )
        )

    def _bad(self, talk: Talk) -> None:
        """What ends the connection; the request behind it must never be seen as one."""
        mark = "h" + self._mark()
        hidden = self._request(mark)
        talk.hidden.append(mark)
        talk.ends = True
        which = self.chance.randrange(4)
        if which == 0:
            talk.sent += HEAD + self.chance.choice(AMBIGUOUS) % len(hidden)
            talk.sent += b"0\r\n\r\n" + hidden
        elif which == 1:
            talk.sent += self.chance.randbytes(self.chance.randint(1, 300)) + b"\r\n\r\n" + hidden
            talk.hidden.pop()  # noise may be one empty line
            talk.good.append(mark)
            talk.is_mutated = True
        elif which == 2:
            talk.sent += b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" + hidden
        else:
            talk.sent += b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + hidden

    def _request(self, mark: str) -> bytes:
        body = json.dumps({"model": "tiny", "prompt": mark, "max_tokens": 60}).encode()
        return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def _mutated(self, sent: bytes) -> bytes:
        data = bytearray(sent)
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(len(data) + 1)
            match self.chance.randrange(3):
                case 0:
                    data[at : at + 1] = self.chance.randbytes(1)
                case 1:
                    data[at:at] = self.chance.randbytes(self.chance.randint(1, 8))
                case _:
                    del data[at : at + self.chance.randint(1, 8)]
        return bytes(data)

    # ------------------------------------------------------------------------------------------ what comes back

    def _say(self, talk: Talk) -> bytes:
        """Whole, in pieces, or byte by byte; the answer to a last good request, or what comes until the server has had enough."""
        chance, got = self.chance, b""
        with socket.create_connection(("127.0.0.1", self.port), ANSWER_S) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                for piece in self._pieces(talk.sent):
                    client.sendall(piece)
                if talk.is_cut or chance.random() < 0.05:
                    talk.is_cut = True
                    if chance.random() < 0.5:
                        return b""  # gone in the middle
                    client.shutdown(socket.SHUT_WR)
                elif not talk.ends:
                    client.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                elif talk.is_mutated:
                    client.shutdown(socket.SHUT_WR)
                if talk.is_mutated:
                    client.settimeout(0.3)  # it may wait for a body that does not come
                while part := client.recv(1 << 16):
                    got += part
            except OSError:
                pass
        return got

    def _pieces(self, sent: bytes) -> Iterator[bytes]:
        match self.chance.randrange(4):
            case 0 | 1:
                yield sent
            case 2:
                start = 0
                while start < len(sent):
                    stop = start + self.chance.randint(1, 200)
                    yield sent[start:stop]
                    start = stop
            case _:
                yield from (sent[i : i + 1] for i in range(min(len(sent), 400)))
                yield sent[400:]

    def _wrong(self, talk: Talk, got: bytes) -> str:
        said = [text.decode() for text in _ANSWER.findall(got)]
        self.answers += len(said)
        shown = f"sent {talk.sent!r}; got {got!r}"
        if not talk.is_mutated and any(mark in text for mark in talk.hidden for text in said):
            return f"a request inside a body was answered; {shown}"
        own = {mark.removeprefix("h") for mark in talk.good + talk.hidden}
        if any(mark not in own for text in said for mark in _MARK.findall(text)):
            return f"an answer to what this connection did not send; {shown}"
        if not talk.is_mutated and said != talk.good[: len(said)]:
            return f"answers {said} to {talk.good}; {shown}"
        whole = not (talk.is_mutated or talk.is_cut)
        if whole and len(said) != len(talk.good):
            return f"only {said} of {talk.good} were answered; {shown}"
        return ""


class Alarm(logging.Handler):
    """The server's own errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def repeats(submit: Submit) -> list[int]:
    return [*map(int, unpack_tokens(submit.prompt)), EOS]


@contextmanager
def running_server() -> Iterator[int]:
    """The port of a server in a thread of its own."""
    with TemporaryDirectory() as at:
        model = load_served_model(write_text_model(Path(at) / "model"), "tiny", CONTEXT)
        planner = FakePlanner(repeats, CONTEXT)
        socks = listen_all("127.0.0.1", 0)

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve_on(socks, planner, model, Settings(store="none")))

        thread = threading.Thread(target=run)
        thread.start()
        port = socks[0].getsockname()[1]
        try:
            until(lambda: is_alive(port))
            yield port
        finally:
            planner.stop()
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "the server did not end"


def is_alive(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as client:
        client.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return client.recv(12) == b"HTTP/1.1 200"


def fuzz(port: int, seed: int, is_over: Callable[[], bool]) -> tuple[list[Fuzz], list[str]]:
    """All sources, and what went wrong."""
    alarm = Alarm()
    logging.getLogger().addHandler(alarm)
    sources = [Fuzz(port, seed * 1000 + number) for number in range(THREADS)]

    def enough() -> bool:
        return is_over() or any(source.failures for source in sources)

    threads = [threading.Thread(target=source.run, args=(enough,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    logging.getLogger().removeHandler(alarm)
    wrong = [failure for source in sources for failure in source.failures] + alarm.lines
    if not is_alive(port):
        wrong.append("the server does not answer any more")
    return sources, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with running_server() as port:
        fds = psutil.Process().num_fds()
        end = time.monotonic() + asked.seconds
        sources, wrong = fuzz(port, asked.seed, lambda: time.monotonic() >= end)
        left = psutil.Process().num_fds() - fds
    count, answers = sum(one.count for one in sources), sum(one.answers for one in sources)
    print(f"{count} connections, {answers} answers, {left} descriptors left, {len(wrong)} wrong")
    for line in wrong[:5]:
        print(line[:3000])
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
