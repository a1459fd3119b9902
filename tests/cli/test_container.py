"""A real server in a container (`tests.box`): it starts, answers and keeps to its limits, or says in one line why not."""

import re
import shutil
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from forebay.settings import parse_size
from tests.box import Limits, boxed, can_be_made
from tests.cli.test_environment import injected
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.serving import Served

GIB, MIB = 1 << 30, 1 << 20
SERVE = ("-m", "forebay.cli", "serve", "/writable/model", "--port", "0", "--page-size", "8")

pytestmark = pytest.mark.skipif(not can_be_made(), reason="containers are made as root, on Linux")


@pytest.fixture
def box(tmp_path: Path) -> Path:
    (tmp_path / "writable").mkdir()
    write_random_weights(write_text_model(tmp_path / "writable" / "model"))
    return tmp_path


def answers(served: Served) -> None:
    body = {"model": "model", "prompt": "the water ahead of the turbines " * 3, "max_tokens": 8}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8


def without(served: Served) -> list[str]:
    said = httpx.get(f"{served.url}/health").json()["without"]
    return [line.partition(":")[0] for line in said]


def size_of(served: Served, flag: str) -> int:
    line = served.wait_line(f"{flag} is not given")
    return parse_size(re.search(r"given; (\S+) for", line)[1])


def end(served: Served) -> None:
    """As an engine ends a container: SIGTERM to its first process."""
    (first,) = psutil.Process(served.process.pid).children()
    first.send_signal(signal.SIGTERM)
    assert served.wait_end() == 0


def test_a_server_in_a_container_answers_and_keeps_to_its_limits(box: Path) -> None:
    """No compiler, home, capabilities or pidfds; variables of a service called forebay; one core, 1 GiB."""
    names = injected("FOREBAY", 8000) | {"FOREBAY_CACHE_DIR": "/writable/cache"}
    with boxed(box, Limits(GIB), *SERVE, **names) as served:
        answers(served)
        assert size_of(served, "--device-memory") + size_of(served, "--host-memory") < GIB // 2
        if psutil.cpu_count() != 1:
            assert served.wait_line("the CPU quota is 1 of ")
        assert httpx.get(f"{served.url}/health").json()["store"]["state"] == "closed"
        assert without(served) == ["compiled kernels"]
        end(served)
    assert "Traceback" not in "".join(served.lines)


@pytest.mark.slow
def test_where_nothing_can_be_written_it_does_without(box: Path) -> None:
    (box / "shown").mkdir()
    shutil.move(box / "writable" / "model", box / "shown" / "model")
    (box / "shown" / "model" / "model.safetensors").chmod(0o644)
    model = str(box / "shown" / "model")
    serve = [model if word == "/writable/model" else word for word in SERVE]
    with boxed(box, Limits(GIB), *serve, may_write=False) as served:
        answers(served)
        assert without(served) == ["flight records", "a private store", "compiled kernels"]
        end(served)
    assert "Traceback" not in "".join(served.lines)


@pytest.mark.slow
def test_too_small_a_container_is_refused_with_a_number_that_would_do(box: Path) -> None:
    names = {"FOREBAY_CACHE_DIR": "/writable/cache"}
    with boxed(box, Limits(200 * MIB), *SERVE, **names) as served:
        assert served.wait_end() == 2
        (line,) = [line for line in served.lines if "the model needs" in line]
        enough = parse_size(re.search(r"give it (\S+),", line)[1])
    assert 200 * MIB < enough < GIB
    with boxed(box, Limits(enough), *SERVE, **names) as served:
        answers(served)
        end(served)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [("--store", "embedded"), ("--kernels", "native")])
def test_what_was_asked_for_and_cannot_be_had_is_an_error(
    box: Path, asked: tuple[str, str]
) -> None:
    with boxed(box, Limits(GIB), *SERVE, *asked) as served:  # no cache directory is named
        assert served.wait_end() == 2
    assert "Traceback" not in "".join(served.lines)
