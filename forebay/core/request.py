"""One request in the planner: what it asked for, where it stands, and which pages are its own.

        table:  [ page | page | page | page | page ]    what the workers' mirror holds once `sent` entries were sent
        nodes:  [ node | node | node ]                  pinned, one per full page; the rest of the table is the request's own

A full page whose hash another request's node already has is a *twin* (rule R8): the node is pinned in ``nodes``, but the table
keeps the request's own page until the plan that wrote it has retired; then the entry is remapped to the node's page.

``stops``: tokens that end it; ``last_length``: so does this many, prompt included.
``usage`` is known from its first admission on, and ``unsaid`` until its first token tells it.
``prefilling``: the piece that yields its next token has not been built yet. A decoding request waits for a token
(``awaits_token``) or stands in ``Replica.decodes``. ``fetched``: has had its one ticket; ``ready``: host pages that it brought,
pinned until the request is admitted; ``asked_again``: once more, since the page that its ticket hung on had gone. ``cached``: positions
that its newest admission found computed; ``overtaken``: plans of hits that have gone ahead of its chunks since. ``losses``: of the grid
while ranks worked on it, since its last token; ``suspect``: one was by a rank's fault, so it runs alone; ``faults_alone``: those that
nobody else can have caused.
"""

from dataclasses import dataclass

from forebay.core.lifecycle import Phase, RequestState
from forebay.core.messages import FinishReason, Submit, Usage, unpack_tokens
from forebay.core.spans import SpanKind, TimedSpan, request_number
from forebay.core.tree import Node
from forebay.pages.hashing import TOKEN_BYTES, page_hash


@dataclass(frozen=True, slots=True)
class Twin:
    """Table entry ``index`` holds a page of the request's own, written by ``plan``, that equals its node's page."""

    index: int
    plan: int


class Request:
    """``computed``: positions that built plans have covered. ``packed``: prompt and emitted tokens as uint32-LE."""

    __slots__ = (
        "arrived_at",
        "asked_again",
        "awaits_token",
        "cached",
        "computed",
        "eos",
        "faults_alone",
        "fetched",
        "hashes",
        "last_length",
        "last_plan",
        "losses",
        "no_store",
        "nodes",
        "number",
        "order",
        "overtaken",
        "packed",
        "page_bytes",
        "params",
        "phase",
        "prefilling",
        "probe",
        "prompt_tokens",
        "ready",
        "remaps",
        "request_id",
        "retries",
        "root",
        "sent",
        "slot",
        "state",
        "stops",
        "suspect",
        "table",
        "twins",
        "unsaid",
        "usage",
    )

    def __init__(
        self, submit: Submit, root: bytes, page_size: int, arrival: int, arrived_at: float
    ) -> None:
        self.request_id = submit.request_id
        self.number = request_number(submit.request_id)
        self.params = submit.params
        self.eos = submit.eos
        self.no_store = submit.no_store
        self.packed = bytearray(submit.prompt)
        self.prompt_tokens = len(unpack_tokens(submit.prompt))
        assert submit.params.max_tokens is not None
        self.last_length = self.prompt_tokens + submit.params.max_tokens
        self.stops = frozenset(submit.params.stop_token_ids) | (
            frozenset(submit.eos) if submit.params.ends_at_eos else frozenset()
        )
        self.root = root
        self.page_bytes = page_size * TOKEN_BYTES
        self.arrived_at = arrived_at
        self.order = (-submit.priority, arrival)  # smaller goes first
        self.hashes: list[bytes] = []
        self.state = RequestState.WAITING
        self.usage: Usage | None = None
        self.unsaid: Usage | None = None
        self.phase = Phase.NOT_ASKED
        self.fetched = False
        self.asked_again = False
        self.cleared()
        self.probe = 0  # where the first missing page was when admission last looked
        self.retries = 0
        self.ready: list[Node] = []
        self.reset()

    def reset(self) -> None:
        """As before admission: no slot, no pages, nothing computed. Tokens and page hashes stay."""
        self.slot = -1
        self.last_plan = -1
        self.table: list[int] = []
        self.nodes: list[Node] = []
        self.twins: list[Twin] = []
        self.remaps: list[
            tuple[int, int]
        ] = []  # (table index, page) that the workers have not been told yet
        self.cached = 0
        self.computed = 0
        self.overtaken = 0
        self.sent = 0
        self.prefilling = True
        self.awaits_token = False

    def cleared(self) -> None:
        """Nothing speaks against it: it is new, or has just brought a token."""
        self.suspect = False
        self.losses = 0
        self.faults_alone = 0

    @property
    def length(self) -> int:
        """Tokens known: prompt and emitted."""
        return len(self.packed) // TOKEN_BYTES

    @property
    def emitted(self) -> int:
        return len(self.packed) // TOKEN_BYTES - self.prompt_tokens

    @property
    def scores(self) -> bool:
        """Whether its prompt's tokens are still to be scored: then all of it is computed, whatever is cached."""
        return self.params.prompt_logprobs is not None and not self.emitted

    @property
    def remaining(self) -> int:
        """Known tokens that no plan has covered yet."""
        return self.length - self.computed

    @property
    def own_pages(self) -> list[int]:
        """Pages that only this request owns: past the nodes, and its halves of twins."""
        return self.table[len(self.nodes) :] + [self.table[twin.index] for twin in self.twins]

    def extend_hashes(self) -> list[bytes]:
        """The hash chain over all full pages of the tokens known now."""
        step = self.page_bytes
        for start in range(len(self.hashes) * step, len(self.packed) - step + 1, step):
            parent = self.hashes[-1] if self.hashes else self.root
            self.hashes.append(page_hash(parent, self.packed[start : start + step]))
        return self.hashes

    def queue_span(self, now: float) -> TimedSpan:
        """From arrival to its first admission, ``now``."""
        return TimedSpan(
            SpanKind.QUEUE, self.arrived_at, now, value=self.computed, request=self.number
        )

    def prefill_span(self, now: float, plan: int) -> TimedSpan:
        """From first admission to the first token, which ``plan`` has yielded."""
        assert self.usage is not None
        cached = self.usage.cached_device + self.usage.cached_host + self.usage.cached_store
        admitted_at = self.arrived_at + self.usage.queue_s
        return TimedSpan(
            SpanKind.PREFILL,
            admitted_at,
            now,
            plan,
            self.prompt_tokens - cached,
            request=self.number,
        )

    def tokens(self, start: int, stop: int) -> bytes:
        """Packed tokens of positions ``start`` to ``stop``."""
        return bytes(self.packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])

    def accept(self, token: int, max_context: int) -> FinishReason | None:
        """Take the token that its last plan sampled; says whether it is the last one, and why."""
        assert self.awaits_token
        self.awaits_token = False
        if self.losses:
            self.cleared()
        self.packed += token.to_bytes(TOKEN_BYTES, "little")
        if token in self.stops:
            return FinishReason.STOP
        length = len(self.packed) // TOKEN_BYTES
        if length >= self.last_length or length >= max_context:
            return FinishReason.LENGTH
        return None
