"""Whether samples mean what they claim: each request hit or missed as intended, and a hit's text is the text that was computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.bench.ttft.load import Answer, Position
from forebay.bench.ttft.plan import Ask, Block
from forebay.settings import FetchRoute

MAX_GAP = 0.25


@dataclass(frozen=True, slots=True)
class Rules:
    """``strict``: outputs must be equal (float32); else they may part where the computed run's two best were within `MAX_GAP`."""

    page_size: int
    strict: bool


def judge(
    block: Block, computed: Sequence[Answer], answers: Sequence[Answer], rules: Rules
) -> list[str]:
    """What is wrong with the block's answers, one line each. ``computed``: the answers of the block's hits when they were primed."""
    texts = {answer.index: answer.output for answer in computed}
    problems = []
    for ask, answer in zip(block.asks, answers, strict=True):
        found = _tiers(block, ask, answer, rules) or (
            _text(texts[ask.index], answer.output, rules) if ask.is_hit else ""
        )
        if found:
            problems.append(
                f"round {block.round + 1}, {block.group}, {block.arm.name}, request {ask.index}: {found}"
            )
    return problems


def _tiers(block: Block, ask: Ask, answer: Answer, rules: Rules) -> str:
    if answer.cached_device or answer.cached_host:
        return f"{answer.cached_device} tokens came from device and {answer.cached_host} from host memory, which were flushed"
    if not ask.is_hit or block.arm.route is FetchRoute.OFF:
        return (
            f"{answer.cached_store} tokens came from the store; it was to miss"
            if answer.cached_store
            else ""
        )
    # A prompt of whole pages has its last token computed all the same, and may count that page or not.
    least = (len(ask.prompt) - 1) // rules.page_size * rules.page_size
    if answer.cached_store < least:
        return f"{answer.cached_store} tokens came from the store; {least} are there"
    return ""


def _text(computed: Sequence[Position], output: Sequence[Position], rules: Rules) -> str:
    for place, (expected, found) in enumerate(zip(computed, output, strict=True)):
        if expected.text == found.text:
            continue
        gap = expected.gap
        if rules.strict or gap is None or gap > MAX_GAP:
            apart = "unknown" if gap is None else f"{gap:.3f}"
            return f"output token {place} is {found.text!r}, computed it was {expected.text!r} (the two best were {apart} apart)"
        return ""  # from here on the texts have a right to differ
    return ""
