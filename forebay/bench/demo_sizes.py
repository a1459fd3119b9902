"""How much `make demo` asks for, so that it ends within its time on a slow machine too.

The demo measures for a moment (`Speed`) and takes the largest of a few sizes whose predicted time fits
into what is left. The smallest is taken if none fits: then the demo says that it takes longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

BUDGET_S = 180.0
TALK_SHARE = 0.5  # of the budget: the conversation on two servers; the comparison gets the rest
MARGIN = 1.25  # a machine that others use is slower a moment later
TURNS = 4
QUESTION_TOKENS = 32
# `forebay bench ttft` before its first round: four requests on each route, of which all but hits compute.
WARM_UP_PROMPTS = 4
ROUTES = 2
OVERLAP = 1.5  # several prompts keep both stages busy; the one that is measured does not


@dataclass(frozen=True, slots=True)
class Speed:
    """``start_s``: of a server until it is ready; tokens a second of a prompt; seconds a token of an answer."""

    start_s: float
    prefill_tokens_s: float
    decode_s: float


class Sizes(Protocol):
    def seconds(self, speed: Speed) -> float:
        """Predicted, on a machine of that speed."""
        ...


@dataclass(frozen=True, slots=True)
class Talk:
    """The conversation. ``manual_tokens``: of the text it is about; ``answer_tokens``: of each answer."""

    manual_tokens: int
    answer_tokens: int

    def seconds(self, speed: Speed) -> float:
        """The manual and all turns, once more without the cache, and the last turn on a second server."""
        turns = TURNS * (QUESTION_TOKENS + self.answer_tokens)
        computed = 2 * (self.manual_tokens + turns)
        answers = (TURNS + 2) * self.answer_tokens
        return speed.start_s + computed / speed.prefill_tokens_s + answers * speed.decode_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """`forebay bench ttft`: ``requests`` on each route over ``rounds``, every other one stored before."""

    input_len: int
    requests: int
    rounds: int

    def seconds(self, speed: Speed) -> float:
        """Each request computes its prompt once: hits when they are stored, the others when they are measured."""
        prompts = ROUTES * (WARM_UP_PROMPTS + self.requests)
        return ROUTES * speed.start_s + prompts * self.input_len / (
            OVERLAP * speed.prefill_tokens_s
        )


TALKS = (Talk(1100, 48), Talk(800, 40), Talk(500, 32), Talk(300, 24), Talk(160, 16))
COMPARISONS = (
    Comparison(1024, 12, 2),
    Comparison(1024, 8, 2),
    Comparison(512, 8, 2),
    Comparison(512, 4, 1),
    Comparison(320, 4, 1),
    Comparison(320, 2, 1),
)

S = TypeVar("S", bound=Sizes)


def choose(allowed: Sequence[S], speed: Speed, left_s: float) -> tuple[S, bool]:
    """The first of ``allowed`` (largest first) that fits into ``left_s``, or the last; whether it fits."""
    for sizes in allowed:
        if MARGIN * sizes.seconds(speed) <= left_s:
            return sizes, True
    return allowed[-1], False


def shorten(manual: str, tokens: int, tokens_a_word: float) -> str:
    """Its first whole sections of about ``tokens`` tokens in all, at least one."""
    sections = manual.split("\n\n")
    kept: list[str] = []
    words = 0.0
    for section in sections:
        words += len(section.split())
        if len(kept) > 1 and words * tokens_a_word > tokens:  # the title is a section too
            break
        kept.append(section)
    return "\n\n".join(kept)
