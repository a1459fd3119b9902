"""The sampling values of generation_config.json, and what a request makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.frontend.parse import parse_chat, parse_completion
from forebay.models.errors import ModelError
from forebay.models.sampling_defaults import read_sampling_defaults

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, {}),
        ({"eos_token_id": 2, "max_length": 4096}, {}),
        ({"do_sample": True, **RECOMMENDED}, RECOMMENDED),
        (RECOMMENDED | {"top_p": None}, {k: v for k, v in RECOMMENDED.items() if k != "top_p"}),
        ({"do_sample": False, **RECOMMENDED}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"top_k": 5.0, "min_p": 0.1}, {"top_k": 5, "min_p": 0.1}),
    ],
)
def test_what_the_file_recommends(
    tmp_path: Path, said: dict[str, Any] | None, found: dict[str, float]
) -> None:
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert read_sampling_defaults(tmp_path) == found


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"temperature": "warm"}, "temperature is 'warm'; it must be a number"),
        ({"top_p": 3}, "top_p is 3; it must be .* or leave it out with --generation-config"),
        ([1], "holds list, expected a JSON object"),
    ],
)
def test_what_no_request_may_have(tmp_path: Path, said: Any, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=message):
        read_sampling_defaults(tmp_path)


def test_fields_of_a_request_count_before_the_models() -> None:
    body = {"model": "m", "prompt": "x"}
    bare = parse_completion(json.dumps(body).encode(), RECOMMENDED).params
    assert (bare.temperature, bare.top_k, bare.top_p, bare.repetition_penalty) == (
        0.6,
        20,
        0.95,
        1.05,
    )
    own = parse_completion(json.dumps(body | {"temperature": 0, "top_k": -1}).encode(), RECOMMENDED)
    assert (own.params.temperature, own.params.top_k, own.params.top_p) == (0.0, 0, 0.95)
    talk = {"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": 1}
    chat = parse_chat(json.dumps(talk).encode(), RECOMMENDED).params
    assert (chat.temperature, chat.top_p) == (0.6, 1.0)
    assert parse_chat(json.dumps(talk).encode()).params.temperature == 1.0
