"""The passes that a rank runs before it is ready: first calls are slow (kernels, allocators, connections), and are no measure.

They are plans like any other, over the same links, run by all ranks at once, by an executor of their
own. Afterwards the pages they wrote are zero again: the first real plan finds a rank that has run
nothing.
"""

from collections.abc import Iterator

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import Opening, Piece, Plan, pack_tokens
from forebay.core.sampling import SamplingParams
from forebay.runtime.execute import Executor
from forebay.runtime.mirror import Limits

_TOKENS_PER_CHUNK = 64
_SLOT = 0


def warm_up(executor: Executor, epoch: int) -> float:
    """Two prefill chunks and a decode. Returns seconds per token of this rank's layers in the second chunk."""
    chunks = _chunks(executor.limits)
    costs = []
    for plan, tokens in zip(_plans(executor.limits, chunks, epoch), chunks, strict=True):
        costs.append(executor.run(plan).forward_s / tokens)
    executor.settle()
    executor.clear_pages()
    return costs[min(1, len(costs) - 1)]


def _chunks(limits: Limits) -> list[int]:
    """Tokens of each pass: as many as fit the smallest pool, at least one pass of one token."""
    room = limits.page_size * min(limits.pages, limits.table_pages)
    chunk = min(_TOKENS_PER_CHUNK, limits.plan_tokens, (room - 1) // 2)
    return [chunk, chunk, 1] if chunk else [1]


def _plans(limits: Limits, chunks: list[int], epoch: int) -> Iterator[Plan]:
    """One request's plans; its table covers all positions from the first."""
    pages = tuple(range(-(-sum(chunks) // limits.page_size)))
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0, presence_penalty=1.0, logprobs=1)
    digest, start = ZERO, 0
    for number, count in enumerate(chunks):
        tokens = pack_tokens(index % limits.vocab_size for index in range(start, start + count))
        piece = Piece(
            _SLOT, start, tokens, () if number else pages, start, sample=number == len(chunks) - 1
        )
        chain = PlanDigest(digest, number)
        chain.piece(_SLOT, start, tokens, piece.pages, len(pages), start, piece.sample)
        digest = chain.value
        opening = Opening(_SLOT, "warm-up", params, (), sum(chunks))
        yield Plan(epoch, number, () if number else (opening,), (), (piece,), digest)
        start += count
