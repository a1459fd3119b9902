"""Grammars are tried out in a process of their own: it may be ended, and nobody else waits."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from forebay.core.sampling import Grammar, GrammarKind
from forebay.frontend import grammar_check
from forebay.frontend.grammar_check import GrammarCheck
from tests.frontend.tiny_text import write_text_model

GOOD = Grammar(GrammarKind.REGEX, "[ab]+")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("check") / "model")


def checked(
    model: Path, work: Callable[[GrammarCheck], Awaitable[Any]], timeout_s: float = 20.0
) -> Any:
    async def run() -> Any:
        check = GrammarCheck(model, timeout_s)
        try:
            return await work(check)
        finally:
            await check.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(model_dir: Path) -> None:
    async def work(check: GrammarCheck) -> None:
        assert await check.problem(GOOD) == ""
        (pid,) = (check.pid,)
        assert pid is not None
        psutil.Process(pid).suspend()  # it compiles for ever
        check._timeout_s = 0.2
        slow = await check.problem(Grammar(GrammarKind.REGEX, "[cd]+"))
        assert slow == "it takes more than 0.2 s to compile"
        check._timeout_s = 20.0
        assert await check.problem(Grammar(GrammarKind.REGEX, "[ef]+")) == ""
        assert check.pid != pid
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"

    checked(model_dir, work)


def test_a_child_that_dies_costs_one_grammar(model_dir: Path) -> None:
    async def work(check: GrammarCheck) -> None:
        assert await check.problem(GOOD) == ""
        assert check.pid is not None
        child = psutil.Process(check.pid)
        child.suspend()
        asking = asyncio.ensure_future(check.problem(Grammar(GrammarKind.REGEX, "[cd]+")))
        while not check._turn.locked():
            await asyncio.sleep(0)
        child.kill()
        assert await asking == "it takes too much memory to compile"
        assert await check.problem(Grammar(GrammarKind.REGEX, "[gh]+")) == ""

    checked(model_dir, work)


def test_memory_is_bounded(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no room at all even a small grammar is too much, and that is said, not suffered."""
    monkeypatch.setattr(grammar_check, "MEMORY_BYTES", 4 << 20)
    properties = ", ".join(f'"p{i}": {{"type": "string", "maxLength": 999}}' for i in range(1200))
    big = Grammar(GrammarKind.JSON_SCHEMA, f'{{"type": "object", "properties": {{{properties}}}}}')

    async def work(check: GrammarCheck) -> None:
        assert "memory" in await check.problem(big)

    checked(model_dir, work)


def test_twenty_at_once_each_get_their_own_answer(model_dir: Path) -> None:
    grammars = [Grammar(GrammarKind.REGEX, f"[ab]{{{n}}}" + "(" * (n % 2)) for n in range(1, 21)]

    async def work(check: GrammarCheck) -> None:
        said = await asyncio.gather(*(check.problem(grammar) for grammar in grammars))
        for number, problem in enumerate(said, start=1):
            assert bool(problem) == bool(number % 2)

    checked(model_dir, work)


def test_a_caller_that_leaves_takes_nobody_elses_answer(model_dir: Path) -> None:
    async def work(check: GrammarCheck) -> None:
        assert await check.problem(GOOD) == ""
        assert check.pid is not None
        psutil.Process(check.pid).suspend()
        leaving = asyncio.ensure_future(check.problem(Grammar(GrammarKind.REGEX, "(")))
        while not check._turn.locked():
            await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert await check.problem(Grammar(GrammarKind.REGEX, "[xy]+")) == ""

    checked(model_dir, work)


def test_a_model_without_end_takes_no_grammar(tmp_path: Path) -> None:
    model = write_text_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    config = (
        (model / "config.json").read_text().replace('"eos_token_id": 256', '"eos_token_id": null')
    )
    (model / "config.json").write_text(config)

    async def work(check: GrammarCheck) -> None:
        assert "no token that ends an output" in await check.problem(GOOD)

    checked(model, work)
