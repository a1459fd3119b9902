"""`make demo`: the main job, from nothing to a streamed chat over two pipeline stages.

Starts ``forebay serve demo --pp 2`` as a user would, talks to it with the `openai` client, and shows for each turn how many prompt
tokens were cached and how long the first token took. Then it sends the whole conversation with another cache salt, which shares
nothing: the price of the same prompt without the cache. Then it stops the server and starts another one on the same store: the last
turn's prefix is brought from there to both stages while the request waits. Ends on its own; servers are stopped whatever happens.
"""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
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

TURN_TOKENS = 48
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


def main() -> int:
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as directory:
        return show(console, f"embedded:{directory}")


def show(console: Console, store: str) -> int:
    with serving(console, store) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        model = client.models.list().data[0].id
        messages: list[dict[str, str]] = [{"role": "system", "content": f"You answer from this manual.\n\n{MANUAL}"}]
        turns = []
        for number, question in enumerate(QUESTIONS, 1):
            messages.append({"role": "user", "content": question})
            console.print(f"\n[bold]> {question}")
            turn, text = ask(client, model, messages, f"turn {number}", console)
            messages.append({"role": "assistant", "content": text})
            turns.append(turn)
        console.print("\n[dim]The last turn once more, with a cache salt of its own: nothing is shared, all of it is computed.[/]")
        last = messages[:-1]
        cold, _ = ask(client, model, last, "last turn, no cache", console, cache_salt="demo")
        wait_stored(url)
    console.print("\n[dim]A new server on the same store: memory is empty, the pages of the conversation are not lost.[/]")
    with serving(console, store) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        warm, _ = ask(client, model, last, "last turn, new server", console)
    summary(console, turns, cold, warm)
    if not all(turn.cached_tokens for turn in turns[1:]) or cold.cached_tokens or not warm.cached_tokens:
        console.print("[red]The cache did not do what it should: see the table.")
        return 1
    return 0


@contextlib.contextmanager
def serving(console: Console, store: str) -> Iterator[str]:
    """The server's URL, once it is ready. Raises ``SystemExit`` with its last words if it does not start."""
    command = [str(Path(sys.executable).with_name("forebay")), "serve", "demo", "--pp", "2", "--port", "0", "--store", store]
    console.print(f"[dim]$ forebay {' '.join(command[1:])}[/]")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, process_group=0)
    try:
        yield wait_ready(process, console)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[str], console: Console) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        console.print(f"[dim]{line.rstrip()}[/]")
        found = re.search(r"ready on (http://[\d.]+:\d+)", line)
        if found:
            threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would stop the server
            return found[1]
    raise SystemExit(f"the server did not start (exit status {process.wait()})")


def wait_stored(url: str) -> None:
    """Until what was computed has reached the store: it gets there behind the answers, and nobody waits for it but this demo."""
    stored = -1.0
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/metrics") as answer:
            found = re.search(r"^forebay_stored_pages_total (\S+)$", answer.read().decode(), re.MULTILINE)
        now = float(found[1]) if found else 0.0
        if now and now == stored:
            return
        stored = now
        time.sleep(0.5)


def ask(
    client: OpenAI, model: str, messages: list[dict[str, str]], name: str, console: Console, cache_salt: str | None = None
) -> tuple[Turn, str]:
    """Stream one answer to the terminal."""
    extra: dict[str, Any] = {} if cache_salt is None else {"cache_salt": cache_salt}
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=TURN_TOKENS,
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
    return Turn(name, usage.prompt_tokens, cached, 1000 * (first - started), decode_ms), "".join(pieces)


def summary(console: Console, turns: list[Turn], cold: Turn, warm: Turn) -> None:
    table = Table(title="SmolLM2-135M-Instruct, two pipeline stages on this machine's CPU")
    for heading in ("request", "prompt tokens", "cached", "TTFT ms", "ms a token"):
        table.add_column(heading, justify="left" if heading == "request" else "right")
    for turn in (*turns, cold, warm):
        table.add_row(turn.name, str(turn.prompt_tokens), str(turn.cached_tokens), f"{turn.ttft_ms:.0f}", f"{turn.decode_ms:.1f}")
    console.print()
    console.print(table)
    console.print(f"With the cache, the last turn's first token came {cold.ttft_ms / turns[-1].ttft_ms:.1f} times sooner;")
    console.print(f"on a new server, from the store, {cold.ttft_ms / warm.ttft_ms:.1f} times.")


if __name__ == "__main__":
    raise SystemExit(main())
