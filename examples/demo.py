"""`make demo`: the main job, from nothing to a streamed chat over two pipeline stages.

Starts ``forebay serve demo --pp 2`` as a user would, measures for a moment how fast this machine is and asks for as much as it can do
in three minutes (`forebay.bench.demo_sizes`), talks to it with the `openai` client, and shows for each turn how many prompt
tokens were cached and how long the first token took. Then it sends the whole conversation with another cache salt, which shares
nothing: the price of the same prompt without the cache. Then it stops the server and starts another one on the same store: the last
turn's prefix is brought from there to both stages while the request waits. Last comes `forebay bench ttft` in small: the same load by
ticket and by the usual stage-by-stage route, side by side. Ends on its own; servers end with it whatever happens, and what a killed
demo left in the cache directory goes when the next one starts.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from forebay.bench.demo_sizes import (
    BUDGET_S,
    COMPARISONS,
    TALK_SHARE,
    TALKS,
    Speed,
    Talk,
    choose,
    shorten,
)
from forebay.bench.scratch import scratch_directory

PROBE_WORDS, PROBE_ANSWER = 160, 8
COMMAND = """
import signal, sys
from forebay.runtime.boot import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
signal.signal(signal.SIGINT, signal.default_int_handler)
from forebay.cli.main import main
main()
"""
MANUAL = (Path(__file__).parent / "manual.txt").read_text()
QUESTIONS = (
    "Where does the name of this station come from? Answer in one sentence.",
    "How much water passes one turbine?",
    "Who do I call at night?",
    "Thank you. Say goodbye to the shift.",
)


@dataclass(frozen=True)
class Turn:
    name: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    decode_ms: float


@dataclass(frozen=True)
class Server:
    """``start_s``: how long it took until it was ready."""

    url: str
    start_s: float

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


def main() -> int:
    console = Console(highlight=False)
    began = time.monotonic()
    with scratch_directory("demo") as directory:
        status, speed = show(console, f"embedded:{directory}")
    return status or compare(console, speed, BUDGET_S - (time.monotonic() - began))


def show(console: Console, store: str) -> tuple[int, Speed]:
    """The conversation; the exit status, and how fast this machine was."""
    began = time.monotonic()
    with serving(console, store) as server:
        client = server.client
        model = client.models.list().data[0].id
        speed, tokens_a_word = measure(client, model, server.start_s)
        talk = choose_talk(console, speed, TALK_SHARE * BUDGET_S - (time.monotonic() - began))
        manual = shorten(MANUAL, talk.manual_tokens, tokens_a_word)
        messages: list[dict[str, str]] = [
            {"role": "system", "content": f"You answer from this manual.\n\n{manual}"}
        ]
        turns = []
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            console.print(f"\n[bold]> {question}")
            turn, text = ask(client, model, messages, f"turn {number}", console, talk.answer_tokens)
            messages.append({"role": "assistant", "content": text})
            turns.append(turn)
        console.print(
            "\n[dim]The last turn once more, with a cache salt of its own: nothing is shared, all of it is computed.[/]"
        )
        last = messages[:-1]
        cold, _ = ask(
            client,
            model,
            last,
            "last turn, no cache",
            console,
            talk.answer_tokens,
            cache_salt="demo",
        )
        wait_stored(server.url)
    console.print(
        "\n[dim]A new server on the same store: memory is empty, the pages of the conversation are not lost.[/]"
    )
    with serving(console, store) as server:
        warm, _ = ask(
            server.client, model, last, "last turn, new server", console, talk.answer_tokens
        )
        speed = Speed(server.start_s, speed.prefill_tokens_s, speed.decode_s)  # the first converts
    summary(console, turns, cold, warm)
    if (
        not all(turn.cached_tokens for turn in turns[1:])
        or cold.cached_tokens
        or not warm.cached_tokens
    ):
        console.print("[red]The cache did not do what it should: see the table.")
        return 1, speed
    return 0, speed


def measure(client: OpenAI, model: str, start_s: float) -> tuple[Speed, float]:
    """How fast this machine is, and how many tokens a word of the manual has: a few paragraphs of it
    are asked about, of which the cache keeps nothing that is used again."""
    words = MANUAL.split()
    shuffled = " ".join(words[PROBE_WORDS:] + words)
    messages = [{"role": "user", "content": " ".join(shuffled.split()[:PROBE_WORDS])}]
    quiet = Console(file=io.StringIO())
    probe, _ = ask(client, model, messages, "probe", quiet, PROBE_ANSWER, cache_salt="probe")
    prefill = 1000 * probe.prompt_tokens / probe.ttft_ms
    return Speed(start_s, prefill, probe.decode_ms / 1000), probe.prompt_tokens / PROBE_WORDS


def choose_talk(console: Console, speed: Speed, left_s: float) -> Talk:
    talk, fits = choose(TALKS, speed, left_s)
    console.print(
        f"[dim]This machine computes {speed.prefill_tokens_s:.0f} tokens of a prompt a second and takes "
        f"{1000 * speed.decode_s:.0f} ms for one of an answer: the manual is cut to {talk.manual_tokens} tokens at most, "
        f"answers to {talk.answer_tokens}{'' if fits else '; that takes longer than this demo should'}.[/]"
    )
    return talk


@contextlib.contextmanager
def serving(console: Console, store: str) -> Iterator[Server]:
    """The server, once it is ready. Raises ``SystemExit`` with its last words if it does not start."""
    began = time.monotonic()
    command = forebay(console, "serve", "demo", "--pp", "2", "--port", "0", "--store", store)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        process_group=0,
    )
    try:
        yield Server(wait_ready(process, console), time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def forebay(console: Console, *arguments: str) -> list[str]:
    """The `forebay` command, shown, and run as a process that ends with this one."""
    console.print(f"[dim]$ forebay {' '.join(arguments)}[/]")
    return [sys.executable, "-c", COMMAND, str(os.getpid()), *arguments]


def wait_ready(process: subprocess.Popen[str], console: Console) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        console.print(f"[dim]{line.rstrip()}[/]")
        found = re.search(r"ready on (http://[\d.]+:\d+)", line)
        if found:
            threading.Thread(
                target=process.stdout.read, daemon=True
            ).start()  # a full pipe would stop the server
            return found[1]
    raise SystemExit(f"the server did not start (exit status {process.wait()})")


def wait_stored(url: str) -> None:
    """Until what was computed has reached the store: it gets there behind the answers, and nobody waits for it but this demo."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/cache") as answer:
            if not json.load(answer)["tiers"]["store"]["writing"]:
                return
        time.sleep(0.2)


def ask(
    client: OpenAI,
    model: str,
    messages: list[dict[str, str]],
    name: str,
    console: Console,
    answer_tokens: int,
    cache_salt: str | None = None,
) -> tuple[Turn, str]:
    """Stream one answer to the terminal."""
    extra: dict[str, Any] = {} if cache_salt is None else {"cache_salt": cache_salt}
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=answer_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra,
    )
    first = 0.0
    pieces: list[str] = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            first = first or time.monotonic()
            pieces.append(text)
            console.print(text, end="", markup=False)
    ended = time.monotonic()
    console.print()
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    decode_ms = 1000 * (ended - first) / max(usage.completion_tokens - 1, 1)
    return Turn(name, usage.prompt_tokens, cached, 1000 * (first - started), decode_ms), "".join(
        pieces
    )


def summary(console: Console, turns: list[Turn], cold: Turn, warm: Turn) -> None:
    table = Table(title="SmolLM2-135M-Instruct, two pipeline stages on this machine's CPU")
    for heading in ("request", "prompt tokens", "cached", "TTFT ms", "ms a token"):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    for turn in (*turns, cold, warm):
        table.add_row(
            turn.name,
            str(turn.prompt_tokens),
            str(turn.cached_tokens),
            f"{turn.ttft_ms:.0f}",
            f"{turn.decode_ms:.1f}",
        )
    console.print()
    console.print(table)
    console.print(
        f"With the cache, the last turn's first token came {cold.ttft_ms / turns[-1].ttft_ms:.1f} times sooner;"
    )
    console.print(f"on a new server, from the store, {cold.ttft_ms / warm.ttft_ms:.1f} times.")


def compare(console: Console, speed: Speed, left_s: float) -> int:
    """The small A/B: every other request has its prefix in the store."""
    chosen, fits = choose(COMPARISONS, speed, left_s)
    console.print(
        f"\n[dim]By ticket against stage by stage, on fresh servers: {chosen.requests} requests on each route in "
        f"{chosen.rounds} rounds, every other prompt of {chosen.input_len:,} tokens is in the store"
        f"{'' if fits else '; that takes longer than this demo should'}.[/]"
    )
    load = [
        *("--groups", "mixed", "--concurrency", "4", "--input-len", str(chosen.input_len)),
        *("--requests", str(chosen.requests), "--repeat", str(chosen.rounds)),
    ]
    command = forebay(console, "bench", "ttft", "demo", *load, "--json")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True
    ) as process:  # it gets Ctrl-C too, and is waited for
        out, _ = process.communicate()
    status: int = process.returncode
    if out:
        show_comparison(console, json.loads(out))
    return status


def show_comparison(console: Console, result: dict[str, Any]) -> None:
    table = Table(title="Time to first token, mean of a mixed load, ms")
    for heading in ("requests", "by ticket", "stage by stage", "change", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    means = {
        (entry["kind"], entry["route"]): entry["ttft_ms"]["mean"] for entry in result["groups"]
    }
    for change in result["change"]:
        name = {"hit": "in the store", "miss": "new", "all": "all"}[change["kind"]]
        times = [f"{means[change['kind'], route]:.0f}" for route in ("ticket", "staged")]
        low, high = change["mean_ci"]
        table.add_row(name, *times, f"{change['mean_pct']:+.0f} %", f"{low:+.0f} to {high:+.0f} %")
    console.print(table)
    console.print(
        "So few requests say little: `forebay bench ttft demo --html report.html` takes its time, and draws what happens."
    )


if __name__ == "__main__":
    raise SystemExit(main())
