"""What a worker knows of the requests it runs: slots and page tables, kept equal to the planner's by applying its plans.

    slot     0        1        2   ...  max_running - 1
    params   set by the Opening that takes the slot, which clears it first; a slot is never closed, only taken again
    length   positions run so far = where the next piece must start
    outputs  tokens emitted so far = the index of the next one
    table    [page page page ....)  grows by the pieces' pages; entries change only by remaps

A worker decides nothing, so a plan that does not fit is the planner's bug or damage on the way: `apply` raises `PlanError`, and
the worker ends; the mirror is not usable after that. The digest is computed from the tables as they stand after each step
(rule R2), so a page that was missed, doubled or put elsewhere shows at that plan. Applying costs O(what the plan brings).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.core.digest import ZERO, PlanDigest
from forebay.core.messages import MessageError, Opening, Piece, Plan, Remap, unpack_tokens
from forebay.core.sampling import SamplingParams

Tokens = npt.NDArray[np.uint32]


class PlanError(Exception):
    """A plan that cannot be applied to this mirror, or leaves it with another digest than the planner's. One line."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What no plan may exceed. ``table_pages``: entries of one slot's page table."""

    slots: int
    pages: int
    page_size: int
    table_pages: int
    plan_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Step:
    """One piece, ready to run: ``tokens`` (T,) uint32 at positions ``start`` on.

    ``output_index``: which of its request's output tokens the piece yields, if it samples. ``score``: how many alternatives are
    wanted beside each token's own log-probability, where the piece is of a prompt that is scored.
    """

    slot: int
    start: int
    tokens: Tokens
    write_from: int
    sample: bool
    output_index: int
    score: int | None = None

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class Mirror:
    """``tables``: (slots, table_pages) int64, row = slot; entries from ``table_lengths[slot]`` on mean nothing."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.tables: npt.NDArray[np.int64] = np.zeros((limits.slots, limits.table_pages), np.int64)
        self.table_lengths = [0] * limits.slots
        self.params: list[SamplingParams | None] = [None] * limits.slots
        self.lengths = [0] * limits.slots
        self.outputs = [0] * limits.slots
        self.digest = ZERO
        self.last_plan = -1

    def apply(self, plan: Plan) -> list[Step]:
        """Openings, remaps, pieces; then the digest is compared with the planner's. Returns one `Step` per piece, in order.

        Raises ``PlanError`` if anything does not fit; nothing of the plan may run then.
        """
        if plan.number <= self.last_plan:
            raise PlanError(f"plan {plan.number} came after plan {self.last_plan}")
        digest = PlanDigest(self.digest, plan.number)
        try:
            opened = {self._open(opening) for opening in plan.openings}
            for remap in plan.remaps:
                self._remap(remap, digest)
            steps = [self._piece(piece, piece.slot in opened, digest) for piece in plan.pieces]
            self._check_whole(plan, opened, steps)
        except (PlanError, MessageError) as error:
            raise PlanError(f"plan {plan.number} cannot be applied: {error}") from error
        if digest.value != plan.digest:
            raise PlanError(
                f"plan {plan.number} is the first to differ from the planner's: "
                f"digest {digest.value.hex()} here, {plan.digest.hex()} there"
            )
        self.digest, self.last_plan = plan.digest, plan.number
        return steps

    def table(self, slot: int) -> npt.NDArray[np.int64]:
        """The slot's page table as a view, shape (pages,)."""
        return self.tables[slot, : self.table_lengths[slot]]

    def _open(self, opening: Opening) -> int:
        slot = self._slot(opening.slot)
        self.params[slot] = opening.params
        self.table_lengths[slot] = 0
        self.lengths[slot] = 0
        self.outputs[slot] = opening.outputs
        return slot

    def _remap(self, remap: Remap, digest: PlanDigest) -> None:
        slot = self._open_slot(remap.slot)
        if not 0 <= remap.index < self.table_lengths[slot]:
            raise PlanError(
                f"remap of entry {remap.index}; slot {slot} has {self.table_lengths[slot]} pages"
            )
        self.tables[slot, remap.index] = self._page(remap.page)
        digest.remap(slot, remap.index, int(self.tables[slot, remap.index]))

    def _piece(self, piece: Piece, first: bool, digest: PlanDigest) -> Step:
        slot = self._open_slot(piece.slot)
        tokens = self._tokens(piece.tokens)
        # The first piece starts where the cached prefix ends; its pages cover the prefix, which this slot never ran.
        if not first and piece.start != self.lengths[slot]:
            raise PlanError(
                f"slot {slot} goes on at {piece.start}; it has run {self.lengths[slot]} positions"
            )
        stop = piece.start + len(tokens)
        before = self._append(slot, piece.pages, stop)
        if piece.start < 0 or not 0 <= piece.write_from <= stop:
            raise PlanError(
                f"slot {slot} writes from {piece.write_from}; it runs positions {piece.start} to {stop}"
            )
        appended = self.table(slot)[before:].tolist()
        digest.piece(
            slot,
            piece.start,
            piece.tokens,
            appended,
            self.table_lengths[slot],
            piece.write_from,
            piece.sample,
        )
        output_index = self.outputs[slot]
        self.outputs[slot] += piece.sample
        self.lengths[slot] = stop
        params = self.params[slot]
        score = params.prompt_logprobs if params is not None and not output_index else None
        return Step(slot, piece.start, tokens, piece.write_from, piece.sample, output_index, score)

    def _append(self, slot: int, pages: tuple[int, ...], stop: int) -> int:
        """Add pages to a table so that it covers ``stop`` positions; returns its length before."""
        before = self.table_lengths[slot]
        after = before + len(pages)
        if after > self.limits.table_pages:
            raise PlanError(
                f"slot {slot} would have {after} pages; at most {self.limits.table_pages} are allowed"
            )
        if after * self.limits.page_size < stop:
            raise PlanError(
                f"slot {slot} has {after} pages of {self.limits.page_size} for {stop} positions"
            )
        for offset, page in enumerate(pages):
            self.tables[slot, before + offset] = self._page(page)
        self.table_lengths[slot] = after
        return before

    def _check_whole(self, plan: Plan, opened: set[int], steps: list[Step]) -> None:
        ran = {step.slot for step in steps}
        if not steps or len(ran) < len(steps):
            raise PlanError(
                f"{len(steps)} pieces for {len(ran)} slots; at least one piece, and one per slot, is allowed"
            )
        if len(opened) < len(plan.openings) or not opened <= ran:
            raise PlanError("an opened slot is opened twice or has no piece")
        total = sum(len(step.tokens) for step in steps)
        if total > self.limits.plan_tokens:
            raise PlanError(f"{total} tokens; at most {self.limits.plan_tokens} are allowed")

    def _tokens(self, packed: bytes) -> Tokens:
        tokens = unpack_tokens(packed)
        if not len(tokens) or int(tokens.max()) >= self.limits.vocab_size:
            largest = int(tokens.max()) if len(tokens) else "none"
            raise PlanError(
                f"largest token is {largest}; ids below {self.limits.vocab_size} are allowed, at least one"
            )
        return tokens

    def _page(self, page: int) -> int:
        if not 0 <= page < self.limits.pages:
            raise PlanError(f"page {page}; pages 0 to {self.limits.pages - 1} exist")
        return page

    def _open_slot(self, slot: int) -> int:
        if self.params[self._slot(slot)] is None:
            raise PlanError(f"slot {slot} was never opened")
        return slot

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.limits.slots:
            raise PlanError(f"slot {slot}; slots 0 to {self.limits.slots - 1} exist")
        return slot
