"""The grammars of running requests on the rank that samples.

    Opening --> compile (a thread) --copy--> matcher of the slot <--accept-- output tokens of each
    piece
                                                     |
                                                     '--> tokens that may come next

A slot's state follows from its grammar and its output tokens alone: pieces bring these in whatever
cuts, and an Opening brings those of a request that comes back. So chunks, retraction and another
grid change nothing. A grammar that cannot go on ends its request (``failure``), never the rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from forebay.core.messages import Opening, unpack_tokens
from forebay.core.sampling import Grammar
from forebay.models.grammar import Allowed, GrammarCompiler, GrammarError, Matcher
from forebay.runtime.mirror import Step, Tokens

# Grammars kept compiled: requests with one schema come in series.
_KEPT = 32


class Compiled:
    """Compiles off the compute loop, each grammar once, the most recently used ones kept."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler = self._thread.submit(load)
        self._kept: OrderedDict[Grammar, Future[Matcher]] = OrderedDict()

    def get(self, grammar: Grammar) -> Future[Matcher]:
        """Resolves to a matcher that must be copied, or to ``GrammarError``."""
        found = self._kept.pop(grammar, None)
        if found is None:
            found = self._thread.submit(lambda: self._compiler.result().compile(grammar))
        self._kept[grammar] = found
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return found


class _Slot:
    def __init__(self, opening: Opening, compiled: Future[Matcher]) -> None:
        self.params = opening.params
        self.eos = opening.eos
        self.prompt_tokens = opening.prompt_tokens
        self.failure = ""
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._untaken: list[int] = []

    def add(self, start: int, tokens: Tokens) -> None:
        """Note the output tokens among those of positions ``start`` on."""
        self._untaken += tokens[max(0, self.prompt_tokens - start) :].tolist()

    def allowed(self) -> Allowed:
        if self._matcher is None:
            self._matcher = self._compiled.result().copy()
        if self._untaken:
            self._matcher.accept(self._untaken)
            self._untaken.clear()
        return self._matcher.allowed(self.eos)


class SlotGrammars:
    """Only slots whose request has a grammar. ``vocab_size``: the width of the logits."""

    def __init__(self, compiled: Compiled, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._slots: dict[int, _Slot] = {}

    def open(self, opening: Opening) -> None:
        self._slots.pop(opening.slot, None)
        grammar = opening.params.grammar
        if grammar is not None:
            slot = self._slots[opening.slot] = _Slot(opening, self._compiled.get(grammar))
            slot.add(0, unpack_tokens(opening.history))

    def add(self, step: Step) -> None:
        """Take the output tokens of one piece; free for a slot without grammar."""
        if slot := self._slots.get(step.slot):
            slot.add(step.start, step.tokens)

    def allowed(self, step: Step) -> Allowed | None:
        """(vocab,): what ``step`` may yield; None where its request has no grammar, or can have no
        token (``failure``).

        Tokens that end the output are left out before ``min_tokens`` and with ``ignore_eos``, as
        long as another may come: the end of the grammar is the end of the text.
        """
        slot = self._slots.get(step.slot)
        if slot is None or slot.failure:
            return None
        try:
            allowed = slot.allowed()
        except GrammarError as error:
            slot.failure = str(error)
            return None
        params = slot.params
        early = step.output_index < params.min_tokens
        ends: Sequence[int] = slot.eos if early or params.ignore_eos else ()
        if early:
            ends = (*ends, *(id for id in params.stop_token_ids if 0 <= id < self._vocab_size))
        if ends:
            further = allowed.copy()
            further[np.array(ends)] = False
            allowed = further if further.any() else allowed
        return allowed

    def failure(self, number: int) -> str:
        """Why a slot's grammar cannot go on; empty while it can."""
        slot = self._slots.get(number)
        return "" if slot is None else slot.failure
