"""What a request says does not depend on where its KV came from: random traffic over every tier, against a server without any.

Sequences share prefixes, go on with their own answers, run several requests at once and lose device and host pages on the way; pools
are so small that eviction never rests.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from forebay import LLM, RequestOutput, SamplingParams
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.store.mooncake_cluster import mooncake_cluster
from tests.store.redis_server import redis_server

PAGE = 16
CONTEXT = 256
STEMS = 4
NEAR_LOGITS = 0.25  # bfloat16: the text may part where the two best are this near
PLAIN: dict[str, Any] = {
    "page_size": PAGE,
    "threads_per_rank": 1,
    "max_context": CONTEXT,
    "store": "none",
}
SMALL: dict[str, Any] = {**PLAIN, "fetch_threshold": PAGE, "fetch_policy": "wait"}


@dataclass(frozen=True)
class Case:
    """Settings under test, and those that the server without tiers must share with it."""

    name: str
    settings: dict[str, Any]
    numbers: dict[str, str] = field(default_factory=lambda: {"dtype": "float32"})
    store: str = "file:{}"

    @property
    def has_store(self) -> bool:
        return self.store != "none"


EMBEDDED = "embedded:{}?dram=4MiB&ssd=16MiB"
REDIS = "redis://127.0.0.1"  # of a server that the case starts, in which 4 MiB are room for pages
MOONCAKE = "mooncake://127.0.0.1"  # the same
INT8: dict[str, Any] = {"dtype": "float32", "kv_dtype": "int8"}
SELECTIVE: dict[str, Any] = {"write_policy": "write-through-selective"}
WRITE_BACK: dict[str, Any] = {"write_policy": "write-back"}
STAGING: dict[str, Any] = {"pp": 2, "host_memory": "80KiB", "host_mode": "staging"}
CASES = [
    Case(
        "write-through",
        {"pp": 2, "device_memory": "96KiB", "host_memory": "160KiB", "chunk_size": 64},
    ),
    Case(
        "staging",
        {
            "pp": 3,
            "device_memory": "96KiB",
            "host_memory": "160KiB",
            "host_mode": "staging",
            "chunk_size": 32,
            "fetch_route": "staged",
        },
    ),
    Case(
        "host only",
        {"device_memory": "136KiB", "host_memory": "1MiB", "write_policy": "write-back"},
        store="none",
    ),
    Case(
        "selective",
        {
            "pp": 4,
            "device_memory": "64KiB",
            "host_memory": "64KiB",
            "write_policy": "write-through-selective",
        },
    ),
    Case(
        "write-back",
        {
            "tp": 2,
            "device_memory": "96KiB",
            "host_memory": "128KiB",
            "write_policy": "write-back",
            "chunk_size": 16,
        },
    ),
    Case(
        "staging ticket",
        {"pp": 2, "device_memory": "80KiB", "host_memory": "80KiB", "host_mode": "staging"},
    ),
    Case(
        "int8",
        {"pp": 2, "device_memory": "32KiB", "host_memory": "64KiB"},
        {"dtype": "float32", "kv_dtype": "int8"},
    ),
    Case(
        "fp8",
        {"device_memory": "64KiB", "host_memory": "64KiB"},
        {"dtype": "float32", "kv_dtype": "fp8_e4m3"},
    ),
    Case(
        "float16",
        {"pp": 2, "device_memory": "48KiB", "host_memory": "64KiB"},
        {"dtype": "float32", "kv_dtype": "float16"},
    ),
    Case(
        "bfloat16",
        {"pp": 2, "device_memory": "48KiB", "host_memory": "96KiB", "chunk_size": 48},
        {"dtype": "bfloat16"},
    ),
    Case("embedded", {"pp": 2, "device_memory": "96KiB", "host_memory": "160KiB"}, store=EMBEDDED),
    Case("redis", {"pp": 2, "device_memory": "96KiB", "host_memory": "160KiB"}, store=REDIS),
    Case("mooncake", {"pp": 2, "device_memory": "96KiB", "host_memory": "160KiB"}, store=MOONCAKE),
    Case("redis, staging, int8", STAGING | {"device_memory": "32KiB"}, INT8, REDIS),
    Case(
        "embedded, staging, write-back",
        STAGING | WRITE_BACK | {"device_memory": "80KiB"},
        store=EMBEDDED,
    ),
    Case(
        "embedded, int8, staging",
        STAGING | {"device_memory": "32KiB"},
        {"dtype": "float32", "kv_dtype": "int8"},
        EMBEDDED,
    ),
    Case(
        "int8, staging",
        STAGING | {"device_memory": "22KiB"},
        {"dtype": "float32", "kv_dtype": "int8"},
    ),
    Case(
        "fp8, staging, write-back",
        STAGING | WRITE_BACK | {"device_memory": "20KiB"},
        {"dtype": "float32", "kv_dtype": "fp8_e4m3"},
    ),
    Case(
        "float16, staging, back",
        STAGING | WRITE_BACK | {"device_memory": "40KiB"},
        {"dtype": "float32", "kv_dtype": "float16"},
    ),
    Case("bfloat16, staging", STAGING | {"device_memory": "48KiB"}, {"dtype": "bfloat16"}),
    Case(
        "bfloat16, staging, selective",
        STAGING | SELECTIVE | {"device_memory": "48KiB"},
        {"dtype": "bfloat16"},
        EMBEDDED,
    ),
    Case(
        "bfloat16, staging, write-back",
        STAGING | WRITE_BACK | {"device_memory": "36KiB"},
        {"dtype": "bfloat16"},
    ),
    Case(
        "embedded, int8, tp, staged",
        {"tp": 2, "device_memory": "32KiB", "host_memory": "64KiB", "fetch_route": "staged"}
        | SELECTIVE,
        {"dtype": "float32", "kv_dtype": "int8"},
        EMBEDDED,
    ),
]


class Expected:
    """Answers of a server that forgets everything after each request."""

    def __init__(self, model: Path, numbers: dict[str, str]) -> None:
        self._llm = LLM(str(model), host_memory=1, **PLAIN, **numbers)
        self._answers: dict[tuple[tuple[int, ...], int], RequestOutput] = {}

    def close(self) -> None:
        self._llm.close()

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        key = (tuple(prompt), params.max_tokens or 0)
        if key not in self._answers:
            (answer,) = self._llm.generate([list(prompt)], params)
            assert not answer.num_cached_tokens
            self._llm.flush_cache(("device",))
            self._answers[key] = answer
        return self._answers[key]


@dataclass
class Hits:
    device: int = 0
    host: int = 0
    store: int = 0

    def add(self, output: RequestOutput) -> None:
        self.device += output.cached_device
        self.host += output.cached_host
        self.store += output.cached_store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model")
    write_text_model(path)
    write_random_weights(path)
    yield path


def check_sequence(llm: LLM, expected: Expected, seed: int, tolerance: float, hits: Hits) -> None:
    """A few rounds of requests at once; later ones go on where earlier ones ended."""
    randomness = random.Random(seed)
    stems = [[randomness.randrange(5, 250) for _ in range(CONTEXT // 2)] for _ in range(STEMS)]
    talks: list[list[int]] = []
    for _ in range(4):
        prompts = []
        for _ in range(randomness.choice([1, 2, 4])):
            if talks and randomness.random() < 0.4:
                prompts.append([*randomness.choice(talks), randomness.randrange(5, 250)])
            else:
                own = [randomness.randrange(5, 250) for _ in range(randomness.choice([0, 1, 5]))]
                prompts.append(
                    randomness.choice(stems)[
                        : randomness.choice([PAGE, 3 * PAGE, 5 * PAGE + 3, CONTEXT // 2])
                    ]
                    + own
                )
        params = SamplingParams(
            max_tokens=randomness.choice([1, 4, PAGE + 2]),
            temperature=0,
            ignore_eos=True,
            logprobs=2,
        )
        prompts = [prompt for prompt in prompts if len(prompt) + PAGE + 2 < CONTEXT]
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            hits.add(output)
            assert_same(output, expected(prompt, params), tolerance)
            talks.append(prompt + output.outputs[0].token_ids)
        if randomness.random() < 0.5:
            llm.flush_cache(randomness.choice([("device",), ("device", "host")]))


def assert_same(got: RequestOutput, expected: RequestOutput, tolerance: float) -> None:
    """Token for token; text may part only where the expected one's two best were within ``tolerance`` logits of each other."""
    ours, theirs = got.outputs[0].token_ids, expected.outputs[0].token_ids
    if ours == theirs:
        return
    at = next(index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    scores = expected.outputs[0].logprobs
    assert scores is not None
    best, second = sorted((entry.logprob for entry in scores[at].values()), reverse=True)[:2]
    assert best - second <= tolerance, (
        f"output {at} is {ours[at]}, not {theirs[at]}, which leads by {best - second:.3f}"
    )


@contextlib.contextmanager
def opened_store(case: Case, path: Path) -> Iterator[str]:
    """The URL of the case's store, and its server for as long as it is needed."""
    if case.store == MOONCAKE:
        with mooncake_cluster() as mooncake:
            yield mooncake.url
        return
    if case.store != REDIS:
        yield case.store.format(path)
        return
    limits = ("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    with redis_server(path, *limits) as server:
        yield server.url


def run_case(case: Case, model: Path, store: Path, seeds: range) -> Hits:
    tolerance = NEAR_LOGITS if case.numbers["dtype"] == "bfloat16" else 0.0
    hits = Hits()
    expected = Expected(model, case.numbers)
    try:
        with (
            opened_store(case, store) as url,
            LLM(str(model), **(SMALL | case.numbers | case.settings | {"store": url})) as llm,
        ):
            for seed in seeds:
                check_sequence(llm, expected, seed, tolerance, hits)
    finally:
        expected.close()
    return hits


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_text_is_the_same_whatever_tier_it_comes_from(
    case: Case, model: Path, tmp_path: Path
) -> None:
    assert_all_tiers_hit(case, run_case(case, model, tmp_path / "pages", range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_400_sequences(case: Case, model: Path, tmp_path: Path) -> None:
    first = 1000 * CASES.index(case)
    assert_all_tiers_hit(case, run_case(case, model, tmp_path / "pages", range(first, first + 20)))


def assert_all_tiers_hit(case: Case, hits: Hits) -> None:
    print(f"{case.name}: {hits}")
    assert hits.device
    assert hits.host or "host_mode" in case.settings
    assert hits.store or not case.has_store
