"""Clients of others against a real server: openai, and where they are installed (`pip install -e '.[clients]'`) LiteLLM and lm-eval."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.frontend.served import until
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import Served, end_servers, start_server

USER: list[Any] = [{"role": "user", "content": "Hello"}]
TASK = "forebay_choices"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("clients") / "model"))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = start_server(model, tmp_path_factory.mktemp("cache"), "--store", "none")
    served.wait_line("is ready on")
    yield served
    end_servers([served])


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, timeout=60)


def outcome(client: openai.OpenAI, name: str) -> float:
    text = client.with_options(base_url=str(client.base_url).removesuffix("v1/")).get(
        "/metrics", cast_to=str
    )
    wanted = f'forebay_requests_total{{outcome="{name}"}} '
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(wanted))


def test_openai_whole_and_streamed_are_one_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 20, "temperature": 0}
    extra = {"ignore_eos": True}
    whole = client.chat.completions.create(**asked, extra_body=extra)
    with client.chat.completions.create(
        **asked, extra_body=extra, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20


def test_openai_asynchronous_many_at_once(served: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any") as client:
            answers = await asyncio.gather(
                *[
                    client.completions.create(
                        model="tiny", prompt="abc", max_tokens=9, seed=7, temperature=1
                    )
                    for _ in range(16)
                ]
            )
        return [answer.choices[0].text for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1, "one seed, one text"


def test_openai_that_breaks_off_is_an_abort(client: openai.OpenAI) -> None:
    before = outcome(client, "abort")
    with client.completions.create(
        model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    until(lambda: outcome(client, "abort") == before + 1)


def test_openai_names_what_is_wrong(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


@pytest.mark.slow
def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": "openai/tiny",
        "messages": [*USER, {"role": "assistant", "content": "Hi"}, *USER],
        "api_base": f"{served.url}/v1",
        "api_key": "any",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = litellm.completion(**asked)
    streamed = litellm.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12


@pytest.mark.slow
def test_a_multiple_choice_task_of_lm_eval(served: Served, model: Path, tmp_path: Path) -> None:
    """Its scores are those that the model itself gives to the choices."""
    lm_eval = pytest.importorskip("lm_eval")
    rows = [
        {"question": f"{n} and {n}?", "choices": ["yes", "no", "never"], "answer": n % 3}
        for n in range(6)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    arguments = {
        "model": "tiny",
        "base_url": f"{served.url}/v1/completions",
        "tokenizer": str(model),
        "tokenizer_backend": "huggingface",
    }
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
    )
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any")
    for sample in found["samples"][TASK]:
        for choice, (score, _) in zip(
            sample["doc"]["choices"], sample["filtered_resps"], strict=True
        ):
            given = f"{sample['doc']['question']} {choice}"
            scored = client.completions.create(
                model="tiny", prompt=given, echo=True, logprobs=1, max_tokens=0
            ).choices[0]
            assert scored.logprobs is not None and scored.logprobs.token_logprobs is not None
            own = sum(scored.logprobs.token_logprobs[-len(choice) - 1 :])
            assert float(score) == pytest.approx(own)
