"""Real worker processes, driven plan by plan, give the text that transformers gives."""

import random
from pathlib import Path

import pytest
import tiny_llama
from scripted_planner import PAGE_SIZE, Request, ScriptedPlanner, Work

from forebay.core.messages import Remap

GRIDS = [(1, 1), (2, 1), (1, 2)]


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_llama.VOCAB_SIZE), k=length)


def check(model: Path, *requests: Request) -> None:
    for request in requests:
        assert request.output == tiny_llama.greedy(model, request.tokens[: request.prompt_tokens], len(request.output))


def story(planner: ScriptedPlanner, model: Path) -> None:
    """Chunks in flight together, mixed plans, shared prefixes, a full hit, a remap, slots taken again."""
    first = planner.request(0, prompt(1, 22))
    chunks = [planner.plan(Work(first, 8)), planner.plan(Work(first, 8))]
    assert planner.finish(chunks[0]) == ()
    # The last chunk runs beside another request's prompt, which begins with two pages that the first one is still computing.
    planner.finish(chunks[1])
    second = planner.request(1, first.tokens[:8] + prompt(2, 9), shared=first.table[:2])
    planner.run(Work(first, 6), Work(second, 9))
    planner.decode(5, first, second)
    check(model, first, second)

    # Slot 0 again: all pages of the prompt are cached, so one token runs and writes nothing (rule R7).
    third = planner.request(0, first.tokens[:8], shared=first.table[:2])
    assert third.computed == 7
    planner.run(Work(third, 1, write_from=8), Work(second, 1))
    planner.decode(4, third, second)

    # A twin computes the first page again, in a page of its own, and is then given the first one's (rule R8).
    twin = planner.request(2, first.tokens[:4] + prompt(3, 3))
    planner.run(Work(twin, 7), Work(third, 1))
    twin.table[0] = first.table[0]
    planner.run(Work(twin, 1), Work(second, 1), remaps=[Remap(2, 0, first.table[0])])
    planner.decode(6, twin, second, third)
    check(model, first, second, third, twin)


@pytest.mark.parametrize(("pp", "tp"), GRIDS)
def test_text_equals_the_references(tiny_model: Path, pp: int, tp: int) -> None:
    with ScriptedPlanner(tiny_model, pp, tp).start() as planner:
        story(planner, tiny_model)
        assert all(ready.s_per_token > 0 for ready in planner.ready.values())
    assert PAGE_SIZE == 4
