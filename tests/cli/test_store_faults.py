"""A server and its store on bad days, over real processes and real damage: the text is right, and nothing stays taken.

After each fault: every page of both tiers is free once the cache is flushed, so no pin, ticket or limit is left over.
"""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from forebay.runtime.boot import set_death_signal
from forebay.store import StoreClient
from tests.cli.test_served_model import DEADLINE_S, FOREBAY, OPTIONS, Served
from tests.frontend.tiny_text import write_random_weights, write_text_model
from tests.store.store_cluster import wait_for
from tests.store.store_process import Process, farm
from tests.warm_cache import warm_cache

PAGE = 8
PAGES = 6
Start = Callable[..., Served]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    path = tmp_path_factory.mktemp("faults")
    model = write_random_weights(write_text_model(path / "model"))
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "FOREBAY_CACHE_DIR": str(warm_cache(path / "cache")),
    }
    started: list[Served] = []

    def start(store: str, *options: str) -> Served:
        more = ["--store", store, "--fetch-threshold", "8", "--fetch-policy", "wait", *options]
        command = [
            *FOREBAY,
            "serve",
            str(model),
            "--port",
            "0",
            "--served-model-name",
            "tiny",
            *OPTIONS,
            *more,
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=set_death_signal,
        )
        started.append(Served(process))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.terminate()
            served.process.wait(DEADLINE_S)


def until(condition: Callable[[], bool]) -> None:
    """As long as a server may take that starts ranks, or asks its store again, on a busy machine."""
    wait_for(condition, DEADLINE_S)


def prompt(name: str) -> str:
    """One more token than full pages, so that all of these may come from the store."""
    return (name * PAGE * PAGES)[: PAGE * PAGES] + "."


def ask(served: Served, name: str) -> tuple[str, int]:
    """The text, and how many prompt tokens came from the store."""
    body = {"model": "tiny", "prompt": prompt(name), "max_tokens": 6, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=DEADLINE_S).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_store"]


def state(served: Served) -> str:
    found: str = httpx.get(f"{served.url}/health").json()["store"]["state"]
    return found


def figure(served: Served, name: str) -> float:
    """Of the metrics; 0 if it is not there yet."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def stored(served: Served) -> float:
    return figure(served, "forebay_stored_pages_total")


def failures(served: Served) -> float:
    return figure(served, "forebay_store_failures_total")


def forget(served: Served) -> httpx.Response:
    return httpx.post(
        f"{served.url}/cache/flush",
        json={"tiers": ["device", "host"], "timeout_s": 30},
        timeout=DEADLINE_S,
    )


def check_baseline(served: Served) -> None:
    """Forgets device and host memory, which works only if nothing holds a page there."""
    answer = forget(served)
    assert answer.status_code == 200, answer.text
    tiers = httpx.get(f"{served.url}/cache").json()["tiers"]
    assert all(tiers[tier]["free"] == tiers[tier]["capacity"] for tier in ("device", "host")), tiers


def prime(served: Served, name: str) -> tuple[str, str]:
    """Compute a prompt, let it reach the store, forget it in memory: the prompt's name and the text.

    What is computed just when a rank does not ask the store is not stored; then another prompt is.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        before, done = stored(served), stored(served) + failures(served)
        text, cached = ask(served, name)
        assert cached == 0
        until(lambda done=done: stored(served) + failures(served) >= done + PAGES)  # type: ignore[misc]
        check_baseline(served)
        if stored(served) >= before + PAGES:
            return name, text
        name += "'"
    raise AssertionError("nothing reached the store")


# ---------------------------------------------------------------------------------------------- a directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages") / "store"


@pytest.fixture(scope="module")
def on_files(start: Start, directory: Path) -> Served:
    return start(f"file:{directory}")


def files(directory: Path) -> set[Path]:
    return set(directory.glob("?/?/*.page"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_directory_of_it(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, cut, empty, make_a_directory_of_it, Path.unlink])
def test_damaged_files_cost_their_pages(
    on_files: Served, directory: Path, damage: Callable[[Path], None]
) -> None:
    before = files(directory)
    name, text = prime(on_files, damage.__name__)
    mine = sorted(files(directory) - before, key=lambda path: path.stat().st_mtime_ns)
    assert len(mine) >= 2 * PAGES, "each of two stages has its part of a page"
    check_hit(on_files, name, text)
    check_baseline(on_files)
    for path in mine:
        damage(path)
    assert ask(on_files, name) == (text, 0)
    check_baseline(on_files)
    until(lambda: state(on_files) == "closed")


def test_another_keys_pages_are_never_taken_for_ours(on_files: Served, directory: Path) -> None:
    before = files(directory)
    name, text = prime(on_files, "swapped")
    mine = sorted(files(directory) - before)
    contents = [path.read_bytes() for path in mine]
    for path, data in zip(mine, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(data)
    assert ask(on_files, name) == (text, 0)
    check_baseline(on_files)
    until(lambda: state(on_files) == "closed")


def test_a_directory_that_goes_away_and_comes_back(on_files: Served, directory: Path) -> None:
    name, text = prime(on_files, "cleared")
    # At once, as a writer may be in it.
    shutil.rmtree(directory.rename(directory.with_name("gone")), ignore_errors=True)
    assert ask(on_files, name) == (text, 0)
    check_baseline(on_files)
    until(lambda: state(on_files) == "closed")
    name, text = prime(on_files, "and made again")
    check_hit(on_files, name, text)
    check_baseline(on_files)


def test_files_that_hang_cost_one_time_out(on_files: Served, directory: Path) -> None:
    """A FIFO blocks whoever opens it, as a file of a dead network file system does."""
    before = files(directory)
    name, text = prime(on_files, "hangs")
    other, other_text = prime(on_files, "another one")
    mine = sorted(files(directory) - before)
    for path in mine:
        path.unlink()
        os.mkfifo(path)
    assert ask(on_files, name) == (text, 0)
    assert ask(on_files, other) == (other_text, 0), "the threads hang, the request does not"
    check_baseline(on_files)

    def let_go() -> bool:
        for path in mine:
            if path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        return state(on_files) == "closed"

    until(let_go)
    name, text = prime(on_files, "after it")
    check_hit(on_files, name, text)
    check_baseline(on_files)


# ---------------------------------------------------------------------------------------------- a store of processes


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Process]:
    with farm(tmp_path) as made:
        yield made.run(
            "up",
            "--listen",
            "127.0.0.1:0",
            "--dram",
            "32MiB",
            "--ssd",
            str(tmp_path / "log"),
            "--ssd-size",
            "64MiB",
        )


@pytest.mark.slow
def test_a_store_that_stands_still_dies_and_comes_back_costs_pages_and_never_the_text(
    start: Start, up: Process, tmp_path: Path
) -> None:
    served = start(up.url)
    texts = dict(prime(served, name) for name in ("one", "two", "three"))
    one, two, three = texts
    assert ask(served, one) == (texts[one], PAGES * PAGE)
    check_baseline(served)

    up.stop()
    assert [ask(served, name) for name in texts] == [(text, 0) for text in texts.values()]
    until(lambda: state(served) != "closed")
    check_baseline(served)
    before = stored(served)
    late, _ = ask(served, "four")  # nobody stores it now
    up.resume()
    until(lambda: state(served) == "closed")
    until(lambda: stored(served) >= before + PAGES)
    until(lambda: is_warm(served, "four", late))
    until(lambda: is_warm(served, one, texts[one]))

    wrong: list[object] = []
    halt = threading.Event()

    def keep_asking(name: str) -> None:
        while not halt.is_set():
            forget(served)
            text, _ = ask(served, name)
            if text != texts[name]:
                wrong.append((name, text))

    threads = [threading.Thread(target=keep_asking, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    fetched = tickets(served)
    until(lambda: tickets(served) > fetched + 3)
    up.kill()  # with fetches under way
    until(lambda: state(served) != "closed")
    halt.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    check_baseline(served)

    ranks = [
        child
        for child in psutil.Process(served.process.pid).children(recursive=True)
        if "worker" in " ".join(child.cmdline())
    ]
    ranks[0].kill()  # and its successor starts while there is no store
    until(lambda: httpx.get(f"{served.url}/ready").status_code == 200)
    assert ask(served, two) == (texts[two], 0)
    check_baseline(served)
    with farm(tmp_path) as made:
        made.processes.append(up.again())
        until(lambda: state(served) == "closed")
        until(lambda: is_warm(served, three, texts[three]))
        check_baseline(served)
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0


@pytest.mark.slow
def test_of_two_masters_a_dead_one_costs_its_own_prefixes_from_their_first_page_and_no_others(
    start: Start, tmp_path: Path
) -> None:
    whole = PAGES * PAGE
    with farm(tmp_path) as made:
        masters = [made.master(), made.master()]
        url = "forebay://" + ",".join(master.url.removeprefix("forebay://") for master in masters)
        made.run(
            "holder",
            "--master",
            url,
            "--dram",
            "32MiB",
            "--ssd",
            str(tmp_path / "log"),
            "--ssd-size",
            "64MiB",
        )
        served = start(url)
        texts: dict[str, str] = {}
        owners: dict[str, int] = {}
        names = iter("abcdefghijklmnopqrstuvwxyz")
        while not all(list(owners.values()).count(each) >= 2 for each in (0, 1)):
            before = [pages_of(master) for master in masters]
            name, text = prime(served, next(names))
            grown = [pages_of(master) - had for master, had in zip(masters, before, strict=True)]
            assert sorted(grown) == [0, 2 * PAGES], "all parts of all its pages are with one master"
            texts[name], owners[name] = text, grown.index(2 * PAGES)
        until(lambda: all(is_warm(served, name, text) for name, text in texts.items()))

        lost = masters[0]
        lost.kill()
        living = {name for name, owner in owners.items() if owner == 1}
        hit: set[str] = set()
        while hit != living:
            for name, text in texts.items():
                check_baseline(served)
                said, cached = ask(served, name)
                assert said == text and cached in ({0, whole} if name in living else {0}), (
                    "whole, or not taken at all"
                )
                hit |= {name} if cached else set()
        until(lambda: state(served) != "closed")
        check_baseline(served)

        made.again(lost)
        until(lambda: state(served) == "closed")
        until(lambda: all(is_warm(served, name, text) for name, text in texts.items()))
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_end() == 0


def pages_of(master: Process) -> int:
    """Parts of pages that this master has, and no records of layouts and probes."""
    with StoreClient.connect(master.url) as client:
        return sum(not key.startswith(b"forebay-") for key, _ in client.list())


def check_hit(served: Served, name: str, text: str) -> None:
    """All pages come from the store. Only a query that was late, and is counted as that, may be asked again."""

    def late() -> float:
        return figure(served, 'forebay_ticket_total{outcome="query_late"}')

    def hits() -> bool:
        before = late()
        check_baseline(served)
        said, cached = ask(served, name)
        assert said == text
        if cached < PAGES * PAGE:
            until(lambda: late() > before)
        return cached == PAGES * PAGE

    until(hits)


def is_warm(served: Served, name: str, text: str) -> bool:
    """A store that has just come back lists what it has for a moment, and a query that is late on a busy machine is a miss."""
    check_baseline(served)
    said, cached = ask(served, name)
    assert said == text
    return cached == PAGES * PAGE


def tickets(served: Served) -> float:
    return figure(served, 'forebay_ticket_total{outcome="issued"}')


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param(False, id="nobody listens"),
        pytest.param(True, id="somebody listens and says nothing", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_does_not_answer_at_the_start_is_one_line(start: Start, answers: bool) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if answers:
            sock.listen()
        url = f"forebay://127.0.0.1:{sock.getsockname()[1]}"
        served = start(url)
        assert served.wait_end() == 2
    said = [line for line in served.lines if url in line]
    assert len(said) == 1 and "does not answer" in said[0] and "--store none" in said[0]
    assert "Traceback" not in "".join(served.lines)
