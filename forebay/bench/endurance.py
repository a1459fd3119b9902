"""`forebay bench endurance MODEL`: a real server under mixed load with aborts, then idle; what grows, and what is not given back.

    start --> warm-up (more clients than later) --> load --> drained? --> idle --> flush --> all free?

Clients stream, hang up in mid-stream, ask for several choices, send what is wrong, and empty the cache now and then; prompts share
stems, so pages move between all tiers. Meanwhile every process of the server is looked at: resident memory, descriptors, threads.

What a leak is: growth that goes on. Pools, caches and arenas grow until they are full once, in steps, and the more rarely the fuller
they are; a leak grows with every request. So the growth of a phase is the median slope between any two samples of its last two
thirds (Theil-Sen: a few steps do not move it, steady growth does) times their length, and a phase is flat if that is at most
`FLAT_MIB` for each process. Page pools take memory as pages are used for the first time, so the warm-up ends by using all of them.
Descriptors and threads are compared with no client there, before and after, and may not be more. Before both counts one client alone
asks for a while, so that connections that only a crowd needed are closed, and the warm-up has crowds that all fetch at once, since
pools of threads hold as many as calls have ever met. Open files are counted by themselves: those of the store's log, as many as its
size takes, come and go, in its own process and in those that read them.
"""

import contextlib
import http.client
import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from forebay.runtime.boot import set_death_signal
from forebay.store.holder.log.log import FILES_AT_CAPACITY

FLAT_MIB = 4.0
WARM_SHARE = 0.2  # of the load's time, before it
SAMPLE_S = 2.0
STORE_FILES = (
    2 * FILES_AT_CAPACITY
)  # of its log; one is closed when the next batch does not fit, so some are not full
SETTLE_S = 40.0  # the store's clients close a connection that was not used for 30 s
CLIENTS = 4
WARM_CLIENTS = 12
CROWDS = 20
FILLERS_MAX = 1000
FREE_SHARE = 0.05
PAUSE_S = 0.05  # mean, between two requests of a client
MAX_OUT = 48
STEMS = 6
STEM_WORDS = 200
OWN_WORDS = 5
READY_S = 300.0
REQUEST_S = 120.0
DRAIN_S = 30.0
CLOSE_S = 5.0
SERIES = 30
MIB = 1 << 20
# Words that any tokenizer knows; one is about one to three tokens.
WORDS = [
    "river",
    "stone",
    "water",
    "gate",
    "mill",
    "wheel",
    "turn",
    "fall",
    "rise",
    "deep",
    "slow",
    "light",
    "under",
    "over",
    "stream",
    "pool",
    "dam",
    "bank",
    "reed",
    "ford",
]

Say = Callable[[str], None]


class EnduranceError(Exception):
    """The run cannot be made. One line."""


@dataclass(slots=True)
class Usage:
    """One process over one phase, a number for each sample."""

    name: str
    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)  # of files apart
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def growth_bytes(self) -> float:
        """Over the last two thirds of the samples: their median slope times their time (Theil 1950, Sen 1968)."""
        start = len(self.rss) // 3
        seconds, rss = np.array(self.seconds[start:]), np.array(self.rss[start:], np.float64)
        if len(rss) < 3:
            return 0.0
        first, second = np.triu_indices(len(rss), 1)
        slopes = (rss[second] - rss[first]) / (seconds[second] - seconds[first])
        return float(np.median(slopes) * (seconds[-1] - seconds[0]))

    def report(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rss_mib": {
                "first": self.rss[0] / MIB,
                "last": self.rss[-1] / MIB,
                "max": max(self.rss) / MIB,
            },
            "rss_mib_series": [
                round(rss / MIB, 1) for rss in self.rss[:: max(len(self.rss) // SERIES, 1)]
            ],
            "growth_mib": self.growth_bytes() / MIB,
            "fds": {"first": self.fds[0], "last": self.fds[-1], "max": max(self.fds)},
            "files": {"first": self.files[0], "last": self.files[-1], "max": max(self.files)},
            "threads": {
                "first": self.threads[0],
                "last": self.threads[-1],
                "max": max(self.threads),
            },
        }


class Server:
    """`forebay serve` in a process of its own; leaving the context ends it."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        command = [
            sys.executable,
            "-m",
            "forebay.cli",
            "serve",
            model,
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            *arguments,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=set_death_signal
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        self.port = 0
        self.model = ""
        self.status: int | None = None

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self.status = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_ready(self) -> None:
        """Raises ``EnduranceError`` if it ends, or is not ready in time."""
        deadline = time.monotonic() + READY_S
        while line := self._next_line(deadline):
            if "listening on" in line:
                self.port = int(line.split(";")[0].rsplit(":", 1)[1])
            if "is ready on" in line:
                self.model = self.get("/v1/models")["data"][0]["id"]
                return
        raise EnduranceError("the server ended before it was ready; its lines above say why")

    def _next_line(self, deadline: float) -> str:
        """Empty once the server has said its last. Raises ``EnduranceError`` at the deadline."""
        try:
            return self._lines.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise EnduranceError(
                f"the server was not ready within {READY_S:.0f} s; its lines above say why"
            ) from None

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """Every process of the server by a name that stays."""
        top = psutil.Process(self._process.pid)
        named, counts = [("frontend", top)], Counter[str]()
        for child in sorted(
            top.children(recursive=True), key=lambda process: process.create_time()
        ):
            kind = _kind_of(child)
            counts[kind] += 1
            named.append((kind if kind == "planner" else f"{kind} {counts[kind]}", child))
        return named

    def get(self, path: str) -> Any:
        status, body = self._request("GET", path)
        if status != 200:
            raise EnduranceError(
                f"GET {path} answered {status}: {body[:200].decode(errors='replace')}"
            )
        return json.loads(body)

    def metric(self, name: str) -> float:
        _, body = self._request("GET", "/metrics")
        found = [line for line in body.decode().splitlines() if line.startswith(name + " ")]
        return float(found[0].split()[1]) if found else 0.0

    def post(self, path: str, body: dict[str, Any]) -> int:
        status, _ = self._request("POST", path, body)
        return status

    def words_max(self) -> int:
        """Words of a stem such that no prompt exceeds the context."""
        card = self.get("/v1/models")["data"][0]
        _, body = self._request(
            "POST", "/tokenize", {"model": self.model, "prompt": " ".join(WORDS)}
        )
        tokens_per_word = json.loads(body)["count"] / len(WORDS) + 1
        return max(
            min(STEM_WORDS, int((card["max_model_len"] - MAX_OUT) / tokens_per_word) - OWN_WORDS), 1
        )

    def stream(self, body: dict[str, Any], hang_up_after: int | None) -> int:
        """The status; with ``hang_up_after`` the connection is closed after so many lines."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            lines = 0
            while (hang_up_after is None or lines < hang_up_after) and response.readline():
                lines += 1
            return response.status
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class Load:
    """Clients that ask until they are told to stop. ``done``: requests by kind; ``errors``: what should not have happened."""

    def __init__(self, server: Server, seed: int, clients: int = CLIENTS) -> None:
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        chances = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._threads = [
            threading.Thread(target=self._client, args=(chance,), daemon=True) for chance in chances
        ]
        self._stems = [
            random.Random(stem).choices(WORDS, k=server.words_max()) for stem in range(STEMS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_S)

    def problems(self, phase: str) -> list[str]:
        return [f"{phase}: {count} times {what}" for what, count in self.errors.items() if count]

    def crowd(self) -> None:
        """From an empty cache all clients ask for a whole stem at the same time. Not while the load runs."""
        self._server.post("/cache/flush", {"tiers": ["device", "host"], "timeout_s": DRAIN_S})
        prompts = [" ".join(self._stems[number % STEMS]) for number in range(len(self._threads))]
        with ThreadPoolExecutor(len(prompts)) as together:
            asked = [
                {"model": self._server.model, "prompt": prompt, "max_tokens": 1}
                for prompt in prompts
            ]
            for status in together.map(self._server.post, ["/v1/completions"] * len(asked), asked):
                self.errors[f"crowd: status {status}"] += status != 200

    def fill_pages(self, chance: random.Random) -> None:
        """Ask what nobody has asked until hardly a page of a tier is free: by then each has been used."""
        for _ in range(FILLERS_MAX):
            tiers = self._server.get("/cache")["tiers"]
            if all(
                use["free"] <= FREE_SHARE * use["capacity"]
                for use in (tiers["device"], tiers["host"])
            ):
                return
            self._ask_something_new(chance)

    def settle(self, chance: random.Random) -> None:
        """For `SETTLE_S` one request after another: what only a crowd needed is found unused, and closed."""
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            self._ask_something_new(chance)
            time.sleep(SAMPLE_S)

    def _ask_something_new(self, chance: random.Random) -> None:
        prompt = " ".join(chance.choices(WORDS, k=len(self._stems[0])))
        status = self._server.post(
            "/v1/completions", {"model": self._server.model, "prompt": prompt, "max_tokens": 1}
        )
        self.errors[f"asked alone: status {status}"] += status != 200

    def _client(self, chance: random.Random) -> None:
        while not self._stop.wait(chance.expovariate(1 / PAUSE_S)):
            kind = chance.choices(
                ["stream", "hang up", "whole", "choices", "wrong", "flush"], [30, 30, 20, 10, 8, 2]
            )[0]
            try:
                wrong = self._ask(kind, chance)
            except OSError as error:
                wrong = type(error).__name__
            with self._lock:
                self.done[kind] += 1
                self.errors[f"{kind}: {wrong}"] += bool(wrong)

    def _ask(self, kind: str, chance: random.Random) -> str:
        """One request; what was wrong about its answer, if anything."""
        stem = self._stems[chance.randrange(STEMS)]
        prompt = " ".join(
            [*stem[: chance.randrange(len(stem))], *chance.choices(WORDS, k=OWN_WORDS)]
        )
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": chance.randrange(1, MAX_OUT),
            "seed": chance.randrange(9),
        }
        match kind:
            case "stream":
                return _unless(200, self._server.stream(body | {"stream": True}, None))
            case "hang up":
                endless = body | {"stream": True, "max_tokens": MAX_OUT, "ignore_eos": True}
                return _unless(200, self._server.stream(endless, chance.randrange(4)))
            case "flush":
                status = self._server.post(
                    "/cache/flush", {"tiers": ["device", "host"], "timeout_s": 5}
                )
                return "" if status in (200, 409) else str(status)
            case "wrong":
                return _unless(
                    400, self._server.post("/v1/completions", body | {"temperature": -1})
                )
            case "choices":
                return _unless(200, self._server.post("/v1/completions", body | {"n": 3}))
            case _:
                return _unless(200, self._server.post("/v1/completions", body))


def run(
    model: str,
    arguments: Sequence[str],
    load_minutes: float,
    idle_minutes: float,
    seed: int,
    say: Say,
) -> dict[str, Any]:
    """The result document. Raises ``EnduranceError``."""
    problems: list[str] = []
    with Server(model, arguments) as server:
        server.wait_ready()
        say(f"warm-up, {load_minutes * WARM_SHARE:.1f} minutes")
        with Load(server, seed, WARM_CLIENTS) as load:
            time.sleep(load_minutes * WARM_SHARE * 60)
        for _ in range(CROWDS):
            load.crowd()
        load.fill_pages(random.Random(seed))
        load.settle(random.Random(seed))
        problems += load.problems("warm-up")
        _drain(server, problems)
        phases = [_phase(server, "load", load_minutes, seed + 1, say, problems)]
        phases.append(_phase(server, "idle", idle_minutes, None, say, problems))
        after = _give_back(server, problems)
    if server.status != 130:  # asked by SIGINT
        problems.append(f"the server ended with status {server.status}")
    about = {
        "model": model,
        "arguments": list(arguments),
        "load_minutes": load_minutes,
        "idle_minutes": idle_minutes,
        "seed": seed,
    }
    limits = {"growth_mib": FLAT_MIB, "clients": CLIENTS, "warm_clients": WARM_CLIENTS}
    return {
        "config": about | limits,
        "phases": phases,
        "after": after,
        "flat": not problems,
        "problems": problems,
    }


def _phase(
    server: Server, name: str, minutes: float, seed: int | None, say: Say, problems: list[str]
) -> dict[str, Any]:
    """``seed``: of its load; None = idle."""
    usages = {process: Usage(process_name) for process_name, process in server.processes()}
    queues: dict[str, list[float]] = {"running": [], "waiting": []}
    store = [server.get("/cache")["tiers"]["store"]]
    began = time.monotonic()
    cpu_before = {process: sum(process.cpu_times()[:2]) for process in usages}
    _sample(usages, 0.0)
    load = None if seed is None else Load(server, seed)
    with load or contextlib.nullcontext():
        while (elapsed := time.monotonic() - began) < minutes * 60:
            say(f"{name}, {elapsed / 60:.1f} of {minutes} minutes")
            time.sleep(SAMPLE_S)
            for queue, seen in queues.items():
                seen.append(server.metric(f"forebay_{queue}_requests"))
            _sample(usages, time.monotonic() - began)
    if load is not None:
        load.settle(random.Random(seed))
        _drain(server, problems)
        problems += load.problems(name)
    _let_connections_close(usages)
    _sample(usages, time.monotonic() - began)
    _judge(name, list(usages.values()), problems)
    store.append(server.get("/cache")["tiers"]["store"])
    return {
        "phase": name,
        "minutes": minutes,
        "requests": {} if load is None else dict(load.done),
        "queues_max": {queue: max(seen, default=0) for queue, seen in queues.items()},
        "cpu_s": {
            usage.name: sum(process.cpu_times()[:2]) - cpu_before[process]
            for process, usage in usages.items()
        },
        "processes": [usage.report() for usage in usages.values()],
        "store": {"first": store[0], "last": store[1]},
    }


def _sample(usages: dict[psutil.Process, Usage], elapsed: float) -> None:
    """Raises ``EnduranceError`` if a process of the server is gone."""
    for process, usage in usages.items():
        try:
            with process.oneshot():
                usage.rss.append(process.memory_info().rss)
                usage.files.append(len(process.open_files()))
                usage.fds.append(process.num_fds() - usage.files[-1])
                usage.threads.append(process.num_threads())
        except psutil.Error as error:
            raise EnduranceError(f"{usage.name} is gone: {error}") from error
        usage.seconds.append(elapsed)


def _let_connections_close(usages: dict[psutil.Process, Usage]) -> None:
    """Servers close their ends a moment after their clients."""
    deadline = time.monotonic() + CLOSE_S
    while time.monotonic() < deadline and any(
        process.num_fds() > usage.fds[0] + usage.files[0] for process, usage in usages.items()
    ):
        time.sleep(CLOSE_S / 20)


def _judge(phase: str, usages: Sequence[Usage], problems: list[str]) -> None:
    for usage in usages:
        growth = usage.growth_bytes() / MIB
        if growth > FLAT_MIB:
            problems.append(f"{phase}: {usage.name} grew by {growth:.1f} MiB (allowed {FLAT_MIB})")
        files_max = 0 if usage.name == "frontend" else STORE_FILES
        for what, seen, most in (
            ("descriptors", usage.fds, 0),
            ("files open", usage.files, files_max),
            ("threads", usage.threads, 0),
        ):
            if seen[-1] > max(seen[0], most):
                problems.append(f"{phase}: {usage.name} has {seen[-1]} {what}, {seen[0]} before")


def _drain(server: Server, problems: list[str]) -> None:
    """Until nothing runs, waits, or is private or held; what is still there after `DRAIN_S` is a problem."""
    deadline = time.monotonic() + DRAIN_S
    while busy := _busy(server):
        if time.monotonic() > deadline:
            problems.append(f"not given back {DRAIN_S:.0f} s after the last client: {busy}")
            return
        time.sleep(SAMPLE_S / 4)


def _busy(server: Server) -> dict[str, float]:
    found = {queue: server.metric(f"forebay_{queue}_requests") for queue in ("running", "waiting")}
    for tier, use in server.get("/cache")["tiers"].items():
        found |= {f"{tier} {state}": use[state] for state in ("private", "held") if state in use}
    return {what: count for what, count in found.items() if count}


def _give_back(server: Server, problems: list[str]) -> dict[str, Any]:
    """A page that is still pinned survives a flush."""
    server.post("/cache/flush", {"tiers": ["device", "host"], "timeout_s": 10})
    _drain(server, problems)
    tiers = {
        tier: use
        for tier, use in server.get("/cache")["tiers"].items()
        if "capacity" in use and "free" in use
    }
    for tier, use in tiers.items():
        if use["free"] != use["capacity"]:
            problems.append(
                f"after a flush {use['capacity'] - use['free']} of {use['capacity']} {tier} pages are not free"
            )
    return {tier: {"capacity": use["capacity"], "free": use["free"]} for tier, use in tiers.items()}


def _kind_of(process: psutil.Process) -> str:
    words = process.cmdline()
    for word, kind in (
        ("forebay.runtime.planner_process", "planner"),
        ("forebay.runtime.worker", "rank"),
    ):
        if word in words:
            return kind
    return "store"


def _unless(expected: int, status: int) -> str:
    return "" if status == expected else f"status {status}"
