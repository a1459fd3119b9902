"""The tiers for real: processes, files, and the text that must not depend on where KV came from."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forebay import LLM, RequestOutput, SamplingParams
from forebay.core.transfers.policy import TICKETS_AT_ONCE
from forebay.store.backends import directory
from tests.frontend.tiny_text import CONTEXT, write_random_weights, write_text_model
from tests.unhurried import unhurried

PAGE = 16
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
COMMON = {
    "dtype": "float32",
    "page_size": PAGE,
    "threads_per_rank": 1,
    "fetch_threshold": PAGE,
    "chunk_size": 64,
}


@pytest.fixture(scope="module", autouse=True)
def no_hurry() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in unhurried().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model")
    write_text_model(path)
    write_random_weights(path)
    yield path


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts over three stems, as conversations share theirs, the longest first."""
    randomness = random.Random(seed)
    stems = [[randomness.randrange(5, 60) for _ in range(CONTEXT // 2)] for _ in range(3)]
    found = [
        randomness.choice(stems)[: randomness.choice([PAGE, 3 * PAGE, CONTEXT // 2])]
        + [randomness.randrange(5, 60) for _ in range(3)]
        for _ in range(count)
    ]
    return sorted(found, key=len, reverse=True)


def run(model: Path, work: list[list[int]], **settings: object) -> list[RequestOutput]:
    """One request after another, so that later ones meet what earlier ones left."""
    with LLM(str(model), **(COMMON | settings)) as llm:  # type: ignore[arg-type]
        return [llm.generate([prompt], GREEDY)[0] for prompt in work]


def text(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached(outputs: list[RequestOutput]) -> int:
    return sum(output.num_cached_tokens or 0 for output in outputs)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """The text without any help from lower tiers."""
    return text(run(model, prompts(12, seed=1), host_memory=1))


@pytest.fixture(scope="module")
def cached_on_device(model: Path) -> int:
    """How much is cached where device memory is little and all there is."""
    return cached(run(model, prompts(12, seed=1), pp=2, device_memory="80KiB", host_memory=1))


@pytest.fixture(scope="module")
def first(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[RequestOutput], Path]:
    """The run that fills a store, and the store's directory."""
    pages = tmp_path_factory.mktemp("first") / "pages"
    return run(model, prompts(12, seed=1), pp=2, store=f"file:{pages}"), pages


@pytest.fixture
def store(first: tuple[list[RequestOutput], Path], tmp_path: Path) -> str:
    """A test's own copy of the filled store."""
    shutil.copytree(first[1], tmp_path / "pages")
    return f"file:{tmp_path / 'pages'}"


@pytest.mark.parametrize("policy", ["write-through", "write-through-selective", "write-back"])
def test_text_is_the_same_when_prefixes_go_to_host_memory_and_back(
    model: Path, plain: list[list[int]], cached_on_device: int, policy: str
) -> None:
    outputs = run(
        model,
        prompts(12, seed=1),
        pp=2,
        device_memory="80KiB",
        host_memory="1MiB",
        write_policy=policy,
    )
    assert text(outputs) == plain
    assert policy == "write-through-selective" or cached(outputs) > cached_on_device


def test_a_restarted_server_is_warm_from_the_store(
    model: Path, plain: list[list[int]], first: tuple[list[RequestOutput], Path], store: str
) -> None:
    work = prompts(12, seed=1)
    again = run(model, work, pp=2, store=store, fetch_policy="wait")
    assert text(first[0]) == text(again) == plain
    assert again[0].num_cached_tokens == len(work[0]) // PAGE * PAGE, (
        "every full page of it was stored"
    )
    assert cached(again) > cached(first[0])


@pytest.mark.parametrize("route", ["ticket", "staged"])
def test_with_staging_host_pages_the_store_is_all_that_is_below_the_device(
    model: Path, plain: list[list[int]], tmp_path: Path, route: str
) -> None:
    work = prompts(12, seed=1)
    settings = {
        "pp": 2,
        "store": f"file:{tmp_path / 'pages'}",
        "host_mode": "staging",
        "fetch_route": route,
        "fetch_policy": "wait",
    }
    first = run(model, work, **settings)
    again = run(model, work, device_memory="80KiB", **settings)
    assert text(first) == text(again) == plain
    assert again[0].num_cached_tokens == len(work[0]) // PAGE * PAGE, (
        "every full page of it was stored"
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_the_staged_route_brings_the_same_pages_stage_by_stage(
    model: Path,
    plain: list[list[int]],
    first: tuple[list[RequestOutput], Path],
    store: str,
    tp: int,
) -> None:
    work = prompts(12, seed=1)
    again = run(model, work, pp=2, tp=tp, store=store, fetch_route="staged", fetch_policy="wait")
    assert text(again) == plain
    assert again[0].num_cached_tokens == len(work[0]) // PAGE * PAGE, (
        "every full page of it was stored"
    )
    assert cached(again) > cached(first[0])


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8_e4m3"])
def test_quantised_pages_come_back_from_every_tier_as_they_were(
    model: Path, tmp_path: Path, kv_dtype: str
) -> None:
    """Codes and scales: text that was computed on pages from host memory or the store equals text that never left the device."""
    work = prompts(12, seed=1)
    settings = {"pp": 2, "kv_dtype": kv_dtype}
    alone = run(model, work, host_memory=1, **settings)
    url = f"file:{tmp_path / 'pages'}"
    moved = run(model, work, device_memory="80KiB", host_memory="1MiB", store=url, **settings)
    again = run(model, work, store=url, fetch_policy="wait", **settings)
    assert text(moved) == text(again) == text(alone)
    assert any(path.is_file() for path in (tmp_path / "pages").rglob("*"))
    if kv_dtype == "int8":
        other = run(model, work[:1], store=url, fetch_policy="wait", pp=2)
        assert cached(other) == 0, "pages of another format are other pages"


def test_copies_and_reads_take_a_bounded_share_of_the_cores(model: Path, tmp_path: Path) -> None:
    """However much there is to fetch, save and store, a rank has as many threads for it as the design says, each of which computes on
    one core at most (no library's pool is behind it)."""

    def threads(**settings: object) -> list[int]:
        """Of each rank, once all has been stored, dropped and fetched again, eight requests at a time."""
        work = prompts(24, seed=1)
        with LLM(str(model), pp=2, **(COMMON | settings)) as llm:  # type: ignore[arg-type]
            for _ in range(2):
                llm.generate(work, GREEDY)
            children = psutil.Process().children(recursive=True)
            return [
                child.num_threads()
                for child in children
                if "forebay.runtime.worker" in " ".join(child.cmdline())
            ]

    bare = threads(host_memory=1)
    store = f"file:{tmp_path / 'pages'}"
    full = threads(device_memory="160KiB", host_memory="160KiB", store=store, fetch_policy="wait")
    assert len(bare) == len(full) == 2
    assert [
        more - less
        for more, less in zip(full, bare, strict=True)
        if more - less > TICKETS_AT_ONCE + 1 + directory.THREADS
    ] == []


def test_damaged_files_cost_recomputing_and_nothing_else(
    model: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    work = prompts(12, seed=1)
    url = f"file:{tmp_path / 'pages'}"
    run(model, work, store=url)
    files = sorted(path for path in (tmp_path / "pages").rglob("*") if path.is_file())
    assert files
    for index, path in enumerate(files):
        data = bytearray(path.read_bytes())
        if index % 3 == 0:
            data[len(data) // 2] ^= 0xFF
        path.write_bytes(data if index % 3 != 1 else data[: len(data) // 2])
    damaged = run(model, work, store=url, fetch_policy="wait")
    assert text(damaged) == plain
    full = len(work[0]) // PAGE * PAGE
    assert damaged[0].cached_store < full
    healed = run(model, work, store=url, fetch_policy="wait")
    assert text(healed) == plain
    assert healed[0].cached_store == full, "what was computed again was stored again"
