"""`forebay serve` and `forebay generate` as processes, over the real engine with a tiny random model."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.frontend.served import until
from tests.frontend.tiny_text import LAYERS, write_random_weights, write_text_model
from tests.pace import paced
from tests.serving import DEADLINE_S, FOREBAY, OPTIONS, Served, end_servers, start_server
from tests.unhurried import unhurried


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(write_text_model(tmp_path_factory.mktemp("random_model")))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these servers leave flight records."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def serve(model_dir: Path, cache_dir: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(*more: str, **environment: str) -> Served:
        started.append(start_server(model_dir, cache_dir, *more, **environment))
        return started[-1]

    yield start
    end_servers(started)


@pytest.fixture(scope="module")
def served(serve: Callable[[], Served]) -> Served:
    return serve()


def test_a_chat_over_the_real_engine_sees_its_own_cache(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "What is a forebay, and what is it for?"}]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0
        )  # type: ignore[arg-type]
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] is not None and cached[1] >= 8
    freed = httpx.post(f"{served.url}/cache/flush", timeout=DEADLINE_S).json()
    assert freed["freed_pages"] > 0


def test_streamed_and_whole_answers_are_equal(served: Served) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "prompt": "The water", "max_tokens": 24, "seed": 4}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    streamed = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_tiers_are_used_flushed_and_accounted_for(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    options = (
        "--store",
        f"file:{tmp_path / 'pages'}",
        "--fetch-threshold",
        "8",
        "--fetch-policy",
        "wait",
        "--max-running",
        "4",
    )
    url = serve(*options, **unhurried()).url
    body = {
        "model": "tiny",
        "prompt": "What is a forebay, and what is it for?",
        "max_tokens": 1,
        "temperature": 0,
    }

    def ask() -> dict[str, int]:
        usage = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).json()["usage"]
        details: dict[str, int] = usage["prompt_tokens_details"]
        return details

    def flush(*tiers: str) -> int:
        until(lambda: not store()["writing"])
        answer = httpx.post(
            f"{url}/cache/flush", json={"tiers": tiers, "timeout_s": DEADLINE_S}, timeout=DEADLINE_S
        )
        assert answer.status_code == 200, answer.text
        freed: int = answer.json()["freed_pages"]
        return freed

    def store() -> dict[str, Any]:
        told: dict[str, Any] = httpx.get(f"{url}/cache").json()["tiers"]["store"]
        return told

    assert ask()["cached_tokens"] == 0
    assert flush("device", "host") > 0
    stored = ask()
    assert stored["cached_store"] == stored["cached_tokens"] >= 8
    until(lambda: store().get("objects", 0) > 0)
    metrics = {
        "transfer_bytes_total": "backup load store fetch",
        "transfer_seconds_count": "backup load store fetch",
    }
    for name, kinds in metrics.items():
        for kind in kinds.split():  # ranks report once a second
            until(lambda metric=f'forebay_{name}{{kind="{kind}"}}': value(url, metric) > 0)
    for phase in ("query", "fetch"):
        assert value(url, f'forebay_ticket_seconds_count{{phase="{phase}"}}') >= 1
    for op in ("match", "get", "put"):
        assert value(url, f'forebay_store_ops_total{{op="{op}",outcome="ok"}}') >= 1
    assert flush("device", "host", "store") > 0
    assert ask()["cached_tokens"] == 0, "what was flushed from all tiers is computed again"


def value(url: str, metric: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(
        (float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + " ")), 0.0
    )


def test_a_prompt_over_the_device_cache_is_an_error_object(serve: Callable[..., Served]) -> None:
    served = serve("--device-memory", "24KiB")
    body = {"model": "tiny", "prompt": "x" * 300, "max_tokens": 100}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "at most 95 fit; shorten it" in answer.json()["error"]["message"]
    small = httpx.post(
        f"{served.url}/v1/completions",
        json={"model": "tiny", "prompt": "x", "max_tokens": 2},
        timeout=DEADLINE_S,
    )
    assert small.status_code == 200, "the server lives on"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_ends_streams_and_all_processes(
    serve: Callable[[], Served], number: signal.Signals, status: int
) -> None:
    served = serve()
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert len(children) >= 3
    served.process.send_signal(number)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert served.wait_end() == status
    assert "Traceback" not in "".join(served.lines)
    _, alive = psutil.wait_procs(children, timeout=paced(10))
    assert not alive


def test_the_planners_death_ends_the_server(serve: Callable[[], Served]) -> None:
    served = serve()
    assert served.url
    (planner,) = psutil.Process(served.process.pid).children()
    ranks = planner.children()
    planner.kill()
    assert served.wait_end() == 1
    served.wait_line("the planner process ended with status -9")
    assert served.wait_line("flight record")
    assert "Traceback" not in "".join(served.lines)
    _, alive = psutil.wait_procs(ranks, timeout=paced(10))
    assert not alive


def in_shared_memory() -> set[str]:
    """But for what other tests that run beside this one keep there."""
    names = os.listdir("/dev/shm")
    return {name for name in names if not name.startswith(tempfile.gettempprefix())}


def test_the_servers_own_death_leaves_no_process_and_nothing_in_shared_memory(
    serve: Callable[[], Served],
) -> None:
    before = in_shared_memory()
    served = serve()
    assert served.url
    children = psutil.Process(served.process.pid).children(recursive=True)
    assert len(children) >= 3
    served.process.kill()
    assert served.wait_end() == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=paced(10))
    assert not alive
    assert in_shared_memory() <= before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_costs_time_and_nothing_else(
    serve: Callable[[], Served], number: signal.Signals
) -> None:
    """Over the real planner and ranks: the text goes on as if nothing had happened, no token twice, none lost (rule R3)."""
    served = serve()
    body = {
        "model": "tiny",
        "prompt": "The water",
        "max_tokens": 150,
        "seed": 4,
        "ignore_eos": True,
        "temperature": 0,
    }
    whole = httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S).json()[
        "choices"
    ][0]["text"]
    client = openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    )
    extra = {"ignore_eos": True, "cache_salt": "other"}
    stream = client.completions.create(
        model="tiny",
        prompt="The water",
        max_tokens=150,
        seed=4,
        temperature=0,
        stream=True,
        extra_body=extra,
    )
    pieces = [next(stream).choices[0].text]
    served.ranks[-1].send_signal(number)
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole
    assert "forebay_worker_restarts_total 1.0" in httpx.get(f"{served.url}/metrics").text
    assert served.wait_line("flight record")


def test_generate_prints_text_or_one_document(model_dir: Path) -> None:
    command = [
        *FOREBAY,
        "generate",
        str(model_dir),
        "Hello",
        "World",
        "--max-tokens",
        "4",
        *OPTIONS,
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, timeout=DEADLINE_S, check=True)
    document = json.loads(done.stdout)
    assert [result["prompt"] for result in document["results"]] == ["Hello", "World"]
    texts = [result["outputs"][0]["text"] for result in document["results"]]
    streamed = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    assert streamed.stdout.decode() == "".join(f"{text}\n" for text in texts)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (lambda path: os.truncate(path / "model.safetensors", 5000), "model.safetensors"),
        (
            lambda path: (path / "config.json").write_text(
                '{"architectures": ["RwkvForCausalLM"]}'
            ),
            "RwkvForCausalLM",
        ),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    ],
    ids=["missing weights", "cut weights", "unknown architecture", "no tokenizer"],
)
def test_a_damaged_model_is_one_line_and_status_2(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(write_random_weights(write_text_model(tmp_path / "model")))
    assert said in fails("serve", str(tmp_path / "model"), "--port", "0", *OPTIONS)


def test_more_stages_than_layers_is_one_line_and_status_2(model_dir: Path) -> None:
    assert str(LAYERS) in fails("serve", str(model_dir), "--port", "0", "--pp", str(LAYERS + 1))


def test_tensor_parallelism_that_does_not_divide_the_heads_is_one_line_and_status_2(
    model_dir: Path,
) -> None:
    said = fails("serve", str(model_dir), "--port", "0", "--tp", "3")
    assert (
        "tp 3 does not divide 2 heads, 2 key/value heads" in said
        and "allowed: 1, 2; choose --tp from these" in said
    )


def fails(*arguments: str) -> str:
    """The last line of a command that ends with status 2, which is not a traceback."""
    started = time.monotonic()
    done = subprocess.run(
        [*FOREBAY, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 2, (done.returncode, done.stderr, time.monotonic() - started)
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
