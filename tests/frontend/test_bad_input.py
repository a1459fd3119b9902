"""What clients get wrong: each is one error object that names the field, and the server lives on."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from forebay.core.messages import FinishReason
from forebay.frontend.limits import MAX_PROMPTS, body_limit
from forebay.settings import Settings
from tests.frontend.fake_planner import DEADLINE_S
from tests.frontend.served import MODEL, Server, wait_ready
from tests.frontend.tiny_text import CONTEXT, VOCABULARY

USER = [{"role": "user", "content": "x"}]
BODY_LIMIT = body_limit(CONTEXT)


@pytest.fixture(autouse=True)
def lives_on(server: Server) -> Iterator[None]:
    yield
    server.planner.refuse = None
    answer = server.post("/v1/completions", prompt="still there?")
    assert answer.json()["choices"][0]["text"] == "hello"
    assert answer.json()["usage"]["completion_tokens"] == 6


@pytest.fixture(scope="module")
def strict_server(start_server: Callable[..., Server]) -> Server:
    return wait_ready(start_server(Settings(strict_max_tokens=True, store="none")))


def error_of(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""]])
def test_an_empty_prompt(server: Server, prompt: object) -> None:
    error = error_of(server.post("/v1/completions", prompt=prompt))
    assert "empty" in error["message"]
    assert error["param"] == "prompt"
    assert server.planner.submits == []


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, CONTEXT * 128 + 1])
def test_a_prompt_over_the_context(server: Server, length: int) -> None:
    error = error_of(server.post("/v1/completions", prompt="x" * length))
    assert error["code"] == "context_length_exceeded"
    assert str(length) in error["message"] and str(CONTEXT) in error["message"]


def test_a_conversation_over_the_context(server: Server) -> None:
    for chars in (CONTEXT, CONTEXT * 200):  # the second is not even tokenised
        messages = [{"role": "user", "content": "x" * chars}]
        for path in ("/v1/chat/completions", "/tokenize"):
            error = error_of(server.post(path, messages=messages))
            assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("cap", [CONTEXT - 9, CONTEXT, 2**31, 10**30])
def test_max_tokens_are_a_cap_and_cut_to_what_fits(server: Server, cap: int) -> None:
    assert server.post("/v1/completions", prompt="x" * 10, max_tokens=cap).status_code == 200
    assert server.planner.submits[0].params.max_tokens == CONTEXT - 10


def test_max_tokens_over_the_context_where_that_is_strict(strict_server: Server) -> None:
    error = error_of(strict_server.post("/v1/completions", prompt="x" * 10, max_tokens=CONTEXT - 9))
    assert error["code"] == "context_length_exceeded"
    fitting = strict_server.post("/v1/completions", prompt="x" * 10, max_tokens=CONTEXT - 10)
    assert fitting.status_code == 200


def test_a_prompt_over_the_device_cache_is_refused_by_the_planner(server: Server) -> None:
    server.planner.refuse = (FinishReason.REJECTED_TOO_LONG, "it needs 9 pages; there are 4")
    error = error_of(server.post("/v1/completions", prompt="x"))
    assert error["message"] == "it needs 9 pages; there are 4"
    assert error["code"] == "context_length_exceeded"


def test_a_full_queue(server: Server) -> None:
    server.planner.refuse = (FinishReason.REJECTED_FULL, "1000 requests are waiting")
    answer = server.post("/v1/completions", prompt="x", n=2)
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ],
)
def test_an_unknown_field_is_named(server: Server, fields: dict[str, object], param: str) -> None:
    error = error_of(server.post("/v1/completions", prompt="x", **fields))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", "5", "expected int"),
        ("max_tokens", 1.5, "expected int"),
        ("max_tokens", True, "got bool"),
        ("temperature", "hot", "got str"),
        ("stop", 5, "expected str"),
        ("stop", [1], "expected str"),
        ("logit_bias", {"a": 1}, "expected int"),
        ("logit_bias", [1], "got array"),
        ("stream", "yes", "expected bool"),
        ("prompt", 5, "got int"),
        ("prompt", {"text": "x"}, "got object"),
        ("model", 5, "expected str"),
    ],
)
def test_a_wrong_type_is_named_with_what_is_allowed(
    server: Server, field: str, value: object, said: str
) -> None:
    error = error_of(server.post("/v1/completions", **{"prompt": "x", field: value}))
    assert error["param"].startswith(field)
    assert said in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("n", 0),
        ("n", 17),
        ("temperature", -0.1),
        ("temperature", 1e9),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {str(VOCABULARY): 1}),
        ("stop_token_ids", [VOCABULARY]),
        ("stop_token_ids", [-1]),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("priority", 2**40),
        ("prompt", [VOCABULARY]),
        ("prompt", [-1]),
        ("prompt", [1, "x"]),
        ("prompt", ["x", [1]]),
        ("prompt", ["x"] * (MAX_PROMPTS + 1)),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_value_out_of_range_is_named(server: Server, field: str, value: object) -> None:
    error = error_of(server.post("/v1/completions", **{"prompt": "x", field: value}))
    assert error["param"] == field
    assert server.planner.submits == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "xml"}),
        ("functions", [{}]),
        ("best_of", 2),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", 5),
        ("top_logprobs", 2),
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "narrator", "content": "x"}]),
        ("messages", [{"role": "user", "content": "x", "name": 5}]),
        (
            "messages",
            [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
        ),
        ("messages", [{"role": "assistant", "content": None}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        ("chat_template_kwargs", {"messages": []}),
        ("continue_final_message", True),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
        ("messages", [{"role": "user", "content": "x", "colour": "red"}]),
        ("messages", [{"role": "user", "content": "refuse me"}]),
        ("messages", "x"),
    ],
)
def test_what_chat_does_not_do_is_refused_by_name(
    server: Server, field: str, value: object
) -> None:
    error = error_of(server.post("/v1/chat/completions", **{"messages": USER, field: value}))
    assert error["param"].startswith(field)
    assert server.planner.submits == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("best_of", 3),
        ("use_beam_search", True),
        ("max_tokens", 0),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_what_completions_do_not_do_is_refused_by_name(
    server: Server, field: str, value: object
) -> None:
    assert (
        error_of(server.post("/v1/completions", **{"prompt": "x", field: value}))["param"] == field
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "stream"),
    ],
)
def test_a_stream_does_not_begin_with_scores(
    server: Server, fields: dict[str, object], param: str
) -> None:
    assert error_of(server.post("/v1/completions", prompt="x", **fields))["param"] == param


def test_max_tokens_in_both_spellings(server: Server) -> None:
    both = {"max_tokens": 3, "max_completion_tokens": 4}
    assert (
        error_of(server.post("/v1/chat/completions", messages=USER, **both))["param"]
        == "max_completion_tokens"
    )
    answer = server.post("/v1/chat/completions", messages=USER, max_completion_tokens=4)
    assert answer.json()["choices"][0]["message"]["content"] == "hell"


def test_an_unknown_model(server: Server) -> None:
    error = error_of(server.post("/v1/completions", prompt="x", model="gpt-5"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"], "it says what there is"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny"}',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x"} trailing',
        b'{"model": "tiny", "prompt": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "echo": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
    ],
    ids=lambda body: body[:40].decode(errors="replace"),
)
def test_a_body_that_is_no_request(server: Server, body: bytes) -> None:
    error_of(server.http.post("/v1/completions", content=body))


def test_a_body_of_announced_length_over_the_limit(server: Server) -> None:
    error = error_of(server.http.post("/v1/completions", content=b" " * (BODY_LIMIT + 1)), 413)
    assert str(BODY_LIMIT) in error["message"]


def test_a_body_of_unknown_length_over_the_limit(server: Server) -> None:
    pieces = (b" " * 65536 for _ in range(BODY_LIMIT // 65536 + 2))
    error_of(server.http.post("/v1/completions", content=pieces), 413)


def test_a_client_that_asks_first_whether_it_may_send_so_much(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_what_is_not_http(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as raw:
        raw.sendall(b"\x16\x03\x01 hello?\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_unknown_routes_and_wrong_methods(server: Server) -> None:
    assert "/v2/nothing" in error_of(server.http.get("/v2/nothing"), 404)["message"]
    answer = server.http.get("/v1/completions")
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_thousand_connections_that_open_and_close_leave_nothing_behind(server: Server) -> None:
    process = psutil.Process()
    assert (
        server.http.get("/health").status_code == 200
    )  # the client's own connection is open from here on
    few = process.num_fds() + 8  # of a thousand that might stay
    request = b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{"model":'
    for number in range(1000):
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as raw:
            raw.sendall(request[: number % len(request)])
    # The server closes its ends one by one; a request that comes after them all is answered after them all.
    for _ in range(1000):
        assert server.http.get("/health").status_code == 200
        if process.num_fds() <= few:
            break
    assert process.num_fds() <= few
    assert MODEL in server.http.get("/v1/models").text
