"""`forebay bench planner`: CPU time of the planner's thread, on the very code that ships, without a process around it.

What is measured, in ms:

    step    64 running decodes at each context + one 512-token prefill chunk + 8 requests that wait: from the acknowledgement of the
            last plan to the bytes of the next
    match   hashes of a 16,384-token prompt at page 64, and the search for it in the tree that holds all of it
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from forebay.core.messages import Plan, PlanDone, Sample, Submit, encode, pack_tokens
from forebay.core.planner import GridReady, Planner
from forebay.core.replica import PlannerConfig
from forebay.core.sampling import SamplingParams
from forebay.pages.hashing import hash_chain, root_hash

DECODES, WAITING, CHUNK, PAGE = 64, 8, 512, 64
CONTEXTS = (1024, 8192, 16384)
STEPS, WARM_STEPS = 300, 20
MATCH_TOKENS, MATCH_TIMES = 16384, 50
VOCABULARY = 50_000
TOKEN = 7  # what every decode gets
NS_PER_MS = 1e6


def run(say: Callable[[str], None]) -> dict[str, Any]:
    """One row for each context, and one for the match."""
    rows = []
    for context in CONTEXTS:
        say(f"context {context}")
        rows.append({"what": "step", "tokens": context, **_summary(_steps(context))})
    say("match")
    rows.append({"what": "match", "tokens": MATCH_TOKENS, **_summary(_matches())})
    return {
        "config": {
            "decodes": DECODES,
            "waiting": WAITING,
            "chunk": CHUNK,
            "page_size": PAGE,
            "steps": STEPS,
        },
        "rows": rows,
    }


def _summary(samples_ms: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(samples_ms, n=100)
    return {
        "p50": statistics.median(samples_ms),
        "p99": cuts[98],
        "unit": "ms of thread CPU",
        "samples": len(samples_ms),
    }


class _Rank:
    """One rank that does every plan at once."""

    def __init__(self, pages: int, running: int, context_max: int) -> None:
        config = PlannerConfig(
            pp=1, page_size=PAGE, chunk_size=CHUNK, max_context=context_max, max_running=running, max_waiting=1000
        )  # fmt: skip
        self.planner = Planner(config)
        self.plan: Plan | None = self.planner.step(0.0, [GridReady(1, pages, 1e-4)]).plan

    def submit(self, name: str, tokens: int, dice: random.Random, max_tokens: int) -> None:
        prompt = pack_tokens(dice.randrange(VOCABULARY) for _ in range(tokens))
        built = self.planner.step(
            0.0,
            [Submit(name, prompt, SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True))],
        ).plan
        self.plan = built or self.plan

    def turn(self) -> float:
        """The newest plan is done; ms of thread CPU until the next one's bytes are there."""
        assert self.plan is not None, "nothing runs"
        samples = tuple(Sample(piece.slot, TOKEN) for piece in self.plan.pieces if piece.sample)
        done = PlanDone(self.plan.epoch, 0, self.plan.number, samples)
        began = time.thread_time_ns()
        plan = self.planner.step(0.0, [done]).plan
        if plan is not None:
            encode(plan)
        spent = time.thread_time_ns() - began
        self.plan = plan
        return spent / NS_PER_MS

    @property
    def decodes(self) -> int:
        """Of the newest plan."""
        return 0 if self.plan is None else sum(piece.sample for piece in self.plan.pieces)


def _steps(context: int) -> list[float]:
    dice = random.Random(context)
    steps = STEPS + WARM_STEPS
    prefill = (steps + 2) * CHUNK
    outputs = 2 * steps + DECODES * -(-context // CHUNK)
    pages = DECODES * -(-(context + outputs) // PAGE) + -(-prefill // PAGE) + DECODES
    rank = _Rank(pages, DECODES + 1, max(prefill, context + outputs) + PAGE)
    for number in range(DECODES):
        rank.submit(f"decode-{number}", context, dice, outputs)
    while rank.decodes < DECODES:
        rank.turn()
    rank.submit("prefill", prefill, dice, 1)
    for number in range(WAITING):
        rank.submit(f"waiting-{number}", 64 + number, dice, 1)
    spent = [rank.turn() for _ in range(steps)][WARM_STEPS:]
    assert rank.plan is not None and len(rank.plan.pieces) == DECODES + 1, (
        "not what was to be measured"
    )
    return spent


def _matches() -> list[float]:
    dice = random.Random(1)
    rank = _Rank(MATCH_TOKENS // PAGE + 8, 2, MATCH_TOKENS + PAGE)
    rank.submit("first", MATCH_TOKENS, dice, 1)
    while rank.plan is not None:
        rank.turn()
    cache = rank.planner.replica.cache
    assert cache is not None
    again = random.Random(1)
    prompt = pack_tokens(again.randrange(VOCABULARY) for _ in range(MATCH_TOKENS))
    root = root_hash(b"", rank.planner.config.kv_dtype, PAGE)
    spent = []
    for _ in range(MATCH_TIMES):
        began = time.thread_time_ns()
        found = cache.tree.match(hash_chain(root, prompt, PAGE))
        spent.append((time.thread_time_ns() - began) / NS_PER_MS)
        assert len(found) == MATCH_TOKENS // PAGE, "the tree does not hold the prompt"
    return spent
