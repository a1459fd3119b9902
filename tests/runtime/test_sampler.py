"""The sampler against a twin that takes one row at a time, in float64 and plain Python."""

import math
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.messages import Opening, pack_tokens
from forebay.core.sampling import SamplingParams
from forebay.models.grammar import GrammarCompiler, GrammarError
from forebay.runtime.grammars import Compiled, SlotGrammars
from forebay.runtime.mirror import Step
from forebay.runtime.sampler import Sampler, _share_floor, uniform

VOCAB = 600  # above what top_p looks at first
EOS = (3, 5)
Row = npt.NDArray[np.float64]

# Below this relative distance of a decision from its border, float32 and float64 may rightly differ.
CLOSE = 1e-4


@dataclass(frozen=True)
class Case:
    """One row: logits (VOCAB,) float32, the text so far, and what is asked."""

    logits: npt.NDArray[np.float32]
    params: SamplingParams
    prompt: list[int]
    output: list[int]


class Twin:
    """Chooses one token; ``sure`` is False if some decision was too close to call."""

    def __init__(self, case: Case) -> None:
        self.params = case.params
        self.sure = True
        self.token = self._choose(self._edited(case), len(case.output))

    def _edited(self, case: Case) -> Row:
        logits, params = case.logits.astype(np.float64), case.params
        for token, bias in params.logit_bias.items():
            if token < VOCAB:
                logits[token] += bias
        if len(case.output) < params.min_tokens:
            for token in (*EOS, *params.stop_token_ids):
                logits[token] = -math.inf
        for token in set(case.prompt + case.output):
            logits[token] *= (
                params.repetition_penalty if logits[token] <= 0 else 1 / params.repetition_penalty
            )
        for token in set(case.output):
            logits[token] -= (
                params.frequency_penalty * case.output.count(token) + params.presence_penalty
            )
        return logits

    def _choose(self, logits: Row, output_index: int) -> int:
        if self.params.is_greedy:
            best, second = np.sort(logits)[::-1][:2]
            self._decide(best, second)
            return int(np.argmax(logits))
        weights = self._filtered(np.exp((logits - logits.max()) / self.params.temperature))
        target = uniform(self.params.seed or 0, output_index) * weights.sum()
        reached = 0.0
        for token in np.flatnonzero(weights):
            reached += weights[token]
            self._decide(reached, target)
            if reached > target:
                return int(token)
        return int(np.flatnonzero(weights)[-1])

    def _filtered(self, weights: Row) -> Row:
        if self.params.min_p > 0:
            weights = self._cut(weights, self.params.min_p)
        if 0 < self.params.top_k < VOCAB:
            weights = self._cut(weights, float(np.sort(weights)[::-1][self.params.top_k - 1]))
        if self.params.top_p < 1:
            needed, reached = self.params.top_p * weights.sum(), 0.0
            for weight in np.sort(weights)[::-1]:
                reached += weight
                self._decide(reached, needed)
                if reached >= needed:
                    return self._cut(weights, float(weight))
        return weights

    def _cut(self, weights: Row, floor: float) -> Row:
        for weight in weights:
            if weight != floor and weight > 0:
                self._decide(weight, floor)
        return np.where(weights >= floor, weights, 0.0)

    def _decide(self, left: float, right: float) -> None:
        self.sure = self.sure and abs(left - right) > CLOSE * max(abs(left), abs(right))


def no_grammars() -> SlotGrammars:
    def load() -> GrammarCompiler:
        raise GrammarError("these tests have no tokenizer")

    return SlotGrammars(Compiled(load), VOCAB)


def sample(cases: list[Case]) -> list[int]:
    """All cases as one batch; each text comes as history and a last piece of one token."""
    sampler = Sampler(VOCAB, torch.device("cpu"), no_grammars())
    steps = []
    for slot, case in enumerate(cases):
        text = case.prompt + case.output
        history = pack_tokens(text[:-1]) if case.params.has_penalties else b""
        sampler.open(
            Opening(slot, "r", case.params, EOS, len(case.prompt), len(case.output), history)
        )
        steps.append(step(slot, text[-1:], len(text) - 1, len(case.output)))
    sampler.count(steps)
    logits = torch.from_numpy(np.stack([case.logits for case in cases]))
    before = logits.clone()
    chosen = sampler.sample(logits, steps)
    assert torch.equal(logits, before)
    return [token for token, _ in chosen]


def step(slot: int, tokens: list[int], start: int, output_index: int) -> Step:
    return Step(slot, start, np.array(tokens, np.uint32), start, True, output_index)


def params_of(dice: random.Random) -> SamplingParams:
    def maybe(value: float, off: float) -> float:
        return value if dice.random() < 0.4 else off

    return SamplingParams(
        temperature=dice.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        seed=dice.randrange(-(2**63), 2**64),
        top_k=int(maybe(dice.choice([1, 2, 7, 300, 10_000]), 0)),
        top_p=maybe(dice.choice([0.05, 0.5, 0.95, 0.9999]), 1.0),
        min_p=maybe(dice.choice([0.01, 0.2, 1.0]), 0.0),
        repetition_penalty=maybe(dice.choice([0.5, 1.3]), 1.0),
        presence_penalty=maybe(dice.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(dice.uniform(-2, 2), 0.0),
        min_tokens=int(maybe(3, 0)),
        stop_token_ids=(7,),
        logit_bias={
            dice.randrange(VOCAB + 10): dice.uniform(-100, 100) for _ in range(int(maybe(3, 0)))
        },
    )


def case_of(dice: random.Random) -> Case:
    logits = (
        np.random.default_rng(dice.randrange(2**32))
        .normal(0, dice.choice([0.1, 2.0, 6.0]), VOCAB)
        .astype(np.float32)
    )
    if dice.random() < 0.3:
        logits = np.round(logits * 2) / 2  # many ties
    prompt = [dice.randrange(VOCAB) for _ in range(dice.randint(1, 20))]
    return Case(
        logits, params_of(dice), prompt, [dice.randrange(10) for _ in range(dice.randint(0, 6))]
    )


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_every_row_of_a_batch_is_chosen_as_if_it_were_alone(seed: int, rows: int) -> None:
    dice = random.Random(seed)
    cases = [case_of(dice) for _ in range(rows)]
    for token, case in zip(sample(cases), cases, strict=True):
        twin = Twin(case)
        assert token == twin.token or not twin.sure


def test_most_cases_are_sure_so_that_the_property_means_something() -> None:
    dice = random.Random(1)
    assert sum(Twin(case_of(dice)).sure for _ in range(200)) > 100


def test_the_random_numbers_are_pinned_since_texts_depend_on_them() -> None:
    pinned = [0.0564663990004608, 0.6487508310490744, 0.44008326622012284, 0.7445966422481747]
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-1, 2)] == pinned
    assert uniform(2**64 - 1, 9) == uniform(-1, 9)
    assert all(0 <= uniform(5, index) < 1 for index in range(1000))


def test_draws_follow_the_distribution() -> None:
    logits = np.full(VOCAB, -30, np.float32)
    logits[[2, 10, 599]] = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    sampler = Sampler(VOCAB, torch.device("cpu"), no_grammars())
    sampler.open(Opening(0, "r", SamplingParams(seed=4), EOS, 1))
    steps = [step(0, [1], index, index) for index in range(5000)]
    tokens = [
        token for token, _ in sampler.sample(torch.from_numpy(logits).expand(5000, -1), steps)
    ]
    assert {
        token: pytest.approx(tokens.count(token) / 5000, abs=0.025) for token in (2, 10, 599)
    } == {2: 0.5, 10: 0.3, 599: 0.2}


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[3, 7, 20]] = [9, 8, 1]
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))
    for output, expected in (([], 20), ([1], 20), ([1, 1], 3)):
        assert sample([Case(logits, params, [1], output)]) == [expected]


@pytest.mark.parametrize("value", [math.inf, -math.inf])  # inside, both become NaN
def test_a_row_that_is_not_finite_gets_some_token_and_its_neighbours_the_right_ones(
    value: float,
) -> None:
    """A model that computes NaN must not end the rank, and with it everybody's requests."""
    broken = np.full(VOCAB, value, np.float32)
    sound = np.zeros(VOCAB, np.float32)
    sound[5] = 50
    params = [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=1, top_k=3, min_p=0.1),
        SamplingParams(temperature=0.0),
    ]
    for one in params:
        tokens = sample([Case(broken, one, [1], []), Case(sound, one, [1], [])])
        assert 0 <= tokens[0] < VOCAB and tokens[1] == 5


def test_counts_follow_a_text_over_chunks_and_forget_it_with_the_slot() -> None:
    sampler = Sampler(VOCAB, torch.device("cpu"), no_grammars())
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=2.0)
    sampler.open(
        Opening(0, "r", params, EOS, prompt_tokens=5, outputs=1, history=pack_tokens([1, 2]))
    )
    sampler.count([step(0, [3, 4], 2, 0)])
    sampler.count([step(0, [5, 6, 6], 4, 1)])  # position 4 is the prompt's last, then two outputs
    seen, emitted = sampler._counts.of([0])
    assert seen[0].nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]
    assert {int(token): float(emitted[0, token]) for token in emitted[0].nonzero()} == {6: 2.0}
    sampler.open(Opening(0, "s", params, EOS, prompt_tokens=5))
    assert not sampler._counts.of([0])[0].any()


def test_logprobs_are_those_of_the_models_own_distribution() -> None:
    dice = random.Random(2)
    logits = torch.randn(3, VOCAB)
    asks = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=5, logprobs=0),
    ]
    asks[0] = asks[0].replace(logit_bias={dice.randrange(VOCAB): 50.0})
    sampler = Sampler(VOCAB, torch.device("cpu"), no_grammars())
    for slot, params in enumerate(asks):
        sampler.open(Opening(slot, "r", params, EOS, 1))
    chosen = sampler.sample(logits, [step(slot, [1], 0, 0) for slot in range(3)])
    expected = logits.log_softmax(-1)
    first, second, third = (logprobs for _, logprobs in chosen)
    assert first is not None and second is None and third is not None
    assert first.chosen == pytest.approx(float(expected[0, chosen[0][0]]), abs=1e-5)
    assert list(first.top_ids) == expected[0].topk(3).indices.tolist()
    assert first.top == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert third.top == () and third.chosen == pytest.approx(
        float(expected[2, chosen[2][0]]), abs=1e-5
    )


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([2, 16, 1 << 10, 1 << 20]))
def test_the_floor_found_by_buckets_is_the_one_found_by_sorting(
    seed: int, rows: int, steps: int
) -> None:
    """Weights are dyadic, so that sums are exact in any order."""
    dice = np.random.default_rng(seed)
    weights = (dice.integers(0, steps + 1, (rows, 300)) / steps).astype(np.float32)
    weights[:, 0] = 1.0
    shares = dice.choice([2**-9, 0.25, 0.5, 0.9375, 1 - 2**-12], rows)
    found = _share_floor(torch.from_numpy(weights), torch.from_numpy(shares).unsqueeze(1))
    for row, share, floor in zip(weights, shares, found.flatten().tolist(), strict=True):
        descending = np.sort(row)[::-1]
        assert (
            floor
            == descending[
                np.argmax(
                    np.cumsum(descending, dtype=np.float64) >= share * row.sum(dtype=np.float64)
                )
            ]
        )


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = np.linspace(-50, 50, VOCAB, dtype=np.float32)
    assert sample(
        [Case(logits, SamplingParams(temperature=temperature, seed=1, top_p=0.9), [1], [])]
    ) == [VOCAB - 1]
