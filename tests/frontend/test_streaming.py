"""Streaming, read by the real `openai` client, and clients that go away."""

import json
import socket

import httpx
import openai
import pytest

from forebay.core.messages import FinishReason, Usage
from forebay.core.planner import TAINTED
from tests.frontend.fake_planner import DEADLINE_S
from tests.frontend.served import MODEL, Server, says


def test_a_chat_streams_role_text_and_end(server: Server) -> None:
    chunks = list(
        server.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_if_asked_for(server: Server) -> None:
    server.planner.usage = Usage(cached_device=1)
    *chunks, last = server.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "x"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None and last.usage.completion_tokens == 6
    assert (
        last.usage.prompt_tokens_details is not None
        and last.usage.prompt_tokens_details.cached_tokens == 1
    )


def test_tokens_are_sent_as_they_come(server: Server) -> None:
    server.planner.hold()
    server.planner.allow(1)
    stream = server.openai.completions.create(model=MODEL, prompt="x", stream=True)
    assert next(stream).choices[0].text == "h"
    server.planner.allow(2)
    assert next(stream).choices[0].text == "e"
    server.planner.allow(None)
    assert "".join(chunk.choices[0].text for chunk in stream) == "llo"


def test_a_character_of_several_tokens_comes_whole(server: Server) -> None:
    server.planner.script = says("a😀é")
    chunks = server.openai.completions.create(model=MODEL, prompt="x", stream=True)
    assert [chunk.choices[0].text for chunk in chunks if chunk.choices[0].text] == ["a", "😀", "é"]


def test_several_choices_share_a_stream(server: Server) -> None:
    texts = ["", "", "", ""]
    ends = []
    for chunk in server.openai.completions.create(model=MODEL, prompt=["x", "y"], n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == ["hello"] * 4
    assert sorted(ends) == [0, 1, 2, 3]


def test_no_part_of_a_stop_string_is_ever_sent(server: Server) -> None:
    server.planner.script = says("say ###ENE###END and more", end=False)
    server.planner.allow(20)
    pieces = [
        chunk.choices[0].text
        for chunk in server.openai.completions.create(
            model=MODEL, prompt="x", stop="###END", stream=True, max_tokens=99
        )
    ]
    assert "".join(pieces) == "say ###ENE"
    server.planner.wait_for(lambda: len(server.planner.aborts) == 1)


def test_an_error_after_the_first_byte_is_an_event_of_the_stream(server: Server) -> None:
    server.planner.script = says("hello", end=False)
    server.planner.break_after = 3
    got = ""
    with pytest.raises(openai.APIError, match="a rank was lost"):
        for chunk in server.openai.completions.create(model=MODEL, prompt="x", stream=True):
            got += chunk.choices[0].text
    assert got == "hel"
    body = server.post("/v1/completions", prompt="x", stream=True).text
    assert "[DONE]" not in body, "a broken stream must not look like a finished one"
    assert (
        json.loads(body.strip().splitlines()[-1].removeprefix("data: "))["error"]["code"]
        == "engine_unavailable"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_none_invite_no_retry(server: Server, stream: bool) -> None:
    server.planner.refuse = (FinishReason.TAINTED, TAINTED)
    answer = server.post("/v1/completions", prompt="x", stream=stream)
    assert answer.status_code == 500 and "retry-after" not in answer.headers
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "numbers_not_finite")
    assert "--dtype float32 and --kv-dtype auto" in error["message"]


def test_a_refusal_before_the_first_byte_keeps_its_status(server: Server) -> None:
    server.planner.refuse = (FinishReason.REJECTED_FULL, "the queue is full")
    answer = server.post("/v1/completions", prompt="x", stream=True)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


def test_a_client_that_leaves_its_stream_aborts_the_request(server: Server) -> None:
    server.planner.script = says("on and on ", end=False)
    server.planner.hold()
    server.planner.allow(2)
    with httpx.Client(base_url=server.url, timeout=DEADLINE_S) as client:
        body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 400, "n": 2}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    server.planner.wait_for(lambda: len(server.planner.aborts) == 2)
    assert server.planner.aborts == [submit.request_id for submit in server.planner.submits]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_before_any_text_aborts_the_request(
    server: Server, streaming: bool
) -> None:
    server.planner.hold()
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": streaming}).encode()
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        server.planner.wait_for(lambda: len(server.planner.submits) == 1)
        assert server.planner.aborts == []
    server.planner.wait_for(lambda: server.planner.aborts == [server.planner.submits[0].request_id])


def test_a_client_that_stays_is_not_taken_for_gone(server: Server) -> None:
    server.planner.hold()
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as raw:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        server.planner.wait_for(lambda: len(server.planner.submits) == 1)
        server.planner.allow(None)
        assert b"200 OK" in raw.recv(65536)
    assert server.planner.aborts == []
