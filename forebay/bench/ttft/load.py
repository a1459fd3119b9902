"""The client: streams completions over HTTP, as a user would, and notes when the first token came.

One thread for each request in flight, from the standard library alone: a client that shares the cores with the server must cost
little. A request's time starts when it is sent, in an open load when it was due (so waiting for a free thread is never hidden), and
ends with the first event that carries a token.
"""

import contextlib
import http.client
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forebay.bench.ttft.plan import Ask, TtftError

TIMEOUT_S = 300.0
MAX_THREADS = 256
TOP = 2


@dataclass(frozen=True, slots=True)
class Position:
    """One output token: its text, and how far the most likely token was above the second (natural log-probabilities)."""

    text: str
    gap: float | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``request_id``: the server's; ``sent_ns``: monotonic clock; ``ttft_s`` and ``total_s`` from there."""

    index: int
    request_id: str
    sent_ns: int
    ttft_s: float
    total_s: float
    cached_device: int
    cached_host: int
    cached_store: int
    output: tuple[Position, ...]


class Client:
    """One server's client. ``url``: ``http://HOST:PORT``."""

    def __init__(self, url: str, model: str, output_len: int) -> None:
        self._address = url.removeprefix("http://")
        self._model = model
        self._output_len = output_len

    def get(self, path: str) -> Any:
        """The JSON document at ``path``. Raises ``TtftError``."""
        return self._json("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._json("POST", path, json.dumps(body).encode())

    def closed_load(self, asks: Sequence[Ask], concurrency: int, salt: str) -> list[Answer]:
        """Send all, ``concurrency`` at a time; the answers in the order of ``asks``. Raises ``TtftError``."""
        threads = ThreadPoolExecutor(concurrency)
        return _all(threads, [threads.submit(self._complete, ask, salt) for ask in asks])

    def open_load(self, asks: Sequence[Ask], salt: str) -> list[Answer]:
        """Send each at its time. Raises ``TtftError``."""
        threads = ThreadPoolExecutor(min(len(asks), MAX_THREADS))
        began = time.monotonic()
        return _all(
            threads, [threads.submit(self._complete, ask, salt, began + ask.at_s) for ask in asks]
        )

    def _complete(self, ask: Ask, salt: str, due: float | None = None) -> Answer:
        """``due``: when to send it, on the monotonic clock; None: now."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": self._output_len,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": TOP,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        encoded = json.dumps(body).encode()  # not the server's time
        if due is not None:
            time.sleep(max(due - time.monotonic(), 0.0))
        sent = time.monotonic() if due is None else due
        first = 0.0
        name = ""
        usage: dict[str, Any] = {}
        positions: list[Position] = []
        with self._response("POST", "/v1/completions", encoded) as response:
            for event in _events(response):
                found = _positions(event)
                first = first or (time.monotonic() if found else 0.0)
                positions += found
                usage = event.get("usage") or usage
                name = event["id"]
        total_s = time.monotonic() - sent
        if len(positions) != self._output_len or not usage:
            raise TtftError(f"asked for {self._output_len} tokens and got {len(positions)}")
        details = usage["prompt_tokens_details"]
        tiers = (details["cached_device"], details["cached_host"], details["cached_store"])
        return Answer(
            ask.index, name, int(sent * 1e9), first - sent, total_s, *tiers, tuple(positions)
        )

    def _json(self, method: str, path: str, body: bytes | None) -> Any:
        with self._response(method, path, body) as response:
            return json.loads(response.read())

    @contextlib.contextmanager
    def _response(
        self, method: str, path: str, body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        """A connection of its own for each request: one that is kept may be closed by the server just as it is used again."""
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(
                method, path, body, {"Content-Type": "application/json", "Connection": "close"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise TtftError(f"the server refused {path}: {_message(response.read())}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise TtftError(
                f"the server does not answer {path}: {type(error).__name__}: {error}"
            ) from error
        finally:
            connection.close()


def _all(threads: ThreadPoolExecutor, futures: Sequence[Any]) -> list[Answer]:
    """Every result, or the first error without waiting for the others: they end with the server."""
    try:
        return [future.result() for future in futures]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _events(response: http.client.HTTPResponse) -> Iterable[dict[str, Any]]:
    """The JSON documents of a stream of server-sent events. Raises ``TtftError`` for an error event or a stream that just ends."""
    for line in response:
        text = line.decode().strip()
        if text == "data: [DONE]":
            response.read()
            return
        if text.startswith("data: "):
            event: dict[str, Any] = json.loads(text.removeprefix("data: "))
            if "error" in event:
                raise TtftError(f"the server failed a request: {event['error'].get('message')}")
            yield event
    raise TtftError("the server ended a stream without its last word")


def _positions(event: dict[str, Any]) -> list[Position]:
    found = []
    for choice in event.get("choices", ()):
        logprobs = choice.get("logprobs") or {"tokens": [], "top_logprobs": []}
        for text, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            best = sorted(top.values(), reverse=True)
            found.append(Position(text, best[0] - best[1] if len(best) > 1 else None))
    return found


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
