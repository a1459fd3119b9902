"""`/v1/completions` and `/v1/chat/completions`, not streamed: what goes to the engine, and what comes back."""

import pytest

from forebay.core.messages import Submit, TierUse, Usage, unpack_tokens
from tests.frontend.served import Server, says, until
from tests.frontend.tiny_text import CONTEXT, EOS

USER = [{"role": "user", "content": "x"}]


def prompt_text(submit: Submit) -> str:
    return bytes(unpack_tokens(submit.prompt).tolist()).decode()


def test_a_text_is_continued_and_counted(server: Server) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="Hi!")
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ) == (3, 6, 9)
    assert prompt_text(server.planner.submits[0]) == "Hi!"


def test_cached_tokens_are_told_by_tier_and_sum_up(server: Server) -> None:
    server.planner.usage = Usage(cached_device=64, cached_host=32, cached_store=16)
    usage = server.post("/v1/completions", prompt="Hi").json()["usage"]
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 112,
        "cached_device": 64,
        "cached_host": 32,
        "cached_store": 16,
    }


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_a_prompt_is_text_or_tokens_or_several_of_either(
    server: Server, prompt: object, seen: list[str]
) -> None:
    answer = server.post("/v1/completions", prompt=prompt)
    assert [prompt_text(submit) for submit in server.planner.submits] == seen
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(seen)))


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: Server) -> None:
    server.planner.script = lambda submit: [*unpack_tokens(submit.prompt).tolist(), EOS]
    answer = server.openai.completions.create(model="tiny", prompt=["a", "b"], n=2)
    assert [choice.text for choice in answer.choices] == ["a", "a", "b", "b"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2, (
        "a prompt counts once however many choices it has"
    )


def test_a_request_with_a_seed_is_seeded_alike_every_time_and_its_choices_differ(
    server: Server,
) -> None:
    for _ in range(2):
        server.post("/v1/completions", prompt="x", seed=7, n=3)
    seeds = [submit.params.seed for submit in server.planner.submits]
    assert seeds[0] == 7
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]


def test_requests_without_a_seed_get_one_each(server: Server) -> None:
    server.post("/v1/completions", prompt=["x", "x"], n=2)
    seeds = [submit.params.seed for submit in server.planner.submits]
    assert None not in seeds
    assert len(set(seeds)) == 4


def test_every_sampling_field_reaches_the_engine(server: Server) -> None:
    asked = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop_token_ids": [65],
        "ignore_eos": True,
        "logprobs": 2,
        "skip_special_tokens": False,
    }
    server.planner.script = says("x", end=False)
    answer = server.post(
        "/v1/completions",
        prompt="x",
        logit_bias={"70": -5},
        cache_salt="me",
        no_store=True,
        priority=4,
        **asked,
    )
    assert answer.status_code == 200
    submit = server.planner.submits[0]
    assert {name: getattr(submit.params, name) for name in asked if name != "stop_token_ids"} == {
        name: value for name, value in asked.items() if name != "stop_token_ids"
    }
    assert submit.params.stop_token_ids == (65,)
    assert submit.params.logit_bias == {70: -5.0}
    assert (submit.salt, submit.no_store, submit.priority, submit.eos) == (b"me", True, 4, (EOS,))


def test_max_tokens_defaults_to_16_for_completions_and_to_all_the_room_for_chat(
    server: Server,
) -> None:
    server.planner.script = says("x", end=False)
    text = server.post("/v1/completions", prompt="x").json()
    assert text["choices"][0]["text"] == "x" * 16
    assert text["choices"][0]["finish_reason"] == "length"
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["usage"]["total_tokens"] == CONTEXT


def test_the_default_is_cut_to_what_the_cache_can_hold(server: Server) -> None:
    server.planner.script = says("x", end=False)
    server.planner.device = TierUse(capacity=2, free=2)
    until(lambda: server.http.get("/cache").json()["tiers"]["device"]["capacity"] == 2)
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["usage"]["total_tokens"] == 2 * 64


def test_logprobs_of_completions(server: Server) -> None:
    answer = server.openai.completions.create(model="tiny", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("hello"), "the end token is no part of the text"
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"A": -1.0, "B": -2.0, "h": -0.5}


def test_logprobs_of_chat_and_a_token_that_is_half_a_character(server: Server) -> None:
    server.planner.script = says("é")
    answer = server.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == "é"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.bytes) for entry in content] == [("", [0xC3]), ("é", [0xA9])]
    assert content[0].top_logprobs[0].token == "A"
    assert content[0].top_logprobs[0].bytes == [65]


def test_an_echo_is_the_prompt_and_its_scores_are_of_its_tokens(server: Server) -> None:
    asked = {"prompt": "né", "echo": True, "logprobs": 2, "max_tokens": 2}
    choice = server.post("/v1/completions", **asked).json()["choices"][0]
    assert choice["text"] == "néhe"
    found = choice["logprobs"]
    assert found["tokens"] == ["n", "", "é", "h", "e"]
    assert found["text_offset"] == [0, 1, 1, 2, 3]
    assert found["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert all(len(top) >= 2 for top in found["top_logprobs"][1:])
    assert server.planner.submits[0].params.prompt_logprobs == 2


def test_an_echo_has_a_position_for_the_token_that_ended_the_text(server: Server) -> None:
    server.planner.script = says("")
    asked = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 1}
    choice = server.post("/v1/completions", **asked).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b", ""]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5]


def test_an_echo_of_several_prompts_and_choices(server: Server) -> None:
    asked = {"prompt": [[65, 66], [67]], "echo": True, "n": 2, "max_tokens": 1, "logprobs": 0}
    answer = server.post("/v1/completions", **asked).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ABh", "ABh", "Ch", "Ch"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 3, 2, 2]
    scoring = [submit.params.prompt_logprobs for submit in server.planner.submits]
    assert scoring == [0, None, 0, None], "a prompt is scored once"


@pytest.mark.parametrize("logprobs", [None, 1])
def test_nothing_may_be_asked_for_beside_an_echo(server: Server, logprobs: int | None) -> None:
    asked = {"prompt": "ab", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = server.post("/v1/completions", **asked).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert answer["usage"]["completion_tokens"] == 0
    if logprobs:
        assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_an_echo_is_streamed_before_the_output(server: Server) -> None:
    stream = server.openai.completions.create(model="tiny", prompt="ab", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abhello"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_scores_by_token_id(server: Server, path: str) -> None:
    given = {"prompt": "ab"} if path == "/v1/completions" else {"messages": USER}
    answer = server.post(path, prompt_logprobs=1, **given).json()
    holder = answer["choices"][0] if "prompt" in given else answer
    first, second, *_ = holder["prompt_logprobs"]
    assert first is None
    assert second["65"] == {"logprob": -1.0, "rank": 1, "decoded_token": "A"}
    assert len(second) == 2, "the token that was given, and the one that was thought of"
    assert len(holder["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_chat_goes_through_the_template_and_parts_are_joined(server: Server) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Good "}, {"type": "text", "text": "day"}],
        },
        {"role": "assistant", "content": "Yes?", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Who?"},
    ]
    answer = server.post("/v1/chat/completions", messages=messages)
    assert answer.json()["choices"][0]["message"] == {
        "content": "hello",
        "role": "assistant",
        "refusal": None,
    }
    seen = "<system>Be brief.\n<user>Good day\n<assistant>Yes?\n<user>Who?\n<assistant>"
    assert prompt_text(server.planner.submits[0]) == seen


def test_a_stop_string_over_several_tokens_ends_the_text_and_the_engines_work(
    server: Server,
) -> None:
    server.planner.script = says("one two three", end=False)
    server.planner.allow(20)
    answer = server.post(
        "/v1/completions", prompt="x", stop=["three", "wo t"], max_tokens=100
    ).json()
    assert answer["choices"][0]["text"] == "one t"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "wo t"
    assert answer["usage"]["completion_tokens"] == len("one two t")
    server.planner.wait_for(lambda: len(server.planner.aborts) == 1)
    assert server.planner.submits[0].params.stop == ()


def test_text_that_only_begins_like_a_stop_string_is_not_lost(server: Server) -> None:
    server.planner.script = says("one tw")
    answer = server.post("/v1/completions", prompt="x", stop="two").json()
    assert answer["choices"][0]["text"] == "one tw"


def test_logprobs_end_where_the_stop_string_begins(server: Server) -> None:
    server.planner.script = says("abEND", end=False)
    answer = server.post("/v1/completions", prompt="x", stop="END", logprobs=0).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


def test_before_min_tokens_nothing_ends_the_text(server: Server) -> None:
    server.planner.script = says("END.END.", end=False)
    answer = server.post("/v1/completions", prompt="x", stop="END", min_tokens=4).json()
    assert answer["choices"][0]["text"] == "END."
    assert answer["usage"]["completion_tokens"] == 7


def test_a_stop_token_is_counted_and_named_but_not_shown(server: Server) -> None:
    answer = server.post("/v1/completions", prompt="x", stop_token_ids=[ord("l")]).json()
    assert answer["choices"][0]["text"] == "he"
    assert answer["choices"][0]["stop_reason"] == ord("l")
    assert answer["usage"]["completion_tokens"] == 3


def test_neutral_values_of_what_is_not_supported_are_accepted(server: Server) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "functions": None,
        "best_of": 1,
        "modalities": ["text"],
        "audio": None,
        "user": "me",
    }
    assert (
        server.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], **neutral
        ).status_code
        == 200
    )
