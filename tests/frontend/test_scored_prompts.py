"""Scores of a given text, over the real engine: the same cold, with its prefix cached, and however plans cut the prompt."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import LLM, SamplingParams
from tests.frontend.tiny_text import CONTEXT, write_random_weights, write_text_model

TEXT = "A rather long text, of which some pages are full: " + "wägt und misst 日本 " * 8
SETTINGS = {"page_size": 16, "device_memory": "2MiB", "store": "none", "dtype": "float32"}
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("scored")))


@pytest.fixture(scope="module", params=[{"pp": 1}, {"pp": 2, "chunk_size": 48}], ids=["1", "2"])
def llm(path: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(path), **SETTINGS, **request.param) as llm:
        yield llm


def scores(llm: LLM, prompt: Any) -> list[Any]:
    found = llm.generate(prompt, SCORE)[0].prompt_logprobs
    assert found is not None
    return found


def test_scores_are_equal_cold_and_cached_and_however_the_prompt_was_cut(llm: LLM) -> None:
    cold = scores(llm, TEXT)
    assert len(cold) == len(TEXT.encode()) and cold[0] is None
    assert llm.generate(TEXT, GREEDY)[0].cached_device > 0
    assert scores(llm, TEXT) == cold
    assert llm.generate(TEXT, SCORE)[0].num_cached_tokens == 0
    together: list[list[Any]] = []  # among others, so that plans cut it elsewhere
    for out in llm.generate([TEXT[:33], TEXT, TEXT + TEXT[:99], TEXT], SCORE):
        together.append(out.prompt_logprobs or [])
    assert together[1] == cold and together[3] == cold
    assert together[2][: len(cold)] == cold
    assert together[0] == cold[: len(together[0])]


def test_the_scores_of_what_was_generated_are_its_log_probabilities(llm: LLM) -> None:
    out = llm.generate(TEXT, GREEDY)[0]
    whole = out.prompt_token_ids + out.outputs[0].token_ids
    given = scores(llm, whole)[len(out.prompt_token_ids) :]
    said = out.outputs[0].logprobs
    assert said is not None
    for token, mine, theirs in zip(out.outputs[0].token_ids, given, said, strict=True):
        assert mine[token].logprob == theirs[token].logprob
        assert list(mine) == list(theirs)


def test_scores_are_a_distribution_in_order(llm: LLM) -> None:
    for entry in scores(llm, TEXT)[1:]:
        ranked = [found for found in entry.values() if found.rank is not None]
        assert [found.rank for found in ranked] == [1, 2, 3]
        assert sorted((found.logprob for found in ranked), reverse=True) == [
            found.logprob for found in ranked
        ]
        assert sum(math.exp(found.logprob) for found in entry.values()) <= 1.0001


def test_several_choices_of_a_prompt_score_it_once_and_a_token_alone_has_none(llm: LLM) -> None:
    params = SCORE.replace(n=3, max_tokens=4, temperature=1.0, seed=5)
    assert llm.generate(TEXT, params)[0].prompt_logprobs == scores(llm, TEXT)
    assert scores(llm, [65]) == [None]
    assert len(scores(llm, [65] * (CONTEXT - 1))) == CONTEXT - 1


def test_scoring_beside_text_changes_neither(llm: LLM) -> None:
    alone = llm.generate(TEXT[:50], GREEDY)[0].outputs[0].token_ids
    found: list[Any] = []
    cold = scores(llm, TEXT)
    beside = threading.Thread(target=lambda: found.extend(scores(llm, TEXT) for _ in range(3)))
    beside.start()
    texts = [llm.generate(TEXT[:50], GREEDY)[0].outputs[0].token_ids for _ in range(3)]
    beside.join()
    assert texts == [alone] * 3
    assert found == [cold] * 3
