"""Outputs that keep to a schema, on a real server: the same text whatever happens to the request on its way."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from forebay import LLM, SamplingParams
from forebay.core.sampling import Grammar, GrammarKind
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import DEADLINE_S, WORKER, Served, command_line, end_servers, start_server

SEEDS = (1, 2, 3)
PROMPT = "The water gathers before it falls. " * 8
WORDS = {
    "type": "array",
    "items": {"type": "string", "minLength": 3, "maxLength": 8},
    "minItems": 4,
    "maxItems": 4,
}

Start = Callable[..., Served]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Start]:
    cache_dir = tmp_path_factory.mktemp("cache")
    started: list[Served] = []

    def run(*more: str) -> Served:
        started.append(start_server(model_dir, cache_dir, "--store", "none", *more))
        return started[-1]

    yield run
    end_servers(started)


@pytest.fixture(scope="module")
def served(start: Start) -> Served:
    return start("--chunk-size", "8")


def asked(seed: int, **more: Any) -> dict[str, Any]:
    """Every seed has its own salt: no page is shared, so memory is short where it is meant to be."""
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS}}
    return {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 200,
        "seed": seed,
        "cache_salt": f"{seed}",
        "response_format": form,
        **more,
    }


def complete(served: Served, seed: int, **more: Any) -> list[dict[str, Any]]:
    answer = httpx.post(
        f"{served.url}/v1/completions", json=asked(seed, **more), timeout=DEADLINE_S
    )
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"])


def texts_of(served: Served, **more: Any) -> dict[int, str]:
    return {seed: complete(served, seed, **more)[0]["text"] for seed in SEEDS}


@pytest.fixture(scope="module")
def texts(served: Served) -> dict[int, str]:
    """What an undisturbed server says, one request after the other."""
    return texts_of(served)


def counter(served: Served, name: str) -> int:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith(f"{name} "))


def streamed(served: Served, tokens: Callable[[int], None]) -> dict[int, str]:
    """All seeds at once; ``tokens`` is told of every event that has come, of all of them."""
    found: dict[int, str] = {}
    count, lock = [0], threading.Lock()

    def read(seed: int) -> None:
        text = ""
        with httpx.stream(
            "POST",
            f"{served.url}/v1/completions",
            json=asked(seed, stream=True),
            timeout=DEADLINE_S,
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    with lock:
                        count[0] += 1
                        tokens(count[0])
        found[seed] = text

    threads = [threading.Thread(target=read, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return found


def test_texts_keep_to_the_schema_and_end_with_it(served: Served, texts: dict[int, str]) -> None:
    assert len(set(texts.values())) == len(SEEDS)
    for text in texts.values():
        words = json.loads(text)
        assert len(words) == 4
        assert all(3 <= len(word) <= 8 for word in words)
    assert complete(served, 1)[0]["finish_reason"] == "stop"


def test_choices_and_log_probabilities_change_no_text(
    served: Served, texts: dict[int, str]
) -> None:
    for seed in SEEDS:
        choices = complete(served, seed, n=3, logprobs=2)
        assert choices[0]["text"] == texts[seed]
        assert len({choice["text"] for choice in choices}) == 3
        for choice in choices:
            json.loads(choice["text"])


def test_chunks_and_a_cached_prompt_change_no_text(
    start: Start, served: Served, texts: dict[int, str]
) -> None:
    assert texts_of(served) == texts  # cached by now
    whole_prompt = start("--chunk-size", "512", "--page-size", "16")
    assert texts_of(whole_prompt) == texts


def test_requests_that_are_retracted_say_the_same(model_dir: Path) -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(WORDS))
    params = [SamplingParams(max_tokens=200, seed=seed, grammar=grammar) for seed in SEEDS]
    prompts = [f"{seed}. {PROMPT}" for seed in SEEDS]
    with LLM(str(model_dir), page_size=8, device_memory="350KiB", store="none") as llm:
        alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
        assert not llm.snapshot.retractions
        crowd = llm.generate(prompts, params)
        deadline = time.monotonic() + 10  # the planner tells its state twice a second
        while not llm.snapshot.retractions:
            assert time.monotonic() < deadline, "nothing was retracted"
            time.sleep(0.05)
    for one, other in zip(alone, crowd, strict=True):
        assert json.loads(one.outputs[0].text)
        assert one.outputs[0].text == other.outputs[0].text


def test_ranks_that_are_killed_change_no_text(served: Served, texts: dict[int, str]) -> None:
    def kill(count: int) -> None:
        if count in (60, 150):
            ranks = [
                child
                for child in psutil.Process(served.process.pid).children(recursive=True)
                if WORKER in command_line(child)
            ]
            ranks[count % len(ranks)].kill()

    before = counter(served, "forebay_worker_restarts_total")
    assert streamed(served, kill) == texts
    assert counter(served, "forebay_worker_restarts_total") > before


def test_a_forced_call_of_a_model_that_knows_no_tools(served: Served) -> None:
    """Random weights: every call that ends is one, whatever is asked; what is cut says so."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "day": {"enum": ["Mon", "Tue"]}},
        "required": ["city", "day"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for limit in (*range(1, 60, 7), 120):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hm"}],
            "tools": [tool],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": limit,
            "seed": limit,
        }
        answer = httpx.post(
            f"{served.url}/v1/chat/completions", json=body, timeout=DEADLINE_S
        ).json()
        choice = answer["choices"][0]
        if choice["finish_reason"] == "length":
            assert answer["usage"]["completion_tokens"] == limit
            continue
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert re.fullmatch(r"(?s).{0,5}", arguments["city"])
        assert arguments["day"] in ("Mon", "Tue")
    assert choice["finish_reason"] == "tool_calls"
