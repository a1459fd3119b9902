"""A model so small that a checker can hold all of it: what a page must contain, and which token comes next.

A position's *stamp* covers the salt and every token up to it, as real K/V depends on the whole prefix. The next token is a function of
the last stamp and the request's seed. `expected_tokens` is the dumb twin of the whole serving system: no pages, no cache, no plans.
"""

from collections.abc import Sequence

from forebay.core.messages import FinishReason, Submit, unpack_tokens

VOCABULARY = 6
EOS = 0
_MASK = (1 << 61) - 1


def first_stamp(salt: bytes) -> int:
    return int.from_bytes(salt, "little") + 1


def next_stamp(stamp: int, token: int) -> int:
    return (stamp * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & _MASK


def stamps(salt: bytes, tokens: Sequence[int]) -> list[int]:
    """What the pages of this token sequence hold, position by position."""
    found = []
    stamp = first_stamp(salt)
    for token in tokens:
        stamp = next_stamp(stamp, token)
        found.append(stamp)
    return found


def next_token(stamp: int, seed: int) -> int:
    return ((stamp >> 17) + seed * 7919) % VOCABULARY


def expected_tokens(submit: Submit, max_context: int) -> tuple[list[int], FinishReason]:
    """All that the request must emit if it runs to its end."""
    tokens = unpack_tokens(submit.prompt).tolist()
    params = submit.params
    assert params.max_tokens is not None and params.seed is not None
    stamp = stamps(submit.salt, tokens)[-1]
    emitted: list[int] = []
    while True:
        token = next_token(stamp, params.seed)
        emitted.append(token)
        if token in params.stop_token_ids or (token in submit.eos and not params.ignore_eos):
            return emitted, FinishReason.STOP
        if len(emitted) >= params.max_tokens or len(tokens) + len(emitted) >= max_context:
            return emitted, FinishReason.LENGTH
        stamp = next_stamp(stamp, token)
