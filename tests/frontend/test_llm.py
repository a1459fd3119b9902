"""The offline `LLM` over the real engine: two stages of a tiny random model."""

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import LLM, SamplingParams
from forebay.frontend.prompts import PromptError
from forebay.settings import SettingsError
from tests.frontend.tiny_text import CONTEXT, write_random_weights, write_text_model
from tests.pace import paced

# Few places, so that whatever runs here meets their end.
SETTINGS = {
    "pp": 2,
    "page_size": 8,
    "device_memory": "4MiB",
    "threads_per_rank": 1,
    "max_running": 1,
    "max_waiting": 3,
}
PLACES = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("random_model")))


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **SETTINGS) as llm:
        yield llm


def test_results_are_shaped_as_in_vllm_and_come_in_order(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["Hello", list(b"World")]
    first, second = llm.generate(prompts, GREEDY)
    assert (first.prompt, first.prompt_token_ids) == ("Hello", list(b"Hello"))
    assert (second.prompt, second.prompt_token_ids) == (None, list(b"World"))
    (choice,) = first.outputs
    assert (choice.index, len(choice.token_ids), choice.finish_reason, choice.logprobs) == (
        0,
        12,
        "length",
        None,
    )
    assert first.finished


def test_a_text_does_not_depend_on_its_neighbours_or_on_the_cache(llm: LLM) -> None:
    prompt = "The same text as before, long enough for a few pages."
    alone = llm.generate(prompt, GREEDY)[0]
    crowd = llm.generate([prompt, "something else", prompt], GREEDY)
    assert (
        crowd[0].outputs[0].token_ids == alone.outputs[0].token_ids == crowd[2].outputs[0].token_ids
    )
    assert crowd[0].num_cached_tokens > 0


def test_seeds_repeat_and_choices_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, temperature=5.0, ignore_eos=True)
    once, again = (llm.generate("Once", params)[0] for _ in range(2))
    texts = [tuple(choice.token_ids) for choice in once.outputs]
    assert texts == [tuple(choice.token_ids) for choice in again.outputs]
    assert len(set(texts)) == 3


def test_logprobs(llm: LLM) -> None:
    (choice,) = llm.generate("x", GREEDY.replace(logprobs=2, max_tokens=3))[0].outputs
    assert choice.logprobs is not None and len(choice.logprobs) == 3
    best = choice.logprobs[0][choice.token_ids[0]]
    assert best.rank == 1, "greedy takes the most likely"
    assert choice.cumulative_logprob == pytest.approx(
        sum(
            entry[token].logprob
            for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)
        )
    )


def test_chat_and_stream_see_the_same_prompt(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (result,) = llm.chat(messages, GREEDY)
    assert result.prompt == "<user>Hi\n<assistant>"
    assert "".join(llm.stream(llm.render_chat(messages), GREEDY)) == result.outputs[0].text


def test_a_stream_that_is_left_early_leaves_the_engine_free(llm: LLM) -> None:
    for _ in range(3):
        stream = llm.stream("x", GREEDY.replace(max_tokens=400))
        next(stream)
        stream.close()
    assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 12


def test_it_works_inside_a_running_event_loop(llm: LLM) -> None:
    async def inside() -> int:
        return len(llm.generate("x", GREEDY))

    assert asyncio.run(inside()) == 1


def test_any_number_of_prompts_waits_for_the_few_places_there_are(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(3 * PLACES)]
    results = llm.generate(
        prompts, [GREEDY.replace(n=1 + number % PLACES) for number in range(len(prompts))]
    )
    assert [(result.prompt, len(result.outputs)) for result in results] == [
        (prompt, 1 + number % PLACES) for number, prompt in enumerate(prompts)
    ]


def test_streams_share_the_places_with_everybody(llm: LLM) -> None:
    """Also streams that nobody reads on meanwhile: their sequences come to their end, and their places are free then."""
    streams = [llm.stream("x", GREEDY) for _ in range(2 * PLACES)]
    first = [next(stream) for stream in streams]
    assert llm.generate(["x"] * PLACES, GREEDY)
    texts = [piece + "".join(stream) for piece, stream in zip(first, streams, strict=True)]
    assert len(set(texts)) == 1


def test_more_choices_than_there_are_places_are_refused_in_words(llm: LLM) -> None:
    assert len(llm.generate("x", GREEDY.replace(n=PLACES))[0].outputs) == PLACES
    with pytest.raises(ValueError, match="with n = 5 are 5 sequences; at most 4 can run or wait"):
        llm.generate("x", GREEDY.replace(n=PLACES + 1))
    assert llm.generate("x", GREEDY)


def test_what_cannot_be_served_is_refused_and_the_engine_lives_on(llm: LLM) -> None:
    with pytest.raises(PromptError, match="empty"):
        llm.generate("", GREEDY)
    with pytest.raises(PromptError, match="context"):
        llm.generate("x" * CONTEXT, GREEDY)
    with pytest.raises(ValueError, match="stop_token_ids has the token id 999"):
        llm.generate("x", GREEDY.replace(stop_token_ids=(999,)))
    with pytest.raises(SettingsError, match="not available yet"):
        LLM("demo", dp=2)
    assert llm.generate("x", GREEDY)


def test_a_plain_script_without_close_ends_and_leaves_no_process(model_dir: Path) -> None:
    script = textwrap.dedent(f"""
        import os, psutil
        from forebay import LLM, SamplingParams
        llm = LLM({str(model_dir)!r}, **{SETTINGS!r})
        text = llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0]
        print(len(text.token_ids), *[child.pid for child in psutil.Process().children(recursive=True)])
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=paced(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    count, *children = map(int, done.stdout.split())
    assert count == 2
    assert len(children) >= 3, "a planner and two ranks"
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
